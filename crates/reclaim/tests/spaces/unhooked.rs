//! Pages that are taken away and come back: nothing that anybody stores meanwhile is lost, be it through a translation or in a child.
//! What comes back, and where, is in the tests of `hugemm-vm`.

use crate::rig::{Cx, Handle, Model, Rig, Size, bounds, no_faults, span, with_rig};
use crate::watched::Stop;
use hugemm_base::{CpuId, Extent, Order, PageSize, Pfn, VirtAddr};
use hugemm_frames::{FolioRef, FolioRun, Frozen};
use hugemm_paging::{DeferredUnmap, Leaf, Lookup};
use hugemm_reclaim::LruPolicy;
use hugemm_vm::{AddressSpace, Backing, Pager, UnhookedPage, VmError, VmaKind};
use std::sync::atomic::Ordering;

const AT: u64 = 0x4000_0000;
const SIZE: Size = Size { mib: 16, swap: 2000, cpus: 3, policy: LruPolicy::Generations, nodes: 1, strange: false };
const SIZES: [PageSize; 2] = [PageSize::Size4K, PageSize::Size2M];

fn filled<'v, 'h>(rig: &'v Rig<'h>, cx: &mut Cx<'_, 'h>, page: PageSize, pages: u64) -> Handle<'v, 'h> {
    let space = rig.vm.create(cx, bounds()).expect("a space");
    let area = span(AT, pages * page.bytes());
    rig.vm.map(cx, &space, area, VmaKind::private(page), Backing::Private).expect("an area");
    rig.enter(cx, &space);
    (0..pages).for_each(|index| rig.put(cx, &space, AT + index * page.bytes(), 1).expect("memory"));
    space
}

fn leaf<'h>(rig: &Rig<'h>, cx: &mut Cx<'_, 'h>, space: &AddressSpace<Model<'h>>, at: u64) -> Leaf {
    match rig.vm.lookup(cx, space, VirtAddr::new(at)) {
        Lookup::Mapped(leaf) => leaf,
        found => panic!("{found:?}"),
    }
}

/// Takes the page at an address away.
fn unhook<'d, 'h>(
    rig: &'d Rig<'h>,
    cx: &mut Cx<'_, 'h>,
    space: &AddressSpace<Model<'h>>,
    at: u64,
    deferred: &'d DeferredUnmap,
) -> UnhookedPage<'d, 'h, Model<'h>> {
    let leaf = leaf(rig, cx, space, at);
    rig.vm.unhook(cx, hold(rig, leaf.frame), deferred).expect("nobody else has it")
}

/// One more reference to a page.
fn hold(rig: &Rig<'_>, head: Pfn) -> FolioRef {
    // SAFETY: the tests' pages are mapped or unhooked, and nobody else is there to let them go.
    unsafe { rig.vm.frames().get_at(head) }.expect("it has references")
}

