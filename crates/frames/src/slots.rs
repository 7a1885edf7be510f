//! Slots for arenas that come and go, and two trees in which the one of a frame is found.
//!
//! The slots form a list that only ever gets longer, at its end. Those that hold an arena are, besides, a balanced tree by the frames of
//! their arenas. There are two such trees, in links of their own: readers use one, and whoever changes something makes the other as it
//! shall be and has readers use that ([`Tree`]). So a search takes as many steps as a slot number has bits, wherever it is held up, and
//! also in an NMI that has interrupted a change.
//!
//! Nobody says that he reads. A reader who finds at the end that the trees have been exchanged meanwhile may have seen the one that is
//! made for the next change, and looks again.

use crate::arena::Arena;
use crate::arenas::Kept;
use crate::looks;
use core::ptr::null_mut;
use hugemm_base::sync::{AtomicPtr, AtomicU64, Ordering, fence};
use hugemm_base::{Extent, NodeId, Pfn};

/// A link: to another slot, or to none. Without a type, so that a manager's lifetime can be shortened as before; it points to a [`Slot`].
#[derive(Debug)]
pub(crate) struct Link(AtomicPtr<u8>);

impl Link {
    pub(crate) fn new() -> Self {
        Link(AtomicPtr::new(null_mut()))
    }

    /// The slot behind it.
    ///
    /// # Safety
    ///
    /// The link is one of a manager that may be used for `'m`.
    #[inline]
    pub(crate) unsafe fn next<'m>(&self) -> Option<&'m Slot> {
        // Acquire pairs with the Release in `set`.
        // SAFETY: null, or what `Arenas::add` has written, which stays as long as the manager.
        unsafe { self.0.load(Ordering::Acquire).cast::<Slot>().as_ref() }
    }

    pub(crate) fn set(&self, slot: Option<&Slot>) {
        // Release: whoever finds the slot finds what is in it.
        self.0.store(slot.map_or(null_mut(), |slot| core::ptr::from_ref(slot).cast_mut().cast()), Ordering::Release);
    }
}

/// A place for an arena that comes, and may go again. A page of its own: the rest of the memory goes with the arena.
#[derive(Debug)]
#[cfg_attr(not(loom), repr(align(4096)))]
pub(crate) struct Slot {
    /// Odd while an arena is here. Written, as all of this, by who changes the list, one at a time.
    turn: AtomicU64,
    base: AtomicU64,
    pages: AtomicU64,
    node: AtomicU64,
    /// A [`Kept`].
    kept: AtomicPtr<u8>,
    pub(crate) next: Link,
    /// In each of the trees, what lies below it and what lies above.
    sides: [[Link; 2]; 2],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Slot>() == hugemm_base::PAGE_BYTES as usize);

/// An arena that was added, as its slot has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) extent: Extent,
    pub(crate) node: NodeId,
    kept: *const u8,
}

impl Seen {
    /// What is kept about it.
    ///
    /// # Safety
    ///
    /// The arena does not go for `'m`, or until the caller is done.
    pub(crate) unsafe fn kept<'m>(self) -> &'m Kept<'m> {
        // SAFETY: `Slot::fill` was given it, and it is there until the arena goes.
        unsafe { &*self.kept.cast() }
    }
}

