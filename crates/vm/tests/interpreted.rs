//! What Miri can interpret: one thread, one allocation, and every operation on a few small pages.

use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{CpuCx, Extent, Never, Order, PageSize, Pfn, PhysMap, Shortfall, SingleCpu, VirtAddr, VirtRange};
use hugemm_clear::Clearer;
use hugemm_frames::{AllocRequest, Carved, FolioRun, Frames};
use hugemm_paging::{Counting, DeferredUnmap, FrameTables, Lookup, PageTable, TlbCpu, TlbShootdown};
use hugemm_vm::{Access, AddressSpace, Backing, DefaultSetup, LostPage, Pager, Parts, Setup, Vm, VmError, VmaKind};
use std::alloc::{Layout, alloc_zeroed, dealloc};

const BYTES: usize = 4 << 20;
const PAGE: u64 = 4096;
const AT: u64 = 0x40_0000;

type Single = DefaultSetup<SingleCpu>;

type Cx<'p> = CpuCx<'p, SingleCpu>;

fn span(start: u64, pages: u64) -> VirtRange {
    VirtRange::new(VirtAddr::new(start), pages * PAGE).expect("a span")
}

/// The word at an address, as a task that faults reaches it.
fn word(vm: &Vm<'_, Single>, cx: &mut Cx<'_>, space: &AddressSpace<Single>, at: u64, access: Access) -> *mut u64 {
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

fn store(vm: &Vm<'_, Single>, cx: &mut Cx<'_>, space: &AddressSpace<Single>, at: u64, value: u64) {
    // SAFETY: in a frame that is mapped there; one thread.
    unsafe { word(vm, cx, space, at, Access::Write).write(value) }
}

fn load(vm: &Vm<'_, Single>, cx: &mut Cx<'_>, space: &AddressSpace<Single>, at: u64) -> u64 {
    // SAFETY: as above.
    unsafe { word(vm, cx, space, at, Access::Read).read() }
}

/// Without a pager and a pool nothing can be stored, brought back or promised, and nobody has memory to give.
fn nobody_takes_pages_away(vm: &Vm<'_, Single>, cx: &mut Cx<'_>, space: &AddressSpace<Single>) {
    let pager = vm.pager();
    let mut block = vm.frames().alloc(cx, AllocRequest::order(Order::ZERO)).expect("memory");
    let frames = vm.frames();
    // SAFETY: it has no slots, and says so; here and below.
    assert_eq!(unsafe { Pager::<Single>::load(pager, cx, 5, &mut block, 0) }, Err(LostPage));
    // SAFETY: as above.
    assert_eq!(unsafe { Pager::<Single>::share(pager, cx, 5) }, None);
    assert!(Pager::<Single>::may_take(pager, frames, cx, Order::ZERO));
    let need = Shortfall::frames(1);
    assert_eq!(pager.relieve(vm, cx, need), 0);
    let folio = frames.count(block).expect("a page");
    let head = folio.pfn();
    assert_eq!(frames.references(head), 1);
    let _ = folio.into_pfn();
    // SAFETY: the reference that was taken out of its handle just now.
    let pages = unsafe { FolioRun::from_extent(Extent::block(head, Order::ZERO), Order::ZERO) };
    // SAFETY: it needs to be told of no pages.
    unsafe { Pager::<Single>::drop_references(pager, frames, cx, [pages]) };
    assert_eq!(frames.references(head), 0, "it was the last");
    let pooled = VmaKind::private(PageSize::Size2M).pooled();
    let area = vm.map(cx, space, span(1 << 30, 512), pooled, Backing::Private);
    assert_eq!(area, Err(VmError::NoPool));
}

/// One half of the addresses.
fn half(start: u64) -> VirtRange {
    VirtRange::new(VirtAddr::new(start), 1 << 47).expect("half of the addresses")
}

/// What `f` does with memory of its own gives all of it back.
fn with_memory(f: impl FnOnce(&mut Cx<'_>, &Frames<'_, Carved>, &TlbShootdown<'_, Counting>)) {
    let layout = Layout::from_size_align(BYTES, 2 << 20).expect("a layout");
    let ram = Extent::new(Pfn::new(512), BYTES as u64 / PAGE).expect("frames");
    // SAFETY: the layout has a size.
    let base = unsafe { alloc_zeroed(layout) };
    // SAFETY: nobody else uses the memory, which stays until the end; there is no other.
    let (mut cx, ram) = unsafe { SingleCpu::start(ram, base) };
    let cx = &mut cx;
    let frames = Frames::carve(cx, ram).expect("room");
    let slots = [TlbCpu::default()];
    let inboxes: Vec<AtomicU64> = (0..TlbShootdown::<Counting>::inbox_words(1)).map(|_| AtomicU64::new(0)).collect();
    // SAFETY: no CPU translates by any of the tables.
    let shootdown = unsafe { TlbShootdown::new(&slots, &inboxes, Counting) }.expect("enough words");
    f(cx, &frames, &shootdown);
    frames.drain(cx);
    assert_eq!(frames.stats(cx).available(), frames.managed(), "every frame is back");
    // SAFETY: allocated above with this layout; nothing refers to it any more.
    unsafe { dealloc(base, layout) };
}

#[test]
fn every_operation_is_sound() {
    with_memory(operate);
}

/// The root's entries for what is common are the same in each space.
#[test]
fn what_is_common_is_in_every_space() {
    with_memory(|cx, frames, shootdown| {
        let words = |cx: &Cx<'_>, root: Pfn| {
            let table = cx.platform().open(Extent::block(root, Order::ZERO), None).expect("mapped");
            // SAFETY: a table of 512 words; one thread.
            unsafe { table.ptr.cast::<[u64; 512]>().read() }
        };
        // SAFETY: one allocation is a direct map; no CPU translates by the tables.
        let common: PageTable<<Single as Setup>::Format, _> =
            unsafe { PageTable::with_fixed_top(&mut FrameTables::new(frames, cx), half(u64::MAX << 47)) }
                .expect("memory");
        let parts = Parts::new(frames, shootdown, Clearer::uncalibrated());
        // SAFETY: as above; one platform; nobody edits what is common.
        let vm: Vm<'_, Single> = unsafe { Vm::new(parts).expect("small objects").beside(&common) };
        let space = vm.create(cx, half(0)).expect("a space");
        let (own, theirs) = (words(cx, Pfn::containing(space.root())), words(cx, common.root()));
        assert!(theirs[256..].iter().all(|entry| *entry != 0));
        assert_eq!(own[256..], theirs[256..]);
        assert!(vm.destroy(cx, space).is_ok());
        vm.trim(cx);
        drop(vm);
        // SAFETY: nobody is beside it any more.
        unsafe { common.retire(&mut FrameTables::new(frames, cx), |_| ()) };
    });
}

fn operate(cx: &mut Cx<'_>, frames: &Frames<'_, Carved>, shootdown: &TlbShootdown<'_, Counting>) {
    // SAFETY: one allocation is a direct map; one platform.
    let vm: Vm<'_, Single> =
        unsafe { Vm::new(Parts::new(frames, shootdown, Clearer::uncalibrated())) }.expect("small objects");

    let space = vm.create(cx, half(0)).expect("a space");
    let kind = VmaKind::private(PageSize::Size4K);
    vm.map(cx, &space, span(AT, 16), kind, Backing::Private).expect("an area");
    store(&vm, cx, &space, AT, 1);
    store(&vm, cx, &space, AT + 5 * PAGE + 8, 2);
    vm.prefault(&space, span(AT + 8 * PAGE, 4), None).work(cx, &Never).expect("memory");
    assert_eq!(load(&vm, cx, &space, AT + 9 * PAGE), 0);
    let mut pinned = Vec::new();
    vm.pin(cx, &space, span(AT + 8 * PAGE, 2), Access::Write, None, &Never, |run| pinned.push(run)).expect("pinned");

    // Pinned pages are copied for a child, while their device stores to them; the others are shared until somebody stores.
    // SAFETY: the pin keeps the page, and it is aligned.
    let device = unsafe { AtomicU64::from_ptr(word(&vm, cx, &space, AT + 8 * PAGE, Access::Read)) };
    let child = std::thread::scope(|scope| {
        scope.spawn(|| device.store(0, Ordering::Relaxed));
        vm.fork(cx, &space).expect("a child")
    });
    store(&vm, cx, &child, AT, 10);
    store(&vm, cx, &space, AT + 5 * PAGE + 8, 20);
    store(&vm, cx, &space, AT + 8 * PAGE, 30);
    let all = |cx: &mut Cx<'_>, space: &AddressSpace<Single>| {
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
    let shared = leaf.frame;
    let Lookup::Mapped(leaf) = vm.lookup(cx, &space, VirtAddr::new(AT)) else { panic!("mapped") };
    // A page of one place, and one of an object with two, are taken away and put back.
    // SAFETY: used with this manager's TLBs only.
    let deferred: DeferredUnmap = unsafe { DeferredUnmap::new(shootdown) }.expect("one CPU");
    for head in [leaf.frame, shared] {
        // SAFETY: the page is mapped, and nobody else is there to let it go.
        let folio = unsafe { frames.get_at(head) }.expect("mapped");
        let page = vm.unhook(cx, folio, &deferred).expect("nobody else has it");
        page.put_back(cx);
    }
    assert_eq!((load(&vm, cx, &space, AT), load(&vm, cx, &child, 2 * AT + 3 * PAGE)), (1, 7));
    vm.close(cx, object).expect("its own");
    nobody_takes_pages_away(&vm, cx, &space);

    // A hole leaves both ends.
    let unmapped = vm.unmap(cx, &space, span(AT + 4 * PAGE, 8)).expect("memory for the second end");
    assert_eq!((unmapped.areas, unmapped.pages), (1, 5));
    assert_eq!(load(&vm, cx, &space, AT), 1);
    for space in [space, child] {
        assert!(vm.destroy(cx, space).is_ok());
    }
    vm.trim(cx);
}
