//! Commands of leases that are ended at any point, by Ctrl-C or worse: nothing stays lent, and the kernel's pool is as before.

#[path = "../../../../services/lease/tests/support/tracer.rs"]
mod tracer;

use crate::support::lease::judged::is_short;
use crate::support::lease::{Daemon, POOLS, judged, with_pool};
use crate::support::{Scratch, hugemm, rows};
use hugemm_base::PageSize;
use hugemm_inspect::pool::HugetlbPool;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};
use tracer::{Then, trace};

/// What the kernel's pool has, and how much of that is in use beyond it: pages that were taken from it while it was lowered.
fn pool_has() -> (u64, u64) {
    let read = |name: &str| {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}");
        std::fs::read_to_string(path).expect("readable").trim().parse().expect("a number")
    };
    (read("nr_hugepages"), read("surplus_hugepages"))
}

#[track_caller]
fn wait_until_pool_has(before: (u64, u64)) {
    let end = Instant::now() + Duration::from_secs(20);
    while pool_has() != before {
        assert!(Instant::now() < end, "the pool has {:?}, and had {before:?}", pool_has());
        sleep(Duration::from_millis(20));
    }
}

/// A command in a process group of its own, as a terminal's job is, that takes Ctrl-C whatever runs the tests.
fn job(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hugemm"));
    command.args(words).process_group(0).stdout(Stdio::piped()).stderr(Stdio::null());
    // SAFETY: between fork and exec only `signal` is called, which is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            Ok(())
        })
    };
    command
}

/// Ctrl-C: to all processes of the job.
fn interrupt(job: &Child) {
    // SAFETY: the group of a child that has not been waited for.
    assert_eq!(unsafe { libc::kill(-(job.id() as i32), libc::SIGINT) }, 0);
}

/// Waits for the end. Nothing to do with a job's speed: one that waits for what its program has would wait for ten minutes.
#[track_caller]
fn end_of(job: &mut Child, what: &str) -> ExitStatus {
    let end = Instant::now() + Duration::from_secs(120);
    loop {
        match job.try_wait().expect("looked") {
            Some(status) => return status,
            None if Instant::now() >= end => {
                job.kill().expect("killed");
                panic!("{what}");
            }
            None => sleep(Duration::from_millis(20)),
        }
    }
}

/// What a traced command did.
#[derive(Default)]
struct Traced {
    /// How many calls each of its processes made.
    calls: BTreeMap<usize, usize>,
    /// Before which call of the first process anything happens.
    begins: Option<usize>,
    /// A process stays behind that waits for its end.
    stays: bool,
    said: String,
}

/// Runs a command with one of its processes killed before one of its calls; a process that would stay is ended.
fn traced(words: &[&str], begins: i64, step: Option<(usize, usize)>) -> Traced {
    let mut traced = Traced::default();
    let output = trace(&mut job(words), |stop| {
        traced.calls.insert(stop.process, stop.number + 1);
        if stop.process == 0 && stop.call == begins {
            traced.begins.get_or_insert(stop.number);
        }
        // Nothing else waits for a futex in a process of one thread.
        let waits = stop.second & WAIT_BITSET == WAIT_BITSET;
        let stays = stop.process == HOLDER && stop.call == libc::SYS_futex && waits;
        traced.stays |= stays;
        if stays || step == Some((stop.process, stop.number)) { Then::Kill } else { Then::Go }
    });
    output.expect("piped").read_to_string(&mut traced.said).expect("UTF-8");
    traced
}

/// What a parked thread asks of a futex.
const WAIT_BITSET: u64 = libc::FUTEX_WAIT_BITSET as u64;

/// The process that a command for a path leaves.
const HOLDER: usize = 1;

/// Memory that a path was asked for stays lent only if the path was said.
#[test]
fn a_holder_stays_only_where_it_was_said() {
    with_pool(8, || {
        let daemon = Daemon::start("signals-path", 8, &[]);
        let words = ["lease", "8MB", "--path", "--socket", &daemon.scratch.path("socket")];
        let whole = traced(&words, libc::SYS_pipe2, None);
        assert!(whole.stays && whole.said.starts_with("/proc/"), "{}", whole.said);
        let first = [whole.begins.expect("a pipe"), 0];
        let mut steps = 0;
        for (process, first) in first.into_iter().enumerate() {
            for number in first..whole.calls[&process] {
                daemon.wait_for("\"leases\":[]");
                daemon.wait_for("\"ready\":[8388608]");
                let run = traced(&words, libc::SYS_pipe2, Some((process, number)));
                assert!(!run.stays || run.said.starts_with("/proc/"), "process {process}, call {number}");
                steps += 1;
            }
        }
        daemon.wait_for("\"leases\":[]");
        assert!(steps > 20, "{steps}");
    });
}

