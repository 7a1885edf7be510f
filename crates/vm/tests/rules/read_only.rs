//! What nobody may store to: files that take nothing back, and what devices have of areas without the right to store.

use crate::sources::{File, end};
use crate::support::{AT, Cx, Handle, Rig, SMALL, bounds, on_both_formats, span};
use hugemm_base::{Never, VirtAddr};
use hugemm_paging::PageFormat;
use hugemm_vm::{Access, Backing, Protection, VmError};

const READ: Protection = Protection::USER;
const WRITE: Protection = READ.with(Protection::WRITE);
const COPIED: u64 = AT + 0x10_0000;

fn takes_nothing<'h, F: PageFormat>(rig: &Rig<'h, F, true>) {
    rig.on(0, |cx| {
        let file = File::read_only(4 << 12);
        let object = rig.vm.open_source(cx, file).expect("memory");
        let space = rig.vm.create(cx, bounds()).expect("memory");
        rig.enter(cx, &space);
        let read_only = |at: u64| Err(VmError::ReadOnly { at: VirtAddr::new(at) });
        let map = |cx: &mut Cx<'_, 'h>, at, rights, backing| {
            rig.vm.map(cx, &space, span(at, 2 << 12), SMALL.allowing(rights), backing).map(|_| ())
        };
        assert_eq!(map(cx, AT, WRITE, Backing::Shared(&object, 0)), read_only(AT));
        map(cx, AT, READ, Backing::Shared(&object, 0)).expect("to be read");
        map(cx, AT + 0x2000, READ, Backing::Private).expect("nothing is there");
        // All or nothing, and where.
        for (from, pages) in [(AT, 4), (AT + 0x1000, 1)] {
            assert_eq!(rig.vm.protect(cx, &space, span(from, pages << 12), WRITE), read_only(from));
        }
        rig.vm.protect(cx, &space, span(AT + 0x2000, 2 << 12), WRITE).expect("private");
        rig.vm.protect(cx, &space, span(AT, 2 << 12), READ.with(Protection::EXEC)).expect("no stores");
        assert_eq!(rig.store(cx, &space, AT, 1), Err(VmError::Denied { at: VirtAddr::new(AT) }));
        assert_eq!(rig.load(cx, &space, AT + 8), Ok(8));
        // What copies it is its own.
        map(cx, COPIED, WRITE, Backing::Copied(&object, 0)).expect("a copy");
        rig.store(cx, &space, COPIED + 8, 1).expect("memory");
        assert_eq!([AT, COPIED].map(|at| rig.load(cx, &space, at + 8)), [Ok(8), Ok(1)]);
        assert_eq!(rig.vm.sync(cx, &object, 0, 4), Ok(0));
        end(rig, cx, (object, space));
        assert!(file.writes().is_empty());
    });
}

/// How many pages are pinned.
fn pins<'h, F: PageFormat>(
    rig: &Rig<'h, F, true>,
    cx: &mut Cx<'_, 'h>,
    space: &Handle<'_, 'h, F, true>,
    at: u64,
    access: Access,
) -> Result<u64, VmError> {
    let mut pins = Vec::new();
    let done = rig.vm.pin(cx, space, span(at, 2 << 12), access, None, &Never, |pin| pins.push(pin));
    rig.unpin(cx, space, pins);
    done.map_err(|error| error.cause)
}

fn pinned<F: PageFormat>(rig: &Rig<'_, F, true>) {
    rig.on(0, |cx| {
        let (plain, taking) = (File::read_only(4 << 12), File::new(4 << 12));
        let denied = |at: u64| Err(VmError::Denied { at: VirtAddr::new(at) });
        for (file, rights) in [(plain, READ), (taking, READ), (taking, WRITE)] {
            let object = rig.vm.open_source(cx, file).expect("memory");
            let space = rig.vm.create(cx, bounds()).expect("memory");
            let kind = SMALL.allowing(rights);
            rig.vm.map(cx, &space, span(AT, 2 << 12), kind, Backing::Shared(&object, 0)).expect("an area");
            let others = [(COPIED, Backing::Copied(&object, 0)), (COPIED + 0x10_0000, Backing::Private)];
            for (at, backing) in others {
                rig.vm.map(cx, &space, span(at, 2 << 12), SMALL.allowing(READ), backing).expect("an area");
                assert_eq!(
                    [Access::Write, Access::Exec].map(|access| pins(rig, cx, &space, at, access)),
                    [denied(at); 2]
                );
                assert_eq!(pins(rig, cx, &space, at, Access::Read), Ok(2));
            }
            assert_eq!(pins(rig, cx, &space, AT, Access::Read), Ok(2));
            assert_eq!(rig.vm.sync(cx, &object, 0, 4), Ok(0), "a device has read");
            let (stores, dirty) = if rights == WRITE { (Ok(2), 2) } else { (denied(AT), 0) };
            assert_eq!(pins(rig, cx, &space, AT, Access::Write), stores);
            assert_eq!(rig.vm.sync(cx, &object, 0, 4), Ok(dirty));
            rig.end_shown(cx, (object, space));
        }
        assert_eq!((plain.writes(), taking.writes()), (vec![], vec![(0, 2 << 12)]));
    });
}

on_both_formats! {
    /// Who would store where nothing can keep it is told so when he asks for the right to.
    fn a_source_that_takes_nothing_back_is_not_stored_to: takes_nothing (rig);
    /// Who pins a page says what its device does with it: what it reads stays clean, and it stores only where the area allows that.
    fn a_pin_to_be_read_makes_nothing_dirty: pinned (rig);
}
