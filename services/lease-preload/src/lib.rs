//! A library that is loaded before a program (`LD_PRELOAD`), and puts a leased file in the place of the one that the program makes to the
//! lease's length: `hugemm lease SIZE --mode preload -- COMMAND`. See [`hugemm_lease::preload`].
//!
//! It sees what calls `ftruncate` of the C library that it was built for. Programs that are static, setuid, or call the kernel
//! themselves run as without it; those of another C library do not start.
//!
//! `ftruncate` may be called by a signal handler, and between `fork` and `exec`. So the environment is read once, before the program
//! begins, and every length but the lease's goes straight to the kernel. With the lease's own length, until the lease is taken, it
//! allocates and reads files: there a handler must not call it.

use hugemm_lease::preload::Offer;
use std::ffi::c_int;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// What this process was offered when it began. Written once, before `main`; read without a lock.
static OFFER: OnceLock<Offer> = OnceLock::new();

/// This process has taken it, so no other file is looked at. No data goes with it.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// ld.so calls what stands in this section before it starts the program, whose threads and `setenv` come later.
#[used]
// SAFETY: the section holds addresses of functions of this kind, whose arguments may be ignored.
#[unsafe(link_section = ".init_array")]
static INIT: extern "C" fn() = read_offer;

extern "C" fn read_offer() {
    if let Some(offer) = Offer::of_this_process() {
        let _ = OFFER.set(offer);
    }
}

/// `ftruncate`, as the C library has it. If the descriptor gets the leased file in its place, that has the length already.
#[unsafe(no_mangle)]
pub extern "C" fn ftruncate(fd: c_int, length: i64) -> c_int {
    let offer = OFFER.get().filter(|_| !TAKEN.load(Ordering::Relaxed));
    match offer.zip(u64::try_from(length).ok()).map(|(offer, bytes)| offer.take(fd, bytes)) {
        Some(Ok(true)) => {
            TAKEN.store(true, Ordering::Relaxed);
            return 0;
        }
        Some(Err(errno)) => {
            // SAFETY: this thread's own.
            unsafe { *libc::__errno_location() = errno.raw_os_error() };
            return -1;
        }
        Some(Ok(false)) | None => {}
    }
    // SAFETY: what the C library does; the numbers are the program's.
    unsafe { libc::syscall(libc::SYS_ftruncate, fd, length) as c_int }
}

/// The same: offsets have 64 bits either way on the machines that hugemm runs on.
#[unsafe(no_mangle)]
pub extern "C" fn ftruncate64(fd: c_int, length: i64) -> c_int {
    ftruncate(fd, length)
}
