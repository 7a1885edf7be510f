//! Frames handed over, allocated and freed.

use crate::platform::Ostd;
use core::alloc::Layout;
use core::mem;
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Dirty, Extent, NodeId, Order, PAGE_BYTES, PAGE_SHIFT, Pfn, PhysAddr};
use hugemm_frames::{ArenaSpec, Env, Frames, FramesConfig, Frozen, Mobility, NodeStats, Plain};
use ostd::mm::frame::GlobalFrameAllocator;
use ostd::mm::{Paddr, Segment, UniqueFrame};
use ostd::sync::{LocalIrqDisabled, SpinLock};

/// The manager that the adapter makes.
pub(crate) type Manager = Frames<'static, Plain>;

/// How many pieces of memory can be handed over before the first allocation.
const MOST: usize = 128;

/// A hole of so many frames costs no more descriptors than an arena of its own would.
const HOLE: u64 = 64;

/// Memory that was handed over before the manager was there.
#[derive(Debug)]
struct Early {
    /// In any order.
    extents: [Extent; MOST],
    count: usize,
}

/// hugemm's frames as a kernel's `#[ostd::global_frame_allocator]`.
///
/// OSTD hands over all memory that it found before it allocates any. The first allocation makes a manager of it, whose metadata,
/// 1.6 % of the memory, is taken from the largest piece. Memory that is handed over later brings its own
/// metadata along ([`Frames::add`]).
///
/// Memory of 4 KiB to 1 GiB, at any alignment up to that. A size that is no power of two is cut out of a block of the next one, and
/// the rest of that is free again; a larger size has no block and gets none. OSTD gives every page back by itself, so blocks are
/// divided into pages when they are handed out: a page is freed at the cost of a page, to the CPU's cache.
#[derive(Debug)]
pub struct OstdFrames {
    pub(crate) platform: Ostd,
    early: SpinLock<Early, LocalIrqDisabled>,
    manager: AtomicPtr<Manager>,
    refused: AtomicU64,
}

impl Default for OstdFrames {
    fn default() -> Self {
        Self::new()
    }
}

impl OstdFrames {
    /// Without memory.
    pub const fn new() -> Self {
        // Empty, until it counts.
        let empty = match Extent::new(Pfn::new(0), 0) {
            Ok(extent) => extent,
            Err(_) => unreachable!(),
        };
        OstdFrames {
            platform: Ostd::new(),
            early: SpinLock::new(Early { extents: [empty; MOST], count: 0 }),
            manager: AtomicPtr::new(ptr::null_mut()),
            refused: AtomicU64::new(0),
        }
    }

    /// What is free, and how large extents of it are. Looks at all regions with the node locked. All zero before there is a
    /// manager.
    pub fn stats(&self) -> NodeStats {
        self.manager().map_or_else(NodeStats::default, |manager| self.platform.with_cx(|cx| manager.stats(cx)))
    }

    /// Frames that can be had, what CPUs have cached included.
    pub fn available(&self) -> u64 {
        self.manager().map_or(0, |manager| self.platform.with_cx(|cx| manager.available(cx)))
    }

    /// Frames that were handed over and could not be managed: too little to be worth it, too many pieces, or there already.
    pub fn refused(&self) -> u64 {
        // Relaxed: a statistic.
        self.refused.load(Ordering::Relaxed)
    }

    /// Gives what this CPU has cached back, for all to have: for an idle loop, before [`halt_cpu`](ostd::task::halt_cpu), which has no hook.
    /// Cheap if there is nothing.
    pub fn serve(&self) {
        if let Some(manager) = self.manager() {
            self.platform.with_cx(|cx| manager.serve(cx));
        }
    }

