//! The arenas of a manager, and which of them a frame is in.
//!
//! Those that it was made with are a table. Others come while it runs: memory that is found or plugged in later. Each of them brings
//! the memory for everything that is kept about it, its own bits that lead to what is free included; nothing of what there was is
//! moved or grown. They form a list that only ever gets longer, at its end. A node looks there last. What is in such an arena is
//! freed to the CPUs' caches at the second look, not at the first.

use crate::arena::{Arena, ArenaSpec, REGION_ORDER, touched};
use crate::freelist::Places;
use crate::layout::{Carver, FramesConfigError, fill_arena, place_arena};
use crate::rows::Rows;
use core::alloc::Layout;
use hugemm_base::sync::{AtomicPtr, AtomicU64, Ordering};
use hugemm_base::{Extent, NodeId, Pfn};

/// A place in the list: the next arena, or none. Without a type, so that a manager's lifetime can be shortened as before; it points
/// to a [`Later`].
#[derive(Debug)]
pub(crate) struct Added(AtomicPtr<u8>);

impl Added {
    pub(crate) fn new() -> Self {
        Added(AtomicPtr::new(core::ptr::null_mut()))
    }

    /// The arena behind it.
    ///
    /// # Safety
    ///
    /// The link is one of a manager that may be used for `'m`.
    unsafe fn next<'m>(&self) -> Option<&'m Later<'m>> {
        // Acquire pairs with the Release of whoever has linked it.
        // SAFETY: null, or what `Frames::add` has written, which stays as long as the manager.
        unsafe { self.0.load(Ordering::Acquire).cast::<Later<'m>>().as_ref() }
    }
}

/// An arena that was added.
#[derive(Debug)]
struct Later<'m> {
    arena: Arena<'m>,
    next: Added,
}

fn place(spec: &ArenaSpec) -> Result<Layout, FramesConfigError> {
    if spec.extent.is_empty() {
        return Err(FramesConfigError::Empty);
    }
    let mut carver = Carver::at(core::ptr::null_mut());
    carver.place::<Later<'_>>(1)?;
    carver.place::<AtomicU64>(Rows::words(touched(spec.extent, REGION_ORDER)))?;
    place_arena(&mut carver, spec)?;
    carver.layout()
}

/// All arenas of a manager.
#[derive(Debug)]
pub(crate) struct Arenas<'m> {
    /// Those that it was made with, in ascending order.
    given: &'m [Arena<'m>],
    added: Added,
    /// Frames in those that it was made with.
    frames: u64,
}

