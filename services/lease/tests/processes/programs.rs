//! Programs that make it difficult: that move the descriptor meanwhile, have filters and listeners, start others, call as of old.

use crate::roles::DONE;
use crate::served::{PROGRAM, SUPERVISOR, Served, rest};
use crate::support::Pool;
use crate::tracer::{Then, trace};
use crate::{LEASE, goes_on};
use rustix::io::Errno;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::process::Stdio;

const RECEIVE: u64 = 0xc050_2100;
const SEND: u64 = 0xc018_2101;
const ADD_FD: u64 = 0x4018_2103;

/// A daemon in a container has no number for a client outside, and serves it.
pub(crate) fn a_daemon_of_another_process_namespace(_: &Pool) {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root makes process namespaces");
        return;
    }
    let daemon = Served::start_by(&["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    assert!(daemon.said("plain").starts_with("leased "));
    // Its process is waited for, though it has no number (Linux 6.5); at least its connection is.
    daemon.wait_until_idle();
}

/// The program's other thread closes or reuses the descriptor at each point at which the supervisor looks at it.
pub(crate) fn a_descriptor_changes(_: &Pool, how: &str) {
    let daemon = Served::start();
    for number in 0.. {
        goes_on();
        daemon.wait_until_idle();
        let mut command = daemon.client(how);
        let (read, mut write) = std::io::pipe().expect("a pipe");
        command.stdin(Stdio::from(OwnedFd::from(read)));
        // Calls of the supervisor since it has taken the program's.
        let (mut since, mut at, mut puts) = (None, None, 0);
        let output = trace(&mut command, |stop| {
            let ioctl = (stop.call == libc::SYS_ioctl).then_some(stop.second);
            match (stop.process, ioctl) {
                (SUPERVISOR, Some(RECEIVE)) => since = Some(0),
                (SUPERVISOR, _) if since == Some(number) && at.is_none() => {
                    at = Some(ioctl);
                    write.write_all(b"x").expect("told");
                    return Then::Hold;
                }
                (SUPERVISOR, _) => {
                    since = since.map(|n| n + 1);
                    puts += usize::from(ioctl == Some(ADD_FD) && at.is_none());
                }
                (PROGRAM, _) if stop.call == DONE => return Then::Release,
                _ => {}
            }
            Then::Go
        });
        let (said, at) = (rest(output), at.expect("the supervisor makes calls"));
        match at {
            // Here the call is answered, whatever happened.
            Some(SEND) => {
                assert!(number > 5, "{number}: {said}");
                return;
            }
            // Between a look and this the supervisor makes no other call; a moment is left that no call can close.
            Some(ADD_FD) => {}
            // The leased file is there. The program's own doing, after its call was as good as answered.
            _ if puts > 1 => {}
            _ if how == "close" => {
                assert_eq!(
                    said,
                    format!("{0}, {0}, {0}\n", Errno::BADF),
                    "closed before call {number}: not opened again"
                );
            }
            // The call goes to the other file, as it would have without a lease.
            _ => assert_eq!(said, format!("0, {LEASE}, 0\n"), "reused before call {number}: not replaced"),
        }
    }
}

pub(crate) fn programs_of_all_kinds(_: &Pool) {
    let daemon = Served::start();
    for (role, expected) in [
        ("plain", "leased"),
        // What it starts has the filter, too.
        ("child", "leased"),
        ("filtered", "leased"),
        // A child's end that nobody is told of.
        ("ignores", "leased"),
        // Linux allows one listener: the one that is there stays, and the program runs without a lease.
        ("listened", "taken\nplain"),
        ("listens", "Err(Taken)\nleased"),
        #[cfg(target_arch = "x86_64")]
        ("int80", "plain"),
        // Whoever else can reach the file has the same memory.
        ("dup", "one"),
        ("fork", "one"),
        ("reopen", "one"),
        ("send", "one"),
        ("required", "failed: "),
    ] {
        daemon.wait_until_idle();
        let said = daemon.said(role);
        assert!(said.starts_with(expected), "{role}: {said}");
    }
}

/// Where no filter can be had the daemon has its memory back, however long the program runs without it.
pub(crate) fn a_lease_without_a_filter_is_over(_: &Pool) {
    let daemon = Served::start();
    let mut program = daemon.client("listened").stdin(Stdio::piped()).spawn().expect("started");
    let said = BufReader::new(program.stdout.take().expect("piped")).lines().next();
    assert_eq!(said.expect("it says something").expect("text"), "taken");
    let leases = daemon.status().expect("a status").leases;
    assert!(program.try_wait().expect("a child").is_none(), "it runs, and waits for its input");
    assert_eq!(leases.len(), 0, "{leases:?}");
    drop(program.stdin.take());
    program.wait().expect("ended");
}
