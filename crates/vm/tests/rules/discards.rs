//! What is given up: it reads as zeroes, or as its object has it, on every CPU; its memory is back; who shares it keeps it. On both formats.

use crate::support::{AT, SMALL, before_flush, bounds, no_faults, on_both_formats, span, with_cpu, with_format};
use hugemm_base::{CpuId, PageSize, VirtAddr, with};
use hugemm_frames::FolioRef;
use hugemm_paging::{DeferredUnmap, Flags, Lookup, PageFormat};
use hugemm_vm::{Access, Backing, Discard, Usage, VmError, VmaKind};
use std::cell::Cell;

fn gone<F: PageFormat>(size: PageSize) {
    let pages = if size == PageSize::Size4K { 1200 } else { 6 };
    with_format::<F, false>(48, 2, 3, &no_faults(), |rig| {
        let space = rig.filled_for_both(size, pages);
        let at = |page: u64| AT + page * size.bytes();
        let (from, to) = (pages / 3, pages / 2);
        let before = rig.flushes();
        rig.on(0, |cx| {
            let used = rig.used(cx);
            let part = span(at(from), (to - from) * size.bytes());
            assert_eq!(rig.vm.discard(cx, &space, part, Discard::Now), Ok(part.pages()));
            assert_eq!(rig.flushes() - before, 1);
            assert!(used - rig.used(cx) >= part.pages(), "they are free");
            assert_eq!(rig.vm.usage(cx, &space, part), Ok(Usage::default()));
            let whole = with!(Usage::default(), present = pages * size.pages() - part.pages());
            let huge = if size == PageSize::Size4K { 0 } else { whole.present };
            assert_eq!(rig.vm.usage(cx, &space, span(AT, pages * size.bytes())), Ok(with!(whole, huge)));
            assert_eq!(rig.vm.discard(cx, &space, part, Discard::Now), Ok(0));
            assert_eq!(rig.flushes() - before, 1, "nothing was there");
        });
        assert_eq!(space.vmas(bounds()).count(), 1, "areas stay");
        for cpu in [1, 0] {
            rig.on(cpu, |cx| {
                for page in 0..pages {
                    let expected = if (from..to).contains(&page) { 0 } else { page + 1 };
                    assert_eq!(rig.load(cx, &space, at(page)), Ok(expected), "page {page}");
                }
                assert_eq!(rig.store(cx, &space, at(from), 0), Ok(()));
            });
        }
        rig.end_for_both(space);
    });
}

fn shared<F: PageFormat>() {
    with_format::<F, false>(32, 2, 4, &no_faults(), |rig| {
        let space = rig.filled_for_both(PageSize::Size4K, 8);
        rig.on(0, |cx| {
            let object = rig.vm.create_shared(cx, 16, PageSize::Size4K, false).expect("memory");
            rig.vm.map(cx, &space, span(AT + 0x8000, 0x8000), SMALL, Backing::Shared(&object, 4)).expect("an area");
            (8..16).for_each(|page| rig.store(cx, &space, AT + page * 0x1000, page + 1).expect("memory"));
            let child = rig.vm.fork(cx, &space).expect("memory");
            let pins = rig.pin(cx, &space, span(AT + 0x1000, 0x1000));
            let before = rig.flushes();
            assert_eq!(rig.vm.discard(cx, &space, span(AT, 0x1_0000), Discard::Now), Ok(16));
            assert_eq!(rig.flushes() - before, 2, "of private ones, and of shared ones");
            for page in 0..16 {
                let expected = if page < 8 { 0 } else { page + 1 };
                assert_eq!(rig.load(cx, &space, AT + page * 0x1000), Ok(expected), "page {page}");
            }
            let found = rig.vm.lookup(cx, &space, VirtAddr::new(AT + 0x1000));
            let Lookup::Mapped(leaf) = found else { panic!("{found:?}") };
            assert_ne!(leaf.frame, pins[0].extent().base(), "the device has the old one");
            rig.enter(cx, &child);
            rig.leave(cx, &space);
            (0..16).for_each(|page| assert_eq!(rig.load(cx, &child, AT + page * 0x1000), Ok(page + 1)));
            rig.enter(cx, &space);
            rig.leave(cx, &child);
            rig.unpin(cx, &space, pins);
            rig.end_shown(cx, (object, child));
        });
        rig.end_for_both(space);
    });
}

