//! What a heap promises, on one CPU or two that take turns.

mod bounds;
mod less;
mod model;
mod stress;

use hugemm_base::inject::{FaultPlan, NoFaults};
use hugemm_base::{
    Cpu, Extent, FrameUse, LinearMap, NodeId, Order, Pfn, PhysMap, Ram, SingleCpu, VirtAddr, Window, Zeroed,
};
use hugemm_frames::{AllocRequest, ArenaSpec, Carved, Frames, FramesConfig, Plain};
use hugemm_heap::{Heap, HeapError, Misuse};
use hugemm_threads::{Memory, Random, Threads, run_as};
use std::alloc::Layout;
use std::collections::HashSet;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

type TestHeap<'m> = Heap<'m, Carved>;
type Cx<'a> = hugemm_base::CpuCx<'a, Threads<Memory>>;

fn layout(size: usize, align: usize) -> Layout {
    Layout::from_size_align(size, align).expect("valid")
}

/// Runs a test on a heap of two CPUs over `mib` MiB, and looks whether every frame is back when both have trimmed.
fn with_heap(mib: u64, test: impl FnOnce(&Threads<Memory>, &Frames<'_, Carved>, &TestHeap<'_>)) {
    let (threads, ram) = Threads::with_memory(mib << 20);
    let cx = threads.cx();
    let frames = Frames::carve(&cx, ram).expect("enough memory");
    let heap = Heap::new(&frames, &cx, 2).expect("enough memory");
    let before = frames.available(&cx);
    test(&threads, &frames, &heap);
    for cpu in [1, 0] {
        run_as(cpu);
        heap.trim(&cx);
    }
    assert_eq!((heap.stats().pages, frames.available(&cx)), (0, before), "{heap:?}");
}

/// Frees what the heap has handed out.
fn free(heap: &TestHeap<'_>, cx: &Cx<'_>, memory: NonNull<u8>, layout: Layout) {
    // SAFETY: the tests free what they were given, with its layout; what they free wrongly is left alone.
    unsafe { heap.free(cx, memory, layout) }
}

fn fill(memory: NonNull<u8>, layout: Layout, with: u8) {
    // SAFETY: the test's memory.
    unsafe { memory.write_bytes(with, layout.size()) }
}

/// Whether all bytes have this value; Miri, which takes a minute for a megabyte, looks at both ends.
fn holds(memory: NonNull<u8>, layout: Layout, value: u8) -> bool {
    // SAFETY: the test's memory, which it has written.
    let bytes = unsafe { std::slice::from_raw_parts(memory.as_ptr(), layout.size()) };
    let ends = if cfg!(miri) { bytes.len().min(64) } else { bytes.len() };
    bytes[..ends].iter().chain(&bytes[bytes.len() - ends..]).all(|byte| *byte == value)
}

/// All sizes, each aligned as asked for and apart from the others; everything is back at the end.
#[test]
fn memory_is_aligned_and_nobody_elses() {
    with_heap(24, |threads, _, heap| {
        let cx = threads.cx();
        let mut held = Vec::new();
        let step = if cfg!(miri) { 487 } else { 7 };
        for (index, size) in (1..9000).step_by(step).enumerate() {
            let layout = layout(size, 1 << (index % 13));
            let memory = heap.alloc(&cx, layout).expect("enough memory");
            assert_eq!(memory.addr().get() % layout.align(), 0, "{layout:?}");
            fill(memory, layout, index as u8);
            held.push((memory, layout));
        }
        for (index, (memory, layout)) in held.into_iter().enumerate() {
            assert!(holds(memory, layout, index as u8), "{layout:?} was written to by another");
            free(heap, &cx, memory, layout);
        }
        let empty = heap.alloc(&cx, layout(0, 64)).expect("some address");
        free(heap, &cx, empty, layout(0, 64));
    });
}

/// Everything that a slab has room for is handed out once, and again after it was freed, in any order.
#[test]
fn pieces_are_handed_out_once() {
    with_heap(8, |threads, _, heap| {
        let (cx, mut rng) = (threads.cx(), Random(1));
        let layout = layout(48, 8);
        let (mut held, mut seen) = (Vec::new(), HashSet::new());
        for _ in 0..if cfg!(miri) { 600 } else { 20_000 } {
            if rng.below(5) < 3 {
                let memory = heap.alloc(&cx, layout).expect("enough memory");
                assert!(seen.insert(memory), "handed out twice");
                held.push(memory);
            } else if !held.is_empty() {
                let memory = held.swap_remove(rng.below(held.len() as u64) as usize);
                assert!(seen.remove(&memory));
                free(heap, &cx, memory, layout);
            }
        }
        held.into_iter().for_each(|memory| free(heap, &cx, memory, layout));
    });
}