/// Drops a reference as pages' users do.
fn put<'h>(rig: &Rig<'h>, cx: &Cx<'_, 'h>, folio: FolioRef, order: Order) {
    // SAFETY: the handle's reference.
    let page = unsafe { FolioRun::from_extent(Extent::block(folio.into_pfn(), order), order) };
    // SAFETY: a page of the space, which the pager was told of.
    unsafe { Pager::<Model<'h>>::drop_references(rig.vm.pager(), rig.vm.frames(), cx, [page]) };
}

/// Pages out to swap that is full.
#[allow(clippy::result_large_err, reason = "the page comes back")]
fn page_out<'d, 'h>(
    cx: &mut Cx<'_, 'h>,
    page: UnhookedPage<'d, 'h, Model<'h>>,
) -> Result<u64, (VmError, UnhookedPage<'d, 'h, Model<'h>>)> {
    let refuse = |_: &Cx<'_, 'h>, block: Frozen| Err((VmError::NoMemory, block));
    // SAFETY: there are no slots.
    unsafe { page.page_out(cx, refuse, |_: &Cx<'_, 'h>, _: &Frozen, _| Err(VmError::NoMemory)) }
}

/// CPU 1 has a page's translation, and may store through it. Another CPU takes the page away and puts it back, and stores to
/// it while somebody holds one more reference, as look-around does. Whatever CPU 1 stores then is seen.
#[test]
fn stores_through_old_translations_are_not_lost() {
    for page in SIZES {
        with_rig(SIZE, 64, &no_faults(), |rig| {
            let space = rig.mmu.as_cpu(CpuId(0), |cx| filled(rig, cx, page, 1));
            rig.mmu.as_cpu(CpuId(1), |cx| {
                rig.enter(cx, &space);
                rig.put(cx, &space, AT + 8, 1).expect("memory");
            });
            rig.mmu.as_cpu(CpuId(0), |cx| {
                // SAFETY: one machine.
                let deferred = unsafe { DeferredUnmap::new(rig.vm.shootdown()) }.expect("few CPUs");
                let unhooked = unhook(rig, cx, &space, AT, &deferred);
                let asked = rig.vm.shootdown().hw().interrupts.load(Ordering::Relaxed);
                unhooked.put_back(cx);
                assert_eq!(
                    rig.vm.shootdown().hw().interrupts.load(Ordering::Relaxed),
                    asked + 1,
                    "the flush comes first"
                );
                let leaf = leaf(rig, cx, &space, AT);
                let held = hold(rig, leaf.frame);
                rig.put(cx, &space, AT + 16, 2).expect("memory");
                let _ = rig.mmu.store(CpuId(1), VirtAddr::new(AT + 8), 3);
                rig.mmu.as_cpu(CpuId(1), |cx| rig.put(cx, &space, AT + 24, 4).expect("memory"));
                put(rig, cx, held, leaf.size.order());
                let stored = rig.mmu.as_cpu(CpuId(1), |cx| rig.get(cx, &space, AT + 8));
                assert_eq!(rig.get(cx, &space, AT + 8), stored);
                assert_eq!(rig.get(cx, &space, AT + 16), Ok(2));
                assert_eq!(rig.get(cx, &space, AT + 24), Ok(4));
                assert_eq!(space.counters().copied, 0, "nobody shares the page");
            });
            rig.mmu.as_cpu(CpuId(1), |cx| rig.leave(cx, &space));
            rig.mmu.as_cpu(CpuId(0), |cx| {
                rig.leave(cx, &space);
                rig.vm.destroy(cx, space).expect("destroyed");
            });
        });
    }
}

/// The same with a fork after the page has been put back: no store of the parent reaches the child.
#[test]
fn stores_through_old_translations_do_not_reach_a_child() {
    for page in SIZES {
        with_rig(SIZE, 65, &no_faults(), |rig| {
            let space = rig.mmu.as_cpu(CpuId(0), |cx| filled(rig, cx, page, 1));
            rig.mmu.as_cpu(CpuId(1), |cx| {
                rig.enter(cx, &space);
                rig.put(cx, &space, AT, 1).expect("memory");
            });
            rig.mmu.as_cpu(CpuId(0), |cx| {
                // SAFETY: one machine.
                let deferred = unsafe { DeferredUnmap::new(rig.vm.shootdown()) }.expect("few CPUs");
                let unhooked = unhook(rig, cx, &space, AT, &deferred);
                unhooked.put_back(cx);
                rig.leave(cx, &space);
                let child = rig.vm.fork(cx, &space).expect("forked");
                assert!(rig.mmu.store(CpuId(1), VirtAddr::new(AT), 2).is_err(), "it is shared with the child");
                rig.mmu.as_cpu(CpuId(1), |cx| rig.put(cx, &space, AT, 3).expect("memory"));
                rig.enter(cx, &child);
                assert_eq!(rig.get(cx, &child, AT), Ok(1));
                rig.leave(cx, &child);
                rig.vm.destroy(cx, child).expect("destroyed");
            });
            rig.mmu.as_cpu(CpuId(1), |cx| rig.leave(cx, &space));
            rig.mmu.as_cpu(CpuId(0), |cx| rig.vm.destroy(cx, space).expect("destroyed"));
        });
    }
}

/// As many processes share pages as their references fit without counters, and more: the pages go away and come back.
#[test]
fn pages_of_many_processes_go_away() {
    for page in SIZES {
        for children in [13, 14, 15, 30] {
            let size = Size { mib: 24, ..SIZE };
            with_rig(size, 67, &no_faults(), |rig| {
                // A frame for each 2 MiB whose pages have so many.
                rig.kept.store(size.mib / 2, Ordering::Relaxed);
                rig.mmu.as_cpu(CpuId(0), |cx| {
                    let pages = if page == PageSize::Size4K { 200 } else { 2 };
                    let mut spaces = vec![filled(rig, cx, page, pages)];
                    for _ in 0..children {
                        spaces.push(rig.vm.fork(cx, &spaces[0]).expect("forked"));
                    }
                    let freed: u64 = (0..5).map(|_| rig.evict_all(cx)).sum();
                    assert_eq!(freed, pages * page.pages(), "{page:?} of {children} children");
                    rig.leave(cx, &spaces[0]);
                    for space in spaces {
                        rig.enter(cx, &space);
                        for index in [0, pages - 1] {
                            assert_eq!(rig.get(cx, &space, AT + index * page.bytes()), Ok(1));
                        }
                        rig.leave(cx, &space);
                        rig.vm.destroy(cx, space).expect("destroyed");
                    }
                });
            });
        }
    }
}

/// CPU 0 unmaps shared pages and is about to flush CPU 1; reclaim on CPU 2 finds them mapped nowhere. It may not give the
/// frames away before CPU 1 has been flushed, which can still store to them.
#[test]
fn a_shared_page_that_is_being_unmapped_is_not_stored_before_its_flush() {
    // Each translation may be gone by itself.
    const PAGES: u64 = 32;
    with_rig(SIZE, 68, &no_faults(), |rig| {
        let area = span(AT, PAGES << 12);
        let at = |index: u64| AT + (index << 12);
        let (space, object) = rig.mmu.as_cpu(CpuId(0), |cx| {
            let space = rig.vm.create(cx, bounds()).expect("a space");
            let object = rig.vm.create_shared(cx, PAGES, PageSize::Size4K, false).expect("an object");
            let kind = VmaKind::private(PageSize::Size4K);
            rig.vm.map(cx, &space, area, kind, Backing::Shared(&object, 0)).expect("an area");
            (space, object)
        });
        let heads: Vec<Pfn> = rig.mmu.as_cpu(CpuId(1), |cx| {
            rig.enter(cx, &space);
            (0..PAGES).for_each(|index| rig.put(cx, &space, at(index), 1).expect("memory"));
            (0..PAGES).map(|index| leaf(rig, cx, &space, at(index)).frame).collect()
        });
        let asking: &Stop = &rig.vm.shootdown().hw().asking;
        asking.arm(0);
        let [before, after] = std::thread::scope(|scope| {
            scope.spawn(|| rig.mmu.as_cpu(CpuId(0), |cx| rig.vm.unmap(cx, &space, area).expect("unmapped")));
            asking.wait();
            let stores = |value| {
                let store = |index: &u64| rig.mmu.store(CpuId(1), VirtAddr::new(at(*index)), value).is_ok();
                (0..PAGES).filter(store).count()
            };
            let through = rig.mmu.as_cpu(CpuId(2), |cx| {
                let before = stores(2);
                // SAFETY: one machine.
                let deferred = unsafe { DeferredUnmap::new(rig.vm.shootdown()) }.expect("few CPUs");
                let mut refused = Vec::new();
                for head in &heads {
                    let unhooked = rig.vm.unhook(cx, hold(rig, *head), &deferred);
                    let unhooked = unhooked.expect("nobody else has it");
                    refused.push(page_out(cx, unhooked).expect_err("full").1);
                }
                let after = stores(3);
                refused.into_iter().for_each(|page| page.put_back(cx));
                [before, after]
            });
            asking.open();
            through
        });
        assert!(before > 0, "nobody has flushed");
        assert_eq!(after, 0, "stored under a translation");
        rig.mmu.as_cpu(CpuId(1), |cx| rig.leave(cx, &space));
        rig.mmu.as_cpu(CpuId(0), |cx| {
            rig.vm.destroy(cx, space).expect("destroyed");
            rig.vm.close(cx, object).expect("its own");
        });
    });
}
