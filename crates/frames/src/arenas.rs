//! The arenas of a manager, and which of them a frame is in.
//!
//! Those that it was made with are a table. Others come while it runs: memory that is found or plugged in later. Each of them brings
//! the memory for everything that is kept about it, its own bits that lead to what is free included; nothing of what there was is
//! moved or grown. They stand in slots, which are [trees](crate::slots). A node looks there last, from the lowest on, and only where there
//! may be [what is sought](crate::having). What is in such an arena is freed to the CPUs' caches at the second look, not at the first.
//!
//! # How an arena goes
//!
//! Whoever looks for a frame's arena takes no lock, announces nothing, and may be held up anywhere. So a slot stays, and what is needed to
//! pass it by stands in it: which frames, and which node. Only two kinds of readers go on to what is kept about an arena:
//!
//! * those who look for a frame of it: because they have it, and then only until they have given it up, the last of several that are given
//!   up one after another; or by its number alone, and `Frames::remove` asks its caller to promise that there are none of these;
//! * those who hold its node's lock. It leaves the slot, and the trees, under that lock.
//!
//! A slot is used again, so what stands in it goes for something only if the tree in which it was found is still in use afterwards.

use crate::arena::{Arena, ArenaSpec, REGION_ORDER, touched};
use crate::freelist::{FreeLists, LOOKS, Places};
use crate::having::{Added, Kinds};
use crate::layout::{Carver, FramesConfigError, fill_arena, place_arena};
use crate::refs::WideCounts;
use crate::rows::Rows;
use crate::slots::{Link, Seen, Slot, Tree};
use core::alloc::Layout;
use core::fmt;
use core::ops::Range;
use core::ptr::NonNull;
use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{Dirty, Extent, NodeId, Pfn};

/// What is left of an arena that was [removed](crate::Frames::remove).
#[derive(Debug)]
#[must_use = "the frames and the memory are the caller's again"]
pub struct RemovedArena {
    /// Its frames, of which the manager knows nothing any more.
    pub frames: Dirty,
    /// The memory that it was [added](crate::Frames::add) with, of any content; or all of it but the first 4 KiB, which the manager goes on
    /// using: once for each arena beyond those that have been there at one time before. Descriptors that were given apart are the caller's
    /// again, too.
    pub memory: NonNull<[u8]>,
}

/// Why an arena was not removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoveError {
    /// The frames are not those of an arena that was added, all of them and no others.
    NotAdded,
    /// This frame is poisoned. What is around it can be had, and kept, by [`take_range`](crate::Frames::take_range).
    HwPoisoned(Pfn),
    /// A [claim](crate::Frames::alloc_contig_range) has come upon some of the frames, and will find that they are not free. Try again later.
    Contended,
}

impl fmt::Display for RemoveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RemoveError::NotAdded => f.write_str("the frames are not all frames of one arena that was added"),
            RemoveError::HwPoisoned(pfn) => write!(f, "frame {pfn} is poisoned, which the manager has to remember"),
            RemoveError::Contended => f.write_str("another claim is at work in the frames; try again later"),
        }
    }
}

impl core::error::Error for RemoveError {}

/// The regions of arenas that were added have the numbers from this one on: more than others have.
const REGIONS: usize = 1 << (usize::BITS / 2);

/// Whether a region is one of an arena that was added, by its number.
#[inline]
pub(crate) const fn is_added(region: usize) -> bool {
    region >= REGIONS
}

/// Places of frames in arenas that were added, behind those of all others.
const ADDED: u64 = 1 << 63;

/// What is kept about an arena that was added.
#[derive(Debug)]
pub(crate) struct Kept<'m> {
    arena: Arena<'m>,
    /// What it was added with, and all of this is in: without the slot at the beginning, if that is used.
    memory: NonNull<[u8]>,
}

impl Kept<'_> {
    /// All this is in.
    pub(crate) fn memory(&self) -> NonNull<[u8]> {
        self.memory
    }

    /// The wide counters that its frames were given.
    pub(crate) fn wide(&self) -> impl Iterator<Item = NonNull<WideCounts>> {
        // Acquire pairs with the Release in `install_wide`.
        self.arena.blocks.iter().filter_map(|block| NonNull::new(block.wide.load(Ordering::Acquire)))
    }
}

