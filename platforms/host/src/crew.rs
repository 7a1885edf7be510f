//! CPUs beside each other, each a thread: whoever waits for a lock, or has finished, goes on answering the others' shootdowns,
//! as a CPU with interrupts on does.

use hugemm_base::lock::Pause;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

thread_local! {
    /// What this thread does while it waits for a lock.
    static SERVE: Cell<Option<&'static dyn Fn()>> = const { Cell::new(None) };
    /// How often it has paused.
    static PAUSES: Cell<u32> = const { Cell::new(0) };
    /// Locks that the task holds which this thread runs.
    static HELD: Cell<u32> = const { Cell::new(0) };
}

/// Looks at a reschedule point: a task that waits there for a lock, on this CPU, would wait for a holder that does not run.
///
/// # Panics
///
/// If the task holds a lock that is [`Serving`].
pub(crate) fn assert_none_held() {
    let held = HELD.get();
    assert!(held == 0 || std::thread::panicking(), "rescheduled with {held} locks held");
}

/// Locks that the thread's task holds; from here on it runs one that holds `held`.
pub(crate) fn replace_held(held: u32) -> u32 {
    HELD.replace(held)
}

/// A pause in so many gives the real CPU away: to a holder that does not run because there are more threads than CPUs. Not
/// each, because waiting for a holder that does run is timed.
const YIELDS: u32 = 64;

/// For locks whose waiters serve what [`Crew::work`] was told to, and that nobody may hold at a reschedule point: builds with debug
/// assertions look.
#[derive(Clone, Copy, Debug)]
pub struct Serving;

impl Pause for Serving {
    fn pause() {
        if let Some(serve) = SERVE.get() {
            serve();
        }
        let pauses = PAUSES.get().wrapping_add(1);
        PAUSES.set(pauses);
        if pauses.is_multiple_of(YIELDS) {
            std::thread::yield_now();
        }
        std::hint::spin_loop();
    }

    #[inline]
    fn taken() {
        if cfg!(debug_assertions) {
            HELD.set(HELD.get() + 1);
        }
    }

    #[inline]
    fn given_back() {
        if cfg!(debug_assertions) {
            HELD.set(HELD.get() - 1);
        }
    }
}

/// CPUs that work beside each other.
#[derive(Debug, Default)]
pub struct Crew {
    working: AtomicU64,
}

impl Crew {
    /// Does a CPU's work. It calls `serve` while it waits for a lock that is [`Serving`]; when it has finished it goes on doing
    /// so, as an idle CPU does, until all have: somebody may have asked it just before it left an address space. Work that
    /// panics has finished: the others, who would wait for it for ever, end first.
    ///
    /// Whoever begins when all others have finished is not waited for: where that matters, the work begins with a barrier.
    pub fn work<R>(&self, serve: &dyn Fn(), work: impl FnOnce() -> R) -> R {
        self.working.fetch_add(1, Ordering::SeqCst);
        // SAFETY: taken out again before this returns or unwinds.
        SERVE.set(Some(unsafe { std::mem::transmute::<&dyn Fn(), &'static dyn Fn()>(serve) }));
        let result = catch_unwind(AssertUnwindSafe(work));
        SERVE.set(None);
        self.working.fetch_sub(1, Ordering::SeqCst);
        while self.working.load(Ordering::SeqCst) > 0 {
            serve();
            std::thread::yield_now();
        }
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::AtomicBool;
    use std::time::{Duration, Instant};

    #[test]
    fn who_waits_or_has_finished_serves() {
        let (crew, start, asked) = (Crew::default(), Barrier::new(2), AtomicBool::new(false));
        let serve = || asked.store(true, Ordering::SeqCst);
        let wait_until_served = || {
            asked.store(false, Ordering::SeqCst);
            while !asked.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                crew.work(&serve, || {
                    start.wait();
                    Serving::pause();
                    assert!(asked.load(Ordering::SeqCst), "waiting for a lock");
                    start.wait();
                })
            });
            crew.work(&|| {}, || {
                start.wait();
                start.wait();
                wait_until_served();
            });
        });
        asked.store(false, Ordering::SeqCst);
        Serving::pause();
        assert!(!asked.load(Ordering::SeqCst), "nobody is at work");
    }

    /// It is the calling thread's, and comes when nobody needs the thread any more.
    #[test]
    fn a_panic_ends_the_work_and_not_the_serving() {
        let (crew, start, served) = (Crew::default(), Barrier::new(2), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let fails = scope.spawn(|| {
                let planned = || {
                    start.wait();
                    panic!("planned")
                };
                crew.work(&|| served.store(true, Ordering::SeqCst), planned)
            });
            let asked = crew.work(&|| {}, || {
                start.wait();
                let begin = Instant::now();
                while !served.load(Ordering::SeqCst) && begin.elapsed() < Duration::from_secs(60) {
                    std::thread::yield_now();
                }
                served.load(Ordering::SeqCst)
            });
            assert!(fails.join().is_err() && asked);
        });
        crew.work(&|| {}, || {});
        assert!(SERVE.get().is_none());
    }
}
