//! Who owns which frame, and what must never happen.

use super::index;
use hugemm_base::{Extent, Pfn};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Something that must not happen did: who did it where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(String);

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Violation {}

/// Bit 0 of a frame's stamp: it is free. The rest: when it was freed last.
const FREE: u64 = 1;

pub(super) struct Oracle {
    /// Counts frees.
    clock: AtomicU64,
    stamps: Vec<AtomicU64>,
    written: Vec<AtomicBool>,
    first: Mutex<Option<Violation>>,
}

impl Oracle {
    pub(super) fn new(frames: Extent) -> Self {
        let each = || 0..frames.pages();
        Oracle {
            clock: AtomicU64::new(0),
            stamps: each().map(|_| AtomicU64::new(0)).collect(),
            written: each().map(|_| AtomicBool::new(false)).collect(),
            first: Mutex::new(None),
        }
    }

    /// The time to remember with something seen now.
    pub(super) fn now(&self) -> u64 {
        self.clock.load(Ordering::SeqCst)
    }

    pub(super) fn allocated(&self, extent: Extent) {
        for frame in frames(extent) {
            if let Some(stamp) = self.stamps.get(index(frame)) {
                stamp.fetch_and(!FREE, Ordering::SeqCst);
            }
        }
    }

    pub(super) fn freed(&self, extent: Extent) {
        let now = self.clock.fetch_add(1, Ordering::SeqCst) + 1;
        for frame in frames(extent) {
            let Some(stamp) = self.stamps.get(index(frame)) else { continue };
            if stamp.swap(now << 1 | FREE, Ordering::SeqCst) & FREE != 0 {
                self.report(format!("{frame} was freed twice"));
            }
        }
    }

    /// Whether the frame has been freed since `seen`.
    pub(super) fn freed_since(&self, frame: Pfn, seen: u64) -> bool {
        self.stamps.get(index(frame)).is_some_and(|stamp| stamp.load(Ordering::SeqCst) >> 1 > seen)
    }

    /// Whether the frame is free.
    pub(super) fn is_free(&self, frame: Pfn) -> bool {
        self.stamps.get(index(frame)).is_some_and(|stamp| stamp.load(Ordering::SeqCst) & FREE != 0)
    }

    pub(super) fn wrote(&self, frame: Pfn) {
        if let Some(written) = self.written.get(index(frame)) {
            written.store(true, Ordering::SeqCst);
        }
    }

    pub(super) fn take_written(&self, frame: Pfn) -> bool {
        self.written.get(index(frame)).is_some_and(|written| written.swap(false, Ordering::SeqCst))
    }

    /// Notes a violation, if it is the first.
    pub(super) fn report(&self, what: String) {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(Violation(what));
    }

    pub(super) fn first(&self) -> Option<Violation> {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn frames(extent: Extent) -> impl Iterator<Item = Pfn> {
    (extent.base().get()..extent.end().get()).map(Pfn::new)
}
