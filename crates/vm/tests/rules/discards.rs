//! What is given up: it reads as zeroes, or as its object has it, on every CPU; its memory is back; who shares it keeps it. On both formats.

use crate::support::{AT, Metered, bounds, no_faults, span, with_cpu, with_format};
use hugemm_base::{CpuId, Never, PageSize, VirtAddr};
use hugemm_frames::FolioRef;
use hugemm_paging::{Aarch64, DeferredUnmap, Lookup, PageFormat};
use hugemm_vm::{Backing, Usage, VmError, VmaKind};

const SMALL: VmaKind = VmaKind::private(PageSize::Size4K);

fn gone<F: PageFormat>(size: PageSize) {
    let pages = if size == PageSize::Size4K { 1200 } else { 6 };
    with_format::<F, false>(48, 2, 3, &no_faults(), |rig| {
        let space = rig.filled_for_both(size, pages);
        let at = |page: u64| AT + page * size.bytes();
        let (from, to) = (pages / 3, pages / 2);
        let before = rig.flushes();
        rig.mmu.as_cpu(CpuId(0), |cx| {
            let used = rig.used(cx);
            let part = span(at(from), (to - from) * size.bytes());
            assert_eq!(rig.vm.discard(cx, &space, part), Ok(part.pages()));
            assert_eq!(rig.flushes() - before, 1);
            assert!(used - rig.used(cx) >= part.pages(), "they are free");
            assert_eq!(rig.vm.usage(cx, &space, part), Ok(Usage::default()));
            let whole = Usage { present: pages * size.pages() - part.pages(), ..Usage::default() };
            let huge = if size == PageSize::Size4K { 0 } else { whole.present };
            assert_eq!(rig.vm.usage(cx, &space, span(AT, pages * size.bytes())), Ok(Usage { huge, ..whole }));
            assert_eq!(rig.vm.discard(cx, &space, part), Ok(0));
            assert_eq!(rig.flushes() - before, 1, "nothing was there");
        });
        assert_eq!(space.vmas(bounds()).count(), 1, "areas stay");
        for cpu in [1, 0] {
            rig.mmu.as_cpu(CpuId(cpu), |cx| {
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

#[test]
fn what_is_given_up_reads_as_zeroes_after_one_flush() {
    for size in [PageSize::Size4K, PageSize::Size2M] {
        gone::<Metered>(size);
        gone::<Aarch64>(size);
    }
}

fn shared<F: PageFormat>() {
    with_format::<F, false>(32, 2, 4, &no_faults(), |rig| {
        let space = rig.filled_for_both(PageSize::Size4K, 8);
        rig.mmu.as_cpu(CpuId(0), |cx| {
            let object = rig.vm.create_shared(cx, 16, PageSize::Size4K, false).expect("memory");
            rig.vm.map(cx, &space, span(AT + 0x8000, 0x8000), SMALL, Backing::Shared(&object, 4)).expect("an area");
            (8..16).for_each(|page| rig.store(cx, &space, AT + page * 0x1000, page + 1).expect("memory"));
            let child = rig.vm.fork(cx, &space).expect("memory");
            let mut pins = Vec::new();
            let pinned = rig.vm.pin(cx, &space, span(AT + 0x1000, 0x1000), None, &Never, |pin| pins.push(pin));
            assert_eq!(pinned, Ok(1));
            let before = rig.flushes();
            assert_eq!(rig.vm.discard(cx, &space, span(AT, 0x1_0000)), Ok(16));
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
            pins.into_iter().for_each(|pin| rig.vm.unpin(cx, &space, pin).expect("its own"));
            rig.vm.destroy(cx, child).expect("nobody uses it");
            rig.vm.close(cx, object).expect("its own");
        });
        rig.end_for_both(space);
    });
}

/// A fork's child, a device and an object keep what they have.
#[test]
fn who_else_has_it_keeps_it() {
    shared::<Metered>();
    shared::<Aarch64>();
}

fn moving<F: PageFormat>(seed: u64) {
    with_format::<F, true>(16, 2, seed, &no_faults(), |rig| {
        let space = rig.filled_for_both(PageSize::Size4K, 4);
        // SAFETY: used with this manager's TLBs only.
        let deferred = unsafe { DeferredUnmap::new(rig.vm.shootdown()) }.expect("few CPUs");
        rig.mmu.as_cpu(CpuId(0), |cx| {
            let found = rig.vm.lookup(cx, &space, VirtAddr::new(AT));
            let Lookup::Mapped(leaf) = found else { panic!("{found:?}") };
            // SAFETY: mapped, and nobody else is there to let it go.
            let folio: FolioRef = unsafe { rig.vm.frames().get_at(leaf.frame) }.expect("it has a reference");
            let page = rig.vm.unhook(cx, folio, &deferred).expect("nobody else has it");
            let there = Usage { present: 4, ..Usage::default() };
            assert_eq!(rig.vm.usage(cx, &space, span(AT, 0x4000)), Ok(there), "it is in memory");
            assert_eq!(rig.vm.discard(cx, &space, span(AT, 0x1000)), Ok(0), "it was not mapped");
            // No CPU has the old translation any more, though its flush was still owed.
            assert!(rig.mmu.load(CpuId(1), VirtAddr::new(AT)).is_err());
            assert_eq!(rig.load(cx, &space, AT), Ok(0));
            page.put_back(cx);
            assert_eq!(rig.load(cx, &space, AT), Ok(0), "it has gone");
        });
        rig.end_for_both(space);
    });
}

#[test]
fn a_page_that_moves_does_not_come_back() {
    for seed in 0..8 {
        moving::<Metered>(seed);
        moving::<Aarch64>(seed);
    }
}

/// A refusal says where, and nothing is different after it.
#[test]
fn what_cannot_go_is_refused() {
    with_cpu(32, 1, 11, |rig, cx| {
        rig.fill_pool(cx, 1);
        let space = rig.vm.create(cx, span(AT, 1 << 30)).expect("memory");
        let large = VmaKind::private(PageSize::Size2M);
        let locked = VmaKind { locked: true, ..SMALL };
        let kinds = [
            (0, 0x4000, SMALL),
            (0x4000, 0x4000, locked),
            (4 << 20, 2 << 20, large),
            (6 << 20, 2 << 20, large.pooled()),
        ];
        for (at, bytes, kind) in kinds {
            rig.vm.map(cx, &space, span(AT + at, bytes), kind, Backing::Private).expect("an area");
        }
        rig.enter(cx, &space);
        let stored = [0, 0x4000, 4 << 20, 6 << 20];
        stored.into_iter().for_each(|at| rig.store(cx, &space, AT + at, 5).expect("memory"));
        let mut refused = |at: u64, bytes, error| {
            assert_eq!(rig.vm.discard(cx, &space, span(at, bytes)), Err(error), "{at:#x}");
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