impl Slot {
    pub(crate) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        let sides = || [Link::new(), Link::new()];
        Slot {
            turn: zero(),
            base: zero(),
            pages: zero(),
            node: zero(),
            kept: AtomicPtr::new(null_mut()),
            next: Link::new(),
            sides: [sides(), sides()],
        }
    }

    /// The arena that is here; none if one comes or goes at this moment.
    pub(crate) fn seen(&self) -> Option<Seen> {
        // Acquire pairs with the Release at the end of `fill`.
        let turn = self.turn.load(Ordering::Acquire);
        let seen = self.content();
        // Acquire pairs with the Release fence in `fill`: whoever has read any of what stands there next sees that the turn is over.
        fence(Ordering::Acquire);
        if turn.is_multiple_of(2) || self.turn.load(Ordering::Relaxed) != turn {
            return None;
        }
        seen
    }

    /// What stands here: nothing that belongs together, unless the caller looks at a turn or at a tree's number before and after.
    #[inline]
    fn content(&self) -> Option<Seen> {
        looks::count();
        let word = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let (base, pages, node) = (word(&self.base), word(&self.pages), word(&self.node));
        let kept = self.kept.load(Ordering::Relaxed);
        Some(Seen { extent: Extent::new(Pfn::new(base), pages).ok()?, node: NodeId::new(node as u32), kept })
    }

    /// An arena comes. The slot is empty.
    pub(crate) fn fill(&self, arena: &Arena<'_>, kept: *mut u8) {
        // Release, with the Acquire fences in `seen` and in `Tree::from`: the turn is over, and the slot off the tree, before anything of the
        // next is seen.
        fence(Ordering::Release);
        self.base.store(arena.extent.base().get(), Ordering::Relaxed);
        self.pages.store(arena.extent.pages(), Ordering::Relaxed);
        self.node.store(arena.node.get().into(), Ordering::Relaxed);
        self.kept.store(kept, Ordering::Relaxed);
        self.take_turn(Ordering::Release);
    }

    /// One goes.
    pub(crate) fn vacate(&self) {
        // Relaxed: `fill` orders what comes after.
        self.take_turn(Ordering::Relaxed);
    }

    /// The first frame of its arena, for whoever changes something.
    fn base(&self) -> u64 {
        // Relaxed: one at a time.
        self.base.load(Ordering::Relaxed)
    }

    fn take_turn(&self, order: Ordering) {
        // Relaxed: one at a time.
        self.turn.store(self.turn.load(Ordering::Relaxed) + 1, order);
    }
}

const BELOW: usize = 0;
const ABOVE: usize = 1;

/// More levels than a tree has.
const LEVELS: u32 = usize::BITS;

/// The slots that hold an arena, by its frames.
#[derive(Debug)]
pub(crate) struct Tree {
    /// How often something has changed; modulo 2 which of the trees readers use.
    changes: AtomicU64,
    roots: [Link; 2],
}

impl Tree {
    pub(crate) fn new() -> Self {
        Tree { changes: AtomicU64::new(0), roots: [Link::new(), Link::new()] }
    }

    /// The lowest arena that has a frame from this one on, and its slot. O(log arenas). Any context.
    ///
    /// # Safety
    ///
    /// The tree is that of a manager that may be used for `'m`.
    #[inline(never)]
    pub(crate) unsafe fn from<'m>(&self, pfn: Pfn) -> Option<(&'m Slot, Seen)> {
        loop {
            // Acquire pairs with the Release in `exchange`.
            let changes = self.changes.load(Ordering::Acquire);
            let tree = (changes % 2) as usize;
            // SAFETY: the manager's own links.
            let (mut at, mut found): (Option<&'m Slot>, _) = (unsafe { self.roots[tree].next() }, None);
            // Whoever reads a tree that is being made may go round in it.
            for _ in 0..LEVELS {
                let Some((slot, seen)) = at.and_then(|slot| Some((slot, slot.content()?))) else { break };
                let ends = seen.extent.end() <= pfn;
                if !ends {
                    found = Some((slot, seen));
                }
                // SAFETY: as above.
                at = unsafe { slot.sides[tree][if ends { ABOVE } else { BELOW }].next() };
            }
            // Acquire pairs with the Release fence in `fill`: whoever has read any of what stands there next sees that the trees have been
            // exchanged. Who has read a link of what is made next sees that by the link.
            fence(Ordering::Acquire);
            if self.changes.load(Ordering::Relaxed) == changes {
                return found;
            }
        }
    }

    /// Makes the tree that readers do not use as it is when an arena has come into a slot, or one has gone from a slot. O(arenas).
    ///
    /// # Safety
    ///
    /// Nobody else changes anything, and the tree is that of a manager that may be used for `'m`.
    pub(crate) unsafe fn prepare<'m>(&self, mut comes: Option<&'m Slot>, goes: Option<&'m Slot>) {
        // Relaxed: one at a time.
        let old = (self.changes.load(Ordering::Relaxed) % 2) as usize;
        let new = 1 - old;
        let (mut first, mut last, mut count) = (None, None, 0);
        let mut append = |slot: &'m Slot| {
            match last.replace(slot) {
                Some(last) => last.sides[new][ABOVE].set(Some(slot)),
                None => first = Some(slot),
            }
            count += 1;
        };
        let mut each = |slot: &'m Slot| {
            if let Some(lower) = comes.take_if(|comes| comes.base() < slot.base()) {
                append(lower);
            }
            if !goes.is_some_and(|goes| core::ptr::eq(goes, slot)) {
                append(slot);
            }
        };
        // SAFETY: the manager's own links; nobody else changes any.
        unsafe { in_order(self.roots[old].next(), old, &mut each) };
        comes.into_iter().for_each(append);
        // SAFETY: as above.
        self.roots[new].set(unsafe { balanced(new, count, &mut first) });
    }

    /// Has readers use the tree that was [prepared](Tree::prepare).
    pub(crate) fn exchange(&self) {
        // Relaxed: one at a time. Release pairs with the Acquire in `from`: whoever uses the tree sees it.
        self.changes.store(self.changes.load(Ordering::Relaxed) + 1, Ordering::Release);
    }
}

