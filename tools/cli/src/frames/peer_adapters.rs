//! One adapter for each allocator of the registry that is compared with, under one spin lock, because no two CPUs can call it at once.

use crate::frames::peers::{Peer, Visit};
use anyhow::{Result, ensure};
use bitmap_allocator::{BitAlloc, BitAlloc16M};
use buddy_slab_allocator::BuddyAllocator;
use buddy_system_allocator::FrameAllocator;
use free_list::{FreeList, PageLayout, PageRange};
use hugemm_base::lock::{Lock, SpinLock};
use hugemm_base::{Order, PAGE_BYTES, PAGE_SHIFT};
use hugemm_workloads::size::Size;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// How many they are.
pub const COUNT: usize = 4;

pub fn each(visitor: &mut impl Visit) -> Result<()> {
    visitor.visit::<BuddySystem>()?;
    visitor.visit::<Bitmap>()?;
    visitor.visit::<Holes>()?;
    visitor.visit::<BuddySlab>()
}

/// rCore's buddy system: an ordered set of block numbers per order, on the heap.
pub struct BuddySystem(Lock<SpinLock, FrameAllocator<{ Order::MAX.get() as usize + 1 }>>);

impl Peer for BuddySystem {
    const NAME: &'static str = "buddy_system_allocator";
    const DIVISIBLE: bool = true;

    fn new(frames: u64) -> Result<Self> {
        let mut buddy = FrameAllocator::new();
        buddy.add_frame(0, frames as usize);
        Ok(BuddySystem(Lock::new(buddy)))
    }

    fn alloc(&self, order: Order) -> Option<u64> {
        self.0.lock().alloc(order.pages() as usize).map(|frame| frame as u64)
    }

    fn free(&self, frame: u64, order: Order) {
        self.0.lock().dealloc(frame as usize, order.pages() as usize);
    }

    fn free_range(&self, first: u64, pages: u64) {
        self.0.lock().dealloc(first as usize, pages as usize);
    }
}

/// rCore's bitmap: a tree of 16-bit words.
pub struct Bitmap(Lock<SpinLock, Box<BitAlloc16M>>);

impl Peer for Bitmap {
    const NAME: &'static str = "bitmap-allocator";
    const DIVISIBLE: bool = true;

    fn new(frames: u64) -> Result<Self> {
        let most = Size((BitAlloc16M::CAP as u64) << PAGE_SHIFT);
        ensure!(
            frames <= BitAlloc16M::CAP as u64,
            "bitmap-allocator as used here manages {most} at most; use --no-peers"
        );
        let mut bits = Box::<BitAlloc16M>::default();
        bits.insert(0..frames as usize);
        Ok(Bitmap(Lock::new(bits)))
    }

    fn alloc(&self, order: Order) -> Option<u64> {
        let frame = match order.get() {
            0 => self.0.lock().alloc(),
            order => self.0.lock().alloc_contiguous(None, 1 << order, order as usize),
        };
        frame.map(|frame| frame as u64)
    }

    fn free(&self, frame: u64, order: Order) {
        match order.get() {
            0 => self.0.lock().dealloc(frame as usize),
            order => self.0.lock().dealloc_contiguous(frame as usize, 1 << order),
        };
    }

    fn free_range(&self, first: u64, pages: u64) {
        self.0.lock().dealloc_contiguous(first as usize, pages as usize);
    }
}

/// Hermit's list of free ranges, first fit.
pub struct Holes(Lock<SpinLock, FreeList<16>>);

/// free-list counts from 0 in bytes, and cannot hold a range that begins there.
fn range(first: u64, pages: u64) -> Option<PageRange> {
    let start = ((first << PAGE_SHIFT) + Order::MAX.bytes()) as usize;
    PageRange::from_start_len(start, (pages << PAGE_SHIFT) as usize).ok()
}

impl Peer for Holes {
    const NAME: &'static str = "free-list";
    const DIVISIBLE: bool = true;
    const SCANS_HOLES: bool = true;

    fn new(frames: u64) -> Result<Self> {
        let holes = Holes(Lock::new(FreeList::new()));
        holes.free_range(0, frames);
        Ok(holes)
    }

    fn alloc(&self, order: Order) -> Option<u64> {
        let bytes = order.bytes() as usize;
        let layout = PageLayout::from_size_align(bytes, bytes).ok()?;
        let range = self.0.lock().allocate(layout).ok()?;
        Some((range.start() as u64 - Order::MAX.bytes()) >> PAGE_SHIFT)
    }

    fn free(&self, frame: u64, order: Order) {
        self.free_range(frame, order.pages());
    }

    fn free_range(&self, first: u64, pages: u64) {
        if let Some(range) = range(first, pages) {
            // SAFETY: the frames are numbers; the loops free what they took, once. (An error means that the list knew
            // the range as free.)
            let freed = unsafe { self.0.lock().deallocate(range) };
            debug_assert!(freed.is_ok());
        }
    }
}

