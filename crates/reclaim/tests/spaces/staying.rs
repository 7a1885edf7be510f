//! What is not taken away: pinned and poisoned pages, and those that a follower uses.

use crate::rig::{Follower, NODE, span, with_cpu};
use crate::rules::{AT, SIZE, SIZES, expect, filled, size_for};
use hugemm_base::{Never, PageSize, Pfn, VirtAddr, VirtRange};
use hugemm_frames::HwPoisoned;
use hugemm_paging::Lookup;
use hugemm_vm::{Access, Backing, Notifier, VmaKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A pinned page stays, and is where it was.
#[test]
fn pinned_pages_stay() {
    for page in SIZES {
        with_cpu(size_for(page), 7, |rig, cx| {
            let space = filled(rig, cx, page, 2);
            let mut pins = Vec::new();
            rig.vm
                .pin(cx, &space, span(AT, page.bytes()), Access::Write, None, &Never, |pin| pins.push(pin))
                .expect("pinned");
            (0..4).for_each(|_| _ = rig.evict_all(cx));
            let Lookup::Mapped(leaf) = rig.vm.lookup(cx, &space, VirtAddr::new(AT)) else { panic!("gone") };
            assert_eq!(leaf.frame, pins[0].extent().base());
            expect(rig, true, rig.vm.lookup(cx, &space, VirtAddr::new(AT + page.bytes())));
            rig.put(cx, &space, AT + 8, 9).expect("still writable");
            pins.into_iter().for_each(|pin| rig.vm.unpin(cx, &space, pin).expect("its own"));
            (0..4).for_each(|_| _ = rig.evict_all(cx));
            expect(rig, true, rig.vm.lookup(cx, &space, VirtAddr::new(AT)));
            assert_eq!(rig.get(cx, &space, AT + 8), Ok(9));
            rig.end(cx, space);
        });
    }
}

/// What is poisoned is neither stored nor moved: both would read it. It goes with its space, and stays out of use.
#[test]
fn a_page_with_a_poisoned_frame_stays() {
    for page in SIZES {
        with_cpu(size_for(page), 7, |rig, cx| {
            let space = filled(rig, cx, page, 2);
            let Lookup::Mapped(before) = rig.vm.lookup(cx, &space, VirtAddr::new(AT)) else { panic!("mapped") };
            let last = Pfn::new(before.frame.get() + page.pages() - 1);
            assert_eq!(rig.vm.frames().hwpoison(cx, last), HwPoisoned::InUse);
            (0..4).for_each(|_| _ = rig.evict_all(cx));
            rig.vm.pager().compact(&rig.vm, cx, NODE);
            let Lookup::Mapped(leaf) = rig.vm.lookup(cx, &space, VirtAddr::new(AT)) else { panic!("gone") };
            assert_eq!(leaf.frame, before.frame);
            expect(rig, true, rig.vm.lookup(cx, &space, VirtAddr::new(AT + page.bytes())));
            rig.end(cx, space);
            rig.vm.frames().drain(cx);
            assert_eq!(rig.vm.frames().stats(cx).refused, 1);
        });
    }
}

/// A follower's accesses keep a page, and it is told before a page goes.
#[test]
fn followers_are_asked_and_told() {
    #[derive(Default)]
    struct Second {
        asked: AtomicU64,
        told: AtomicU64,
        uses: AtomicU64,
    }
    impl<P: hugemm_base::platform::Cpu> Notifier<P> for Second {
        fn begin(&self, _cx: &mut hugemm_base::CpuCx<'_, P>, _range: VirtRange) {
            self.told.fetch_add(1, Ordering::Relaxed);
        }
        fn young(&self, _range: VirtRange) -> bool {
            self.asked.fetch_add(1, Ordering::Relaxed);
            self.uses.load(Ordering::Relaxed) != 0
        }
        fn end(&self, _cx: &mut hugemm_base::CpuCx<'_, P>, _range: VirtRange) {}
    }
    with_cpu(SIZE, 8, |rig, cx| {
        let space = filled(rig, cx, PageSize::Size4K, 4);
        let second = Arc::new(Second::default());
        second.uses.store(1, Ordering::Relaxed);
        let follower = rig.vm.follow(cx, &space, Follower(second.clone())).expect("followed");
        (0..4).for_each(|_| assert_eq!(rig.evict_all(cx), 0));
        assert!(second.asked.load(Ordering::Relaxed) >= 16);
        assert_eq!(second.told.load(Ordering::Relaxed), 0);
        let mut runs = Vec::new();
        let taken = rig.vm.test_and_clear_young(cx, &space, span(AT, 4 << 12), |run| runs.push(run));
        assert_eq!((taken, runs), (Ok(4), vec![span(AT, 4 << 12)]), "what only a follower has used counts");
        second.uses.store(0, Ordering::Relaxed);
        assert_eq!((0..4).map(|_| rig.evict_all(cx)).sum::<u64>(), 4);
        assert_eq!(second.told.load(Ordering::Relaxed), 4);
        // SAFETY: it came from `follow` on this space.
        let _ = unsafe { rig.vm.unfollow(cx, &space, follower) };
        rig.end(cx, space);
    });
}

/// A pool's pages are on no LRU, stay where they are, and go back to their pool: mapped, forked, copied, of shared objects.
#[test]
fn pages_of_a_pool_stay() {
    with_cpu(SIZE, 6, |rig, cx| {
        const PAGES: u64 = 4;
        let page = PageSize::Size2M;
        let at = |index: u64| AT + index * page.bytes();
        rig.fill_pool(cx, PAGES);
        let object = rig.vm.create_shared(cx, page.pages(), page, true).expect("one page");
        let space = rig.space(cx, span(AT, 2 * page.bytes()), VmaKind::private(page).pooled());
        let kind = VmaKind::private(page).pooled();
        rig.vm.map(cx, &space, span(at(2), page.bytes()), kind, Backing::Shared(&object, 0)).expect("an area");
        rig.enter(cx, &space);
        (0..3).for_each(|index| rig.put(cx, &space, at(index), index + 1).expect("promised"));
        // What the copy of a page is taken for is promised to nobody.
        let child = rig.vm.fork(cx, &space).expect("forked");
        rig.put(cx, &space, at(0), 7).expect("the fourth");
        assert_eq!(rig.pool.counts(cx).counts.free, 0);
        assert_eq!(rig.vm.pager().lru(NODE).expect("a node").stats(cx).inserted, 0);
        assert_eq!((0..3).map(|_| rig.evict_all(cx)).sum::<u64>(), 0);
        for (space, first) in [(&space, 7), (&child, 1)] {
            rig.enter(cx, space);
            assert_eq!([0, 1, 2].map(|index| rig.get(cx, space, at(index))), [Ok(first), Ok(2), Ok(3)]);
            rig.leave(cx, space);
        }
        for space in [space, child] {
            rig.vm.destroy(cx, space).expect("nobody uses it");
        }
        rig.vm.close(cx, object).expect("its own");
        assert_eq!(rig.pool.counts(cx).counts.free, PAGES);
        assert_eq!(rig.vm.pager().lru(NODE).expect("a node").stats(cx).inserted, 0);
    });
}
