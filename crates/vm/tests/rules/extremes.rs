//! Numbers at the end of their types, through every call that takes one: an error or nothing, no panic, no wrap, and no loop
//! over what is not there.

use crate::support::{SMALL, bounds, span, with_cpu};
use hugemm_base::{Cancel, Never, Order, PAGE_BYTES, PageSize, Pfn, VirtAddr, VirtRange, with};
use hugemm_paging::Lookup;
use hugemm_vm::{Access, AgeRun, Backing, Neighbours, Recency, VmError, VmaKind};
use std::cell::Cell;

/// Addresses in 64 bits, in pages.
const ALL: u64 = 1 << 52;
/// Ranges at the ends of what addresses can be, and around what a page table can have.
fn ranges() -> impl Iterator<Item = VirtRange> {
    let ends = [0, 1 << 34, (1 << 35) - 1, 1 << 35, 1 << 36, ALL - (1 << 35), ALL - 1];
    let lengths = [1, 512, 1 << 18, 1 << 35, ALL - (1 << 35), ALL];
    ends.into_iter()
        .flat_map(move |first| lengths.into_iter().filter_map(move |pages| VirtRange::from_pages(first, pages).ok()))
}

/// Is cancelled after so many units.
struct Turns(Cell<u32>);

impl Cancel for Turns {
    fn requested(&self) -> bool {
        self.0.replace(self.0.get().saturating_sub(1)) == 0
    }
}

/// A shared object has as many pages as it says: a number whose bytes are more than 64 bits can say is not cut off.
#[test]
fn objects_are_as_large_as_they_say() {
    with_cpu(16, 1, 71, |rig, cx| {
        for pages in [0, 512, 1 << 27, 1 << 36, ALL - 512, ALL, ALL + 512, 1 << 63, u64::MAX - 511, u64::MAX] {
            for (page, pooled) in [(PageSize::Size4K, false), (PageSize::Size2M, false), (PageSize::Size2M, true)] {
                let made = rig.vm.create_shared(cx, pages, page, pooled);
                assert!(!matches!(made, Err(VmError::Paging(_))), "{made:?}");
                let Ok(object) = made else {
                    assert!(pages == 0 || pages > 1 << 35 || pooled || pages % 512 != 0, "{pages:#x}");
                    continue;
                };
                assert!(pages <= ALL && object.pages() == pages, "{pages:#x} pages became {}", object.pages());
                for (from, to) in
                    [(0, 0), (u64::MAX, 0), (u64::MAX - 511, u64::MAX), (pages, u64::MAX), (u64::MAX, u64::MAX)]
                {
                    let filling = rig.vm.prefault_shared(&object, from, to);
                    let filled = filling.work(cx, &Never);
                    let again = filling.work(cx, &Turns(Cell::new(3)));
                    assert_eq!(again, if from > to { filled } else { Ok(()) }, "nothing is left");
                    let refused = matches!(filled, Err(VmError::OutOfBounds { .. }));
                    assert_eq!(refused, from > to, "{filled:?}");
                    assert!(refused || matches!(filled, Ok(()) | Err(VmError::Misaligned { .. })), "{filled:?}");
                }
                let space = rig.vm.create(cx, bounds()).expect("a space");
                let kind = with!(VmaKind::private(page), pooled);
                for offset in [pages, ALL - 512, ALL, 1 << 63, u64::MAX - 511, u64::MAX] {
                    let backing = Backing::Shared(&object, offset);
                    let mapped = rig.vm.map(cx, &space, span(0, 2 << 20), kind, backing);
                    assert!(
                        matches!(mapped, Err(VmError::OutOfBounds { .. } | VmError::Misaligned { .. })),
                        "{mapped:?}"
                    );
                }
                rig.end_shown(cx, (object, space));
            }
        }
    });
}