#[test]
fn zeroed_memory_is_zero_and_a_change_of_size_keeps_the_content() {
    with_heap(24, |threads, frames, heap| {
        let cx = threads.cx();
        for size in [24, 5000, 70_000, 2 << 20] {
            let layout = layout(size, 8);
            for _ in 0..2 {
                let memory = heap.alloc_zeroed(&cx, layout).expect("enough memory");
                assert!(holds(memory, layout, 0), "{size}");
                fill(memory, layout, 7);
                free(heap, &cx, memory, layout);
            }
        }
        // What nobody wants zeroed is not cleared.
        let block = layout(70_000, 8);
        let memory = heap.alloc(&cx, block).expect("enough memory");
        fill(memory, block, 7);
        free(heap, &cx, memory, block);
        assert_eq!(heap.alloc(&cx, block), Ok(memory));
        assert!(holds(memory, block, 7));
        free(heap, &cx, memory, block);
        // What is known to be zero is taken first: nobody else has it.
        let order = Order::new(9).expect("valid");
        let block = frames.alloc(&cx, AllocRequest::order(order)).expect("2 MiB");
        let at = threads.ptr().wrapping_add(((block.pfn().number() - threads.frames().base().number()) << 12) as usize);
        // SAFETY: the test's block.
        unsafe { at.write_bytes(0, 2 << 20) };
        // SAFETY: cleared.
        let extent = unsafe { Zeroed::assume_owned(block.into_dirty().into_extent()) };
        let (pfn, whole) = (extent.extent().base(), layout(2 << 20, 8));
        frames.free_zeroed(&cx, extent);
        let memory = heap.alloc_zeroed(&cx, whole).expect("enough memory");
        assert_eq!(memory.as_ptr(), at, "{pfn} is known to be zero");
        free(heap, &cx, memory, whole);

        let mut memory = heap.alloc(&cx, layout(10, 8)).expect("enough memory");
        fill(memory, layout(10, 8), 9);
        let mut size = 10;
        for next in [12, 100, 4000, 8192, 100_000, 30] {
            // SAFETY: the test's memory.
            let moved = unsafe { heap.realloc(&cx, memory, layout(size, 8), next) }.expect("enough memory");
            assert!(holds(moved, layout(10, 8), 9));
            assert_eq!(moved == memory, (size, next) == (10, 12), "{size} to {next}");
            (memory, size) = (moved, next);
        }
        free(heap, &cx, memory, layout(size, 8));
    });
}

/// What 2 KiB may become.
const WHOLE: Layout = Layout::new::<[u64; 512]>();
const HALF: Layout = Layout::new::<[u64; 256]>();

/// A frame's worth of memory that was half of that; whether it stayed where it was.
fn grown(heap: &TestHeap<'_>, cx: &Cx<'_>, memory: NonNull<u8>, with: u8) -> (NonNull<u8>, bool) {
    fill(memory, HALF, with);
    // SAFETY: the test's memory.
    let whole = unsafe { heap.realloc(cx, memory, HALF, WHOLE.size()) }.expect("enough memory");
    assert!(holds(whole, HALF, with));
    fill(whole, WHOLE, with);
    (whole, whole == memory)
}

/// 2 KiB become 4 where they are if the next free piece is the one behind them. It is nobody else's then, and comes back with them,
/// whoever frees them.
#[test]
fn two_kib_grow_over_the_next_piece() {
    with_heap(8, |threads, _, heap| {
        let cx = threads.cx();
        let take = |count| (0..count).map(|_| heap.alloc(&cx, HALF).expect("memory")).collect::<Vec<_>>();
        for freer in [0, 1] {
            let first = take(1)[0];
            let (whole, stayed) = grown(heap, &cx, first, 1);
            assert!(stayed && heap.stats().pages == 8);
            let others = take(3);
            others.iter().for_each(|memory| fill(*memory, HALF, 2));
            assert!(holds(whole, WHOLE, 1), "the piece behind it is another's too");
            run_as(freer);
            free(heap, &cx, whole, WHOLE);
            run_as(0);
            // All fifteen pieces of the slab.
            let rest = take(12);
            assert_eq!(heap.stats().pages, 8, "a piece was lost");
            let all: HashSet<_> = others.iter().chain(&rest).collect();
            assert!(all.len() == 15 && all.contains(&first), "a piece was handed out twice");
            others.iter().chain(&rest).for_each(|memory| free(heap, &cx, *memory, HALF));
            heap.trim(&cx);
        }
        // Again and again: what comes back can grow again.
        for _ in 0..3 {
            let (whole, stayed) = grown(heap, &cx, take(1)[0], 3);
            assert!(stayed);
            free(heap, &cx, whole, WHOLE);
        }
    });
}

/// They move if the piece behind is in use, is not the next, is another CPU's to hand back, or if they lie where a frame could.
#[test]
fn two_kib_move_if_the_next_piece_is_not_at_hand() {
    with_heap(8, |threads, _, heap| {
        let cx = threads.cx();
        let take = || heap.alloc(&cx, HALF).expect("memory");
        let give = |memory| free(heap, &cx, memory, HALF);
        let moves = |memory| {
            let (whole, stayed) = grown(heap, &cx, memory, 4);
            free(heap, &cx, whole, WHOLE);
            !stayed
        };
        // The second of them, at a multiple of 4096, with the third behind it.
        let (first, second) = (take(), take());
        assert!(second.addr().get() % 4096 == 0 && moves(second));
        give(first);

        // In use.
        let (first, second) = (take(), take());
        assert!(moves(first));
        let (first, third) = (take(), take());
        assert!(third.addr() > second.addr());
        // Free, and not the next.
        let fourth = take();
        give(second);
        give(fourth);
        assert!(moves(first));
        give(third);

        // Freed by another CPU, and not taken over yet.
        heap.trim(&cx);
        let (first, second) = (take(), take());
        let others: Vec<_> = (0..3).map(|_| take()).collect();
        run_as(1);
        give(second);
        run_as(0);
        assert!(first.addr().get() + HALF.size() == second.addr().get() && moves(first));
        others.into_iter().for_each(give);

        // Of another slab than that which allocations come from, or of another CPU's.
        heap.trim(&cx);
        let mut held: Vec<_> = (0..16).map(|_| take()).collect();
        give(held.remove(1));
        assert!(moves(held.remove(0)));
        held.into_iter().for_each(give);
        heap.trim(&cx);
        let first = take();
        run_as(1);
        assert!(moves(first), "it is another CPU's slab");
        run_as(0);
    });
}

/// What has grown may change its size again, and keeps its content; all of it comes back.
#[test]
fn what_has_grown_may_shrink_or_grow_more() {
    with_heap(8, |threads, _, heap| {
        let cx = threads.cx();
        for size in [10, 2048, 3000, 3600, 4096, 5000, 20_000] {
            for cpu in [0, 1] {
                let (whole, stayed) = grown(heap, &cx, heap.alloc(&cx, HALF).expect("memory"), 6);
                assert!(stayed);
                run_as(cpu);
                // SAFETY: the test's memory.
                let other = unsafe { heap.realloc(&cx, whole, WHOLE, size) }.expect("memory");
                assert!(holds(other, layout(size.min(4096), 8), 6));
                free(heap, &cx, other, layout(size, 8));
                run_as(0);
                heap.trim(&cx);
            }
        }
    });
}

