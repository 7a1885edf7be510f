//! Unhooked pages of processes that forked: all have them again, each for itself.

use super::unhooked::{SIZES, filled, let_go, page_out};
use crate::support::{AT, Metered, as_first, no_faults, span, with_format};
use hugemm_base::PageSize;
use std::sync::atomic::{AtomicBool, Ordering};

/// Pages that are away are shared by a fork as those in memory are: each process gets its own when it touches it, and what is
/// stored goes with the last. So many processes as references fit without counters, and more.
#[test]
fn pages_that_are_away_are_inherited() {
    for (size, children) in SIZES.into_iter().flat_map(|size| [1, 14, 15, 20].map(|children| (size, children))) {
        for pinned in [false, true] {
            as_first::<Metered, true>(64, 2, 95, |rig, cx| {
                let parent = filled(rig, cx, size, 2);
                let deferred = rig.deferred();
                let page = rig.unhook(cx, &parent, AT, &deferred);
                assert_eq!(page_out(rig, cx, page, size.pages()).ok(), Some(size.pages()));
                let second = span(AT + size.bytes(), size.bytes());
                let pins = if pinned { rig.pin(cx, &parent, second) } else { Vec::new() };
                rig.leave(cx, &parent);
                let mut spaces: Vec<_> = (0..children).map(|_| rig.vm.fork(cx, &parent).expect("forked")).collect();
                assert_eq!(rig.vm.pager().used() as u64, size.pages(), "one copy for all of them");
                // Frames for counters stay: of the second page, unless each has its own, and of the frame of slots, to
                // which whoever brings the page back takes a reference more.
                let of_slots = size == PageSize::Size2M && children + 1 >= 15;
                rig.keep(u64::from(children >= 15 && !pinned) + u64::from(of_slots));
                spaces.push(parent);
                for space in [&spaces[0], &spaces[children - 1], &spaces[children]] {
                    rig.enter(cx, space);
                    assert_eq!(rig.load(cx, space, AT), Ok(1));
                    assert_eq!(rig.load(cx, space, AT + size.bytes()), Ok(2));
                    assert_eq!(space.counters().refaulted, 1);
                    rig.leave(cx, space);
                }
                let parent = spaces.pop().expect("the parent");
                rig.unpin(cx, &parent, pins);
                for space in spaces.into_iter().chain([parent]) {
                    rig.vm.destroy(cx, space).expect("destroyed");
                }
            });
        }
    }
}

/// Pages of as many processes as references fit without counters, and of more, go away and come back. What their 512 slots
/// stand in takes a frame for counters only if it has to.
#[test]
fn pages_of_many_processes_go_away() {
    for (size, places) in SIZES.into_iter().flat_map(|size| [14, 15, 16, 20].map(|places| (size, places))) {
        as_first::<Metered, true>(32, 2, 96, |rig, cx| {
            let parent = filled(rig, cx, size, 1);
            rig.leave(cx, &parent);
            let mut spaces: Vec<_> = (1..places).map(|_| rig.vm.fork(cx, &parent).expect("forked")).collect();
            spaces.push(parent);
            let head = rig.leaf(cx, &spaces[0], AT).frame;
            assert_eq!(rig.vm.frames().references(head), places);
            rig.vm.widen(cx, head).expect("memory");
            let used = rig.used(cx);
            let deferred = rig.deferred();
            let page = rig.unhook(cx, &spaces[0], AT, &deferred);
            assert_eq!(page_out(rig, cx, page, size.pages()).ok(), Some(size.pages()));
            assert_eq!(rig.vm.pager().used() as u64, size.pages());
            let slots = u64::from(size == PageSize::Size2M);
            let counters = if places > 15 { slots } else { 0 };
            assert_eq!(rig.used(cx), used - size.pages() + slots + counters, "{places} places");
            // Whoever brings the page back takes one reference more.
            rig.keep(1 + if places >= 15 { slots } else { 0 });
            for space in [&spaces[0], spaces.last().expect("the parent")] {
                rig.enter(cx, space);
                assert_eq!(rig.load(cx, space, AT), Ok(1));
                rig.store(cx, space, AT, 2).expect("its own");
                rig.leave(cx, space);
            }
            for space in spaces {
                rig.vm.destroy(cx, space).expect("destroyed");
            }
        });
    }
}

