//! Daemon, client, supervisor and program, each killed before each of its system calls; and programs that make it difficult.
//!
//! No libtest, whose threads a client that is about to become another program must not have: without arguments this program is
//! the tests, with them it is what the first one names.

#[path = "../support/mod.rs"]
mod support;
#[path = "../support/tracer.rs"]
mod tracer;

mod killed;
mod manager;
mod programs;
mod roles;
mod served;

use killed::{clients_are_killed, the_daemon_is_killed};
use manager::{a_manager_holds_what_is_filled, kept_memory_survives_the_daemon};
use programs::{
    a_daemon_of_another_process_namespace, a_descriptor_changes, a_file_is_sized_while_another_is_leased,
    a_lease_without_a_filter_is_over, programs_of_all_kinds, programs_of_all_kinds_at_once,
};
use roles::{client, daemon, keeper, program};
use std::path::Path;
use support::{PAGE, Pool, judged};

/// A lease, and a file that the daemon has ready: two pages, so that there is a first and a last one.
const LEASE: u64 = 2 * PAGE;

/// What the programs of a test have at most: each a lease and memory of its own.
const MEMORY: u64 = 16 * LEASE;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let words: Vec<&str> = arguments.iter().skip(1).map(String::as_str).collect();
    match words[..] {
        ["daemon", socket] => daemon(Path::new(socket)),
        ["client", socket, role] => client(Path::new(socket), role),
        ["keeper", socket] => keeper(Path::new(socket)),
        ["program", role] => program(role),
        // As with libtest, a word selects the tests whose name has it.
        _ => tests(words.iter().find(|word| !word.starts_with('-')).unwrap_or(&"")),
    }
}

/// Whatever hangs ends the test program, and that all that it traces. To be called before each step: how many of them take how long is
/// a matter of what else runs, for the daemon fills at idle priority.
fn goes_on() {
    // SAFETY: a timer of this process.
    unsafe { libc::alarm(600) };
}

/// A name, and what is done.
type Test = (&'static str, fn(&Pool));

fn tests(part: &str) {
    let tests: [Test; 15] = [
        ("a daemon of another process namespace", a_daemon_of_another_process_namespace),
        ("clients and supervisors are killed before every call", |pool| clients_are_killed(pool, "plain")),
        ("the same while they lease", |pool| clients_are_killed(pool, "up-to-plain")),
        ("the daemon is killed before every call", |pool| the_daemon_is_killed(pool, "stays")),
        ("the daemon is killed while a supervisor leases", |pool| the_daemon_is_killed(pool, "up-to-stays")),
        ("a descriptor is closed while the supervisor looks", |pool| a_descriptor_changes(pool, "close")),
        ("a descriptor is reused while the supervisor looks", |pool| a_descriptor_changes(pool, "reuse")),
        ("a descriptor is closed while the supervisor leases", |pool| a_descriptor_changes(pool, "up-to-close")),
        ("a descriptor is reused while the supervisor leases", |pool| a_descriptor_changes(pool, "up-to-reuse")),
        ("a service manager holds what is filled", a_manager_holds_what_is_filled),
        ("kept memory survives its program and the daemon", kept_memory_survives_the_daemon),
        ("programs with filters, children and old calls", programs_of_all_kinds),
        ("programs of all kinds at once", programs_of_all_kinds_at_once),
        ("a file is sized while another is leased", a_file_is_sized_while_another_is_leased),
        ("a lease without a filter is over", a_lease_without_a_filter_is_over),
    ];
    for (name, test) in tests.into_iter().filter(|(name, _)| name.contains(part)) {
        judged(|| {
            let Some(pool) = Pool::with_free(MEMORY / PAGE) else { return };
            goes_on();
            test(&pool);
            pool.wait_until_lacks(0);
            println!("test {name} ... ok");
        });
    }
    // And what marks the place.
    served::new_socket();
}
