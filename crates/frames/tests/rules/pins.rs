//! How long a CPU keeps interrupts off, in lock rounds.

use super::request;
use super::slabs::alloc_piece;
use super::support::{
    Counted, Memory, Threads, busy, counted_pages, extent, lock_rounds, meeting, most_rounds, pages, with_counted,
    with_one_arena,
};
use super::words::{all_free, free, take};
use crate::support::arena;
use hugemm_base::lock::SpinLock;
use hugemm_base::platform::{PhysMap, Window};
use hugemm_base::{CpuCx, CpuId, Dirty, Extent, FrameUse, NodeId, Order, PageSize, Pfn, VirtAddr, Zeroed, with};
use hugemm_frames::{
    AllocContigError, AllocError, AllocRequest, Frames, Frozen, NoMigration, NodeStats, Put, ROUNDS_PER_PIN, Slab,
};
use hugemm_threads::run_as;
use std::alloc::Layout;
use std::collections::HashMap;
use std::sync::Mutex;

const BLOCK: Order = PageSize::Size2M.order();

type Step = fn(&Frames<'_, Counted>, &mut CpuCx<'_, Threads>, &mut Vec<Frozen>);

/// Every call that may give back what its CPU has cached.
const STEPS: [(&str, Step); 21] = [
    ("a refill", |frames, cx, held| held.extend(frames.alloc(cx, request(0).movable()).ok())),
    ("a block of 32 pages", |frames, cx, held| held.extend(frames.alloc(cx, request(5)).ok())),
    ("a block that there is not", |frames, cx, held| held.extend(frames.alloc(cx, request(18)).ok())),
    ("below", |frames, cx, held| held.extend(frames.alloc_below(cx, Pfn::new(1 << 20), request(0)).ok())),
    ("below, where there is nothing", |frames, cx, held| {
        held.extend(frames.alloc_below(cx, Pfn::new(64), request(6)).ok())
    }),
    ("a range", |frames, cx, _| {
        let range = frames.take_range(cx, extent(1 << 19, 512));
        range.into_iter().for_each(|range| _ = frames.free_extent(cx, range));
    }),
    ("a drain", |frames, cx, _| frames.drain(cx)),
    // SAFETY: it runs nothing else.
    ("a drain for another", |frames, cx, _| unsafe { frames.drain_offline(cx, CpuId::new(0)) }),
    ("a request", |frames, cx, _| frames.serve(cx)),
    ("a free", |frames, cx, held| free(frames, cx, held.pop())),
    ("extents", |frames, cx, held| held.drain(..).for_each(|block| _ = frames.free_extent(cx, block.into_dirty()))),
    ("counted pages", |frames, cx, held| {
        let pages = held.drain(..1000).map(|block| frames.count(block).expect("managed"));
        pages.for_each(|page| assert_eq!(frames.put(cx, page), Ok(Put::Last)));
        let blocks = held.extract_if(.., |block| block.order() == BLOCK).take(100);
        let folios = blocks.map(|block| frames.count(block).expect("managed"));
        folios.for_each(|folio| assert_eq!(frames.put(cx, folio), Ok(Put::Last)));
    }),
    ("ranges", |frames, cx, held| {
        for block in held.extract_if(.., |block| block.order() == BLOCK).take(100) {
            let run = counted_pages(frames, block);
            assert_eq!(frames.free_range(cx, pages(run)).freed, 512);
        }
    }),
    ("references to a range", |frames, cx, held| {
        for block in held.extract_if(.., |block| block.order() == BLOCK).take(100) {
            let run = counted_pages(frames, block);
            let put = frames.put_range(cx, pages(run), |cx, owned| _ = frames.free_extent(cx, owned));
            assert_eq!(put.freed, 512);
        }
    }),
    ("without waiting", |frames, cx, held| {
        held.drain(..1000).for_each(|block| frames.free_nowait(cx, block));
        held.extend((0..1000).filter_map(|_| frames.alloc_nowait(cx, request(0)).ok()));
    }),
    ("a use", |frames, cx, held| {
        held.drain(..1000).for_each(|block| {
            cx.count_frames(FrameUse::HEAP, 1);
            frames.free_for(cx, FrameUse::HEAP, block);
        });
        let block = frames.alloc_for(cx, FrameUse::HEAP, request(9)).expect("memory");
        frames.free_for(cx, FrameUse::HEAP, block);
    }),
    ("a claim", |frames, cx, _| {
        // In use, and free.
        let used = frames.alloc_contig_range(cx, extent(0, 1 << 12), &mut NoMigration);
        assert!(matches!(used, Err(AllocContigError::InUse(_))), "{used:?}");
        let taken = frames.alloc_contig_range(cx, extent(1 << 20, 1 << 12), &mut NoMigration).expect("free");
        frames.free_extent(cx, taken);
    }),
    ("rows", |frames, cx, held| {
        for count in [19, 3000] {
            held.push(frames.alloc(cx, request(0)).expect("memory"));
            let row = frames.alloc_exact(cx, count, request(0)).expect("memory");
            frames.free_extent(cx, row);
            let row = frames.alloc_row(cx, count, request(0), |_| true).expect("memory");
            frames.free_extent(cx, row);
        }
        assert!(frames.alloc_row(cx, 40, request(0), |_| false).is_err());
    }),
    ("an arena", |frames, cx, _| {
        let spec = arena(1 << 30, 2048, 0);
        super::added::add(frames, &spec).expect("room");
        // SAFETY: once; there is no memory behind the numbers.
        unsafe { frames.release_extent(cx, spec.extent) };
        let all = frames.alloc_contig_range(cx, spec.extent, &mut NoMigration).expect("free");
        // SAFETY: nobody else knows its frames.
        let removed = unsafe { frames.remove(cx, all, |_| ()) };
        assert!(removed.is_ok());
    }),
    ("a reserve", |frames, cx, _| {
        assert_eq!(frames.keep_reserve(cx, 1000), 1000);
        frames.fill_reserve(cx);
        frames.keep_reserve(cx, 0);
    }),
    ("small objects", |frames, cx, _| {
        let (slab, map) = (Slab::<SpinLock>::new(100, 8).expect("fits"), Anywhere::default());
        let objects: Vec<_> = (0..4000).map(|_| alloc_piece(&slab, frames, cx, &map).expect("memory")).collect();
        // SAFETY: the slab's, freed once; its frames and map.
        unsafe {
            objects.into_iter().for_each(|object| slab.free(frames, cx, &map, object));
            slab.trim(frames, cx, &map);
        }
    }),
];

