//! One node, and what is known of a block that comes to it or leaves it.

use crate::freelist::FreeLists;
use crate::having::Added;
use crate::rows::Rows;
use hugemm_base::lock::{PinnedLock, RawLock};
use hugemm_base::sync::AtomicU64;
use hugemm_base::{NodeId, Pfn};

/// One NUMA node's free memory. On lines of its own.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct Node<'m, L> {
    pub(crate) lists: PinnedLock<L, FreeLists>,
    /// Where what is counted there is. Written under the lock.
    pub(crate) rows: Rows<'m>,
    /// All nodes from this one on, the nearest first; empty if all are as far.
    pub(crate) fallback: &'m [NodeId],
    /// Blocks freed by whoever must not wait: a stack through their descriptors. See `nowait`.
    pub(crate) deferred: AtomicU64,
    /// Frames on it.
    pub(crate) deferred_pages: AtomicU64,
    /// Whether known-zero blocks were free when the lock was last released: a hint.
    pub(crate) zero_hint: AtomicU64,
    /// Arenas that were added to it. Under the lock.
    pub(crate) added: Added,
}

impl<'m, L: RawLock> Node<'m, L> {
    pub(crate) fn new(number: NodeId, rows: Rows<'m>, fallback: &'m [NodeId]) -> Self {
        Node {
            lists: PinnedLock::new(FreeLists::new(number)),
            rows,
            fallback,
            deferred: AtomicU64::new(0),
            deferred_pages: AtomicU64::new(0),
            zero_hint: AtomicU64::new(0),
            added: Added::new(),
        }
    }
}

/// What the freer of a block knows of its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    Dirty,
    Zero,
    /// Goes back to where it was: the region's zero bits still hold.
    AsMapped,
}

impl Content {
    pub(crate) const fn of(zero: bool) -> Self {
        if zero { Content::Zero } else { Content::Dirty }
    }
}

/// A block taken out of the lists: whole in the map, nobody's, refcounts zero.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) pfn: Pfn,
    pub(crate) zero: bool,
}
