//! Where blocks come from: nodes, mobility, low memory, chunks.

use super::support::{arena, extent, with_arenas, with_config, with_one_arena};
use super::{GIB, order, request};
use hugemm_base::{Dirty, NodeId, Order, Pfn, Zeroed};
use hugemm_frames::{
    AllocError, AllocRequest, Frames, FramesConfig, FramesConfigError, Frozen, NoMigration, Placement, Plain,
};

#[test]
fn nodes_are_preferred_and_fallen_back_from() {
    with_arenas(&[arena(0, 512, 0), arena(512, 512, 1)], 2, &[NodeId::new(1), NodeId::new(0)], |frames, _, cx| {
        assert_eq!((frames.nodes(), frames.frames(), frames.managed()), (2, 1024, 1024));
        let node = |block: &Frozen| frames.node_of(block.pfn()).expect("managed").get();
        let local = frames.alloc(&cx, request(0)).expect("memory");
        let other = frames.alloc(&cx, request(0).from(Placement::Prefer(NodeId::new(0)))).expect("memory");
        assert_eq!((node(&local), node(&other)), (1, 0));
        assert_eq!(frames.local_node(&cx), NodeId::new(1));
        frames.free(&cx, local);
        frames.free(&cx, other);
        let cached = [0, 1].map(|node| frames.node_stats(&cx, NodeId::new(node)).cached);
        assert!(cached[0] == 0 && cached[1] != 0, "CPU 0 is on node 1: {cached:?}");
        frames.drain(&cx);
        let all = frames.alloc(&cx, request(9).from(Placement::Only(NodeId::new(1)))).expect("memory");
        assert_eq!(frames.alloc(&cx, request(0).from(Placement::Only(NodeId::new(1)))), Err(AllocError::OutOfMemory));
        assert_eq!(frames.alloc(&cx, request(0).from(Placement::Only(NodeId::new(2)))), Err(AllocError::NoSuchNode));
        let fallen = frames.alloc(&cx, request(0)).expect("fallback");
        assert_eq!(node(&fallen), 0);
        frames.free(&cx, fallen);
        frames.free(&cx, all);
    });
}

/// A CPU that is said to be on a node that there is not is on the first arena's.
#[test]
fn a_cpu_of_no_node_is_on_the_first() {
    with_arenas(&[arena(0, 512, 1)], 1, &[NodeId::new(7)], |frames, _, cx| {
        let page = frames.alloc(&cx, request(0)).expect("memory");
        assert_eq!((frames.local_node(&cx), frames.node_of(page.pfn())), (NodeId::new(1), Some(NodeId::new(1))));
        frames.free(&cx, page);
    });
}

/// The nearest node that has any is asked next, whatever its number; of those as far the next in number; and the list is each node's own.
#[test]
fn the_nearest_node_is_fallen_back_to() {
    let arenas = [0, 1, 2, 3].map(|node| arena(512 * u64::from(node), 512, node));
    // Two pairs, 0 with 2 and 1 with 3; from 3 there is no way to 0, and nothing is said of further nodes.
    let distances = [10, 21, 15, 21, 21, 10, 21, 15, 15, 30, 10, 20, 255, 15, 30, 10];
    let from = |node: u32, distances: &[u8]| {
        let mut found = Vec::new();
        with_config(
            FramesConfig::new(&arenas, 1).on_nodes(&[NodeId::new(node)]).with_distances(distances),
            |frames, _, cx| {
                let blocks: Vec<_> = (0..4).map(|_| frames.alloc(&cx, request(9)).expect("memory")).collect();
                found.extend(blocks.iter().map(|block| frames.node_of(block.pfn()).expect("managed").get()));
                assert_eq!(frames.nodes_from(NodeId::new(node)).map(|node| node.get()).collect::<Vec<_>>(), found);
                let nowait = frames.alloc_nowait(&cx, request(0));
                assert_eq!(nowait, Err(AllocError::OutOfMemory));
                let Some(last) = blocks.into_iter().last() else { return };
                let (number, at) = (last.pfn(), NodeId::new(node));
                frames.free(&cx, last);
                let far = frames.alloc_nowait(&cx, request(9).from(Placement::Prefer(at))).expect("the last one's");
                assert_eq!(far.pfn(), number);
            },
        );
        found
    };
    assert_eq!(
        [0, 1, 2, 3].map(|node| from(node, &distances)),
        [[0, 2, 1, 3], [1, 3, 2, 0], [2, 0, 3, 1], [3, 1, 2, 0]]
    );
    assert_eq!([0, 1, 2, 3].map(|node| from(node, &[])), [[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2]]);
    // Of two nodes only: the others are farthest.
    assert_eq!([1, 2].map(|node| from(node, &[10, 20, 20, 10])), [[1, 0, 2, 3], [2, 3, 0, 1]]);
    let wrong = Frames::<Plain>::required_bytes(&FramesConfig::new(&arenas, 1).with_distances(&[10, 20, 20]));
    assert_eq!(wrong, Err(FramesConfigError::Distances(3)));
}