/// Debug builds know what has grown, and refuse what is wrong about it: its halves, and pieces that never grew.
#[test]
#[cfg(all(debug_assertions, not(miri)))]
fn what_has_grown_is_freed_as_a_whole() {
    with_heap(8, |threads, _, heap| {
        let cx = threads.cx();
        let take = || heap.alloc(&cx, HALF).expect("memory");
        let (whole, stayed) = grown(heap, &cx, take(), 7);
        assert!(stayed);
        // SAFETY: within it.
        let behind = unsafe { whole.add(HALF.size()) };
        let (alone, next) = (take(), take());
        for (wrong, as_what) in [(whole, HALF), (behind, HALF), (behind, WHOLE), (alone, WHOLE), (next, WHOLE)] {
            let before = heap.stats().misused;
            free(heap, &cx, wrong, as_what);
            let stats = heap.stats();
            assert_eq!((stats.misused - before, stats.last_misuse), (1, Some(Misuse::NotAllocated)), "{wrong:?}");
        }
        assert!(holds(whole, WHOLE, 7));
        free(heap, &cx, whole, WHOLE);
        let before = heap.stats().misused;
        free(heap, &cx, whole, WHOLE);
        free(heap, &cx, whole, HALF);
        assert_eq!((heap.stats().misused - before, heap.stats().last_misuse), (2, Some(Misuse::FreedTwice)));
        // What is free does not grow, though the next piece is the one behind it.
        let (first, second) = (take(), take());
        assert_eq!((first, second), (whole, behind));
        free(heap, &cx, first, HALF);
        free(heap, &cx, second, HALF);
        // SAFETY: refused; what it answers is new.
        let other = unsafe { heap.realloc(&cx, first, HALF, WHOLE.size()) }.expect("memory");
        assert!(other != first && heap.stats().misused == before + 3);
        free(heap, &cx, other, WHOLE);
        [alone, next].into_iter().for_each(|memory| free(heap, &cx, memory, HALF));
    });
}

/// Memory that runs out is an error, and all of it is there again afterwards, for other sizes too.
#[test]
#[cfg_attr(miri, ignore = "takes minutes")]
fn exhaustion_is_an_error_and_what_is_freed_serves_other_sizes() {
    with_heap(4, |threads, _, heap| {
        let cx = threads.cx();
        for size in [16, 3000, 4096, 60_000, 200] {
            let layout = layout(size, 8);
            let held: Vec<_> = std::iter::from_fn(|| heap.alloc(&cx, layout).ok()).collect();
            assert!(held.len() * size * 10 > (3 << 20) * 8, "{} of {size}", held.len());
            assert_eq!(heap.alloc(&cx, layout), Err(HeapError::OutOfMemory));
            held.into_iter().for_each(|memory| free(heap, &cx, memory, layout));
        }
        assert_eq!(heap.stats().failed, 10);
    });
}

/// One empty slab of a size is kept, others go back as soon as they are empty. What was freed is used before more is taken.
#[test]
fn empty_slabs_go_back_but_for_one() {
    with_heap(8, |threads, _, heap| {
        let cx = threads.cx();
        let layout = layout(96, 8);
        for _ in 0..2 {
            let mut held: Vec<_> = (0..1000).map(|_| heap.alloc(&cx, layout).expect("enough memory")).collect();
            let full = heap.stats().pages;
            assert!((1000 * 96 / 4096..40).contains(&full), "{full}");
            for index in (0..1000).step_by(2) {
                free(heap, &cx, held[index], layout);
            }
            (0..1000).step_by(2).for_each(|index| held[index] = heap.alloc(&cx, layout).expect("enough memory"));
            assert_eq!(heap.stats().pages, full, "there is room for as many as were freed");
            held.into_iter().for_each(|memory| free(heap, &cx, memory, layout));
            // The one that allocations come from, and the one that is kept.
            assert_eq!(heap.stats().pages, 2);
        }
        heap.trim(&cx);
        assert_eq!(heap.stats().pages, 0);
    });
}

/// A trim leaves the slab in use where it is: what comes next is from there, not from one that has waited.
#[test]
fn a_trim_leaves_the_slab_in_use() {
    with_heap(8, |threads, _, heap| {
        let (cx, wanted) = (threads.cx(), layout(6144, 8));
        let slab = |memory: NonNull<u8>| memory.addr().get() >> 15;
        // One slab of five pieces, and two of another.
        let mut held: Vec<_> = (0..7).map(|_| heap.alloc(&cx, wanted).expect("memory")).collect();
        free(heap, &cx, held.swap_remove(0), wanted);
        heap.trim(&cx);
        let next = heap.alloc(&cx, wanted).expect("memory");
        assert!(held.iter().filter(|memory| slab(**memory) == slab(next)).count() == 2);
        held.push(next);
        held.into_iter().for_each(|memory| free(heap, &cx, memory, wanted));
    });
}

/// Slabs that are kept, and those that others have emptied, are given back before memory is said to be out.
#[test]
#[cfg_attr(miri, ignore = "takes minutes")]
fn what_is_kept_is_given_back_when_memory_is_out() {
    with_heap(4, |threads, _, heap| {
        let cx = threads.cx();
        for wanted in [layout(32 << 10, 8), layout(6144, 8)] {
            let most = |heap: &TestHeap<'_>| {
                let held: Vec<_> = std::iter::from_fn(|| heap.alloc(&cx, wanted).ok()).collect();
                let count = held.len();
                held.into_iter().for_each(|memory| free(heap, &cx, memory, wanted));
                count
            };
            let all = most(heap);
            for size in [16, 100, 1000, 2000, 3000, 5000] {
                let memory = heap.alloc(&cx, layout(size, 8)).expect("enough memory");
                run_as(size as u32 / 1000 % 2);
                free(heap, &cx, memory, layout(size, 8));
                run_as(0);
            }
            assert_eq!(most(heap), all);
        }
    });
}

