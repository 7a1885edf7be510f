//! Areas over the pools of `hugemm-hugetlb`: promises, the lack of a page as an error, and which node pages come from.

use crate::support::SMALL;
use hugemm_base::lock::SpinLock;
use hugemm_base::sync::AtomicU64;
use hugemm_base::{CpuId, Dirty, Never, NodeId, PageSize, PhysMap, VirtAddr, VirtRange, with};
use hugemm_clear::Clearer;
use hugemm_frames::{ArenaSpec, Frames, FramesConfig, Placement, Plain};
use hugemm_host::cpu::{CpuPlace, Host, allowed_cpus};
use hugemm_host::mmap::Mmap;
use hugemm_hugetlb::{
    FlatMemory, Group, HugePageCounts, HugePool, Nodes, PoolArena, SoftMap, VmemmapOptimizer, WalkCache,
};
use hugemm_paging::{Counting, Keep, Lookup, TlbCpu, TlbShootdown};
use hugemm_vm::{Access, Backing, DefaultSetup, Parts, Pools, Served, Vm, VmError, VmaKind};
use std::ptr::NonNull;

/// Nothing is mapped, so nothing is remembered.
struct Nothing;

// SAFETY: nothing is remembered.
unsafe impl WalkCache for Nothing {
    fn flush(&self, _range: VirtRange) {}
}

const SIZE: PageSize = PageSize::Size2M;
const AT: u64 = 0x4000_0000;

fn span(start: u64, pages: u64) -> VirtRange {
    VirtRange::new(VirtAddr::new(start), pages * SIZE.bytes()).expect("a span")
}