/// ArceOS's buddy allocator: a record per page, at the beginning of its memory. The memory is address space that is
/// never touched but for the records.
pub struct BuddySlab {
    buddy: Lock<SpinLock, BuddyAllocator<{ PAGE_BYTES as usize }>>,
    map: *mut u8,
    bytes: usize,
    /// Address of frame 0.
    first: usize,
}

/// How many pages its own data may take besides the records.
const SLACK: usize = 4;

// SAFETY: the mapping belongs to this value alone, and is used under the lock.
unsafe impl Send for BuddySlab {}
// SAFETY: as above.
unsafe impl Sync for BuddySlab {}

impl Peer for BuddySlab {
    const NAME: &'static str = "buddy-slab-allocator";
    const DIVISIBLE: bool = false;

    fn new(frames: u64) -> Result<Self> {
        let heap = (frames << PAGE_SHIFT) as usize;
        let records = BuddyAllocator::<{ PAGE_BYTES as usize }>::required_meta_size(heap);
        // The records lie before the frames, with some pages for what else the allocator puts there.
        let bytes = heap + records.next_multiple_of(PAGE_BYTES as usize) + SLACK * PAGE_BYTES as usize;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping at an address that the system chooses.
        let map: *mut u8 = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, flags) }?.cast();
        // SAFETY: the mapping made above. Advice may be refused; it is only about speed.
        let _ = unsafe { madvise(map.cast(), bytes, Advice::LinuxHugepage) };
        let mut peer = BuddySlab { buddy: Lock::new(BuddyAllocator::new()), map, bytes, first: 0 };
        let mut buddy = peer.buddy.lock();
        for slack in 0..=SLACK {
            // SAFETY: the mapping made above is zero, writable, lives as long as the peer, and is used for nothing else.
            let region = unsafe {
                std::slice::from_raw_parts_mut(map, bytes - SLACK * PAGE_BYTES as usize + slack * PAGE_BYTES as usize)
            };
            // SAFETY: as above; what it has written before, it forgets.
            unsafe { buddy.init(region) }.map_err(|error| anyhow::anyhow!("buddy-slab-allocator: {error:?}"))?;
            if buddy.total_pages() as u64 == frames {
                break;
            }
        }
        ensure!(buddy.total_pages() as u64 == frames, "buddy-slab-allocator cannot manage {frames} frames");
        let first = buddy.section(0).map_or(0, |section| section.start);
        drop(buddy);
        peer.first = first;
        Ok(peer)
    }

    fn alloc(&self, order: Order) -> Option<u64> {
        // Natural alignment is relative to its first frame.
        let address = self.buddy.lock().alloc_pages(order.pages() as usize, PAGE_BYTES as usize).ok()?;
        Some(((address - self.first) >> PAGE_SHIFT) as u64)
    }

    fn free(&self, frame: u64, order: Order) {
        self.buddy.lock().dealloc_pages(self.first + ((frame as usize) << PAGE_SHIFT), order.pages() as usize);
    }

    fn free_range(&self, first: u64, pages: u64) {
        self.buddy.lock().dealloc_pages(self.first + ((first as usize) << PAGE_SHIFT), pages as usize);
    }
}

impl Drop for BuddySlab {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; the allocator that used it goes with it.
        let _ = unsafe { munmap(self.map.cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::peers::Peer;

    /// Every peer gives out different frames, takes them back, and can then give all of them out again.
    struct Check;

    impl Visit for Check {
        fn visit<T: Peer>(&mut self) -> Result<()> {
            let frames = 1 << 12;
            let peer = T::new(frames)?;
            for order in [0, 3, 9, 10] {
                let order = Order::new(order)?;
                let count = frames >> order.get();
                let mut taken: Vec<u64> = (0..count).map_while(|_| peer.alloc(order)).collect();
                assert_eq!((taken.len() as u64, peer.alloc(order)), (count, None), "{} {order}", T::NAME);
                taken.sort_unstable();
                assert!(taken.iter().copied().eq((0..count).map(|i| i << order.get())), "{} {order}", T::NAME);
                taken.into_iter().for_each(|frame| peer.free(frame, order));
            }
            if T::DIVISIBLE {
                let nine = Order::new(9)?;
                let block = peer.alloc(nine).expect("free");
                (block..block + 512).for_each(|page| peer.free(page, Order::ZERO));
                let block = peer.alloc(nine).expect("free");
                peer.free_range(block, 512);
            }
            let large = Order::new(12)?;
            let taken: Vec<u64> = (0..frames >> large.get()).map_while(|_| peer.alloc(large)).collect();
            assert_eq!(taken.len() as u64, frames >> large.get(), "{}: everything is free again", T::NAME);
            taken.into_iter().for_each(|block| peer.free(block, large));
            Ok(())
        }
    }

    #[test]
    fn peers_do_what_the_loops_assume() {
        // Some are made on the stack and moved from there, which is more than a test's has.
        let all = std::thread::Builder::new().stack_size(64 << 20).spawn(|| each(&mut Check));
        all.expect("a thread").join().expect("no panic").expect("all");
    }
}
