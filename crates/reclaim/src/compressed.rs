//! Swap in memory: pages compressed into pieces of the manager's own frames.
//!
//! | file | the rule it owns |
//! |---|---|
//! | `compressed/back_end.rs` | the store as a [`Swap`](crate::Swap) |
//! | `compressed/put.rs` | storing |
//! | `compressed/get.rs` | loading; holders |
//! | `compressed/slot.rs` | what a slot's bits say; pages filled with one word, which take no memory |
//! | `compressed/classes.rs` | size classes |
//! | `compressed/blocks.rs` | which piece of which block |
//! | `compressed/scratch.rs` | working memory per CPU |
//! | `compressed/bytes.rs` | reaching the bytes |
//!
//! There is no heap and no table of slots: a slot says where its piece is, what is free in a block is one word of its
//! descriptor, and a piece begins with its length. So a page that compresses to `n` bytes costs `n + 4` bytes rounded up
//! to its class, and nothing else.
//!
//! # When memory is out
//!
//! Storing needs a new block only when no piece of the class is free. [`store`](crate::Swap::store) then asks the manager by a
//! plain allocation, which never reclaims, and fails with [`StoreError::NoMemory`] if it has none. [`evict`](crate::Swap::evict)
//! does not fail for pages that compress to half: the page's own frame becomes the block. It frees nothing that time, and its
//! class has room for the next pages. A page that does not compress is refused: evicting it would free nothing. As a part of a
//! larger page, [stored](crate::Swap::store) with the others, it is copied whole.
//!
//! # Cost
//!
//! Store: one compression and one lock round of the class, a few dozen instructions, in one pin; outside of it, a block for several pages, and
//! one more pin. Load: one decompression, no
//! lock, not pinned where the map reaches the piece in one window. Free: one lock round.

mod back_end;
mod blocks;
mod bytes;
mod classes;
mod get;
mod put;
mod scratch;
mod slot;

pub use blocks::Usage;

use crate::compressor::Compressor;
use crate::links::Words;
use crate::swap::StoreError;
use crate::words::{FREE, TAG};
use blocks::Blocks;
use bytes::Span;
use classes::{CLASSES, ClassSpec, TABLE};
use core::fmt;
use hugemm_base::counters::Counter;
use hugemm_base::lock::{PinnedLock, RawLock, SpinLock};
use hugemm_base::platform::Cpu;
use hugemm_base::sync::{AtomicU64, AtomicWord, Ordering};
use hugemm_base::{CpuCx, Extent, FrameUse, Order, PAGE_BYTES, Pfn, PhysMap};
use hugemm_frames::{AllocError, AllocRequest, Env, Frames, Frozen, Mobility};
use scratch::Scratch;
use slot::Place;

/// The class number of pages stored whole.
const WHOLE: u64 = CLASSES as u64;

/// Most holders of one slot.
const MOST_HOLDERS: u64 = u16::MAX as u64;

/// Offsets in a piece's header: two bytes of length, two of holders.
const LENGTH_AT: usize = 0;
const HOLDERS_AT: usize = 2;

/// Apart, so that two classes' locks share no cache line or prefetch pair.
#[repr(align(128))]
struct Apart<T>(T);

/// Swap in memory. See the [module's documentation](self).
///
/// Belongs to one [`Frames`]; every context it is given comes from that manager's platform, whose map reaches all of the
/// manager's frames. Give it back with [`close`](Compressed::close): dropping it loses its frames.
pub struct Compressed<'f, 'm, E: Env, C: Compressor, L: RawLock = SpinLock> {
    frames: &'f Frames<'m, E>,
    compressor: C,
    scratch: Scratch<C>,
    classes: [Apart<PinnedLock<L, Blocks>>; CLASSES],
    /// How many pages are stored whole; the lock is for their holders.
    whole: Apart<PinnedLock<L, u64>>,
    /// Frames taken, working memory included.
    used: AtomicU64,
    limit: AtomicU64,
    /// Handles on filled pages.
    filled: AtomicU64,
    stores: Counter,
    loads: Counter,
    refused_full: Counter,
    refused_memory: Counter,
    corrupt: Counter,
}