/// A command to the daemon that ends in the middle is a command that was given or not, and the daemon goes on.
#[test]
fn commands_end_at_any_call() {
    with_pool(8, || {
        let daemon = Daemon::start("signals-drain", 8, &[]);
        let socket = daemon.scratch.path("socket");
        let words = ["pool", "drain", "--socket", &socket];
        let status =
            || String::from_utf8_lossy(&hugemm(&["pool", "status", "--json", "--socket", &socket]).stdout).into_owned();
        let whole = traced(&words, libc::SYS_connect, None);
        for number in whole.begins.expect("it connects")..whole.calls[&0] {
            let end = Instant::now() + Duration::from_secs(60);
            // Again and again: what the one that ended had said may be heard after this.
            while !status().contains("\"ready\":[8388608]") {
                assert!(Instant::now() < end, "never ready: {}", status());
                assert!(hugemm(&["pool", "fill", "--socket", &socket]).status.success());
                sleep(Duration::from_millis(20));
            }
            traced(&words, libc::SYS_connect, Some((0, number)));
        }
    });
}

/// Ctrl-C while the daemon fills, and while a program has memory: the daemon ends at once and well, and so does the program.
#[test]
fn a_daemon_ends_while_it_fills() {
    with_pool(32, || {
        let before = pool_has();
        let scratch = Scratch::new("signals-serve");
        let socket = scratch.path("socket");
        let serve =
            ["pool", "serve", "--size", "64MB", "--shape", "8MB,56MB", "--max-bandwidth", "8MB", "--socket", &socket];
        let mut daemon = job(&serve).spawn().expect("a daemon");
        let status =
            || String::from_utf8_lossy(&hugemm(&["pool", "status", "--json", "--socket", &socket]).stdout).into_owned();
        let end = Instant::now() + Duration::from_secs(60);
        while !status().contains("\"ready\":[8388608]") {
            assert!(Instant::now() < end, "never ready: {}", status());
            sleep(Duration::from_millis(20));
        }
        // It has a second file half done by now, or soon.
        let words =
            ["lease", "8MB", "--require", "--socket", &socket, "--", "sh", "-c", "echo lent; exec sleep 600 < @LEASE@"];
        let mut program = job(&words).spawn().expect("a program");
        let mut lent = String::new();
        BufReader::new(program.stdout.take().expect("piped")).read_line(&mut lent).expect("a line");
        assert_eq!(lent, "lent\n");
        interrupt(&daemon);
        assert!(end_of(&mut daemon, "the daemon does not end while somebody has its memory").success());
        assert!(program.try_wait().expect("looked").is_none(), "its memory is its own");
        interrupt(&program);
        assert!(!end_of(&mut program, "the program does not end").success());
        wait_until_pool_has(before);
        let free = HugetlbPool::new().status(PageSize::Size2M, None).expect("a pool").unreserved();
        assert!(free >= 32, "{free} pages are free");
    });
}

/// Whether the command that runs the bench can; a line if it cannot.
fn has_qemu() -> bool {
    let found = Command::new("qemu-system-x86_64").arg("--version").output().is_ok();
    if !found {
        eprintln!("skipped: no QEMU");
    }
    found
}

/// A bench, which raises the pool and has a daemon, holders and machines.
fn bench() -> Child {
    let words = ["bench", "lease", "--sizes", "32MB", "--runs", "3", "--warmup", "0"];
    job(&words).stdout(Stdio::null()).spawn().expect("a bench")
}

/// Ctrl-C at any time of the bench.
#[test]
fn the_bench_ends_at_any_time() {
    // Root alone can raise the pool; the lock is what is wanted of it.
    if !has_qemu() {
        return;
    }
    for (after, pages) in [50, 200, 400, 800, 1600, 3200].into_iter().zip(POOLS.into_iter().cycle()) {
        with_pool(pages, || {
            let (before, mut bench) = (pool_has(), bench());
            sleep(Duration::from_millis(after));
            interrupt(&bench);
            let code = end_of(&mut bench, "the bench does not end").code();
            // Before its handlers are there, the signal ends it, and it has nothing yet.
            assert!(matches!(code, Some(130 | 0) | None), "after {after} ms, {pages} pages: {code:?}");
            wait_until_pool_has(before);
        });
    }
}

