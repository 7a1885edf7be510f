//! What a CPU has: for each class the slab that allocations come from, and a list of others with free pieces.
//!
//! Everything but [`PerCpu::woken`] is touched on that CPU only, under a pin. Allocations take from the front of a list and
//! slabs that get free pieces go to its end, so that they gather more before it is their turn. One empty slab per class is kept.

use crate::class::{CLASSES, SHAPES};
use crate::remote::Woken;
use crate::slab::{Header, OwnSlab, Pieces, Place, Slab};
use core::cell::UnsafeCell;
use core::ptr::{NonNull, null_mut};
use hugemm_base::counters::CpuCounter;
use hugemm_base::sync::AtomicU64;

/// One class's slabs on one CPU.
struct List {
    current: *mut Header,
    /// The current slab's; none if there is no such slab.
    pieces: Pieces,
    first: *mut Header,
    last: *mut Header,
    /// Whether an empty slab is on the list, to be kept.
    keeps: bool,
}

/// One CPU's.
#[repr(align(128))]
pub(crate) struct PerCpu {
    /// Slabs that others have woken: on a line of its own, for all CPUs.
    pub(crate) woken: Woken<AtomicU64>,
    own: Own,
}

#[repr(align(128))]
struct Own {
    lists: UnsafeCell<[List; CLASSES]>,
    /// Pages taken from the manager, and given back.
    taken: CpuCounter,
    given: CpuCounter,
}

// SAFETY: the lists are reached through `OwnCpu`, which is made under the CPU's pin; the rest is atomics.
unsafe impl Sync for PerCpu {}

impl PerCpu {
    pub(crate) fn new() -> Self {
        let lists = UnsafeCell::new(
            [const { List { current: null_mut(), pieces: Pieces::NONE, first: null_mut(), last: null_mut(), keeps: false } };
                CLASSES],
        );
        let own = Own { lists, taken: CpuCounter::default(), given: CpuCounter::default() };
        PerCpu { woken: Woken::new(AtomicU64::new(0)), own }
    }

    /// Pages that this CPU has taken less those that it has given back. Those of blocks go back on any CPU, so only the sum over
    /// all CPUs means something.
    pub(crate) fn pages(&self) -> u64 {
        self.own.taken.get().wrapping_sub(self.own.given.get())
    }

    /// The owner's view.
    ///
    /// # Safety
    ///
    /// The caller is pinned to this CPU for as long as it uses the view.
    #[inline]
    pub(crate) unsafe fn own(&self) -> OwnCpu<'_> {
        OwnCpu(self)
    }
}

/// The view of code that is pinned to the CPU. No reference to a list outlives an access.
#[derive(Clone, Copy)]
pub(crate) struct OwnCpu<'a>(&'a PerCpu);

