//! The same on the model MMU: real x86-64 entries, TLBs that keep what they may, shootdowns by interrupts, and an oracle
//! that sees every access through something stale.

use hugemm_base::inject::{FaultPoint, Inject};
use hugemm_base::lock::SpinLock;
use hugemm_base::sync::AtomicU64;
use hugemm_base::{
    Cpu, CpuCx, CpuId, Dirty, Extent, FlushDomain, Flushed, Invalidation, Never, NodeId, Order, PageSize, Pfn,
    VirtAddr, VirtRange, with,
};
use hugemm_frames::{AllocRequest, ArenaSpec, Descriptor, Env, Frames, FramesConfig, Frozen};
use hugemm_host::cpu::{BASE_FRAME, CpuPlace, Host};
use hugemm_host::mmu::{Mmu, MmuAccess};
use hugemm_host::sparse::Sparse;
use hugemm_hugetlb::{
    DescriptorLeaf, DescriptorMap, FlatMemory, Group, HugePageCounts, HugePool, Mapped, Nodes, OptimizerPolicy,
    PagedMap, PoolArena, Tail, VmemmapOptimizer,
};
use hugemm_paging::tlb_space::KernelSpace;
use hugemm_paging::{Keep, PageFormat, ShootdownPolicy, TlbCpu, TlbShootdown, TlbSpace, X86_64};
use hugemm_threads::Random;
use std::cell::Cell;
use std::ptr::NonNull;

const CPUS: u32 = 4;
const SPANS: u64 = 6;
const SPAN: u64 = 1 << 15;
/// Address of frame 0's descriptor. The array's second half begins where a table of every level does.
const ORIGIN: u64 = (0xe1 << 39) - (SPANS << 20) - BASE_FRAME.get() * 64;

type Hardware<'m> = PagedMap<'m, X86_64, Host<'m>, &'m Mmu<'m, 'm>, [AtomicU64; 2]>;

/// The map, with the oracle told of every frame; and perhaps without its flushes.
struct Watched<'m> {
    map: Hardware<'m>,
    mmu: &'m Mmu<'m, 'm>,
    deaf: bool,
}

// SAFETY: everything is the map's but for the planted bug.
unsafe impl DescriptorMap for Watched<'_> {
    type Kind = KernelSpace;
    type Held = Keep;

    fn slot(&self, block: VirtAddr) -> Option<&core::sync::atomic::AtomicU64> {
        self.map.slot(block)
    }

    fn encode_block(&self, to: Mapped) -> u64 {
        self.map.encode_block(to)
    }

    fn decode_block(&self, entry: u64) -> Mapped {
        self.map.decode_block(entry)
    }

    unsafe fn set(&self, block: VirtAddr, to: Mapped) {
        self.mmu.meanwhile();
        // SAFETY: the caller's.
        unsafe { self.map.set(block, to) }
        self.mmu.meanwhile();
    }

    fn table(&self, frame: Pfn) -> Option<NonNull<u64>> {
        self.map.table(frame)
    }

    fn encode(&self, leaf: DescriptorLeaf) -> u64 {
        self.map.encode(leaf)
    }

    fn decode(&self, entry: u64) -> Option<DescriptorLeaf> {
        self.map.decode(entry)
    }

    fn taken(&self, frames: Extent) {
        self.mmu.allocated(frames);
    }

    fn freed(&self, frames: Extent) {
        self.mmu.freed(frames);
        self.mmu.meanwhile();
    }

    fn domain(&self) -> &FlushDomain<KernelSpace, Keep> {
        self.map.domain()
    }

    fn flush<P: Cpu>(&self, cx: &CpuCx<'_, P>, range: VirtRange) -> Flushed<'_, KernelSpace, Keep> {
        if !self.deaf {
            return self.map.flush(cx, range);
        }
        // SAFETY: none: the planted bug.
        unsafe { self.map.domain().flush(&Invalidation::ALL, |_| ()) }
    }
}

struct Seen<'m>(&'m Mmu<'m, 'm>, Cell<u64>);