/// A bench whose QEMU is a script that says its version and then does as it is told.
fn bench_on(scratch: &Scratch, script: &str) -> Command {
    let qemu = scratch.put("qemu", format!("#!/bin/sh\nbench=$PPID\n[ \"$1\" = --version ] || {{ {script}; }}\n"));
    std::fs::set_permissions(&qemu, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("executable");
    let words = ["bench", "lease", "--sizes", "8MB", "--runs", "1", "--warmup", "0", "--qemu", &qemu];
    let mut bench = job(&words);
    bench.stdout(Stdio::null());
    bench
}

/// What was measured before a signal came is in the document; and how long all takes is said in the beginning.
#[test]
fn a_bench_that_is_interrupted_keeps_what_it_has() {
    with_pool(1, || {
        let (before, scratch) = (pool_has(), Scratch::new("signals-kept"));
        let (starts, saved) = (scratch.path("starts"), scratch.path("saved.json"));
        let answers = "read a; echo '{\"return\": {}}'; read b; echo '{\"return\": {}}'; read c; exit 0";
        let bench = bench_on(
            &scratch,
            &format!("echo >>{starts}; [ $(wc -l <{starts}) -lt 7 ] || kill -INT $bench; {answers}"),
        );
        let mut bench = { bench }.arg(format!("--json={saved}")).stderr(Stdio::piped()).spawn().expect("a bench");
        assert_eq!(end_of(&mut bench, "the bench does not end").code(), Some(130));
        let mut said = String::new();
        bench.stderr.take().expect("a pipe").read_to_string(&mut said).expect("text");
        assert!(said.contains("filling 8MB takes") && said.contains(" min\n"), "{said}");
        let document = serde_json::from_slice(&std::fs::read(&saved).expect("saved")).expect("one JSON document");
        // The first use, and those ways that were over, of which each starts two machines.
        let ways = rows(&document, "bench.lease.exec_to_ready").len();
        assert!((3..6).contains(&ways), "{document}");
        wait_until_pool_has(before);
    });
}

/// A QEMU that does not answer keeps nobody waiting; one that ended by the bench's own signal, which comes a moment later, is no failure.
#[test]
fn the_bench_does_not_wait_for_a_silent_machine() {
    with_pool(1, || {
        let (before, scratch) = (pool_has(), Scratch::new("signals-silent"));
        let there = scratch.path("there");
        let mut bench = bench_on(&scratch, &format!("touch {there}; exec sleep 600")).spawn().expect("a bench");
        let end = Instant::now() + Duration::from_secs(60);
        while !std::fs::exists(&there).expect("looked") {
            assert!(Instant::now() < end, "it starts no machine");
            sleep(Duration::from_millis(10));
        }
        // SAFETY: a child that has not been waited for; itself alone.
        assert_eq!(unsafe { libc::kill(bench.id() as i32, libc::SIGINT) }, 0);
        assert_eq!(end_of(&mut bench, "the bench waits for QEMU").code(), Some(130));
        wait_until_pool_has(before);
        let mut bench =
            bench_on(&scratch, "(sleep 0.1; kill -INT $bench) >/dev/null 2>&1 & exit 1").spawn().expect("a bench");
        assert_eq!(end_of(&mut bench, "the bench does not end").code(), Some(130));
        wait_until_pool_has(before);
    });
}

/// Killed at any time after it has raised the pool, or found that it need not, by itself or with its process group: the pool is as it was,
/// and so no daemon is left that has pages of it.
#[test]
fn a_killed_bench_leaves_the_pool_as_it_was() {
    if !has_qemu() {
        return;
    }
    for (pages, kills) in
        POOLS.into_iter().zip([[(0, false), (100, true)], [(400, false), (1000, true)], [(0, true), (400, false)]])
    {
        with_pool(pages, || {
            let before = pool_has();
            for (after, group) in kills {
                let mut bench = bench();
                let end = Instant::now() + Duration::from_secs(60);
                let dir = std::env::temp_dir().join(format!("hugemm-bench-lease-{}", bench.id()));
                while pool_has() == before && !dir.exists() {
                    assert!(Instant::now() < end, "it does not begin");
                    assert!(bench.try_wait().expect("looked").is_none(), "it has ended");
                    sleep(Duration::from_millis(1));
                }
                sleep(Duration::from_millis(after));
                let id = bench.id() as i32;
                // SAFETY: a child that has not been waited for, or its group.
                assert_eq!(unsafe { libc::kill(if group { -id } else { id }, libc::SIGKILL) }, 0);
                end_of(&mut bench, "the bench is not killed");
                wait_until_pool_has(before);
            }
        });
    }
}

/// The end of somebody else's child is no end of what is traced, and stays to be waited for.
#[test]
fn a_tracer_waits_for_what_it_has_started() {
    let mut other = Command::new("false").spawn().expect("started");
    let stat = format!("/proc/{}/stat", other.id());
    while !std::fs::read_to_string(&stat).expect("not waited for").contains(") Z ") {
        thread::yield_now();
    }
    let mut said = String::new();
    let output = trace(Command::new("echo").arg("traced").stdout(Stdio::piped()), |_| Then::Go);
    output.expect("a pipe").read_to_string(&mut said).expect("it ends");
    assert_eq!((said.as_str(), other.wait().expect("nobody else has").code()), ("traced\n", Some(1)));
}

/// What the next has a test say.
const SAYS: &str = "HUGEMM_TEST_SAYS";

#[test]
#[ignore = "a program for another test to run"]
fn program_that_fails() {
    judged(|| panic!("{}", std::env::var(SAYS).expect("words")));
}

/// A test that fails has failed, unless it lacks pages while somebody else changes the pool, who may have taken them.
#[test]
fn a_test_fails_unless_somebody_else_changes_the_pool() {
    // For its lock, which the program does not wait for: it has one of its own.
    with_pool(1, || {
        let ((size, _), scratch) = (pool_has(), Scratch::new("judged"));
        let resize = |to: u64| std::fs::write("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", to.to_string());
        if let Err(error) = resize(size) {
            eprintln!("skipped: {error}");
            return;
        }
        let (short, leak) = ("the file: NoPages", "lent twice: 7");
        let run = |says| {
            let mut program = Command::new(std::env::current_exe()?);
            program.args(["--ignored", "--nocapture", "program_that_fails"]).env(SAYS, says);
            program.env("TMPDIR", scratch.path("")).output()
        };
        let is_judged = |output: &std::io::Result<Output>, success, says| {
            let output = output.as_ref().expect("it starts");
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() == success && said.contains(says), "judged otherwise: {said}");
        };
        // Once more where somebody really does.
        let failed =
            (0..5).map(|_| run(short)).find(|output| output.as_ref().is_ok_and(|output| !output.status.success()));
        is_judged(&failed.expect("nobody takes from the pool at last"), false, short);
        let over = AtomicBool::new(false);
        let outputs = thread::scope(|scope| {
            scope.spawn(|| {
                for more in [1, 0].into_iter().cycle().take_while(|_| !over.load(Ordering::Relaxed)) {
                    let _ = resize(size + more);
                    sleep(Duration::from_millis(20));
                }
            });
            let outputs = [short, leak].map(run);
            over.store(true, Ordering::Relaxed);
            outputs
        });
        resize(size).expect("as before");
        is_judged(
            &outputs[0],
            true,
            "skipped: somebody else changes the kernel's pool of huge pages, or takes from it (1 by now)",
        );
        is_judged(&outputs[1], false, leak);
    });
}

/// Bytes, memory that is lent twice, or is not back, and a panic of another thread are failures whoever has the pool.
#[test]
fn only_a_lack_of_pages_is_excused() {
    for said in [
        "a file: Os { code: 12, kind: OutOfMemory, message: \"Cannot allocate memory\" }",
        "filled: NoPages",
        "never: a file is ready",
        "never \"ready\":[8388608]: {\"waiting\":\"8388608 bytes missing, 0 free in the kernel's pool\"}",
        "hugemm: not all is ready after 60 s; see what it waits for, or wait longer",
        "the pool has (3, 0), and had (4, 0)",
    ] {
        assert!(is_short(said), "{said}");
    }
    for said in [
        "assertion `left == right` failed: the naive design leaks\n  left: [1]\n right: [2]",
        "lent twice: leased 7",
        "what is lent is clear",
        "never: pages are back",
        "never: nothing is lent",
        "never \"leases\":[]: {\"waiting\":\"8388608 bytes missing, 0 free in the kernel's pool\"}",
        "no panic: Any { .. }",
        "a scoped thread panicked",
        "index out of bounds: the len is 3 but the index is 3",
    ] {
        assert!(!is_short(said), "{said}");
    }
}