#[test]
fn mobility_groups_by_2_mib() {
    with_one_arena(0, 4096, 1, |frames, _, cx| {
        let mut held: Vec<Frozen> = Vec::new();
        for round in 0..600 {
            let request = if round % 2 == 0 { request(0) } else { request(0).movable() };
            held.push(frames.alloc(&cx, request).expect("memory"));
        }
        for a in &held {
            for b in held.iter().take(50) {
                let same_block = a.pfn().get() / 512 == b.pfn().get() / 512;
                assert!(!same_block || a.mobility() == b.mobility(), "{a:?} and {b:?} share a block");
            }
        }
        let scattered = frames.stats(&cx).fragmentation_permille(order(12));
        assert_eq!(scattered, 1000);
        for block in held {
            frames.free(&cx, block);
        }
        frames.drain(&cx);
        assert_eq!(frames.stats(&cx).fragmentation_permille(order(12)), 0);
        assert_eq!(frames.stats(&cx).extents(order(9)), 8);
    });
}

/// What lies high is not handed out again while there is room below: not from a cache, and not from the holes of a higher
/// 1 GiB either, unless one is just as large as a larger block.
#[test]
#[cfg_attr(miri, ignore = "more than a gibibyte of descriptors")]
fn low_memory_is_used_first() {
    with_one_arena(GIB, GIB + 4096, 1, |frames, _, cx| {
        let mut blocks: Vec<Frozen> = std::iter::from_fn(|| frames.alloc(&cx, request(9)).ok()).collect();
        blocks.sort_by_key(|block| block.pfn());
        let (high, low) = (blocks.pop().expect("some"), blocks.remove(0));
        let (high_extent, low_extent) = (high.extent(), low.extent());
        frames.free(&cx, low);
        frames.drain(&cx);
        let first = frames.alloc(&cx, request(0)).expect("memory");
        assert!(low_extent.contains(first.pfn()));
        // Freed last, but high: the cache does not hand it out again.
        let mut pages = frames.split(high, Order::ZERO).expect("managed");
        frames.free(&cx, pages.pop().expect("a page"));
        let mut held = vec![first];
        for _ in 0..100 {
            let page = frames.alloc(&cx, request(0)).expect("memory");
            assert!(low_extent.contains(page.pfn()), "{page:?}");
            held.push(page);
        }
        // Holes in the second 1 GiB, a whole 2 MiB in the first: that is divided.
        let kept = pages.pop().expect("a page");
        frames.free_extent(&cx, pages.into_dirty());
        held.drain(..).for_each(|page| frames.free(&cx, page));
        frames.drain(&cx);
        // All that the cache fetches, too.
        for _ in 0..8 {
            let block = frames.alloc(&cx, request(3)).expect("memory");
            assert!(low_extent.contains(block.pfn()) && !high_extent.contains(block.pfn()), "{block:?}");
            held.push(block);
        }
        held.drain(..).for_each(|block| frames.free(&cx, block));
        frames.drain(&cx);
        // A hole that is filled by just one block of an order that is never cached is worth more than a fresh 2 MiB.
        let exact = frames.alloc(&cx, request(4)).expect("memory");
        assert!(high_extent.contains(exact.pfn()), "{exact:?}");
        frames.free(&cx, exact);
        frames.free(&cx, kept);
        blocks.into_iter().for_each(|block| frames.free(&cx, block));
        frames.drain(&cx);
        assert_eq!(frames.stats(&cx).blocks[18], 1);
    });
}

