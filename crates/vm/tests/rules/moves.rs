//! A range at other addresses: what it has goes along, on every CPU; it becomes longer and shorter; what it costs, and what is refused. On
//! both formats.

use crate::support::{
    AT, Metered, Model, SMALL, as_first, bounds, no_faults, on_both_formats, span, with_cpu, with_format,
};
use hugemm_base::{Cpu, CpuId, Never, Order, PageSize, VirtAddr, with};
use hugemm_frames::AllocRequest;
use hugemm_paging::{Aarch64, Flags, Leaf, Lookup, PageFormat};
use hugemm_vm::{Access, AddressSpace, Backing, Discard, Protection, Usage, VmError, VmaKind};

const LARGE: VmaKind = VmaKind::private(PageSize::Size2M);
/// Where nothing is.
const THERE: u64 = 0x70_0000_0000;

fn no_area(at: u64) -> VmError {
    VmError::NoArea { at: VirtAddr::new(at) }
}

/// Where areas begin, how many pages they have, and which page of their object they begin with.
fn shape<F: PageFormat, const AWAY: bool>(space: &AddressSpace<Model<'_, F, AWAY>>) -> Vec<(u64, u64, u64)> {
    space.vmas(bounds()).map(|area| (area.range.start().get(), area.range.pages(), area.offset)).collect()
}

fn goes<F: PageFormat>(size: PageSize, distance: u64) {
    let pages = if size == PageSize::Size4K { 1200 } else { 6 };
    with_format::<F, false>(64, 2, 3, &no_faults(), |rig| {
        let space = rig.filled_for_both(size, pages);
        let bytes = size.bytes();
        let (from, to) = (pages / 3, pages / 2);
        let (part, there) = (span(AT + from * bytes, (to - from) * bytes), THERE + distance + from * bytes);
        rig.on(0, |cx| {
            let mut leaves = [Vec::new(), Vec::new(), Vec::new()];
            let flushes = rig.flushes();
            for (step, at) in [AT, THERE + distance, AT].into_iter().enumerate() {
                if step == 1 {
                    rig.vm.move_to(cx, &space, part, span(there, part.bytes())).expect("nothing is there");
                    assert_eq!(rig.flushes() - flushes, 1);
                }
                let found = |page| rig.vm.lookup(cx, &space, VirtAddr::new(at + page * bytes));
                leaves[step] = (from..to).map(found).collect();
            }
            assert_eq!(leaves[1], leaves[0], "as they were");
            assert!(leaves[2].iter().all(|found| *found == Lookup::Absent));
        });
        let per = size.pages();
        let (first, rest, moved) = (AT, AT + to * bytes, there);
        let areas =
            [(first, from * per, 0), (rest, (pages - to) * per, to * per), (moved, (to - from) * per, from * per)];
        assert_eq!(shape(&space), areas);
        for cpu in [1, 0] {
            // What it has kept leads nowhere.
            (from..to)
                .for_each(|page| assert!(rig.mmu.load(CpuId::new(cpu), VirtAddr::new(AT + page * bytes)).is_err()));
            rig.on(cpu, |cx| {
                for page in 0..pages {
                    let (gone, at) = ((from..to).contains(&page), AT + page * bytes);
                    let expected = if gone { Err(no_area(at)) } else { Ok(page + 1) };
                    assert_eq!(rig.load(cx, &space, at), expected, "page {page}");
                    if gone {
                        assert_eq!(rig.load(cx, &space, THERE + distance + page * bytes), Ok(page + 1));
                        assert_eq!(rig.store(cx, &space, THERE + distance + page * bytes, page + 1), Ok(()));
                    }
                }
            });
        }
        rig.on(0, |cx| {
            assert_eq!(space.counters().copied + space.counters().reused, 0);
            // Wherever it is, it is found.
            let leaf = rig.leaf(cx, &space, there);
            let mut places = Vec::new();
            rig.vm.walk_mappings(cx, leaf.frame, |_, place| places.push(place.at.get()));
            assert_eq!(places, [there]);
            // And back: one area again.
            rig.vm.move_to(cx, &space, span(there, part.bytes()), part).expect("nothing is there any more");
            assert_eq!(shape(&space), [(AT, pages * per, 0)]);
            (0..pages).for_each(|page| assert_eq!(rig.load(cx, &space, AT + page * bytes), Ok(page + 1)));
        });
        rig.end_for_both(space);
    });
}

