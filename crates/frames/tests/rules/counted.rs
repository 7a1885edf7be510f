//! Counted pages and folios.

use super::request;
use super::support::with_one_arena;
use hugemm_frames::{FolioRef, Put, RefError, WideCounts};
use std::ptr::NonNull;

#[test]
fn counts_grow_without_limit_once_widened() {
    with_one_arena(0, 512, 1, |frames, _, cx| {
        let page = frames.count(frames.alloc(&cx, request(0)).expect("memory")).expect("fresh");
        let mut held: Vec<FolioRef> = (0..14).map(|_| frames.get(&page).expect("fits")).collect();
        assert_eq!(frames.get(&page), Err(RefError::Saturated));
        let head = page.pfn();
        assert_eq!(frames.references(head), 15);
        let mut wide = Box::new(WideCounts::new());
        // SAFETY: the box outlives the manager's use of it, which ends with this test.
        assert_eq!(unsafe { frames.widen(head, NonNull::from(&mut *wide)) }, Ok(true));
        held.extend((0..5000).map(|_| frames.get(&page).expect("wide")));
        assert_eq!(frames.references(head), 5015);
        for other in held {
            assert_eq!(frames.put(&cx, other), Ok(Put::Kept));
        }
        assert_eq!(frames.put(&cx, page), Ok(Put::Last));
        // And again in the frame's next life.
        let block = frames.alloc(&cx, request(0)).expect("memory");
        assert_eq!(block.pfn(), head);
        let page = frames.count(block).expect("fresh");
        let other = frames.get(&page).expect("wide");
        assert_eq!(frames.put(&cx, other), Ok(Put::Kept));
        assert_eq!(frames.put(&cx, page), Ok(Put::Last));
    });
}

/// A folio that becomes frozen again is what it was allocated for, however large it is.
#[test]
fn a_count_keeps_the_mobility() {
    with_one_arena(0, 4096, 1, |frames, _, cx| {
        for order in [0, 3, 9, 10] {
            for wanted in [request(order), request(order).movable()] {
                let block = frames.alloc(&cx, wanted).expect("memory");
                let folio = frames.count(block).expect("managed");
                let block = frames.freeze(folio).expect("alone");
                assert_eq!(block.mobility(), wanted.mobility, "order {order}");
                frames.free(&cx, block);
            }
        }
    });
}

/// So do those of a run, which nobody allocated one by one.
#[test]
fn a_run_of_counts_keeps_the_mobility() {
    with_one_arena(0, 4096, 1, |frames, _, mut cx| {
        for (order, to) in [(4, 2), (10, 9), (11, 10), (9, 9)] {
            for wanted in [request(order), request(order).movable(), request(order)] {
                let block = frames.alloc(&cx, wanted).expect("memory");
                let run = frames.split(block, super::order(to)).expect("managed");
                let mut run = frames.count_run(run).expect("managed");
                let block = run.pop().map(|folio| frames.freeze(folio).expect("alone")).expect("one");
                assert_eq!(block.mobility(), wanted.mobility, "order {order} to {to}");
                frames.free(&cx, block);
                frames.free_range(&mut cx, run);
            }
        }
    });
}

/// What is left of a run when some of it was taken off is counted from there on to its end, across words of references.
#[test]
fn the_rest_of_a_run_is_counted() {
    with_one_arena(0, 512, 1, |frames, _, mut cx| {
        for taken in [1, 31, 32, 33, 100] {
            let block = frames.alloc(&cx, request(7)).expect("memory");
            let base = block.pfn().get();
            let mut run = frames.split(block, super::order(0)).expect("managed");
            let pages: Vec<_> = (0..taken).map(|_| run.pop().expect("128")).collect();
            let run = frames.count_run(run).expect("managed");
            let counts = (base..base + 128).map(|pfn| frames.references(hugemm_base::Pfn::new(pfn)));
            assert!(counts.eq((0..128).map(|index| u64::from(index >= taken))), "{taken} were taken");
            assert_eq!(frames.free_range(&mut cx, run).freed, 128 - taken);
            pages.into_iter().for_each(|page| frames.free(&cx, page));
        }
        frames.drain(&cx);
        assert_eq!(frames.stats(&cx).blocks[9], 1);
    });
}