// SAFETY: one thread plays all CPUs.
unsafe impl Sync for Seen<'_> {}

impl Inject for Seen<'_> {
    fn fault(&self, _point: FaultPoint) -> bool {
        let left = self.1.get();
        self.1.set(left.saturating_sub(1));
        left == 1
    }
}

// SAFETY: descriptors are where the MMU says; what it does not know panics.
unsafe impl Env for Seen<'_> {
    type Lock = SpinLock;

    fn descriptor(&self, array: *mut Descriptor, index: usize) -> *mut Descriptor {
        let at = VirtAddr::new(array.addr() as u64 + index as u64 * 64);
        self.0.translate(self.0.current(), at, MmuAccess::Load).expect("a descriptor").as_ptr().cast()
    }
}

fn descriptor_of(pfn: Pfn) -> VirtAddr {
    VirtAddr::new(ORIGIN + pfn.get() * 64)
}

/// Random resizes with others' heads written by every CPU in between; the first violation, if any.
fn cycles(seed: u64, policy: OptimizerPolicy, deaf: bool) -> Result<(), hugemm_host::mmu::Violation> {
    let all = Extent::new(BASE_FRAME, SPANS * SPAN).expect("in range");
    let memory = Sparse::new(all.bytes() as usize).expect("addresses");
    // SAFETY: mapped, initialised, and used through the host only.
    let bytes = unsafe { std::slice::from_raw_parts_mut(memory.start().as_ptr(), memory.bytes()) };
    let host = Host::new(&[CpuPlace { os_cpu: 0, node: NodeId::new(0) }], bytes).expect("a host");
    let mmu = Mmu::new(&host, CPUS, 1, seed);
    let mmu: &Mmu<'_, '_> = &mmu;
    // SAFETY: as for the host.
    let flat = unsafe { FlatMemory::new(memory.start(), all) };
    // Descriptors first, then the tables above their entries: the root, and two of each level.
    let described = all.slice(0, SPANS * 512);
    let tables: [Pfn; 5] = core::array::from_fn(|level| Pfn::new(described.end().get() + level as u64));
    let first = descriptor_of(all.base());
    let put = |table: Pfn, index: u64, entry: u64| {
        // SAFETY: a table's word; nothing runs yet.
        unsafe { flat.frame(table).expect("memory").cast::<u64>().add(index as usize % 512).write(entry) }
    };
    for (at, above, table) in [(first.get(), tables[1], tables[2]), (0xe1 << 39, tables[3], tables[4])] {
        put(tables[0], at >> 39, X86_64::table(above));
        put(above, at >> 30, X86_64::table(table));
    }
    mmu.set_kernel_root(tables[0].start());
    let cpus: Vec<TlbCpu> = (0..CPUS).map(|_| TlbCpu::default()).collect();
    let inboxes: Vec<AtomicU64> = (0..CPUS).map(|_| AtomicU64::new(0)).collect();
    // SAFETY: the model's CPUs, and nobody else's.
    let shootdown = unsafe { TlbShootdown::new(&cpus, &inboxes, mmu) }.expect("fits");
    // SAFETY: the kernel's tables, which stay; there is no other space.
    let space: TlbSpace<KernelSpace> = unsafe { TlbSpace::new(&shootdown, tables[0].start()) }.expect("few CPUs");
    for cpu in 0..CPUS {
        mmu.as_cpu(CpuId::new(cpu), |cx| space.online(&shootdown, cx));
    }
    // SAFETY: the tables just made, which every CPU walks; the host's memory is a direct map.
    let map = unsafe { PagedMap::new(tables[0], &host, &space, &shootdown, ShootdownPolicy::BATCHED) };
    for (span, frame) in (0..SPANS).zip((described.base().get()..).step_by(512)) {
        // SAFETY: nothing was there.
        unsafe { map.set(VirtAddr::new(first.get() + (span << 21)), Mapped::Whole(Pfn::new(frame))) };
    }
    let map = Watched { map, mmu, deaf };
    let array = NonNull::new(std::ptr::without_provenance_mut::<Descriptor>(first.get() as usize));
    let arenas = [with!(ArenaSpec::new(all, NodeId::new(0)), descriptors = array)];
    let config = FramesConfig::new(&arenas, CPUS);
    let layout = Frames::<Seen<'_>>::required_bytes(&config).expect("valid");
    let mut metadata = vec![0_u8; layout.size() + layout.align()];
    let at = metadata.as_mut_ptr();
    let at = at.wrapping_add(at.align_offset(layout.align()));
    // SAFETY: zeroed, large enough, used once.
    let frames = unsafe { Frames::new(&config, Seen(mmu, Cell::new(0)), at, layout.size()) }.expect("valid");
    mmu.as_cpu(CpuId::new(0), |cx| {
        // SAFETY: once.
        unsafe { frames.release(cx, Dirty::assume_owned(all)) };
        let used = Extent::new(described.base(), described.pages() + 5).expect("in range");
        let _ = frames.take_range(cx, used).expect("free").into_extent();
    });
    let tails = [Tail::default()];
    // SAFETY: the frames behind the descriptors were claimed for them; it is the only optimizer of the map.
    let optimizer = unsafe { VmemmapOptimizer::new(&frames, &map, &tails, policy) };
    // SAFETY: that is where the allocator is told its descriptors are.
    let mut areas = [unsafe { PoolArena::new(all, NodeId::new(0)).with_descriptors(first) }];
    let groups = HugePool::<SpinLock>::groups(&areas, PageSize::Size2M);
    let mut groups: Vec<Group> = (0..groups).map(|_| Group::default()).collect();
    let mut nodes = [HugePageCounts::default()];
    let pool: HugePool<'_> = HugePool::new(PageSize::Size2M, &mut areas, &mut groups, &mut nodes).expect("enough");

    let mut random = Random(seed);
    let mut others: Vec<(Frozen, u64)> = Vec::new();
    mmu.as_cpu(CpuId::new(0), |cx| {
        for order in [0, 9, 3, 0, 9, 9, 1, 0] {
            let request = AllocRequest::order(Order::new(order).expect("valid"));
            others.push((frames.alloc(cx, request).expect("enough"), 0));
        }
    });
    for step in 0..40 {
        for _ in 0..50 {
            let cpu = CpuId::new(random.below(u64::from(CPUS)) as u32);
            let pick = random.below(others.len() as u64) as usize;
            let head = descriptor_of(others[pick].0.pfn());
            assert_eq!(mmu.load(cpu, VirtAddr::new(head.get() + 56)), Ok(others[pick].1), "step {step}");
            others[pick].1 = random.word();
            assert_eq!(mmu.store(cpu, VirtAddr::new(head.get() + 56), others[pick].1), Ok(()));
            // A walker.
            let any = Pfn::new(all.base().get() + random.below(all.pages()));
            let _ = mmu.load(cpu, descriptor_of(any)).expect("every descriptor can be read");
        }
        mmu.as_cpu(CpuId::new(random.below(2) as u32), |cx| {
            if random.below(4) == 0 {
                frames.env().1.set(random.below(100));
            }
            optimizer.set_enabled(random.below(6) != 0);
            let target = random.below(4) * random.below(100);
            pool.resize(cx, &optimizer, target, Nodes::All, &Never).expect("idle");
            frames.env().1.set(0);
            assert!(pool.is_consistent(cx));
        });
        mmu.check()?;
    }
    Ok(())
}

#[test]
fn no_cpu_uses_anything_stale_whatever_is_resized() {
    for seed in 1..4 {
        for (swap, carve) in [(true, true), (false, true), (false, false)] {
            assert_eq!(cycles(seed, with!(OptimizerPolicy::new(), swap, carve), false), Ok(()), "seed {seed}");
        }
    }
}

/// The oracle sees a flush that does not happen.
#[test]
fn a_missing_flush_is_seen() {
    assert!((1..4).any(|seed| cycles(seed, OptimizerPolicy::default(), true).is_err()));
}