/// A slab that is on its way to its owner, though its owner has found the pieces already, does not go back before.
#[test]
fn a_slab_on_its_way_to_the_list_is_not_given_back() {
    with_heap(8, |threads, _, heap| {
        let cx = threads.cx();
        let layout = layout(6144, 8);
        let take = |count: usize| (0..count).map(|_| heap.alloc(&cx, layout).expect("memory")).collect::<Vec<_>>();
        let give = |memory: NonNull<u8>| free(heap, &cx, memory, layout);
        // Slabs of five pieces each, all in use.
        let mut slabs: Vec<_> = (0..25).map(|_| take(5)).collect();
        let pages = heap.stats().pages;
        // Another CPU frees a piece of each; the first of them comes last when the owner looks, who looks at eight at a time.
        run_as(1);
        slabs.iter_mut().take(24).for_each(|slab| give(slab.swap_remove(0)));
        run_as(0);
        // The owner frees one too, and allocates: its own, then what the other CPU has freed, and then from the next slab.
        let mut first = std::mem::take(&mut slabs[0]);
        give(first.swap_remove(0));
        first.extend(take(2));
        let mut second = take(1);
        // An empty one, which is kept.
        second.append(&mut slabs[23]);
        let slab = |memory: &NonNull<u8>| memory.addr().get() >> 15;
        assert!(first.iter().all(|memory| slab(memory) == slab(&first[0])), "{first:?}");
        slabs.pop().into_iter().flatten().for_each(give);
        assert_eq!(heap.stats().pages, pages, "one is kept");
        first.into_iter().for_each(give);
        assert_eq!(heap.stats().pages, pages, "another one cannot go back yet");
        second.into_iter().chain(slabs.into_iter().flatten()).for_each(give);
    });
}

/// What another CPU frees is found by the owner, before it takes more from the manager, and empty slabs go back then.
#[test]
fn the_owner_finds_what_others_free() {
    with_heap(8, |threads, _, heap| {
        let cx = threads.cx();
        let layout = layout(256, 8);
        for owner in [0, 1] {
            run_as(owner);
            for round in 0..3 {
                let held: Vec<_> = (0..200).map(|_| heap.alloc(&cx, layout).expect("enough memory")).collect();
                let full = heap.stats().pages;
                assert!((13..=20).contains(&full), "round {round}: {full}");
                run_as(1 - owner);
                held.into_iter().for_each(|memory| free(heap, &cx, memory, layout));
                assert_eq!(heap.stats().pages, full, "only the owner gives back");
                run_as(owner);
            }
            heap.trim(&cx);
            assert_eq!(heap.stats().pages, 0);
        }
    });
}

/// The owner looks at what others have emptied of any size when it runs out of one, and keeps one slab of each.
#[test]
fn what_others_empty_goes_back_but_for_one() {
    with_heap(8, |threads, _, heap| {
        let (cx, wanted) = (threads.cx(), layout(6144, 8));
        // Four slabs of five pieces each; of the last one all are in use.
        let mut held: Vec<_> = (0..20).map(|_| heap.alloc(&cx, wanted).expect("memory")).collect();
        run_as(1);
        held.drain(..15).for_each(|memory| free(heap, &cx, memory, wanted));
        run_as(0);
        assert_eq!(heap.stats().pages, 4 * 8);
        let small = heap.alloc(&cx, layout(64, 8)).expect("memory");
        assert_eq!(heap.stats().pages, 2 * 8 + 1, "the one in use, the one that is kept, and a new one");
        free(heap, &cx, small, layout(64, 8));
        held.into_iter().for_each(|memory| free(heap, &cx, memory, wanted));
    });
}

#[test]
fn errors_say_what_to_do() {
    let errors = [HeapError::OutOfMemory, HeapError::TooLarge, HeapError::NotMapped, HeapError::OtherCpu];
    let said: HashSet<_> = errors.iter().map(HeapError::to_string).collect();
    assert!(said.len() == errors.len() && said.iter().all(|text| text.len() > 20));
    #[cfg(all(debug_assertions, not(miri)))]
    {
        let wrong = [Misuse::NotManaged, Misuse::NotAllocated, Misuse::NotTheStart, Misuse::FreedTwice];
        let said: HashSet<_> = wrong.iter().map(Misuse::to_string).collect();
        assert!(said.len() == wrong.len() && said.iter().all(|text| text.starts_with("freed")));
    }
}

/// Of two CPUs each frees a part: the slab goes back once, when the owner knows of all.
#[test]
fn a_slab_that_two_cpus_empty_goes_back() {
    with_heap(8, |threads, _, heap| {
        let (cx, mut rng) = (threads.cx(), Random(3));
        for round in 0..if cfg!(miri) { 3 } else { 200 } {
            let layout = layout([64, 1024, 5000][round % 3], 8);
            let mut held: Vec<_> = (0..150).map(|_| heap.alloc(&cx, layout).expect("enough memory")).collect();
            while !held.is_empty() {
                run_as(u32::from(rng.below(4) == 0));
                let memory = held.swap_remove(rng.below(held.len() as u64) as usize);
                free(heap, &cx, memory, layout);
            }
            run_as(0);
        }
        heap.trim(&cx);
        assert_eq!(heap.stats().pages, 0, "{heap:?}");
    });
}

