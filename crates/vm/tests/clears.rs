//! How pages are copied and cleared: in which order, and by the size of the whole request.

#![cfg(all(target_os = "linux", not(miri)))]

mod support;

use hugemm_base::{Cpu, CpuId, Never, PageSize, VirtAddr};
use hugemm_clear::{ClearPolicy, Clearer, Features, Profile};
use hugemm_paging::Lookup;
use hugemm_vm::{Backing, Parts, Vm, VmError, VmaKind};
use support::{Model, bounds, no_faults, parts, span, with_rig};

const AT: u64 = 0x4000_0000;

/// A copy goes right of the touched page, then left of it, then around it, with a reschedule point after each: how far it
/// comes before a bad frame tells.
#[test]
fn a_copy_ends_where_it_is_touched() {
    let touched = 300;
    let reached = [(511, 0), (0, 1), (touched, 2)].map(|(bad, parts)| {
        let mut passed = 0;
        with_rig(32, 1, 71, &no_faults(), |rig| {
            rig.mmu.as_cpu(CpuId(0), |cx| {
                let space = rig.vm.create(cx, bounds()).expect("a space");
                let kind = VmaKind::private(PageSize::Size2M);
                rig.vm.map(cx, &space, span(AT, 2 << 20), kind, Backing::Private).expect("an area");
                rig.enter(cx, &space);
                rig.store(cx, &space, AT, 1).expect("a page");
                let child = rig.vm.fork(cx, &space).expect("forked");
                let Lookup::Mapped(leaf) = rig.vm.lookup(cx, &space, VirtAddr::new(AT)) else { panic!("mapped") };
                let frame = hugemm_base::Pfn::new(leaf.frame.number() + bad);
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
        let parts = Parts { clearer, ..parts(rig.vm.frames(), rig.vm.shootdown()) };
        // SAFETY: as the rig's; the machine has what it detects.
        let vm: Vm<'_, Model<'_>> = unsafe { Vm::new(parts) }.expect("small");
        rig.mmu.as_cpu(CpuId(0), |cx| {
            for page in [PageSize::Size4K, PageSize::Size2M] {
                for pin in [false, true] {
                    for total in [None, Some(64 << 30)] {
                        let space = vm.create(cx, bounds()).expect("a space");
                        let area = span(AT, 2 << 20);
                        vm.map(cx, &space, area, VmaKind::private(page), Backing::Private).expect("an area");
                        let before = cx.platform().counters().snapshot();
                        let mut pins = Vec::new();
                        if pin {
                            vm.pin(cx, &space, area, total, &Never, |run| pins.push(run)).expect("memory");
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
