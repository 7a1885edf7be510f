//! What a CPU has: for each class the slab that allocations come from, and a list of others with free pieces.
//!
//! Everything but [`PerCpu::woken`] is touched on that CPU only, under a pin. Allocations take from the front of a list and
//! slabs that get free pieces go to its end, so that they gather more before it is their turn. One empty slab per class is kept.
//!
//! Nothing here takes longer for what others did: under one pin at most [`LOOKS`] slabs are looked at, and one is taken out, which the
//! caller gives back when its pin has ended.

use crate::class::{CLASSES, SHAPES};
use crate::remote::Woken;
use crate::slab::{Header, OwnSlab, Pieces, Place, Slab};
use core::cell::{Cell, UnsafeCell};
use core::ptr::{NonNull, null_mut};
use hugemm_base::counters::CpuCounter;
use hugemm_base::sync::AtomicU64;

/// Slabs that are looked at under one pin, and by one allocation that finds none of its class.
pub(crate) const LOOKS: u32 = 8;

/// Slabs among those, on lists, that an allocation looks at before a new one is made: others may have emptied them. Two, so that they
/// become fewer while new ones are made.
const LISTED_LOOKS: u32 = 2;

/// What an allocation finds.
pub(crate) enum Found {
    /// A piece.
    Piece(NonNull<u8>),
    /// An empty slab that is on no list any more: the caller gives it back, and looks again.
    Empty(Emptied),
    /// No piece.
    Nothing,
}

/// A slab that is nobody's any more, and its class.
pub(crate) struct Emptied {
    pub(crate) start: usize,
    pub(crate) class: u8,
}

/// How far a [`trim`](OwnCpu::trim) is.
#[derive(Default)]
pub(crate) struct Trimming {
    class: u8,
    /// Slabs of the class that have not been looked at; none before its turn.
    left: Option<u32>,
}

/// One class's slabs on one CPU.
struct List {
    current: *mut Header,
    /// The current slab's; none if there is no such slab.
    pieces: Pieces,
    first: *mut Header,
    last: *mut Header,
    /// Slabs on the list.
    len: u32,
}

// What is beside it finds a class's list by a short multiplication, with the feature `hardened` too.
#[cfg(all(not(loom), target_pointer_width = "64"))]
const _: () = assert!(size_of::<List>() == 40 && CLASSES <= u32::BITS as usize);

impl List {
    const EMPTY: List = List { current: null_mut(), pieces: Pieces::NONE, first: null_mut(), last: null_mut(), len: 0 };
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
    /// What was taken from `woken`: the address of the first slab that has not been looked at, or 0.
    awake: Cell<u64>,
    /// The class whose list is looked at next.
    looked: Cell<u8>,
    /// Of which classes an empty slab is on the list, to be kept: a bit each.
    keeps: Cell<u32>,
    /// Pages taken from the manager less those given back.
    pages: CpuCounter,
}

// SAFETY: the lists are reached through `OwnCpu`, which is made under the CPU's pin; the rest is atomics.
unsafe impl Sync for PerCpu {}

impl PerCpu {
    pub(crate) fn new() -> Self {
        let lists = UnsafeCell::new([const { List::EMPTY }; CLASSES]);
        let own =
            Own { lists, awake: Cell::new(0), looked: Cell::new(0), keeps: Cell::new(0), pages: CpuCounter::default() };
        PerCpu { woken: Woken::new(AtomicU64::new(0)), own }
    }

    /// Pages that this CPU has taken less those that it has given back. Those of blocks go back on any CPU, so only the sum over
    /// all CPUs means something.
    pub(crate) fn pages(&self) -> u64 {
        self.own.pages.get()
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

    /// Counts pages taken, or, below zero, given back.
    #[inline]
    pub(crate) fn count(self, pages: i64) {
        self.0.own.pages.add(pages as u64);
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
    fn set_current(self, slab: OwnSlab) {
        let list = self.list(slab.class());
        slab.set_place(Place::Current);
        // SAFETY: pinned.
        unsafe { ((*list).current, (*list).pieces) = (slab.as_link(), slab.pieces()) }
    }

    /// Takes the slab that allocations come from, if there is one: it goes where the caller puts it.
    fn take_current(self, class: u8) -> Option<OwnSlab> {
        let list = self.list(class);
        // SAFETY: pinned.
        unsafe {
            let slab = OwnSlab::from_link((*list).current)?;
            slab.set_pieces((*list).pieces);
            ((*list).current, (*list).pieces) = (null_mut(), Pieces::NONE);
            Some(slab)
        }
    }

    /// Puts a slab at the end of its class's list.
    fn link(self, slab: OwnSlab) {
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
            (*list).len += 1;
        }
    }

    /// Takes a slab off its class's list.
    fn unlink(self, slab: OwnSlab) {
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
            (*list).len -= 1;
        }
        if slab.kept() {
            slab.set_kept(false);
            self.0.own.keeps.set(self.0.own.keeps.get() & !(1 << slab.class()));
        }
    }

    /// Whether an empty slab on the list is the one to be kept: it is, or it becomes it.
    fn keeps(self, slab: OwnSlab) -> bool {
        let (keeps, own) = (self.0.own.keeps.get(), 1 << slab.class());
        if keeps & own == 0 {
            self.0.own.keeps.set(keeps | own);
            slab.set_kept(true);
        }
        slab.kept()
    }

    /// A new slab: allocations come from it if they come from none.
    pub(crate) fn add(self, slab: OwnSlab) {
        // SAFETY: pinned.
        if unsafe { (*self.list(slab.class())).current.is_null() } { self.set_current(slab) } else { self.link(slab) }
    }

