//! An end for a test program that would not end by itself: one that waits for another process, or reads what one says to the end.

/// Far beyond what any of them takes, also on a machine that is busy or was stopped for a while.
const SECONDS: libc::c_uint = 30 * 60;

/// Called before `main`. Where `main` runs a program by becoming it, the alarm goes with it.
#[used]
// SAFETY: the section holds addresses of functions of this kind, whose arguments may be ignored.
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    // SAFETY: a timer of this process, whose signal ends it.
    unsafe { libc::alarm(SECONDS) };
}