/// Several 2 MiB blocks of a cache, from different words and regions, refused ones among them, reach the node as they are.
#[test]
#[cfg_attr(miri, ignore = "more than a gibibyte of descriptors")]
fn cached_2_mib_blocks_come_back_whole() {
    with_one_arena(GIB, 2 * GIB, 1, |frames, _, cx| {
        let mut blocks: Vec<Frozen> = std::iter::from_fn(|| frames.alloc(&cx, request(9)).ok()).collect();
        assert_eq!(blocks.len(), 1024);
        assert!(blocks.is_sorted_by_key(Frozen::pfn), "the lowest first, however many are fetched at once");
        // A cache that runs empty again and again fetches up to 64 at once.
        let fetched = frames.stats(&cx).lock_rounds;
        assert!(fetched < 50, "{fetched} lock rounds");
        // Every second one, from all over the place: no two of them adjoin.
        let poisoned = blocks[700].pfn();
        let (even, odd): (Vec<_>, Vec<_>) = blocks.drain(..).partition(|block| block.pfn().get() / 512 % 2 == 0);
        even.into_iter().rev().for_each(|block| frames.free(&cx, block));
        frames.drain(&cx);
        let stats = frames.stats(&cx);
        assert_eq!((stats.blocks[9], stats.free), (512, 512 * 512));
        let freed = stats.lock_rounds - fetched;
        assert!(freed < 50, "{freed} lock rounds");
        frames.hwpoison(&cx, poisoned);
        odd.into_iter().for_each(|block| frames.free(&cx, block));
        frames.drain(&cx);
        let stats = frames.stats(&cx);
        assert_eq!((stats.refused, stats.available()), (1, 2 * GIB - 1));
        assert_eq!((stats.blocks[18], stats.extents(order(9))), (1, 1023));
    });
}

/// Pages that two CPUs take by turns have their references on different lines, also where memory has holes; and where
/// nothing else is left, they share.
#[test]
fn two_cpus_fill_their_caches_from_different_chunks() {
    with_one_arena(0, 4096, 2, |frames, _, cx| {
        let mut held: [Vec<Frozen>; 2] = [Vec::new(), Vec::new()];
        let chunks = |held: &[Vec<Frozen>; 2]| -> [std::collections::BTreeSet<u64>; 2] {
            [0, 1].map(|cpu| held[cpu].iter().map(|block| block.pfn().get() >> 8).collect())
        };
        let take = |held: &mut [Vec<Frozen>; 2], count: usize| {
            for step in 0..count {
                for (cpu, held) in held.iter_mut().enumerate() {
                    hugemm_threads::run_as(cpu as u32);
                    held.push(frames.alloc(&cx, request(step as u32 % 4)).expect("memory"));
                }
            }
        };
        take(&mut held, 40);
        let [zero, one] = chunks(&held);
        assert!(zero.is_disjoint(&one), "{zero:?} {one:?}");
        // Both 2 MiB in use stay few: a CPU goes on where it was.
        assert!(zero.len() + one.len() <= 4, "{zero:?} {one:?}");
        // All of the memory can be had.
        let mut rest = Vec::new();
        for cpu in [0, 1, 0, 1] {
            hugemm_threads::run_as(cpu);
            rest.extend(std::iter::from_fn(|| frames.alloc(&cx, request(0)).ok()));
        }
        let pages: u64 = held.iter().flatten().chain(&rest).map(|block| block.order().pages()).sum();
        let cached = frames.stats(&cx).cached;
        assert_eq!(pages + cached, 4096);
        held.into_iter().flatten().chain(rest).for_each(|block| frames.free(&cx, block));
    });
}

