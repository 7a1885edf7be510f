//! Requests that cannot be served say why and where, and leave everything as it was.

use crate::support::{AT, SMALL, bounds, span, with_cpu};
use hugemm_base::{Never, PageSize, VirtAddr, with};
use hugemm_vm::{Access, Backing, PinError, VmError, VmaKind};

const LARGE: VmaKind = VmaKind::private(PageSize::Size2M);

fn misaligned(at: u64) -> VmError {
    VmError::Misaligned { at: VirtAddr::new(at) }
}

fn beyond(at: u64) -> VmError {
    VmError::OutOfBounds { at: VirtAddr::new(at) }
}

/// An area lies in its space, at whole pages, and shows what its object has, in the object's pages.
#[test]
fn areas_are_refused_by_their_place_and_object() {
    with_cpu(16, 1, 61, |rig, cx| {
        rig.fill_pool(cx, 2);
        // Its table has room for more than it.
        let space = rig.vm.create(cx, span(AT, 1 << 30)).expect("a space");
        let mut map = |start, bytes, kind, backing| {
            rig.vm.map(cx, &space, span(start, bytes), kind, backing).map(|area| (area.range, area.offset))
        };
        let private = || Backing::Private;
        assert_eq!(map(AT + 0x1000, 2 << 20, LARGE, private()), Err(misaligned(AT + 0x1000)));
        assert_eq!(map(AT, 0x1000, LARGE, private()), Err(misaligned(AT)), "its length");
        assert_eq!(map(AT - 0x1000, 0x2000, SMALL, private()), Err(beyond(AT - 0x1000)));
        assert_eq!(map(AT + (1 << 30) - 0x1000, 0x2000, SMALL, private()), Err(beyond(AT + (1 << 30) - 0x1000)));
        assert_eq!(map(AT + (1 << 30), 0x1000, SMALL, private()), Err(beyond(AT + (1 << 30))));
        for start in [AT, AT + (1 << 30) - 0x1000] {
            assert_eq!(map(start, 0x1000, SMALL, private()), Ok((span(start, 0x1000), 0)), "its first and last");
        }
        let object = rig.vm.create_shared(cx, 1024, PageSize::Size2M, false).expect("an object");
        assert_eq!(object.pages(), 1024);
        let mut map = |start, bytes, kind, offset| {
            let backing = Backing::Shared(&object, offset);
            rig.vm.map(cx, &space, span(start, bytes), kind, backing).map(|area| (area.offset, area.kind))
        };
        let at = AT + (8 << 20);
        assert_eq!(map(at, 0x1000, SMALL, 0), Err(VmError::OtherKind), "other pages");
        assert_eq!(map(at, 2 << 20, LARGE.pooled(), 0), Err(VmError::OtherKind), "from elsewhere");
        assert_eq!(map(at, 2 << 20, LARGE, 1), Err(misaligned(0x1000)));
        assert_eq!(map(at, 4 << 20, LARGE, 512), Err(beyond(2 << 20)));
        assert_eq!(map(at, 2 << 20, LARGE, 1024), Err(beyond(4 << 20)));
        assert_eq!(map(at, 2 << 20, LARGE, 1 << 50), Err(beyond((1 << 50) << 12)));
        let shown = map(at, 2 << 20, LARGE, 512).expect("its last page");
        assert_eq!(shown, (512, with!(LARGE, shared = true)));
        // Nothing is left of those that were refused: not an area, and not a promise.
        let areas = space.vmas(span(AT, 1 << 30)).map(|area| area.range.start().get());
        assert!(areas.eq([AT, at, AT + (1 << 30) - 0x1000]));
        let none = rig.vm.map(cx, &space, span(at, 2 << 20), LARGE.pooled(), Backing::Private);
        assert_eq!(none, Err(VmError::Overlap { at: VirtAddr::new(at) }));
        assert_eq!(rig.pool_available(cx), 2);
        rig.vm.close(cx, object).expect("its own");
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// What an area has by its backing, or by a limit, is not said by whoever maps it.
#[test]
fn what_map_decides_is_not_asked_for() {
    with_cpu(16, 1, 64, |rig, cx| {
        let space = rig.vm.create(cx, bounds()).expect("a space");
        let asked = with!(SMALL, shared = true, given = true, reserved = true, locked = true, sourced = true);
        let object = rig.vm.create_shared(cx, 4, PageSize::Size4K, false).expect("an object");
        let file = rig.vm.open_source(cx, crate::sources::File::new(0x4000)).expect("memory");
        let areas = [
            (Backing::Private, SMALL),
            (Backing::Shared(&object, 0), with!(SMALL, shared = true)),
            (Backing::Shared(&file, 0), with!(SMALL, shared = true, sourced = true)),
            (Backing::Copied(&file, 0), with!(SMALL, sourced = true)),
        ];
        for (number, (backing, expected)) in (0..).zip(areas) {
            let mapped = rig.vm.map(cx, &space, span(AT + (number << 20), 0x4000), asked, backing);
            assert_eq!(mapped.map(|area| area.kind), Ok(expected), "{number}");
        }
        assert_eq!(space.locked(), 0);
        rig.end_shown(cx, (object, space));
        rig.vm.close(cx, file).expect("its own");
    });
}

/// An object has whole pages, and the pool promises each of them or none.
#[test]
fn objects_are_refused_by_their_size() {
    with_cpu(16, 1, 62, |rig, cx| {
        rig.fill_pool(cx, 3);
        let create = |cx: &mut _, pages, size, pooled| rig.vm.create_shared(cx, pages, size, pooled);
        assert_eq!(create(cx, 513, PageSize::Size2M, true).err(), Some(misaligned(513 << 12)));
        assert_eq!(create(cx, 0, PageSize::Size4K, false).err(), Some(misaligned(0)));
        assert_eq!(create(cx, 4 * 512, PageSize::Size2M, true).err(), Some(VmError::NoPool));
        assert_eq!(rig.pool_available(cx), 3);
        let object = create(cx, 2 * 512, PageSize::Size2M, true).expect("two of three");
        assert_eq!(rig.pool_available(cx), 1);
        let space = rig.vm.create(cx, bounds()).expect("a space");
        let area = span(AT, 4 << 20);
        rig.vm.map(cx, &space, area, LARGE.pooled(), Backing::Shared(&object, 0)).expect("an area");
        rig.vm.prefault_shared(&object, 512, 1024).work(cx, &Never).expect("promised");
        assert_eq!((rig.pool_available(cx), rig.pool.counts(cx).reserved), (1, 1));
        rig.end_shown(cx, (object, space));
        assert_eq!(rig.pool_available(cx), 3, "promises that were not used are taken back");
    });
}

/// What is filled or pinned is in areas throughout, at their pages; what was done before that was found out stays done.
#[test]
fn filling_ends_where_there_is_nothing_to_fill() {
    with_cpu(16, 1, 63, |rig, cx| {
        let space = rig.space(cx, span(AT, 0x20_0000), SMALL);
        rig.vm.map(cx, &space, span(AT + 0x20_0000, 0x20_0000), LARGE, Backing::Private).expect("an area");
        let hole = VmError::NoArea { at: VirtAddr::new(AT + 0x40_0000) };
        let filling = rig.vm.prefault(&space, span(AT + 0x1f_e000, 0x40_0000), None);
        assert_eq!(filling.work(cx, &Never), Err(hole));
        assert_eq!(filling.done(), 2 + 512);
        assert_eq!(filling.work(cx, &Never), Ok(()), "it has ended for all who work on it");
        let mut pins = Vec::new();
        let mut pin = |cx: &mut _, start, bytes| {
            let before = pins.len();
            let done = rig.vm.pin(cx, &space, span(start, bytes), Access::Write, None, &Never, |pin| pins.push(pin));
            done.map_err(|error| (error, pins[before..].iter().map(|pin| pin.extent().pages()).sum::<u64>()))
        };
        let error = |pinned, cause| Err((PinError { pinned, cause }, pinned));
        assert_eq!(pin(cx, AT + 0x1f_e000, 0x40_0000), error(514, hole));
        assert_eq!(pin(cx, AT + 0x1f_e000, 0x3000), error(2, misaligned(AT + 0x20_0000)), "half of a large page");
        assert_eq!(pin(cx, AT + 0x20_1000, 0x1f_f000), error(0, misaligned(AT + 0x20_1000)));
        assert_eq!(pin(cx, AT + 0x1f_f000, 0x20_1000), Ok(513));
        rig.unpin(cx, &space, pins);
        let object = rig.vm.create_shared(cx, 2048, PageSize::Size2M, false).expect("an object");
        for (from, to, refused) in [(1, 1024, true), (512, 1023, true), (512, 1024, false), (1536, 4096, false)] {
            let filling = rig.vm.prefault_shared(&object, from, to);
            let expected = if refused { Err(misaligned(from << 12)) } else { Ok(()) };
            assert_eq!(filling.work(cx, &Never), expected);
            assert_eq!(filling.done(), if refused { 0 } else { 512 }, "of what it has");
        }
        rig.vm.close(cx, object).expect("its own");
        rig.vm.destroy(cx, space).expect("destroyed");
        let text = PinError { pinned: 7, cause: hole }.to_string();
        assert_eq!(text, format!("{hole} after 7 pages had been pinned"));
    });
}
