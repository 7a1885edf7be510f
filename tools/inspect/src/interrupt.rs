//! Ctrl-C and its relatives, turned into a flag, so that everything that was taken is given back.
//!
//! After [`install`], the first SIGINT, SIGTERM or SIGHUP sets a process-wide flag and nothing else. Long operations
//! ask [`check`] at their cancellation points and return [`SignalReceived`] through the ordinary error path; guards on the
//! way unmap memory and put the hugetlb pools back.
//!
//! A second signal means that this takes too long. Then every hugetlb pool that this process raised is put back at once
//! (pages still in use become surplus, which the kernel frees as the process exits), or, where that fails, the exact
//! command that does it is printed; and the process ends as the signal would have ended it.
//!
//! A signal that was ignored when the process started (`nohup`, a background job of a script) stays ignored. After
//! SIGKILL, which cannot be caught, a shell puts the pools back (`pool/survivor.rs`).

use crate::pool;
use crate::roots::{field, text};
use anyhow::{Result, anyhow};
use hugemm_base::Cancel;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fmt;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

/// The signal that was received first; 0 before any.
static RECEIVED: AtomicI32 = AtomicI32::new(0);

/// How long a second signal waits for a change of a pool that is under way. One step of such a change takes about a
/// second for cold memory.
const PATIENCE: Duration = Duration::from_secs(10);

/// The operation was stopped by a signal; all that it had taken has been given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignalReceived {
    /// The signal's number.
    pub signal: i32,
}

impl fmt::Display for SignalReceived {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "interrupted by {}; everything taken has been given back", signal_name(self.signal))
    }
}

impl std::error::Error for SignalReceived {}

/// Catches SIGINT, SIGTERM and SIGHUP from now on, by a thread of its own. Call it once, early, from `main`; further
/// calls do nothing.
///
/// # Errors
/// If the system has no thread or no handler left.
pub fn install() -> Result<()> {
    install_handlers().map_err(|why| {
        anyhow!("signal handlers cannot be installed ({why}); Ctrl-C would leave a raised hugetlb pool behind")
    })
}

fn install_handlers() -> io::Result<()> {
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut installed = INSTALLED.lock().unwrap_or_else(|e| e.into_inner());
    if *installed {
        return Ok(());
    }
    let status = text("/proc/self/status").unwrap_or_default();
    let ignored = field(&status, "SigIgn").and_then(|t| u64::from_str_radix(t, 16).ok()).unwrap_or(0);
    let caught = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| ignored >> (signal - 1) & 1 == 0);
    for signal in caught.clone() {
        // By the handler itself and not by the thread: whoever sees what else the signal did, as a child that ended by it,
        // sees the flag. Relaxed pairs with the load in `signal()`; nothing is published through it.
        let flag = move || _ = RECEIVED.compare_exchange(0, signal, Ordering::Relaxed, Ordering::Relaxed);
        // SAFETY: an atomic exchange, which is async-signal-safe.
        unsafe { signal_hook::low_level::register(signal, flag) }?;
    }
    let mut signals = Signals::new(caught)?;
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        let mut signals = signals.forever();
        if let Some(first) = signals.next() {
            eprintln!("\n{}: giving back what was taken; once more ends it at once", signal_name(first));
        }
        if let Some(second) = signals.next() {
            end_at_once(second);
        }
    })?;
    *installed = true;
    Ok(())
}

/// Has a signal been received? One relaxed load.
pub fn requested() -> bool {
    signal().is_some()
}

/// The signal that was received first, if any.
pub fn signal() -> Option<i32> {
    match RECEIVED.load(Ordering::Relaxed) {
        0 => None,
        signal => Some(signal),
    }
}

/// A cancellation point: to be called with `?` between the units of a long operation.
///
/// # Errors
/// [`SignalReceived`] once a signal has been received.
pub fn check() -> Result<(), SignalReceived> {
    match signal() {
        None => Ok(()),
        Some(signal) => Err(SignalReceived { signal }),
    }
}

/// Stops an operation when the user does, at its next unit; units are not cut for it, so what is measured is not changed.
#[derive(Clone, Copy, Debug)]
pub struct UserStops;

impl Cancel for UserStops {
    fn possible(&self) -> bool {
        false
    }

    fn requested(&self) -> bool {
        requested()
    }
}

fn end_at_once(signal: i32) -> ! {
    for line in pool::restore_all_at_once(PATIENCE) {
        eprintln!("{line}");
    }
    // Ends the process as the signal does by default, so that a shell sees why.
    let _ = signal_hook::low_level::emulate_default_handler(signal);
    signal_hook::low_level::exit(signal.saturating_add(128))
}

fn signal_name(signal: i32) -> &'static str {
    signal_hook::low_level::signal_name(signal).unwrap_or("a signal")
}

#[cfg(test)]
mod tests {
    use super::*;

    // Signals themselves are tested in tests/interrupt.rs, in processes of their own: the flag is process-wide.

    #[test]
    fn the_error_says_what_happened() {
        let interrupted = SignalReceived { signal: SIGINT };
        assert_eq!(interrupted.to_string(), "interrupted by SIGINT; everything taken has been given back");
    }

    #[test]
    fn nothing_is_requested_at_first() {
        assert_eq!(check(), Ok(()));
        assert!(!requested());
    }
}