#[test]
fn spaces_take_any_range() {
    with_cpu(16, 1, 72, |rig, cx| {
        for bounds in ranges() {
            let space = match rig.vm.create(cx, bounds) {
                Ok(space) => space,
                Err(error) => {
                    assert!(matches!(error, VmError::OutOfBounds { .. }), "{bounds}: {error:?}");
                    continue;
                }
            };
            let _ = rig.vm.map(cx, &space, bounds, SMALL, Backing::Private);
            for at in [bounds.start(), bounds.last()] {
                let _ = rig.vm.fault(cx, &space, at, Access::Write);
            }
            rig.vm.destroy(cx, space).expect("idle");
        }
        let space = rig.space(cx, span(0, 4 << 20), SMALL);
        let last = span((1 << 47) - PAGE_BYTES, PAGE_BYTES);
        rig.vm.map(cx, &space, last, SMALL, Backing::Private).expect("room");
        for at in [0, (1 << 47) - 1] {
            rig.vm.fault(cx, &space, VirtAddr::new(at), Access::Write).expect("memory");
        }
        for at in [1 << 47, 1 << 48, !0 << 47, 1 << 63, u64::MAX].map(VirtAddr::new) {
            assert_eq!(rig.vm.fault(cx, &space, at, Access::Read), Err(VmError::NoArea { at }));
            assert_eq!((rig.vm.lookup(cx, &space, at), space.find_vma(cx, at).is_err()), (Lookup::Absent, true));
        }
        for range in ranges() {
            let _ = rig.vm.test_and_clear_young(cx, &space, range, |_| {});
            for total in [None, Some(0), Some(u64::MAX)] {
                let there = span(0, 4 << 20).covers(range) || range == last;
                assert_eq!(rig.vm.prefault(&space, range, total).work(cx, &Never).is_ok(), there, "{range}");
                let mut pins = Vec::new();
                assert_eq!(
                    rig.vm.pin(cx, &space, range, Access::Write, total, &Never, |pin| pins.push(pin)).is_ok(),
                    there,
                    "{range}"
                );
                rig.unpin(cx, &space, pins);
            }
        }
        for range in ranges() {
            let unmapped = rig.vm.unmap(cx, &space, range).map(|_| ());
            let there = if bounds().covers(range) { Ok(()) } else { Err(VmError::OutOfBounds { at: range.start() }) };
            assert_eq!(unmapped, there, "{range}");
        }
        assert!(space.find_vma(cx, VirtAddr::new(0)).is_err());
        for frame in [0, 1, u64::MAX >> 12, u64::MAX].map(Pfn::new).into_iter().chain([Pfn::LIMIT]) {
            // SAFETY: the test's pager lists nothing.
            assert!(unsafe { rig.vm.hold_mapped(cx, frame) }.is_none());
        }
        // Pages of which nobody asks, and such as no object has.
        rig.vm.map(cx, &space, span(0, 2 << 20), SMALL, Backing::Private).expect("room");
        rig.vm.fault(cx, &space, VirtAddr::new(0), Access::Write).expect("memory");
        let area = space.find_vma(cx, VirtAddr::new(0)).expect("mapped");
        let Lookup::Mapped(leaf) = rig.vm.lookup(cx, &space, VirtAddr::new(0)) else { panic!("mapped") };
        let first = (area.offset, leaf.frame);
        let mut found = [Recency::default(); 2];
        for (pages, room) in
            [(&[first][..], 0), (&[first, (u64::MAX, Pfn::LIMIT)], 2), (&[(u64::MAX, Pfn::LIMIT), first], 2)]
        {
            for order in [Order::ZERO, Order::MAX] {
                let run = AgeRun { object: area.object, pages, order };
                let none = Neighbours { wants: &|_| false, take: &mut |_, _| () };
                rig.vm.age(cx, &run, &mut found[..room], Some(none));
            }
        }
        assert!(found[0].young, "nobody took its bit who could not say so");
        rig.vm.destroy(cx, space).expect("idle");
    });
}
