//! The CPU time of reclaim, by the kernel's own events: all of `kswapd`'s, and of others between the begin and the end of
//! direct reclaim, while they run.

use anyhow::{Context, Result, bail};
use rustix::mount::{MountFlags, mount};
use std::collections::{HashMap, HashSet};
use std::ffi::CStr;
use std::fs;

const AT: &str = "/sys/kernel/tracing";
const SWITCH: &str = ": sched_switch: ";
const BEGIN: &str = ": mm_vmscan_direct_reclaim_begin: ";
const END: &str = ": mm_vmscan_direct_reclaim_end: ";

/// Events are recorded.
pub struct Tracing(());

impl Tracing {
    /// Makes everything ready; nothing is recorded yet.
    pub fn new() -> Result<Self> {
        mount("tracefs", AT, "tracefs", MountFlags::empty(), None::<&CStr>).context("cannot mount tracefs")?;
        write("tracing_on", "0")?;
        write("buffer_size_kb", "8192")?;
        for event in [SWITCH, BEGIN, END] {
            let group = if event == SWITCH { "sched" } else { "vmscan" };
            write(&format!("events/{group}/{}/enable", event.trim_matches([':', ' '])), "1")?;
        }
        Ok(Tracing(()))
    }

    /// Forgets what was recorded and begins anew.
    pub fn start(&self) -> Result<()> {
        write("trace", "")?;
        write("tracing_on", "1")
    }

    /// Nanoseconds of reclaim since the start, on all CPUs.
    pub fn stop(&self) -> Result<u64> {
        write("tracing_on", "0")?;
        let text = fs::read_to_string(format!("{AT}/trace")).context("cannot read what was recorded")?;
        reclaim_ns(&text)
    }
}

fn write(name: &str, value: &str) -> Result<()> {
    fs::write(format!("{AT}/{name}"), value).with_context(|| format!("cannot write to tracefs' {name}"))
}

/// The time of reclaim in a trace: lines of `comm-pid [cpu] flags seconds: event: fields`, in the order of time.
fn reclaim_ns(trace: &str) -> Result<u64> {
    let written = trace.lines().find_map(|line| line.strip_prefix("# entries-in-buffer/entries-written: "));
    if let Some((kept, all)) = written.and_then(|line| line.split_whitespace().next()?.split_once('/'))
        && kept != all
    {
        bail!("only {kept} of {all} events were kept; use fewer --seconds");
    }
    let mut total = 0;
    // Since when each CPU runs what it runs, and who reclaims.
    let (mut since, mut reclaiming) = (HashMap::new(), HashSet::new());
    for line in trace.lines().filter(|line| !line.starts_with('#')) {
        let Some(name) = [SWITCH, BEGIN, END].into_iter().find(|name| line.contains(name)) else { continue };
        let (head, fields) = line.split_once(name).context("an event has no name")?;
        let (task, rest) = head.rsplit_once('[').with_context(|| format!("an event without a CPU: {line}"))?;
        let cpu = rest.split(']').next().unwrap_or_default().to_owned();
        let now = nanos(rest.split_whitespace().last().unwrap_or_default())
            .with_context(|| format!("an event without a time: {line}"))?;
        let (comm, pid) = task.trim().rsplit_once('-').with_context(|| format!("an event without a task: {line}"))?;
        let before = since.insert(cpu, now);
        if comm.starts_with("kswapd") || reclaiming.contains(pid) {
            total += before.map_or(0, |before| now.saturating_sub(before));
        }
        match name {
            BEGIN => drop(reclaiming.insert(pid.to_owned())),
            END => drop(reclaiming.remove(pid)),
            _ if !fields.contains("next_pid=") => bail!("a switch to nobody: {line}"),
            _ => {}
        }
    }
    Ok(total)
}

/// Nanoseconds of `seconds.fraction`.
fn nanos(text: &str) -> Option<u64> {
    let (seconds, fraction) = text.split_once('.')?;
    let digits = u32::try_from(fraction.len()).ok().filter(|digits| *digits <= 9)?;
    Some(seconds.parse::<u64>().ok()? * 1_000_000_000 + fraction.parse::<u64>().ok()? * 10_u64.pow(9 - digits))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "\
# entries-in-buffer/entries-written: 8/8   #P:2
            init-70      [000] .....     1.000010: mm_vmscan_direct_reclaim_begin: order=0 gfp_flags=GFP_KERNEL
            init-70      [000] d..2.     1.000030: sched_switch: prev_comm=init prev_pid=70 ==> next_comm=a-b [x] next_pid=71
         a-b [x]-71      [000] d..2.     1.000090: sched_switch: prev_comm=a-b [x] prev_pid=71 ==> next_comm=init next_pid=70
         kswapd0-39      [001] d..2.     1.000095: sched_switch: prev_comm=kswapd0 prev_pid=39 ==> next_comm=swapper/1 next_pid=0
            init-70      [000] .....     1.000097: mm_vmscan_direct_reclaim_end: nr_reclaimed=32
          <idle>-0       [001] d..2.     1.000100: sched_switch: prev_comm=swapper/1 prev_pid=0 ==> next_comm=kswapd0 next_pid=39
         kswapd0-39      [001] d..2.     1.000105: sched_switch: prev_comm=kswapd0 prev_pid=39 ==> next_comm=swapper/1 next_pid=0
            init-70      [000] d..2.     1.000200: sched_switch: prev_comm=init prev_pid=70 ==> next_comm=init next_pid=72
";

    /// 20 µs until it is taken off the CPU, 7 after it is back, 5 of the worker's; not the worker's before the first event.
    #[test]
    fn only_reclaim_that_runs_counts() {
        assert_eq!(reclaim_ns(TRACE).expect("a trace"), 32_000);
        assert!(reclaim_ns(&TRACE.replace("8/8", "8/9")).is_err(), "events were lost");
        assert_eq!(nanos("12.345678"), Some(12_345_678_000));
    }
}
