//! Who owns which frame, and what must never happen.

use super::index;
use hugemm_base::{CpuId, Extent, Pfn, VirtAddr};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Something that must not happen did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Violation {
    /// A CPU accessed a frame through a translation that it remembers from before the frame was freed.
    StaleUse {
        /// The CPU.
        cpu: CpuId,
        /// The address.
        at: VirtAddr,
        /// The frame.
        frame: Pfn,
    },
    /// A CPU walked, or started a walk from, a page table that is free or has been since the CPU saw it.
    FreedTable {
        /// The CPU.
        cpu: CpuId,
        /// The address that it walked for.
        at: VirtAddr,
        /// The table.
        table: Pfn,
    },
    /// An entry in use points to a free frame.
    FreeMapped {
        /// The CPU.
        cpu: CpuId,
        /// The address.
        at: VirtAddr,
        /// The frame.
        frame: Pfn,
    },
    /// A store went to the frame that an address had before it was remapped: it is lost.
    LostStore {
        /// The CPU.
        cpu: CpuId,
        /// The address.
        at: VirtAddr,
        /// The frame it went to.
        frame: Pfn,
    },
    /// A CPU read bytes that another has stored past the cache and not fenced.
    Unpublished {
        /// The CPU.
        cpu: CpuId,
        /// The address.
        at: VirtAddr,
    },
    /// A frame that is free was freed.
    FreedTwice {
        /// The frame.
        frame: Pfn,
    },
    /// A CPU came to know two translations of an address that differ in size or address, where tables are arm64's: an entry
    /// was changed in place that had to be broken first.
    Conflict {
        /// The CPU.
        cpu: CpuId,
        /// The address.
        at: VirtAddr,
    },
    /// A CPU found a leaf that says it is one of a folded group, and the group is not whole or not uniform.
    Group {
        /// The CPU.
        cpu: CpuId,
        /// The address.
        at: VirtAddr,
    },
    /// An entry points outside memory.
    Wild {
        /// The address.
        at: VirtAddr,
        /// Where it points.
        frame: Pfn,
    },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Violation::StaleUse { cpu, at, frame } => {
                write!(f, "{cpu} used {at} through a stale translation to {frame}, which has been freed")
            }
            Violation::FreedTable { cpu, at, table } => write!(f, "{cpu} walked {at} through the freed table {table}"),
            Violation::FreeMapped { cpu, at, frame } => write!(f, "{cpu} found {at} mapped to {frame}, which is free"),
            Violation::LostStore { cpu, at, frame } => {
                write!(f, "{cpu} stored at {at} through a stale translation to {frame}; the store is lost")
            }
            Violation::Unpublished { cpu, at } => write!(f, "{cpu} read {at} before it was published"),
            Violation::Conflict { cpu, at } => {
                write!(f, "{cpu} has two translations of {at}: an entry was changed that had to be broken first")
            }
            Violation::Group { cpu, at } => write!(f, "{cpu} found {at} in a folded group whose entries do not agree"),
            Violation::FreedTwice { frame } => write!(f, "{frame} was freed twice"),
            Violation::Wild { at, frame } => write!(f, "{at} leads to {frame}, which is no memory"),
        }
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
    violations: Mutex<Vec<Violation>>,
}

impl Oracle {
    pub(super) fn new(frames: Extent) -> Self {
        let each = || 0..frames.pages();
        Oracle {
            clock: AtomicU64::new(0),
            stamps: each().map(|_| AtomicU64::new(0)).collect(),
            written: each().map(|_| AtomicBool::new(false)).collect(),
            violations: Mutex::new(Vec::new()),
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
                self.report(Violation::FreedTwice { frame });
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

    pub(super) fn report(&self, violation: Violation) {
        self.violations.lock().unwrap_or_else(PoisonError::into_inner).push(violation);
    }

    pub(super) fn first(&self) -> Option<Violation> {
        self.violations.lock().unwrap_or_else(PoisonError::into_inner).first().copied()
    }
}

fn frames(extent: Extent) -> impl Iterator<Item = Pfn> {
    (extent.base().get()..extent.end().get()).map(Pfn::new)
}
