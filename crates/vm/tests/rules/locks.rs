//! What is locked: present at once, counted, within a limit, and in memory until it is unlocked. On both formats.

use crate::support::{AT, Cx, Model, Rig, SMALL, bounds, no_faults, on_both_formats, span, with_cpu, with_format};
use hugemm_base::{Never, PageSize, VirtAddr, with};
use hugemm_frames::Frozen;
use hugemm_paging::{Flags, Lookup, PageFormat};
use hugemm_vm::{AddressSpace, Backing, Discard, Protection, UnhookedPage, Usage, VmError, VmaKind};

/// Tries to page out what is mapped at an address; whether it went.
fn pages_out<'h, F: PageFormat>(
    rig: &Rig<'h, F, true>,
    cx: &mut Cx<'_, 'h>,
    space: &AddressSpace<Model<'h, F, true>>,
    at: u64,
) -> bool {
    let deferred = rig.deferred();
    let unhooked = rig.unhook(cx, space, at, &deferred);
    type Kept<'d, 'h, F> = (VmError, UnhookedPage<'d, 'h, Model<'h, F, true>>);
    let store = |cx: &Cx<'_, 'h>, block: Frozen| Ok((rig.vm.pager().store(cx, &block, 0), Some(block)));
    // SAFETY: the slot is a new one of this pager.
    let done: Result<u64, Kept<'_, 'h, F>> = unsafe { unhooked.page_out(cx, store, |_, _, _| panic!("small")) };
    match done {
        Ok(_) => true,
        Err((error, page)) => {
            assert_eq!(error, VmError::InUse);
            page.put_back(cx);
            false
        }
    }
}

fn stays<F: PageFormat>() {
    with_format::<F, true>(32, 2, 5, &no_faults(), |rig| {
        let space = rig.filled_for_both(PageSize::Size4K, 8);
        rig.on(0, |cx| {
            assert!(pages_out(rig, cx, &space, AT) && pages_out(rig, cx, &space, AT + 0x3000));
            let part = span(AT, 0x4000);
            assert_eq!(rig.vm.lock(cx, &space, part, 3), Err(VmError::LockLimit { locked: 4 }));
            assert_eq!(rig.vm.usage(cx, &space, part), Ok(with!(Usage::default(), present = 2, swapped = 2)));
            let before = rig.flushes();
            assert_eq!(rig.vm.lock(cx, &space, part, 4), Ok(()));
            assert_eq!((rig.flushes() - before, space.locked()), (0, 4));
            assert_eq!(rig.vm.usage(cx, &space, part), Ok(with!(Usage::default(), present = 4)));
            let areas: Vec<_> = space.vmas(bounds()).map(|area| (area.range.pages(), area.kind.locked)).collect();
            assert_eq!(areas, [(4, true), (4, false)]);
            assert!(!pages_out(rig, cx, &space, AT + 0x1000) && pages_out(rig, cx, &space, AT + 0x5000));
            assert_eq!(rig.vm.usage(cx, &space, part), Ok(with!(Usage::default(), present = 4)));
            // Again: there is nothing more to lock. A part that is let go.
            assert_eq!(rig.vm.lock(cx, &space, part, 4), Ok(()));
            assert_eq!(rig.vm.lock(cx, &space, span(AT + 0x3000, 0x2000), 4), Err(VmError::LockLimit { locked: 5 }));
            assert_eq!(rig.vm.unlock(cx, &space, span(AT + 0x1000, 0x1000)), Ok(()));
            assert_eq!(space.locked(), 3);
            assert!(pages_out(rig, cx, &space, AT + 0x1000) && !pages_out(rig, cx, &space, AT));
            assert_eq!(rig.vm.unlock(cx, &space, span(AT, 0x8_0000)), Ok(()), "holes and all");
            assert_eq!((space.locked(), space.vmas(bounds()).count()), (0, 1), "one area again");
            (0..8).for_each(|page| assert_eq!(rig.load(cx, &space, AT + page * 0x1000), Ok(page + 1)));
        });
        rig.end_for_both(space);
    });
}

fn shared<F: PageFormat>() {
    with_format::<F, true>(32, 2, 6, &no_faults(), |rig| {
        let space = rig.filled_for_both(PageSize::Size4K, 4);
        rig.on(0, |cx| {
            let object = rig.vm.create_shared(cx, 4, PageSize::Size4K, false).expect("an object");
            let shared = span(AT + 0x8000, 0x4000);
            rig.vm.map(cx, &space, shared, SMALL, Backing::Shared(&object, 0)).expect("an area");
            let child = rig.vm.fork(cx, &space).expect("memory");
            let copied = space.counters().copied;
            rig.vm.lock(cx, &space, span(AT, 0x2000), 100).expect("an area");
            assert_eq!(space.counters().copied - copied, 2, "its own, so that no store waits for memory");
            rig.vm.lock(cx, &space, shared, 100).expect("an area");
            assert_eq!(space.locked(), 6);
            let Lookup::Mapped(leaf) = rig.vm.lookup(cx, &space, shared.start()) else { panic!("filled") };
            assert!(leaf.flags.contains(Flags::WRITE));
            assert!(!pages_out(rig, cx, &space, shared.start().get()), "wherever else it is shown");
            let grandchild = rig.vm.fork(cx, &space).expect("memory");
            assert_eq!((child.locked(), grandchild.locked()), (0, 0), "nobody has asked for that");
            for space in [child, grandchild] {
                rig.vm.destroy(cx, space).expect("nobody uses it");
            }
            rig.vm.close(cx, object).expect("its own");
        });
        rig.end_for_both(space);
    });
}

/// Nothing is locked then.
#[test]
fn what_cannot_be_is_refused() {
    with_cpu(16, 1, 7, |rig, cx| {
        let space = rig.space(cx, span(AT, 0x4000), SMALL);
        let large = VmaKind::private(PageSize::Size2M);
        rig.vm.map(cx, &space, span(AT + (2 << 20), 2 << 20), large, Backing::Private).expect("an area");
        let read_only = SMALL.allowing(Protection::USER);
        rig.vm.map(cx, &space, span(AT + 0x8000, 0x1000), read_only, Backing::Private).expect("an area");
        let mut refused = |at: u64, bytes, limit, error| {
            assert_eq!(rig.vm.lock(cx, &space, span(AT + at, bytes), limit), Err(error));
            assert_eq!(space.locked(), 0);
        };
        let at = |at: u64| VirtAddr::new(AT + at);
        refused(0, 0x8000, 100, VmError::NoArea { at: at(0x4000) });
        refused(2 << 20, 0x1000, 9999, VmError::Misaligned { at: at((2 << 20) + 0x1000) });
        refused(2 << 20, 2 << 20, 511, VmError::LockLimit { locked: 512 });
        refused(0, 0x1000, 0, VmError::LockLimit { locked: 1 });
        let beyond = span(1 << 47, 0x1000);
        assert_eq!(rig.vm.lock(cx, &space, beyond, 100), Err(VmError::OutOfBounds { at: beyond.start() }));
        assert_eq!(rig.vm.unlock(cx, &space, beyond), Err(VmError::OutOfBounds { at: beyond.start() }));
        assert_eq!(rig.vm.usage(cx, &space, beyond), Err(VmError::OutOfBounds { at: beyond.start() }));
        rig.vm.lock(cx, &space, span(AT + 0x8000, 0x1000), 1).expect("what is only read too");
        assert_eq!(
            rig.vm.discard(cx, &space, span(AT + 0x8000, 0x1000), Discard::Now),
            Err(VmError::Denied { at: at(0x8000) })
        );
        rig.vm.unmap(cx, &space, span(AT + 0x8000, 0x1000)).expect("an area");
        rig.vm.prefault(&space, span(AT, 0x1000), None).work(cx, &Never).expect("memory");
        assert_eq!(space.locked(), 0);
        rig.vm.destroy(cx, space).expect("nobody uses it");
    });
}

on_both_formats! {
    fn what_is_locked_is_there_and_stays: stays ();
    /// What a fork shares is copied at once; what an object shows stays for all; a child's areas are not locked.
    fn what_others_have_too_is_locked: shared ();
}
