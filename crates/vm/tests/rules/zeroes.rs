//! Memory that has been read and never written is one page for all: it costs nothing, reads as zeroes on every CPU whatever others store,
//! and is nobody's to pin, age or give back. On both formats.

use crate::support::{
    AT, Follower, Metered, Rig, SMALL, as_first, before_flush, bounds, no_faults, on_both_formats, span, with_cpu,
    with_format,
};
use hugemm_base::inject::every_fault;
use hugemm_base::{CpuCx, CpuId, Never, PageSize, Pfn, VirtAddr, VirtRange, with};
use hugemm_paging::{Aarch64, Flags, Lookup, PageFormat};
use hugemm_vm::{Access, Backing, Discard, LENT, Notifier, Protection, Served, Usage, VmError, VmaKind};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const READ: VmaKind = SMALL.allowing(Protection::USER);

fn shown<F: PageFormat>(size: PageSize) {
    with_format::<F, false>(32, 2, 7, &no_faults(), |rig| {
        const PAGES: u64 = 6;
        let (area, at) = (span(AT, PAGES * size.bytes()), |page: u64| AT + page * size.bytes());
        let space = rig.on(0, |cx| rig.space(cx, area, VmaKind::private(size)));
        rig.on(0, |cx| {
            rig.enter(cx, &space);
            assert_eq!(rig.load(cx, &space, AT), Ok(0));
            let used = rig.used(cx);
            for page in 1..PAGES {
                assert_eq!(rig.load(cx, &space, at(page) + size.bytes() / 2), Ok(0));
                assert_eq!(rig.leaf(cx, &space, at(page)).frame, rig.leaf(cx, &space, AT).frame);
            }
            assert_eq!(rig.used(cx), used, "no page more");
            let none = with!(Usage::default(), zeroes = PAGES * size.pages());
            assert_eq!(rig.vm.usage(cx, &space, area), Ok(none));
        });
        rig.on(1, |cx| {
            rig.enter(cx, &space);
            (0..PAGES).for_each(|page| assert_eq!(rig.load(cx, &space, at(page)), Ok(0)));
        });
        let before = rig.flushes();
        rig.on(0, |cx| rig.store(cx, &space, at(1), 5).expect("memory"));
        assert_eq!(rig.flushes() - before, 1, "one for the first store");
        rig.on(0, |cx| rig.store(cx, &space, at(1) + 8, 6).expect("memory"));
        assert_eq!(rig.flushes() - before, 1);
        rig.on(1, |cx| {
            (0..PAGES).for_each(|page| assert_eq!(rig.load(cx, &space, at(page)), Ok([0, 5][usize::from(page == 1)])));
            let huge = if size == PageSize::Size4K { 0 } else { size.pages() };
            let one = with!(Usage::default(), zeroes = (PAGES - 1) * size.pages(), present = size.pages(), huge);
            assert_eq!(rig.vm.usage(cx, &space, area), Ok(one));
            assert_eq!(rig.vm.discard(cx, &space, area, Discard::Now), Ok(PAGES * size.pages()));
            (0..PAGES).for_each(|page| assert_eq!(rig.load(cx, &space, at(page)), Ok(0)));
            assert_eq!(rig.vm.unmap(cx, &space, span(at(2), size.bytes())).map(|done| done.pages), Ok(size.pages()));
        });
        rig.end_for_both(space);
    });
}

/// Whether the other CPU had an old translation of a page that is stored to.
fn stale<F: PageFormat>(seed: u64) -> bool {
    let stale = Cell::new(false);
    with_format::<F, false>(16, 2, seed, &no_faults(), |rig| {
        let space = rig.on(0, |cx| rig.space(cx, span(AT, 0x4000), SMALL));
        for cpu in [0, 1] {
            rig.on(cpu, |cx| {
                rig.enter(cx, &space);
                (0..4).for_each(|page| assert_eq!(rig.load(cx, &space, AT + (page << 12)), Ok(0)));
            });
        }
        // Nothing is there when others are asked to flush.
        let then = || stale.set(rig.mmu.load(CpuId::new(1), VirtAddr::new(AT)) == Ok(0));
        before_flush(&then, || rig.on(0, |cx| rig.store(cx, &space, AT, 9).expect("memory")));
        // Without a fault in between.
        let found = rig.mmu.load(CpuId::new(1), VirtAddr::new(AT));
        assert!(found.is_err() || found == Ok(9), "{found:?}: zeroes after a store");
        rig.end_for_both(space);
    });
    stale.get()
}

