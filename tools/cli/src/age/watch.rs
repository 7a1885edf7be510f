//! Whether the CPUs of a run get on, and what is said if they do not: who waits for a page, a lock or another CPU that has
//! been lost waits for ever.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// What the CPUs of a run tell whoever watches it.
#[derive(Debug, Default)]
pub struct Watch {
    /// A CPU has ended, so all should.
    stop: AtomicBool,
    steps: AtomicU64,
    /// Why a CPU ended early: the first that did.
    error: Mutex<Option<String>>,
    over: Mutex<bool>,
    ended: Condvar,
}

impl Watch {
    /// Runs `f`. Whenever no [`step`](Watch::step) is made for so long, `stuck` is told why.
    pub fn over<R>(&self, limit: Duration, stuck: impl Fn(&str) + Sync, f: impl FnOnce() -> R) -> R {
        std::thread::scope(|scope| {
            scope.spawn(|| self.wait(limit, &stuck));
            let _over = OnDrop(|| {
                *self.over.lock().unwrap_or_else(PoisonError::into_inner) = true;
                self.ended.notify_all();
            });
            f()
        })
    }

    fn wait(&self, limit: Duration, stuck: &impl Fn(&str)) {
        let mut over = self.over.lock().unwrap_or_else(PoisonError::into_inner);
        while !*over {
            // Relaxed: only the number counts.
            let before = self.steps.load(Ordering::Relaxed);
            let waited = self.ended.wait_timeout_while(over, limit, |over| !*over);
            over = waited.unwrap_or_else(PoisonError::into_inner).0;
            if !*over && let Some(why) = self.stuck_since(before) {
                let seconds = limit.as_secs_f64();
                stuck(&format!("no process has got on for {seconds} s, which is a bug: {why}"));
            }
        }
    }

    /// What is known if no step was made after so many.
    fn stuck_since(&self, steps: u64) -> Option<String> {
        // Relaxed: as above.
        if self.steps.load(Ordering::Relaxed) != steps {
            return None;
        }
        let error = self.error.lock().unwrap_or_else(PoisonError::into_inner);
        Some(error.clone().unwrap_or_else(|| "it waits for a page, a lock or a CPU that does not come".into()))
    }

    /// Plays a CPU; the others are told to stop when it ends, however it does.
    pub fn cpu<R>(&self, play: impl FnOnce() -> anyhow::Result<R>) -> anyhow::Result<R> {
        // Relaxed: a hint.
        let _stops = OnDrop(|| self.stop.store(true, Ordering::Relaxed));
        play().inspect_err(|error| {
            self.error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| format!("{error:#}"));
        })
    }

    /// Whether no CPU has ended yet.
    pub fn goes_on(&self) -> bool {
        // Relaxed: as above.
        !self.stop.load(Ordering::Relaxed)
    }

    /// A process has got on.
    pub fn step(&self) {
        // Relaxed: as above.
        self.steps.fetch_add(1, Ordering::Relaxed);
    }
}

/// Calls it in the end, however that comes.
pub struct OnDrop<F: FnMut()>(pub F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;
    use std::sync::mpsc::channel;

    const SOON: Duration = Duration::from_millis(20);
    const LATE: Duration = Duration::from_secs(60);

    /// What is said about a run in which nobody gets on.
    fn said(watch: &Watch) -> String {
        let (send, told) = channel();
        watch.over(SOON, |why| send.send(why.to_owned()).unwrap_or(()), || told.recv_timeout(LATE).expect("told"))
    }

    #[test]
    fn a_run_that_hangs_says_so() {
        let why = said(&Watch::default());
        assert!(why.starts_with("no process has got on for 0.02 s") && why.contains("waits for a page"), "{why}");
    }

    /// Others may hang because of what one CPU has found.
    #[test]
    fn what_a_cpu_has_found_is_said() {
        let watch = Watch::default();
        assert!(watch.goes_on());
        for error in ["a page is lost", "another"] {
            assert!(watch.cpu(|| Err::<(), _>(anyhow!(error))).is_err());
        }
        let why = said(&watch);
        assert!(why.ends_with(": a page is lost"), "{why}");
        assert!(!watch.goes_on());
    }

    #[test]
    fn a_cpu_that_panics_stops_the_others() {
        let watch = Watch::default();
        let planned = std::panic::AssertUnwindSafe(|| watch.cpu(|| -> anyhow::Result<()> { panic!("planned") }));
        assert!(std::panic::catch_unwind(planned).is_err());
        assert!(!watch.goes_on());
    }

    #[test]
    fn nothing_is_said_of_a_run_that_gets_on() {
        let watch = Watch::default();
        assert!(watch.stuck_since(0).is_some());
        watch.step();
        assert!(watch.stuck_since(0).is_none() && watch.stuck_since(1).is_some());
        watch.over(LATE, |why| panic!("{why}"), || ());
    }
}
