//! Arenas that come while the manager runs: memory that is found or plugged in later.
//!
//! Each brings the memory for everything that is kept about it, its own bits that lead to what is free included; nothing of what there
//! was is moved or grown. They form a list that only ever gets longer, at its end. A node looks there last. What is in such an
//! arena is freed to the CPUs' caches at the second look, not at the first.

use crate::arena::{Arena, ArenaSpec, REGION_ORDER, touched};
use crate::frames::{Env, Frames};
use crate::freelist::Rows;
use crate::layout::{Carver, FramesConfigError, fill_arena, place_arena};
use core::alloc::Layout;
use hugemm_base::sync::{AtomicPtr, AtomicU64, Ordering};

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

impl<'m, E: Env> Frames<'m, E> {
    /// The arenas that were added, in that order.
    pub(crate) fn added(&self) -> impl Iterator<Item = &'m Arena<'m>> + use<'m, E> {
        // SAFETY: the manager's own link.
        let first = unsafe { self.added.next() };
        // SAFETY: a link in the manager's list.
        core::iter::successors(first, |later| unsafe { later.next.next() }).map(|later| &later.arena)
    }

    /// Size and alignment of the metadata that [`add`](Frames::add) needs for an arena.
    ///
    /// # Errors
    ///
    /// [`Empty`](FramesConfigError::Empty) or [`TooLarge`](FramesConfigError::TooLarge).
    pub fn added_bytes(spec: &ArenaSpec) -> Result<Layout, FramesConfigError> {
        place(spec)
    }

    /// Adds an arena to a manager that is in use, with nothing free in it yet: see [`release`](Frames::release). It stays for good.
    /// Any number can be added, from any CPU; what looks for a frame's arena goes through all that were. O(2 MiB blocks) and
    /// O(arenas); no lock, and nobody waits.
    ///
    /// The CPUs' caches stay as large as they were made: whoever knows all of memory at the start gives all of it to
    /// [`new`](Frames::new).
    ///
    /// # Errors
    ///
    /// [`Empty`](FramesConfigError::Empty); [`Overlap`](FramesConfigError::Overlap) with an arena that there is;
    /// [`NoSuchNode`](FramesConfigError::NoSuchNode) for one that no arena was on when the manager was made;
    /// [`Memory`](FramesConfigError::Memory) and [`TooLarge`](FramesConfigError::TooLarge). Nothing has changed then, and the memory is
    /// the caller's again.
    ///
    /// # Safety
    ///
    /// As [`new`](Frames::new) of the memory, the descriptors and the frame numbers; and the memory and the descriptors stay valid as
    /// long as anybody uses the manager, not only for the `'m` that is seen here.
    pub unsafe fn add(&self, spec: &ArenaSpec, memory: *mut u8, bytes: usize) -> Result<(), FramesConfigError> {
        let need = place(spec)?;
        if bytes < need.size() || !memory.addr().is_multiple_of(need.align()) || memory.is_null() {
            return Err(FramesConfigError::Memory { bytes: need.size(), align: need.align() });
        }
        if self.node(spec.node).is_none() {
            return Err(FramesConfigError::NoSuchNode(spec.node));
        }
        let overlap = |arena: &Arena<'_>| {
            let common = arena.extent.intersection(spec.extent);
            if common.is_empty() { Ok(()) } else { Err(FramesConfigError::Overlap(common.base())) }
        };
        self.arenas.iter().try_for_each(overlap)?;
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
        let mut number = self.arenas.last().map_or(0, |arena| arena.first_region + arena.regions.len());
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