fn moving<F: PageFormat>(seed: u64) {
    with_format::<F, true>(16, 2, seed, &no_faults(), |rig| {
        let space = rig.filled_for_both(PageSize::Size4K, 4);
        // SAFETY: used with this manager's TLBs only.
        let deferred = unsafe { DeferredUnmap::new(rig.vm.shootdown()) }.expect("few CPUs");
        rig.on(0, |cx| {
            let found = rig.vm.lookup(cx, &space, VirtAddr::new(AT));
            let Lookup::Mapped(leaf) = found else { panic!("{found:?}") };
            // SAFETY: mapped, and nobody else is there to let it go.
            let folio: FolioRef = unsafe { rig.vm.frames().get_at(leaf.frame) }.expect("it has a reference");
            let page = rig.vm.unhook(cx, folio, &deferred).expect("nobody else has it");
            let there = with!(Usage::default(), present = 4);
            assert_eq!(rig.vm.usage(cx, &space, span(AT, 0x4000)), Ok(there), "it is in memory");
            assert_eq!(rig.vm.discard(cx, &space, span(AT, 0x1000), Discard::Now), Ok(0), "it was not mapped");
            // No CPU has the old translation any more, though its flush was still owed.
            assert!(rig.mmu.load(CpuId::new(1), VirtAddr::new(AT)).is_err());
            assert_eq!(rig.load(cx, &space, AT), Ok(0));
            page.put_back(cx);
            assert_eq!(rig.load(cx, &space, AT), Ok(0), "it has gone");
        });
        rig.end_for_both(space);
    });
}

/// A refusal says where, and nothing is different after it.
#[test]
fn what_cannot_go_is_refused() {
    with_cpu(32, 1, 11, |rig, cx| {
        rig.fill_pool(cx, 1);
        let space = rig.vm.create(cx, span(AT, 1 << 30)).expect("memory");
        let large = VmaKind::private(PageSize::Size2M);
        let kinds = [(0, 0x8000, SMALL), (4 << 20, 2 << 20, large), (6 << 20, 2 << 20, large.pooled())];
        for (at, bytes, kind) in kinds {
            rig.vm.map(cx, &space, span(AT + at, bytes), kind, Backing::Private).expect("an area");
        }
        rig.enter(cx, &space);
        rig.vm.lock(cx, &space, span(AT + 0x4000, 0x4000), 4).expect("within the limit");
        let stored = [0, 0x4000, 4 << 20, 6 << 20];
        stored.into_iter().for_each(|at| rig.store(cx, &space, AT + at, 5).expect("memory"));
        let mut refused = |at: u64, bytes, error| {
            assert_eq!(rig.vm.discard(cx, &space, span(at, bytes), Discard::Now), Err(error), "{at:#x}");
            stored.into_iter().for_each(|at| assert_eq!(rig.load(cx, &space, AT + at), Ok(5)));
        };
        let at = |at: u64| VirtAddr::new(AT + at);
        refused(AT - 0x1000, 0x2000, VmError::OutOfBounds { at: VirtAddr::new(AT - 0x1000) });
        refused(AT, 0x8000, VmError::Denied { at: at(0x4000) });
        refused(AT + 0x5000, 0x1000, VmError::Denied { at: at(0x5000) });
        refused(AT + 0x8000, 0x1000, VmError::NoArea { at: at(0x8000) });
        refused(AT + (4 << 20), 0x1000, VmError::Misaligned { at: at((4 << 20) + 0x1000) });
        refused(AT + (4 << 20), 4 << 20, VmError::Denied { at: at(6 << 20) });
        rig.end(cx, space);
    });
}

