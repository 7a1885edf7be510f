//! What ageing finds in the mappings of a page, and what it leaves there.

use crate::support::{
    AT, Cx, Follower, Handle, Model, Rig, SMALL, at_flush, bounds, no_faults, span, with_cpu, with_rig,
};
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Order, PageSize, Pfn, VirtAddr, VirtRange, with};
use hugemm_paging::{Flags, Lookup};
use hugemm_vm::{AgeRun, Backing, Neighbours, Notifier, Pattern, Recency, SharedRef, VmError, VmaKind};
use std::cell::RefCell;
use std::sync::Arc;

const USED: Recency = with!(Recency::UNUSED, young = true, users = 1);
const OLD: Recency = Recency::UNUSED;
const KEPT: Recency = with!(Recency::UNUSED, keep = true);

/// A space with `pages` pages at `AT`, all of them written: a private area, or one of an object.
fn filled<'v, 'h>(
    rig: &'v Rig<'h>,
    cx: &mut Cx<'_, 'h>,
    kind: VmaKind,
    object: Option<&SharedRef<'v, Model<'h>>>,
    pages: u64,
) -> Handle<'v, 'h> {
    let space = rig.vm.create(cx, bounds()).expect("a space");
    let backing = object.map_or(Backing::Private, |object| Backing::Shared(object, 0));
    rig.vm.map(cx, &space, span(AT, pages << 12), kind, backing).expect("an area");
    use_pages(rig, cx, &space, 0..pages);
    space
}

fn use_pages<'h>(rig: &Rig<'h>, cx: &mut Cx<'_, 'h>, space: &Handle<'_, 'h>, pages: std::ops::Range<u64>) {
    rig.enter(cx, space);
    pages.for_each(|page| rig.store(cx, space, AT + (page << 12), page + 1).expect("memory"));
    rig.leave(cx, space);
}

fn frame<'h>(rig: &Rig<'h>, cx: &mut Cx<'_, 'h>, space: &Handle<'_, 'h>, page: u64) -> Pfn {
    match rig.vm.lookup(cx, space, VirtAddr::new(AT + (page << 12))) {
        Lookup::Mapped(leaf) => leaf.frame,
        found => panic!("{found:?}"),
    }
}

fn is_young<'h>(rig: &Rig<'h>, cx: &mut Cx<'_, 'h>, space: &Handle<'_, 'h>, page: u64) -> bool {
    let found = rig.vm.lookup(cx, space, VirtAddr::new(AT + (page << 12)));
    matches!(found, Lookup::Mapped(leaf) if leaf.flags.contains(Flags::ACCESSED))
}

/// Ages these pages of the space's area.
fn age<'p, 'h>(
    rig: &Rig<'h>,
    cx: &mut Cx<'p, 'h>,
    space: &Handle<'_, 'h>,
    pages: &[u64],
    neighbours: Option<Neighbours<'_, 'p, Model<'h>>>,
) -> Vec<Recency> {
    let object = space.find_vma(cx, VirtAddr::new(AT)).expect("an area").object;
    let pages: Vec<_> = pages.iter().map(|&page| (page, frame(rig, cx, space, page))).collect();
    let mut found = vec![Recency::default(); pages.len()];
    rig.vm.age(cx, &AgeRun { object, pages: &pages, order: Order::ZERO }, &mut found, neighbours);
    found
}

