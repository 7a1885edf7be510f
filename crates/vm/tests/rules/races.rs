//! Several CPUs at once: one page is cleared once, and promises are kept; bad memory does not spread.

use crate::support::{AT, no_faults, span, with_cpu, with_rig};
use hugemm_base::{CancelFlag, Never, PageSize, VirtAddr};
use hugemm_vm::{Access, VmError, VmaKind, ZeroTurn, ZeroWorker};
use std::sync::Barrier;

/// Four CPUs fault at the same pages in the same order: every page is entered once, and the pages that were cleared in
/// vain went back.
#[test]
fn cpus_that_meet_at_a_page_enter_it_once() {
    for (page, pages) in [(PageSize::Size4K, 512_u64), (PageSize::Size2M, 16)] {
        with_rig(64, 4, 41, &no_faults(), |rig| {
            let space = rig.on(0, |cx| {
                let area = span(AT, pages * page.bytes());
                rig.space(cx, area, VmaKind::private(page))
            });
            let start = Barrier::new(4);
            std::thread::scope(|scope| {
                for cpu in 0..4 {
                    let (start, space) = (&start, &space);
                    scope.spawn(move || {
                        rig.beside_others(cpu, |cx| {
                            rig.enter(cx, space);
                            start.wait();
                            for index in 0..pages {
                                let at = AT + index * page.bytes() + u64::from(cpu) * 8;
                                rig.store(cx, space, at, index + 1).expect("memory");
                                assert_eq!(rig.load(cx, space, at), Ok(index + 1));
                                rig.vm.shootdown().handle_ipi(cx);
                            }
                            rig.leave(cx, space);
                        });
                    });
                }
            });
            rig.on(0, |cx| {
                let counters = space.counters();
                assert_eq!(counters.mapped, pages);
                // Small ones are not claimed.
                assert!(page == PageSize::Size4K || counters.wasted <= pages / 8, "{counters:?}");
                rig.enter(cx, &space);
                for index in 0..pages {
                    for cpu in 0..4 {
                        assert_eq!(rig.load(cx, &space, AT + index * page.bytes() + cpu * 8), Ok(index + 1));
                    }
                }
                rig.end(cx, space);
            });
        });
    }
}

/// CPUs fault at, prefault and pin the same pages of an area for which the pool has exactly as many as it promised: whoever
/// finds the pool empty waits for those that hold a page too many.
#[test]
fn a_promise_is_kept_whoever_meets_at_a_page() {
    const PAGES: u64 = 8;
    with_rig(64, 3, 47, &no_faults(), |rig| {
        let kind = VmaKind::private(PageSize::Size2M).pooled();
        let area = span(AT, PAGES << 21);
        for round in 0..20 {
            let space = rig.on(0, |cx| {
                if round == 0 {
                    rig.fill_pool(cx, PAGES);
                }
                rig.space(cx, area, kind)
            });
            let (prefault, start) = (rig.vm.prefault(&space, area, None), Barrier::new(3));
            std::thread::scope(|scope| {
                for cpu in 0..3_u32 {
                    let (start, space, prefault) = (&start, &space, &prefault);
                    scope.spawn(move || {
                        rig.beside_others(cpu, |cx| {
                            start.wait();
                            match cpu {
                                0 => prefault.work(cx, &Never).expect("promised"),
                                1 => {
                                    let pinned = rig.pin(cx, space, area);
                                    rig.unpin(cx, space, pinned);
                                }
                                _ => {
                                    rig.enter(cx, space);
                                    for page in 0..PAGES {
                                        rig.store(cx, space, AT + (page << 21), page).expect("promised");
                                    }
                                    rig.leave(cx, space);
                                }
                            }
                        });
                    });
                }
            });
            rig.on(0, |cx| {
                rig.vm.destroy(cx, space).expect("destroyed");
                assert_eq!(rig.pool_available(cx), PAGES);
            });
        }
    });
}

/// A copy that meets bad memory is reported, and is not mapped; the page can still be read where it is.
#[test]
fn poison_stops_a_copy() {
    with_cpu(32, 1, 43, |rig, cx| {
        let kind = VmaKind::private(PageSize::Size2M);
        let parent = rig.space(cx, span(AT, 2 << 20), kind);
        rig.enter(cx, &parent);
        rig.store(cx, &parent, AT, 1).expect("a page");
        let child = rig.vm.fork(cx, &parent).expect("forked");
        let hugemm_paging::Lookup::Mapped(leaf) = rig.vm.lookup(cx, &parent, VirtAddr::new(AT)) else { panic!() };
        let bad = leaf.frame.checked_add(77).expect("inside");
        rig.vm.frames().hwpoison(cx, bad);
        let used = rig.used(cx);
        let error = rig.vm.fault(cx, &parent, VirtAddr::new(AT), Access::Write).expect_err("bad memory");
        assert_eq!(error, VmError::HwPoisoned { frame: bad });
        assert_eq!(rig.used(cx), used, "the copy went back");
        assert_eq!(rig.vm.lookup(cx, &parent, VirtAddr::new(AT)), {
            let flags = leaf.flags;
            hugemm_paging::Lookup::Mapped(hugemm_paging::Leaf { flags, ..leaf })
        });
        assert_eq!(rig.load(cx, &parent, AT), Ok(1));
        rig.leave(cx, &parent);
        rig.vm.destroy(cx, child).expect("destroyed");
        rig.vm.destroy(cx, parent).expect("destroyed");
    });
}

/// A background worker's blocks are handed out without being cleared again; it stops when asked and loses nothing.
#[test]
fn memory_zeroed_ahead_is_not_cleared_again() {
    use hugemm_base::platform::Cpu;
    with_cpu(64, 1, 44, |rig, cx| {
        let worker = ZeroWorker::new(rig.vm.clearer(), PageSize::Size2M, 25);
        let stop = CancelFlag::new();
        stop.raise();
        assert_eq!(rig.vm.zero_ahead(cx, &worker, &stop), ZeroTurn::Stopped);
        let mut bytes = 0;
        loop {
            match rig.vm.zero_ahead(cx, &worker, &Never) {
                ZeroTurn::Cleared { bytes: more, .. } => bytes += more,
                ZeroTurn::Nothing => break,
                ZeroTurn::Stopped => panic!("nobody asked"),
            }
        }
        assert_eq!(bytes, 64 << 20, "all of it");
        let before = cx.platform().counters().snapshot();
        let kind = VmaKind::private(PageSize::Size2M);
        let space = rig.space(cx, span(AT, 32 << 20), kind);
        rig.vm.prefault(&space, span(AT, 16 << 20), None).work(cx, &Never).expect("memory");
        rig.enter(cx, &space);
        for page in 0..16 {
            assert_eq!(rig.store(cx, &space, AT + page * (2 << 20) + 0x1_0000, 0), Ok(()));
        }
        let after = cx.platform().counters().snapshot().since(before);
        assert_eq!(after.units, 0, "cleared again");
        assert!(after.clears_skipped >= 16);
        rig.end(cx, space);
    });
}
