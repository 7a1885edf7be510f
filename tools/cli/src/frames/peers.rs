//! The allocators that a user would pick instead, behind one small trait. No two CPUs can call one of them at once, so each is under
//! one spin lock, which is how they are used.

use anyhow::Result;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Extent, Order, Pfn};
use hugemm_workloads::alloc_free::Source;
use std::cell::UnsafeCell;

/// Another allocator of frames, numbered from 0.
pub trait Peer: Send + Sync + Sized + 'static {
    /// Its name, on the crate registry if it is there.
    const NAME: &'static str;
    /// Whether parts of a block can be freed.
    const DIVISIBLE: bool;
    /// Whether a free takes longer the more holes there are: such a one is left out where there would be too many.
    const SCANS_HOLES: bool = false;

    /// An allocator of this many frames, all free. `Err` says why it cannot have as many.
    fn new(frames: u64) -> Result<Self>;
    /// Takes a naturally aligned block.
    fn alloc(&self, order: Order) -> Option<u64>;
    fn free(&self, frame: u64, order: Order);
    /// Frees a range that is a power of two and aligned, or a part of a block.
    fn free_range(&self, first: u64, pages: u64);
}

/// A peer that manages the frames of an area.
pub struct Managed<T> {
    peer: T,
    base: u64,
}

impl<T: Peer> Managed<T> {
    /// One that manages as many frames as `area`, all free.
    pub fn new(area: Extent) -> Result<Self> {
        Ok(Managed { peer: T::new(area.pages())?, base: area.base().get() })
    }
}

impl<P: Cpu, T: Peer> Source<P> for Managed<T> {
    type Block = u64;

    #[inline]
    fn alloc(&self, _cx: &CpuCx<'_, P>, order: Order) -> Option<u64> {
        self.peer.alloc(order)
    }

    #[inline]
    fn free(&self, _cx: &CpuCx<'_, P>, block: u64, order: Order) {
        self.peer.free(block, order);
    }

    fn head(&self, block: &u64) -> Pfn {
        Pfn::new(self.base + block)
    }

    fn divide(&self, block: u64, order: Order, _to: Order) -> Result<Extent, u64> {
        if !T::DIVISIBLE {
            return Err(block);
        }
        Ok(Extent::block(Pfn::new(self.base + block), order))
    }

    #[inline]
    fn part(&self, head: Pfn, _order: Order) -> u64 {
        head.get() - self.base
    }

    #[inline]
    fn free_pages(&self, _cx: &mut CpuCx<'_, P>, pages: Extent) {
        self.peer.free_range(pages.base().get() - self.base, pages.pages());
    }
}

/// The floor of any cache of pages: an array of frame numbers for each CPU, under the same pin.
pub struct Arrays(Box<[OnCpu]>);

#[repr(align(128))]
struct OnCpu(UnsafeCell<Array>);

struct Array {
    len: usize,
    frames: [u64; 64],
}

// SAFETY: a CPU's array is used by that CPU alone, under a pin.
unsafe impl Sync for OnCpu {}

impl Arrays {
    pub fn new(cpus: u32) -> Self {
        let array = |cpu| Array { len: 32, frames: std::array::from_fn(|frame| u64::from(cpu) * 64 + frame as u64) };
        Arrays((0..cpus).map(|cpu| OnCpu(UnsafeCell::new(array(cpu)))).collect())
    }
}

impl<P: Cpu> Source<P> for Arrays {
    type Block = u64;

    #[inline]
    fn alloc(&self, cx: &CpuCx<'_, P>, _order: Order) -> Option<u64> {
        cx.pinned(|pin| {
            // SAFETY: the calling CPU's own, and no reference outlives the pin.
            let array = unsafe { &mut *self.0.get(pin.cpu().get() as usize)?.0.get() };
            array.len = array.len.checked_sub(1)?;
            array.frames.get(array.len).copied()
        })
    }

    #[inline]
    fn free(&self, cx: &CpuCx<'_, P>, block: u64, _order: Order) {
        cx.pinned(|pin| {
            let Some(array) = self.0.get(pin.cpu().get() as usize) else { return };
            // SAFETY: as above.
            let array = unsafe { &mut *array.0.get() };
            if let Some(place) = array.frames.get_mut(array.len) {
                *place = block;
                array.len += 1;
            }
        });
    }

    fn head(&self, block: &u64) -> Pfn {
        Pfn::new(*block)
    }

    fn part(&self, head: Pfn, _order: Order) -> u64 {
        head.get()
    }
}

/// Something to be done with each peer, whatever its type.
pub trait Visit {
    fn visit<T: Peer>(&mut self) -> Result<()>;
}

/// Visits every peer, unless the user wants none.
pub fn each(none: bool, visitor: &mut impl Visit) -> Result<()> {
    if none { Ok(()) } else { crate::frames::peer_adapters::each(visitor) }
}

/// How many of them there are.
pub fn count(none: bool) -> usize {
    if none { 0 } else { crate::frames::peer_adapters::COUNT }
}

/// What a table says of them.
pub fn note(none: bool) -> Option<&'static str> {
    (!none).then_some(
        "Each other allocator manages as many frames under one spin lock; none keeps references. – : it has no such operation.",
    )
}
