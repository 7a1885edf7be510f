//! A machine for pools larger than this one's memory: frames that take room when they are touched, descriptors behind
//! software tables, flushes that are counted.

use anyhow::{Context, Result};
use hugemm_base::inject::{FaultPoint, Inject};
use hugemm_base::lock::SpinLock;
use hugemm_base::{Dirty, Extent, NodeId, PAGE_BYTES, PageSize, VirtAddr, VirtRange, with};
use hugemm_frames::{ArenaSpec, Descriptor, Env, Frames, FramesConfig};
use hugemm_host::cpu::{BASE_FRAME, Host};
use hugemm_host::sparse::Sparse;
use hugemm_hugetlb::{
    DescriptorMap, FlatMemory, Group, HugePageCounts, HugePool, Mapped, OptimizerPolicy, PoolArena, SoftMap, Tail,
    VmemmapOptimizer, WalkCache,
};
use hugemm_inspect::memory::Region;
use hugemm_paging::Keep;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Frames that one 2 MiB block of descriptors describes.
const SPAN: u64 = 1 << 15;

/// Address of frame 0's descriptor.
const ORIGIN: u64 = 0x7000_0000_0000;

/// Counts flushes; nothing here remembers translations.
#[derive(Debug, Default)]
pub struct CountedFlushes(AtomicU64);

// SAFETY: nothing is remembered.
unsafe impl WalkCache for CountedFlushes {
    fn flush(&self, _range: VirtRange) {
        // Relaxed: a count.
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

pub type Map<'m> = SoftMap<'m, CountedFlushes, Keep>;

#[derive(Debug)]
pub struct Soft<'m>(&'m Map<'m>, &'m [Descriptor; 1]);

impl Inject for Soft<'_> {
    fn fault(&self, _point: FaultPoint) -> bool {
        false
    }
}

// SAFETY: a mapped descriptor is 64 bytes of the machine's memory, which is its alone; all are mapped at first and
// stay so. Were one not, the spare descriptor would take the accesses.
unsafe impl Env for Soft<'_> {
    type Lock = SpinLock;

    #[inline]
    fn descriptor(&self, array: *mut Descriptor, index: usize) -> *mut Descriptor {
        let at = VirtAddr::new(array.addr() as u64 + (index * size_of::<Descriptor>()) as u64);
        match self.0.locate(at) {
            Some(found) => found.as_ptr().cast(),
            None => self.1.as_ptr().cast_mut(),
        }
    }
}

pub struct Ground<'m> {
    pub frames: &'m Frames<'m, Soft<'m>>,
    pub map: &'m Map<'m>,
    areas: Vec<PoolArena>,
    tails: &'m [Tail],
}

/// The memory of a machine for pools of up to `pages` pages of `size`.
pub struct GroundPlan {
    all: Extent,
    pub metadata: usize,
}

impl GroundPlan {
    /// Room for the pages, their descriptors and some more.
    pub fn new(size: PageSize, pages: u64, cpus: u32) -> Result<Self> {
        let frames = pages * size.pages();
        // Descriptors take a 64th; what holds them must not be in the way of the last page.
        let room = (frames + frames / 32).next_multiple_of(SPAN) + 2 * size.pages().max(SPAN);
        let all = Extent::new(BASE_FRAME, room).context("the pages cannot be numbered; use a smaller -n")?;
        GroundPlan::over(all, cpus)
    }

    /// For a machine that has these frames, which begin and end at a multiple of 128 MiB.
    pub fn over(all: Extent, cpus: u32) -> Result<Self> {
        let mut plan = GroundPlan { all, metadata: 0 };
        plan.metadata = Frames::<Soft<'_>>::required_bytes(&FramesConfig::new(&[plan.arena()], cpus))?.size();
        Ok(plan)
    }

    fn first(&self) -> VirtAddr {
        VirtAddr::new(ORIGIN + self.all.base().get() * 64)
    }

    fn arena(&self) -> ArenaSpec {
        let array = std::ptr::without_provenance_mut::<Descriptor>(self.first().get() as usize);
        with!(ArenaSpec::new(self.all, NodeId::new(0)), descriptors = NonNull::new(array))
    }

