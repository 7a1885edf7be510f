//! All that is looked at, gathered once: the judging is in `checks` and needs no machine.

use crate::arch::Arch;
use crate::qemu;
use anyhow::Result;
use hugemm_clear::{Features, PrimitiveClass};
use hugemm_inspect::environment::Environment;
use hugemm_inspect::limits::{Bound, Limits};
use hugemm_inspect::roots::Roots;
use rustix::fs::{Access, access};
use std::process::Command;

pub struct Facts {
    pub environment: Environment,
    /// Bytes that may be taken, and what bounds them.
    pub takeable: (u64, Bound),
    /// Page sizes whose pool this process may resize.
    pub pools_writable: Vec<u64>,
    pub root: bool,
    /// Clearing primitives by name, and whether each writes past the cache.
    pub primitives: Vec<(&'static str, bool)>,
    /// The first line of QEMU's version, if it is installed.
    pub qemu: Option<String>,
    /// Whether /dev/kvm can be opened, or why not.
    pub kvm: Result<(), String>,
}

impl Facts {
    /// Looks at the running machine. Starts a small program; takes a fraction of a second.
    pub fn read() -> Result<Self> {
        let environment = Environment::read()?;
        let roots = Roots::default();
        let pools = environment.hugetlb_pools.iter().map(|pool| pool.page_bytes);
        let writable = |bytes: &u64| {
            let file = roots.sys.join(format!("kernel/mm/hugepages/hugepages-{}kB/nr_hugepages", bytes >> 10));
            access(file, Access::WRITE_OK).is_ok()
        };
        let pools_writable = pools.filter(writable).collect();
        let streaming = |class| class == PrimitiveClass::Streaming;
        Ok(Facts {
            takeable: Limits::read()?.takeable(),
            pools_writable,
            root: rustix::process::geteuid().is_root(),
            primitives: Features::detect().iter().map(|p| (p.name(), streaming(p.class()))).collect(),
            qemu: first_line(Arch::NATIVE.qemu().0),
            kvm: qemu::kvm_usable().map_err(|error| error.to_string()),
            environment,
        })
    }
}

/// The first line that a program prints as its version; none if it cannot be run.
fn first_line(program: &str) -> Option<String> {
    let output = Command::new(program).arg("--version").output().ok().filter(|output| output.status.success())?;
    String::from_utf8_lossy(&output.stdout).lines().next().map(str::to_owned)
}