/// Every slot of a tree, in ascending order.
///
/// # Safety
///
/// The tree is that of a manager that may be used for `'m`, and nobody changes it.
unsafe fn in_order<'m>(root: Option<&'m Slot>, tree: usize, each: &mut impl FnMut(&'m Slot)) {
    let Some(slot) = root else { return };
    // SAFETY: passed on.
    unsafe { in_order(slot.sides[tree][BELOW].next(), tree, each) };
    each(slot);
    // SAFETY: passed on.
    unsafe { in_order(slot.sides[tree][ABOVE].next(), tree, each) };
}

/// Makes a tree of the next `count` slots of a list in ascending order, whose links are those to what lies above in that tree.
///
/// # Safety
///
/// The slots are those of a manager that may be used for `'m`, and nobody else changes them.
unsafe fn balanced<'m>(tree: usize, count: usize, rest: &mut Option<&'m Slot>) -> Option<&'m Slot> {
    if count == 0 {
        return None;
    }
    // SAFETY: passed on.
    let below = unsafe { balanced(tree, count / 2, rest) };
    let slot = (*rest)?;
    let [lower, higher] = &slot.sides[tree];
    // SAFETY: passed on.
    let above = unsafe {
        *rest = higher.next();
        balanced(tree, count - count / 2 - 1, rest)
    };
    lower.set(below);
    higher.set(above);
    Some(slot)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::looks::tests::LOOKS;
    use hugemm_base::random::Random;
    use std::collections::BTreeMap;

    /// Whatever has come and gone: the arena of a frame, or the next above, is found, in as many steps as the number of arenas has bits.
    #[test]
    fn the_lowest_arena_from_a_frame_on_is_found_in_a_few_steps() {
        let (tree, slots) = (Tree::new(), Vec::from_iter((0..100).map(|_| Slot::new())));
        let (mut there, mut random) = (BTreeMap::new(), Random(7));
        for _ in 0..if cfg!(miri) { 60 } else { 2000 } {
            // An arena of 5 frames at a multiple of 10.
            let at = random.below(slots.len() as u64) as usize;
            let base = at as u64 * 7 % 100 * 10;
            // SAFETY: one changes them, and they are there as long as the tree.
            unsafe {
                if there.insert(base, at).is_none() {
                    let extent = Extent::new(Pfn::new(base), 5).expect("in range");
                    slots[at].fill(&Arena::bare(extent), null_mut());
                    tree.prepare(Some(&slots[at]), None);
                } else {
                    _ = there.remove(&base);
                    slots[at].vacate();
                    // What was prepared may be given up.
                    tree.prepare(None, there.values().next().map(|at| &slots[*at]));
                    tree.prepare(None, Some(&slots[at]));
                }
            }
            tree.exchange();
            for pfn in [base, base + 4, base + 5, random.below(1010)] {
                let before = LOOKS.get();
                // SAFETY: as above.
                let found = unsafe { tree.from(Pfn::new(pfn)) }.map(|(_, seen)| seen.extent.base().get());
                assert_eq!(found, there.range(pfn.saturating_sub(4)..).next().map(|(base, _)| *base));
                assert!(LOOKS.get() - before <= u64::from(usize::BITS - there.len().leading_zeros()));
            }
        }
    }
}
