//! An end for a test that would not end by itself.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Far beyond what any test takes, also on a machine that is busy or was stopped for a while.
const LIMIT: Duration = Duration::from_secs(30 * 60);

/// Whoever has this for more than half an hour ends the process, with a line that says whose thread it was. For tests whose threads
/// wait for each other: when one of them has failed, or what it waits for never comes, the others would wait without a word, for ever.
/// Under Miri, whose time is its own, it does nothing.
#[derive(Debug)]
#[must_use = "it looks on for as long as it is there"]
pub struct Watchdog(Option<(Sender<()>, JoinHandle<()>)>);

impl Watchdog {
    /// Looks on from here.
    #[allow(clippy::new_without_default, reason = "it starts a thread")]
    pub fn new() -> Self {
        if cfg!(miri) {
            return Watchdog(None);
        }
        let name = thread::current().name().unwrap_or("a thread without a name").to_owned();
        let (alive, ended) = channel();
        let watch = move || {
            if is_overdue(&ended, LIMIT) {
                eprintln!("{name} has not ended in {} minutes: it waits for what does not come", LIMIT.as_secs() / 60);
                std::process::abort();
            }
        };
        Watchdog(Some((alive, thread::spawn(watch))))
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        if let Some((alive, watch)) = self.0.take() {
            drop(alive);
            // It panics nowhere.
            let _ = watch.join();
        }
    }
}

/// Whether nobody has ended within the limit.
fn is_overdue(ended: &Receiver<()>, limit: Duration) -> bool {
    ended.recv_timeout(limit) == Err(RecvTimeoutError::Timeout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_ends_in_time_is_left_alone() {
        let (alive, ended) = channel();
        assert!(is_overdue(&ended, Duration::from_millis(1)));
        drop(alive);
        assert!(!is_overdue(&ended, LIMIT), "at once");
        drop(Watchdog::new());
    }
}
