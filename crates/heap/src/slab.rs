//! A slab: a block of frames that is divided into pieces of one size, and belongs to one CPU.
//!
//! Its header is its first bytes, so it is found by rounding a piece's address down. The header's first line is for the owner,
//! under its pin; the other line is what all CPUs use. Headers lie at multiples of 4096, so those of all sizes share a few sets of a
//! cache: while allocations come from a slab its [`Pieces`] are with its owner's lists, and its header is left alone.
//!
//! A free piece holds the offset of the next one in its first four bytes. Pieces that were never used are not linked: the
//! slab's memory is touched as it is needed.

use crate::class::{SHAPES, Shape};
use crate::misuse::{CHECKED, MARKED};
use crate::remote::Remote;
use core::ptr::{NonNull, null_mut};
use hugemm_base::PAGE_BYTES;
use hugemm_base::sync::{AtomicU64, Ordering};

/// How many unused pieces are linked at once.
const FRESH: u32 = 16;

/// Where a slab is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Allocations of its class come from it.
    Current,
    /// On its class's list: it has free pieces.
    Listed,
    /// Nowhere: all its pieces are in use, or those that are not are with [`Remote`].
    Full,
}

/// Offset of a free piece, 0 for none, as the free piece in front of it holds it: with its mark, so that one store writes both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Link {
    offset: u32,
    /// Never changes.
    #[cfg(feature = "hardened")]
    mark: u32,
}

impl Link {
    pub(crate) const fn to(offset: u32) -> Self {
        Link {
            offset,
            #[cfg(feature = "hardened")]
            mark: mark(0),
        }
    }
}

/// Which pieces of a slab are free, and how many are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pieces {
    /// The first free piece.
    free: Link,
    /// Pieces that are not free, those included that others have freed and the owner has not taken.
    used: u32,
}

impl Pieces {
    /// None is free, and none is used.
    pub(crate) const NONE: Pieces = Pieces { free: Link::to(0), used: 0 };

    /// Offset of the piece that is taken next; 0 for none.
    #[inline]
    pub(crate) fn next(&self) -> u32 {
        self.free.offset
    }

    /// Takes a free piece.
    ///
    /// # Safety
    ///
    /// They are the slab's with this header; if there are none, it may be null.
    #[inline]
    pub(crate) unsafe fn pop(&mut self, slab: *mut Header) -> Option<NonNull<u8>> {
        if self.free.offset == 0 {
            return None;
        }
        // SAFETY: a free piece of the slab, which holds its link, written by `link`.
        unsafe {
            let piece = Slab(NonNull::new_unchecked(slab)).piece(self.free.offset);
            self.free.offset = piece.cast::<u32>().read();
            if MARKED {
                piece.cast::<u32>().add(1).write(0);
            }
            self.used = self.used.wrapping_add(1);
            Some(piece)
        }
    }

    /// Gives a piece back; whether the slab had no free one, or none is used any more.
    ///
    /// # Safety
    ///
    /// They are the slab's with this header; `offset` is that of a piece that is in use, and whose user is the caller.
    #[inline]
    pub(crate) unsafe fn push(&mut self, slab: *mut Header, offset: u32) -> bool {
        let before = self.free;
        // SAFETY: the slab is there, and the piece is the caller's.
        unsafe { Slab(NonNull::new_unchecked(slab)).link(offset, before) };
        (self.free.offset, self.used) = (offset, self.used.wrapping_sub(1));
        before.offset == 0 || self.used == 0
    }
}

/// What the owner knows.
#[repr(C, align(64))]
struct Own {
    /// Out of date while allocations come from the slab.
    pieces: Pieces,
    /// Offset of the first piece that was never used.
    fresh: u32,
    class: u8,
    place: Place,
    /// Whether it was put to sleep, and has not come with the list of woken ones since.
    armed: bool,
    /// Whether its class counts it as the empty one that is kept.
    kept: bool,
    next: *mut Header,
    prev: *mut Header,
}

