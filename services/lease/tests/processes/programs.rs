//! Programs that make it difficult: that move the descriptor meanwhile, have filters and listeners, start others, call as of old.

use crate::roles::{DONE, UP_TO};
use crate::served::{PROGRAM, SUPERVISOR, Served, rest};
use crate::support::{PAGE, Pool, wait_for};
use crate::tracer::{Then, trace};
use crate::{LEASE, goes_on};
use hugemm_lease::client::Connection;
use hugemm_lease::wire::Request;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::Mutex;
use std::time::{Duration, Instant};

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
pub(crate) fn a_descriptor_changes(_: &Pool, role: &str) {
    let daemon = Served::start();
    let how = role.strip_prefix(UP_TO).unwrap_or(role);
    for number in 0.. {
        goes_on();
        daemon.wait_until_idle();
        let mut command = daemon.client(role);
        let (read, mut write) = std::io::pipe().expect("a pipe");
        command.stdin(Stdio::from(OwnedFd::from(read)));
        // Calls of the supervisor since it has taken the program's.
        let (mut since, mut at, mut puts) = (None, None, 0);
        let output = trace(&mut command, |stop| {
            let ioctl = (stop.call == libc::SYS_ioctl).then_some(stop.second);
            match (stop.process, ioctl) {
                // Another thread of it asks the daemon.
                (SUPERVISOR, _) if !stop.is_first => {}
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

/// Roles, and what begins what each of them says.
const KINDS: &[(&str, &str)] = &[
    ("plain", "leased"),
    ("allocates", "leased"),
    ("up-to-plain", "leased"),
    ("up-to-allocates", "leased"),
    ("up-to-child", "leased"),
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
    // A copy of it would have half of what its other thread does.
    (
        "threads",
        "not attached: cannot start the lease's supervisor: this process has several threads; attach first\nplain",
    ),
    ("joined", "leased"),
    // Its first thread has ended, and has no descriptors.
    ("headless", "leased"),
    // Whoever else can reach the file has the same memory.
    ("dup", "one"),
    ("fork", "one"),
    ("reopen", "one"),
    ("send", "one"),
    ("required", "failed: "),
    ("up-to-dup", "one"),
    ("up-to-fork", "one"),
    ("up-to-reopen", "one"),
    ("up-to-send", "one"),
    ("up-to-required", "failed: "),
];

pub(crate) fn programs_of_all_kinds(_: &Pool) {
    let daemon = Served::start();
    for (role, expected) in KINDS {
        daemon.wait_until_idle();
        let said = daemon.said(role);
        assert!(said.starts_with(expected), "{role}: {said}");
    }
}

/// Programs of all kinds, several at any moment, some of them killed, while the daemon is drained and filled again; for as many seconds as
/// HUGEMM_SOAK_SECONDS says. Each file has one memory, what is lent is clear and nobody else's, and in the end all is back.
pub(crate) fn programs_of_all_kinds_at_once(pool: &Pool) {
    let seconds = std::env::var("HUGEMM_SOAK_SECONDS").ok().and_then(|text| text.parse().ok());
    let end = Instant::now() + Duration::from_secs(seconds.unwrap_or(2));
    let (daemon, seen) = (&Served::start(), &Mutex::new(BTreeSet::new()));
    let run = |seed: u64| {
        let (mut random, mut runs, mut killed) = (seed, 0, 0);
        let mut below = |most: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % most
        };
        while Instant::now() < end {
            let (role, expected) = KINDS[below(KINDS.len() as u64) as usize];
            let mut program = daemon.client(role).stderr(Stdio::piped()).spawn().expect("started");
            let dies = below(4) == 0;
            if dies {
                std::thread::sleep(Duration::from_millis(below(30)));
                program.kill().expect("a child");
            }
            let output = program.wait_with_output().expect("ended");
            let [said, errors] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
            // Where others take from the pool it may have nothing for a program's own memory.
            let short = said.is_empty() && errors.contains("Cannot allocate memory");
            let ends_early = dies && expected.starts_with(&said);
            // Others may have what was ready.
            let short = short || role.starts_with(UP_TO) && said.starts_with("plain");
            assert!(said.starts_with(expected) || ends_early || short, "{role}: {said}{errors}");
            if let Some(inode) = said.strip_prefix("leased ") {
                assert!(seen.lock().expect("no panic").insert(inode.to_owned()), "lent twice: {inode}");
            }
            (runs, killed) = (runs + 1, killed + u32::from(dies));
        }
        (runs, killed)
    };
    let ran: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (1..4).map(|seed| scope.spawn(move || run(seed))).collect();
        let tell = |request| Connection::open(&daemon.socket)?.ask(&request);
        let filled = || daemon.status().map_or(0, |status| status.counts.filled_bytes);
        while Instant::now() < end {
            goes_on();
            let before = filled();
            tell(Request::Drain {}).and_then(|_| tell(Request::Fill {})).expect("it answers");
            // A busy machine has a moment for that now and then.
            wait_for("a file is filled", || filled() > before || Instant::now() >= end);
            std::thread::sleep(Duration::from_millis(200));
        }
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    daemon.wait_until_idle();
    pool.wait_until_lacks(LEASE / PAGE);
    let [runs, killed] = [ran.iter().map(|(runs, _)| runs).sum::<u32>(), ran.iter().map(|(_, killed)| killed).sum()];
    println!("{runs} programs, {killed} of them killed; {} leases taken", seen.lock().expect("no panic").len());
}

/// Whoever makes a large file on a disk does not wait for a daemon that another one's memory is asked from.
pub(crate) fn a_file_is_sized_while_another_is_leased(_: &Pool) {
    let daemon = Served::start();
    let mut program = daemon.client("up-to-beside").stdin(Stdio::piped()).spawn().expect("started");
    let mut said = BufReader::new(program.stdout.take().expect("piped")).lines();
    let mut says = || said.next().expect("it says something").expect("text");
    assert_eq!(says(), "started");
    let pid = Pid::from_child(&daemon.child);
    kill_process(pid, Signal::STOP).expect("a child");
    drop(program.stdin.take());
    let beside = says();
    kill_process(pid, Signal::CONT).expect("a child");
    program.wait().expect("ended");
    assert_eq!(beside, "the other waits");
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