/// Small pages, whose tables can move and whose tables cannot, and large ones.
#[test]
fn what_a_range_has_goes_along_with_one_flush() {
    for (size, distance) in [
        (PageSize::Size4K, 0),
        (PageSize::Size4K, 0x1000),
        (PageSize::Size4K, 0x20_0000),
        (PageSize::Size2M, 0),
        (PageSize::Size2M, 0x20_0000),
    ] {
        goes::<Metered>(size, distance);
        goes::<Aarch64>(size, distance);
    }
}

fn kept<F: PageFormat>(distance: u64) {
    with_format::<F, true>(32, 2, 5, &no_faults(), |rig| {
        let space = rig.filled_for_both(PageSize::Size4K, 8);
        let there = THERE + distance;
        rig.on(0, |cx| {
            let mut pins = Vec::new();
            rig.page_out(cx, &space, AT);
            let child = rig.vm.fork(cx, &space).expect("memory");
            // Of the parent alone, and under a device.
            rig.store(cx, &space, AT + 0x2000, 30).expect("memory");
            rig.vm
                .pin(cx, &space, span(AT + 0x2000, 0x1000), Access::Write, None, &Never, |pin| pins.push(pin))
                .expect("memory");
            let there_before = with!(Usage::default(), present = 7, swapped = 1);
            assert_eq!(rig.vm.usage(cx, &space, span(AT, 0x8000)), Ok(there_before));
            rig.vm.move_to(cx, &space, span(AT, 0x8000), span(there, 0x8000)).expect("nothing is there");
            assert_eq!(rig.vm.usage(cx, &space, span(there, 0x8000)), Ok(there_before), "all of it");
            assert_eq!(rig.load(cx, &space, there), Ok(1), "comes back from where it is away");
            assert_eq!(rig.store(cx, &space, there + 0x1000, 20), Ok(()), "which the child has too");
            assert_eq!(rig.store(cx, &space, there + 0x2000, 31), Ok(()));
            assert_eq!(rig.leaf(cx, &space, there + 0x2000).frame, pins[0].extent().base(), "under its device");
            rig.unpin(cx, &space, pins);
            rig.enter(cx, &child);
            (0..8).for_each(|page| assert_eq!(rig.load(cx, &child, AT + page * 0x1000), Ok(page + 1), "the child's"));
            rig.leave(cx, &child);
            rig.vm.destroy(cx, child).expect("nobody uses it");
            rig.enter(cx, &space);
            // Taken away at its new place.
            rig.page_out(cx, &space, there + 0x5000);
            assert_eq!(rig.load(cx, &space, there + 0x5000), Ok(6));
        });
        assert!(rig.mmu.store(CpuId::new(1), VirtAddr::new(AT + 0x5000), 9).is_err());
        rig.end_for_both(space);
    });
}

/// Pages that are given up, one of which is stored to by a CPU that nobody hears of: only what says so of it keeps the store.
fn given_up<F: PageFormat>(distance: u64) {
    with_format::<F, true>(32, 2, 5, &no_faults(), |rig| {
        let space = rig.filled_for_both(PageSize::Size4K, 4);
        let there = THERE + distance;
        // Only the test stores.
        [0, 1].into_iter().for_each(|cpu| rig.mmu.pause(CpuId::new(cpu), true));
        rig.mmu.as_cpu(CpuId::new(0), |cx| {
            assert_eq!(rig.vm.discard(cx, &space, span(AT, 0x3000), Discard::WhenShort), Ok(0));
        });
        rig.mmu.as_cpu(CpuId::new(1), |cx| rig.store(cx, &space, AT + 0x1000, 22).expect("memory"));
        rig.mmu.as_cpu(CpuId::new(0), |cx| {
            rig.vm.move_to(cx, &space, span(AT, 0x4000), span(there, 0x4000)).expect("nothing is there");
            let pages = [0, 0x1000, 0x2000, 0x3000].map(|page| there + page);
            pages.into_iter().for_each(|at| rig.page_out(cx, &space, at));
            assert_eq!(pages.map(|at| rig.load(cx, &space, at).expect("memory")), [0, 22, 0, 4]);
        });
        rig.end_for_both(space);
    });
}

