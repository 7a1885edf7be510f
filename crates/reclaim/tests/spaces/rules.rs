//! Pages go away and come back: one CPU, one rule each. Of shared objects and what is unmapped meanwhile: the tests of `hugemm-vm`.

use crate::rig::{Handle, Rig, Size, span, with_cpu};
use hugemm_base::{PageSize, VirtAddr};
use hugemm_paging::Lookup;
use hugemm_reclaim::{LruPolicy, Swap, Watermarks};
use hugemm_vm::VmaKind;

pub(crate) const AT: u64 = 0x4000_0000;
pub(crate) const SIZE: Size =
    Size { mib: 16, swap: 2000, cpus: 2, policy: LruPolicy::Generations, nodes: 1, marks: None, strange: false };
pub(crate) const SIZES: [PageSize; 2] = [PageSize::Size4K, PageSize::Size2M];

/// The same for pages of a size: large ones go where the reserve is enough for them to come back.
pub(crate) fn size_for(page: PageSize) -> Size {
    match page {
        PageSize::Size4K => SIZE,
        _ => Size { mib: 32, marks: Watermarks::new(3076, 3100, 3200), ..SIZE },
    }
}

pub(crate) fn filled<'v, 'h>(
    rig: &'v Rig<'h>,
    cx: &mut crate::rig::Cx<'_, 'h>,
    page: PageSize,
    pages: u64,
) -> Handle<'v, 'h> {
    let area = span(AT, pages * page.bytes());
    let space = rig.space(cx, area, VmaKind::private(page));
    rig.enter(cx, &space);
    for index in 0..pages {
        rig.put(cx, &space, AT + index * page.bytes() + 8, index + 1).expect("memory");
    }
    space
}

pub(crate) fn expect(rig: &Rig<'_>, away: bool, found: Lookup) {
    let _ = rig;
    assert_eq!(matches!(found, Lookup::Owner(_)), away, "{found:?}");
}

#[test]
fn private_pages_go_away_and_come_back() {
    for page in SIZES {
        let pages = if page == PageSize::Size4K { 100 } else { 3 };
        with_cpu(size_for(page), 1, |rig, cx| {
            let space = filled(rig, cx, page, pages);
            let before = rig.vm.frames().stats(cx).available();
            // Young at first, idle after that.
            let freed = rig.evict_all(cx) + rig.evict_all(cx) + rig.evict_all(cx);
            assert_eq!(freed, pages * page.pages());
            assert!(rig.vm.frames().stats(cx).available() > before);
            for index in 0..pages {
                expect(rig, true, rig.vm.lookup(cx, &space, VirtAddr::new(AT + index * page.bytes())));
            }
            for index in 0..pages {
                assert_eq!(rig.get(cx, &space, AT + index * page.bytes() + 8), Ok(index + 1));
                assert_eq!(rig.get(cx, &space, AT + index * page.bytes() + 16), Ok(0));
                rig.put(cx, &space, AT + index * page.bytes() + 16, 7).expect("writable");
            }
            assert_eq!(space.counters().refaulted, pages);
            assert_eq!(rig.store.stats(cx).pages, 0, "a slot goes with its page");
            rig.end(cx, space);
        });
    }
}

#[test]
fn a_fork_shares_what_is_away_and_each_gets_its_own() {
    for page in SIZES {
        with_cpu(size_for(page), 3, |rig, cx| {
            let parent = filled(rig, cx, page, 2);
            (0..3).for_each(|_| _ = rig.evict_all(cx));
            let stored = rig.store.stats(cx);
            let child = rig.vm.fork(cx, &parent).expect("forked");
            assert_eq!(rig.store.stats(cx).stores, stored.stores, "nothing is stored twice");
            rig.put(cx, &parent, AT + 8, 100).expect("memory");
            rig.leave(cx, &parent);
            rig.enter(cx, &child);
            assert_eq!(rig.get(cx, &child, AT + 8), Ok(1));
            assert_eq!(rig.get(cx, &child, AT + page.bytes() + 8), Ok(2));
            rig.leave(cx, &child);
            // Shared by fork while present: stored once, found by both.
            let grandchild = rig.vm.fork(cx, &child).expect("forked");
            let stores = rig.store.stats(cx).stores;
            (0..4).for_each(|_| _ = rig.evict_all(cx));
            // The child's two pages, which the grandchild shares, and the parent's own.
            assert_eq!(rig.store.stats(cx).stores - stores, 3 * page.pages());
            for space in [&child, &grandchild] {
                rig.enter(cx, space);
                assert_eq!(rig.get(cx, space, AT + 8), Ok(1));
                rig.put(cx, space, AT + 8, 55).expect("its own");
                rig.leave(cx, space);
            }
            for space in [parent, child, grandchild] {
                rig.vm.destroy(cx, space).expect("destroyed");
            }
        });
    }
}
