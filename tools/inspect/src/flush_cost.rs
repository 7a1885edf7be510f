//! What invalidating translations costs on this machine, found out through its kernel: a program cannot do it itself, but
//! taking the right to store away from touched pages makes the kernel do it, one by one up to a few dozen pages and all at
//! once beyond.
//!
//! Differences of whole calls, so that what a call costs besides goes out: pages that were never touched have no
//! translation and are not flushed; beyond the kernel's limit only entries are edited for each page more.

use hugemm_host::mmap::{CallFailed, Kind, Mmap};
use std::cell::Cell;
use std::io;
use std::time::Instant;

/// Pages that Linux on x86-64 flushes one by one, at most (`tlb_single_page_flush_ceiling` as it is unless set).
const CEILING: usize = 33;

/// Pages of the working set whose translations are refilled after everything was invalidated.
pub const WORKING_SET: usize = 512;

/// Calls of each kind; the fastest counts.
const CALLS: usize = 300;

/// Base pages.
const PAGE: usize = 4096;

/// Nanoseconds on one CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FlushCost {
    /// Invalidating one page.
    pub page_ns: f64,
    /// Invalidating everything.
    pub all_ns: f64,
    /// Translating a [working set](WORKING_SET) of 4 KiB pages anew after that.
    pub refill_ns: f64,
}

impl FlushCost {
    /// Measures it on the calling CPU; a few milliseconds.
    ///
    /// # Errors
    ///
    /// The kernel has no memory for the pages, or refuses a call.
    pub fn measure() -> io::Result<Self> {
        Self::by_calls().map_err(|failed| io::Error::new(io::Error::from(failed.errno).kind(), failed.call))
    }

    fn by_calls() -> Result<Self, CallFailed> {
        // One page more, so that no call is about a whole mapping: the kernel divides it each time.
        let bytes = (WORKING_SET + 1) * PAGE;
        let mut touched = Mmap::new(bytes, PAGE, PAGE, Kind::Anonymous)?;
        let mut untouched = Mmap::new(bytes, PAGE, PAGE, Kind::Anonymous)?;
        // What is flushed are pages of 4 KiB; where there are no others, there is nothing to refuse.
        let _ = (touched.transparent_huge(false), untouched.transparent_huge(false));
        let present = |mapping: &mut Mmap, pages: usize| {
            fastest(|| {
                touch(mapping);
                mapping.forbid_stores(pages * PAGE)
            })
        };
        let few = present(&mut touched, 1)?;
        let most = present(&mut touched, CEILING)?;
        let over = present(&mut touched, CEILING + 1)?;
        let all = present(&mut touched, WORKING_SET)?;
        let nothing = fastest(|| untouched.forbid_stores((CEILING + 1) * PAGE))?;
        let entry = ((all - over) / (WORKING_SET - CEILING - 1) as f64).max(0.0);
        // A quarter nanosecond: no invalidation is faster than an instruction, whatever the noise.
        let page_ns = ((most - few) / (CEILING - 1) as f64 - entry).max(0.25);
        let all_ns = (over - nothing - (CEILING + 1) as f64 * entry).max(page_ns);
        Ok(FlushCost { page_ns, all_ns, refill_ns: refill(&mut touched)? })
    }
}

/// Stores to every page.
fn touch(mapping: &mut Mmap) {
    mapping.bytes_mut().iter_mut().step_by(PAGE).for_each(|byte| *byte = byte.wrapping_add(1));
}

/// Less than this is not worth two looks at the clock, and is owed.
const WORTH: f64 = 200.0;

thread_local! {
    /// Nanoseconds that this thread owes.
    static OWED: Cell<f64> = const { Cell::new(0.0) };
}

/// Passes so many nanoseconds; very few are passed together with later ones.
pub fn spin(nanos: f64) {
    let owed = OWED.get() + nanos;
    if owed < WORTH {
        return OWED.set(owed);
    }
    let start = Instant::now();
    let passed = loop {
        let passed = start.elapsed().as_nanos() as f64;
        if passed >= owed {
            break passed;
        }
        std::hint::spin_loop();
    };
    // What went by too much is not passed again, up to a point: this thread may not have run.
    OWED.set((owed - passed).max(-WORTH));
}

/// The fastest of [`CALLS`] calls, in nanoseconds; `call` says how long it took.
fn fastest(mut call: impl FnMut() -> Result<f64, CallFailed>) -> Result<f64, CallFailed> {
    (0..CALLS).try_fold(f64::INFINITY, |best, _| Ok(best.min(call()?)))
}

/// How much longer the working set is read when everything else that was known of it has just been invalidated.
fn refill(mapping: &mut Mmap) -> Result<f64, CallFailed> {
    let read = |mapping: &mut Mmap| {
        let start = Instant::now();
        // A different line in each page, so that they do not displace each other in the cache.
        let sum: u32 = (0..WORKING_SET).map(|page| u32::from(mapping.bytes_mut()[page * PAGE + page % 64 * 64])).sum();
        std::hint::black_box(sum);
        start.elapsed().as_nanos() as f64
    };
    let warm = fastest(|| {
        read(mapping);
        Ok(read(mapping))
    })?;
    let cold = fastest(|| {
        touch(mapping);
        read(mapping);
        mapping.forbid_stores(WORKING_SET * PAGE)?;
        Ok(read(mapping))
    })?;
    Ok((cold - warm).max(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Many short costs add up.
    #[test]
    fn time_is_passed() {
        let start = Instant::now();
        (0..10_000).for_each(|_| spin(30.0));
        let passed = start.elapsed().as_nanos();
        assert!(passed >= 290_000, "{passed} ns");
    }

    /// What it comes to is the machine's affair; that it is something, and finite, is not.
    #[test]
    fn invalidations_cost_something() {
        let cost = FlushCost::measure().expect("two megabytes");
        assert!(cost.page_ns > 0.0 && cost.all_ns >= cost.page_ns && cost.refill_ns >= 0.0, "{cost:?}");
        assert!(cost.page_ns < 1e6 && cost.all_ns < 1e7 && cost.refill_ns < 1e8, "{cost:?}");
    }
}