fn moving<F: PageFormat>(seed: u64) -> bool {
    let mut stale = false;
    with_format::<F, true>(16, 2, seed, &no_faults(), |rig| {
        let space = rig.filled_for_both(PageSize::Size4K, 4);
        let deferred = rig.deferred();
        let (page, before) = rig.on(0, |cx| {
            let before = rig.leaf(cx, &space, AT);
            (rig.vm.unhook(cx, rig.hold(before.frame), &deferred).expect("nobody else has it"), before)
        });
        // The other CPU has the old translation, and nobody has flushed.
        stale = rig.mmu.store(CpuId::new(1), VirtAddr::new(AT), 5).is_ok();
        rig.on(0, |cx| {
            // Only what is just moving.
            rig.vm.move_to(cx, &space, span(AT, 0x1000), span(THERE, 0x1000)).expect("nothing is there");
            rig.vm.map(cx, &space, span(AT, 0x1000), SMALL, Backing::Private).expect("nothing is there");
            assert_eq!(rig.store(cx, &space, AT, 77), Ok(()), "another page");
        });
        assert_ne!(rig.mmu.load(CpuId::new(1), VirtAddr::new(AT)), Ok(5), "what was owed for the address is paid");
        rig.on(0, |cx| {
            page.put_back(cx);
            assert_eq!(rig.leaf(cx, &space, THERE), before);
            assert_eq!(rig.load(cx, &space, THERE), Ok(if stale { 5 } else { 1 }));
            assert_eq!(rig.load(cx, &space, AT), Ok(77));
        });
        rig.end_for_both(space);
    });
    stale
}

/// Two areas, one of more pages than a part has and one of a shared object, entry by entry: what is there of them is found at one of the
/// two places at every moment.
#[test]
fn long_ranges_move_in_parts() {
    const PAGES: u64 = 40_000;
    for distance in [0x1000, 0] {
        with_cpu(32, 1, 31, |rig, cx| {
            let space = rig.space(cx, span(AT, PAGES << 12), SMALL);
            let object = rig.vm.create_shared(cx, PAGES, PageSize::Size4K, false).expect("an object");
            let (shared, all) = (AT + (PAGES << 12), (2 * PAGES) << 12);
            rig.vm.map(cx, &space, span(shared, PAGES << 12), SMALL, Backing::Shared(&object, 0)).expect("an area");
            rig.enter(cx, &space);
            let pages = || (0..2 * PAGES).step_by(997);
            pages().for_each(|page| rig.store(cx, &space, AT + (page << 12), page + 1).expect("memory"));
            let (before, points) = (rig.flushes(), cx.platform().counters().reschedules.get());
            rig.vm.move_to(cx, &space, span(AT, all), span(THERE + distance, all)).expect("nothing is there");
            assert_eq!(rig.flushes() - before, 1, "for all of it");
            let points = cx.platform().counters().reschedules.get() - points;
            assert_eq!(points >= 8, distance != 0, "{points}");
            assert_eq!(shape(&space), [(THERE + distance, PAGES, 0), (THERE + distance + (PAGES << 12), PAGES, 0)]);
            for page in pages() {
                let at = THERE + distance + (page << 12);
                let leaf = rig.leaf(cx, &space, at);
                let mut places = Vec::new();
                rig.vm.walk_mappings(cx, leaf.frame, |_, place| places.push(place.at.get()));
                assert_eq!((rig.load(cx, &space, at), places), (Ok(page + 1), vec![at]));
            }
            rig.end(cx, space);
            rig.vm.close(cx, object).expect("its own");
        });
    }
}

