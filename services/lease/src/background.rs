//! A thread that gives way: idle priority, chosen CPUs, memory from one node.

use rustix::io::Errno;
use rustix::thread::CpuSet;
use std::time::Duration;

/// Makes the calling thread one that runs only where nobody else wants the CPU. Its children and other threads are not changed.
///
/// # Errors
///
/// The kernel's.
pub fn idle_priority() -> Result<(), Errno> {
    schedule(libc::SCHED_IDLE)
}

/// Runs a little at normal priority, and goes back to idle: for what others wait for once it is begun. Without the right to
/// (RLIMIT_NICE) it runs as it is.
pub fn hurried<R>(run: impl FnOnce() -> R) -> R {
    let is_changed = schedule(libc::SCHED_OTHER).is_ok();
    let result = run();
    if is_changed {
        // Needs no right.
        let _ = idle_priority();
    }
    result
}

fn schedule(policy: libc::c_int) -> Result<(), Errno> {
    // SAFETY: zero is a value of every field, and the right one.
    let parameter: libc::sched_param = unsafe { std::mem::zeroed() };
    // By number: the function of musl, for static builds, only says that there is none.
    // SAFETY: thread 0 is the caller; the parameter outlives the call.
    answer(unsafe { libc::syscall(libc::SYS_sched_setscheduler, 0, policy, &raw const parameter) })
}

/// Keeps the calling thread on the CPUs.
///
/// # Errors
///
/// `INVAL` if none of them is to be had.
pub fn run_on(cpus: &[usize]) -> Result<(), Errno> {
    let mut set = CpuSet::new();
    cpus.iter().filter(|&&cpu| cpu < CpuSet::MAX_CPU).for_each(|&cpu| set.set(cpu));
    rustix::thread::sched_setaffinity(None, &set)
}

/// Takes all memory that the calling thread makes the kernel find from one node, or not at all.
///
/// # Errors
///
/// `INVAL` if there is no such node.
pub fn memory_from(node: u32) -> Result<(), Errno> {
    const BITS: usize = 1024;
    let mut mask = [0u64; BITS / 64];
    let word = mask.get_mut(node as usize / 64).ok_or(Errno::INVAL)?;
    *word = 1 << (node % 64);
    // The kernel looks at one bit less than it is told.
    // SAFETY: the mask outlives the call and has that many bits, and a spare one.
    answer(unsafe { libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_BIND, mask.as_ptr(), BITS) })
}

/// CPU time that the calling thread has used.
pub fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

fn answer(answer: libc::c_long) -> Result<(), Errno> {
    if answer < 0 { Err(crate::seccomp::last_error()) } else { Ok(()) }
}

/// Makes the calling thread, of root, another user's that may make no thread, as under RLIMIT_NPROC or TasksMax.
#[cfg(test)]
pub(crate) fn may_make_no_thread(user: u32) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    // It holds for no thread of root, as the others are.
    setrlimit(Resource::Nproc, Rlimit { current: Some(0), ..getrlimit(Resource::Nproc) }).expect("less than before");
    // SAFETY: the calls themselves, which change this thread alone.
    unsafe {
        assert_eq!(libc::syscall(libc::SYS_setresgid, user, user, user), 0);
        assert_eq!(libc::syscall(libc::SYS_setresuid, user, user, user), 0);
    }
    assert!(std::thread::Builder::new().spawn(|| ()).is_err(), "no thread");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_hurries_is_idle_again() {
        // SAFETY: asks about the calling thread.
        let policy = || unsafe { libc::syscall(libc::SYS_sched_getscheduler, 0) } as libc::c_int;
        let seen = std::thread::spawn(move || {
            idle_priority().expect("no right is needed");
            let may = schedule(libc::SCHED_OTHER).is_ok() && idle_priority().is_ok();
            (may, hurried(policy), policy())
        });
        let (may, inside, after) = seen.join().expect("no panic");
        assert_eq!((inside, after), (if may { libc::SCHED_OTHER } else { libc::SCHED_IDLE }, libc::SCHED_IDLE));
    }
}