/// What was used is young once, and nothing is taken from pages between and around those that were asked for.
#[test]
fn a_run_is_harvested_and_nothing_else() {
    with_cpu(16, 1, 61, |rig, cx| {
        let space = filled(rig, cx, SMALL, None, 100);
        assert_eq!(age(rig, cx, &space, &[3, 4, 9], None), [USED; 3]);
        assert_eq!(age(rig, cx, &space, &[3, 4, 9], None), [OLD; 3], "their bits are taken");
        (0..100).for_each(|page| assert_eq!(is_young(rig, cx, &space, page), ![3, 4, 9].contains(&page), "{page}"));
        assert_eq!(age(rig, cx, &space, &[2, 3, 10, 63], None), [USED, OLD, USED, USED]);
        rig.vm.age(cx, &AgeRun { object: 1 << 40, pages: &[(0, Pfn::new(0))], order: Order::ZERO }, &mut [OLD], None);
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// Each mapping counts once, in each space that has it; a process's own copy at the same offset is another page.
#[test]
fn mappings_are_counted() {
    with_cpu(16, 1, 62, |rig, cx| {
        let object = rig.vm.create_shared(cx, 8, PageSize::Size4K, false).expect("an object");
        let spaces = [0, 1, 2].map(|_| filled(rig, cx, SMALL, Some(&object), 8));
        let everywhere = with!(USED, users = 3);
        assert_eq!(age(rig, cx, &spaces[0], &[1, 2], None), [everywhere; 2]);
        assert_eq!(age(rig, cx, &spaces[2], &[2, 3], None), [OLD, everywhere]);
        rig.vm.close(cx, object).expect("its own");

        let parent = filled(rig, cx, SMALL, None, 8);
        let child = rig.vm.fork(cx, &parent).expect("forked");
        use_pages(rig, cx, &child, 0..4);
        // Pages 0 to 3 are copies in the child; both still show 4 to 7, which both have used.
        let found = age(rig, cx, &parent, &[0, 1, 5], None);
        assert_eq!(found, [USED, USED, with!(USED, users = 2)]);
        assert!(is_young(rig, cx, &child, 0), "the copy was not asked for");
        assert_eq!(age(rig, cx, &child, &[1], None), [USED]);
        assert_eq!(age(rig, cx, &child, &[0, 1], None), [USED, OLD]);
        for space in spaces.into_iter().chain([parent, child]) {
            rig.vm.destroy(cx, space).expect("destroyed");
        }
    });
}

/// Locked areas keep their pages and areas without recency say nothing; neither loses its bits.
#[test]
fn areas_say_what_their_use_means() {
    with_cpu(16, 1, 63, |rig, cx| {
        for (kind, expected) in [(SMALL, KEPT), (with!(SMALL, pattern = Pattern::Sequential), OLD)] {
            let space = filled(rig, cx, kind, None, 4);
            if expected == KEPT {
                rig.vm.lock(cx, &space, span(AT, 0x4000), 4).expect("within the limit");
            }
            assert_eq!(age(rig, cx, &space, &[1, 2], None), [expected; 2]);
            assert!((0..4).all(|page| is_young(rig, cx, &space, page)));
            rig.vm.destroy(cx, space).expect("destroyed");
        }
        // One locked mapping of two keeps what it shows, and no more.
        let object = rig.vm.create_shared(cx, 8, PageSize::Size4K, false).expect("an object");
        let plain = filled(rig, cx, SMALL, Some(&object), 8);
        let locked = filled(rig, cx, SMALL, Some(&object), 4);
        rig.vm.lock(cx, &locked, span(AT, 0x4000), 4).expect("within the limit");
        let kept = with!(USED, keep = true);
        assert_eq!(age(rig, cx, &plain, &[3, 4], None), [kept, USED]);
        for space in [plain, locked] {
            rig.vm.destroy(cx, space).expect("destroyed");
        }
        rig.vm.close(cx, object).expect("its own");
    });
}

/// Neighbours that have been used are offered once, whatever maps them; those that are wanted are old afterwards, in every
/// mapping that comes after, the others as young as before. Who wants them is told of each once, before the page can go.
#[test]
fn neighbours_are_offered_once() {
    fn check<'h>(rig: &Rig<'h>) {
        rig.on(0, |cx| {
            let object = rig.vm.create_shared(cx, 192, PageSize::Size4K, false).expect("an object");
            let spaces = [0, 1].map(|_| filled(rig, cx, SMALL, Some(&object), 192));
            let frames: Vec<_> = (0..192).map(|page| frame(rig, cx, &spaces[0], page)).collect();
            let page = |head: Pfn| frames.iter().position(|frame| *frame == head).expect("of the object") as u64;
            let offered = RefCell::new(Vec::new());
            let wants = |head: Pfn| {
                offered.borrow_mut().push(page(head));
                page(head).is_multiple_of(2)
            };
            let mut taken: Vec<Vec<u64>> = Vec::new();
            let mut take = |_: &Cx<'_, 'h>, heads: &[Pfn]| taken.push(heads.iter().map(|head| page(*head)).collect());
            let both = with!(USED, users = 2);
            let neighbours = Neighbours { wants: &wants, take: &mut take };
            assert_eq!(age(rig, cx, &spaces[0], &[70, 71], Some(neighbours)), [both; 2]);
            let even: Vec<u64> = (64..128).filter(|page| page % 2 == 0 && *page != 70).collect();
            assert_eq!(taken, [even], "in the walk that found them, and not again in the next");
            let mut offered = offered.into_inner();
            offered.sort_unstable();
            let around = || (64..128).filter(|page| ![70, 71].contains(page));
            let mut expected: Vec<u64> =
                around().flat_map(|page| vec![page; if page % 2 == 0 { 1 } else { 2 }]).collect();
            expected.sort_unstable();
            assert_eq!(offered, expected, "what is not wanted in one mapping is offered in the next");
            for space in &spaces {
                for page in 0..192 {
                    let harvested = (64..128).contains(&page) && (page % 2 == 0 || page == 71);
                    assert_eq!(is_young(rig, cx, space, page), !harvested, "page {page}");
                }
            }
            for space in spaces {
                rig.vm.destroy(cx, space).expect("destroyed");
            }
            rig.vm.close(cx, object).expect("its own");
        });
    }
    with_rig(16, 1, 64, &no_faults(), check);
}

/// What is read here and there says nothing of its neighbours, which keep their bits.
#[test]
fn random_areas_have_no_neighbours() {
    with_cpu(16, 1, 65, |rig, cx| {
        let space = filled(rig, cx, with!(SMALL, pattern = Pattern::Random), None, 64);
        let mut take = |_: &Cx<'_, '_>, _: &[Pfn]| panic!("nobody's neighbour");
        let neighbours = Neighbours { wants: &|_| true, take: &mut take };
        assert_eq!(age(rig, cx, &space, &[10, 11], Some(neighbours)), [USED; 2]);
        assert!((0..64).all(|page| is_young(rig, cx, &space, page) != [10, 11].contains(&page)));
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// A run is pages at different places of one stretch of 64: of two at one place, and of what lies further on, nothing is said, and
/// their bits stay.
#[test]
fn a_run_lies_in_one_stretch() {
    with_cpu(16, 1, 67, |rig, cx| {
        let parent = filled(rig, cx, SMALL, None, 130);
        let child = rig.vm.fork(cx, &parent).expect("forked");
        use_pages(rig, cx, &child, 0..1);
        use_pages(rig, cx, &parent, 0..1);
        assert_eq!(age(rig, cx, &parent, &[63, 64, 127], None)[1..], [OLD; 2]);
        assert_eq!(age(rig, cx, &parent, &[64, 127, 128], None)[2], OLD);
        assert!(is_young(rig, cx, &parent, 128) && !is_young(rig, cx, &parent, 127));
        let object = parent.find_vma(cx, VirtAddr::new(AT)).expect("an area").object;
        let pages = [&parent, &child].map(|space| (0, frame(rig, cx, space, 0)));
        let mut found = [OLD; 2];
        rig.vm.age(cx, &AgeRun { object, pages: &pages, order: Order::ZERO }, &mut found, None);
        assert_eq!(found, [USED, OLD]);
        assert!(!is_young(rig, cx, &parent, 0) && is_young(rig, cx, &child, 0));
        for space in [child, parent] {
            rig.vm.destroy(cx, space).expect("destroyed");
        }
    });
}

/// Has used everything below an address.
struct Guest(u64);

impl<P: Cpu> Notifier<P> for Guest {
    fn begin(&self, _cx: &mut CpuCx<'_, P>, _range: VirtRange) {}
    fn end(&self, _cx: &mut CpuCx<'_, P>, _range: VirtRange) {}
    fn young(&self, range: VirtRange) -> bool {
        range.last().get() < self.0
    }
}

/// Whoever follows a space is asked of each page, at its address.
#[test]
fn followers_are_asked() {
    with_cpu(16, 1, 65, |rig, cx| {
        let space = filled(rig, cx, SMALL, None, 8);
        let follower = rig.vm.follow(cx, &space, Follower(Arc::new(Guest(AT + 0x3000)))).expect("memory");
        let twice = with!(USED, users = 2);
        assert_eq!(age(rig, cx, &space, &[2, 3], None), [twice, USED]);
        assert_eq!(age(rig, cx, &space, &[1, 2, 3], None), [twice, USED, OLD]);
        // SAFETY: the follower is this space's.
        let _ = unsafe { rig.vm.unfollow(cx, &space, follower) };
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// A space that is being taken apart does not count, and if nobody else has a page it is left alone: it goes by itself.
#[test]
fn spaces_that_end_do_not_count() {
    with_cpu(16, 3, 66, |rig, cx| {
        for shared in [false, true] {
            let object = rig.vm.create_shared(cx, 4, PageSize::Size4K, false).expect("an object");
            let ends = filled(rig, cx, SMALL, Some(&object), 4);
            let stays = shared.then(|| filled(rig, cx, SMALL, Some(&object), 4));
            let beside = [0, 2].map(|offset| {
                let space = rig.vm.create(cx, bounds()).expect("a space");
                let pages = span(AT, if offset == 0 { 0x1000 } else { 0x2000 });
                rig.vm.map(cx, &space, pages, SMALL, Backing::Shared(&object, offset)).expect("an area");
                space
            });
            let number = ends.find_vma(cx, VirtAddr::new(AT)).expect("an area").object;
            let head = frame(rig, cx, &ends, 1);
            // A CPU is still on its tables, and has to be asked.
            rig.on(1, |cx| {
                rig.enter(cx, &ends);
                rig.lazy(cx, &ends);
            });
            let meanwhile = || {
                rig.on(2, |cx| {
                    let mut found = [OLD];
                    rig.vm.age(
                        cx,
                        &AgeRun { object: number, pages: &[(1, head)], order: Order::ZERO },
                        &mut found,
                        None,
                    );
                    let expected = if shared { USED } else { KEPT };
                    assert_eq!(found, [expected]);
                });
            };
            at_flush(&meanwhile, || rig.vm.destroy(cx, ends).expect("destroyed"));
            for space in stays.into_iter().chain(beside) {
                rig.vm.destroy(cx, space).expect("destroyed");
            }
            rig.vm.close(cx, object).expect("its own");
        }
    });
}

/// A space that could not be destroyed, because a CPU uses it, counts again.
#[test]
fn a_space_that_does_not_end_counts() {
    with_cpu(16, 2, 68, |rig, cx| {
        let space = rig.vm.create(cx, bounds()).expect("a space");
        rig.on(1, |cx| rig.enter(cx, &space));
        let (error, space) = rig.vm.destroy(cx, space).expect_err("in use");
        assert_eq!(error, VmError::InUse);
        rig.on(1, |cx| rig.leave(cx, &space));
        rig.vm.map(cx, &space, span(AT, 0x1000), SMALL, Backing::Private).expect("an area");
        use_pages(rig, cx, &space, 0..1);
        assert_eq!(age(rig, cx, &space, &[0], None), [USED]);
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// Pages of 2 MiB, shown from the middle of their object on, by a space that a guest follows.
#[test]
fn large_pages_are_aged_by_their_place_in_the_object() {
    const SIZE: PageSize = PageSize::Size2M;
    with_cpu(32, 1, 69, |rig, cx| {
        let pages = SIZE.pages();
        let object = rig.vm.create_shared(cx, 200 * pages, SIZE, false).expect("an object");
        let space = rig.vm.create(cx, bounds()).expect("a space");
        // Offsets 66 to 71, of the stretch that begins with 64.
        let (kind, backing) = (VmaKind::private(SIZE), Backing::Shared(&object, 66 * pages));
        rig.vm.map(cx, &space, span(AT, 6 * SIZE.bytes()), kind, backing).expect("an area");
        let at = |page: u64| VirtAddr::new(AT + (page - 66) * SIZE.bytes());
        rig.enter(cx, &space);
        (66..72).for_each(|page| rig.store(cx, &space, at(page).get(), page).expect("memory"));
        rig.leave(cx, &space);
        let guest = Guest(at(68).get());
        let follower = rig.vm.follow(cx, &space, Follower(Arc::new(guest))).expect("memory");
        let run = [66, 68, 71].map(|page| match rig.vm.lookup(cx, &space, at(page)) {
            Lookup::Mapped(leaf) => (page * pages, leaf.frame),
            found => panic!("{found:?}"),
        });
        let object_number = space.find_vma(cx, at(66)).expect("an area").object;
        for expected in [[with!(USED, users = 2), USED, USED], [USED, OLD, OLD]] {
            let mut found = [OLD; 3];
            let wants = |_: Pfn| panic!("of large pages no others are looked at");
            let mut take = |_: &Cx<'_, '_>, _: &[Pfn]| panic!("none are wanted");
            let neighbours = Some(Neighbours { wants: &wants, take: &mut take });
            let run = AgeRun { object: object_number, pages: &run, order: SIZE.order() };
            rig.vm.age(cx, &run, &mut found, neighbours);
            assert_eq!(found, expected);
        }
        let young = (66..72).filter(|page| {
            let found = rig.vm.lookup(cx, &space, at(*page));
            matches!(found, Lookup::Mapped(leaf) if leaf.flags.contains(Flags::ACCESSED))
        });
        assert_eq!(young.collect::<Vec<_>>(), [67, 69, 70]);
        // SAFETY: the follower is this space's.
        let _ = unsafe { rig.vm.unfollow(cx, &space, follower) };
        rig.end_shown(cx, (object, space));
    });
}