    #[inline]
    pub(crate) fn manager(&self) -> Option<&'static Manager> {
        // Acquire pairs with the Release in `start`.
        // SAFETY: null, or what `start` has written for good.
        unsafe { self.manager.load(Ordering::Acquire).as_ref() }
    }

    #[cold]
    #[inline(never)]
    fn start(&self, cx: &CpuCx<'_, Ostd>) -> Option<&'static Manager> {
        let mut early = self.early.lock();
        if let Some(manager) = self.manager() {
            return Some(manager);
        }
        let count = mem::take(&mut early.count);
        let extents = &mut early.extents[..count];
        extents.sort_unstable_by_key(|extent| extent.base());
        let mut arenas = [ArenaSpec::new(Extent::default(), NodeId::new(0)); MOST];
        let used = join(extents, &mut arenas);
        let cpus = cx.platform().cpus();
        // Enough for the smaller arenas that are left as well. The manager itself comes after its metadata.
        let config = FramesConfig::new(&arenas[..used], cpus);
        let bytes = Manager::required_bytes(&config).ok()?.size().next_multiple_of(align_of::<Manager>());
        let pages = ((bytes + size_of::<Manager>()) as u64).div_ceil(PAGE_BYTES);
        let largest = extents.iter_mut().max_by_key(|extent| extent.pages())?;
        let (rest, metadata) = largest.split_at(largest.pages().checked_sub(pages)?);
        let first = metadata.start().get() as usize;
        let segment = Segment::<()>::from_unused(first..first + metadata.bytes() as usize, |_| ()).ok()?;
        let memory = self.platform.learn(&segment);
        // Nobody else ever sees this segment.
        mem::forget(segment);
        *largest = rest;
        let used = join(extents, &mut arenas);
        let config = FramesConfig::new(&arenas[..used], cpus);
        // SAFETY: the segment is this manager's for good; its frames and those of the arenas were handed over once, so no other
        // manager knows them; all contexts come from this platform.
        let manager = unsafe {
            let made = Manager::new(&config, Plain::default(), memory, bytes).ok()?;
            let at = memory.add(bytes).cast::<Manager>();
            at.write(made);
            &*at
        };
        for extent in extents.iter() {
            // SAFETY: handed over once, and released once.
            unsafe { manager.release_extent(cx, *extent) };
        }
        self.manager.store(ptr::from_ref(manager).cast_mut(), Ordering::Release);
        Some(manager)
    }

    /// Memory that comes while the manager runs; how many of its frames are used, for the metadata too.
    fn add(&self, cx: &CpuCx<'_, Ostd>, manager: &'static Manager, extent: Extent) -> Option<u64> {
        let spec = |extent| ArenaSpec::new(extent, NodeId::new(0));
        // Enough for what is left as well.
        let bytes = Manager::added_bytes(&spec(extent)).ok()?.size();
        let pages = (bytes as u64).div_ceil(PAGE_BYTES);
        let (rest, metadata) = extent.split_at(extent.pages().checked_sub(pages).filter(|rest| *rest != 0)?);
        let first = metadata.start().get() as usize;
        let segment = Segment::<()>::from_unused(first..first + metadata.bytes() as usize, |_| ()).ok()?;
        let memory = self.platform.learn(&segment);
        // SAFETY: the segment is the manager's for good, once the arena is there; by the trait's contract nobody has handed the
        // frames over before.
        if unsafe { manager.add(cx, &spec(rest), memory, bytes) }.is_err() {
            // Its frames are still nobody's but the caller's, who does not want them back from OSTD.
            for frame in segment {
                UniqueFrame::try_from(frame).ok()?.reset_as_unused();
            }
            return None;
        }
        mem::forget(segment);
        // SAFETY: as above; once.
        Some(unsafe { manager.release_extent(cx, rest) } + pages)
    }

    fn refuse(&self, frames: u64) {
        self.refused.fetch_add(frames, Ordering::Relaxed);
    }
}