/// What all CPUs use.
#[repr(C, align(64))]
struct Shared {
    remote: Remote<AtomicU64>,
    /// Link of the owner's list of woken slabs.
    woken_next: AtomicU64,
    /// Never changes.
    owner: u32,
    /// Debug builds: which pieces of half a frame are pairs, a bit for each frame that a pair may begin in.
    pairs: AtomicU64,
}

/// At the start of each slab.
#[repr(C)]
pub(crate) struct Header {
    own: Own,
    shared: Shared,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Header>() <= crate::class::HEADER as usize);

/// A slab. No reference to its header as a whole ever exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Slab(NonNull<Header>);

impl Slab {
    /// Makes one out of the block at `start`, of its class's order.
    ///
    /// # Safety
    ///
    /// The block's bytes are at `start`, aligned to 4096, writable and the caller's until it gives them back.
    pub(crate) unsafe fn new(start: NonNull<u8>, class: u8, owner: u32) -> Self {
        let header = start.cast::<Header>();
        let fresh = SHAPES[class as usize].first;
        // SAFETY: the caller's promise; a frame has room for a header.
        unsafe {
            (&raw mut (*header.as_ptr()).own).write(Own {
                pieces: Pieces::NONE,
                fresh,
                class,
                place: Place::Current,
                armed: false,
                kept: false,
                next: null_mut(),
                prev: null_mut(),
            });
            (&raw mut (*header.as_ptr()).shared).write(Shared {
                remote: Remote::new(AtomicU64::new(0)),
                woken_next: AtomicU64::new(0),
                owner,
                pairs: AtomicU64::new(0),
            });
        }
        // By a piece's address the header is found, and by an offset the piece.
        let _ = header.as_ptr().expose_provenance();
        Slab(header)
    }

    /// The slab whose header is at `address`.
    ///
    /// # Safety
    ///
    /// There is one, and it stays for as long as this is used.
    #[inline]
    pub(crate) unsafe fn at(address: usize) -> Self {
        // SAFETY: not null by the contract; `new` has exposed it.
        Slab(unsafe { NonNull::new_unchecked(core::ptr::with_exposed_provenance_mut(address)) })
    }

    #[inline]
    pub(crate) fn address(self) -> usize {
        self.0.as_ptr().addr()
    }

    #[inline]
    fn shared(&self) -> &Shared {
        // SAFETY: a slab that exists has a header, whose shared line is only ever read, or changed by atomics.
        unsafe { &(*self.0.as_ptr()).shared }
    }

    /// The CPU whose it is. Any CPU.
    #[inline]
    pub(crate) fn owner(self) -> u32 {
        self.shared().owner
    }

    #[inline]
    pub(crate) fn remote(&self) -> &Remote<AtomicU64> {
        &self.shared().remote
    }