/// A page of memory behind each frame, from when it is first asked for.
#[derive(Default)]
struct Anywhere(Mutex<HashMap<u64, Memory>>);

// SAFETY: each frame has a page of its own, for as long as there is the map.
unsafe impl PhysMap for Anywhere {
    fn open(&self, extent: Extent, _: Option<VirtAddr>) -> Option<Window> {
        let mut pages = self.0.lock().expect("no panic");
        let page = || Memory::new(Layout::from_size_align(4096, 4096).expect("valid"));
        let page = pages.entry(extent.base().get()).or_insert_with(page);
        Some(Window { ptr: page.bytes().as_mut_ptr(), pages: 1 })
    }
}

/// Frees a block, as zero or not.
fn free_as(frames: &Frames<'_, Counted>, cx: &CpuCx<'_, Threads>, block: Frozen, zero: bool) {
    if zero {
        // SAFETY: ours; there is no memory behind the numbers.
        frames.free_zeroed(cx, unsafe { Zeroed::assume_owned(block.into_dirty().into_extent()) });
    } else {
        frames.free(cx, block);
    }
}

/// Makes a CPU's cache as full as it gets, with 48 Ki single pages in 2 Ki words and 2 MiB blocks of both mobilities, zero and dirty by turns;
/// no two pages and no two blocks of a run side by side. What is left of them comes back.
fn fill(frames: &Frames<'_, Counted>, threads: &Threads) -> Vec<Frozen> {
    let cx = &threads.cx();
    let mut pages = take(frames, cx, 0, 1 << 17);
    let mut kept = pages.split_off(48 << 10);
    let mut blocks: Vec<Frozen> = (0..1600)
        .filter_map(|at| frames.alloc(cx, if at % 2 == 0 { request(9) } else { request(9).movable() }).ok())
        .collect();
    frames.drain(cx);
    kept.extend(blocks.split_off(1200));
    for (at, block) in blocks.into_iter().enumerate() {
        let most = most_rounds(threads, |cx| free_as(frames, cx, block, at / 2 % 2 == 0));
        assert!(most <= ROUNDS_PER_PIN, "the free of a 2 MiB block: {most} lock rounds in one pin");
    }
    for (at, block) in pages.into_iter().enumerate() {
        let most = most_rounds(threads, |cx| free_as(frames, cx, block, at % 64 == 0));
        assert!(most <= ROUNDS_PER_PIN, "the free of a page: {most} lock rounds in one pin");
    }
    kept
}