impl<E: Env, C: Compressor, L: RawLock> fmt::Debug for Compressed<'_, '_, E, C, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compressed").field("used", &self.used).field("limit", &self.limit).finish_non_exhaustive()
    }
}

/// The frame of the page that is being evicted, for use as a block.
type Own = Option<(Pfn, Mobility)>;

/// A block that nobody else knows yet.
struct New {
    pfn: Pfn,
    order: Order,
    mobility: Mobility,
    is_own: bool,
}

/// Where a page went, and whether its own frame went there too.
type Kept = (Place, bool);

impl<'f, 'm, E: Env, C: Compressor, L: RawLock> Compressed<'f, 'm, E, C, L> {
    /// A store for contexts of CPUs 0 to `cpus`, with at most `limit` frames in all. Takes frames for working memory at
    /// once (see [`Usage`] and [`SwapStats::frames`](crate::SwapStats::frames)) and fails if they cannot be had or the limit does not cover them.
    ///
    /// # Errors
    ///
    /// [`NoMemory`](StoreError::NoMemory), or [`Full`](StoreError::Full) if `limit` is below the working memory.
    pub fn new<P: Cpu + PhysMap>(
        frames: &'f Frames<'m, E>,
        cx: &CpuCx<'_, P>,
        compressor: C,
        cpus: u32,
        limit: u64,
    ) -> Result<Self, StoreError> {
        let own = Scratch::<C>::frames(cpus).filter(|own| *own <= limit).ok_or(StoreError::Full)?;
        let scratch = Scratch::new(frames, cx, &compressor, cpus).map_err(|_: AllocError| StoreError::NoMemory)?;
        cx.count_frames(FrameUse::SWAP, own as i64);
        Ok(Compressed {
            frames,
            compressor,
            scratch,
            classes: core::array::from_fn(|_| Apart(PinnedLock::new(Blocks::default()))),
            whole: Apart(PinnedLock::new(0)),
            used: AtomicU64::new(own),
            limit: AtomicU64::new(limit),
            filled: AtomicU64::new(0),
            stores: Counter::default(),
            loads: Counter::default(),
            refused_full: Counter::default(),
            refused_memory: Counter::default(),
            corrupt: Counter::default(),
        })
    }

    /// Gives everything back. Any context but NMI; O(working memory).
    ///
    /// # Errors
    ///
    /// The store, while pages are in it: load or free them first.
    #[allow(clippy::result_large_err, reason = "the store as it was")]
    pub fn close<P: Cpu + PhysMap>(self, cx: &CpuCx<'_, P>) -> Result<(), Self> {
        if self.held(cx) != 0 {
            return Err(self);
        }
        // Relaxed: as in `charge`; nothing but working memory is left.
        cx.count_frames(FrameUse::SWAP, -(self.used.load(Ordering::Relaxed) as i64));
        self.scratch.close(self.frames, cx);
        Ok(())
    }

    /// How well the memory of each class is used, smallest pieces first: the fragmentation inside pieces is `used *
    /// piece_bytes - data_bytes`, that between them `(pieces - used) * piece_bytes`. One lock round per class; any
    /// context but NMI.
    pub fn usage<P: Cpu>(&self, cx: &CpuCx<'_, P>) -> impl Iterator<Item = Usage> {
        self.classes.iter().zip(TABLE).map(|(class, spec)| cx.pinned(|pin| class.0.lock(pin).usage(spec)))
    }

    /// Pages in memory, filled ones excepted.
    fn held<P: Cpu>(&self, cx: &CpuCx<'_, P>) -> u64 {
        let whole = cx.pinned(|pin| *self.whole.0.lock(pin));
        whole + self.usage(cx).map(|class| class.used).sum::<u64>()
    }

    /// Charges frames against the limit, and counts them as swap's: they may have been the page's own.
    fn charge<P: Cpu>(&self, cx: &CpuCx<'_, P>, pages: u64) -> Result<(), StoreError> {
        // Relaxed: counts, which order nothing; the read-modify-write never lets the sum pass the limit.
        let limit = self.limit.load(Ordering::Relaxed);
        let within = |used: u64| used.checked_add(pages).filter(|sum| *sum <= limit);
        match self.used.transition(Ordering::Relaxed, Ordering::Relaxed, within) {
            Ok(_) => {
                cx.count_frames(FrameUse::SWAP, pages as i64);
                Ok(())
            }
            Err(_) => Err(StoreError::Full),
        }
    }

