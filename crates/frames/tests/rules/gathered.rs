//! Blocks of orders that are not cached, but gathered on their way to the node: whether one is taken from there.

use super::request;
use super::support::{arena, run_as, with_arenas, with_one_arena};
use hugemm_base::{NodeId, Pfn, Zeroed};
use hugemm_frames::{AllocError, Frozen, Placement};

/// A block that is gathered on its way to the node, and what it makes there, is found by the next allocation.
#[test]
fn what_is_gathered_merges_before_anything_is_taken() {
    with_one_arena(0, 1 << 14, 1, |frames, _, cx| {
        let first = frames.alloc(&cx, request(4)).expect("memory");
        let place = first.pfn();
        frames.free(&cx, first);
        assert_eq!(frames.stats(&cx).cached, 16, "gathered");
        let larger = frames.alloc(&cx, request(8)).expect("memory");
        assert_eq!(larger.pfn(), place);
        frames.free(&cx, larger);
    });
}

/// A block that was just freed is taken again without a lock round where the node would give the same one, and only there.
#[test]
fn a_gathered_block_is_taken_again_where_it_is_the_lowest() {
    with_one_arena(0, 1 << 14, 1, |frames, _, cx| {
        let take = |order| frames.alloc(&cx, request(order)).expect("memory");
        let rounds = || frames.stats(&cx).lock_rounds;
        // Two of order 8 make 2 MiB, which are taken last.
        for order in 4..8 {
            let [a, b, c, d] = [0; 4].map(|_| take(order));
            let places = [&a, &b, &c, &d].map(Frozen::pfn);
            assert!(places.is_sorted());
            frames.free(&cx, d);
            // A look at the rounds is one, and a visit to the node.
            let before = rounds();
            let d = take(order);
            frames.free(&cx, d);
            let d = take(order);
            assert_eq!((d.pfn(), rounds()), (places[3], before + 2));

            let e = take(order);
            for block in [c, a, b] {
                frames.free(&cx, block);
            }
            let [a, b, c] = [0; 3].map(|_| take(order));
            assert_eq!([&a, &b, &c].map(Frozen::pfn), places[..3]);
            frames.free(&cx, e);

            let a = {
                frames.free(&cx, a);
                frames.drain(&cx);
                frames.free(&cx, d);
                take(order)
            };
            assert_eq!(a.pfn(), places[0], "this CPU has given back a lower one since");
            let d = take(order);
            assert_eq!(d.pfn(), places[3]);

            frames.free(&cx, a);
            frames.free(&cx, b);
            frames.drain(&cx);
            let a = take(order);
            assert_eq!(a.pfn(), places[0]);
            frames.free(&cx, d);
            let b = take(order);
            assert_eq!(b.pfn(), places[1], "there are lower ones than what was freed last");

            frames.free(&cx, a);
            frames.drain(&cx);
            let larger = take(order + 1);
            frames.free(&cx, b);
            let a = take(order);
            assert_eq!(a.pfn(), places[0], "that a larger one was the lowest says nothing");
            frames.free(&cx, larger);

            let b = take(order);
            frames.free(&cx, b);
            let other = take(order - 1);
            assert_eq!(other.pfn(), places[1], "of another order it is a part");
            [a, c, other].into_iter().for_each(|block| frames.free(&cx, block));
            frames.drain(&cx);
            assert_eq!(frames.stats(&cx).free, 1 << 14);
        }
    });
}

/// Where something else is asked for, or lower memory is on its way back, it is not.
#[test]
fn a_gathered_block_is_not_taken_for_another() {
    with_arenas(&[arena(0, 1 << 14, 0), arena(1 << 14, 1 << 14, 1)], 1, &[NodeId::new(0)], |frames, _, cx| {
        let block = frames.alloc(&cx, request(6)).expect("memory");
        let place = block.pfn();
        let again = |request, expected: &dyn Fn(&Frozen) -> bool, what: &str| {
            let block = frames.alloc(&cx, request).expect("memory");
            assert!(expected(&block), "{what}: {block:?}");
            frames.free(&cx, block);
        };
        let same = |block: &Frozen| block.pfn() == place;
        frames.free(&cx, block);
        for node in [0, 1] {
            let on_node = |block: &Frozen| frames.node_of(block.pfn()) == Some(NodeId::new(node));
            for from in [Placement::Prefer(NodeId::new(node)), Placement::Only(NodeId::new(node))] {
                again(request(6), &same, "here");
                again(request(6).from(from), &on_node, "on a node");
            }
        }
        again(request(6), &same, "back");
        let rounds = frames.stats(&cx).lock_rounds;
        again(request(6), &same, "the look was a visit to the node");
        again(request(6).prefer_zeroed(), &same, "there are no zeroes");
        assert_eq!(frames.stats(&cx).lock_rounds, rounds + 3, "two nodes are looked at, and one is taken from");
        let zeroed = frames.alloc(&cx, request(9)).expect("memory").into_dirty().into_extent();
        // SAFETY: the test's own, and nobody looks at what is in them.
        frames.free_zeroed(&cx, unsafe { Zeroed::assume_owned(zeroed) });
        frames.drain(&cx);
        again(request(6), &same, "of any content");
        again(request(6).prefer_zeroed(), &Frozen::is_zero, "zeroes");
    });
    with_one_arena(0, 1 << 14, 1, |frames, _, cx| {
        let pages: Vec<Frozen> = (0..1024).map(|_| frames.alloc(&cx, request(0)).expect("memory")).collect();
        let (low, high): (Vec<_>, Vec<_>) = pages.into_iter().partition(|page| page.pfn() < Pfn::new(512));
        let (holes, kept): (Vec<_>, Vec<_>) = low.into_iter().partition(|page| page.pfn().get() % 2 == 0);
        holes.into_iter().for_each(|page| frames.free(&cx, page));
        frames.drain(&cx);
        let page = frames.alloc(&cx, request(0)).expect("memory");
        assert!(page.pfn() < Pfn::new(512), "what lies higher is not near any more");
        let block = frames.alloc(&cx, request(6)).expect("memory");
        assert!(block.pfn() >= Pfn::new(1024));
        frames.free(&cx, block);
        let (leavers, rest): (Vec<_>, Vec<_>) = high.into_iter().partition(|page| page.pfn() < Pfn::new(512 + 64));
        leavers.into_iter().for_each(|page| frames.free(&cx, page));
        let block = frames.alloc(&cx, request(6)).expect("memory");
        assert_eq!(block.pfn(), Pfn::new(512), "given back before anything is taken");
        [block, page].into_iter().chain(kept).chain(rest).for_each(|block| frames.free(&cx, block));
    });
}