/// However much a CPU has cached, and whatever of: it goes back in many short pins, not in a long one. On one node; and on three, beside a
/// poisoned frame in use, which every CPU is asked for.
#[test]
#[cfg_attr(miri, ignore = "eight gibibytes of descriptors")]
fn no_call_takes_more_rounds_in_one_pin_than_is_said() {
    for ((name, step), (nodes, asked)) in STEPS.iter().flat_map(|step| [(1, false), (3, true)].map(|case| (step, case)))
    {
        let arenas: Vec<_> = (0..nodes).map(|node| arena(u64::from(node) << 21, 1 << 21, node)).collect();
        with_counted(&arenas, 2, &[], |frames, threads, _| {
            let mut kept = fill(frames, threads);
            let cx = threads.cx();
            assert!(frames.stats(&cx).cached > 64 << 10, "{:?}", frames.stats(&cx));
            if asked {
                run_as(1);
                frames.hwpoison(&cx, kept[0].pfn());
                run_as(0);
            }
            let rounds = most_rounds(threads, |cx| step(frames, cx, &mut kept));
            let most = ROUNDS_PER_PIN + u64::from(nodes);
            assert!(rounds <= most, "{name}, {nodes} nodes, asked {asked}: {rounds} lock rounds in one pin");
            free(frames, &cx, kept);
            assert_eq!(all_free(frames, &cx, 2), (u64::from(nodes) << 21) - u64::from(asked));
        });
    }
}

/// What is released and freed by its extent is, by parts of 64 GiB; what is taken by it is at once.
#[test]
#[cfg_attr(miri, ignore = "many gibibytes of descriptors")]
fn a_pin_frees_64_gib() {
    const GIB: u64 = 1 << 18;
    with_counted(&[arena(GIB, 130 * GIB, 0)], 1, &[], |frames, threads, cx| {
        let (all, taken) = (extent(GIB, 130 * GIB), extent(GIB + 700, 130 * GIB - 1000));
        assert_eq!(frames.stats(&cx).lock_rounds, 3 + 1, "1 to 64 GiB, to 128 and to 131; and the look");
        for wanted in [all, taken] {
            let before = lock_rounds();
            let range = frames.take_range(&cx, wanted).expect("free");
            assert_eq!(lock_rounds() - before, 1);
            let most = most_rounds(threads, |cx| assert_eq!(frames.free_extent(cx, range), wanted.pages()));
            assert_eq!((most, lock_rounds() - before), (1, 1 + 3));
        }
        let stats = frames.stats(&cx);
        assert_eq!((stats.blocks[18], stats.free), (130, 130 * GIB), "whole again");
    });
}

