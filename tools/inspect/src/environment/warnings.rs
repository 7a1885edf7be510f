//! What makes measurements on a machine noisy or special.

use super::Environment;
use crate::roots::Human;

impl Environment {
    /// What makes measurements on this machine noisy or special, one line each: the fact, then what it does or what
    /// helps. Empty on a quiet machine of one's own.
    pub fn warnings(&self) -> Vec<String> {
        let mut out = Vec::new();
        let mut warn = |line: String| out.push(line);
        let cpus = self.cpu.allowed_cpus.len().max(1);
        if let Some([load, ..]) = self.load_average {
            // One run of our own makes a load of about one, and the average lags by a minute.
            if load >= 0.5 * cpus as f64 || (cpus > 2 && load >= 1.5) {
                warn(format!(
                    "load average is {load:.2} on {cpus} CPUs: other programs run; stop them or expect spread"
                ));
            }
        }
        if self.virtualization.hypervisor {
            let product = self.virtualization.product.as_deref().map(|p| format!(" ({p})")).unwrap_or_default();
            warn(format!(
                "this is a virtual machine{product}: first touches pay the hypervisor's faults, CPUs may be shared, \
                 and CPUID may misstate caches"
            ));
        }
        match self.frequency.governor.as_deref() {
            None | Some("performance") => {}
            Some(governor) => warn(format!(
                "CPU frequency governor is {governor}: clocks ramp during a run; run `sudo cpupower frequency-set -g \
                 performance`"
            )),
        }
        if self.frequency.boost == Some(true) {
            warn("CPU frequency boost is on: short runs are faster than long ones".to_owned());
        }
        if self.cpu.cores < cpus {
            warn(format!(
                "{cpus} CPUs are hyperthreads of {} cores: threads beyond one per core share caches and store buffers",
                self.cpu.cores
            ));
        }
        if cpus < self.cpu.online_cpus {
            warn(format!("this process may use {cpus} of {} CPUs (affinity or cpuset)", self.cpu.online_cpus));
        }
        if let Some(quota) = self.cpu_quota_cpus.filter(|&quota| quota < cpus as f64) {
            warn(format!("a cgroup allows {quota:.2} of {cpus} CPUs: runs are stopped now and then; raise cpu.max"));
        }
        if self.kernel.numa_balancing == Some(true) && self.numa_nodes.len() > 1 {
            warn("NUMA balancing is on: pages move during a run; run `sudo sysctl kernel.numa_balancing=0`".to_owned());
        }
        match (&self.transparent_huge_pages.enabled, &self.transparent_huge_pages.enabled_2m) {
            (Some(all), own) => {
                let deciding = own.as_deref().filter(|own| *own != "inherit").unwrap_or(all);
                if deciding == "never" {
                    warn(
                        "transparent huge pages are off: run `echo madvise | sudo tee \
                         /sys/kernel/mm/transparent_hugepage/enabled`"
                            .to_owned(),
                    );
                }
            }
            (None, _) => {
                warn("this kernel has no transparent huge pages: only hugetlb pools give huge pages".to_owned())
            }
        }
        if self.transparent_huge_pages.off_for_process {
            warn("transparent huge pages are off for this process (prctl, inherited from its parent)".to_owned());
        }
        if let Some(used) = self.memory.swap_used_bytes.filter(|&used| used > 64 << 20) {
            warn(format!("{} are swapped out: memory is or was short", Human(used)));
        }
        if let (Some(takeable), Some(total)) = (self.memory.takeable_bytes, self.memory.total_bytes)
            && takeable < total / 4
        {
            warn(format!("only {} of {} may be taken: large sizes are left out", Human(takeable), Human(total)));
        }
        for region in &self.regions {
            if region.huge_share > 0.0 && region.huge_share < 1.0 {
                // Rounded down: a share that is not whole never reads as whole.
                let percent = (region.huge_share * 1000.0).floor() / 10.0;
                warn(format!("region {}: only {percent} % of it is in huge pages", region.label));
            }
        }
        out
    }
}
