//! Which of the arenas that were added to a node may have free memory of a kind.
//!
//! They are a [balanced](crate::balance) tree by their frames, in which each slot has a bit for each of the kinds of [`Rows`](crate::rows):
//! whether its arena, and whether any from there on down, may have some. So the lowest that may is found in O(log arenas). An arena's bit is
//! set with the first of its row, and a search that comes to an arena whose row has none clears it, as the bits that lead to free memory
//! everywhere.
//!
//! Everything here is under the node's lock.

use crate::arena::Arena;
use crate::balance::{self, ABOVE, BELOW};
use crate::slots::{Link, Slot};
use hugemm_base::Pfn;
use hugemm_base::sync::{AtomicU64, Ordering};

/// Kinds, as bits.
pub(crate) type Kinds = u128;

/// What every arena has.
const THERE: Kinds = 1 << 127;

/// The number of the tree among those of a slot.
const TREE: usize = 2;

/// What the arena in a slot may have, and what any may from there on down.
#[derive(Debug)]
pub(crate) struct Having {
    own: [AtomicU64; 2],
    all: [AtomicU64; 2],
}

impl Having {
    pub(crate) fn new() -> Self {
        let none = || [AtomicU64::new(0), AtomicU64::new(0)];
        Having { own: none(), all: none() }
    }
}

// Relaxed: the lock orders.
fn load(words: &[AtomicU64; 2]) -> Kinds {
    let [low, high] = words;
    u128::from(low.load(Ordering::Relaxed)) | u128::from(high.load(Ordering::Relaxed)) << 64
}

fn store(words: &[AtomicU64; 2], kinds: Kinds) {
    let [low, high] = words;
    low.store(kinds as u64, Ordering::Relaxed);
    high.store((kinds >> 64) as u64, Ordering::Relaxed);
}

impl Slot {
    /// # Safety
    ///
    /// As [`Slot::side`].
    unsafe fn all_on(&self, side: usize) -> Kinds {
        // SAFETY: passed on.
        unsafe { self.side(TREE, side) }.map_or(0, |slot| load(&slot.having.all))
    }

    /// What it, or something on one side of it in a tree, has may have changed.
    ///
    /// # Safety
    ///
    /// As [`Slot::side`].
    pub(crate) unsafe fn sum_up(&self, tree: usize) {
        if tree == TREE {
            // SAFETY: passed on.
            let sides = unsafe { self.all_on(BELOW) | self.all_on(ABOVE) };
            store(&self.having.all, load(&self.having.own) | sides);
        }
    }
}

/// The arenas that were added to a node.
#[derive(Debug)]
pub(crate) struct Added(Link);

impl Added {
    pub(crate) fn new() -> Self {
        Added(Link::new())
    }

    /// Whether there are none.
    ///
    /// # Safety
    ///
    /// They are those of a manager that may be used, here and below.
    #[inline]
    pub(crate) unsafe fn is_empty(&self) -> bool {
        // SAFETY: passed on.
        unsafe { self.0.next() }.is_none()
    }

    /// The lowest that has a frame from this one on, and may have some of the kinds. O(log arenas).
    ///
    /// # Safety
    ///
    /// The node's lock is held, here and below; they are those of a manager that may be used for `'m`.
    pub(crate) unsafe fn from<'m>(&self, pfn: Pfn, kinds: Kinds) -> Option<&'m Slot> {
        // SAFETY: passed on.
        unsafe { first(self.0.next(), pfn, kinds) }
    }

    /// The lowest that has a frame from this one on.
    ///
    /// # Safety
    ///
    /// As above.
    pub(crate) unsafe fn any_from<'m>(&self, pfn: Pfn) -> Option<&'m Slot> {
        // SAFETY: passed on.
        unsafe { self.from(pfn, THERE) }
    }

    /// An arena has come into a slot, or goes from it. O(log arenas).
    ///
    /// # Safety
    ///
    /// As above.
    pub(crate) unsafe fn change<'m>(&self, slot: &'m Slot, comes: bool) {
        store(&slot.having.own, THERE);
        // SAFETY: passed on.
        unsafe { balance::change(TREE, &self.0, slot, comes) };
    }

    /// An arena may have some of a kind now. O(log arenas).
    ///
    /// # Safety
    ///
    /// As above.
    pub(crate) unsafe fn raise(&self, arena: &Arena<'_>, kind: usize) {
        let base = arena.extent.base().get();
        // SAFETY: passed on, here and below.
        let mut at = unsafe { self.0.next() };
        while let Some(slot) = at {
            let Having { own, all } = &slot.having;
            store(all, load(all) | 1 << kind);
            if slot.base() == base {
                store(own, load(own) | 1 << kind);
                return;
            }
            at = unsafe { slot.side(TREE, if base < slot.base() { BELOW } else { ABOVE }) };
        }
    }

    /// What of some kinds the arena in a slot may have, after a look at its rows. O(log arenas) if that is not what was known.
    ///
    /// # Safety
    ///
    /// As above, and the arena is the slot's.
    pub(crate) unsafe fn look<'m>(&self, slot: &'m Slot, arena: &Arena<'_>, kinds: Kinds) -> Kinds {
        let own = load(&slot.having.own);
        let none = arena.rows.none_of(own & kinds);
        if none != 0 {
            store(&slot.having.own, own & !none);
            // SAFETY: passed on.
            unsafe { self.0.next().map(|root| again(root, slot)) };
        }
        own & kinds & !none
    }
}

/// Sums up what there is from a slot to one that has changed.
///
/// # Safety
///
/// As [`Added::from`].
unsafe fn again<'m>(at: &'m Slot, changed: &'m Slot) {
    // SAFETY: passed on, here and below.
    unsafe {
        if !core::ptr::eq(at, changed) {
            let side = if changed.base() < at.base() { BELOW } else { ABOVE };
            at.side(TREE, side).map(|next| again(next, changed));
        }
        at.sum_up(TREE);
    }
}

/// # Safety
///
/// As [`Added::from`].
unsafe fn first<'m>(at: Option<&'m Slot>, pfn: Pfn, kinds: Kinds) -> Option<&'m Slot> {
    let slot = at?;
    if load(&slot.having.all) & kinds == 0 {
        return None;
    }
    // SAFETY: passed on, here and below.
    unsafe {
        if slot.content()?.extent.end() > pfn {
            let found = first(slot.side(TREE, BELOW), pfn, kinds);
            if found.is_some() {
                return found;
            }
            if load(&slot.having.own) & kinds != 0 {
                return at;
            }
        }
        first(slot.side(TREE, ABOVE), pfn, kinds)
    }
}