/// A table has one place for words whose numbers are the same modulo its size, and they displace each other: as many as a cache has pages go
/// back in no more rounds, and those of the other kind, too.
#[test]
#[cfg_attr(miri, ignore = "a gibibyte of descriptors")]
fn words_that_displace_each_other_take_no_more_rounds() {
    with_counted(&[arena(0, 1 << 18, 0)], 1, &[], |frames, threads, cx| {
        let mut pages: Vec<Option<Frozen>> = take(frames, &cx, 0, 1 << 18).into_iter().map(Some).collect();
        assert_eq!(pages.len(), 1 << 18);
        pages.sort_by_key(|page| page.as_ref().map(|page| page.pfn().get()));
        let mut most = 0;
        // One page of each of 4096 words, of which 8 share a place each; and so on.
        for at in (0..20).flat_map(|page| (0..4096).map(move |word| word * 64 + page)) {
            let page = pages[at].take().expect("once");
            most = most.max(most_rounds(threads, |cx| free_as(frames, cx, page, at % 5 == 0)));
        }
        most = most.max(most_rounds(threads, |cx| frames.drain(cx)));
        assert!(
            (8..=ROUNDS_PER_PIN).contains(&most),
            "{most} lock rounds in one pin: the bound is nearly reached, and kept"
        );
        free(frames, &cx, pages.into_iter().flatten());
        assert_eq!(all_free(frames, &cx, 1), 1 << 18);
    });
    // Whoever has taken much has a wider cache, and begins to free with a full one.
    with_counted(&[arena(0, 1 << 18, 0)], 1, &[], |frames, threads, cx| {
        let mut pages: Vec<Option<Frozen>> = Vec::new();
        meeting(|| pages = take(frames, &cx, 0, 1 << 18).into_iter().map(Some).collect());
        pages.sort_by_key(|page| page.as_ref().map(|page| page.pfn().get()));
        let mut most = 0;
        // One page of each word, of which 32 share each of 128 places; and so on.
        for at in (0..2).flat_map(|page| (0..4096).filter(|word| word % 512 < 128).map(move |word| word * 64 + page)) {
            let page = pages[at].take().expect("once");
            most = most.max(most_rounds(threads, |cx| free_as(frames, cx, page, at % 5 == 0)));
        }
        assert!((4..=ROUNDS_PER_PIN).contains(&most), "{most} lock rounds in one pin");
        free(frames, &cx, pages.into_iter().flatten());
        assert_eq!(all_free(frames, &cx, 1), 1 << 18);
    });
    // 2 MiB: 128 words of 128 MiB, zero and dirty ones by turns.
    with_counted(&[arena(0, 1 << 22, 0)], 1, &[], |frames, threads, cx| {
        // 128 times 128 MiB are counted, a pin for each.
        let (before, rounds, mut after) = (frames.stats(&cx), lock_rounds(), NodeStats::default());
        let most = most_rounds(threads, |cx| after = frames.stats(cx));
        assert_eq!((most, lock_rounds() - rounds), (1, 128));
        assert_eq!(after, with!(before, lock_rounds = before.lock_rounds + 1));
        assert_eq!((after.free, after.blocks[18]), (1 << 22, 16), "no region is counted twice, or left out");
        let mut blocks: Vec<Option<Frozen>> = take(frames, &cx, 9, 1 << 13).into_iter().map(Some).collect();
        assert_eq!(blocks.len(), 1 << 13);
        blocks.sort_by_key(|block| block.as_ref().map(|block| block.pfn().get()));
        let mut most = 0;
        for at in (0..64).flat_map(|block| (0..128).map(move |word| word * 64 + block)) {
            let block = blocks[at].take().expect("once");
            most = most.max(most_rounds(threads, |cx| free_as(frames, cx, block, at % 3 == 0)));
        }
        most = most.max(most_rounds(threads, |cx| frames.drain(cx)));
        assert!((1..=ROUNDS_PER_PIN).contains(&most), "{most} lock rounds in one pin");
        assert_eq!(all_free(frames, &cx, 1), 1 << 22);
    });
}

/// Searches go past no more than so many places that have nothing in one round.
const LOOKS: u64 = 64;

type Call = fn(&Frames<'_, Counted>, &CpuCx<'_, Threads>, AllocRequest) -> Option<Frozen>;

/// The ways to allocate from the nodes.
const CALLS: [Call; 3] = [
    |frames, cx, request| frames.alloc(cx, request).ok(),
    |frames, cx, request| frames.alloc_below(cx, Pfn::new(1 << 30), request).ok(),
    |frames, cx, request| frames.alloc_nowait(cx, request).ok(),
];

/// How many rounds a call takes, few of them in one pin; and what comes of it.
fn rounds_of(
    frames: &Frames<'_, Counted>,
    threads: &Threads,
    call: Call,
    request: AllocRequest,
) -> (u64, Option<Frozen>) {
    let (mut block, before) = (None, frames.stats(&threads.cx()).lock_rounds);
    let most = most_rounds(threads, |cx| block = call(frames, cx, request));
    assert!(most <= 3, "{request:?}: {most} lock rounds in one pin");
    (frames.stats(&threads.cx()).lock_rounds - before - 1, block)
}

