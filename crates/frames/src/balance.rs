//! Trees of slots by the frames of their arenas, which stay balanced: the depths of what lies below and above a slot differ by one at most
//! (Adelson-Velsky and Landis 1962). So they are no deeper than 1.44 log2 of their slots, and a change writes as many slots, or a few times.

use crate::looks;
use crate::slots::{Link, Slot};
use hugemm_base::sync::{AtomicU64, Ordering};

pub(crate) const BELOW: usize = 0;
pub(crate) const ABOVE: usize = 1;

/// A slot's place in one of the trees.
#[derive(Debug)]
pub(crate) struct Knot {
    /// What lies below it and what lies above.
    pub(crate) sides: [Link; 2],
    /// Levels from here on.
    depth: AtomicU64,
}

impl Knot {
    pub(crate) fn new() -> Self {
        Knot { sides: [Link::new(), Link::new()], depth: AtomicU64::new(0) }
    }
}

impl Slot {
    /// What lies on one side of it in a tree.
    ///
    /// # Safety
    ///
    /// The slot is one of a manager that may be used for `'m`.
    pub(crate) unsafe fn side<'m>(&self, tree: usize, side: usize) -> Option<&'m Slot> {
        // SAFETY: passed on.
        unsafe { self.knots[tree].sides[side].next() }
    }

    /// Both.
    ///
    /// # Safety
    ///
    /// As [`side`](Slot::side).
    pub(crate) unsafe fn both<'m>(&self, tree: usize) -> [Option<&'m Slot>; 2] {
        // SAFETY: passed on.
        [BELOW, ABOVE].map(|side| unsafe { self.side(tree, side) })
    }

    /// On which side of it a slot lies that begins with another frame.
    pub(crate) fn side_of(&self, base: u64) -> usize {
        if base < self.base() { BELOW } else { ABOVE }
    }

    fn put(&self, tree: usize, side: usize, slot: Option<&Slot>) {
        self.knots[tree].sides[side].set(slot);
    }

    /// How many levels a tree has from here on, and from both sides on.
    ///
    /// # Safety
    ///
    /// As [`side`](Slot::side).
    unsafe fn depths(&self, tree: usize) -> [u64; 2] {
        // Relaxed: one at a time.
        let depth = |slot: Option<&Slot>| slot.map_or(0, |slot| slot.knots[tree].depth.load(Ordering::Relaxed));
        // SAFETY: passed on.
        unsafe { self.both(tree) }.map(depth)
    }

    /// One of its sides has changed.
    ///
    /// # Safety
    ///
    /// As [`side`](Slot::side).
    unsafe fn note(&self, tree: usize) {
        // SAFETY: passed on.
        let [below, above] = unsafe { self.depths(tree) };
        self.knots[tree].depth.store(below.max(above) + 1, Ordering::Relaxed);
        // SAFETY: passed on.
        unsafe { self.sum_up(tree) };
    }
}

/// Puts a slot into a tree, or takes it out.
///
/// # Safety
///
/// The tree, and the slot, are those of a manager that may be used for `'m`. Nobody else changes the tree, and whoever reads it meanwhile does
/// not go by what he reads.
pub(crate) unsafe fn change(tree: usize, root: &Link, slot: &Slot, comes: bool) {
    // SAFETY: passed on.
    root.set(unsafe { changed(tree, root.next(), slot, comes) });
}

/// A part of a tree as it is with a slot in it, or without.
///
/// # Safety
///
/// As [`change`].
unsafe fn changed<'m>(tree: usize, at: Option<&'m Slot>, slot: &'m Slot, comes: bool) -> Option<&'m Slot> {
    looks::count();
    // SAFETY: passed on, here and below.
    let next = unsafe {
        match at {
            None if comes => {
                slot.put(tree, BELOW, None);
                slot.put(tree, ABOVE, None);
                slot
            }
            None => return None,
            Some(at) if core::ptr::eq(at, slot) => match at.both(tree) {
                [below, Some(above)] if below.is_some() => {
                    // The next takes its place.
                    let next = lowest(tree, above);
                    next.put(tree, ABOVE, changed(tree, Some(above), next, false));
                    next.put(tree, BELOW, below);
                    next
                }
                [below, above] => return below.or(above),
            },
            Some(at) => {
                let side = at.side_of(slot.base());
                at.put(tree, side, changed(tree, at.side(tree, side), slot, comes));
                at
            }
        }
    };
    // SAFETY: passed on.
    Some(unsafe { balanced(tree, next) })
}

/// # Safety
///
/// As [`change`].
unsafe fn lowest(tree: usize, mut at: &Slot) -> &Slot {
    // SAFETY: passed on.
    while let Some(below) = unsafe { at.side(tree, BELOW) } {
        at = below;
    }
    at
}

/// A part of a tree of which one side is too deep by one level at most, balanced.
///
/// # Safety
///
/// As [`change`].
unsafe fn balanced(tree: usize, at: &Slot) -> &Slot {
    // SAFETY: passed on, here and below.
    unsafe {
        let [below, above] = at.depths(tree);
        let deep = if below > above { BELOW } else { ABOVE };
        if below.abs_diff(above) > 1
            && let Some(next) = at.side(tree, deep)
        {
            let depths = next.depths(tree);
            if depths[1 - deep] > depths[deep] {
                at.put(tree, deep, Some(turned(tree, next, 1 - deep)));
            }
            return turned(tree, at, deep);
        }
        at.note(tree);
        at
    }
}

/// A part of a tree with what is on one side at the top.
///
/// # Safety
///
/// As [`change`].
unsafe fn turned(tree: usize, at: &Slot, side: usize) -> &Slot {
    // SAFETY: passed on, here and below.
    unsafe {
        let Some(top) = at.side(tree, side) else { return at };
        at.put(tree, side, top.side(tree, 1 - side));
        top.put(tree, 1 - side, Some(at));
        at.note(tree);
        top.note(tree);
        top
    }
}