/// What is sought in a node, and how far the search has come.
pub(crate) struct Search {
    kinds: Range<usize>,
    /// In no arena that was added and begins here or above.
    limit: Pfn,
    /// The first frame behind the arena that was added and looked at last; none if nothing has been looked at.
    from: Option<Pfn>,
    /// How many more of those.
    left: u32,
}

impl Search {
    /// For some kinds. Whatever it finds nothing in is corrected, or else few are looked at.
    pub(crate) const fn new(kinds: Range<usize>, limit: Pfn) -> Self {
        Search { kinds, limit, from: None, left: 2 * LOOKS }
    }

    /// The same in a few.
    pub(crate) const fn in_few(mut self) -> Self {
        self.left = FEW;
        self
    }
}

/// Arenas that were added in which is looked for what need not be found.
const FEW: u32 = 8;

/// Where the slot goes, and the rest.
fn place(spec: &ArenaSpec) -> Result<Layout, FramesConfigError> {
    if spec.extent.is_empty() {
        return Err(FramesConfigError::Empty);
    }
    let mut carver = Carver::at(core::ptr::null_mut());
    let mut place = || {
        carver.place::<Slot>(1)?;
        carver.place::<Kept<'_>>(1)?;
        carver.place::<AtomicU64>(Rows::words(touched(spec.extent, REGION_ORDER)))?;
        place_arena(&mut carver, spec)?;
        carver.layout()
    };
    place().ok_or(FramesConfigError::TooLarge)
}

#[cold]
#[inline(never)]
fn next_added<'m>(lists: &FreeLists, added: &Added, search: &mut Search, mut from: Pfn) -> Option<Places<'m>> {
    let kinds = Kinds::range(&search.kinds);
    while !lists.is_spent() {
        search.left = search.left.checked_sub(1)?;
        // SAFETY: the node's lock is held, under which alone an arena of it goes.
        unsafe {
            let slot = added.from(from, kinds).filter(|slot| slot.base() < search.limit.get())?;
            from = slot.end();
            let arena = &slot.kept().arena;
            if search.kinds.clone().any(|kind| arena.rows.first(kind).is_some()) {
                search.from = Some(from);
                return Some(Places { rows: &arena.rows, arenas: core::slice::from_ref(arena) });
            }
            added.lower(slot, kinds);
        }
        lists.looked_in_vain();
    }
    None
}

/// All arenas of a manager.
#[derive(Debug)]
pub(crate) struct Arenas<'m> {
    /// Those that it was made with, in ascending order.
    given: &'m [Arena<'m>],
    /// Slots in which no arena is. Only who adds or removes one looks there.
    vacant: Link,
    tree: Tree,
    /// Frames in those that it was made with.
    frames: u64,
}

