//! Refilling, as the thread that fills is told of it and tells: what is missing, when it waits, how far it is.

use super::{Daemon, REST, State};
use crate::memory_file::MemoryFile;
use crate::service;
use crate::status::Filling;
use crate::stock::missing;
use serde_json::json;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// A chunk that takes longer than this is filled by a thread that others keep from running: it takes hundredths of a second, the
/// largest page some tenths.
const STARVES: Duration = Duration::from_secs(2);

/// A file that is to be filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Missing {
    pub(crate) bytes: u64,
    /// With the bytes of which template; it is clear otherwise.
    pub(crate) template: Option<usize>,
}

impl State {
    /// Why nothing is filled though something is missing: what the thread that fills has said, or that it cannot say anything.
    pub(super) fn waiting(&self) -> Option<String> {
        let starves = || {
            let since = self.chunk.map(|since| since.elapsed()).filter(|since| *since > STARVES)?;
            let seconds = since.as_secs();
            Some(format!("filling gets no idle CPU for {seconds} s; name CPUs that have some with --cpus, or wait"))
        };
        self.waiting.clone().or_else(starves)
    }
}

impl Daemon {
    /// Waits until something is missing, and says what. `None`: the daemon stops.
    pub(crate) fn wait_for_missing(&self) -> Option<Vec<Missing>> {
        let mut state = self.state();
        loop {
            if state.stopping {
                return None;
            }
            let clear = missing(&self.config.shapes.0, &state.lengths()).into_iter();
            let page = self.config.page.bytes();
            let templates = state.templates.iter().enumerate();
            let filled = templates
                .filter_map(|(index, filled)| Some(Missing { bytes: filled.missing(page)?, template: Some(index) }));
            let missing: Vec<_> = clear.map(|bytes| Missing { bytes, template: None }).chain(filled).collect();
            if !state.drained && !missing.is_empty() {
                return Some(missing);
            }
            state.waiting = None;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// How long the next file is that is missing and clear.
    pub(crate) fn missing_clear(&self) -> Option<u64> {
        missing(&self.config.shapes.0, &self.state().lengths()).into_iter().next()
    }

    /// A file of that length is begun.
    pub(crate) fn begins(&self, bytes: u64) {
        self.goes_on(bytes, 0);
    }

    /// It is gone on with one of which so much is filled.
    pub(crate) fn goes_on(&self, bytes: u64, done: u64) {
        self.state().filling = Some(Filling { bytes, done, halvings: 0 });
    }

    /// How often the rate at which it grows was halved, because the machine is busy.
    pub(crate) fn gives_way(&self, halvings: u32) {
        let mut state = self.state();
        if let Some(filling) = &mut state.filling {
            filling.halvings = halvings;
        }
    }

    /// Waits for `pause`; false if there is nothing to go on with: the daemon stops, or is drained.
    pub(crate) fn may_go_on(&self, pause: Duration) -> bool {
        let state = self.state();
        let idle = |state: &mut State| !state.stopping && !state.drained;
        let waited = self.changed.wait_timeout_while(state, pause, idle);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !state.stopping && !state.drained
    }

    /// How much is left of the time after a lease in which nothing is filled.
    pub(crate) fn rest(&self) -> Duration {
        self.state().put_off.map_or(Duration::ZERO, |since| REST.saturating_sub(since.elapsed()))
    }

    /// A chunk is being filled from now on.
    pub(crate) fn fills(&self) {
        self.state().chunk = Some(Instant::now());
    }

    /// A chunk has been filled, in `time`, with so much CPU time.
    pub(crate) fn filled(&self, bytes: u64, time: Duration, cpu: Duration) {
        let mut state = self.state();
        (state.waiting, state.chunk) = (None, None);
        if let Some(filling) = &mut state.filling {
            filling.done += bytes;
        }
        state.counts.filled_bytes += bytes;
        state.counts.fill_ns += time.as_nanos() as u64;
        state.counts.fill_cpu_ns += cpu.as_nanos() as u64;
    }

    /// Why it does not go on at present.
    pub(crate) fn waits(&self, why: String) {
        let mut state = self.state();
        (state.waiting, state.chunk) = (Some(why), None);
    }

    /// A file is full, or was given up.
    pub(crate) fn fill_ended(&self, file: Option<MemoryFile>) {
        let bytes = file.and_then(|file| Some(file.bytes()).filter(|_| self.make_ready(file)));
        self.state().filling = None;
        bytes.into_iter().for_each(|bytes| self.log("filled", json!({ "bytes": bytes })));
    }

    /// Has a file ready that is full and nobody's; false if nothing is to be ready any more, and it goes back to the kernel.
    pub(super) fn make_ready(&self, file: MemoryFile) -> bool {
        // Before anybody can have it: the manager is told to let go of it after it was told to hold it.
        service::store(&file);
        let mut state = self.state();
        if state.drained {
            drop(state);
            service::let_go(&file);
            return false;
        }
        state.ready.push(file);
        self.changed.notify_all();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{BYTES, daemon};
    use crate::wire::RefusedKind;

    /// Who asks for what is not to be had does not keep the daemon from filling, and who leases again and again keeps it at most
    /// half of the time.
    #[test]
    fn filling_is_not_put_off_for_ever() {
        let daemon = daemon(&[1; 2]);
        daemon.gets(1);
        // Longer than any file: the kernel refuses at once.
        assert_eq!(daemon.lends(0, 1 << 63).expect_err("too long").kind, RefusedKind::Empty);
        assert_eq!((daemon.rest(), daemon.status().ready), (Duration::ZERO, vec![BYTES]));
        let leased_again = |after: Duration| {
            daemon.state().put_off = Instant::now().checked_sub(after);
            daemon.gets(1);
            daemon.lends(0, BYTES).expect("leased");
            daemon.rest() > Duration::ZERO
        };
        assert!(!leased_again(REST), "filling has its turn first");
        assert!(leased_again(2 * REST));
    }

    /// A thread at idle priority that gets no CPU says nothing; its daemon does.
    #[test]
    fn filling_that_gets_no_cpu_is_seen() {
        let daemon = daemon(&[1]);
        assert_eq!(daemon.wait_for_missing(), Some(vec![Missing { bytes: BYTES, template: None }]));
        daemon.begins(BYTES);
        daemon.fills();
        assert_eq!(daemon.waiting(), (None, true));
        daemon.state().chunk = Instant::now().checked_sub(STARVES + Duration::from_secs(1));
        assert!(daemon.waiting().0.is_some_and(|why| why.contains("no idle CPU for 3 s")));
        assert_eq!(daemon.status().waiting, daemon.waiting().0);
        daemon.filled(BYTES, Duration::ZERO, Duration::ZERO);
        assert_eq!(daemon.waiting(), (None, true));
    }
}