/// Of 2 MiB blocks that seem to have room and have none, a search passes by a few in a round, and goes on in the next.
#[test]
#[cfg_attr(miri, ignore = "a gibibyte of descriptors")]
fn a_search_passes_by_a_few_in_a_round() {
    const GROUPS: u64 = 500;
    with_counted(&[arena(0, GROUPS << 9, 0)], 1, &[], |frames, threads, cx| {
        let all = frames.take_range(&cx, extent(0, GROUPS << 9)).expect("free").into_extent();
        // Room for 16 pages each, of which 8 are taken again: that says nothing to whoever seeks 16, until he looks.
        let groups = || all.chunks(Order::new(9).expect("valid")).map(|(base, _)| base.get());
        let free_again = |base, count| {
            // SAFETY: the test's own, once.
            frames.free_extent(&cx, unsafe { Dirty::assume_owned(extent(base, count)) })
        };
        let again = |last: u64| {
            groups().for_each(|base| _ = free_again(base, 16));
            frames.drain(&cx);
            for base in groups().filter(|base| base >> 9 != last) {
                _ = frames.take_range(&cx, extent(base + 8, 8)).expect("free");
            }
        };
        let take_rest = || {
            frames.drain(&cx);
            groups().for_each(|base| _ = frames.take_range(&cx, extent(base, 8)));
        };
        for call in CALLS {
            again(GROUPS);
            let (rounds, none) = rounds_of(frames, threads, call, request(4));
            assert!(none.is_none() && rounds >= GROUPS / LOOKS, "{rounds} lock rounds");
            let (rounds, none) = rounds_of(frames, threads, call, request(4));
            // One to search, and one to see that nothing is cached.
            assert!(none.is_none() && rounds <= 2, "all of them have been looked at: {rounds} lock rounds");
            take_rest();
            again(GROUPS - 1);
            let (rounds, last) = rounds_of(frames, threads, call, request(4));
            assert!(rounds >= GROUPS / LOOKS, "{rounds} lock rounds");
            assert_eq!(last.map(|block| block.pfn().get()), Some((GROUPS - 1) << 9), "it is found all the same");
            take_rest();
            free_again((GROUPS - 1) << 9, 16);
            take_rest();
            _ = frames.take_range(&cx, extent(((GROUPS - 1) << 9) + 8, 8)).expect("free");
        }
    });
}

/// The same of 1 GiB regions, of which an arena each: that seem to have 4 MiB, and of which all are looked at when nobody has 8.
#[test]
#[cfg_attr(miri, ignore = "two gibibytes of descriptors")]
fn a_search_passes_by_a_few_regions_in_a_round() {
    const REGIONS: u64 = 300;
    let arenas: Vec<_> = (0..REGIONS).map(|at| arena(at << 18, 1024, 0)).collect();
    with_counted(&arenas, 1, &[], |frames, threads, cx| {
        // What is cached could make it, as far as one knows before all of them have been looked at.
        let page = frames.alloc(&cx, request(0)).expect("memory");
        free(frames, &cx, [page]);
        let (rounds, none) = rounds_of(frames, threads, CALLS[0], request(11));
        assert!(none.is_none() && rounds >= REGIONS / LOOKS, "{rounds} lock rounds");
        frames.drain(&cx);
        for (call, last) in CALLS.into_iter().flat_map(|call| [(call, REGIONS), (call, REGIONS - 1)]) {
            let bases: Vec<u64> = (0..REGIONS).filter(|at| *at != last).map(|at| at << 18).collect();
            let taken: Vec<_> =
                bases.iter().map(|base| frames.take_range(&cx, extent(*base, 512)).expect("free")).collect();
            let (rounds, found) = rounds_of(frames, threads, call, request(10));
            assert!(rounds >= REGIONS / LOOKS, "{rounds} lock rounds");
            assert_eq!(found.as_ref().map(|block| block.pfn().get() >> 18), (last < REGIONS).then_some(last));
            free(frames, &cx, found);
            taken.into_iter().for_each(|range| _ = frames.free_extent(&cx, range));
            frames.drain(&cx);
        }
        assert_eq!(all_free(frames, &cx, 1), REGIONS << 10);
    });
}

/// What others have queued is freed a part at a time, by whoever takes the lock; nothing of it is overlooked.
#[test]
fn a_lock_round_frees_a_part_of_what_is_queued() {
    with_counted(&[arena(0, 4096, 0)], 1, &[NodeId::new(0)], |frames, _, cx| {
        let blocks = take(frames, &cx, 0, 4096);
        assert_eq!(blocks.len(), 4096);
        busy(|| blocks.into_iter().for_each(|block| frames.free_nowait(&cx, block)));
        let before = frames.stats(&cx);
        assert!(before.available() == 4096 && before.free <= 64, "{before:?}");
        let after = frames.stats(&cx);
        assert!(after.available() == 4096 && after.free <= 128, "{after:?}");
        let large = frames.alloc(&cx, request(12)).expect("all of it");
        frames.free(&cx, large);
        assert_eq!(all_free(frames, &cx, 1), 4096);
    });
}