impl<'m> Arenas<'m> {
    /// These, of so many frames.
    pub(crate) fn new(given: &'m [Arena<'m>], frames: u64) -> Self {
        Arenas { given, vacant: Link::new(), tree: Tree::new(), frames }
    }

    /// The first of those that the manager was made with.
    #[inline]
    pub(crate) fn first(&self) -> Option<&'m Arena<'m>> {
        self.given.first()
    }

    /// Those that were added, in ascending order. O(log arenas) each.
    fn added(&self) -> impl Iterator<Item = Seen> {
        let next = |pfn| self.added_from(pfn).map(|(_, seen)| seen);
        core::iter::successors(next(Pfn::new(0)), move |seen| next(seen.extent.end()))
    }

    /// The first arena of a node, whose lock the caller holds, that has a frame from a place on; and the place of its first frame. O(log arenas).
    #[inline(never)]
    pub(crate) fn on(&self, node: NodeId, added: &Added, from: u64) -> Option<(u64, &'m Arena<'m>)> {
        let before = self.given.partition_point(|arena| arena.extent.end().get() <= from);
        if let Some(arena) = self.given.iter().skip(before).find(|arena| arena.node == node) {
            return Some((arena.extent.base().get(), arena));
        }
        let from = Pfn::new(from.saturating_sub(ADDED));
        // SAFETY: the node's lock is held, under which alone an arena of it goes.
        let arena = unsafe { &added.any_from(from)?.kept().arena };
        Some((ADDED + arena.extent.base().get(), arena))
    }

    /// Whether an arena that the manager was made with is on a node: only then there is such a node.
    pub(crate) fn is_on(&self, node: NodeId) -> bool {
        self.given.iter().any(|arena| arena.node == node)
    }

    /// How many.
    pub(crate) fn count(&self) -> usize {
        self.given.len() + self.added().count()
    }

    /// Frames in all of them.
    pub(crate) fn frames(&self) -> u64 {
        self.frames + self.added().map(|seen| seen.extent.pages()).sum::<u64>()
    }

    /// The arena of a frame that somebody may have. O(log arenas), one comparison for the first.
    #[inline]
    pub(crate) fn of(&self, pfn: Pfn) -> Option<&'m Arena<'m>> {
        let first = self.given.first()?;
        if first.contains(pfn) { Some(first) } else { self.later(pfn) }
    }

    #[cold]
    #[inline(never)]
    fn later(&self, pfn: Pfn) -> Option<&'m Arena<'m>> {
        self.given(pfn).or_else(|| {
            // SAFETY: by the contract of `Frames::remove` nobody looks for a frame of an arena that goes.
            self.added_with(pfn).map(|seen| &unsafe { seen.kept() }.arena)
        })
    }

    /// The lowest of those that were added which has a frame from this one on, and its slot. O(log arenas).
    fn added_from(&self, pfn: Pfn) -> Option<(&'m Slot, Seen)> {
        // SAFETY: the manager's own tree.
        unsafe { self.tree.from(pfn) }
    }

    /// The one of them that has a frame. O(log arenas).
    fn added_with(&self, pfn: Pfn) -> Option<Seen> {
        self.added_from(pfn).map(|(_, seen)| seen).filter(|seen| seen.extent.contains(pfn))
    }

    /// Of those that the manager was made with.
    #[inline(never)]
    fn given(&self, pfn: Pfn) -> Option<&'m Arena<'m>> {
        let after = self.given.partition_point(|arena| arena.extent.base() <= pfn);
        after.checked_sub(1).and_then(|at| self.given.get(at)).filter(|arena| arena.contains(pfn))
    }

    /// Those that adjoin, the first of a node.
    pub(crate) fn first_on(&self, node: NodeId) -> Option<Extent> {
        self.around(self.given.iter().find(|arena| arena.node == node)?.extent.base())
    }

    /// The arenas around a frame that adjoin on a node, of those that the manager was made with: all of it is the manager's and on the node,
    /// for good. What lies in a hole between two arenas is somebody else's, or that of an arena which comes later, on any node. O(arenas); O(log
    /// arenas) for that.
    #[inline(never)]
    pub(crate) fn around(&self, pfn: Pfn) -> Option<Extent> {
        self.given(pfn)?;
        let (mut run, mut node) = (Extent::default(), None);
        for arena in self.given {
            let both = run.join(arena.extent).filter(|_| node == Some(arena.node));
            if both.is_none() && run.contains(pfn) {
                break;
            }
            (run, node) = (both.unwrap_or(arena.extent), Some(arena.node));
        }
        run.contains(pfn).then_some(run)
    }

    /// What the arena of any frame has, and its node. It may be gone by the time the caller knows.
    pub(crate) fn place_of(&self, pfn: Pfn) -> Option<(Extent, NodeId)> {
        let given = self.given(pfn).map(|arena| (arena.extent, arena.node));
        given.or_else(|| self.added_with(pfn).map(|seen| (seen.extent, seen.node)))
    }

    /// The arena of any frame, if it is on a node whose lock the caller holds.
    #[inline(never)]
    pub(crate) fn of_any(&self, pfn: Pfn, lists: &FreeLists) -> Option<&'m Arena<'m>> {
        let given = self.given(pfn).filter(|arena| arena.node == lists.node);
        given.or_else(|| {
            let added = self.added_with(pfn).filter(|seen| seen.node == lists.node);
            // SAFETY: the node's lock is held, under which alone an arena of it goes.
            added.map(|seen| &unsafe { seen.kept() }.arena)
        })
    }

    /// Their parts of an extent of which somebody may have frames, in ascending order. O(log arenas) each.
    ///
    /// Each is looked for behind the one before. So whoever frees a part does not come to its frames again: their arena may go
    /// meanwhile, and come again in any slot.
    pub(crate) fn parts(&self, extent: Extent) -> impl Iterator<Item = (&'m Arena<'m>, Extent)> {
        let mut rest = extent;
        core::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            let first = self.given.first().filter(|arena| arena.contains(rest.base()));
            let arena = first.or_else(|| self.lowest(rest))?;
            let part = rest.intersection(arena.extent);
            rest = rest.slice(part.end().get() - rest.base().get(), rest.pages());
            Some((arena, part))
        })
    }

    /// The first arena with frames of an extent of which somebody may have some.
    #[cold]
    fn lowest(&self, extent: Extent) -> Option<&'m Arena<'m>> {
        let after = self.given.partition_point(|arena| arena.extent.end() <= extent.base());
        let given = self.given.get(after).filter(|arena| !arena.extent.intersection(extent).is_empty());
        let pages = given.map_or(extent.pages(), |arena| arena.extent.base().get().saturating_sub(extent.base().get()));
        let before = extent.slice(0, pages);
        if before.is_empty() {
            return given;
        }
        let added = self.added_from(before.base()).filter(|(_, seen)| !seen.extent.intersection(before).is_empty());
        // SAFETY: as in `later`.
        added.map(|(_, seen)| &unsafe { seen.kept() }.arena).or(given)
    }

    /// Where a node, whose lock the caller holds, may have what is sought: first by its own rows, then by those of arenas that were added.
    #[inline]
    pub(crate) fn next(
        &self,
        lists: &FreeLists,
        rows: &'m Rows<'m>,
        added: &Added,
        search: &mut Search,
    ) -> Option<Places<'m>> {
        match search.from {
            None => {
                search.from = Some(Pfn::new(0));
                Some(Places { rows, arenas: self.given })
            }
            // Few managers have any.
            // SAFETY: the manager's own.
            Some(_) if unsafe { added.is_empty() } => None,
            Some(from) => next_added(lists, added, search, from),
        }
    }

    /// An arena that was added may have some of a kind in a region now. O(log arenas) if it had none. The node's lock is held.
    pub(crate) fn raise(arena: &Arena<'m>, added: &Added, kind: usize, region: usize) {
        let known = arena.rows.first(kind).is_some();
        arena.rows.put(kind, region, true);
        if known {
            return;
        }
        // SAFETY: the node's lock is held, and they are the manager's own.
        unsafe { added.raise(arena.extent.base(), kind) };
    }

    /// Size and alignment of the metadata that [`add`](Arenas::add) needs for an arena.
    pub(crate) fn added_bytes(spec: &ArenaSpec) -> Result<Layout, FramesConfigError> {
        place(spec)
    }

    /// Fills the memory for an arena that is to be [added](Arenas::add). O(2 MiB blocks).
    ///
    /// # Safety
    ///
    /// As [`Frames::add`](crate::Frames::add).
    pub(crate) unsafe fn fill(
        spec: &ArenaSpec,
        memory: *mut u8,
        bytes: usize,
    ) -> Result<NonNull<Kept<'m>>, FramesConfigError> {
        let need = place(spec)?;
        let whole =
            NonNull::new(memory).filter(|at| bytes >= need.size() && at.addr().get().is_multiple_of(need.align()));
        let whole = whole.ok_or(FramesConfigError::Memory { bytes: need.size(), align: need.align() })?;
        let mut carver = Carver::at(memory);
        let mut fill = || {
            carver.place::<Slot>(1)?;
            let kept = carver.place::<Kept<'m>>(1)?;
            let words = Rows::words(touched(spec.extent, REGION_ORDER));
            // SAFETY: the memory is as large as `place` says, which placed the same in the same order, and the caller gave it away.
            unsafe {
                let first = REGIONS + (spec.extent.base().get() >> REGION_ORDER) as usize;
                let rows = Rows::new(carver.fill(words, |_| AtomicU64::new(0))?, first);
                let arena = fill_arena(&mut carver, spec, rows, first)?;
                let kept = whole.add(kept).cast::<Kept<'m>>();
                kept.write(Kept { arena, memory: NonNull::slice_from_raw_parts(whole, bytes) });
                Some(kept)
            }
        };
        fill().ok_or(FramesConfigError::TooLarge)
    }

    /// Adds an arena to a node, whose lock is held: the one that the lists are under. O(log arenas).
    ///
    /// # Safety
    ///
    /// `filled` is from [`fill`](Arenas::fill), and nobody else's. Nobody else changes anything; lists and added arenas are its node's.
    pub(crate) unsafe fn add(
        &self,
        mut filled: NonNull<Kept<'m>>,
        _: &mut FreeLists,
        added: &Added,
    ) -> Result<(), FramesConfigError> {
        let at = filled.as_ptr();
        // SAFETY: the caller's alone until it is linked.
        let kept = unsafe { filled.as_mut() };
        let extent = kept.arena.extent;
        if let Some(other) = self.lowest(extent) {
            return Err(FramesConfigError::Overlap(other.extent.intersection(extent).base()));
        }
        // SAFETY: the manager's own link.
        let slot = match unsafe { self.vacant.next() } {
            Some(slot) => {
                // SAFETY: as above.
                self.vacant.set(unsafe { slot.vacant.next() });
                slot
            }
            None => {
                // The slot does not go with the arena.
                let slot = kept.memory.cast::<Slot>();
                let rest = kept.memory.len().saturating_sub(size_of::<Slot>());
                // SAFETY: `fill` placed a slot at the beginning of the memory, where it stays as long as the manager.
                unsafe {
                    kept.memory = NonNull::slice_from_raw_parts(slot.add(1).cast(), rest);
                    slot.write(Slot::new());
                    &*slot.as_ptr()
                }
            }
        };
        slot.fill(&kept.arena, at.cast());
        // SAFETY: the caller's promise.
        unsafe {
            self.tree.change(slot, true);
            added.change(slot, true);
        }
        Ok(())
    }

    /// The arena that was added with exactly this extent; it can go then. O(log arenas).
    ///
    /// # Safety
    ///
    /// Nobody else changes anything before it has gone, if it goes.
    pub(crate) unsafe fn exactly(&self, extent: Extent) -> Option<Leaver<'_, 'm>> {
        let (slot, seen) = self.added_from(extent.base()).filter(|(_, seen)| seen.extent == extent)?;
        // SAFETY: the caller's promise, also that it stays.
        let kept = unsafe { seen.kept() };
        Some(Leaver { arenas: self, slot, kept })
    }
}

