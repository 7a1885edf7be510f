//! What is freed twice is refused in release builds too, and handed out to nobody else.

use super::{fill, free, holds, layout, with_heap};
use hugemm_heap::Misuse;
use hugemm_threads::run_as;
use std::collections::BTreeSet;

/// By its own CPU or another, at once or after others, whatever is in it: it stays free, and nobody else's memory becomes free.
#[test]
fn what_is_freed_twice_is_refused() {
    for (cpu, size, between) in
        (0..2).flat_map(|cpu| [8, 100, 6000].into_iter().map(move |size| (cpu, size, size != 100)))
    {
        with_heap(8, |threads, _, heap, _| {
            let (cx, layout) = (threads.cx(), layout(size, 8));
            let take = || {
                let memory = heap.alloc(&cx, layout).expect("memory");
                fill(memory, layout, 7);
                memory
            };
            let mut held: Vec<_> = (0..100).map(|_| take()).collect();
            let (twice, other) = (held.swap_remove(50), held.swap_remove(20));
            run_as(cpu);
            free(heap, &cx, twice, layout);
            if between {
                free(heap, &cx, other, layout);
            }
            free(heap, &cx, twice, layout);
            run_as(0);
            assert_eq!((heap.stats().misused, heap.stats().last_misuse), (1, Some(Misuse::FreedTwice)));
            if !between {
                free(heap, &cx, other, layout);
            }
            held.extend((0..200).map(|_| take()));
            assert_eq!(held.iter().collect::<BTreeSet<_>>().len(), held.len(), "one piece has two owners");
            assert!(held.iter().all(|memory| holds(*memory, layout, 7)));
            // All else can be freed, whether its user has written to it or not.
            held.into_iter().for_each(|memory| free(heap, &cx, memory, layout));
            (0..100)
                .map(|_| heap.alloc(&cx, layout).expect("memory"))
                .for_each(|memory| free(heap, &cx, memory, layout));
            assert_eq!(heap.stats().misused, 1);
        });
    }
}