/// Who is interrupted again and again by others who queue more comes to an end all the same.
#[test]
fn what_is_queued_meanwhile_holds_nobody_up_for_ever() {
    type Call = fn(&Frames<'_, Counted>, &CpuCx<'_, Threads>);
    let calls: [Call; 2] = [
        |frames, cx| assert_eq!(frames.alloc(cx, request(16)), Err(AllocError::OutOfMemory)),
        |frames, cx| frames.drain(cx),
    ];
    for call in calls {
        with_counted(&[arena(0, 1 << 16, 0)], 1, &[], |frames, threads, cx| {
            let mut blocks = take(frames, &cx, 0, 1 << 16);
            let kept = blocks.pop();
            // More than a round frees, before and after each pin.
            let queue = |cx: &mut CpuCx<'_, Threads>| {
                let some = blocks.drain(blocks.len().saturating_sub(40)..);
                some.for_each(|block| busy(|| frames.free_nowait(cx, block)));
            };
            threads.interrupted(queue, |cx| call(frames, cx));
            assert!(!blocks.is_empty(), "it has waited until nothing was queued any more");
            free(frames, &cx, blocks.into_iter().chain(kept));
            frames.alloc(&cx, request(16)).map(|all| frames.free(&cx, all)).expect("all of it");
            assert_eq!(all_free(frames, &cx, 1), 1 << 16);
        });
    }
}

/// A block of an order that is only gathered is taken and freed in a pin each, without a lock round.
#[test]
fn a_pair_takes_two_pins() {
    with_one_arena(0, 1 << 14, 1, |frames, threads, _| {
        for order in [0, 4, 6, 8] {
            let block = frames.alloc(&threads.cx(), request(order)).expect("memory");
            frames.free(&threads.cx(), block);
            let before = frames.stats(&threads.cx()).lock_rounds;
            // The look is a round, and a visit to the node.
            let block = frames.alloc(&threads.cx(), request(order)).expect("memory");
            frames.free(&threads.cx(), block);
            let mut points = 0;
            threads.interrupted(
                |_| points += 1,
                |cx| {
                    let block = frames.alloc(cx, request(order)).expect("memory");
                    frames.free(cx, block);
                },
            );
            assert_eq!(points, 4, "order {order}: one before and one after each pin");
            let rounds = frames.stats(&threads.cx()).lock_rounds - before;
            assert_eq!(rounds, if order == 0 { 1 } else { 2 }, "order {order}");
        }
    });
}

/// Between two pins a task may come to another CPU, and has that one's words too.
#[test]
#[cfg_attr(miri, ignore = "takes minutes; a pair goes the same ways")]
fn what_another_cpu_has_gathered_is_found_by_a_task_that_comes_there() {
    // Before the first pin, and between two.
    for moved in 0..3 {
        with_one_arena(0, 1 << 16, 2, |frames, threads, cx| {
            let wanted = extent(0, 32);
            run_as(1);
            let (low, rest): (Vec<_>, Vec<_>) =
                take(frames, &cx, 0, 4096).into_iter().partition(|block| wanted.contains(block.pfn()));
            let (high, kept): (Vec<_>, Vec<_>) =
                rest.into_iter().partition(|block| block.pfn().get() >= 64 && block.pfn().get() % 64 >= 32);
            free(frames, &cx, low);
            // On the stack, where they would count as in use, are these by now.
            free(frames, &cx, high);
            run_as(0);
            // This CPU has a round of its own, and so two pins.
            let (own, rest): (Vec<_>, Vec<_>) =
                take(frames, &cx, 0, 4096).into_iter().partition(|block| block.pfn().get() % 64 < 32);
            free(frames, &cx, own);
            let (mut looks, mut taken) = (0, None);
            let move_on = |_: &mut CpuCx<'_, Threads>| {
                if looks == moved {
                    run_as(1);
                }
                looks += 1;
            };
            threads.interrupted(move_on, |cx| taken = frames.take_range(cx, wanted).ok());
            let Some(taken) = taken else { panic!("not found where the task moved after {moved} of {looks} looks") };
            frames.free_extent(&cx, taken);
            free(frames, &cx, kept);
            free(frames, &cx, rest);
            assert_eq!(all_free(frames, &cx, 2), 1 << 16);
        });
    }
}

/// Who finds another CPU at the node each time fetches twice as much, and comes half as often.
#[test]
fn who_meets_others_at_the_node_comes_less_often() {
    with_counted(&[arena(0, 1 << 18, 0)], 1, &[], |frames, threads, _| {
        let cx = &threads.cx();
        let take = || drop(take(frames, cx, 0, 1 << 14));
        // The cache is as large as it gets.
        take();
        let before = frames.stats(cx).lock_rounds;
        take();
        let alone = frames.stats(cx).lock_rounds - before;
        meeting(take);
        let met = meeting(take);
        assert!(alone >= 2 * met - 2, "{alone} lock rounds alone, {met} with others");
    });
}
