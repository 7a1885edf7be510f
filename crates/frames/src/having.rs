//! Which of the arenas that were added to a node may have free memory of a kind.
//!
//! They are a [balanced](crate::balance) tree by their frames, in which each slot has a bit for each of the kinds of [`Rows`](crate::rows):
//! whether its arena, and whether any from there on down, may have some. So the lowest that may is found in O(log arenas). An arena's bit is
//! set with the first of its row, and a search that comes to an arena whose row has none clears it, as the bits that lead to free memory
//! everywhere.
//!
//! Everything here is under the node's lock.

use crate::balance::{self, ABOVE, BELOW};
use crate::looks;
use crate::rows::SMALL_KINDS;
use crate::slots::{Link, Slot};
use core::ops::Range;
use hugemm_base::Pfn;
use hugemm_base::sync::{AtomicU64, Ordering};

/// Some kinds, of what is less than 2 MiB or of what is more: the number of the word that has their bits, and these.
#[derive(Clone, Copy)]
pub(crate) struct Kinds {
    word: usize,
    bits: u64,
}

impl Kinds {
    /// What every arena has.
    const THERE: Kinds = Kinds { word: 0, bits: 1 << 63 };

    /// Those of some numbers in a row.
    pub(crate) fn range(numbers: &Range<usize>) -> Self {
        let word = usize::from(numbers.start >= SMALL_KINDS);
        let bits = (1 << numbers.len()) - 1;
        Kinds { word, bits: bits << (numbers.start - word * SMALL_KINDS) }
    }
}

/// The number of the tree among those of a slot.
const TREE: usize = 2;

/// What the arena in a slot may have, and what any may from there on down.
#[derive(Debug)]
pub(crate) struct Having {
    own: [AtomicU64; 2],
    all: [AtomicU64; 2],
}

// Relaxed: the lock orders.
impl Having {
    pub(crate) fn new() -> Self {
        let none = || [AtomicU64::new(0), AtomicU64::new(0)];
        Having { own: none(), all: none() }
    }

    fn own(&self, word: usize) -> u64 {
        self.own[word].load(Ordering::Relaxed)
    }

    fn all(&self, word: usize) -> u64 {
        self.all[word].load(Ordering::Relaxed)
    }
}

impl Slot {
    /// What it, or something on one side of it in a tree, has may have changed.
    ///
    /// # Safety
    ///
    /// As [`Slot::side`].
    pub(crate) unsafe fn sum_up(&self, tree: usize) {
        if tree != TREE {
            return;
        }
        for (word, all) in self.having.all.iter().enumerate() {
            // SAFETY: passed on.
            let sides = unsafe { self.both(TREE) }.into_iter().flatten();
            all.store(sides.fold(self.having.own(word), |sum, slot| sum | slot.having.all(word)), Ordering::Relaxed);
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
        unsafe { self.from(pfn, Kinds::THERE) }
    }

    /// An arena has come into a slot, or goes from it. O(log arenas).
    ///
    /// # Safety
    ///
    /// As above.
    pub(crate) unsafe fn change(&self, slot: &Slot, comes: bool) {
        let [low, high] = &slot.having.own;
        low.store(Kinds::THERE.bits, Ordering::Relaxed);
        high.store(0, Ordering::Relaxed);
        // SAFETY: passed on.
        unsafe { balance::change(TREE, &self.0, slot, comes) };
    }

    /// The arena that begins with a frame may have some of a kind now. O(log arenas).
    ///
    /// # Safety
    ///
    /// As above.
    pub(crate) unsafe fn raise(&self, base: Pfn, kind: usize) {
        let Kinds { word, bits } = Kinds::range(&(kind..kind + 1));
        let raise =
            |words: &[AtomicU64; 2]| words[word].store(words[word].load(Ordering::Relaxed) | bits, Ordering::Relaxed);
        // SAFETY: passed on.
        let mut at = unsafe { self.0.next() };
        while let Some(slot) = at {
            looks::count();
            raise(&slot.having.all);
            if slot.base() == base.get() {
                return raise(&slot.having.own);
            }
            // SAFETY: passed on.
            at = unsafe { slot.side(TREE, slot.side_of(base.get())) };
        }
    }

    /// The arena in a slot certainly has none of some kinds. O(log arenas).
    ///
    /// # Safety
    ///
    /// As above.
    pub(crate) unsafe fn lower(&self, slot: &Slot, kinds: Kinds) {
        let own = slot.having.own(kinds.word) & !kinds.bits;
        slot.having.own[kinds.word].store(own, Ordering::Relaxed);
        // SAFETY: passed on.
        unsafe { again(self.0.next(), slot) };
    }
}

/// Sums up what there is from a slot to one that has changed.
///
/// # Safety
///
/// As [`Added::from`].
unsafe fn again<'m>(at: Option<&'m Slot>, changed: &'m Slot) {
    let Some(at) = at else { return };
    // SAFETY: passed on, here and below.
    unsafe {
        if !core::ptr::eq(at, changed) {
            again(at.side(TREE, at.side_of(changed.base())), changed);
        }
        at.sum_up(TREE);
    }
}

/// # Safety
///
/// As [`Added::from`].
#[inline(never)]
unsafe fn first(at: Option<&Slot>, pfn: Pfn, kinds: Kinds) -> Option<&Slot> {
    let slot = at?;
    looks::count();
    if slot.having.all(kinds.word) & kinds.bits == 0 {
        return None;
    }
    // SAFETY: passed on, here and below.
    unsafe {
        if slot.end() > pfn {
            let found = first(slot.side(TREE, BELOW), pfn, kinds);
            if found.is_some() {
                return found;
            }
            if slot.having.own(kinds.word) & kinds.bits != 0 {
                return at;
            }
        }
        first(slot.side(TREE, ABOVE), pfn, kinds)
    }
}