    #[inline]
    pub(crate) fn woken_next(&self) -> u64 {
        // Relaxed: the list was taken by an acquire.
        self.shared().woken_next.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn set_woken_next(&self, next: u64) {
        // Relaxed: the push that follows releases.
        self.shared().woken_next.store(next, Ordering::Relaxed);
    }

    /// The piece at an offset.
    #[inline]
    pub(crate) fn piece(self, offset: u32) -> NonNull<u8> {
        // SAFETY: within the slab.
        unsafe { self.0.cast::<u8>().add(offset as usize) }
    }

    /// Debug builds: notes whether the piece of half a frame at an offset and the one behind it are a pair. Who has both does.
    #[inline]
    pub(crate) fn note_pair(self, offset: u32, is: bool) {
        if CHECKED {
            // Relaxed: a bit is its pieces' user's.
            match is {
                true => self.shared().pairs.fetch_or(pair(offset), Ordering::Relaxed),
                false => self.shared().pairs.fetch_and(!pair(offset), Ordering::Relaxed),
            };
        }
    }

    /// Debug builds: whether the piece of half a frame at an offset is one of a pair.
    pub(crate) fn is_pair(self, offset: u32) -> bool {
        // Relaxed: as above.
        self.shared().pairs.load(Ordering::Relaxed) & pair(offset) != 0
    }

    /// Links a free piece in front of `next`. It is [`MARKED`] as free.
    ///
    /// # Safety
    ///
    /// `offset` is that of a piece that is free and in the caller's hands.
    #[inline]
    pub(crate) unsafe fn link(self, offset: u32, next: Link) {
        // SAFETY: pieces have 8 bytes at least, at a multiple of 8.
        unsafe {
            let piece = self.piece(offset);
            piece.cast::<Link>().write(next);
            if CHECKED {
                piece.cast::<u32>().add(1).write(mark(offset));
            }
        }
    }

    /// Whether a piece seems to be free already: it bears the mark. Memory that happens to hold it is mistaken for free, once in 2^32.
    ///
    /// # Safety
    ///
    /// `offset` is that of a piece that the caller has, or somebody has freed.
    pub(crate) unsafe fn is_marked(self, offset: u32) -> bool {
        // In memory that was never written a volatile read finds what happens to be there; for Miri there is nothing.
        // SAFETY: as in `link`.
        !cfg!(miri) && unsafe { self.piece(offset).cast::<u32>().add(1).read_volatile() == mark(offset) }
    }
}

/// The bit of the pair to which the piece of half a frame at an offset may belong: pairs begin in the middle of a frame.
const fn pair(offset: u32) -> u64 {
    1 << ((offset as u64 + PAGE_BYTES / 2) / PAGE_BYTES)
}

/// What says that the piece at an offset is free. In debug builds a copy of what was free says nothing.
const fn mark(offset: u32) -> u32 {
    0xf4ee_b10c_u32.wrapping_add(if CHECKED { offset } else { 0 })
}

/// The owner's view of a slab.
///
/// Every method requires that the caller runs on the slab's CPU, under its pin, and that the slab exists: this is made by
/// [`Slab::own`] only, which says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct OwnSlab(Slab);

impl Slab {
    /// The owner's view.
    ///
    /// # Safety
    ///
    /// The caller is pinned to the slab's CPU for as long as it uses the view, and does not use it after giving the slab back.
    #[inline]
    pub(crate) unsafe fn own(self) -> OwnSlab {
        OwnSlab(self)
    }
}

macro_rules! fields {
    ($($name:ident, $set:ident: $type:ty;)*) => {
        $(
            #[inline]
            pub(crate) fn $name(self) -> $type {
                // SAFETY: the owner's line, which only the owner uses, under its pin.
                unsafe { (*self.0.0.as_ptr()).own.$name }
            }

            #[inline]
            pub(crate) fn $set(self, value: $type) {
                // SAFETY: as above.
                unsafe { (*self.0.0.as_ptr()).own.$name = value }
            }
        )*
    };
}

impl OwnSlab {
    fields! {
        pieces, set_pieces: Pieces;
        fresh, set_fresh: u32;
        place, set_place: Place;
        armed, set_armed: bool;
        kept, set_kept: bool;
        next, set_next: *mut Header;
        prev, set_prev: *mut Header;
    }

    /// The slab.
    #[inline]
    pub(crate) fn slab(self) -> Slab {
        self.0
    }

    /// The slab at an address that a list holds; `None` for null.
    #[inline]
    pub(crate) fn from_link(link: *mut Header) -> Option<Self> {
        Some(OwnSlab(Slab(NonNull::new(link)?)))
    }

    #[inline]
    pub(crate) fn as_link(self) -> *mut Header {
        self.0.0.as_ptr()
    }

    pub(crate) fn class(self) -> u8 {
        // SAFETY: as for the other fields.
        unsafe { (*self.as_link()).own.class }
    }

    pub(crate) fn shape(self) -> &'static Shape {
        &SHAPES[self.class() as usize]
    }

    /// Gives a piece back; whether the slab had no free one, or none is used any more.
    ///
    /// # Safety
    ///
    /// `offset` is that of a piece that is in use, and whose user is the caller. Allocations do not come from the slab.
    #[inline]
    pub(crate) unsafe fn push(self, offset: u32) -> bool {
        // SAFETY: the caller's promise; the owner's line, which only the owner uses, under its pin.
        unsafe { (*self.as_link()).own.pieces.push(self.as_link(), offset) }
    }