/// Interrupts come wherever they can, and allocate and free of the same sizes.
#[test]
fn interrupts_may_allocate_and_free() {
    with_heap(8, |threads, _, heap| {
        let mut mine: Vec<(NonNull<u8>, Layout)> = Vec::new();
        let mut rng = Random(5);
        let handler = |cx: &mut Cx<'_>| {
            let layout = layout([40, 700, 4096][rng.below(3) as usize], 8);
            if mine.len() < 60 && rng.below(2) == 0 {
                let memory = heap.alloc(cx, layout).expect("enough memory");
                fill(memory, layout, 0xaa);
                mine.push((memory, layout));
            } else if let Some((memory, layout)) = mine.pop() {
                assert!(holds(memory, layout, 0xaa));
                free(heap, cx, memory, layout);
            }
        };
        threads.interrupted(handler, |cx| {
            let mut held = Vec::new();
            for round in 0..if cfg!(miri) { 60 } else { 3000 } {
                let layout = layout([40, 700, 4096][round % 3], 8);
                let memory = heap.alloc(cx, layout).expect("enough memory");
                fill(memory, layout, 0x55);
                held.push((memory, layout));
                if round % 50 >= 20 {
                    let (memory, layout) = held.swap_remove(round % held.len());
                    assert!(holds(memory, layout, 0x55));
                    free(heap, cx, memory, layout);
                }
                if round % 97 == 0 {
                    heap.trim(cx);
                }
            }
            held.into_iter().for_each(|(memory, layout)| free(heap, cx, memory, layout));
        });
        mine.into_iter().for_each(|(memory, layout)| free(heap, &threads.cx(), memory, layout));
    });
}

#[test]
fn what_cannot_be_had_is_an_error() {
    with_heap(8, |threads, frames, heap| {
        let cx = threads.cx();
        for refused in [layout((1 << 30) + 1, 8), layout(8, 1 << 31), layout(isize::MAX as usize, 1)] {
            assert_eq!(heap.alloc(&cx, refused), Err(HeapError::TooLarge));
            assert_eq!(heap.alloc_zeroed(&cx, refused), Err(HeapError::TooLarge));
        }
        assert_eq!(heap.alloc(&cx, layout(1 << 30, 8)), Err(HeapError::OutOfMemory));
        assert_eq!(heap.alloc(&cx, layout(8, 1 << 30)), Err(HeapError::NotMapped), "mapped at a multiple of 2 MiB");
        run_as(2);
        for size in [8, 8192] {
            assert_eq!(heap.alloc(&cx, layout(size, 8)), Err(HeapError::OtherCpu), "there are two");
        }
        run_as(0);
        let stranger = Threads::new(Memory::new(layout(8192, 4096)));
        for size in [8, 8192] {
            assert_eq!(heap.alloc(&stranger.cx(), layout(size, 8)), Err(HeapError::OtherCpu));
        }
        assert_eq!(heap.stats().failed, 3 + 3 + 2 + 2 + 2);
        assert_eq!(Heap::new(frames, &cx, 0).err(), Some(HeapError::TooLarge));
        assert_eq!(Heap::new(frames, &cx, u32::MAX).err(), Some(HeapError::TooLarge));
    });
}

/// Whose map has opened a block closes it: a context of another platform frees nothing, neither blocks nor pieces nor pairs of them, and
/// makes nothing smaller.
#[test]
fn a_context_of_another_platform_frees_nothing() {
    let (threads, stranger) = (Counting::threads(), Counting::threads());
    // SAFETY: the memory is the test's; frame numbers are its own.
    let (cx, ram) = (threads.cx(), unsafe { Ram::assume_unmanaged(threads.memory.frames()) });
    let frames = Frames::carve(&cx, ram).expect("enough memory");
    let heap = Heap::new(&frames, &cx, 2).expect("enough memory");
    let (other, before) = (stranger.cx(), frames.available(&cx));
    let (half, whole) = (HALF, WHOLE);
    let pair = heap.alloc(&cx, half).expect("memory");
    // SAFETY: the test's memory; so is all below.
    assert_eq!(unsafe { heap.realloc(&cx, pair, half, whole.size()) }, Ok(pair));
    let held: Vec<_> = [layout(100, 8), layout(4096, 8), layout(100_000, 8)]
        .map(|layout| (heap.alloc(&cx, layout).expect("memory"), layout))
        .into_iter()
        .chain([(pair, whole)])
        .collect();
    let pages = heap.stats().pages;
    for (memory, layout) in &held {
        fill(*memory, *layout, 5);
        let misused = heap.stats().misused;
        // SAFETY: refused.
        unsafe { heap.free(&other, *memory, *layout) };
        assert_eq!((heap.stats().misused, heap.stats().pages), (misused + 1, pages), "{layout:?}");
        assert_eq!(heap.stats().last_misuse, Some(Misuse::OtherPlatform));
        // SAFETY: refused.
        let less = unsafe { heap.realloc(&other, *memory, *layout, layout.size() / 2) };
        assert_eq!(less, Err(HeapError::OtherCpu), "{layout:?}");
    }
    heap.trim(&other);
    assert_eq!(stranger.windows.load(Ordering::Relaxed), 0, "the other platform's map was used");
    assert_eq!(stranger.counters().snapshot().frames.of(FrameUse::HEAP), 0);
    for (memory, layout) in held {
        assert!(holds(memory, layout, 5));
        // SAFETY: allocated above, once.
        unsafe { heap.free(&cx, memory, layout) };
    }
    heap.trim(&cx);
    assert_eq!((heap.stats().pages, frames.available(&cx)), (0, before));
    let own = threads.counters().snapshot().frames.of(FrameUse::HEAP);
    assert_eq!(own, 1, "the heap's own block is all that counts as in use");
}