    /// A slab that is not the current one had no free piece and has one now, or has no used one any more: whether it is off all lists now,
    /// to be given back.
    #[cold]
    #[inline(never)]
    pub(crate) fn has_free_pieces(self, slab: OwnSlab) -> bool {
        if slab.place() == Place::Full {
            self.link(slab);
        }
        slab.is_empty() && !self.keeps(slab) && self.take_out(slab).is_some()
    }

    /// Takes an empty slab off its list, unless another CPU is about to touch it.
    fn take_out(self, slab: OwnSlab) -> Option<Emptied> {
        slab.disarm().then(|| {
            self.unlink(slab);
            Emptied { start: slab.slab().address(), class: slab.class() }
        })
    }

    /// A free piece of a class whose current slab has none. It may look at so many slabs more.
    pub(crate) fn find(self, class: u8, looks: &mut u32) -> Found {
        loop {
            if let Some(piece) = self.pop(class) {
                return Found::Piece(piece);
            }
            // What cannot be put aside has just been given pieces.
            if let Some(slab) = self.take_current(class)
                && (slab.replenish() || !slab.put_aside())
            {
                self.set_current(slab);
                continue;
            }
            // Before one of those on the list is used, for others may have emptied some of them.
            if let Some(empty) = self.serve(looks) {
                return Found::Empty(empty);
            }
            if let Some(slab) = self.first(class) {
                // Of several, an empty one goes.
                if *looks != 0 && !slab.next().is_null() && slab.is_empty() {
                    *looks -= 1;
                    if let Some(empty) = self.take_out(slab) {
                        return Found::Empty(empty);
                    }
                }
                self.unlink(slab);
                self.set_current(slab);
                continue;
            }
            return self.look(looks).map_or(Found::Nothing, Found::Empty);
        }
    }

    /// Looks at slabs that others have given pieces, as many as it may: one of them that is to be given back.
    fn serve(self, looks: &mut u32) -> Option<Emptied> {
        while *looks != 0
            && let Some(slab) = self.next_woken()
        {
            *looks -= 1;
            if slab.place() == Place::Full {
                // The pieces that it was woken for may have been found already; then it sleeps again, unless there are more.
                if !slab.replenish() && slab.put_aside() {
                    continue;
                }
                self.link(slab);
            }
            if slab.place() == Place::Listed
                && slab.is_empty()
                && !self.keeps(slab)
                && let Some(empty) = self.take_out(slab)
            {
                return Some(empty);
            }
        }
        None
    }

    /// Looks at slabs on lists, the classes in turn.
    fn look(self, looks: &mut u32) -> Option<Emptied> {
        let mut left = LISTED_LOOKS.min(*looks);
        for _ in 0..CLASSES {
            let class = self.0.own.looked.get();
            if let Some(slab) = self.first(class) {
                if left == 0 {
                    return None;
                }
                (left, *looks) = (left - 1, *looks - 1);
                if let Some(empty) = self.go_on(slab, true) {
                    return Some(empty);
                }
            }
            self.0.own.looked.set((class + 1) % CLASSES as u8);
        }
        None
    }

    /// Takes the first slab of a list out if it is empty, one of them excepted if they are to `keep` one; it is the last otherwise.
    fn go_on(self, slab: OwnSlab, keep: bool) -> Option<Emptied> {
        if slab.is_empty()
            && !(keep && self.keeps(slab))
            && let Some(empty) = self.take_out(slab)
        {
            return Some(empty);
        }
        let kept = slab.kept();
        self.unlink(slab);
        self.link(slab);
        if kept {
            self.keeps(slab);
        }
        None
    }

    /// A step of giving back all that is empty: a slab to be given back, and whether there is more to do.
    pub(crate) fn trim(self, at: &mut Trimming) -> (Option<Emptied>, bool) {
        let mut looks = LOOKS;
        if let Some(empty) = self.serve(&mut looks) {
            return (Some(empty), true);
        }
        while looks != 0 {
            let class = at.class;
            if class as usize == CLASSES {
                return (None, false);
            }
            let Some(left) = at.left else {
                if let Some(slab) = self.take_current(class) {
                    if slab.is_empty() { self.link(slab) } else { self.set_current(slab) }
                }
                // SAFETY: pinned.
                at.left = Some(unsafe { (*self.list(class)).len });
                continue;
            };
            match self.first(class).filter(|_| left != 0) {
                None => *at = Trimming { class: class + 1, left: None },
                Some(slab) => {
                    (at.left, looks) = (Some(left - 1), looks - 1);
                    if let Some(empty) = self.go_on(slab, false) {
                        return (Some(empty), true);
                    }
                }
            }
        }
        (None, true)
    }

    /// The first slab of a class's list.
    fn first(self, class: u8) -> Option<OwnSlab> {
        // SAFETY: pinned.
        OwnSlab::from_link(unsafe { (*self.list(class)).first })
    }

    /// The next slab that others have woken, awake and off their list.
    fn next_woken(self) -> Option<OwnSlab> {
        let at = match self.0.own.awake.get() {
            0 => self.0.woken.take(),
            at => at,
        };
        if at == 0 {
            return None;
        }
        // SAFETY: what is on the list exists, is this CPU's, and stays until the owner gives it back.
        let slab = unsafe { Slab::at(at as usize).own() };
        self.0.own.awake.set(slab.slab().woken_next());
        slab.set_armed(false);
        Some(slab)
    }
}
