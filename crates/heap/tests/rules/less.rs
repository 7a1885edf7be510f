//! Memory that becomes less: never for want of memory an error. Blocks are as large as was asked for.

use super::{fill, free, holds, layout, realloc, with_heap};
use hugemm_heap::{HeapError, usable_size};
use hugemm_threads::run_as;
use std::ptr::NonNull;

/// A block that becomes a smaller one stays where it is, and gives its upper part back.
#[test]
fn a_block_gives_its_upper_part_back() {
    with_heap(24, |_, frames, heap, cx| {
        let mib = 1 << 20;
        let cases =
            [(8 * mib, 4 * mib), (8 * mib, 5 * mib), (mib, 6200), (64 << 10, 20_000), (8192, 4096), (40_000, 36_000)];
        for (from, to) in cases {
            let memory = heap.alloc(&cx, layout(from, 8)).expect("memory");
            fill(memory, layout(from, 8), 3);
            assert_eq!(heap.stats().pages, (usable_size(layout(from, 8)).expect("some") >> 12) as u64);
            // There is nothing else.
            let rest: Vec<_> = std::iter::from_fn(|| frames.alloc(&cx, hugemm_base::Order::ZERO).ok()).collect();
            let before = frames.available(&cx);
            let less = realloc(heap, &cx, memory, layout(from, 8), to);
            assert_eq!(less, Ok(memory), "{from} to {to}");
            assert!(holds(memory, layout(to, 8), 3));
            let kept = (usable_size(layout(to, 8)).expect("some") >> 12) as u64;
            assert_eq!(heap.stats().pages, kept);
            // What went back is others' now.
            let gone = (usable_size(layout(from, 8)).expect("some") >> 12) as u64 - kept;
            assert_eq!(frames.available(&cx), before + gone, "{from} to {to}");
            let others: Vec<_> = std::iter::from_fn(|| frames.alloc(&cx, hugemm_base::Order::ZERO).ok()).collect();
            assert!(holds(memory, layout(to, 8), 3) && others.len() as u64 >= gone);
            free(heap, &cx, memory, layout(to, 8));
            rest.into_iter().chain(others).for_each(|block| frames.free(&cx, block));
        }
        assert_eq!((heap.stats().misused, heap.stats().failed), (0, 0));
    });
}

/// What is to become a piece and finds none stays, and is freed as what it is, by whichever CPU; again and again.
#[test]
fn what_finds_no_smaller_piece_stays() {
    let sizes = [64 << 10, 20_000, 8192, 4096, 6000, 5000, 2048, 1000, 300];
    for freer in [0, 1] {
        with_heap(8, |_, frames, heap, cx| {
            for from in sizes {
                for to in [6000, 4096, 3000, 2048, 1000, 24].into_iter().filter(|to| *to < from) {
                    let memory = heap.alloc(&cx, layout(from, 8)).expect("memory");
                    fill(memory, layout(from, 8), 9);
                    let rest: Vec<_> =
                        std::iter::from_fn(|| frames.alloc(&cx, hugemm_base::Order::ZERO).ok()).collect();
                    let less = realloc(heap, &cx, memory, layout(from, 8), to);
                    let less = less.unwrap_or_else(|error| panic!("{from} to {to}: {error}"));
                    assert!(holds(less, layout(to, 8), 9), "{from} to {to}");
                    // And less once more, where it is.
                    let least = realloc(heap, &cx, less, layout(to, 8), 16).expect("less");
                    assert!(holds(least, layout(16, 8), 9), "{from} to {to}");
                    rest.into_iter().for_each(|block| frames.free(&cx, block));
                    // More is elsewhere, if there is memory.
                    let more = realloc(heap, &cx, least, layout(16, 8), 200).expect("memory");
                    assert!(holds(more, layout(16, 8), 9), "{from} to {to}");
                    run_as(freer);
                    free(heap, &cx, more, layout(200, 8));
                    run_as(0);
                    heap.trim(&cx);
                    assert_eq!((heap.stats().pages, heap.stats().misused), (0, 0), "{from} to {to}");
                }
            }
        });
    }
}