/// Nobody breaks a whole 1 GiB to have his pages apart from another CPU's.
#[test]
#[cfg_attr(miri, ignore = "two gibibytes of descriptors")]
fn cpus_share_a_chunk_before_a_gibibyte_is_broken() {
    with_one_arena(0, 2 * GIB, 3, |frames, _, cx| {
        let whole = frames.alloc(&cx, request(18)).expect("whole");
        let mut held: Vec<Frozen> = std::iter::from_fn(|| frames.alloc(&cx, request(9)).ok()).collect();
        assert_eq!(held.len(), 512);
        let left = held.pop().expect("some");
        let place = left.extent();
        frames.free(&cx, left);
        frames.free(&cx, whole);
        frames.drain(&cx);
        // Of the two chunks of 2 MiB the first two CPUs have one each.
        for cpu in [0, 1, 2] {
            hugemm_threads::run_as(cpu);
            held.push(frames.alloc(&cx, request(0)).expect("memory"));
            assert!(held.last().is_some_and(|page| place.contains(page.pfn())), "CPU {cpu}: {:?}", held.last());
        }
        assert_eq!(frames.stats(&cx).blocks[18], 1);
        held.into_iter().for_each(|block| frames.free(&cx, block));
    });
}

/// Where only the other mobility has room, its largest run is taken, so that the next comes from there too.
#[test]
fn the_other_mobilitys_largest_run_is_taken() {
    with_one_arena(0, 1024, 1, |frames, _, cx| {
        let held: Vec<Frozen> = std::iter::from_fn(|| frames.alloc(&cx, request(0).movable()).ok()).collect();
        assert_eq!(held.len(), 1024);
        let run = extent(640, 64);
        let (free, mut held): (Vec<_>, Vec<_>) =
            held.into_iter().partition(|page| page.pfn() == Pfn::new(3) || run.contains(page.pfn()));
        free.into_iter().for_each(|page| frames.free(&cx, page));
        frames.drain(&cx);
        held.push(frames.alloc(&cx, request(0)).expect("memory"));
        assert!(held.last().is_some_and(|page| run.contains(page.pfn())), "{:?}", held.last());
        held.into_iter().for_each(|page| frames.free(&cx, page));
    });
}

/// What is freed above the 2 MiB where its class found room last is not handed out again before what is free there, however
/// close it is; and another class that finds room higher makes no difference.
#[test]
fn a_cache_keeps_to_the_lowest_2_mib_with_room() {
    with_one_arena(0, 1 << 16, 1, |frames, _, cx| {
        let mut blocks: Vec<Frozen> = std::iter::from_fn(|| frames.alloc(&cx, request(9)).ok()).collect();
        blocks.sort_by_key(|block| block.pfn());
        let (low, next) = (blocks.remove(0), blocks.remove(0));
        let (low_extent, next_extent) = (low.extent(), next.extent());
        // The lowest 2 MiB has room for pages only.
        let (kept, given): (Vec<Frozen>, Vec<Frozen>) = std::iter::from_fn({
            let mut pages = frames.split(low, Order::ZERO).expect("managed");
            move || pages.pop()
        })
        .partition(|page| page.pfn().get() % 2 == 0);
        given.into_iter().for_each(|page| frames.free(&cx, page));
        let mut pages = frames.split(next, Order::ZERO).expect("managed");
        let high = pages.pop().expect("a page");
        frames.free_extent(&cx, pages.into_dirty());
        frames.drain(&cx);
        let mut held = vec![frames.alloc(&cx, request(0)).expect("memory")];
        let pair = frames.alloc(&cx, request(1)).expect("memory");
        assert!(low_extent.contains(held[0].pfn()) && next_extent.contains(pair.pfn()));
        frames.free(&cx, high);
        for _ in 0..200 {
            let page = frames.alloc(&cx, request(0)).expect("memory");
            assert!(low_extent.contains(page.pfn()), "{page:?}");
            held.push(page);
        }
        held.into_iter().chain(kept).chain([pair]).chain(blocks).for_each(|block| frames.free(&cx, block));
        frames.drain(&cx);
        assert_eq!(frames.stats(&cx).free, 1 << 16);
    });
}

