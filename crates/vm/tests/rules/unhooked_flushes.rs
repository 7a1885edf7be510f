//! Unhooked pages to which a CPU still has translations: what it stores is seen, or refused.

use super::unhooked::{Away, SIZES, let_go, page_out, with_rig};
use crate::support::{AT, before_flush, no_faults, span, with_format};
use hugemm_base::{CpuId, Pfn, VirtAddr};
use std::sync::Barrier;

/// What has been unmapped is reached by no CPU, though its pages were being moved and nobody had flushed yet: without a pager
/// too.
#[test]
fn unmapping_flushes_what_is_moving_without_a_pager() {
    const PAGES: u64 = 16;
    crate::support::with_rig(16, 2, 102, &no_faults(), |rig| {
        let at = |index: u64| AT + (index << 12);
        let (object, space) = rig.on(0, |cx| rig.shown(cx, PAGES));
        rig.on(1, |cx| {
            rig.enter(cx, &space);
            (0..PAGES).for_each(|index| rig.store(cx, &space, at(index), 7).expect("memory"));
        });
        rig.on(0, |cx| {
            let deferred = rig.deferred();
            let pages: Vec<_> = (0..PAGES).map(|index| rig.unhook(cx, &space, at(index), &deferred)).collect();
            rig.vm.unmap(cx, &space, span(AT, PAGES << 12)).expect("unmapped");
            let reached = (0..PAGES).filter(|index| rig.mmu.store(CpuId::new(1), VirtAddr::new(at(*index)), 8).is_ok());
            assert_eq!(reached.count(), 0, "unmapped, and reached by old translations");
            pages.into_iter().for_each(|page| page.put_back(cx));
        });
        rig.on(1, |cx| rig.leave(cx, &space));
        rig.on(0, |cx| {
            rig.end_shown(cx, (object, space));
        });
    });
}

/// CPU 1 has a page's translation, and may store through it. Another CPU takes the page away and puts it back, and stores to it while
/// somebody holds one more reference, as look-around does. Whatever CPU 1 stores then is seen.
#[test]
fn stores_through_old_translations_are_not_lost() {
    for size in SIZES {
        with_rig(32, 103, |rig| {
            let space = rig.filled_for_both(size, 1);
            rig.on(0, |cx| {
                let deferred = rig.deferred();
                let page = rig.unhook(cx, &space, AT, &deferred);
                let flushes = rig.flushes();
                page.put_back(cx);
                assert_eq!(rig.flushes(), flushes + 1, "the flush comes first");
                let held = rig.hold(rig.leaf(cx, &space, AT).frame);
                rig.store(cx, &space, AT + 16, 2).expect("it is there");
                let _ = rig.mmu.store(CpuId::new(1), VirtAddr::new(AT + 8), 3);
                rig.on(1, |cx| rig.store(cx, &space, AT + 24, 4).expect("it is there"));
                let_go(rig, cx, held);
                let stored = rig.on(1, |cx| rig.load(cx, &space, AT + 8));
                assert_eq!([8, 16, 24].map(|word| rig.load(cx, &space, AT + word)), [stored, Ok(2), Ok(4)]);
                assert_eq!(space.counters().copied, 0, "nobody shares the page");
            });
            rig.end_for_both(space);
        });
    }
}

/// The same with a fork after the page has been put back: no store of the parent reaches the child.
#[test]
fn stores_through_old_translations_do_not_reach_a_child() {
    for size in SIZES {
        with_rig(32, 104, |rig| {
            let space = rig.filled_for_both(size, 1);
            rig.on(0, |cx| {
                let deferred = rig.deferred();
                rig.unhook(cx, &space, AT, &deferred).put_back(cx);
                rig.leave(cx, &space);
                let child = rig.vm.fork(cx, &space).expect("forked");
                assert!(rig.mmu.store(CpuId::new(1), VirtAddr::new(AT), 2).is_err(), "it is shared with the child");
                rig.on(1, |cx| rig.store(cx, &space, AT, 3).expect("a copy"));
                rig.enter(cx, &child);
                assert_eq!(rig.load(cx, &child, AT), Ok(1));
                rig.leave(cx, &child);
                rig.vm.destroy(cx, child).expect("destroyed");
                rig.enter(cx, &space);
            });
            rig.end_for_both(space);
        });
    }
}

/// CPU 0 unmaps shared pages and is about to flush CPU 1; reclaim on CPU 2 finds them mapped nowhere. It may not give the frames away
/// before CPU 1 has been flushed, which can still store to them.
#[test]
fn a_shared_page_that_is_being_unmapped_is_not_stored_before_its_flush() {
    // Each translation may be gone by itself.
    const PAGES: u64 = 32;
    with_format(16, 3, 105, &no_faults(), |rig: &Away<'_>| {
        let (area, at) = (span(AT, PAGES << 12), |index: u64| AT + (index << 12));
        let (object, space) = rig.on(0, |cx| rig.shown(cx, PAGES));
        let heads: Vec<Pfn> = rig.on(1, |cx| {
            rig.enter(cx, &space);
            (0..PAGES).for_each(|index| rig.store(cx, &space, at(index), 1).expect("memory"));
            (0..PAGES).map(|index| rig.leaf(cx, &space, at(index)).frame).collect()
        });
        let stores = |value| {
            let store = |index: &u64| rig.mmu.store(CpuId::new(1), VirtAddr::new(at(*index)), value).is_ok();
            (0..PAGES).filter(store).count()
        };
        let [flushes, over] = [(); 2].map(|()| Barrier::new(2));
        let through = std::thread::scope(|scope| {
            scope.spawn(|| {
                let stop = || {
                    flushes.wait();
                    over.wait();
                };
                rig.on(0, |cx| before_flush(&stop, || _ = rig.vm.unmap(cx, &space, area).expect("unmapped")));
            });
            flushes.wait();
            let through = rig.on(2, |cx| {
                let (before, deferred) = (stores(2), rig.deferred());
                let refuse = |head: &Pfn| {
                    let page = rig.vm.unhook(cx, rig.hold(*head), &deferred).expect("nobody else has it");
                    page_out(rig, cx, page, 0).expect_err("full").1
                };
                let refused: Vec<_> = heads.iter().map(refuse).collect();
                let after = stores(3);
                refused.into_iter().for_each(|page| page.put_back(cx));
                (before > 0, after)
            });
            over.wait();
            through
        });
        assert_eq!(through, (true, 0), "whether nobody had flushed, and how many were stored under a translation");
        rig.on(1, |cx| rig.leave(cx, &space));
        rig.on(0, |cx| {
            rig.end_shown(cx, (object, space));
        });
    });
}