/// Memory that is mapped at any multiple of 4096 does: headers are found by physical addresses. Alignments above 4096 that the
/// mapping does not give are refused.
#[test]
fn memory_may_be_mapped_anywhere() {
    let memory = Memory::new(layout(8 << 20, 2 << 20));
    let ram = Extent::new(Pfn::new(0), (8 << 8) - 3).expect("valid");
    // SAFETY: the test's memory, of which frame 0 is the fourth page; the numbers are nobody else's here.
    let (cx, ram) = unsafe { SingleCpu::start(ram, memory.ptr().add(3 << 12)) };
    let frames = Frames::carve(&cx, ram).expect("enough memory");
    let heap = Heap::new(&frames, &cx, 1).expect("enough memory");
    let before = frames.available(&cx);
    let mut held = Vec::new();
    for round in 0..if cfg!(miri) { 60 } else { 600 } {
        let layout = layout([24, 300, 1000, 3000, 6000, 9000][round % 6], [8, 64, 512, 4096][round % 4]);
        let memory = heap.alloc(&cx, layout).expect("enough memory");
        assert_eq!(memory.addr().get() % layout.align(), 0);
        fill(memory, layout, round as u8);
        held.push((memory, layout));
    }
    for (round, (memory, layout)) in held.into_iter().enumerate() {
        assert!(holds(memory, layout, round as u8));
        // SAFETY: allocated above, once.
        unsafe { heap.free(&cx, memory, layout) };
    }
    heap.trim(&cx);
    assert_eq!((heap.stats().pages, frames.available(&cx)), (0, before));
}

/// Every alignment is given where frame 0 is at a multiple of it, and refused where it is not.
#[test]
fn alignments_are_those_of_the_mapping() {
    let memory = Memory::new(layout(8 << 20, 2 << 20));
    for skipped in 0..9_usize {
        let ram = Extent::new(Pfn::new(0), (8 << 8) - 9).expect("valid");
        // SAFETY: the test's memory, for this turn, of which frame 0 is one of the first; the numbers are nobody else's here.
        let (cx, ram) = unsafe { SingleCpu::start(ram, memory.ptr().add(skipped << 12)) };
        let frames = Frames::carve(&cx, ram).expect("enough memory");
        let heap = Heap::new(&frames, &cx, 1).expect("enough memory");
        for align in (12..=17).map(|log| 1_usize << log) {
            for size in [8, 40_000, 100_000] {
                let wanted = layout(size, align);
                let given = heap.alloc(&cx, wanted);
                let fits = (skipped << 12).is_multiple_of(align);
                assert_eq!(given.err(), (!fits).then_some(HeapError::NotMapped), "{skipped} {wanted:?}");
                let Ok(memory) = given else { continue };
                assert!(memory.addr().get().is_multiple_of(align), "{skipped} {wanted:?}");
                // SAFETY: allocated just now.
                unsafe { heap.free(&cx, memory, wanted) };
            }
        }
    }
}

/// Counts the pages of the windows that are open, none of which shows more than so many.
#[derive(Debug)]
struct Counting {
    memory: Memory,
    windows: AtomicU64,
    most: AtomicU64,
}

impl Counting {
    /// CPUs with 4 MiB of it.
    fn threads() -> Threads<Counting> {
        let memory = Memory::new(layout(4 << 20, 2 << 20));
        Threads::new(Counting { memory, windows: AtomicU64::new(0), most: AtomicU64::new(u64::MAX) })
    }
}

// SAFETY: the memory's windows.
unsafe impl PhysMap for Counting {
    fn open(&self, extent: Extent, user: Option<VirtAddr>) -> Option<Window> {
        let window = self.memory.open(extent, user)?;
        let pages = window.pages.min(self.most.load(Ordering::Relaxed));
        self.windows.fetch_add(pages, Ordering::Relaxed);
        Some(Window { pages, ..window })
    }

    unsafe fn close(&self, window: Window) {
        self.windows.fetch_sub(window.pages, Ordering::Relaxed);
        // SAFETY: passed on.
        unsafe { self.memory.close(window) };
    }
}

// SAFETY: the memory's windows.
unsafe impl LinearMap for Counting {}

/// A platform that keeps account of who has which frames sees each block of the heap come and go.
#[test]
fn what_is_given_back_is_closed_first() {
    let threads = Counting::threads();
    // SAFETY: the memory is the test's; frame numbers are its own.
    let (cx, ram) = (threads.cx(), unsafe { Ram::assume_unmanaged(threads.memory.frames()) });
    let frames = Frames::carve(&cx, ram).expect("enough memory");
    let open = || threads.windows.load(Ordering::Relaxed);
    let metadata = open();
    let heap = Heap::new(&frames, &cx, 1).expect("enough memory");
    let own = open() - metadata;
    for layout in [layout(100, 8), layout(4096, 8), layout(20_000, 8), layout(37_000, 8)] {
        let held: Vec<_> = (0..50).map(|_| heap.alloc(&cx, layout).expect("memory")).collect();
        assert_eq!(open(), metadata + own + heap.stats().pages);
        // SAFETY: allocated above, once.
        held.into_iter().for_each(|memory| unsafe { heap.free(&cx, memory, layout) });
        heap.trim(&cx);
        assert_eq!((open(), heap.stats().pages), (metadata + own, 0), "{layout:?}");
    }
    // What becomes less is closed in parts.
    let (much, little) = (layout(300_000, 8), layout(70_000, 8));
    let memory = heap.alloc(&cx, much).expect("memory");
    // SAFETY: the test's memory.
    assert_eq!(unsafe { heap.realloc(&cx, memory, much, little.size()) }, Ok(memory));
    assert_eq!((open(), heap.stats().pages), (metadata + own + 18, 18));
    // SAFETY: as above.
    unsafe { heap.free(&cx, memory, little) };
    assert_eq!(open(), metadata + own);
    // Also what is refused because it is not mapped as a whole.
    let before = frames.available(&cx);
    threads.most.store(1, Ordering::Relaxed);
    assert_eq!(Heap::new(&frames, &cx, 8).err(), Some(HeapError::NotMapped));
    assert_eq!((open(), frames.available(&cx)), (metadata + own, before));
}

