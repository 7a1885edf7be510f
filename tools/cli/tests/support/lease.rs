//! A pool of huge pages, and a daemon that lends them.

#[path = "../../../../services/lease/tests/support/judged.rs"]
pub(crate) mod judged;

use super::{Scratch, hugemm};
use hugemm_base::PageSize;
use hugemm_inspect::pool::{HugetlbPool, PoolGuard};
pub(crate) use judged::judged;
use judged::turn;
use std::fs::File;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Pages of pools that hosts have: none, just as many as a bench wants, and more.
pub(crate) const POOLS: [u64; 3] = [0, 64, 1000];

/// The kernel's pool with that many free pages, for one test at a time; `None`, and a line, where they are not to be had.
pub(crate) fn pool(pages: u64) -> Option<(PoolGuard, File)> {
    let lock = turn();
    match HugetlbPool::new().ensure(PageSize::Size2M, pages, None) {
        Ok(more) => Some((more, lock)),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

/// Runs a test that needs as many. It is judged where nobody else changes the pool.
pub(crate) fn with_pool(pages: u64, test: impl FnOnce()) {
    judged(|| {
        if let Some(_pool) = pool(pages) {
            test();
        }
    });
}

/// A daemon, ended when dropped.
pub(crate) struct Daemon {
    pub(crate) child: Child,
    pub(crate) scratch: Scratch,
}

impl Daemon {
    /// One with a file of so many MiB ready.
    pub(crate) fn start(name: &str, megabytes: u64, options: &[&str]) -> Self {
        Self::with_files(name, &[megabytes], options)
    }

    /// One with files of so many MiB each ready.
    pub(crate) fn with_files(name: &str, megabytes: &[u64], options: &[&str]) -> Self {
        let scratch = Scratch::new(name);
        let shapes: Vec<_> = megabytes.iter().map(|size| format!("{size}MB")).collect();
        let size = format!("{}MB", megabytes.iter().sum::<u64>());
        let child = Command::new(env!("CARGO_BIN_EXE_hugemm"))
            .args(["pool", "serve", "--size", &size, "--shape", &shapes.join(",")])
            .args(["--socket", &scratch.path("socket"), "--metrics", &scratch.path("metrics")])
            .args(options)
            .stdout(Stdio::null())
            .spawn()
            .expect("a daemon");
        let daemon = Daemon { child, scratch };
        daemon.wait_until_filled();
        daemon
    }

    /// One of transparent pages; `None`, and a line, where shared memory has none.
    pub(crate) fn transparent(name: &str, megabytes: &[u64]) -> Option<Self> {
        let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
        if enabled.is_empty() || ["[never]", "[deny]"].iter().any(|word| enabled.contains(word)) {
            eprintln!("skipped: shared memory has no huge pages (shmem_enabled)");
            return None;
        }
        Some(Self::with_files(name, megabytes, &["--page", "thp"]))
    }

    /// Waits until nothing is lent, and all is ready.
    #[track_caller]
    pub(crate) fn wait_until_filled(&self) {
        self.wait_for("\"leases\":[]");
        let words = ["pool", "status", "--wait", "60", "--socket", &self.scratch.path("socket")];
        let output = hugemm(&words);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    /// Waits until the status has this in it.
    #[track_caller]
    pub(crate) fn wait_for(&self, what: &str) {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            let output = hugemm(&["pool", "status", "--json", "--socket", &self.scratch.path("socket")]);
            let said = String::from_utf8_lossy(&output.stdout);
            if said.contains(what) {
                return;
            }
            assert!(Instant::now() < end, "never {what}: {said}");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