/// Blocks of 2 MiB that a cache held are found again, whichever share a word of what is kept for them, or a place where those of a
/// word are gathered: 8 GiB apart, on both sides of a border between arenas, known to be zero and not.
#[test]
fn cached_2_mib_blocks_go_back_to_where_they_were() {
    const HUGE: u64 = 512;
    let (border, far) = (130 * HUGE, 64 * 64 * HUGE);
    with_arenas(
        &[arena(0, border, 0), arena(border, 70 * HUGE, 0), arena(far, 70 * HUGE, 0)],
        1,
        &[],
        |frames, _, mut cx| {
            let all = |cx: &_| -> Vec<Frozen> { core::iter::from_fn(|| frames.alloc(cx, request(9)).ok()).collect() };
            let mut held = all(&cx);
            assert_eq!(held.len(), 270);
            for (pair, zero) in [([border - HUGE, border], false), ([0, far], false), ([HUGE, 2 * HUGE], true)] {
                for pfn in pair {
                    let at = held.iter().position(|block| block.pfn().get() == pfn).expect("taken");
                    let block = held.swap_remove(at);
                    if zero && pfn == pair[0] {
                        // SAFETY: the handle owned the frames; there is no memory behind the numbers.
                        frames.free_zeroed(&cx, unsafe { Zeroed::assume_owned(block.into_dirty().into_extent()) });
                    } else {
                        frames.free(&cx, block);
                    }
                }
                assert_eq!(frames.stats(&cx).cached, 2 * HUGE);
                frames.drain(&cx);
                let stats = frames.stats(&cx);
                assert_eq!((stats.free, stats.blocks[9], stats.cached), (2 * HUGE, 2, 0), "{pair:?}");
                if !zero {
                    let claim =
                        |pfn| frames.alloc_contig_range(&mut cx, extent(pfn, HUGE), &mut NoMigration).expect("free");
                    let claimed = pair.map(claim);
                    claimed.into_iter().for_each(|claimed| _ = frames.free_extent(&cx, claimed));
                }
                let mut again: Vec<_> =
                    all(&cx).into_iter().map(|block| (block.pfn().get(), held.push(block)).0).collect();
                again.sort_unstable();
                assert_eq!(again, pair);
                assert_eq!(held.iter().filter(|block| block.is_zero()).count(), usize::from(zero));
            }
            held.into_iter().for_each(|block| frames.free(&cx, block));
            frames.drain(&cx);
            assert_eq!(frames.stats(&cx).free, 270 * HUGE);
        },
    );
}

/// What is broken already is used up before a whole 1 GiB is broken, though that lies lower: by pages, ranges of 2 MiB and all between;
/// and though what is broken is known to be zero, which nobody has asked for.
#[test]
#[cfg_attr(miri, ignore = "more than a gibibyte of descriptors")]
fn the_only_whole_gibibyte_is_broken_last() {
    for zero in [false, true] {
        broken_last(zero);
    }
}

fn broken_last(zero: bool) {
    // Broken by the end of memory, and by a page in use.
    with_one_arena(0, 2 * GIB - 512, 1, |frames, _, cx| {
        if zero {
            let range = frames.take_range(&cx, extent(GIB, GIB - 512)).expect("free").into_extent();
            // SAFETY: the test's own; there is no memory behind the numbers.
            frames.free_zeroed(&cx, unsafe { Zeroed::assume_owned(range) });
        }
        let (wholes, high) = (|| frames.stats(&cx).blocks[18], |block: &Frozen| block.pfn().get() >= GIB);
        let mut held = Vec::new();
        for log in [0, 1, 3, 4, 6, 8, 9, 10, 12, 16] {
            held.push(frames.alloc(&cx, request(log)).expect("memory"));
            assert!(held.iter().all(high), "order {log}: {held:?}");
            held.push(frames.alloc(&cx, request(log).movable()).expect("memory"));
            assert!(held.iter().all(high), "order {log}: {held:?}");
            assert_eq!(wholes(), 1);
        }
        let whole = frames.alloc(&cx, request(18)).expect("whole");
        assert_eq!(whole.pfn(), Pfn::new(0));
        frames.free(&cx, whole);
        // The other has nothing any more.
        held.extend(std::iter::from_fn(|| frames.alloc(&cx, request(9)).ok().filter(|block| block.pfn().get() >= GIB)));
        assert_eq!(wholes(), 0, "one more was taken");
        held.into_iter().for_each(|block| frames.free(&cx, block));
        frames.drain(&cx);
        let all = frames.stats(&cx);
        // Of one that is whole again, nobody knows less than before.
        assert!(all.blocks[18] >= 1 || all.free != 2 * GIB - 512, "{all:?}");
    });
}

