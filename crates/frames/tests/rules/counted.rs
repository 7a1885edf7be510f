//! Counted pages and folios.

use super::request;
use super::support::with_one_arena;
use hugemm_frames::{Put, RefError, WideCounts};
use std::ptr::NonNull;

#[test]
fn counts_grow_without_limit_once_widened() {
    with_one_arena(0, 512, 1, |frames, threads| {
        let cx = threads.cx();
        let page = frames.count(frames.alloc(&cx, request(0)).expect("memory")).expect("fresh");
        for _ in 0..14 {
            frames.get(page).expect("fits");
        }
        assert_eq!(frames.get(page), Err(RefError::Saturated));
        assert_eq!(frames.references(page), 15);
        let mut wide = Box::new(WideCounts::new());
        // SAFETY: the box outlives the manager's use of it, which ends with this test.
        assert_eq!(unsafe { frames.widen(page, NonNull::from(&mut *wide)) }, Ok(true));
        for _ in 0..5000 {
            frames.get(page).expect("wide");
        }
        assert_eq!(frames.references(page), 5015);
        for _ in 0..5014 {
            assert_eq!(frames.put(&cx, page), Ok(Put::Kept));
        }
        assert_eq!(frames.put(&cx, page), Ok(Put::Last));
        // And again in the frame's next life.
        let block = frames.alloc(&cx, request(0)).expect("memory");
        assert_eq!(block.pfn(), page);
        let page = frames.count(block).expect("fresh");
        frames.get(page).expect("wide");
        assert_eq!(frames.put(&cx, page), Ok(Put::Kept));
        assert_eq!(frames.put(&cx, page), Ok(Put::Last));
    });
}

/// A folio that becomes frozen again is what it was allocated for, however large it is.
#[test]
fn a_count_keeps_the_mobility() {
    with_one_arena(0, 4096, 1, |frames, threads| {
        let cx = threads.cx();
        for order in [0, 3, 9, 10] {
            for wanted in [request(order), request(order).movable()] {
                let block = frames.alloc(&cx, wanted).expect("memory");
                let pfn = frames.count(block).expect("frozen");
                let block = frames.freeze(pfn).expect("counted").expect("alone");
                assert_eq!(block.mobility(), wanted.mobility, "order {order}");
                frames.free(&cx, block);
            }
        }
    });
}