fn forked<F: PageFormat>(size: PageSize) {
    as_first::<F, false>(32, 1, 8, |rig, cx| {
        let (at, area) = (|page: u64| AT + page * size.bytes(), span(AT, 4 * size.bytes()));
        let space = rig.space(cx, area, VmaKind::private(size));
        rig.enter(cx, &space);
        (0..3).for_each(|page| assert_eq!(rig.load(cx, &space, at(page)), Ok(0)));
        rig.store(cx, &space, at(3), 3).expect("memory");
        // One by one, too.
        for pinned in [false, true] {
            let pins = if pinned { rig.pin(cx, &space, span(at(3), size.bytes())) } else { Vec::new() };
            let child = rig.vm.fork(cx, &space).expect("memory");
            rig.enter(cx, &child);
            rig.leave(cx, &space);
            assert_eq!(rig.leaf(cx, &child, AT).flags & LENT, LENT);
            rig.store(cx, &child, at(1), 11).expect("memory");
            assert_eq!([0, 1, 2, 3].map(|page| rig.load(cx, &child, at(page))), [Ok(0), Ok(11), Ok(0), Ok(3)]);
            rig.enter(cx, &space);
            rig.leave(cx, &child);
            assert_eq!([0, 1, 2, 3].map(|page| rig.load(cx, &space, at(page))), [Ok(0), Ok(0), Ok(0), Ok(3)]);
            rig.unpin(cx, &space, pins);
            rig.vm.destroy(cx, child).expect("destroyed");
        }
        // The space's own stay, and the page stays as long as one shows it.
        rig.vm.trim(cx);
        assert_eq!(rig.load(cx, &space, at(2)), Ok(0));
        rig.end(cx, space);
    });
}

/// The child that shows it, and nobody else, keeps it.
#[test]
fn the_page_stays_while_a_space_shows_it_and_goes_with_the_last() {
    with_cpu(16, 1, 9, |rig, cx| {
        let space = rig.space(cx, span(AT, 0x4000), SMALL);
        rig.enter(cx, &space);
        assert_eq!(rig.load(cx, &space, AT), Ok(0));
        let zeroes = rig.leaf(cx, &space, AT).frame;
        let child = rig.vm.fork(cx, &space).expect("memory");
        rig.enter(cx, &child);
        rig.leave(cx, &space);
        rig.vm.destroy(cx, space).expect("destroyed");
        rig.vm.trim(cx);
        // Whoever takes all frames does not get it.
        let mut taken = Vec::new();
        while let Ok(block) = rig.vm.frames().alloc(cx, hugemm_base::Order::ZERO) {
            assert_ne!(block.pfn(), zeroes);
            taken.push(block);
        }
        assert_eq!(rig.load(cx, &child, AT), Ok(0));
        taken.into_iter().for_each(|block| rig.vm.frames().free(cx, block));
        rig.leave(cx, &child);
        rig.vm.destroy(cx, child).expect("destroyed");
        let used = rig.used(cx);
        rig.vm.trim(cx);
        assert!(rig.used(cx) < used, "it is back");
    });
}