fn longer_and_shorter<F: PageFormat>(size: PageSize) {
    with_format::<F, false>(48, 2, 6, &no_faults(), |rig| {
        let space = rig.filled_for_both(size, 4);
        let (bytes, per) = (size.bytes(), size.pages());
        rig.on(0, |cx| {
            let mut to = |from: (u64, u64), to: (u64, u64)| {
                let before = rig.flushes();
                let (from, to) = (span(from.0, from.1 * bytes), span(to.0, to.1 * bytes));
                rig.vm.move_to(cx, &space, from, to).expect("there is room");
                (rig.flushes() - before, shape(&space))
            };
            assert_eq!(to((AT, 4), (AT, 4)), (0, vec![(AT, 4 * per, 0)]), "nothing to do");
            assert_eq!(to((AT, 4), (AT, 6)), (0, vec![(AT, 6 * per, 0)]), "longer");
            assert_eq!(to((AT, 6), (AT, 3)), (1, vec![(AT, 3 * per, 0)]), "shorter");
            assert_eq!(to((AT, 3), (THERE, 5)), (1, vec![(THERE, 5 * per, 0)]), "longer, elsewhere");
            assert_eq!(to((THERE, 5), (AT, 2)).1, [(AT, 2 * per, 0)], "shorter, elsewhere");
            // The second part of one goes elsewhere, and becomes longer there.
            let two = vec![(AT, per, 0), (THERE, 3 * per, per)];
            assert_eq!(to((AT + bytes, 1), (THERE, 3)).1, two);
        });
        for cpu in [1, 0] {
            rig.on(cpu, |cx| {
                let found = [AT, AT + bytes, THERE, THERE + bytes, THERE + 2 * bytes, THERE + 3 * bytes];
                let found = found.map(|at| rig.load(cx, &space, at).map_err(|_| ()));
                assert_eq!(found, [Ok(1), Err(()), Ok(2), Ok(0), Ok(0), Err(())]);
            });
        }
        rig.end_for_both(space);
    });
}

/// A pool's pages and promises go along, and what a longer area needs is promised or the move refused; an object's pages end somewhere.
#[test]
fn promises_and_objects_end_somewhere() {
    with_cpu(48, 1, 7, |rig, cx| {
        rig.fill_pool(cx, 5);
        let (space, size) = (rig.space(cx, span(AT, 4 << 20), LARGE.pooled()), 2 << 20);
        rig.enter(cx, &space);
        rig.store(cx, &space, AT, 5).expect("promised");
        let mut to = |from: (u64, u64), to: (u64, u64)| {
            let done = rig.vm.move_to(cx, &space, span(from.0, from.1 * size), span(to.0, to.1 * size));
            done.map(|()| rig.pool_available(cx))
        };
        assert_eq!(to((AT, 2), (THERE, 2)), Ok(3));
        assert_eq!(to((THERE, 2), (THERE, 6)), Err(VmError::NoPool));
        assert_eq!(to((THERE, 2), (AT, 6)), Err(VmError::NoPool));
        assert_eq!(to((THERE, 2), (AT, 4)), Ok(1));
        assert_eq!(to((AT, 4), (AT, 1)), Ok(4), "promised to nobody");
        assert_eq!(rig.load(cx, &space, AT), Ok(5));
        let object = rig.vm.create_shared(cx, 4, PageSize::Size4K, false).expect("an object");
        let at = 2 * AT;
        rig.vm.map(cx, &space, span(at, 0x2000), SMALL, Backing::Shared(&object, 1)).expect("an area");
        let beyond = VmError::OutOfBounds { at: VirtAddr::new(at + 0x2000) };
        assert_eq!(rig.vm.move_to(cx, &space, span(at, 0x2000), span(at, 0x4000)), Err(beyond));
        assert_eq!(rig.vm.move_to(cx, &space, span(at, 0x2000), span(at, 0x3000)), Ok(()));
        rig.end(cx, space);
        rig.vm.close(cx, object).expect("its own");
    });
}