/// An arena that may go.
#[derive(Debug)]
pub(crate) struct Leaver<'a, 'm> {
    arenas: &'a Arenas<'m>,
    slot: &'m Slot,
    kept: &'m Kept<'m>,
}

impl<'m> Leaver<'_, 'm> {
    /// It.
    pub(crate) fn arena(&self) -> &'m Arena<'m> {
        &self.kept.arena
    }

    /// It goes from its node, whose lock is held: the one that the lists are under. What was kept about it is the caller's. O(log arenas).
    ///
    /// # Safety
    ///
    /// As [`Frames::remove`](crate::Frames::remove); nobody else has changed anything since it was found; lists and added arenas are its
    /// node's.
    pub(crate) unsafe fn leave(self, _: &mut FreeLists, added: &Added) -> &'m Kept<'m> {
        let Leaver { arenas, slot, kept } = self;
        // SAFETY: the caller's promise.
        unsafe {
            added.change(slot, false);
            arenas.tree.change(slot, false);
            slot.vacant.set(arenas.vacant.next());
        }
        arenas.vacant.set(Some(slot));
        kept
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::arena::in_region;
    use loom::cell::UnsafeCell;
    use loom::sync::{Arc, Mutex, MutexGuard};
    use loom::thread;
    use std::alloc::{alloc_zeroed, dealloc};

    /// A manager's arenas, one of them there from the start, and memory for some that come. `changes` is the lock of who changes
    /// something, `nodes` those of the nodes.
    struct World {
        arenas: Arenas<'static>,
        memory: Vec<Piece>,
        changes: Mutex<()>,
        nodes: [Mutex<FreeLists>; 2],
        added: [Added; 2],
    }

    /// Memory for what is kept about an arena. Loom sees accesses to the cell only, which stands for all of it.
    struct Piece {
        at: *mut u8,
        layout: Layout,
        all: UnsafeCell<()>,
    }

    impl Piece {
        fn new(layout: Layout) -> Self {
            // SAFETY: the layout has a size.
            Piece { at: unsafe { alloc_zeroed(layout) }, layout, all: UnsafeCell::new(()) }
        }
    }

    // SAFETY: each piece of memory is given to one `add`.
    unsafe impl Send for World {}
    // SAFETY: as above.
    unsafe impl Sync for World {}

    impl Drop for World {
        fn drop(&mut self) {
            // SAFETY: allocated so in `new`, and the arenas are not used any more.
            self.memory.iter().for_each(|piece| unsafe { dealloc(piece.at, piece.layout) });
        }
    }

    /// Arenas from frame 64 on are larger, that at 32 is on another node.
    fn spec(base: u64) -> ArenaSpec {
        let pages = if base < 64 { 4 } else { 16 };
        ArenaSpec {
            extent: Extent::new(Pfn::new(base), pages).expect("in range"),
            node: NodeId::new((base == 32).into()),
            descriptors: None,
        }
    }

    impl World {
        fn new(pieces: usize) -> Arc<Self> {
            let first = Arena::bare(Extent::new(Pfn::new(0), 1).expect("in range"));
            let given = std::slice::from_ref(Box::leak(Box::new(first)));
            let layout = Arenas::added_bytes(&spec(64)).expect("valid");
            let memory = (0..pieces).map(|_| Piece::new(layout)).collect();
            let nodes = [0, 1].map(|node| Mutex::new(FreeLists::new(NodeId::new(node))));
            Arc::new(World {
                arenas: Arenas::new(given, 1),
                memory,
                changes: Mutex::new(()),
                nodes,
                added: [Added::new(), Added::new()],
            })
        }

        fn add(&self, piece: usize, base: u64) -> bool {
            let Piece { at, layout, all } = &self.memory[piece];
            all.with_mut(|_| ());
            // SAFETY: zeroed, one adder's alone, and there as long as the arenas.
            let filled = unsafe { Arenas::fill(&spec(base), *at, layout.size()) }.expect("enough");
            let _one = self.changes.lock().unwrap();
            let node = spec(base).node.get() as usize;
            let mut lists = self.nodes[node].lock().unwrap();
            // SAFETY: filled for this; one at a time; of that node.
            unsafe { self.arenas.add(filled, &mut lists, &self.added[node]) }.is_ok()
        }

        /// What was kept about the arena is somebody else's at once.
        fn remove(&self, base: u64) {
            let _one = self.changes.lock().unwrap();
            let node = spec(base).node.get() as usize;
            let mut lists = self.nodes[node].lock().unwrap();
            // SAFETY: the models look for no frame of it; one at a time; of that node.
            let leaver = unsafe { self.arenas.exactly(spec(base).extent) }.expect("there");
            // SAFETY: as above.
            let kept = unsafe { leaver.leave(&mut lists, &self.added[node]) };
            self.piece_at(kept.memory().as_ptr().cast()).all.with_mut(|_| ());
        }

        fn piece_at(&self, at: *const u8) -> &Piece {
            let holds = |piece: &&Piece| at.addr().wrapping_sub(piece.at.addr()) < piece.layout.size();
            self.memory.iter().find(holds).expect("given")
        }

        /// Whether an arena is found. What is kept about it is there then, and about that frame.
        fn find(&self, pfn: u64) -> bool {
            let Some(arena) = self.arenas.of(Pfn::new(pfn)) else { return false };
            self.look_at(arena, pfn);
            true
        }

        fn look_at(&self, arena: &Arena<'_>, pfn: u64) {
            self.piece_at(core::ptr::from_ref(arena).cast()).all.with(|_| ());
            let pfn = Pfn::new(pfn);
            assert!(arena.contains(pfn), "another arena");
            assert!(arena.region(pfn).split.get(in_region(pfn)), "as in a new region");
        }

        /// Whether an arena of node 0 is found by any frame, as a claim does there. What is kept about it is there then.
        fn claim(&self, pfn: u64) -> bool {
            let lists: MutexGuard<'_, FreeLists> = self.nodes[0].lock().unwrap();
            let Some(arena) = self.arenas.of_any(Pfn::new(pfn), &lists) else { return false };
            self.look_at(arena, pfn);
            true
        }

        /// How many arenas an allocation from node 0 looks at.
        fn allocate(&self) -> usize {
            let lists: MutexGuard<'_, FreeLists> = self.nodes[0].lock().unwrap();
            let next = |from| self.arenas.on(lists.node, &self.added[0], from);
            let all = core::iter::successors(next(ADDED), |(place, arena)| next(place + arena.extent.pages()));
            all.map(|(_, arena)| self.look_at(arena, arena.extent.base().get())).count()
        }
    }

    fn explore(model: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = builder.preemption_bound.min(Some(2)).or(Some(2));
        builder.check(model);
    }

    /// Whoever finds an arena, by a frame or as a place to allocate from, finds all that is kept about it. Fails with the Acquire of the
    /// links relaxed.
    #[test]
    fn an_arena_is_found_whole_or_not_at_all() {
        explore(|| {
            let world = World::new(1);
            let other = Arc::clone(&world);
            // The other way round loom would not see that they depend on each other: it keeps one access of each word, and an adder's own
            // look comes between.
            let finder = thread::spawn(move || {
                let found = other.find(8);
                assert!(!found || other.allocate() == 1);
            });
            assert!(world.add(0, 8));
            finder.join().unwrap();
            assert_eq!((world.find(8), world.arenas.frames()), (true, 5));
        });
    }

    /// Two CPUs add: both arenas are there, and of two that overlap one is.
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
                assert_eq!((world.find(8), world.find(base + 3)), (theirs, mine));
            });
        }
    }

    /// One arena goes and another comes in its slot, while a CPU looks for frames of a third that stays behind them, and of the one
    /// that comes. Neither is taken for another. Fails without the second look at the tree's number, without either fence, and with any
    /// Acquire or Release of the tree and its links relaxed.
    #[test]
    fn an_arena_is_not_taken_for_the_one_before_it_in_its_slot() {
        explore(|| {
            let world = World::new(3);
            assert!(world.add(0, 8) && world.add(1, 16));
            let other = Arc::clone(&world);
            let finder = thread::spawn(move || {
                // The base of the arena that goes and the length of the one that comes would have it.
                assert!(other.find(16), "it was there all the time");
                other.find(64);
            });
            world.remove(8);
            assert!(world.add(2, 64));
            finder.join().unwrap();
            assert!(world.find(64) && world.find(16) && !world.find(8));
        });
    }

    /// Arenas that stay are found while the trees are turned. Fails without the second look at the tree's number.
    #[test]
    fn an_arena_that_stays_is_found_while_the_trees_are_turned() {
        explore(|| {
            let world = World::new(3);
            assert!(world.add(0, 8) && world.add(1, 16));
            let other = Arc::clone(&world);
            let finder = thread::spawn(move || assert!(other.find(8) && other.find(16)));
            assert!(world.add(2, 64));
            finder.join().unwrap();
            assert!(world.find(8) && world.find(16) && world.find(64));
        });
    }

    /// Nobody who allocates has an arena that goes: it leaves under the node's lock, which is what `leave` and `search` ask for.
    #[test]
    fn an_arena_goes_when_nobody_allocates_from_it() {
        explore(|| {
            let world = World::new(1);
            assert!(world.add(0, 8));
            let other = Arc::clone(&world);
            let allocator = thread::spawn(move || assert!(other.allocate() <= 1));
            world.remove(8);
            allocator.join().unwrap();
            assert_eq!((world.allocate(), world.arenas.count()), (0, 1));
        });
    }

    /// Nor has anybody who asks on another node, by any frame, and also not when one of his own comes in its slot. Fails without the look at
    /// the node.
    #[test]
    fn an_arena_of_another_node_is_not_taken_for_the_next_in_its_slot() {
        explore(|| {
            let world = World::new(2);
            assert!(world.add(0, 32));
            let other = Arc::clone(&world);
            let claimer = thread::spawn(move || {
                assert!(!other.claim(33), "on another node");
                other.claim(66);
            });
            world.remove(32);
            assert!(world.add(1, 64));
            claimer.join().unwrap();
            assert_eq!((world.claim(66), world.allocate(), world.arenas.count()), (true, 1, 2));
        });
    }
}