fn held<F: PageFormat>() {
    as_first::<F, false>(16, 1, 10, |rig, cx| {
        for kind in [SMALL, READ] {
            let space = rig.space(cx, span(AT, 0x8000), kind);
            rig.enter(cx, &space);
            (0..8).for_each(|page| assert_eq!(rig.load(cx, &space, AT + (page << 12)), Ok(0)));
            let zeroes = rig.leaf(cx, &space, AT).frame;
            let mut pins = Vec::new();
            rig.vm.pin(cx, &space, span(AT, 0x4000), Access::Read, None, &Never, |run| pins.push(run)).expect("memory");
            assert!(pins.iter().all(|pin| !pin.extent().contains(zeroes)), "a device was given everybody's page");
            assert_eq!(pins.iter().map(|pin| pin.extent().pages()).sum::<u64>(), 4);
            // What a device stores is what the space reads.
            let first = &pins[0];
            let memory = rig.mmu.host().address(first.extent().base()).expect("memory");
            // SAFETY: a word of the pinned page.
            unsafe { memory.cast::<u64>().write(77) };
            assert_eq!(rig.load(cx, &space, first.at().get()), Ok(77));
            rig.unpin(cx, &space, pins);
            // What is locked is there.
            let part = span(AT + 0x4000, 0x2000);
            rig.vm.lock(cx, &space, part, 2).expect("memory");
            assert_eq!(rig.vm.usage(cx, &space, part), Ok(with!(Usage::default(), present = 2)));
            rig.vm.unlock(cx, &space, part).expect("an area");
            assert_eq!(rig.load(cx, &space, AT + 0x7000), Ok(0));
            rig.end(cx, space);
        }
    });
}