/// The same, freed while it stays, among much else that does not; so do two pieces that are a pair.
#[test]
fn what_stays_is_freed_as_what_it_is() {
    with_heap(8, |_, frames, heap, cx| {
        for pair in [false, true] {
            let others: Vec<NonNull<u8>> =
                (0..40).map(|at| heap.alloc(&cx, layout([24, 2048][at % 2], 8)).expect("memory")).collect();
            let mut stays = Vec::new();
            for size in [4096, 6144, 5000, 20_000] {
                stays.push((heap.alloc(&cx, layout(size, 8)).expect("memory"), size));
            }
            for _ in 0..if pair { 5 } else { 0 } {
                let memory = heap.alloc(&cx, layout(2048, 8)).expect("memory");
                stays.push((realloc(heap, &cx, memory, layout(2048, 8), 4096).expect("memory"), 4096));
            }
            stays.iter().enumerate().for_each(|(at, (memory, size))| fill(*memory, layout(*size, 8), at as u8));
            let rest: Vec<_> = std::iter::from_fn(|| frames.alloc(&cx, hugemm_base::Order::ZERO).ok()).collect();
            for (at, (memory, size)) in stays.iter_mut().enumerate() {
                let to = [700, 2560, 2000, 3072][at % 4];
                *memory = realloc(heap, &cx, *memory, layout(*size, 8), to).expect("less");
                *size = to;
            }
            for (cpu, (at, (memory, size))) in stays.into_iter().enumerate().enumerate() {
                assert!(holds(memory, layout(size, 8), at as u8));
                run_as(cpu as u32 % 2);
                free(heap, &cx, memory, layout(size, 8));
            }
            run_as(0);
            for (at, memory) in others.into_iter().enumerate() {
                free(heap, &cx, memory, layout([24, 2048][at % 2], 8));
            }
            rest.into_iter().for_each(|block| frames.free(&cx, block));
            assert_eq!((heap.stats().misused, heap.stats().last_misuse), (0, None));
        }
    });
}

/// What a block is, is what the heap has said of it, not what its frame's last owner left in the descriptor. Red in release builds only
/// (`make test-release`): debug builds look before they believe a free.
#[test]
fn a_block_is_no_slab_for_what_was_said_of_its_frame() {
    const WORD: usize = 7;
    with_heap(8, |_, frames, heap, cx| {
        let available = frames.available(&cx);
        let piece = heap.alloc(&cx, layout(6000, 8)).expect("memory");
        let one = frames.alloc(&cx, hugemm_base::Order::ZERO).expect("memory");
        let near = one.pfn().get().saturating_sub(8 << 8)..one.pfn().get() + (8 << 8);
        frames.free(&cx, one);
        let said = |pfn| frames.descriptor(hugemm_base::Pfn::new(pfn)).map(|desc| desc.load(WORD));
        let slab = near.filter_map(said).find(|said| *said != 0).expect("a slab's descriptor says so");
        // Another owner's words are his business.
        let mut blocks: Vec<_> = std::iter::from_fn(|| frames.alloc(&cx, hugemm_base::Order::ZERO).ok()).collect();
        blocks.iter_mut().for_each(|block| frames.descriptor_mut(block).expect("the manager's").store(WORD, slab));
        blocks.into_iter().for_each(|block| frames.free(&cx, block));
        // Something stays, so frees ask what memory is.
        let large = heap.alloc(&cx, layout(64 << 10, 8)).expect("memory");
        let rest: Vec<_> = std::iter::from_fn(|| frames.alloc(&cx, hugemm_base::Order::ZERO).ok()).collect();
        let stays = realloc(heap, &cx, large, layout(64 << 10, 8), 1000).expect("less");
        rest.into_iter().for_each(|block| frames.free(&cx, block));
        let before = heap.stats().pages;
        let memory: Vec<_> = (0..20).map(|_| heap.alloc(&cx, layout(4096, 8)).expect("memory")).collect();
        memory.iter().for_each(|memory| fill(*memory, layout(4096, 8), 7));
        for memory in memory {
            free(heap, &cx, memory, layout(4096, 8));
        }
        assert_eq!(heap.stats().pages, before, "blocks came back as blocks");
        free(heap, &cx, stays, layout(1000, 8));
        free(heap, &cx, piece, layout(6000, 8));
        heap.trim(&cx);
        frames.drain(&cx);
        assert_eq!((heap.stats().pages, heap.stats().misused, frames.available(&cx)), (0, 0, available));
    });
}

