//! A program's `ftruncate` stays async-signal-safe, as POSIX has it, while the library is loaded and offers a lease.

use hugemm_lease::memory_file::{MemoryFile, Page};
use hugemm_lease::preload::{Offer, VARIABLE};
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const BYTES: u64 = 4 << 20;

/// How often the handler calls it.
const SIGNALS: u32 = 2000;

/// Whatever it is called for before the lease is taken, but the lease's own length.
#[test]
fn a_handler_may_interrupt_the_allocator() {
    handles("program_that_allocates_and_truncates");
}

/// Whatever it is called for afterwards.
#[test]
fn a_handler_may_ask_for_the_leases_length_once_it_is_taken() {
    handles("program_that_has_its_lease");
}

#[track_caller]
fn handles(program: &str) {
    let me = std::env::current_exe().expect("a path");
    let library = me.with_file_name("libhugemm_lease_preload.so");
    assert!(library.exists(), "{}", library.display());
    let file = MemoryFile::new(Page::Transparent, BYTES).expect("a file");
    let (offer, _socket) = Offer::new(file.into_fd(), BYTES, Page::Transparent, false).expect("offered");
    let mut child = Command::new(me)
        .args(["--ignored", "--exact", program])
        .env("LD_PRELOAD", library)
        .env(VARIABLE, offer.variable().expect("text"))
        .stdout(Stdio::null())
        .spawn()
        .expect("it starts");
    let end = Instant::now() + Duration::from_secs(30);
    let ended = loop {
        match child.try_wait().expect("a child") {
            None if Instant::now() < end => std::thread::sleep(Duration::from_millis(20)),
            ended => break ended,
        }
    };
    let _ = child.kill();
    let _ = child.wait();
    assert!(ended.is_some_and(|status| status.success()), "{ended:?}; nothing: it hangs");
}

#[test]
#[ignore = "a program for another test to run"]
fn program_that_allocates_and_truncates() {
    interrupted(1);
}

#[test]
#[ignore = "a program for another test to run"]
fn program_that_has_its_lease() {
    let file = rustix::fs::memfd_create(c"own", rustix::fs::MemfdFlags::ALLOW_SEALING).expect("a file");
    let inode = || rustix::fs::fstat(&file).expect("open").st_ino;
    let own = inode();
    // SAFETY: the lengths of a file of its own.
    assert_eq!(unsafe { libc::ftruncate(file.as_raw_fd(), BYTES as i64) }, 0);
    assert_ne!(inode(), own, "it is the leased one");
    interrupted(BYTES);
}

/// Two threads allocate and free; one is interrupted again and again by a handler that calls `ftruncate` for so many bytes.
fn interrupted(bytes: u64) {
    static LENGTH: AtomicU64 = AtomicU64::new(0);
    LENGTH.store(bytes, Ordering::Relaxed);
    extern "C" fn handler(_: libc::c_int) {
        // SAFETY: async-signal-safe, and no descriptor has that number; `errno` is nobody's here.
        assert_eq!(unsafe { libc::ftruncate(12_345, LENGTH.load(Ordering::Relaxed) as i64) }, -1);
    }
    // SAFETY: the handler does only what a handler may.
    unsafe { libc::signal(libc::SIGALRM, handler as extern "C" fn(libc::c_int) as libc::sighandler_t) };
    // More of each small size than a thread's cache of free pieces has, so that the allocator's lock is taken.
    let churn = || drop(std::hint::black_box((0..2000).map(|n| vec![1_u8; 16 + n % 256]).collect::<Vec<_>>()));
    // SAFETY: this thread's own number.
    let target = unsafe { libc::pthread_self() };
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..SIGNALS {
                churn();
                // SAFETY: that thread lives until this scope ends.
                unsafe { libc::pthread_kill(target, libc::SIGALRM) };
                std::thread::sleep(Duration::from_micros(100));
            }
            done.store(true, Ordering::Relaxed);
        });
        while !done.load(Ordering::Relaxed) {
            churn();
        }
    });
}