impl OwnCpu<'_> {
    #[inline]
    fn list(&self, class: u8) -> *mut List {
        // SAFETY: classes are below their number.
        unsafe { self.0.own.lists.get().cast::<List>().add(class as usize) }
    }

    /// Counts pages taken.
    #[inline]
    pub(crate) fn took(self, pages: u64) {
        self.0.own.taken.add(pages);
    }

    /// Counts pages given back.
    #[inline]
    pub(crate) fn gave(self, pages: u64) {
        self.0.own.given.add(pages);
    }

    /// Takes a free piece of the slab that allocations come from.
    #[inline]
    pub(crate) fn pop(self, class: u8) -> Option<NonNull<u8>> {
        let list = self.list(class);
        // SAFETY: pinned; the pieces are the current slab's, and there are none without one.
        unsafe { (*list).pieces.pop((*list).current) }
    }

    /// Takes the piece behind the one at an offset of the slab at `start`, if allocations come from that and it is the next one.
    /// Where the two begin.
    #[inline]
    pub(crate) fn pop_behind(self, class: u8, start: usize, offset: u32) -> Option<NonNull<u8>> {
        let (list, piece) = (self.list(class), SHAPES[class as usize].piece);
        // SAFETY: pinned; the pieces are the current slab's, which has the other one in front of this.
        unsafe {
            if (*list).current.addr() != start || (*list).pieces.next() != offset + piece {
                return None;
            }
            self.pop(class).map(|behind| behind.sub(piece as usize))
        }
    }

    /// Gives a piece of the slab at `start` back, if allocations come from that.
    ///
    /// # Safety
    ///
    /// The piece at the offset is the caller's.
    #[inline]
    pub(crate) unsafe fn push(self, class: u8, start: usize, offset: u32) -> bool {
        let list = self.list(class);
        // SAFETY: pinned; the pieces are the current slab's, which is not null, and the piece is the caller's.
        unsafe {
            if (*list).current.addr() != start {
                return false;
            }
            (*list).pieces.push((*list).current, offset);
        }
        true
    }

    /// Makes a slab that is on no list the one that allocations come from.
    pub(crate) fn set_current(self, slab: OwnSlab) {
        let list = self.list(slab.class());
        slab.set_place(Place::Current);
        // SAFETY: pinned.
        unsafe { ((*list).current, (*list).pieces) = (slab.as_link(), slab.pieces()) }
    }

    /// Takes the slab that allocations come from, if there is one: it goes where the caller puts it.
    pub(crate) fn take_current(self, class: u8) -> Option<OwnSlab> {
        let list = self.list(class);
        // SAFETY: pinned.
        unsafe {
            let slab = OwnSlab::from_link((*list).current)?;
            slab.set_pieces((*list).pieces);
            ((*list).current, (*list).pieces) = (null_mut(), Pieces::NONE);
            Some(slab)
        }
    }

    /// Allocations come from the first slab of the list, if there is one.
    pub(crate) fn advance(self, class: u8) -> bool {
        // SAFETY: pinned.
        let Some(slab) = OwnSlab::from_link(unsafe { (*self.list(class)).first }) else { return false };
        self.unlink(slab);
        self.set_current(slab);
        true
    }

    /// Puts a slab at the end of its class's list.
    pub(crate) fn link(self, slab: OwnSlab) {
        let list = self.list(slab.class());
        slab.set_place(Place::Listed);
        slab.set_next(null_mut());
        // SAFETY: pinned.
        unsafe {
            slab.set_prev((*list).last);
            match OwnSlab::from_link((*list).last) {
                Some(last) => last.set_next(slab.as_link()),
                None => (*list).first = slab.as_link(),
            }
            (*list).last = slab.as_link();
        }
    }

    /// Takes a slab off its class's list.
    pub(crate) fn unlink(self, slab: OwnSlab) {
        let list = self.list(slab.class());
        let (next, prev) = (slab.next(), slab.prev());
        // SAFETY: pinned.
        unsafe {
            match OwnSlab::from_link(prev) {
                Some(prev) => prev.set_next(next),
                None => (*list).first = next,
            }
            match OwnSlab::from_link(next) {
                Some(next) => next.set_prev(prev),
                None => (*list).last = prev,
            }
            if slab.kept() {
                slab.set_kept(false);
                (*list).keeps = false;
            }
        }
    }

    /// Whether an empty slab on the list is the one to be kept: it is, or it becomes it.
    pub(crate) fn keeps(self, slab: OwnSlab) -> bool {
        let list = self.list(slab.class());
        // SAFETY: pinned.
        unsafe {
            if !(*list).keeps {
                (*list).keeps = true;
                slab.set_kept(true);
            }
        }
        slab.kept()
    }

    /// The slabs of a class's list. The present one may be taken off it meanwhile, others not.
    pub(crate) fn listed(self, class: u8) -> impl Iterator<Item = OwnSlab> {
        // SAFETY: pinned.
        let mut at = unsafe { (*self.list(class)).first };
        core::iter::from_fn(move || {
            let slab = OwnSlab::from_link(at)?;
            at = slab.next();
            Some(slab)
        })
    }

    /// The slabs that others have woken, awake and off their list.
    pub(crate) fn take_woken(self) -> impl Iterator<Item = OwnSlab> {
        let mut at = self.0.woken.take();
        core::iter::from_fn(move || {
            if at == 0 {
                return None;
            }
            // SAFETY: what is on the list exists, is this CPU's, and stays until the owner gives it back.
            let slab = unsafe { Slab::at(at as usize).own() };
            at = slab.slab().woken_next();
            slab.set_armed(false);
            Some(slab)
        })
    }
}