    fn uncharge<P: Cpu>(&self, cx: &CpuCx<'_, P>, pages: u64) {
        cx.count_frames(FrameUse::SWAP, -(pages as i64));
        // Relaxed: as in `charge`.
        self.used.fetch_sub(pages, Ordering::Relaxed);
    }

    fn tag(&self, class: u64, mobility: Mobility) -> u64 {
        self.scratch.identity() << 8 | u64::from(mobility == Mobility::Movable) << 7 | class
    }

    /// The class and mobility of a block of this store; `None` if it is none.
    fn class_of(&self, block: Pfn) -> Option<(u64, Mobility)> {
        let tag = self.frames.word(block, TAG);
        let mobility = if tag & 1 << 7 != 0 { Mobility::Movable } else { Mobility::Unmovable };
        let class = tag & 127;
        (tag == self.tag(class, mobility)).then_some((class, mobility))
    }

    /// The class and span of a piece.
    fn piece(&self, block: Pfn, index: u32) -> Option<(usize, Mobility, Span)> {
        let (class, mobility) = self.class_of(block)?;
        let spec = TABLE.get(class as usize)?;
        let used = spec.all_free() & !self.frames.word(block, FREE);
        (used & 1 << index != 0).then(|| (class as usize, mobility, piece_span(spec, block, index)))
    }

    /// A frame or block for data: from the manager, or the page's own frame where that has none. The limit is charged.
    fn block<P: Cpu>(&self, cx: &CpuCx<'_, P>, class: u64, order: Order, own: Own) -> Result<New, StoreError> {
        self.charge(cx, order.pages())?;
        let new = match (self.frames.alloc(cx, AllocRequest::order(order)), own) {
            (Ok(block), _) => {
                let (pfn, mobility) = (block.pfn(), block.mobility());
                let _ = block.into_dirty().into_extent();
                New { pfn, order, mobility, is_own: false }
            }
            (Err(_), Some((pfn, mobility))) if order == Order::ZERO => New { pfn, order, mobility, is_own: true },
            (Err(_), _) => {
                self.uncharge(cx, order.pages());
                return Err(StoreError::NoMemory);
            }
        };
        self.frames.set_word(new.pfn, TAG, self.tag(class, new.mobility));
        Ok(new)
    }

    /// Undoes [`block`](Self::block) for a block that nothing is in. The page's own frame stays its owner's.
    fn forget<P: Cpu>(&self, cx: &CpuCx<'_, P>, new: New) {
        if !new.is_own {
            return self.release(cx, new.pfn, new.order, new.mobility);
        }
        // As it was: an LRU reads there whether it has the page.
        self.frames.set_word(new.pfn, TAG, 0);
        self.uncharge(cx, new.order.pages());
    }

    /// Gives a block back that nothing is in.
    fn release<P: Cpu>(&self, cx: &CpuCx<'_, P>, block: Pfn, order: Order, mobility: Mobility) {
        self.frames.set_word(block, TAG, 0);
        self.uncharge(cx, order.pages());
        // SAFETY: the store owned the block, which is on no list, and no slot is in it any more.
        self.frames.free(cx, unsafe { Frozen::assume_owned(block, order, mobility) });
    }

    /// Frees a piece, and its block if that was the last.
    fn give_piece<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        class: usize,
        mobility: Mobility,
        block: Pfn,
        index: u32,
        data: usize,
    ) {
        let empty =
            cx.pinned(|pin| self.classes[class].0.lock(pin).give(self.frames, TABLE[class], block, index, data));
        if empty {
            self.release(cx, block, TABLE[class].block_order(), mobility);
        }
    }
}

fn piece_span(spec: &ClassSpec, block: Pfn, index: u32) -> Span {
    let extent = Extent::block(block, spec.block_order());
    Span { extent, offset: (index * spec.piece) as usize, len: spec.piece as usize }
}

const _: () = assert!(PAGE_BYTES <= u16::MAX as u64);