/// A part of the memory is mapped where the rest is; the other elsewhere, or not at all.
#[derive(Debug)]
struct Odd {
    memory: Memory,
    /// Frames from the first that are mapped otherwise.
    odd: std::ops::Range<u64>,
    gone: bool,
}

// SAFETY: most is the memory's; the other part is mapped nowhere, or each of its frames at the one above.
unsafe impl PhysMap for Odd {
    fn open(&self, extent: Extent, user: Option<VirtAddr>) -> Option<Window> {
        let first = extent.base().number() - self.memory.frames().base().number();
        if first + extent.pages() <= self.odd.start || self.odd.end <= first {
            return self.memory.open(extent, user);
        }
        if self.gone {
            return None;
        }
        let window = self.memory.open(extent, user)?;
        Some(Window { ptr: window.ptr.wrapping_add(4096), pages: window.pages })
    }
}

// SAFETY: nobody reaches the frames behind the wrong windows: that is what the tests are about.
unsafe impl LinearMap for Odd {}

/// Runs a test on a heap over 4 MiB of which some frames are mapped otherwise; the heap's own block is not.
fn with_odd(
    odd: std::ops::Range<u64>,
    gone: bool,
    test: impl FnOnce(&Threads<Odd>, &Frames<'_, Plain>, &Heap<'_, Plain>),
) {
    let memory = Memory::new(layout(4 << 20, 2 << 20));
    let all = memory.frames();
    let threads = Threads::new(Odd { memory, odd: odd.clone(), gone });
    let cx = threads.cx();
    let arenas = [ArenaSpec { extent: all, node: NodeId(0), descriptors: None }];
    let config = FramesConfig { arenas: &arenas, cpus: 1, cpu_nodes: &[] };
    let metadata = Memory::new(Frames::<Plain>::required_bytes(&config).expect("valid"));
    // SAFETY: the metadata is the test's, zeroed; frame numbers are this memory's own; one platform.
    let frames = unsafe { Frames::new(&config, Plain(NoFaults), metadata.ptr(), metadata.bytes()) }.expect("valid");
    // The odd ones last: nothing else is there for the heap's own block.
    let (low, rest) = all.split_at(odd.start);
    let (odd, high) = rest.split_at(odd.end - odd.start);
    // SAFETY: the memory is the test's; once.
    unsafe { frames.release_extent(&cx, if low.is_empty() { high } else { low }) };
    let heap = Heap::new(&frames, &cx, 1).expect("enough memory");
    // SAFETY: as above.
    unsafe { frames.release_extent(&cx, odd) };
    let before = frames.available(&cx);
    test(&threads, &frames, &heap);
    heap.trim(&cx);
    assert_eq!(frames.available(&cx), before);
}

#[test]
fn memory_that_is_mapped_elsewhere_is_left_alone() {
    for gone in [false, true] {
        with_odd(512..1024, gone, |threads, frames, heap| {
            let cx = threads.cx();
            let before = frames.available(&cx);
            for layout in [layout(6000, 8), layout(8192, 8), layout(50_000, 8)] {
                let held: Vec<_> = (0..1000).map_while(|_| heap.alloc(&cx, layout).ok()).collect();
                assert_eq!(heap.alloc(&cx, layout), Err(HeapError::NotMapped));
                let limit = threads.memory.ptr().addr() + (2 << 20);
                assert!(held.len() * layout.size() > 1 << 20);
                assert!(held.iter().all(|memory| memory.addr().get() + layout.size() <= limit));
                // SAFETY: allocated above, once.
                held.into_iter().for_each(|memory| unsafe { heap.free(&cx, memory, layout) });
                heap.trim(&cx);
                assert_eq!(frames.available(&cx), before);
            }
        });
    }
}

/// Where such memory lies lowest it is passed by, as long as there is other memory: a whole MiB of it, and single frames here and there.
#[test]
fn memory_that_is_mapped_elsewhere_is_passed_by() {
    for (odd, gone) in [(0..256, true), (0..256, false), (0..512, true), (0..3, true)] {
        with_odd(odd.clone(), gone, |threads, frames, heap| {
            let cx = threads.cx();
            for wanted in [layout(100, 8), layout(4096, 8), layout(20_000, 8), layout(300_000, 8)] {
                let held: Vec<_> = std::iter::from_fn(|| heap.alloc(&cx, wanted).ok()).take(400).collect();
                let bytes = held.len() * wanted.size();
                assert!(held.len() == 400 || bytes > (800 << 10), "{} of {wanted:?}, {odd:?}", held.len());
                let first = threads.memory.ptr().addr() + (odd.end << 12) as usize;
                assert!(held.iter().all(|memory| memory.addr().get() >= first));
                held.iter().for_each(|memory| fill(*memory, wanted, 1));
                // SAFETY: allocated above, once.
                held.into_iter().for_each(|memory| unsafe { heap.free(&cx, memory, wanted) });
                frames.drain(&cx);
            }
        });
    }
}