/// Nor while another CPU asks for what is cached: that goes before.
#[test]
fn a_request_is_served_before_a_gathered_block_is_taken() {
    with_one_arena(0, 1 << 14, 2, |frames, _, cx| {
        let page = frames.alloc(&cx, request(0)).expect("memory");
        let block = frames.alloc(&cx, request(6)).expect("memory");
        frames.free(&cx, block);
        run_as(1);
        // With what the other has cached, all of it is free.
        assert_eq!(frames.alloc(&cx, request(14)), Err(AllocError::OutOfMemory));
        assert!(frames.stats(&cx).cached > 64);
        run_as(0);
        let block = frames.alloc(&cx, request(6)).expect("memory");
        assert_eq!(frames.stats(&cx).cached, 0);
        frames.free(&cx, block);
        frames.free(&cx, page);
    });
}

/// Nor is one with a poisoned frame in it, though it was the lowest: whether it was in use then or had been gathered already, and
/// whichever CPU says so.
#[test]
fn a_gathered_block_with_poison_is_not_taken_again() {
    with_one_arena(0, 1 << 14, 2, |frames, _, cx| {
        let mut refused = 0;
        for (gathered, teller) in [(false, 0), (false, 1), (true, 0), (true, 1)] {
            for order in 4..9 {
                run_as(0);
                let block = frames.alloc(&cx, request(order)).expect("memory");
                let poisoned = Pfn::new(block.pfn().get() + 3);
                let mut block = Some(block);
                if gathered {
                    block.take().into_iter().for_each(|block| frames.free(&cx, block));
                }
                run_as(teller);
                frames.hwpoison(&cx, poisoned);
                run_as(0);
                block.into_iter().for_each(|block| frames.free(&cx, block));
                let next = frames.alloc(&cx, request(order)).expect("memory");
                let taken = next.pfn().get()..next.pfn().get() + (1 << order);
                assert!(!taken.contains(&poisoned.get()), "of order {order}, gathered {gathered}, told by {teller}");
                frames.free(&cx, next);
                refused += 1;
            }
        }
        frames.drain(&cx);
        let stats = frames.stats(&cx);
        assert_eq!((stats.refused, stats.available()), (refused, (1 << 14) - refused));
    });
}

/// What is freed without waiting may be lower than what this CPU has gathered.
#[test]
fn a_gathered_block_is_not_taken_after_a_lower_one_was_freed_without_waiting() {
    with_one_arena(0, 1 << 14, 1, |frames, _, cx| {
        // Two of order 8 make 2 MiB, which are taken last.
        for order in 4..8 {
            let [low, high] = [(); 2].map(|()| frames.alloc(&cx, request(order)).expect("memory"));
            let lowest = low.pfn();
            assert!(lowest < high.pfn());
            frames.free(&cx, high);
            frames.free_nowait(&cx, low);
            let again = frames.alloc(&cx, request(order)).expect("memory");
            assert_eq!(again.pfn(), lowest, "order {order}");
            // And what is taken without waiting was the lowest.
            let high = frames.alloc(&cx, request(order)).expect("memory");
            frames.free(&cx, high);
            let taken = frames.alloc_nowait(&cx, request(order)).expect("memory");
            frames.free(&cx, again);
            let again = frames.alloc(&cx, request(order)).expect("memory");
            assert_eq!(again.pfn(), lowest, "order {order}");
            [taken, again].into_iter().for_each(|block| frames.free(&cx, block));
            frames.drain(&cx);
        }
    });
}