/// A fork waits for a page that is moving, and then the child has it too: whether its pages are shared by parts or, because
/// something is pinned, one by one; with a pager and without, where pages move all the same.
#[test]
fn a_fork_waits_for_a_page_that_is_moving() {
    for (size, pinned) in SIZES.into_iter().flat_map(|size| [false, true].map(|pinned| (size, pinned))) {
        fork_waits::<true>(size, pinned);
        fork_waits::<false>(size, pinned);
    }
}

fn fork_waits<const AWAY: bool>(size: PageSize, pinned: bool) {
    with_format::<Metered, AWAY>(48, 2, 97, &no_faults(), |rig| {
        let (away, forks) = (AtomicBool::new(false), AtomicBool::new(false));
        let (space, pins) = rig.on(0, |cx| {
            let space = filled(rig, cx, size, 3);
            let last = span(AT + 2 * size.bytes(), size.bytes());
            let pins = if pinned { rig.pin(cx, &space, last) } else { Vec::new() };
            (space, pins)
        });
        std::thread::scope(|scope| {
            let (space, away, forks) = (&space, &away, &forks);
            scope.spawn(move || {
                rig.beside_others(0, |cx| {
                    let deferred = rig.deferred();
                    let page = rig.unhook(cx, space, AT + size.bytes(), &deferred);
                    away.store(true, Ordering::SeqCst);
                    while !forks.load(Ordering::SeqCst) {
                        rig.vm.shootdown().handle_ipi(cx);
                    }
                    // Enough for a fork that does not wait to be over.
                    for _ in 0..100 {
                        rig.vm.shootdown().handle_ipi(cx);
                        std::thread::yield_now();
                    }
                    if AWAY {
                        page.put_back(cx);
                    } else {
                        assert_eq!(page.move_elsewhere(cx), size == PageSize::Size4K, "only small ones move");
                    }
                });
            });
            scope.spawn(move || {
                rig.beside_others(1, |cx| {
                    while !away.load(Ordering::SeqCst) {
                        rig.vm.shootdown().handle_ipi(cx);
                    }
                    forks.store(true, Ordering::SeqCst);
                    let child = rig.vm.fork(cx, space).expect("forked");
                    rig.enter(cx, &child);
                    for index in 0..3 {
                        assert_eq!(rig.load(cx, &child, AT + index * size.bytes()), Ok(index + 1));
                    }
                    rig.leave(cx, &child);
                    rig.vm.destroy(cx, child).expect("destroyed");
                });
            });
        });
        rig.on(0, |cx| {
            rig.unpin(cx, &space, pins);
            rig.leave(cx, &space);
            rig.vm.destroy(cx, space).expect("destroyed");
        });
    });
}

/// A page is taken out of as many places as its slot can be shared among for certain, and of no more.
#[test]
fn a_page_of_too_many_places_stays() {
    const MOST: usize = 1 << 12;
    as_first::<Metered, true>(128, 2, 107, |rig, cx| {
        let space = filled(rig, cx, PageSize::Size4K, 1);
        rig.leave(cx, &space);
        let (head, deferred) = (rig.leaf(cx, &space, AT).frame, rig.deferred());
        let mut children = Vec::new();
        for (places, goes) in [(MOST, true), (MOST + 1, false)] {
            children.resize_with(places - 1, || rig.vm.fork(cx, &space).expect("memory"));
            match rig.vm.unhook(cx, rig.hold(head), &deferred) {
                Ok(page) => {
                    assert!(goes);
                    page.put_back(cx);
                }
                Err(folio) => {
                    assert!(!goes);
                    let_go(rig, cx, folio);
                }
            }
            assert_eq!(rig.vm.frames().references(head), places as u64);
        }
        for space in children.into_iter().chain([space]) {
            rig.vm.destroy(cx, space).expect("destroyed");
        }
        // For counts of so many references.
        rig.keep(1);
    });
}
