//! The allocators that a user would pick instead, behind one small trait, each under one spin lock, which is how they
//! are used: none of them can be called by two CPUs at once.

use anyhow::Result;
use hugemm_base::lock::{Lock, SpinLock};
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Extent, Order, Pfn};
use hugemm_workloads::alloc_free::{Source, Unclaimed};

/// Another allocator of frames, numbered from 0.
#[cfg_attr(not(feature = "peers"), allow(dead_code, reason = "nobody implements it without the peers"))]
pub trait Peer: Send + Sized + 'static {
    /// Its name on the crate registry.
    const NAME: &'static str;
    /// Whether parts of a block can be freed.
    const DIVISIBLE: bool;
    /// Whether particular frames can be taken.
    const CLAIMS: bool;
    /// Whether a free takes longer the more holes there are: such a one is left out where there would be too many.
    const SCANS_HOLES: bool = false;

    /// An allocator of this many frames, all free. `Err` says why it cannot have as many.
    fn new(frames: u64) -> Result<Self>;
    /// Takes a naturally aligned block.
    fn alloc(&mut self, order: Order) -> Option<u64>;
    /// Frees a block.
    fn free(&mut self, frame: u64, order: Order);
    /// Frees a range that is a power of two and aligned, or a part of a block.
    fn free_range(&mut self, first: u64, pages: u64);
    /// Takes particular frames; false if they are in use.
    fn claim(&mut self, first: u64, pages: u64) -> bool;
}

/// A peer under its lock.
pub struct Locked<T> {
    peer: Lock<SpinLock, T>,
    base: u64,
}

impl<T: Peer> Locked<T> {
    /// A peer that manages as many frames as `area`, all free.
    #[cfg_attr(not(feature = "peers"), allow(dead_code, reason = "as above"))]
    pub fn new(area: Extent) -> Result<Self> {
        Ok(Locked { peer: Lock::new(T::new(area.pages())?), base: area.base().number() })
    }
}

impl<P: Cpu, T: Peer> Source<P> for Locked<T> {
    type Block = u64;

    #[inline]
    fn alloc(&self, _cx: &CpuCx<'_, P>, order: Order) -> Option<u64> {
        self.peer.lock().alloc(order)
    }

    #[inline]
    fn free(&self, _cx: &CpuCx<'_, P>, block: u64, order: Order) {
        self.peer.lock().free(block, order);
    }

    fn head(&self, block: &u64) -> Pfn {
        Pfn::new(self.base + block)
    }

    fn divide(&self, block: u64, order: Order) -> Result<Extent, u64> {
        if T::DIVISIBLE { Ok(Extent::block(Pfn::new(self.base + block), order)) } else { Err(block) }
    }

    #[inline]
    fn free_page(&self, _cx: &CpuCx<'_, P>, page: Pfn) {
        self.peer.lock().free(page.number() - self.base, Order::ZERO);
    }

    #[inline]
    fn free_pages(&self, _cx: &mut CpuCx<'_, P>, pages: Extent) {
        self.peer.lock().free_range(pages.base().number() - self.base, pages.pages());
    }

    fn claim(&self, _cx: &mut CpuCx<'_, P>, extent: Extent) -> Result<(), Unclaimed> {
        if !T::CLAIMS {
            return Err(Unclaimed::NoSuchOperation);
        }
        let claimed = self.peer.lock().claim(extent.base().number() - self.base, extent.pages());
        if claimed { Ok(()) } else { Err(Unclaimed::InUse) }
    }
}

/// Something to be done with each peer, whatever its type.
#[cfg_attr(not(feature = "peers"), allow(dead_code, reason = "as above"))]
pub trait Visit {
    /// Called once per peer.
    fn visit<T: Peer>(&mut self) -> Result<()>;
}

/// Visits every peer that was compiled in, unless the user wants none.
pub fn each(none: bool, visitor: &mut impl Visit) -> Result<()> {
    let _ = &visitor;
    if !none {
        #[cfg(feature = "peers")]
        crate::frames::peer_adapters::each(visitor)?;
    }
    Ok(())
}

/// What a table says of them.
pub fn note(none: bool) -> Option<&'static str> {
    match (none, cfg!(feature = "peers")) {
        (true, _) => None,
        (false, true) => Some(
            "Each other allocator is under one spin lock and manages as many frames; none keeps references. – : it has \
             no such operation.",
        ),
        (false, false) => Some("Other allocators are not compiled in: build with --features peers."),
    }
}
