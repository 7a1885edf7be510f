//! What frees nothing stays, and whoever brings a page back finds a frame: nobody loses what he has because others want more.

use crate::rig::{Cx, Handle, NODE, Rig, Size, bounds, span, with_cpu};
use crate::rules::{AT, SIZE, SIZES, expect, filled, size_for};
use hugemm_base::{PageSize, VirtAddr};
use hugemm_frames::{AllocRequest, Placement};
use hugemm_paging::Lookup;
use hugemm_reclaim::{LruPolicy, Swap, Watermarks};
use hugemm_vm::{Backing, VmError, VmaKind};

/// Content of a page by its number: noise that does not compress, or a number and few runs of bytes.
fn word(page: u64, word: u64, noise: bool) -> u64 {
    match (noise, word) {
        (false, 0) => page,
        (false, _) => (page + (word >> 6)) % 256 * 0x0101_0101_0101_0101,
        (true, _) => {
            let mixed = (page << 9 | word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
        }
    }
}

/// Writes the whole page at `at`, of which the first access is a task's.
fn write<'h>(rig: &Rig<'h>, cx: &mut Cx<'_, 'h>, space: &Handle<'_, 'h>, at: u64, noise: bool) -> Result<(), VmError> {
    rig.put(cx, space, at, word(at >> 12, 0, noise))?;
    let Lookup::Mapped(leaf) = rig.vm.lookup(cx, space, VirtAddr::new(at)) else { panic!("mapped") };
    let frame = hugemm_base::Pfn::new(leaf.frame.get() + ((at >> 12) & (leaf.size.pages() - 1)));
    (1..512).for_each(|index| rig.device_store(frame, index * 8, word(at >> 12, index, noise)));
    Ok(())
}

fn is_there<'h>(
    rig: &Rig<'h>,
    cx: &mut Cx<'_, 'h>,
    space: &Handle<'_, 'h>,
    at: u64,
    noise: bool,
) -> Result<(), VmError> {
    for index in [0, 1, 300, 511] {
        assert_eq!(rig.get(cx, space, at + index * 8)?, word(at >> 12, index, noise), "{at:#x}");
    }
    Ok(())
}

/// One has a part of memory and never grows; another takes what it can get. Both can read all that they have written.
#[test]
fn whoever_does_not_grow_keeps_what_it_has() {
    const MINE: u64 = 700;
    for policy in LruPolicy::ALL {
        for (mine, theirs) in [(true, true), (false, true), (true, false)] {
            for swap in [100_000, 1024, 256] {
                with_cpu(Size { swap, policy, mib: 8, ..SIZE }, 9, |rig, cx| {
                    let [bystander, grower] = [0, 1].map(|_| {
                        let space = rig.vm.create(cx, bounds()).expect("a space");
                        let kind = VmaKind::private(PageSize::Size4K);
                        rig.vm.map(cx, &space, span(AT, 1 << 25), kind, Backing::Private).expect("an area");
                        space
                    });
                    rig.enter(cx, &bystander);
                    (0..MINE).for_each(|page| write(rig, cx, &bystander, AT + (page << 12), mine).expect("memory"));
                    rig.leave(cx, &bystander);
                    rig.enter(cx, &grower);
                    let grew = (0..4000)
                        .take_while(|page| write(rig, cx, &grower, AT + (page << 12), theirs).is_ok())
                        .count() as u64;
                    rig.leave(cx, &grower);
                    let case = format!("{policy:?}, noise {mine} and {theirs}, swap {swap}, {grew} pages");
                    assert!(grew > 900, "{case}");
                    for (space, pages, noise) in
                        [(&bystander, MINE, mine), (&grower, grew, theirs), (&bystander, MINE, mine)]
                    {
                        rig.enter(cx, space);
                        let lost = (0..pages)
                            .filter(|page| is_there(rig, cx, space, AT + (page << 12), noise).is_err())
                            .count();
                        assert_eq!(lost, 0, "{case}");
                        rig.leave(cx, space);
                    }
                    [bystander, grower].into_iter().for_each(|space| rig.vm.destroy(cx, space).expect("destroyed"));
                });
            }
        }
    }
}

/// A page that does not compress stays, is not tried again before it has been used, and goes when it compresses.
#[test]
fn what_does_not_compress_stays_where_it_is() {
    for (page, policy) in SIZES.into_iter().flat_map(|page| LruPolicy::ALL.map(|policy| (page, policy))) {
        with_cpu(Size { policy, ..size_for(page) }, 10, |rig, cx| {
            let pages = if page == PageSize::Size4K { 200 } else { 2 };
            let space = filled(rig, cx, page, pages);
            let small = |index: u64| AT + (index << 12);
            let all = pages * page.pages();
            (0..all).for_each(|index| write(rig, cx, &space, small(index), true).expect("memory"));
            // So that no CPU walks its tables.
            rig.leave(cx, &space);
            let free = rig.vm.frames().stats(cx).available();
            assert_eq!((0..5).map(|_| rig.evict_all(cx)).sum::<u64>(), 0);
            let stats = rig.store.stats(cx);
            assert_eq!((stats.pages, rig.vm.frames().stats(cx).available()), (0, free));
            let counts = rig.vm.pager().counts();
            let flushes = counts.unmap_flushes.get();
            assert!(flushes > 0, "each was tried");
            assert_eq!((0..3).map(|_| rig.evict_all(cx)).sum::<u64>(), 0);
            assert_eq!(counts.unmap_flushes.get(), flushes, "and not again");
            rig.enter(cx, &space);
            // Half of one is enough; of a page of 4 KiB all has to.
            for index in 0..page.pages().div_ceil(2) {
                write(rig, cx, &space, small(index), false).expect("mapped");
            }
            let freed: u64 = (0..3).map(|_| rig.evict_all(cx)).sum();
            assert_eq!(freed, page.pages());
            expect(rig, true, rig.vm.lookup(cx, &space, VirtAddr::new(AT)));
            for index in 0..all {
                is_there(rig, cx, &space, small(index), index >= page.pages().div_ceil(2)).expect("memory");
            }
            rig.end(cx, space);
        });
    }
}

