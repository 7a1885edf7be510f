//! Nothing that others did makes a call take long with interrupts off, or keeps their memory for good.

use super::{Cx, free, layout, realloc, with_heap};
use hugemm_frames::{Carved, ROUNDS_PER_PIN};
use hugemm_heap::Heap;
use hugemm_threads::{Random, run_as};
use std::alloc::Layout;
use std::ptr::NonNull;

const KIB: usize = 1024;
/// Pieces of 1 KiB in a slab, and its pages.
const PIECES: usize = 31;
const PAGES: u64 = 8;

/// So many slabs of 1 KiB pieces, all in use.
fn full(heap: &Heap<'_, Carved>, cx: &Cx<'_>, slabs: usize) -> Vec<NonNull<u8>> {
    let held: Vec<_> = (0..slabs * PIECES).map(|_| heap.alloc(cx, layout(KIB, 8)).expect("memory")).collect();
    assert_eq!(heap.stats().pages, slabs as u64 * PAGES);
    held
}

/// An allocation after any number of frees by another CPU looks at eight slabs, not at all of them; later ones look at the others, so that
/// all goes back all the same.
#[test]
fn an_allocation_does_not_serve_all_that_others_have_freed() {
    with_heap(64, |threads, _, heap, _| {
        let (cx, slabs) = (threads.cx(), if cfg!(miri) { 20 } else { 1000 });
        let all = full(heap, &cx, slabs);
        run_as(1);
        all.into_iter().for_each(|memory| free(heap, &cx, memory, layout(KIB, 8)));
        run_as(0);
        let (mut held, mut before, mut most) = (Vec::new(), heap.stats().pages, 0);
        for _ in 0..slabs / 4 * PIECES {
            held.push(heap.alloc(&cx, layout(KIB, 8)).expect("memory"));
            let now = heap.stats().pages;
            most = most.max(before.saturating_sub(now) / PAGES);
            before = now;
        }
        assert!((1..=8).contains(&most), "one allocation has given {most} slabs back");
        let used = (slabs / 4) as u64 * PAGES;
        assert!((used..=used + 2 * PAGES).contains(&before), "{before} pages, of which {used} are in use");
        held.into_iter().for_each(|memory| free(heap, &cx, memory, layout(KIB, 8)));
    });
}

/// Slabs that others empty while they are on their owner's list go back when the owner needs another one, of that size or any: no more of
/// them in one allocation than it may look at.
#[test]
fn listed_slabs_that_others_empty_go_back() {
    for (other, told) in [(false, false), (true, false), (false, true), (true, true)] {
        with_heap(64, |threads, _, heap, _| {
            let (cx, slabs) = (threads.cx(), if cfg!(miri) { 10 } else { 200 });
            let all = full(heap, &cx, slabs);
            // One of each makes the owner list them: one of its own, or another CPU's, of which it has been told then. Another CPU frees
            // the rest.
            let (first, others): (Vec<_>, Vec<_>) = all.into_iter().enumerate().partition(|(at, _)| at % PIECES == 0);
            run_as(u32::from(told));
            first.into_iter().for_each(|(_, memory)| free(heap, &cx, memory, layout(KIB, 8)));
            if told {
                run_as(0);
                heap.trim(&cx);
            }
            run_as(1);
            others.into_iter().for_each(|(_, memory)| free(heap, &cx, memory, layout(KIB, 8)));
            run_as(0);
            // A few are in use at a time, so that the owner runs out of the slab in use now and then; or slabs of another size are taken.
            let (mut held, size) = (Vec::new(), if other { 6144 } else { KIB });
            for round in 0..slabs as u64 * 20 {
                if held.len() < 40 || other && round % 3 != 0 {
                    let before = heap.stats().pages;
                    held.push(heap.alloc(&cx, layout(size, 8)).expect("memory"));
                    let given = before.saturating_sub(heap.stats().pages) / PAGES;
                    assert!(given <= 8, "one allocation has given {given} slabs back");
                } else {
                    free(heap, &cx, held.remove(0), layout(size, 8));
                }
                if other && held.len() == slabs * 5 {
                    break;
                }
            }
            let used = (held.len() as u64).div_ceil(if other { 5 } else { PIECES as u64 }) * PAGES;
            let now = heap.stats().pages;
            assert!(now < used + slabs as u64 * PAGES / 10 + 4 * PAGES, "{now} pages, of which {used} are in use");
            held.into_iter().for_each(|memory| free(heap, &cx, memory, layout(size, 8)));
        });
    }
}

/// Lock rounds of the manager in any one pin, whatever the heap does: a platform's interrupts come before and after every pin, and look.
#[test]
#[cfg_attr(miri, ignore = "takes minutes")]
fn a_pin_holds_few_lock_rounds() {
    with_heap(64, |threads, frames, heap, _| {
        let small = [KIB, 6144, 64, 300];
        let mut rng = Random(7);
        let mut worst = 0;
        let mut last = None;
        let look = |cx: &mut Cx<'_>| {
            // Its own look is one.
            let now = frames.node_stats(cx, hugemm_base::NodeId::new(0)).lock_rounds;
            if let Some(last) = last.replace(now) {
                worst = worst.max(now - last - 1);
            }
        };
        threads.interrupted(look, |cx| {
            for round in 0..6 {
                let all: Vec<(NonNull<u8>, Layout)> = (0..12_000)
                    .map(|index| {
                        let layout = layout(small[(index + round) % 4], 8);
                        (heap.alloc(cx, layout).expect("memory"), layout)
                    })
                    .collect();
                // Some of the owner's, the rest another CPU's, in any order.
                let (mut mine, mut others): (Vec<_>, Vec<_>) = all.into_iter().partition(|_| rng.below(3) == 0);
                let mut free_all = |held: &mut Vec<(NonNull<u8>, Layout)>| {
                    while !held.is_empty() {
                        let (memory, layout) = held.swap_remove(rng.below(held.len() as u64) as usize);
                        free(heap, cx, memory, layout);
                    }
                };
                free_all(&mut mine);
                run_as(1);
                free_all(&mut others);
                run_as(0);
                // Whatever finds them: an allocation, one of a block when memory is out, a trim, a change of size.
                let few: Vec<_> = (0..40).map(|_| heap.alloc(cx, layout(KIB, 8)).expect("memory")).collect();
                few.into_iter().for_each(|memory| free(heap, cx, memory, layout(KIB, 8)));
                match round % 3 {
                    0 => heap.trim(cx),
                    1 => assert!(heap.alloc(cx, layout(63 << 20, 8)).is_err()),
                    _ => {
                        let wanted = layout(500_000, 8);
                        let memory = heap.alloc(cx, wanted).expect("memory");
                        let less = realloc(heap, cx, memory, wanted, 70_000).expect("less");
                        free(heap, cx, less, layout(70_000, 8));
                    }
                }
            }
        });
        assert!(worst >= 1, "nothing was counted");
        assert!(worst <= ROUNDS_PER_PIN, "{worst} lock rounds in one pin");
        for cpu in [1, 0] {
            run_as(cpu);
            heap.trim(&threads.cx());
        }
        assert_eq!(heap.stats().pages, 0);
    });
}