/// Whose pages are given up when memory is short, with what was stored to page `n` being `n + 1`; both CPUs have translations for stores.
fn given_up<F: PageFormat>(size: PageSize) {
    with_format::<F, true>(32, 2, 12, &no_faults(), |rig| {
        let space = rig.filled_for_both(size, 6);
        let at = |page: u64| AT + page * size.bytes();
        // Only the test stores.
        [0, 1].into_iter().for_each(|cpu| rig.mmu.pause(CpuId::new(cpu), true));
        let before = rig.flushes();
        rig.on(0, |cx| {
            let part = span(at(1), 4 * size.bytes());
            assert_eq!(rig.vm.discard(cx, &space, part, Discard::WhenShort), Ok(0));
            assert_eq!(rig.flushes() - before, 1);
            assert_eq!(rig.vm.pager().unused_pages().len(), 4);
            (0..6).for_each(|page| assert_eq!(rig.load(cx, &space, at(page)), Ok(page + 1), "until then"));
        });
        // As hardware: no fault says so where it notes stores.
        rig.on(1, |cx| rig.store(cx, &space, at(2), 33).expect("memory"));
        rig.on(0, |cx| {
            assert_eq!(rig.vm.write(cx, &space, VirtAddr::new(at(3)), &44_u64.to_ne_bytes()), Ok(()));
            (0..6).for_each(|page| rig.page_out(cx, &space, at(page)));
            assert_eq!(rig.vm.pager().used() as u64, 4 * size.pages(), "two have gone");
            let found = [0, 1, 2, 3, 4, 5].map(|page| rig.load(cx, &space, at(page)).expect("memory"));
            assert_eq!(found, [1, 0, 33, 44, 0, 6]);
        });
        rig.end_for_both(space);
    });
}

/// A page goes if all who have it have given it up, and stays what it is through everything that is no store.
fn kept<F: PageFormat>() {
    with_format::<F, true>(32, 2, 13, &no_faults(), |rig| {
        let space = rig.filled_for_both(PageSize::Size4K, 9);
        rig.on(1, |cx| rig.leave(cx, &space));
        // Only the test stores.
        rig.mmu.pause(CpuId::new(0), true);
        rig.on(0, |cx| {
            let at = |page: u64| AT + (page << 12);
            let page_of = |page: u64| span(at(page), 0x1000);
            let give_up = |cx: &mut _, page: u64| {
                assert_eq!(rig.vm.discard(cx, &space, page_of(page), Discard::WhenShort), Ok(0));
            };
            let used = || rig.vm.pager().used();
            // Given up before a fork, and no longer: the child's is kept, to which the parent's CPUs may store until the fork is over.
            // Stored to before.
            give_up(cx, 0);
            give_up(cx, 2);
            rig.store(cx, &space, at(2), 20).expect("memory");
            give_up(cx, 8);
            rig.store(cx, &space, at(8), 90).expect("memory");
            let child = rig.vm.fork(cx, &space).expect("memory");
            rig.leave(cx, &space);
            // Whoever stored it is gone.
            rig.vm.unmap(cx, &space, page_of(8)).expect("an area");
            rig.page_out(cx, &child, at(8));
            // Shared before: the child has not.
            give_up(cx, 1);
            [0, 1, 2].into_iter().for_each(|page| rig.page_out(cx, &space, at(page)));
            assert_eq!(used(), 4);
            for space in [&space, &child] {
                rig.enter(cx, space);
                assert_eq!([0, 1, 2].map(|page| rig.load(cx, space, at(page)).expect("memory")), [1, 2, 20]);
                rig.leave(cx, space);
            }
            rig.enter(cx, &child);
            assert_eq!(rig.load(cx, &child, at(8)), Ok(90));
            rig.leave(cx, &child);
            rig.vm.destroy(cx, child).expect("destroyed");
            rig.enter(cx, &space);
            // As it was before the fork.
            (3..8).for_each(|page| rig.store(cx, &space, at(page), page + 1).expect("memory"));
            // Pinned before or after: devices store there.
            for (page, first) in [(3, true), (4, false)] {
                if !first {
                    give_up(cx, page);
                }
                let mut pins = rig.pin(cx, &space, page_of(page));
                if first {
                    give_up(cx, page);
                }
                let pin = pins.pop().expect("one");
                let memory = rig.mmu.host().address(pin.extent().base()).expect("memory");
                // SAFETY: a word of the pinned page.
                unsafe { memory.cast::<u64>().write(70 + page) };
                rig.vm.unpin(cx, &space, pin).expect("its own");
                rig.page_out(cx, &space, at(page));
                assert_eq!(rig.load(cx, &space, at(page)), Ok(70 + page));
            }
            // Put back, and moved: still given up.
            give_up(cx, 5);
            give_up(cx, 6);
            let deferred = rig.deferred();
            for (page, moves) in [(5, false), (6, true)] {
                let unhooked = rig.unhook(cx, &space, at(page), &deferred);
                if moves {
                    assert!(unhooked.move_elsewhere(cx))
                } else {
                    unhooked.put_back(cx)
                }
                assert_eq!(rig.load(cx, &space, at(page)), Ok(page + 1));
                rig.page_out(cx, &space, at(page));
                assert_eq!(rig.load(cx, &space, at(page)), Ok(0));
            }
            // Who stores by a table of his own asks first.
            give_up(cx, 7);
            assert!(!rig.leaf(cx, &space, at(7)).flags.contains(Flags::WRITE));
            rig.vm.fault(cx, &space, VirtAddr::new(at(7)), Access::Write).expect("memory");
            assert!(rig.leaf(cx, &space, at(7)).flags.contains(Flags::WRITE));
            rig.page_out(cx, &space, at(7));
            assert_eq!(rig.load(cx, &space, at(7)), Ok(8));
            rig.end(cx, space);
        });
    });
}