/// A refusal says where and why, and nothing is different after it.
#[test]
fn what_cannot_be_is_refused() {
    with_cpu(32, 1, 11, |rig, cx| {
        let space = rig.vm.create(cx, span(AT, 1 << 30)).expect("memory");
        for (at, bytes, kind) in
            [(0, 0x4000, SMALL), (0x5000, 0x3000, SMALL), (4 << 20, 4 << 20, LARGE), (32 << 20, 0x1000, SMALL)]
        {
            rig.vm.map(cx, &space, span(AT + at, bytes), kind, Backing::Private).expect("an area");
        }
        rig.vm.lock(cx, &space, span(AT + (32 << 20), 0x1000), 1).expect("within the limit");
        rig.enter(cx, &space);
        let words = [0, 0x7000, 4 << 20];
        words.into_iter().for_each(|at| rig.store(cx, &space, AT + at, 5).expect("memory"));
        let before: Vec<_> = space.vmas(span(AT, 1 << 30)).collect();
        let mut refused = |from: (u64, u64), to: (u64, u64), error| {
            let refused = rig.vm.move_to(cx, &space, span(AT + from.0, from.1), span(AT + to.0, to.1));
            assert_eq!(refused, Err(error), "{from:x?} to {to:x?}");
            assert!(space.vmas(span(AT, 1 << 30)).eq(before.iter().copied()));
            words.into_iter().for_each(|at| assert_eq!(rig.load(cx, &space, AT + at), Ok(5)));
        };
        let at = |at: u64| VirtAddr::new(AT + at);
        let free = 16 << 20;
        refused((0, 0x4000), ((1 << 30) - 0x1000, 0x4000), VmError::OutOfBounds { at: at((1 << 30) - 0x1000) });
        refused((1 << 30, 0x1000), (free, 0x1000), VmError::OutOfBounds { at: at(1 << 30) });
        refused((0, 0x6000), (free, 0x6000), VmError::NoArea { at: at(0x4000) });
        refused((0, 0x6000), (free, 0x1000), VmError::NoArea { at: at(0x4000) });
        refused((0, 0x4000), (0x2000, 0x4000), VmError::Overlap { at: at(0) });
        refused((0, 0x4000), (0x4000, 0x4000), VmError::Overlap { at: at(0x5000) });
        refused((0, 0x4000), (0, 0x6000), VmError::Overlap { at: at(0x5000) });
        refused((0, 0x2000), (0, 0x3000), VmError::Overlap { at: at(0) });
        refused((4 << 20, 2 << 20), (free + 0x1000, 2 << 20), VmError::Misaligned { at: at(free + 0x1000) });
        refused((4 << 20, 0x1000), (free, 0x1000), VmError::Misaligned { at: at((4 << 20) + 0x1000) });
        refused((4 << 20, 2 << 20), (free, 0x1000), VmError::Misaligned { at: at((4 << 20) + 0x1000) });
        refused(
            (4 << 20, 4 << 20),
            (free, (4 << 20) + 0x1000),
            VmError::Misaligned { at: at(free + (4 << 20) + 0xfff) },
        );
        refused((32 << 20, 0x1000), (free, 0x2000), VmError::Denied { at: at(free + 0x1000) });
        rig.end(cx, space);
    });
}

/// Whatever is lacking, an area or a table: nothing has moved, and with memory the same goes.
#[test]
fn without_memory_nothing_moves() {
    let fails = |nth| {
        let mut failed = false;
        as_first::<Metered, false>(8, 1, 12, |rig, cx| {
            let space = rig.space(cx, span(AT, 0x8000), SMALL);
            rig.enter(cx, &space);
            (0..8).for_each(|page| rig.store(cx, &space, AT + page * 0x1000, page + 1).expect("memory"));
            let all = core::iter::from_fn(|| rig.vm.frames().alloc(cx, AllocRequest::order(Order::ZERO)).ok());
            let mut held: Vec<_> = all.collect();
            held.drain(..nth).for_each(|block| rig.vm.frames().free(cx, block));
            let (from, to) = (span(AT + 0x2000, 0x4000), span(THERE, 0x5000));
            let done = rig.vm.move_to(cx, &space, from, to);
            failed = done.is_err();
            if failed {
                assert_eq!(done, Err(VmError::NoMemory));
                assert_eq!(shape(&space), [(AT, 8, 0)]);
                (0..8).for_each(|page| assert_eq!(rig.load(cx, &space, AT + page * 0x1000), Ok(page + 1)));
            }
            held.into_iter().for_each(|block| rig.vm.frames().free(cx, block));
            if failed {
                rig.vm.move_to(cx, &space, from, to).expect("memory");
            }
            assert_eq!(shape(&space), [(AT, 2, 0), (AT + 0x6000, 2, 6), (THERE, 5, 2)]);
            (2..6).for_each(|page| {
                assert_eq!(rig.load(cx, &space, THERE + (page - 2) * 0x1000), Ok(page + 1));
            });
            rig.end(cx, space);
        });
        failed
    };
    let failed = (0..8).take_while(|nth| fails(*nth)).count();
    assert_eq!(failed, 2, "a table for each level that is lacking");
}

