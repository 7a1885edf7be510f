//! Ctrl-C in the middle of a measurement: memory and hugetlb pool are given back. Guests that a signal ends did not break.

use crate::support::Scratch;
use crate::support::lease::{POOLS, with_pool};
use hugemm_base::PageSize;
use hugemm_inspect::pool::{HugetlbPool, PoolStatus};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn pool() -> Option<PoolStatus> {
    HugetlbPool::new().status(PageSize::Size2M, None).ok()
}

/// Waits until `done` or for `patience` at most.
fn wait_until(patience: Duration, done: impl Fn() -> bool) {
    let start = Instant::now();
    while start.elapsed() < patience && !done() {
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn the_pool_is_put_back_on_interrupt() {
    for pages in POOLS {
        with_pool(pages, interrupted);
    }
}

/// A command that has to raise the pool, or finds what it wants there.
fn interrupted() {
    let before = pool();
    let mut command = Command::new(env!("CARGO_BIN_EXE_hugemm"));
    command.args(["bench", "vm-create", "-s", "128MB", "-r", "1000"]).stdout(Stdio::null()).stderr(Stdio::piped());
    // Tests that run in the background of a script inherit an ignored SIGINT, which the command respects.
    // SAFETY: between fork and exec only `signal` is called, which is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            Ok(())
        })
    };
    let mut child = command.spawn().expect("the command starts");
    // Raised, or taken from. Without the right to raise the pool the command runs on transparent huge pages, and there is nothing to wait
    // for.
    wait_until(Duration::from_secs(3), || pool() != before);
    std::thread::sleep(Duration::from_millis(300));
    let pid = i32::try_from(child.id()).expect("a pid");
    // SAFETY: kill has no memory effects; the child has not been waited for, so the pid is its own.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGINT) }, 0);
    let status = child.wait().expect("it ends");
    let mut err = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().expect("piped"), &mut err).expect("utf-8");
    assert_eq!(status.code(), Some(130), "{err}");
    assert!(err.contains("interrupted"), "{err}");
    assert_eq!(pool(), before, "the pool was not put back");
}

/// A terminal's Ctrl-C, and a service manager's SIGTERM, reach QEMU too, which then ends as if its guest had reset. A script
/// stands for it: the signal and the end come right after each other.
#[test]
fn a_signal_that_ends_the_guest_is_the_reason() {
    let scratch = Scratch::new("interrupt");
    let qemu = scratch.put("qemu-system-x86_64", "#!/bin/sh\n[ \"$1\" = --version ] || kill -TERM $PPID\n");
    std::fs::set_permissions(&qemu, std::fs::Permissions::from_mode(0o755)).expect("executable");
    let hugemm = env!("CARGO_BIN_EXE_hugemm");
    let boot = ["boot", "--accel", "tcg", "--memory", "64MB", "--cpus", "1", "--image", hugemm, "--", "selftest"];
    let output = Command::new(hugemm).args(boot).env("PATH", scratch.path("")).output().expect("the command starts");
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(143), "{err}");
    assert!(err.contains("interrupted by SIGTERM") && !err.contains("reset"), "{err}");
}