/// Whether the other CPU had a translation by which it would have stored unseen.
fn unseen<F: PageFormat>(seed: u64) -> bool {
    let seen = Cell::new(false);
    with_format::<F, true>(16, 2, seed, &no_faults(), |rig| {
        let space = rig.filled_for_both(PageSize::Size4K, 4);
        let then = || seen.set(rig.mmu.store(CpuId::new(1), VirtAddr::new(AT), 5).is_ok());
        before_flush(&then, || {
            rig.on(0, |cx| {
                rig.vm.discard(cx, &space, span(AT, 0x1000), Discard::WhenShort).expect("an area");
            })
        });
        // After it no store goes unseen.
        rig.on(1, |cx| rig.store(cx, &space, AT, 6).expect("memory"));
        rig.on(0, |cx| {
            rig.page_out(cx, &space, AT);
            assert_eq!(rig.load(cx, &space, AT), Ok(6));
        });
        rig.end_for_both(space);
    });
    seen.get()
}

#[test]
fn only_private_pages_go_when_memory_is_short() {
    with_cpu(32, 1, 14, |rig, cx| {
        rig.fill_pool(cx, 1);
        let space = rig.vm.create(cx, span(AT, 1 << 30)).expect("memory");
        let object = rig.vm.create_shared(cx, 4, PageSize::Size4K, false).expect("memory");
        let file = rig.vm.open_source(cx, crate::sources::File::new(0x4000)).expect("memory");
        let pooled = VmaKind::private(PageSize::Size2M).pooled();
        let areas = [
            (0, 0x4000, SMALL, Backing::Private),
            (0x4000, 0x4000, SMALL, Backing::Shared(&object, 0)),
            (0x8000, 0x4000, SMALL, Backing::Copied(&file, 0)),
            (2 << 20, 2 << 20, pooled, Backing::Private),
        ];
        for (from, bytes, kind, backing) in areas {
            rig.vm.map(cx, &space, span(AT + from, bytes), kind, backing).expect("an area");
            if from == 0 {
                rig.vm.lock(cx, &space, span(AT, bytes), 4).expect("within the limit");
            }
            let refused = rig.vm.discard(cx, &space, span(AT + from, bytes), Discard::WhenShort);
            assert_eq!(refused, Err(VmError::Denied { at: VirtAddr::new(AT + from) }));
        }
        let at = VirtAddr::new(AT + 0xc000);
        assert_eq!(rig.vm.discard(cx, &space, span(at.get(), 0x1000), Discard::WhenShort), Err(VmError::NoArea { at }));
        rig.end_shown(cx, (object, space));
        rig.vm.close(cx, file).expect("its own");
    });
}

on_both_formats! {
    fn what_is_given_up_reads_as_zeroes_after_one_flush: gone (each [PageSize::Size4K, PageSize::Size2M]);
    /// A fork's child, a device and an object keep what they have.
    fn who_else_has_it_keeps_it: shared ();
    fn a_page_that_moves_does_not_come_back: moving (each 0..8);
    fn what_is_given_up_goes_unstored_unless_somebody_stores: given_up (each [PageSize::Size4K, PageSize::Size2M]);
    fn what_others_have_or_may_store_to_stays: kept ();
    fn no_store_after_it_is_unseen: unseen (stale);
}
