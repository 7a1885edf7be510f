//! A library that is loaded before a program (`LD_PRELOAD`), and puts a leased file in the place of the one that the program makes to the
//! lease's length: `hugemm lease SIZE --mode preload -- COMMAND`. See [`hugemm_lease::preload`].
//!
//! It sees what calls `ftruncate` of the C library that it was built for. Programs that are static, of another C library, setuid, or that
//! call the kernel themselves run as without it.

use hugemm_lease::preload::Offer;
use std::ffi::c_int;

/// `ftruncate`, as the C library has it. If the descriptor gets the leased file in its place, that has the length already.
#[unsafe(no_mangle)]
pub extern "C" fn ftruncate(fd: c_int, length: i64) -> c_int {
    let bytes = u64::try_from(length).unwrap_or(0);
    if bytes > 0 && Offer::of_this_process().is_some_and(|offer| offer.take(fd, bytes)) {
        return 0;
    }
    // SAFETY: what the C library does; the numbers are the program's.
    unsafe { libc::syscall(libc::SYS_ftruncate, fd, length) as c_int }
}

/// The same: offsets have 64 bits either way on the machines that hugemm runs on.
#[unsafe(no_mangle)]
pub extern "C" fn ftruncate64(fd: c_int, length: i64) -> c_int {
    ftruncate(fd, length)
}