    /// Builds the machine for `f`, in memory that takes room when it is touched.
    pub fn build<R>(
        &self,
        host: &Host<'_>,
        cpus: u32,
        metadata: &mut Region,
        f: impl FnOnce(&Ground<'_>) -> Result<R>,
    ) -> Result<R> {
        let memory = Sparse::new(self.all.bytes() as usize)?;
        // SAFETY: the mapping outlives the machine, holds exactly these frames, and is nobody else's.
        unsafe { self.build_in(memory.start(), host, cpus, metadata, f) }
    }

    /// Builds the machine for `f` in memory that begins at `start`.
    ///
    /// # Safety
    ///
    /// All frames are there, initialised and nobody else's until this returns.
    pub unsafe fn build_in<R>(
        &self,
        start: NonNull<u8>,
        host: &Host<'_>,
        cpus: u32,
        metadata: &mut Region,
        f: impl FnOnce(&Ground<'_>) -> Result<R>,
    ) -> Result<R> {
        // SAFETY: the caller's promise.
        let flat = unsafe { FlatMemory::new(start, self.all) };
        let spans = self.all.pages().div_ceil(SPAN);
        let mut entries: Vec<AtomicU64> = (0..spans).map(|_| AtomicU64::new(0)).collect();
        let map = SoftMap::new(self.first(), &mut entries, flat, CountedFlushes::default(), Keep);
        let descriptors = self.all.slice(0, spans * (PageSize::Size2M.bytes() / PAGE_BYTES));
        for (block, first) in (0..spans).zip((descriptors.base().get()..).step_by(512)) {
            let at = VirtAddr::new(self.first().get() + block * PageSize::Size2M.bytes());
            // SAFETY: nothing runs on these tables yet.
            unsafe { map.set(at, Mapped::Whole(hugemm_base::Pfn::new(first))) };
        }
        let spare = [Descriptor::default()];
        let metadata = metadata.as_mut_slice();
        let (at, bytes) = (metadata.as_mut_ptr(), metadata.len());
        let arenas = [self.arena()];
        // SAFETY: the region is borrowed exclusively, initialised and used for nothing else; one host's contexts only.
        let frames = unsafe { Frames::new(&FramesConfig::new(&arenas, cpus), Soft(&map, &spare), at, bytes) }?;
        let claimed = host.run_on(hugemm_base::CpuId::new(0), |cx| {
            // SAFETY: released once, here; the memory is the machine's.
            unsafe { frames.release(cx, Dirty::assume_owned(self.all)) };
            frames.take_range(cx, descriptors)
        })??;
        // Theirs until the optimizer frees them.
        let _ = claimed.into_extent();
        // SAFETY: `arena` tells the allocator that its descriptors are there, where the map has them.
        let areas = vec![unsafe { PoolArena::new(self.all, NodeId::new(0)).with_descriptors(self.first()) }];
        let tails = [Tail::default()];
        f(&Ground { frames: &frames, map: &map, areas, tails: &tails })
    }

    /// The allocator's own data in percent of the memory; descriptors are elsewhere.
    pub fn metadata_share(&self) -> f64 {
        100.0 * self.metadata as f64 / self.all.bytes() as f64
    }
}

impl<'m> Ground<'m> {
    pub fn optimizer(&self, policy: OptimizerPolicy) -> VmemmapOptimizer<'m, Soft<'m>, Map<'m>> {
        // SAFETY: the frames behind the descriptors were claimed for them by `build_in`; the bench has one at a time.
        unsafe { VmemmapOptimizer::new(self.frames, self.map, self.tails, policy) }
    }

    pub fn with_pool<R>(&self, size: PageSize, f: impl FnOnce(&HugePool<'_>) -> Result<R>) -> Result<R> {
        pool_over(self.areas.clone(), size, f)
    }
}

/// Runs `f` with an empty pool over these areas, of one node.
pub fn pool_over<R>(
    mut areas: Vec<PoolArena>,
    size: PageSize,
    f: impl FnOnce(&HugePool<'_>) -> Result<R>,
) -> Result<R> {
    let mut groups: Vec<Group> = (0..HugePool::<SpinLock>::groups(&areas, size)).map(|_| Group::default()).collect();
    let mut nodes = [HugePageCounts::default()];
    f(&HugePool::new(size, &mut areas, &mut groups, &mut nodes)?)
}