/// Two nodes with 16 MiB each.
#[test]
fn pages_come_from_the_pool_and_its_nodes() {
    let mut region = Mmap::anonymous(32 << 20).expect("memory");
    let os_cpu = allowed_cpus().expect("a CPU")[0];
    let host = Host::new(&[CpuPlace { os_cpu, node: NodeId::new(0) }], region.bytes_mut()).expect("a machine");
    let all = host.frames();
    let (lower, upper) = all.split_at(all.pages() / 2);
    let arenas = [(lower, 0), (upper, 1)].map(|(extent, node)| ArenaSpec::new(extent, NodeId::new(node)));
    let config = FramesConfig::new(&arenas, 1);
    let layout = Frames::<Plain>::required_bytes(&config).expect("valid");
    let metadata: &'static mut [u64] = Vec::leak(vec![0; layout.size().div_ceil(8) + layout.align() / 8]);
    let skip = metadata.as_ptr().align_offset(layout.align());
    // SAFETY: zeroed, for ever, used once; one platform.
    let frames =
        unsafe { Frames::new(&config, Plain::default(), metadata.as_mut_ptr().add(skip).cast(), layout.size()) };
    let frames = frames.expect("large enough");
    for part in [lower, upper] {
        // SAFETY: the only owner of the host's frames, released once.
        host.run_on(CpuId::new(0), |cx| unsafe { frames.release(cx, Dirty::assume_owned(part)) }).expect("a CPU");
    }
    let start = NonNull::new(host.open(all, None).expect("a direct map").ptr).expect("not null");
    // SAFETY: one mapping of exactly these frames, which outlives the map.
    let map = SoftMap::new(VirtAddr::new(0), &mut [], unsafe { FlatMemory::new(start, all) }, Nothing, Keep);
    // SAFETY: nothing is mapped by it.
    let optimizer = unsafe { VmemmapOptimizer::new(&frames, &map, &[], Default::default()) };
    optimizer.set_enabled(false);
    let mut areas = [PoolArena::new(lower, NodeId::new(0)), PoolArena::new(upper, NodeId::new(1))];
    let groups = HugePool::<SpinLock>::groups(&areas, SIZE);
    let mut groups: Vec<Group> = (0..groups).map(|_| Group::default()).collect();
    let mut nodes = [HugePageCounts::default(); 2];
    let pool: HugePool<'_> = HugePool::new(SIZE, &mut areas, &mut groups, &mut nodes).expect("large enough");
    let (mut none, mut none_of_it): ([PoolArena; 0], [Group; 0]) = ([], []);
    let mut no_pages = [HugePageCounts::default(); 2];
    let slots = [TlbCpu::default()];
    let inboxes: Vec<AtomicU64> = (0..TlbShootdown::<Counting>::inbox_words(1)).map(|_| AtomicU64::new(0)).collect();
    // SAFETY: no CPU translates by any of the tables.
    let shootdown = unsafe { TlbShootdown::new(&slots, &inboxes, Counting) }.expect("enough words");
    let parts = Parts::new(&frames, &shootdown, Clearer::uncalibrated());
    let gigantic: HugePool<'_> =
        HugePool::new(PageSize::Size1G, &mut none, &mut none_of_it, &mut no_pages).expect("nothing");
    let parts = with!(parts, pools = Pools::default().with(&pool).with(&gigantic));
    // SAFETY: the host's memory is one mapping; all contexts are the host's.
    let vm: Vm<'_, DefaultSetup<Host<'_>, Counting, Plain>> = unsafe { Vm::new(parts) }.expect("small objects");
    let tested = host.run_on(CpuId::new(0), |cx| {
        let grown = pool.resize(cx, &optimizer, 6, Nodes::All, &Never).expect("nobody else resizes");
        assert_eq!(grown.entered, 6, "three of each node");
        let space = vm.create(cx, VirtRange::new(VirtAddr::new(0), 1 << 47).expect("half")).expect("a space");
        let node = |found| match found {
            Lookup::Mapped(leaf) => u32::from(!lower.contains(leaf.frame)),
            other => panic!("{other:?}"),
        };
        let kind = VmaKind::private(SIZE).pooled();
        let gigantic = VmaKind::private(PageSize::Size1G).pooled();
        let none = vm.map(
            cx,
            &space,
            VirtRange::new(VirtAddr::new(1 << 30), 1 << 30).expect("a GiB"),
            gigantic,
            Backing::Private,
        );
        assert_eq!(none, Err(VmError::NoPool), "there is no such page");
        vm.map(cx, &space, span(AT, 2), kind.from(Placement::Only(NodeId::new(1))), Backing::Private)
            .expect("two of six");
        vm.map(cx, &space, span(2 * AT, 2), kind.from(Placement::Prefer(NodeId::new(1))), Backing::Private)
            .expect("two of four");
        vm.map(cx, &space, span(3 * AT, 1), kind, Backing::Private).expect("one of two");
        assert_eq!(vm.map(cx, &space, span(4 * AT, 2), kind, Backing::Private), Err(VmError::NoPool), "one is left");
        assert_eq!(pool.counts(cx).reserved, 5);
        for (at, pages) in [(3 * AT, 1), (AT, 2), (2 * AT, 2)] {
            vm.prefault(&space, span(at, pages), None).work(cx, &Never).expect("promised");
        }
        let at = |at| VirtAddr::new(at);
        let both = [AT, AT + SIZE.bytes()].map(|page| node(vm.lookup(cx, &space, at(page))));
        assert_eq!(both, [1, 1]);
        let both = [2 * AT, 2 * AT + SIZE.bytes()].map(|page| node(vm.lookup(cx, &space, at(page))));
        assert_eq!(both, [1, 0], "then the other node's");
        assert_eq!(node(vm.lookup(cx, &space, at(3 * AT))), 0, "the CPU's node");
        assert_eq!((pool.counts(cx).reserved, pool.counts(cx).counts.free), (0, 1));
        vm.unmap(cx, &space, span(AT, 2)).expect("unmapped");
        assert_eq!((pool.counts(cx).reserved, pool.counts(cx).counts.free), (0, 3));
        assert!(vm.destroy(cx, space).is_ok());
        assert_eq!((pool.counts(cx).reserved, pool.counts(cx).counts.free), (0, 6));
        assert!(pool.is_consistent(cx));
        // A copy on write is of no promised page: the promise is for a page that the area still lacks.
        let parent = vm.create(cx, VirtRange::new(VirtAddr::new(0), 1 << 47).expect("half")).expect("a space");
        vm.map(cx, &parent, span(AT, 2), kind, Backing::Private).expect("two of six");
        vm.prefault(&parent, span(AT, 1), None).work(cx, &Never).expect("promised");
        let child = vm.fork(cx, &parent).expect("memory");
        assert_eq!(vm.fault(cx, &parent, at(AT), Access::Write), Ok(Served::Copied));
        assert_eq!((pool.counts(cx).reserved, pool.counts(cx).counts.free), (1, 4));
        assert!(vm.destroy(cx, child).is_ok() && vm.destroy(cx, parent).is_ok());
        assert_eq!((pool.counts(cx).reserved, pool.counts(cx).counts.free), (0, 6));
        // And of the area's nodes only, if it says so: whatever others have.
        let parent = vm.create(cx, VirtRange::new(VirtAddr::new(0), 1 << 47).expect("half")).expect("a space");
        vm.map(cx, &parent, span(AT, 3), kind.from(Placement::Only(NodeId::new(1))), Backing::Private)
            .expect("three of six");
        vm.map(cx, &parent, span(2 * AT, 1), kind.from(Placement::Only(NodeId::new(1))), Backing::Private)
            .expect("one of three");
        vm.prefault(&parent, span(AT, 3), None).work(cx, &Never).expect("promised");
        let child = vm.fork(cx, &parent).expect("memory");
        assert_eq!(vm.fault(cx, &parent, at(AT), Access::Write), Err(VmError::NoPool));
        assert_eq!(
            vm.fault(cx, &child, at(2 * AT), Access::Write),
            Err(VmError::NoPool),
            "it was promised to the parent"
        );
        assert_eq!((pool.counts(cx).reserved, pool.counts(cx).counts.free), (1, 3));
        assert!(vm.destroy(cx, child).is_ok() && vm.destroy(cx, parent).is_ok());
        // Frames as on demand.
        let space = vm.create(cx, VirtRange::new(VirtAddr::new(0), 1 << 47).expect("half")).expect("a space");
        let kind = SMALL.from(Placement::Only(NodeId::new(1)));
        vm.map(cx, &space, VirtRange::new(VirtAddr::new(AT), 1 << 20).expect("a MiB"), kind, Backing::Private)
            .expect("an area");
        vm.prefault(&space, VirtRange::new(VirtAddr::new(AT), 1 << 20).expect("a MiB"), None)
            .work(cx, &Never)
            .expect("memory");
        for page in 0..256 {
            let Lookup::Mapped(leaf) = vm.lookup(cx, &space, VirtAddr::new(AT + page * 4096)) else { panic!("mapped") };
            assert!(upper.contains(leaf.frame), "page {page}");
        }
        assert!(vm.destroy(cx, space).is_ok());
        assert_eq!(pool.resize(cx, &optimizer, 0, Nodes::All, &Never).expect("nobody else resizes").left, 6);
    });
    tested.expect("the CPU is there");
}