    /// Finds free pieces for a slab that has run out: what others have freed, or what was never used. Whether there are any.
    /// Allocations do not come from it.
    pub(crate) fn replenish(self) -> bool {
        let used = self.pieces().used;
        if let Some((first, count)) = self.0.remote().take() {
            self.set_pieces(Pieces { free: Link::to(first), used: used.wrapping_sub(count) });
            return true;
        }
        let (shape, fresh) = (self.shape(), self.fresh());
        let end = shape.end.min(fresh + FRESH * shape.piece);
        let mut offset = fresh;
        while offset < end {
            let next = offset + shape.piece;
            // SAFETY: a piece that was never used, in the owner's hands.
            unsafe { self.0.link(offset, Link::to(if next < end { next } else { 0 })) };
            offset = next;
        }
        self.set_fresh(end);
        self.set_pieces(Pieces { free: Link::to(if fresh < end { fresh } else { 0 }), used });
        fresh < end
    }

    /// Whether every piece is free, those included that others have freed. Allocations do not come from it.
    pub(crate) fn is_empty(self) -> bool {
        self.pieces().used == self.0.remote().count()
    }

    /// Puts a slab without free pieces aside until one is freed; not if others have freed some.
    pub(crate) fn put_aside(self) -> bool {
        // One that is armed already is asleep, or is on its way to the list of woken ones.
        if !self.armed() && !self.0.remote().sleep() {
            return false;
        }
        self.set_armed(true);
        self.set_place(Place::Full);
        true
    }

    /// Makes sure that no other CPU touches an empty slab any more; not if one is about to.
    pub(crate) fn disarm(self) -> bool {
        if self.armed() && !self.0.remote().wake() {
            return false;
        }
        self.set_armed(false);
        true
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[repr(align(4096))]
    struct Block([u8; 4096]);

    /// A slab of pieces of 128 bytes.
    fn slab(block: &mut Block) -> OwnSlab {
        let class = SHAPES.iter().position(|shape| shape.piece == 128).expect("a size") as u8;
        // SAFETY: the test's block, which is larger than a slab of the class; there is one CPU, and it is this one.
        unsafe { Slab::new(NonNull::from(block).cast(), class, 0).own() }
    }

    fn pop(slab: OwnSlab) -> Option<NonNull<u8>> {
        let mut pieces = slab.pieces();
        // SAFETY: the slab's.
        let piece = unsafe { pieces.pop(slab.as_link()) };
        slab.set_pieces(pieces);
        piece
    }

    /// Pieces that were never used are linked a few at a time, and the others' memory stays as it is.
    #[test]
    fn memory_is_touched_as_it_is_needed() {
        let mut block = Block([0xaa; 4096]);
        let slab = slab(&mut block);
        let touched = (slab.shape().first + FRESH * 128) as usize;
        assert!(slab.replenish() && touched + 128 < slab.shape().end as usize);
        for _ in 0..FRESH {
            assert!(pop(slab).is_some());
        }
        assert!(pop(slab).is_none() && slab.replenish() && pop(slab).is_some());
        // The second few begin where the first end, and there are no more than there is room for.
        assert_eq!(slab.fresh(), slab.shape().end.min(touched as u32 + FRESH * 128));
        while pop(slab).is_some() || slab.replenish() {}
        assert_eq!(slab.pieces(), Pieces { free: Link::to(0), used: (4096 - 128) / 128 });

        let mut block = Block([0xaa; 4096]);
        assert!(self::slab(&mut block).replenish());
        assert!(block.0[touched..].iter().all(|byte| *byte == 0xaa));
    }

    /// What another CPU has freed just now is found, not slept over.
    #[test]
    fn a_slab_that_others_have_given_pieces_is_not_put_aside() {
        let mut block = Block([0; 4096]);
        let own = slab(&mut block);
        let offset = own.shape().first;
        own.set_pieces(Pieces { free: Link::to(0), used: 1 });
        // SAFETY: nobody has the piece.
        assert!(!own.slab().remote().push(offset, |next| unsafe { own.slab().link(offset, Link::to(next)) }));
        assert!(!own.put_aside() && !own.armed());
        assert!(own.replenish() && pop(own).is_some());
        assert!(own.put_aside() && own.armed() && own.place() == Place::Full);
    }
}