/// A 1 GiB that was whole is no more when a block of it is taken, though that was all that there was.
#[test]
#[cfg_attr(miri, ignore = "more than a gibibyte of descriptors")]
fn a_broken_gibibyte_is_used_up_before_a_lower_one() {
    with_one_arena(0, 2 * GIB, 1, |frames, _, cx| {
        let low = frames.alloc(&cx, request(18)).expect("whole");
        let mut held: Vec<Frozen> = vec![frames.alloc(&cx, request(10)).expect("of the other")];
        frames.free(&cx, low);
        held.extend([10, 4, 12].map(|log| frames.alloc(&cx, request(log)).expect("memory")));
        assert!(held.iter().all(|block| block.pfn().get() >= GIB), "{held:?}");
        assert_eq!(frames.stats(&cx).blocks[18], 1);
        held.into_iter().for_each(|block| frames.free(&cx, block));
    });
}

/// A CPU's chunk may have become one of the other mobility since: nothing is taken there then.
#[test]
fn a_chunk_of_another_mobility_is_no_ones_own() {
    with_one_arena(0, 4096, 2, |frames, _, cx| {
        let first = frames.alloc(&cx, request(0).movable()).expect("memory");
        frames.free(&cx, first);
        frames.drain(&cx);
        // The same 2 MiB, and the same half of it.
        let unmovable = frames.alloc(&cx, request(0)).expect("memory");
        hugemm_threads::run_as(1);
        let others = frames.alloc(&cx, request(0).movable()).expect("memory");
        hugemm_threads::run_as(0);
        let movable = frames.alloc(&cx, request(0).movable()).expect("memory");
        let group = |block: &Frozen| block.pfn().get() / 512;
        assert_ne!(group(&movable), group(&unmovable));
        assert_ne!(movable.pfn().get() / 256, others.pfn().get() / 256, "apart from the other CPU's");
        [unmovable, others, movable].into_iter().for_each(|block| frames.free(&cx, block));
    });
}

/// 2 MiB that went back as a whole are not known any more for what was there before: all of it is found by the mobility that divides it
/// next, and by that of a block whose parts go back.
#[test]
fn pages_are_found_by_the_mobility_that_divided_them_last() {
    with_one_arena(0, 512, 1, |frames, _, cx| {
        let halves = |kind: AllocRequest| {
            let _ = [(); 2].map(|()| frames.alloc(&cx, kind).expect("a half").into_dirty().into_extent());
        };
        // SAFETY: all of it is ours, and there is no memory behind the numbers.
        let free_whole = || frames.free_extent(&cx, unsafe { Dirty::assume_owned(extent(0, 512)) });
        for log in [8, 0] {
            for kind in [request(8), request(8).movable()] {
                halves(kind);
                free_whole();
            }
            let mut parts = frames.split(frames.alloc(&cx, request(9)).expect("whole"), order(log)).expect("managed");
            let part = parts.pop().expect("the first");
            let place = part.pfn();
            frames.free(&cx, part);
            frames.drain(&cx);
            let again = frames.alloc(&cx, request(log)).expect("what has just been freed");
            assert_eq!(again.pfn(), place);
            let _ = (again.into_dirty(), parts.into_dirty());
            free_whole();
        }
    });
}