/// Each wrong free is named, and leaves everything as it was.
#[test]
#[cfg(all(debug_assertions, not(miri)))]
fn wrong_frees_are_named_and_left_alone() {
    with_heap(8, |threads, frames, heap| {
        let cx = threads.cx();
        let (small, large) = (layout(100, 8), layout(10_000, 8));
        let (piece, block) = (heap.alloc(&cx, small).expect("memory"), heap.alloc(&cx, large).expect("memory"));
        let (spare, twice) = (heap.alloc(&cx, small).expect("memory"), heap.alloc(&cx, small).expect("memory"));
        let big_twice = heap.alloc(&cx, large).expect("memory");
        free(heap, &cx, twice, small);
        free(heap, &cx, big_twice, large);
        let page = frames.alloc(&cx, AllocRequest::order(Order::ZERO)).expect("memory");
        let offset = (page.pfn().number() - threads.frames().base().number()) << 12;
        let foreign = NonNull::new(threads.ptr().wrapping_add(offset as usize)).expect("an address");
        let mut local = [0_u64; 2];
        let outside = NonNull::from(&mut local).cast::<u8>();
        let within = |memory: NonNull<u8>, bytes| {
            // SAFETY: within the allocation.
            unsafe { memory.add(bytes) }
        };
        for (index, (memory, layout, misuse)) in [
            (outside, small, Misuse::NotManaged),
            (outside, large, Misuse::NotManaged),
            (foreign, small, Misuse::NotAllocated),
            (foreign, layout(4096, 8), Misuse::NotAllocated),
            (piece, layout(200, 8), Misuse::NotAllocated),
            (piece, large, Misuse::NotAllocated),
            (block, small, Misuse::NotAllocated),
            (block, layout(20_000, 8), Misuse::NotAllocated),
            (big_twice, large, Misuse::NotAllocated),
            (within(piece, 8), small, Misuse::NotTheStart),
            (within(block, 64), large, Misuse::NotTheStart),
            (twice, small, Misuse::FreedTwice),
            (piece, layout(1 << 31, 8), Misuse::NotAllocated),
        ]
        .into_iter()
        .enumerate()
        {
            free(heap, &cx, memory, layout);
            let stats = heap.stats();
            assert_eq!((stats.misused, stats.last_misuse), (index as u64 + 1, Some(misuse)), "{layout:?}");
        }
        run_as(1);
        free(heap, &cx, spare, small);
        free(heap, &cx, spare, small);
        assert_eq!((heap.stats().misused, heap.stats().last_misuse), (14, Some(Misuse::FreedTwice)));
        run_as(0);
        // So is a wrong change of size, which gives memory of its own all the same.
        // SAFETY: of the test's memory, with another size, which is left alone.
        let moved = unsafe { heap.realloc(&cx, piece, layout(200, 8), 300) }.expect("memory");
        assert_eq!((heap.stats().misused, heap.stats().last_misuse), (15, Some(Misuse::NotAllocated)));
        free(heap, &cx, moved, layout(300, 8));
        free(heap, &cx, piece, small);
        free(heap, &cx, block, large);
        frames.free(&cx, page);
        // Whatever a user is likely to have in there.
        for value in [0, 1, 0xff] {
            let memory = heap.alloc(&cx, small).expect("memory");
            // SAFETY: the test's memory, of 25 words.
            (0..25).for_each(|word| unsafe { memory.cast::<u32>().add(word).write(value) });
            free(heap, &cx, memory, small);
        }
        assert_eq!(heap.stats().misused, 15);
    });
}

/// Nor do debug builds stumble over addresses that are nobody's, the lowest and the highest among them, wherever memory is mapped.
#[test]
#[cfg(all(debug_assertions, not(miri)))]
fn addresses_that_are_nobodys_are_refused_wherever_memory_is_mapped() {
    let memory = Memory::new(layout(8 << 20, 2 << 20));
    for skipped in 0..8 {
        let ram = Extent::new(Pfn::new(7), (8 << 8) - 8).expect("valid");
        // SAFETY: the test's memory, for this turn; the numbers are nobody else's here.
        let (cx, ram) = unsafe { SingleCpu::start(ram, memory.ptr().add(skipped << 12)) };
        let frames = Frames::carve(&cx, ram).expect("enough memory");
        let heap = Heap::new(&frames, &cx, 1).expect("enough memory");
        let mut refused = 0;
        for address in [8, 0x808, 0x1000, 0x7ff8, usize::MAX - 7, usize::MAX & !4095] {
            let memory = NonNull::new(core::ptr::without_provenance_mut(address)).expect("not null");
            for layout in [8, 2048, 4096, 6144, 20_000].map(|size| layout(size, 8)) {
                // SAFETY: left alone.
                unsafe { heap.free(&cx, memory, layout) };
                refused += 1;
                let stats = heap.stats();
                assert_eq!(
                    (stats.misused, stats.last_misuse),
                    (refused, Some(Misuse::NotManaged)),
                    "{address:#x} {layout:?}"
                );
            }
        }
    }
}

/// Allocations that fail here and there leave everything usable.
#[test]
fn failures_leave_a_heap_that_works() {
    for seed in 0..if cfg!(miri) { 2 } else { 20 } {
        let (threads, ram) = Threads::with_memory(4 << 20);
        let (cx, extent) = (threads.cx(), ram.extent());
        let plan = FaultPlan::random(1 + seed, 180, seed);
        let arenas = [ArenaSpec { extent, node: NodeId(0), descriptors: None }];
        let config = FramesConfig { arenas: &arenas, cpus: 1, cpu_nodes: &[] };
        let need = Frames::<Plain<&FaultPlan>>::required_bytes(&config).expect("valid");
        let metadata = Memory::new(need);
        // SAFETY: the metadata is the test's, zeroed; frame numbers are this memory's own; one platform.
        let frames = unsafe { Frames::new(&config, Plain(&plan), metadata.ptr(), metadata.bytes()) }.expect("valid");
        // SAFETY: once.
        unsafe { frames.release(&cx, ram.into_dirty()) };
        let heap = Heap::new(&frames, &cx, 1).expect("the first does not fail");
        let before = frames.available(&cx);
        let mut held = Vec::new();
        for layout in [layout(64, 8), layout(8192, 8), layout(2000, 8)].into_iter().cycle().take(100) {
            if let Ok(memory) = heap.alloc(&cx, layout) {
                fill(memory, layout, 3);
                held.push((memory, layout));
            }
        }
        assert!(held.len() < 100, "{seed}: no failure");
        assert_eq!(heap.stats().failed, 100 - held.len() as u64);
        for (memory, layout) in held {
            assert!(holds(memory, layout, 3));
            // SAFETY: allocated above, once.
            unsafe { heap.free(&cx, memory, layout) };
        }
        heap.trim(&cx);
        assert_eq!((heap.stats().pages, frames.available(&cx)), (0, before));
    }
}