/// Arenas over extents in ascending order; holes that are not worth an arena's border become a part of one. How many.
fn join(extents: &[Extent], arenas: &mut [ArenaSpec]) -> usize {
    let mut used = 0_usize;
    for extent in extents.iter().filter(|extent| !extent.is_empty()) {
        if let Some(last) = used.checked_sub(1).and_then(|last| arenas.get_mut(last))
            && let base = last.extent.base()
            && extent.base().get().saturating_sub(last.extent.end().get()) <= HOLE
            && let Ok(both) = Extent::new(base, extent.end().get() - base.get())
        {
            last.extent = both;
        } else if let Some(next) = arenas.get_mut(used) {
            next.extent = *extent;
            used += 1;
        }
    }
    used
}

/// Pages of a layout, and the order of the block that holds them.
#[inline]
fn block_of(layout: Layout) -> Option<(u64, Order)> {
    let pages = (layout.size() as u64).div_ceil(PAGE_BYTES);
    let align = (layout.align() as u64) >> PAGE_SHIFT;
    if pages == 1 && align <= 1 {
        return Some((1, Order::ZERO));
    }
    let order = Order::covering(pages.max(align)).ok()?;
    (pages != 0).then_some((pages, order))
}

fn extent_of(address: Paddr, size: usize) -> Option<Extent> {
    Extent::from_bytes(PhysAddr::new(address as u64), size as u64).ok().filter(|extent| !extent.is_empty())
}

#[inline]
fn allocate<E: Env>(manager: &Frames<'static, E>, cx: &CpuCx<'_, Ostd>, pages: u64, order: Order) -> Option<Pfn> {
    // Nearly all are single pages; of a constant order, taking one is short.
    if order == Order::ZERO {
        return manager.alloc(cx, Order::ZERO).ok().map(|page| page.pfn());
    }
    let block = manager.alloc(cx, order).ok()?;
    let first = block.pfn();
    // Whole in the map only if it is a block of its own, which it is.
    let run = manager.split(block, Order::ZERO).ok()?;
    let (_, rest) = run.into_dirty().into_extent().split_at(pages);
    if !rest.is_empty() {
        // SAFETY: the run was this caller's, who keeps only what comes before.
        manager.free_extent(cx, unsafe { Dirty::assume_owned(rest) });
    }
    Some(first)
}

impl GlobalFrameAllocator for OstdFrames {
    #[inline]
    fn alloc(&self, layout: Layout) -> Option<Paddr> {
        let (pages, order) = block_of(layout)?;
        self.platform.with_cx(|cx| {
            let manager = match self.manager() {
                Some(manager) => manager,
                None => self.start(cx)?,
            };
            allocate(manager, cx, pages, order).map(|pfn| pfn.start().get() as Paddr)
        })
    }

    #[inline]
    fn dealloc(&self, address: Paddr, size: usize) {
        let Some(manager) = self.manager() else { return };
        if size == PAGE_BYTES as usize {
            let page = Pfn::new(address as u64 >> PAGE_SHIFT);
            // SAFETY: by the trait's contract the caller owns the page, and each is a block of its own since `alloc`. OSTD's own
            // account sees to it that breaking the contract spoils nothing but the manager's.
            let page = unsafe { Frozen::assume_owned(page, Order::ZERO, Mobility::Unmovable) };
            self.platform.with_cx(|cx| manager.free(cx, page));
        } else if let Some(extent) = extent_of(address, size) {
            // SAFETY: as above.
            self.platform.with_cx(|cx| manager.free_extent(cx, unsafe { Dirty::assume_owned(extent) }));
        }
    }

    fn add_free_memory(&self, address: Paddr, size: usize) {
        let Some(extent) = extent_of(address, size) else { return };
        self.platform.with_cx(|cx| {
            let mut early = self.early.lock();
            if let Some(manager) = self.manager() {
                drop(early);
                let taken = self.add(cx, manager, extent).unwrap_or(0);
                self.refuse(extent.pages() - taken);
                return;
            }
            let count = early.count;
            let known = early.extents[..count].iter().any(|known| !known.intersection(extent).is_empty());
            match early.extents.get_mut(count) {
                Some(next) if !known => {
                    *next = extent;
                    early.count += 1;
                }
                _ => self.refuse(extent.pages()),
            }
        });
    }
}
