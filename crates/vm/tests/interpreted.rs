//! What Miri can interpret: one thread, one allocation, and every operation on a few small pages.

use hugemm_base::platform::{CpuLocal, Instrumented, Preempt, StoreOrder, VectorUnit};
use hugemm_base::sync::AtomicU64;
use hugemm_base::{
    Counters, CpuCx, CpuId, Extent, Never, NoPressure, NodeId, PageSize, Pfn, PhysMap, PreemptModel, VirtAddr, Window,
};
use hugemm_clear::{Clearer, Features, Policy, Profile};
use hugemm_frames::{ArenaSpec, Config, Frames, Plain};
use hugemm_paging::{Counting, EditLock, Lookup, ShootdownPolicy, Span, TlbCpu, Tlbs, X86_64};
use hugemm_vm::{Access, AreaKind, Backing, NoPager, NoPool, Parts, Setup, Space, Vm};
use std::alloc::{Layout, alloc_zeroed, dealloc};

const BYTES: usize = 4 << 20;
const PAGE: u64 = 4096;
const AT: u64 = 0x40_0000;

struct Tiny(*mut u8, Extent, Counters);

// SAFETY: one thread, on which nothing else of this platform runs.
unsafe impl CpuLocal for Tiny {
    fn current(&self) -> CpuId {
        CpuId(0)
    }

    unsafe fn pin(&self) -> usize {
        0
    }

    unsafe fn unpin(&self, _state: usize) {}
}

// SAFETY: the operating system fences when it switches threads.
unsafe impl Preempt for Tiny {
    fn preempt_model(&self) -> PreemptModel {
        PreemptModel::Full
    }

    unsafe fn reschedule(&self) {}
}

// SAFETY: the provided barriers.
unsafe impl StoreOrder for Tiny {}
// SAFETY: the provided methods grant nothing.
unsafe impl VectorUnit for Tiny {}

impl Instrumented for Tiny {
    fn counters(&self) -> &Counters {
        &self.2
    }
}

// SAFETY: all frames are one allocation, which is there as long as the platform.
unsafe impl PhysMap for Tiny {
    fn open(&self, extent: Extent, _user: Option<VirtAddr>) -> Option<Window> {
        let seen = self.1.intersection(extent);
        let offset = (seen.base().number() - self.1.base().number()) * PAGE;
        let window = Window { ptr: self.0.wrapping_add(offset as usize), pages: seen.pages() };
        (!seen.is_empty() && seen.base() == extent.base()).then_some(window)
    }
}

struct OnTiny;

impl Setup for OnTiny {
    type Platform = Tiny;
    type Env = Plain;
    type Format = X86_64;
    type Lock = EditLock;
    type Tlb = Counting;
    type Pager = NoPager;
    type Pressure = NoPressure;
    type Pool = NoPool;
    type Notifier = ();
}

type Cx<'p> = CpuCx<'p, Tiny>;

fn span(start: u64, pages: u64) -> Span {
    Span::new(VirtAddr::new(start), pages * PAGE).expect("a span")
}

/// The word at an address, as a task that faults reaches it.
fn word(vm: &Vm<'_, OnTiny>, cx: &mut Cx<'_>, space: &Space<OnTiny>, at: u64, access: Access) -> *mut u64 {
    let address = VirtAddr::new(at);
    loop {
        let writable = access == Access::Read;
        match vm.lookup(cx, space, address) {
            Lookup::Mapped(leaf) if writable || leaf.flags.contains(hugemm_paging::Flags::WRITE) => {
                let page = cx.platform().open(Extent::block(leaf.frame, leaf.size.order()), None).expect("mapped");
                return page.ptr.wrapping_add((at % PAGE) as usize).cast();
            }
            _ => drop(vm.fault(cx, space, address, access).expect("served")),
        }
    }
}

fn store(vm: &Vm<'_, OnTiny>, cx: &mut Cx<'_>, space: &Space<OnTiny>, at: u64, value: u64) {
    // SAFETY: in a frame that is mapped there; one thread.
    unsafe { word(vm, cx, space, at, Access::Write).write(value) }
}

fn load(vm: &Vm<'_, OnTiny>, cx: &mut Cx<'_>, space: &Space<OnTiny>, at: u64) -> u64 {
    // SAFETY: as above.
    unsafe { word(vm, cx, space, at, Access::Read).read() }
}