/// New pages leave the reserve of every node, what comes back may use it. `left`: frames that others leave of the first node, which
/// they take at once.
fn leave_the_reserve(nodes: u32, from: Placement, left: u64) {
    let only = Placement::Only(NODE);
    with_cpu(Size { nodes, mib: SIZE.mib * u64::from(nodes), ..SIZE }, 11, |rig, cx| {
        let space = rig.space(cx, span(AT, 40 << 12), VmaKind::private(PageSize::Size4K).from(only));
        rig.enter(cx, &space);
        (0..40).for_each(|index| rig.put(cx, &space, AT + (index << 12) + 8, index + 1).expect("memory"));
        assert_eq!((0..3).map(|_| rig.evict_all(cx)).sum::<u64>(), 40);
        rig.leave(cx, &space);
        let (frames, marks) = (rig.vm.frames(), rig.vm.pager().marks());
        let reserve = marks.min() / 2;
        let mut taken = Vec::new();
        let mut take = |cx: &Cx<'_, '_>, left| {
            while frames.node_available(cx, NODE) > left {
                let request = AllocRequest::default().from(only);
                taken.push(frames.alloc(cx, request).expect("there are some"));
            }
        };
        take(cx, 400);
        let other = rig.space(cx, span(AT, 1 << 22), VmaKind::private(PageSize::Size4K).from(from));
        rig.enter(cx, &other);
        // Tables are taken where the CPU is.
        write(rig, cx, &other, AT + (1 << 21), true).expect("memory");
        let mut pages = (0..1024).filter(|page| *page != 1 << 9);
        // Until somebody has seen that less than *low* is free.
        while frames.node_available(cx, NODE) > marks.low() - 40 {
            write(rig, cx, &other, AT + (pages.next().expect("enough") << 12), true).expect("memory");
        }
        take(cx, left.max(reserve));
        let grew = pages.find_map(|page| write(rig, cx, &other, AT + (page << 12), true).err());
        let expected = (nodes == 1 || from == only).then_some(VmError::NoMemory);
        assert_eq!((grew, frames.node_available(cx, NODE)), (expected, reserve), "{nodes} nodes, {from:?}, {left}");
        rig.leave(cx, &other);
        rig.enter(cx, &space);
        for index in 0..40 {
            assert_eq!(rig.get(cx, &space, AT + (index << 12) + 8), Ok(index + 1));
        }
        assert!(frames.node_available(cx, NODE) < reserve);
        taken.into_iter().for_each(|block| frames.free(cx, block));
        rig.leave(cx, &space);
        rig.enter(cx, &other);
        assert_eq!(rig.put(cx, &other, AT + (1 << 22) - 8, 1), Ok(()));
        rig.end(cx, other);
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

#[test]
fn new_pages_leave_the_reserve_to_those_that_come_back() {
    for (nodes, from) in [(1, Placement::Local), (2, Placement::Only(NODE)), (2, Placement::Local)] {
        for left in [u64::MAX, 0] {
            leave_the_reserve(nodes, from, left);
        }
    }
}

/// A page of 2 MiB that is away comes back out of what new pages leave, where the node's reserve is for a large one: of a node of 1 GiB.
/// Where it is smaller, the page does not go.
#[test]
fn the_reserve_of_a_large_node_covers_a_large_page() {
    let large = Watermarks::for_node(1 << 18).min();
    for (policy, min) in LruPolicy::ALL.into_iter().flat_map(|policy| [large, 64].map(|min| (policy, min))) {
        let marks = Watermarks::new(min, min + 200, min + 400);
        with_cpu(Size { policy, marks, mib: 24, ..SIZE }, 12, |rig, cx| {
            let space = filled(rig, cx, PageSize::Size2M, 1);
            (0..3).for_each(|_| _ = rig.evict_all(cx));
            expect(rig, min == large, rig.vm.lookup(cx, &space, VirtAddr::new(AT)));
            rig.leave(cx, &space);
            let other = rig.space(cx, span(AT, 1 << 26), VmaKind::private(PageSize::Size4K));
            let page = |index: u64| AT + (index << 12);
            rig.enter(cx, &other);
            let grew = (0..).find(|index| write(rig, cx, &other, page(*index), true).is_err()).expect("no more memory");
            rig.leave(cx, &other);
            rig.enter(cx, &space);
            assert_eq!(rig.get(cx, &space, AT + 8), Ok(1), "{policy:?}, {min}, {grew} pages");
            rig.leave(cx, &space);
            rig.enter(cx, &other);
            (0..grew).for_each(|index| is_there(rig, cx, &other, page(index), true).expect("it did not go"));
            rig.end(cx, other);
            rig.enter(cx, &space);
            assert_eq!(rig.get(cx, &space, AT + 8), Ok(1), "nothing is lost");
            rig.end(cx, space);
        });
    }
}