/// Three areas whose borders lie within tables that would move as a whole if they were one's: what is lacking is found before the first moves.
#[test]
fn without_memory_no_area_of_several_moves() {
    let fails = |nth| {
        let mut failed = false;
        as_first::<Metered, false>(8, 1, 14, |rig, cx| {
            let space = rig.space(cx, span(AT, 4 << 20), SMALL);
            let rights = Protection::USER.with(Protection::EXEC);
            rig.vm.protect(cx, &space, span(AT + (1 << 20), 2 << 20), rights).expect("memory");
            let pages = [0, 255, 256, 600, 767, 768, 1023];
            pages.into_iter().for_each(|page| assert_eq!(rig.vm.read(cx, &space, at(page), &mut [0; 8]), Ok(())));
            let areas = |from| [(from, 256, 0), (from + (1 << 20), 512, 256), (from + (3 << 20), 256, 768)];
            let all = core::iter::from_fn(|| rig.vm.frames().alloc(cx, AllocRequest::order(Order::ZERO)).ok());
            let mut held: Vec<_> = all.collect();
            held.drain(..nth).for_each(|block| rig.vm.frames().free(cx, block));
            let done = rig.vm.move_to(cx, &space, span(AT, 4 << 20), span(THERE, 4 << 20));
            failed = done.is_err();
            assert_eq!(shape(&space), areas(if failed { AT } else { THERE }), "{done:?} with {nth} frames");
            assert!(!failed || done == Err(VmError::NoMemory));
            held.into_iter().for_each(|block| rig.vm.frames().free(cx, block));
            rig.vm.destroy(cx, space).expect("idle");
        });
        failed
    };
    let failed = (0..12).take_while(|nth| fails(*nth)).count();
    assert_eq!(failed, 3, "a table of an upper level, and two in which areas meet");
}

fn at(page: u64) -> VirtAddr {
    VirtAddr::new(AT + page * 0x1000)
}

fn read_only<F: PageFormat>() {
    as_first::<F, false>(32, 1, 13, |rig, cx| {
        let kind = SMALL.allowing(Protection::USER);
        let space = rig.space(cx, span(AT, 0x8000), kind);
        rig.enter(cx, &space);
        assert_eq!(rig.load(cx, &space, AT), Ok(0));
        let before = rig.leaf(cx, &space, AT);
        rig.vm.move_to(cx, &space, span(AT, 0x8000), span(THERE + 0x1000, 0x8000)).expect("nothing is there");
        let after: Leaf = rig.leaf(cx, &space, THERE + 0x1000);
        assert_eq!(after, before);
        assert!(!after.flags.contains(Flags::WRITE));
        let denied = VmError::Denied { at: VirtAddr::new(THERE + 0x1000) };
        assert_eq!(rig.store(cx, &space, THERE + 0x1000, 1), Err(denied), "as its area says");
        rig.end(cx, space);
    });
}

on_both_formats! {
    /// Pages in swap, pages that a fork shares and pages that are pinned stay what they are.
    fn what_is_known_of_pages_goes_along: kept (each [0, 0x3000]);
    fn what_was_stored_since_it_was_given_up_goes_along: given_up (each [0, 0x3000]);
    /// A page that reclaim is just taking comes back where it would be now, and nobody reaches it where it was.
    fn a_page_that_moves_is_found_at_the_new_place: moving (stale);
    fn ranges_become_longer_and_shorter: longer_and_shorter (each [PageSize::Size4K, PageSize::Size2M]);
    /// An area keeps its rights.
    fn rights_go_along: read_only ();
}
