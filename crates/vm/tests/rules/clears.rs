//! How pages are copied and cleared: in which order, and by the size of the whole request.

use crate::support::{AT, Model, bounds, no_faults, parts, span, with_cpu, with_rig};
use hugemm_base::{Cancel, Cpu, Never, PageSize, VirtAddr, with};
use hugemm_clear::{ClearPolicy, Clearer, Features, Profile};
use hugemm_paging::Lookup;
use hugemm_vm::{Access, Backing, Vm, VmError, VmaKind};
use std::cell::Cell;

/// A copy goes right of the touched page, then left of it, then around it, with a reschedule point after each: how far it
/// comes before a bad frame tells.
#[test]
fn a_copy_ends_where_it_is_touched() {
    let touched = 300;
    let reached = [(511, 0), (0, 1), (touched, 2)].map(|(bad, parts)| {
        let mut passed = 0;
        with_cpu(32, 1, 71, |rig, cx| {
            let kind = VmaKind::private(PageSize::Size2M);
            let space = rig.space(cx, span(AT, 2 << 20), kind);
            rig.enter(cx, &space);
            rig.store(cx, &space, AT, 1).expect("a page");
            let child = rig.vm.fork(cx, &space).expect("forked");
            let Lookup::Mapped(leaf) = rig.vm.lookup(cx, &space, VirtAddr::new(AT)) else { panic!("mapped") };
            let frame = hugemm_base::Pfn::new(leaf.frame.get() + bad);
            let _ = rig.vm.frames().hwpoison(cx, frame);
            let before = cx.platform().counters().reschedules.get();
            let stored = rig.store(cx, &space, AT + (touched << 12), 2);
            assert_eq!(stored, Err(VmError::HwPoisoned { frame }));
            passed = cx.platform().counters().reschedules.get() - before;
            rig.leave(cx, &space);
            for space in [space, child] {
                rig.vm.destroy(cx, space).expect("destroyed");
            }
        });
        (parts, passed)
    });
    let first = reached[0].1;
    for (parts, passed) in reached {
        assert_eq!(passed - first, parts, "{reached:?}");
    }
}

/// The same 2 MiB are cleared in the cache when they are all that is asked for, and past it as a part of 64 GiB: whether
/// they are filled or pinned, and in pages of either size.
#[test]
fn the_whole_request_decides_how_pages_are_cleared() {
    with_rig(64, 1, 72, &no_faults(), |rig| {
        let features = Features::detect();
        let clearer =
            Clearer::new(features, ClearPolicy::new(Profile::uncalibrated(&features, None))).expect("detected");
        let parts = with!(parts(rig.vm.frames(), rig.vm.shootdown()), clearer);
        // SAFETY: as the rig's; the machine has what it detects.
        let vm: Vm<'_, Model<'_>> = unsafe { Vm::new(parts) }.expect("small");
        rig.on(0, |cx| {
            for page in [PageSize::Size4K, PageSize::Size2M] {
                for pin in [false, true] {
                    for total in [None, Some(64 << 30)] {
                        let space = vm.create(cx, bounds()).expect("a space");
                        let area = span(AT, 2 << 20);
                        vm.map(cx, &space, area, VmaKind::private(page), Backing::Private).expect("an area");
                        let before = cx.platform().counters().snapshot();
                        let mut pins = Vec::new();
                        if pin {
                            vm.pin(cx, &space, area, Access::Write, total, &Never, |run| pins.push(run))
                                .expect("memory");
                        } else {
                            vm.prefault(&space, area, total).work(cx, &Never).expect("memory");
                        }
                        let cleared = cx.platform().counters().snapshot().since(before);
                        let expected = if total.is_some() { (0, 2 << 20) } else { (2 << 20, 0) };
                        let found = (cleared.bytes_cached, cleared.bytes_bulk);
                        assert_eq!(found, expected, "{page:?}, pinned: {pin}, of {total:?}");
                        for pin in pins {
                            vm.unpin(cx, &space, pin).expect("its own");
                        }
                        vm.destroy(cx, space).expect("destroyed");
                    }
                }
            }
            vm.trim(cx);
        });
    });
}

/// A request that is no part of a larger one is cleared by its own size, in a space and in an object.
#[test]
fn a_request_is_as_large_as_it_is() {
    with_rig(64, 1, 73, &no_faults(), |rig| {
        let features = Features::detect();
        let policy = with!(ClearPolicy::new(Profile::uncalibrated(&features, None)), threshold = Some(4 << 20));
        let clearer = Clearer::new(features, policy).expect("detected");
        let parts = with!(parts(rig.vm.frames(), rig.vm.shootdown()), clearer);
        // SAFETY: as the rig's; the machine has what it detects.
        let vm: Vm<'_, Model<'_>> = unsafe { Vm::new(parts) }.expect("small");
        rig.on(0, |cx| {
            let size = PageSize::Size2M;
            for pages in [1, 2] {
                let space = vm.create(cx, bounds()).expect("a space");
                let area = span(AT, pages * size.bytes());
                vm.map(cx, &space, area, VmaKind::private(size), Backing::Private).expect("an area");
                let object = vm.create_shared(cx, area.pages(), size, false).expect("an object");
                let before = cx.platform().counters().snapshot();
                vm.prefault(&space, area, None).work(cx, &Never).expect("memory");
                vm.prefault_shared(&object, 0, area.pages()).work(cx, &Never).expect("memory");
                let cleared = cx.platform().counters().snapshot().since(before);
                let expected = if pages == 1 { (4 << 20, 0) } else { (0, 8 << 20) };
                assert_eq!((cleared.bytes_cached, cleared.bytes_bulk), expected, "{pages} pages");
                vm.close(cx, object).expect("its own");
                vm.destroy(cx, space).expect("destroyed");
            }
            vm.trim(cx);
        });
    });
}

/// Is asked to stop at one look, and not before and after.
struct At(Cell<u64>);

impl Cancel for At {
    fn requested(&self) -> bool {
        self.0.set(self.0.get().wrapping_sub(1));
        self.0.get() == 0
    }
}

/// Clearing that is stopped in the middle of a page leaves no page and no frame behind, of the pool or not: another request fills
/// what is missing.
#[test]
fn a_page_whose_clearing_is_stopped_goes_back() {
    for (page, pooled) in [(PageSize::Size4K, false), (PageSize::Size2M, false), (PageSize::Size2M, true)] {
        let mut stopped = 0;
        for look in 1..12 {
            with_cpu(32, 1, 74, |rig, cx| {
                rig.fill_pool(cx, 3);
                let kind = with!(VmaKind::private(page), pooled);
                let area = span(AT, 4 << 20);
                let space = rig.space(cx, area, kind);
                let used = rig.used(cx);
                let filling = rig.vm.prefault(&space, area, None);
                match filling.work(cx, &At(Cell::new(look))) {
                    Ok(()) => assert_eq!(filling.done(), area.pages()),
                    Err(error) => {
                        assert_eq!(error, VmError::Cancelled);
                        stopped += 1;
                        let tables = rig.used(cx) - used - if pooled { 0 } else { filling.done() };
                        assert!(tables <= 4, "{tables} frames more, at look {look}");
                    }
                }
                rig.vm.prefault(&space, area, None).work(cx, &Never).expect("memory");
                rig.vm.destroy(cx, space).expect("destroyed");
                assert_eq!(rig.pool_available(cx), 3);
            });
        }
        assert!(stopped > 2, "{stopped}");
    }
}