/// Rights that come make no page of zeroes writable, and what moves stays zeroes.
fn changed<F: PageFormat>() {
    as_first::<F, false>(16, 1, 11, |rig, cx| {
        let space = rig.space(cx, span(AT, 0x4000), READ);
        let other = rig.space(cx, span(AT, 0x4000), SMALL);
        rig.enter(cx, &space);
        (0..4).for_each(|page| assert_eq!(rig.load(cx, &space, AT + (page << 12)), Ok(0)));
        rig.vm.protect(cx, &space, span(AT, 0x4000), Protection::USER.with(Protection::WRITE)).expect("an area");
        assert!(!rig.leaf(cx, &space, AT).flags.contains(Flags::WRITE));
        rig.vm.move_to(cx, &space, span(AT, 0x4000), span(2 * AT, 0x4000)).expect("nothing is there");
        rig.store(cx, &space, 2 * AT, 4).expect("memory");
        let all = [0, 1, 2, 3].map(|page| rig.load(cx, &space, 2 * AT + (page << 12)));
        assert_eq!(all, [Ok(4), Ok(0), Ok(0), Ok(0)]);
        rig.enter(cx, &other);
        rig.leave(cx, &space);
        assert_eq!(rig.load(cx, &other, AT), Ok(0));
        // Nobody has used it, or all have: it is on no list either way.
        assert_eq!(rig.vm.test_and_clear_young(cx, &other, span(AT, 0x4000), |_| ()), Ok(1));
        rig.end(cx, other);
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// From outside, too: reading makes none, nor does zeroing; writing does.
#[test]
fn from_outside_it_is_the_same() {
    with_cpu(16, 1, 12, |rig, cx| {
        let (space, area) = (rig.space(cx, span(AT, 0x8000), SMALL), span(AT, 0x8000));
        let (at, mut bytes) = (VirtAddr::new(AT), vec![1; 0x8000]);
        assert_eq!(rig.vm.read(cx, &space, at, &mut bytes), Ok(()));
        assert!(bytes.iter().all(|byte| *byte == 0));
        let none = with!(Usage::default(), zeroes = 8);
        assert_eq!(rig.vm.usage(cx, &space, area), Ok(none));
        assert_eq!(rig.vm.zero(cx, &space, VirtAddr::new(AT + 0x10), 0x7000), Ok(()));
        assert_eq!(rig.vm.usage(cx, &space, area), Ok(none));
        assert_eq!(rig.vm.write(cx, &space, VirtAddr::new(AT + 0xffc), &[7; 8]), Ok(()));
        assert_eq!(rig.vm.usage(cx, &space, area), Ok(with!(Usage::default(), zeroes = 6, present = 2)));
        assert_eq!(rig.vm.zero(cx, &space, at, 0x8000), Ok(()));
        assert_eq!(rig.vm.read(cx, &space, at, &mut bytes), Ok(()));
        assert!(bytes.iter().all(|byte| *byte == 0));
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// Shared and pooled areas, and those that are locked, have pages of their own.
#[test]
fn other_areas_have_their_own() {
    with_cpu(32, 1, 13, |rig, cx| {
        rig.fill_pool(cx, 1);
        let space = rig.vm.create(cx, bounds()).expect("memory");
        let object = rig.vm.create_shared(cx, 4, PageSize::Size4K, false).expect("memory");
        let pooled = VmaKind::private(PageSize::Size2M).pooled();
        let kinds = [
            (AT, 0x4000, SMALL, Backing::Private),
            (2 * AT, 2 << 20, pooled, Backing::Private),
            (3 * AT, 0x4000, SMALL, Backing::Shared(&object, 0)),
        ];
        rig.enter(cx, &space);
        for (at, bytes, kind, backing) in kinds {
            rig.vm.map(cx, &space, span(at, bytes), kind, backing).expect("an area");
            if at == AT {
                rig.vm.lock(cx, &space, span(at, bytes), 4).expect("within the limit");
            }
            assert_eq!(rig.load(cx, &space, at), Ok(0));
            assert_eq!(rig.leaf(cx, &space, at).flags & LENT, Flags::NONE, "{at:#x}");
        }
        rig.end(cx, space);
        rig.vm.close(cx, object).expect("its own");
    });
}

fn bad<F: PageFormat>(size: PageSize) {
    as_first::<F, false>(32, 1, 14, |rig, cx| {
        let at = |page: u64| AT + page * size.bytes();
        let space = rig.space(cx, span(AT, 4 * size.bytes()), VmaKind::private(size));
        rig.enter(cx, &space);
        (0..2).for_each(|page| assert_eq!(rig.load(cx, &space, at(page)), Ok(0)));
        let zeroes = rig.leaf(cx, &space, AT).frame;
        rig.vm.frames().hwpoison(cx, Pfn::new(zeroes.get() + size.pages() / 2));
        let mut bytes = vec![1; size.bytes() as usize];
        // What is not there yet, and what a fault or a read from outside meets.
        assert_eq!(rig.vm.read(cx, &space, VirtAddr::new(at(2)), &mut bytes), Ok(()));
        assert_eq!(rig.vm.read(cx, &space, VirtAddr::new(AT), &mut bytes), Ok(()));
        assert!(bytes.iter().all(|byte| *byte == 0));
        assert_eq!(rig.vm.fault(cx, &space, VirtAddr::new(at(1)), Access::Read), Ok(Served::Mapped));
        for page in 0..3 {
            assert_ne!(rig.leaf(cx, &space, at(page)).frame, zeroes);
            rig.store(cx, &space, at(page), 8).expect("memory");
        }
        rig.end(cx, space);
    });
}

/// Counts what a follower is told of a page.
#[derive(Default)]
struct Told(AtomicU64);

impl<'h> Notifier<crate::support::Cpus<'h>> for Told {
    fn begin(&self, _cx: &mut CpuCx<'_, crate::support::Cpus<'h>>, range: VirtRange) {
        self.0.fetch_add(u64::from(range == span(AT, 0x1000)), Ordering::Relaxed);
    }

    fn end(&self, _cx: &mut CpuCx<'_, crate::support::Cpus<'h>>, _range: VirtRange) {}
}

/// A second stage that has copied the page of zeroes is told when another takes its place, and may never store to it.
#[test]
fn followers_are_told() {
    with_cpu(16, 1, 15, |rig, cx| {
        let space = rig.space(cx, span(AT, 0x4000), SMALL);
        let told = Arc::new(Told::default());
        let follower = rig.vm.follow(cx, &space, Follower(told.clone())).expect("memory");
        rig.enter(cx, &space);
        assert_eq!(rig.load(cx, &space, AT), Ok(0));
        assert!(!rig.leaf(cx, &space, AT).flags.contains(Flags::WRITE));
        assert_eq!(told.0.load(Ordering::Relaxed), 0);
        rig.store(cx, &space, AT, 1).expect("memory");
        assert_eq!(told.0.load(Ordering::Relaxed), 1);
        // SAFETY: it follows this space.
        drop(unsafe { rig.vm.unfollow(cx, &space, follower) });
        rig.end(cx, space);
    });
}

fn scenario<F: PageFormat>(rig: &Rig<'_, F>) {
    rig.on(0, |cx| {
        let Ok(space) = rig.vm.create(cx, bounds()) else { return };
        for (at, size) in [(AT, PageSize::Size4K), (2 * AT, PageSize::Size2M)] {
            let _ = rig.vm.map(cx, &space, span(at, 2 * size.bytes()), VmaKind::private(size), Backing::Private);
        }
        rig.enter(cx, &space);
        let lacks = |error: VmError| matches!(error, VmError::NoMemory | VmError::NoArea { .. });
        let mut stored = Vec::new();
        for at in [AT, AT + 0x1000, 2 * AT, 2 * AT + (2 << 20)] {
            assert!(rig.load(cx, &space, at).map_or_else(lacks, |found| found == 0));
        }
        let child = rig.vm.fork(cx, &space);
        for at in [AT, 2 * AT] {
            match rig.store(cx, &space, at, at) {
                Ok(()) => stored.push(at),
                Err(error) => assert!(lacks(error)),
            }
        }
        let pinned = |cx: &mut _, pins: &mut Vec<_>| {
            rig.vm.pin(cx, &space, span(AT + 0x1000, 0x1000), Access::Write, None, &Never, |run| pins.push(run))
        };
        let mut pins = Vec::new();
        let _ = pinned(cx, &mut pins);
        for at in [AT, AT + 0x1000, 2 * AT, 2 * AT + (2 << 20)] {
            let expected = if stored.contains(&at) { at } else { 0 };
            assert!(rig.load(cx, &space, at).map_or_else(lacks, |found| found == expected));
        }
        rig.unpin(cx, &space, pins);
        if let Ok(child) = child {
            rig.enter(cx, &child);
            rig.leave(cx, &space);
            for at in [AT, 2 * AT] {
                assert!(rig.load(cx, &child, at).map_or_else(lacks, |found| found == 0));
            }
            rig.enter(cx, &space);
            rig.leave(cx, &child);
            rig.vm.destroy(cx, child).expect("destroyed");
        }
        rig.end(cx, space);
    });
}

/// Without memory for it there are pages of the areas' own; without memory for those an access fails.
#[test]
fn every_allocation_may_fail() {
    every_fault(|plan| with_format::<Metered, false>(16, 1, 16, plan, scenario));
    every_fault(|plan| with_format::<Aarch64, false>(16, 1, 16, plan, scenario));
}

/// Reclaim does not find it.
#[test]
fn it_has_no_owner() {
    with_cpu(16, 1, 17, |rig, cx| {
        let space = rig.space(cx, span(AT, 0x4000), SMALL);
        rig.enter(cx, &space);
        assert_eq!(rig.load(cx, &space, AT), Ok(0));
        let Lookup::Mapped(leaf) = rig.vm.lookup(cx, &space, VirtAddr::new(AT)) else { panic!("read") };
        assert_eq!(rig.vm.owner(leaf.frame), None);
        // SAFETY: there is none to be given away.
        assert!(unsafe { rig.vm.hold_mapped(cx, leaf.frame) }.is_none());
        assert_eq!(rig.vm.walk_mappings(cx, leaf.frame, |_, _| panic!("nobody's")), 0);
        rig.end(cx, space);
    });
}

on_both_formats! {
    fn reads_show_one_page_until_somebody_stores: shown (each [PageSize::Size4K, PageSize::Size2M]);
    fn no_cpu_reads_zeroes_after_a_store: stale (stale);
    fn a_fork_shows_zeroes_too: forked (each [PageSize::Size4K, PageSize::Size2M]);
    fn who_needs_a_page_that_stays_gets_one: held ();
    fn rights_and_places_change_and_it_stays_zeroes: changed ();
    /// Nobody reads it any more, and it does not come back to anybody.
    fn bad_memory_of_it_is_nobodys_loss: bad (each [PageSize::Size4K, PageSize::Size2M]);
}