/// A block takes the pages that it needs, also where no power of two of them is free.
#[test]
fn large_blocks_are_rows_of_pages() {
    with_heap(16, |_, _, heap, cx| {
        for pages in [9, 10, 33, 100, 513, 700, 1025] {
            let wanted = layout(pages * 4096 - 5, 8);
            let memory = heap.alloc(&cx, wanted).expect("memory");
            assert_eq!((heap.stats().pages, usable_size(wanted)), (pages as u64, Some(pages * 4096)));
            fill(memory, wanted, 1);
            free(heap, &cx, memory, wanted);
        }
        // Some of the 16 MiB is in use, so no power of two is left from which these could be cut.
        assert_eq!(heap.alloc(&cx, layout(16 << 20, 8)), Err(HeapError::OutOfMemory));
        for wanted in [layout(13 << 20, 8), layout((9 << 20) - 4096, 8), layout(10 << 20, 1 << 20)] {
            let memory = heap.alloc(&cx, wanted).expect("that much in a row");
            assert!(memory.addr().get().is_multiple_of(wanted.align()));
            fill(memory, wanted, 2);
            let less = realloc(heap, &cx, memory, wanted, 8 << 20).expect("less");
            assert!(less == memory && holds(less, layout(8 << 20, 8), 2));
            let less = realloc(heap, &cx, less, layout(8 << 20, wanted.align()), 30_000).expect("less");
            free(heap, &cx, less, layout(30_000, wanted.align()));
            let zeroed = heap.alloc_zeroed(&cx, wanted).expect("that much in a row");
            assert!(holds(zeroed, wanted, 0));
            free(heap, &cx, zeroed, wanted);
        }
    });
}

/// A row begins where its alignment says: what is long enough from elsewhere on is none.
#[test]
fn a_row_is_aligned() {
    with_heap(8, |_, frames, heap, cx| {
        let order = |order| hugemm_base::Order::new(order).expect("valid");
        let all: Vec<_> = std::iter::from_fn(|| frames.alloc(&cx, order(0)).ok()).collect();
        // A hole of 256 KiB, 64 KiB after a multiple of 2 MiB.
        let first = all.iter().map(|page| page.pfn().get()).min().expect("some").next_multiple_of(512);
        let (given, kept): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|page| (first + 16..first + 80).contains(&page.pfn().get()));
        assert_eq!(given.len(), 64);
        given.into_iter().for_each(|page| frames.free(&cx, page));
        frames.drain(&cx);
        assert_eq!(heap.alloc(&cx, layout(64 << 12, 128 << 10)), Err(HeapError::OutOfMemory));
        let wanted = layout(64 << 12, 64 << 10);
        let row = heap.alloc(&cx, wanted).expect("there is one");
        assert!(row.addr().get().is_multiple_of(wanted.align()));
        free(heap, &cx, row, wanted);
        kept.into_iter().for_each(|page| frames.free(&cx, page));
    });
}

/// A row that is no power of two is found though it is not where the lowest block that could begin one lies.
#[test]
fn a_row_is_looked_for_in_several_places() {
    with_heap(8, |_, frames, heap, cx| {
        let order = |order| hugemm_base::Order::new(order).expect("valid");
        let all: Vec<_> = std::iter::from_fn(|| frames.alloc(&cx, order(0)).ok()).collect();
        // Seven holes of 64 KiB, with 4 KiB between them, and then one of 96 KiB.
        let first = all.iter().map(|page| page.pfn().get()).min().expect("some").next_multiple_of(512);
        let hole = |pfn: u64| {
            let at = pfn.checked_sub(first)?;
            Some(if at < 7 * 32 { at % 32 < 16 } else { (7 * 32..7 * 32 + 24).contains(&at) })
        };
        let (given, kept): (Vec<_>, Vec<_>) = all.into_iter().partition(|page| hole(page.pfn().get()) == Some(true));
        assert_eq!(given.len(), 7 * 16 + 24);
        given.into_iter().for_each(|page| frames.free(&cx, page));
        frames.drain(&cx);
        let wanted = layout(24 << 12, 8);
        let before = frames.available(&cx);
        let row = heap.alloc(&cx, wanted).expect("there is one");
        fill(row, wanted, 5);
        assert_eq!(heap.alloc(&cx, wanted), Err(HeapError::OutOfMemory), "and no other");
        assert_eq!(frames.available(&cx), before - 24, "what was passed by is free");
        assert!(holds(row, wanted, 5));
        free(heap, &cx, row, wanted);
        kept.into_iter().for_each(|page| frames.free(&cx, page));
    });
}
