//! What becomes of pages that are away when their addresses go.

use crate::support::{AT, Cx, Metered, Model, SMALL, as_first, bounds, span};
use hugemm_base::{Cpu, FrameUse, Never, Order, PageSize, VirtAddr, with};
use hugemm_frames::{AllocRequest, Frozen};
use hugemm_vm::{Access, Backing, Pager, Usage, VmError, VmaKind, ZeroTurn, ZeroWorker};
use std::sync::atomic::Ordering;

const GIB: u64 = 1 << 30;

/// A fork that ends by unwinding leaves a parent that others can use: nobody waits for its mark. Here the pager fails, which
/// has lost a slot.
#[test]
fn a_fork_that_unwinds_is_over() {
    let used = std::cell::Cell::new(false);
    let test = std::panic::AssertUnwindSafe(|| {
        as_first::<Metered, true>(16, 1, 52, |rig, cx| {
            let space = rig.space(cx, span(AT, 0x8000), SMALL);
            rig.vm.fault(cx, &space, VirtAddr::new(AT), Access::Write).expect("memory");
            rig.page_out(cx, &space, AT);
            // SAFETY: nothing of the space is used after this but its list of areas.
            unsafe { Pager::<Model<'_, Metered, true>>::free(rig.vm.pager(), cx, 1) };
            let fork = std::panic::AssertUnwindSafe(|| rig.vm.fork(cx, &space).is_ok());
            assert!(std::panic::catch_unwind(fork).is_err(), "it is lost");
            rig.vm.map(cx, &space, span(2 * AT, 0x8000), SMALL, Backing::Private).expect("an area");
            used.set(true);
        });
    });
    // The memory of parent and child is missed at the end.
    assert!(std::panic::catch_unwind(test).is_err());
    assert!(used.get());
}

/// Of what the pager keeps for pages that come back nothing new is made, of whatever kind; they come back, and what frees memory by
/// taking some has it.
#[test]
fn nothing_new_is_made_of_what_is_kept() {
    as_first::<Metered, true>(16, 1, 54, |rig, cx| {
        let (vm, kind, page) = (&rig.vm, SMALL, PageSize::Size4K);
        let space = rig.space(cx, span(AT, 0x8000), kind);
        let object = vm.create_shared(cx, 8, page, false).expect("an object");
        vm.map(cx, &space, span(2 * AT, 0x8000), kind, Backing::Shared(&object, 0)).expect("an area");
        rig.enter(cx, &space);
        (0..3).for_each(|page| rig.store(cx, &space, AT + (page << 12), page + 1).expect("memory"));
        rig.page_out(cx, &space, AT);
        let used = rig.used(cx);
        let holds_back = |holds| rig.vm.pager().holds_back.store(holds, Ordering::Relaxed);
        holds_back(true);
        let others = span(3 * AT, 0x1000);
        let refused = |now: u64, error: Option<VmError>, what: &str| {
            assert_eq!((error, now), (Some(VmError::NoMemory), used), "{what}");
        };
        let error = rig.store(cx, &space, AT + 0x3000, 1).err();
        refused(rig.used(cx), error, "a page");
        let error = rig.store(cx, &space, 2 * AT, 1).err();
        refused(rig.used(cx), error, "a shared page");
        let error = vm.prefault(&space, span(AT + 0x3000, 0x5000), None).work(cx, &Never).err();
        refused(rig.used(cx), error, "pages");
        let error = vm.map(cx, &space, others, kind, Backing::Private).err();
        refused(rig.used(cx), error, "an area");
        let error = vm.create(cx, bounds()).err();
        refused(rig.used(cx), error, "a space");
        let error = vm.fork(cx, &space).err();
        refused(rig.used(cx), error, "a child");
        let error = vm.create_shared(cx, 8, page, false).err();
        refused(rig.used(cx), error, "an object");
        let worker = ZeroWorker::new(vm.clearer(), page, 100);
        assert_eq!(vm.zero_ahead(cx, &worker, &Never), ZeroTurn::Nothing);
        // More references than there is room for without a frame of counters.
        let mut pins = Vec::new();
        let error = (0..16).find_map(|_| {
            let pinned =
                vm.pin(cx, &space, span(AT + 0x1000, 0x1000), Access::Write, None, &Never, |pin| pins.push(pin));
            pinned.err().map(|error| error.cause)
        });
        refused(rig.used(cx), error, "counters");
        pins.into_iter().for_each(|pin| vm.unpin(cx, &space, pin).expect("its own"));
        assert_eq!(rig.load(cx, &space, AT), Ok(1), "it comes back");
        assert_eq!(rig.used(cx), used + 1);
        assert_eq!(vm.unmap(cx, &space, span(AT + 0x1000, 0x1000)).expect("memory for what remains").pages, 1);
        holds_back(false);
        vm.map(cx, &space, others, kind, Backing::Private).expect("an area");
        rig.store(cx, &space, 3 * AT, 1).expect("a page, and a table");
        rig.end(cx, space);
        vm.close(cx, object).expect("its own");
    });
}

/// Content that is away goes with its address, and no other does, wherever the range ends.
#[test]
fn content_goes_with_its_address() {
    for (page, pages) in [(PageSize::Size4K, 1200), (PageSize::Size2M, 4)] {
        as_first::<Metered, true>(32, 1, 51, |rig, cx| {
            let at = |index: u64| AT + index * page.bytes();
            let kind = VmaKind::private(page);
            let space = rig.space(cx, span(AT, pages * page.bytes()), kind);
            rig.enter(cx, &space);
            for index in 0..pages {
                rig.store(cx, &space, at(index), index + 1).expect("memory");
            }
            (0..pages).for_each(|index| rig.page_out(cx, &space, at(index)));
            assert_eq!(rig.vm.pager().used() as u64, pages * page.pages());
            // A large page's slots stand in a frame, which is swap's.
            let of_swap = |cx: &Cx<'_, '_>| cx.platform().counters().snapshot().frames.of(FrameUse::SWAP);
            let each = i64::from(page == PageSize::Size2M);
            assert_eq!(of_swap(cx), each * pages as i64);
            // From within a table to within another, a whole one between.
            let unmapped = rig.vm.unmap(cx, &space, span(at(1), (pages - 3) * page.bytes())).expect("unmapped");
            assert_eq!((unmapped.areas, unmapped.pages), (1, 0), "none of it was mapped");
            assert_eq!(rig.vm.pager().used() as u64, 3 * page.pages());
            for index in [0, pages - 2, pages - 1] {
                assert_eq!(rig.load(cx, &space, at(index)), Ok(index + 1));
                assert_eq!(rig.vm.pager().used() as u64, if index == 0 { 2 } else { pages - 1 - index } * page.pages());
            }
            assert_eq!(of_swap(cx), 0);
            let gone = VirtAddr::new(at(1));
            assert_eq!(rig.load(cx, &space, at(1)), Err(VmError::NoArea { at: gone }));
            rig.end(cx, space);
        });
    }
}

/// However much is away, giving it up lets others run: after 32768 pages of 4 KiB, and those of one GiB that were begun.
#[test]
fn giving_up_what_is_away_lets_others_run() {
    const GIBS: u64 = 16;
    const EACH: u64 = 8;
    let page = PageSize::Size2M;
    as_first::<Metered, true>(64, 1, 52, |rig, cx| {
        let area = span(AT, GIBS * GIB);
        let space = rig.space(cx, area, VmaKind::private(page));
        for gib in 0..GIBS {
            let part = span(AT + gib * GIB, EACH * page.bytes());
            rig.vm.prefault(&space, part, None).work(cx, &Never).expect("memory");
            (0..EACH).for_each(|index| rig.page_out(cx, &space, part.start().get() + index * page.bytes()));
        }
        assert_eq!(rig.vm.pager().used() as u64, GIBS * EACH * page.pages());
        rig.vm.pager().most_between_reschedules();
        rig.vm.unmap(cx, &space, area).expect("unmapped");
        let most = rig.vm.pager().most_between_reschedules();
        assert_eq!(most, EACH * page.pages(), "of a GiB, which is not divided");
        assert_eq!(rig.vm.pager().used(), 0);
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// An object that is closed gives up what it has away.
#[test]
fn an_object_ends_with_what_it_has_away() {
    as_first::<Metered, true>(16, 1, 53, |rig, cx| {
        const PAGES: u64 = 700;
        let (object, space) = rig.shown(cx, PAGES);
        let area = span(AT, PAGES << 12);
        rig.vm.prefault(&space, area, None).work(cx, &Never).expect("memory");
        for index in (0..PAGES).filter(|index| index % 7 != 0) {
            rig.page_out(cx, &space, AT + (index << 12));
        }
        assert_eq!(rig.vm.pager().used() as u64, PAGES - PAGES / 7);
        let whole = with!(Usage::default(), present = PAGES / 7, swapped = PAGES - PAGES / 7);
        assert_eq!(rig.vm.usage(cx, &space, area), Ok(whole));
        let part = span(AT + (3 << 12), 8 << 12);
        assert_eq!(rig.vm.usage(cx, &space, part), Ok(with!(Usage::default(), present = 1, swapped = 7)));
        // The object keeps it, not the space.
        rig.vm.destroy(cx, space).expect("destroyed");
        assert_eq!(rig.vm.pager().used() as u64, PAGES - PAGES / 7);
        rig.vm.close(cx, object).expect("its own");
        assert_eq!(rig.vm.pager().used(), 0);
    });
}

/// A fork that has no memory for its tables says so, and the child has no share of what is away.
#[test]
fn a_fork_without_memory_shares_nothing_that_is_away() {
    let mut done = [0, 0];
    for room in 0..12 {
        as_first::<Metered, true>(8, 1, 58, |rig, cx| {
            let space = rig.space(cx, span(AT, 0x1000), SMALL);
            rig.vm.fault(cx, &space, VirtAddr::new(AT), Access::Write).expect("memory");
            rig.page_out(cx, &space, AT);
            let request = AllocRequest::order(Order::ZERO);
            let all = core::iter::from_fn(|| rig.vm.frames().alloc(cx, request).ok());
            let mut held: Vec<Frozen> = all.collect();
            held.drain(..room).for_each(|block| rig.vm.frames().free(cx, block));
            let child = rig.vm.fork(cx, &space);
            done[usize::from(child.is_ok())] += 1;
            held.into_iter().for_each(|block| rig.vm.frames().free(cx, block));
            match child {
                Ok(child) => rig.vm.destroy(cx, child).expect("nobody uses it"),
                Err(error) => assert_eq!(error, VmError::NoMemory, "{room} frames"),
            }
            rig.vm.destroy(cx, space).expect("nobody uses it");
        });
    }
    assert!(done.iter().all(|forks| *forks > 3), "{done:?}");
}

/// Pages whose frames do not adjoin go some at a time: of a space, and of a shared object. What is large goes by itself, so that nothing
/// waits for long to be dropped.
#[test]
fn scattered_pages_are_dropped_together() {
    as_first::<Metered, true>(32, 1, 91, |rig, cx| {
        let space = rig.space(cx, span(AT, 256 << 12), SMALL);
        let shared = rig.vm.create_shared(cx, 256, PageSize::Size4K, false).expect("an object");
        let shared_kind = with!(SMALL, shared = true);
        rig.vm.map(cx, &space, span(2 * AT, 256 << 12), shared_kind, Backing::Shared(&shared, 0)).expect("an area");
        for page in (0..256).map(|n| n * 7 % 256) {
            for at in [AT, 2 * AT] {
                rig.vm.fault(cx, &space, VirtAddr::new(at + (page << 12)), Access::Write).expect("memory");
            }
        }
        let before = rig.vm.pager().drops();
        assert_eq!(rig.vm.unmap(cx, &space, span(AT, 256 << 12)).expect("an area").pages, 256);
        assert_eq!(rig.vm.pager().drops() - before, 8, "32 at a time");
        rig.vm.destroy(cx, space).expect("destroyed");
        assert_eq!(rig.vm.pager().drops() - before, 8, "the object has its pages");
        rig.vm.close(cx, shared).expect("ours");
        assert_eq!(rig.vm.pager().drops() - before, 16);
        let space = rig.space(cx, span(AT, 8 << 20), VmaKind::private(PageSize::Size2M));
        for page in [0, 2, 1, 3] {
            rig.vm.fault(cx, &space, VirtAddr::new(AT + (page << 21)), Access::Write).expect("memory");
        }
        let before = rig.vm.pager().drops();
        rig.vm.destroy(cx, space).expect("destroyed");
        let drops = rig.vm.pager().drops() - before;
        assert!(drops > 1, "{drops}: runs of 2 MiB do not wait for each other");
    });
}

/// A pool's pages are not the pager's, by whatever way they come.
#[test]
fn the_pager_is_told_of_no_pools_page() {
    as_first::<Metered, true>(32, 1, 94, |rig, cx| {
        rig.fill_pool(cx, 4);
        let page = PageSize::Size2M;
        let kind = VmaKind::private(page).pooled();
        let space = rig.space(cx, span(AT, 2 * page.bytes()), kind);
        let known = rig.vm.pager().known();
        rig.vm.fault(cx, &space, VirtAddr::new(AT), Access::Write).expect("promised");
        rig.vm.prefault(&space, span(AT, 2 * page.bytes()), None).work(cx, &Never).expect("promised");
        let object = rig.vm.create_shared(cx, page.pages(), page, true).expect("a page is left");
        let shared = with!(kind, shared = true);
        let area = span(2 * AT, page.bytes());
        rig.vm.map(cx, &space, area, shared, Backing::Shared(&object, 0)).expect("an area");
        rig.vm.fault(cx, &space, area.start(), Access::Write).expect("promised");
        assert_eq!(rig.vm.pager().known(), known);
        rig.end_shown(cx, (object, space));
    });
}