impl<'m> Arenas<'m> {
    /// These, of so many frames.
    pub(crate) fn new(given: &'m [Arena<'m>], frames: u64) -> Self {
        Arenas { given, added: Added::new(), frames }
    }

    /// The first of those that the manager was made with.
    #[inline]
    pub(crate) fn first(&self) -> Option<&'m Arena<'m>> {
        self.given.first()
    }

    /// Those that were added, in that order.
    fn added(&self) -> impl Iterator<Item = &'m Arena<'m>> + use<'m> {
        // SAFETY: the manager's own link.
        let first = unsafe { self.added.next() };
        // SAFETY: a link in the manager's list.
        core::iter::successors(first, |later| unsafe { later.next.next() }).map(|later| &later.arena)
    }

    /// Those that the manager was made with in ascending order, then those that were added.
    pub(crate) fn all(&self) -> impl Iterator<Item = &'m Arena<'m>> + use<'m> {
        self.given.iter().chain(self.added())
    }

    /// Frames in all of them.
    pub(crate) fn frames(&self) -> u64 {
        self.frames + self.added().map(|arena| arena.extent.pages()).sum::<u64>()
    }

    /// The arena of a frame. O(log arenas), one comparison for the first; O(arenas) for those that were added.
    #[inline]
    pub(crate) fn of(&self, pfn: Pfn) -> Option<&'m Arena<'m>> {
        let first = self.given.first()?;
        if first.contains(pfn) { Some(first) } else { self.later(pfn) }
    }

    #[cold]
    #[inline(never)]
    fn later(&self, pfn: Pfn) -> Option<&'m Arena<'m>> {
        let after = self.given.partition_point(|arena| arena.extent.base() <= pfn);
        let found = after.checked_sub(1).and_then(|at| self.given.get(at)).filter(|arena| arena.contains(pfn));
        found.or_else(|| self.added().find(|arena| arena.contains(pfn)))
    }

    /// Their parts of an extent, in the order of [`all`](Arenas::all).
    pub(crate) fn parts(&self, extent: Extent) -> impl Iterator<Item = (&'m Arena<'m>, Extent)> + use<'m> {
        let from = self.given.partition_point(|arena| arena.extent.end() <= extent.base());
        let upto = self.given.iter().skip(from).take_while(move |arena| arena.extent.base() < extent.end());
        let added = self.added().filter(move |arena| !arena.extent.intersection(extent).is_empty());
        upto.chain(added)
            .map(move |arena| (arena, extent.intersection(arena.extent)))
            .filter(|(_, part)| !part.is_empty())
    }

    /// Where a node's free blocks are, by its own rows and by those of arenas that were added, which come last.
    pub(crate) fn places(&self, node: NodeId, rows: Option<Rows<'m>>) -> impl Iterator<Item = Places<'m>> + use<'m> {
        let arenas = self.given;
        let first = rows.map(|rows| Places { rows, arenas });
        let added = self.added().filter(move |arena| arena.node == node);
        first.into_iter().chain(added.map(|arena| Places { rows: arena.rows, arenas: core::slice::from_ref(arena) }))
    }

    /// Size and alignment of the metadata that [`add`](Arenas::add) needs for an arena.
    pub(crate) fn added_bytes(spec: &ArenaSpec) -> Result<Layout, FramesConfigError> {
        place(spec)
    }

    /// Adds an arena.
    ///
    /// # Safety
    ///
    /// As [`Frames::add`](crate::Frames::add).
    pub(crate) unsafe fn add(&self, spec: &ArenaSpec, memory: *mut u8, bytes: usize) -> Result<(), FramesConfigError> {
        let need = place(spec)?;
        if bytes < need.size() || !memory.addr().is_multiple_of(need.align()) || memory.is_null() {
            return Err(FramesConfigError::Memory { bytes: need.size(), align: need.align() });
        }
        let overlap = |arena: &Arena<'_>| {
            let common = arena.extent.intersection(spec.extent);
            if common.is_empty() { Ok(()) } else { Err(FramesConfigError::Overlap(common.base())) }
        };
        self.given.iter().try_for_each(overlap)?;
        let mut carver = Carver::at(memory);
        let at = carver.place::<Later<'m>>(1)?;
        let words = Rows::words(touched(spec.extent, REGION_ORDER));
        // SAFETY: the memory is as large as `place` says, which placed the same in the same order, and the caller gave it away.
        let later = unsafe {
            let rows = Rows::new(carver.fill(words, |_| AtomicU64::new(0))?, 0);
            let arena = fill_arena(&mut carver, spec, rows, 0)?;
            let later = memory.add(at).cast::<Later<'m>>();
            later.write(Later { arena, next: Added::new() });
            later
        };
        let mut link = &self.added;
        let mut number = self.given.last().map_or(0, |arena| arena.first_region + arena.regions.len());
        loop {
            // SAFETY: a link in the manager's list.
            while let Some(other) = unsafe { link.next() } {
                overlap(&other.arena)?;
                (link, number) = (&other.next, other.arena.first_region + other.arena.regions.len());
            }
            // SAFETY: nobody else knows it yet.
            unsafe { (*later).arena.renumber(number) };
            // Release: whoever finds the arena finds what is kept about it. Relaxed on failure: the link is read again.
            let null = core::ptr::null_mut();
            if link.0.compare_exchange(null, later.cast(), Ordering::Release, Ordering::Relaxed).is_ok() {
                return Ok(());
            }
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::arena::in_region;
    use loom::sync::Arc;
    use loom::thread;
    use std::alloc::{alloc_zeroed, dealloc};

    /// A manager's arenas, one of them there from the start, and memory for one that comes.
    struct World {
        arenas: Arenas<'static>,
        memory: Vec<(*mut u8, Layout)>,
    }

    // SAFETY: each piece of memory is given to one `add`.
    unsafe impl Send for World {}
    // SAFETY: as above.
    unsafe impl Sync for World {}

    impl Drop for World {
        fn drop(&mut self) {
            // SAFETY: allocated so in `new`, and the arenas are not used any more.
            self.memory.iter().for_each(|(memory, layout)| unsafe { dealloc(*memory, *layout) });
        }
    }

    fn spec(base: u64) -> ArenaSpec {
        ArenaSpec { extent: Extent::new(Pfn::new(base), 4).expect("in range"), node: NodeId(0), descriptors: None }
    }

    impl World {
        fn new(adders: usize) -> Arc<Self> {
            let first = Arena::bare(Extent::new(Pfn::new(0), 1).expect("in range"));
            let given = std::slice::from_ref(Box::leak(Box::new(first)));
            let layout = Arenas::added_bytes(&spec(1)).expect("valid");
            // SAFETY: the layout has a size.
            let memory = (0..adders).map(|_| (unsafe { alloc_zeroed(layout) }, layout)).collect();
            Arc::new(World { arenas: Arenas::new(given, 1), memory })
        }

        fn add(&self, adder: usize, base: u64) -> bool {
            let (memory, layout) = self.memory[adder];
            // SAFETY: zeroed, this adder's alone, and there as long as the arenas.
            unsafe { self.arenas.add(&spec(base), memory, layout.size()) }.is_ok()
        }

        /// The number of the region of an arena that is found; what is kept about it is there then.
        fn find(&self, base: u64) -> Option<usize> {
            let arena = self.arenas.of(Pfn::new(base))?;
            assert!(arena.region(Pfn::new(base)).split.get(in_region(Pfn::new(base))), "as in a new region");
            Some(arena.region_number(Pfn::new(base)))
        }
    }

    fn explore(model: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = builder.preemption_bound.min(Some(2)).or(Some(2));
        builder.check(model);
    }

    /// Whoever finds an arena, by a frame or as a place to allocate from, finds all that is kept about it. Fails with the Release of
    /// `add` or the Acquire of `next` relaxed.
    #[test]
    fn an_arena_is_found_whole_or_not_at_all() {
        explore(|| {
            let world = World::new(1);
            let other = Arc::clone(&world);
            // The other way round loom would not see that they depend on each other: it keeps one access of each word, and an adder's own
            // look comes between.
            let finder = thread::spawn(move || {
                let found = other.find(8);
                assert!(found.is_none_or(|number| number == 0));
                assert!(found.is_none() || other.arenas.places(NodeId(0), None).count() == 1);
            });
            assert!(world.add(0, 8));
            finder.join().unwrap();
            assert_eq!((world.find(8), world.arenas.frames()), (Some(0), 5));
        });
    }

    /// Two CPUs add: both arenas are there with regions of their own, and of two that overlap one is.
    #[test]
    fn none_of_two_that_are_added_is_lost() {
        for (base, both) in [(64, true), (10, false)] {
            explore(move || {
                let world = World::new(2);
                let other = Arc::clone(&world);
                let adder = thread::spawn(move || other.add(0, 8));
                let (mine, theirs) = (world.add(1, base), adder.join().unwrap());
                assert!(mine || theirs);
                assert_eq!(mine && theirs, both);
                let numbers = [world.find(8).filter(|_| theirs), world.find(base + 3).filter(|_| mine)];
                assert!(numbers[0] != numbers[1] && numbers.into_iter().flatten().max() == Some(usize::from(both)));
            });
        }
    }
}