#[test]
fn every_operation_is_sound() {
    let layout = Layout::from_size_align(BYTES, 2 << 20).expect("a layout");
    let ram = Extent::new(Pfn::new(512), BYTES as u64 / PAGE).expect("frames");
    // SAFETY: the layout has a size.
    let tiny = Tiny(unsafe { alloc_zeroed(layout) }, ram, Counters::default());
    let arenas = [ArenaSpec { extent: ram, node: NodeId(0), descriptors: None }];
    let config = Config { arenas: &arenas, cpus: 1, cpu_nodes: &[] };
    let metadata = Frames::<Plain>::required_bytes(&config).expect("valid").size();
    // SAFETY: the only platform; the metadata's frames are never released.
    let frames: Frames<'_> = unsafe { Frames::new(&config, Plain::default(), tiny.0, metadata) }.expect("room");
    // SAFETY: the only context.
    let cx = &mut unsafe { CpuCx::new(&tiny) };
    let free = ram.slice(metadata.div_ceil(PAGE as usize) as u64, u64::MAX);
    // SAFETY: nobody owns these frames; released once.
    unsafe { frames.release_extent(cx, free) };
    let slots = [TlbCpu::default()];
    let inboxes: Vec<AtomicU64> = (0..Tlbs::<Counting>::inbox_words(1)).map(|_| AtomicU64::new(0)).collect();
    // SAFETY: no CPU translates by any of the tables.
    let tlbs = unsafe { Tlbs::new(&slots, &inboxes, Counting) }.expect("enough words");
    let features = Features::detect();
    let clearer = Clearer::new(features, Policy::new(Profile::uncalibrated(&features, None))).expect("detected");
    let shootdown = ShootdownPolicy::BATCHED;
    let (pager, pressure, pool) = (NoPager, NoPressure, NoPool);
    let parts = Parts { frames: &frames, tlbs: &tlbs, clearer, shootdown, pager, pressure, pool };
    // SAFETY: one allocation is a direct map; one platform.
    let vm: Vm<'_, OnTiny> = unsafe { Vm::new(parts) }.expect("small objects");

    let half = Span::new(VirtAddr::new(0), 1 << 47).expect("half of the addresses");
    let space = vm.create(cx, half).expect("a space");
    let kind = AreaKind::private(PageSize::Size4K);
    vm.map(cx, &space, span(AT, 16), kind, Backing::Private).expect("an area");
    store(&vm, cx, &space, AT, 1);
    store(&vm, cx, &space, AT + 5 * PAGE + 8, 2);
    vm.prefault(&space, span(AT + 8 * PAGE, 4), None).work(cx, &Never).expect("memory");
    assert_eq!(load(&vm, cx, &space, AT + 9 * PAGE), 0);
    let mut pinned = Vec::new();
    vm.pin(cx, &space, span(AT + 8 * PAGE, 2), None, &Never, |run| pinned.push(run)).expect("pinned");

    // Pinned pages are copied for a child, the others shared until somebody stores.
    let child = vm.fork(cx, &space).expect("a child");
    store(&vm, cx, &child, AT, 10);
    store(&vm, cx, &space, AT + 5 * PAGE + 8, 20);
    store(&vm, cx, &space, AT + 8 * PAGE, 30);
    let all = |cx: &mut Cx<'_>, space: &Space<OnTiny>| {
        [AT, AT + 5 * PAGE + 8, AT + 8 * PAGE].map(|at| load(&vm, cx, space, at))
    };
    assert_eq!((all(cx, &space), all(cx, &child)), ([1, 20, 30], [10, 2, 0]));
    for run in pinned {
        vm.unpin(cx, &space, run).expect("its own");
    }

    let object = vm.create_shared(cx, 4, PageSize::Size4K, false).expect("an object");
    for space in [&*space, &*child] {
        vm.map(cx, space, span(2 * AT, 4), kind, Backing::Shared(&object, 0)).expect("an area");
    }
    vm.prefault_shared(&object, 0, 2).work(cx, &Never).expect("memory");
    store(&vm, cx, &space, 2 * AT + 3 * PAGE, 7);
    assert_eq!(load(&vm, cx, &child, 2 * AT + 3 * PAGE), 7);
    let Lookup::Mapped(leaf) = vm.lookup(cx, &space, VirtAddr::new(2 * AT + 3 * PAGE)) else { panic!("mapped") };
    assert_eq!(vm.walk_mappings(cx, leaf.frame, |_, _| ()), 2);
    vm.close(cx, object).expect("its own");

    // A hole leaves both ends.
    let unmapped = vm.unmap(cx, &space, span(AT + 4 * PAGE, 8)).expect("memory for the second end");
    assert_eq!((unmapped.areas, unmapped.pages), (1, 5));
    assert_eq!(load(&vm, cx, &space, AT), 1);
    for space in [space, child] {
        assert!(vm.destroy(cx, space).is_ok());
    }
    vm.trim(cx);
    drop(vm);
    frames.drain(cx);
    assert_eq!(frames.stats(cx).available(), free.pages(), "every frame is back");
    // SAFETY: allocated above with this layout; nothing refers to it any more.
    unsafe { dealloc(tiny.0, layout) };
}
