//! Clients, supervisors and daemons, each killed before each of its system calls.

use crate::roles::{gone, me};
use crate::served::{PROCESSES, PROGRAM, SUPERVISOR, Served, new_socket, rest};
use crate::support::{PAGE, Pool};
use crate::tracer::{Then, trace};
use crate::{LEASE, goes_on};
use hugemm_lease::client::Connection;
use hugemm_lease::wire::Request;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) fn clients_are_killed(pool: &Pool, role: &str) {
    let daemon = Served::start();
    // Once undisturbed, to count the calls. What is before the first word with the daemon is no transition.
    let (mut calls, mut connects) = ([0; PROCESSES], None);
    let output = trace(&mut daemon.client(role), |stop| {
        calls[stop.process] = stop.number + 1;
        if stop.call == libc::SYS_connect {
            connects.get_or_insert(stop.number);
        }
        Then::Go
    });
    assert!(rest(output).starts_with("leased"));
    let first = [connects.expect("a client connects"), 0, 0];
    let mut steps: Vec<_> = (0..PROCESSES)
        .flat_map(|process| (first[process]..calls[process]).map(move |n| (process, n, Then::Kill)))
        .collect();
    // And the program killed while the supervisor is before each of its calls.
    steps.extend((0..calls[SUPERVISOR]).map(|n| (SUPERVISOR, n, Then::KillOther(PROGRAM))));
    let (mut seen, mut answers) = (BTreeSet::new(), BTreeSet::new());
    for (process, number, then) in steps {
        goes_on();
        daemon.wait_until_idle();
        let output = trace(&mut daemon.client(role), |stop| {
            if (stop.process, stop.number) == (process, number) { then } else { Then::Go }
        });
        let said = rest(output);
        let mut words = said.split_whitespace();
        let answer = words.next().unwrap_or("killed").to_owned();
        if answer == "leased" {
            assert!(seen.insert(words.next().map(str::to_owned)), "lent twice: {said}");
        }
        let killed_itself = process == PROGRAM || then != Then::Kill;
        let allowed: &[&str] = match (killed_itself, process) {
            (true, _) => &["leased", "killed"],
            // Nobody starts the supervisor, or there is none any more: on without, or that one call fails.
            (false, _) => &["leased", "plain", "ENOSYS", "not"],
        };
        assert!(allowed.contains(&answer.as_str()), "process {process} killed before its call {number}: {said}");
        answers.insert(answer);
    }
    daemon.wait_until_idle();
    pool.wait_until_lacks(LEASE / PAGE);
    assert!(["leased", "killed", "ENOSYS"].iter().all(|answer| answers.contains(*answer)), "{answers:?}");
}

/// Whatever the daemon was about to do: the program runs, on memory that is its own and keeps its bytes.
pub(crate) fn the_daemon_is_killed(pool: &Pool, role: &str) {
    let (mut binds, mut number) = (None, 0);
    loop {
        goes_on();
        let socket = new_socket();
        let name = socket.to_str().expect("UTF-8");
        let mut client = me(&["client", name, role]);
        let mut client = client.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a client");
        let mut output = BufReader::new(client.stdout.take().expect("piped"));
        let (was_killed, over) = (AtomicBool::new(false), AtomicBool::new(false));
        let said = std::thread::scope(|scope| {
            let mut daemon = me(&["daemon", name]);
            let first_line = scope.spawn(|| {
                let mut said = String::new();
                output.read_line(&mut said).expect("a line");
                over.store(true, Ordering::Relaxed);
                // Until the tracer has seen it make one more call, and ended it, unless it had been killed.
                while Connection::open(&socket).is_ok_and(|daemon| daemon.ask(&Request::Status {}).is_ok()) {}
                said
            });
            trace(daemon.stderr(Stdio::null()), |stop| {
                if over.load(Ordering::Relaxed) {
                    return Then::Kill;
                }
                if stop.call == libc::SYS_bind {
                    binds.get_or_insert(stop.number);
                }
                let step = binds.is_some_and(|first| stop.number == first + number);
                was_killed.fetch_or(step, Ordering::Relaxed);
                if step { Then::Kill } else { Then::Go }
            });
            std::fs::write(gone(&socket), "").expect("a mark");
            first_line.join().expect("a line")
        });
        drop(client.stdin.take());
        let mut all = said;
        output.read_to_string(&mut all).expect("UTF-8");
        assert!(client.wait().expect("ended").success(), "{all}");
        assert!(all.ends_with("kept\n"), "{all}");
        pool.wait_until_lacks(0);
        match (was_killed.into_inner(), all.starts_with("leased")) {
            (true, _) => number += 1,
            (false, true) => {
                assert!(number > 20, "{number} steps, {all}");
                return;
            }
            // Who leases when the program asks may come before anything is ready: then it is done again.
            (false, false) => {}
        }
    }
}
