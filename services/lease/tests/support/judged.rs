//! Tests that take huge pages from the kernel's pool: they take turns, and are judged where nobody else changes the pool or takes from it.

use std::fs::{self, File};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::Duration;

pub(crate) const SIZE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
const FREE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";

/// A test's turn, for as long as it is kept: of all programs of all tests of this machine.
pub(crate) fn turn() -> File {
    let lock = std::env::temp_dir().join("hugemm-lease-pool.lock");
    let lock = File::options().create(true).truncate(false).write(true).open(lock).expect("a lock file");
    lock.lock().expect("locked");
    lock
}

/// What a test says that has too few pages, or has counted those of the pool: the kernel's words, the daemon's, and those of tests.
const SHORT: [&str; 13] = [
    "Cannot allocate memory",
    "no free huge page",
    "NoPages",
    "bytes missing",
    "is ready",
    "are ready",
    "never: ready",
    "never ready",
    "is stored",
    "is filled",
    "signal: 7",
    "pages are free",
    "the pool",
];

/// What no lack of pages explains, whatever is said besides: memory that does not come back.
const NOT_SHORT: [&str; 3] = ["never \"leases\":[]", "nothing is lent", "pages are back"];

/// Whether somebody else who changes the pool, or takes from it, explains a failure that says this.
pub(crate) fn is_short(said: &str) -> bool {
    let says = |words: &[&str]| words.iter().any(|words| said.contains(words));
    says(&SHORT) && !says(&NOT_SHORT)
}

/// Runs a test. Where it fails for want of pages while somebody else changes the pool or takes from it, who may have taken them, that is
/// said, and is no failure; then no other test of this program is tried. How many that were is said each time.
pub(crate) fn judged(test: impl FnOnce()) {
    static SKIPPED: AtomicUsize = AtomicUsize::new(0);
    if SKIPPED.load(Ordering::Relaxed) == 0 {
        let Err(cause) = catch_unwind(AssertUnwindSafe(test)) else { return };
        let said = cause.downcast_ref::<String>().map(String::as_str).or(cause.downcast_ref::<&str>().copied());
        if !said.is_some_and(is_short) || !moves() {
            resume_unwind(cause);
        }
    }
    let skipped = SKIPPED.fetch_add(1, Ordering::Relaxed) + 1;
    eprintln!("skipped: somebody else changes the kernel's pool of huge pages, or takes from it ({skipped} by now)");
}

/// Whether the pool, or what is free of it, changes again and again, though it is the turn of nothing that takes from it.
fn moves() -> bool {
    let _turn = turn();
    // What the test had goes back.
    sleep(Duration::from_secs(1));
    let look = |_| {
        sleep(Duration::from_millis(10));
        [SIZE, FREE].map(|path| fs::read_to_string(path).ok())
    };
    let looks: Vec<_> = (0..200).map(look).collect();
    looks.windows(2).filter(|pair| pair[0] != pair[1]).count() > 2
}
