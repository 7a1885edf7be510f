//! Pages of what thousands of areas show: what is done with one is not done with those that do not show it, and others run after what
//! goes over many.

use crate::sources::File;
use crate::support::{AT, Cx, Handle, Metered, Model, Rig, SMALL, bounds, lock_rounds, span};
use crate::unhooked::{let_go, page_out, with_rig};
use hugemm_base::{Cpu, Order, Pfn, VirtAddr};
use hugemm_vm::{Access, AgeRun, Backing, Discard, Recency, SharedRef};

/// Private mappings of one file.
const COPIES: u64 = 4096;
/// Where the whole file is shown.
const THERE: u64 = 0x70_0000_0000;

type File4K<'v, 'h> = SharedRef<'v, Model<'h, Metered, true>>;
type Space<'v, 'h> = Handle<'v, 'h, Metered, true>;
type Away<'h> = Rig<'h, Metered, true>;

/// Runs `test` with a space that maps a file privately thousands of times, so many pages from an offset that depends on the number of
/// the mapping, and shows it as a whole elsewhere.
fn with_copies<'h>(
    rig: &Away<'h>,
    (pages, offset): (u64, impl Fn(u64) -> u64),
    test: impl FnOnce(&mut Cx<'_, 'h>, &File4K<'_, 'h>, &Space<'_, 'h>),
) {
    rig.on(0, |cx| {
        let object = rig.vm.open_source(cx, File::new((COPIES as usize) << 12)).expect("memory");
        let space = rig.vm.create(cx, bounds()).expect("memory");
        for copy in 0..COPIES {
            let area = span(AT + (copy << 20), pages << 12);
            rig.vm.map(cx, &space, area, SMALL, Backing::Copied(&object, offset(copy))).expect("an area");
        }
        rig.vm.map(cx, &space, span(THERE, COPIES << 12), SMALL, Backing::Shared(&object, 0)).expect("an area");
        test(cx, &object, &space);
        rig.end_shown(cx, (object, space));
    });
}

/// Has the file's page read, and shown by the area at an address; its frame.
fn show<'h>(rig: &Away<'h>, cx: &mut Cx<'_, 'h>, space: &Space<'_, 'h>, at: u64) -> Pfn {
    rig.vm.fault(cx, space, VirtAddr::new(at), Access::Read).expect("memory");
    rig.leaf(cx, space, at).frame
}

fn age<'h>(rig: &Away<'h>, cx: &mut Cx<'_, 'h>, head: Pfn) -> Recency {
    let owner = rig.vm.owner(head).expect("an object's");
    let mut found = [Recency::default()];
    rig.vm.age(
        cx,
        &AgeRun { object: owner.object, pages: &[(owner.offset, head)], order: Order::ZERO },
        &mut found,
        None,
    );
    found[0]
}

/// How many locks `work` takes.
fn locks(work: impl FnOnce()) -> u64 {
    let before = lock_rounds();
    work();
    lock_rounds() - before
}

/// A file of which thousands map a page each: what is done with one page locks what shows that.
#[test]
fn what_does_not_show_a_page_is_not_visited() {
    with_rig(64, 61, |rig| {
        with_copies(rig, (1, |copy| copy), |cx, object, space| {
            let deferred = rig.deferred();
            let at = THERE + (77 << 12);
            let head = show(rig, cx, space, AT + (77 << 20));
            assert_eq!(show(rig, cx, space, at), head);
            let mut places = 0;
            let counted = [
                locks(|| _ = age(rig, cx, head)),
                locks(|| places = rig.vm.walk_mappings(cx, head, |_, _| ())),
                locks(|| rig.unhook(cx, space, at, &deferred).put_back(cx)),
                locks(|| {
                    show(rig, cx, space, at);
                    let page = rig.unhook(cx, space, at, &deferred);
                    page_out(rig, cx, page, 1).expect("it is clean");
                }),
                locks(|| _ = rig.vm.punch(cx, object, 64, 80).expect("within")),
                locks(|| _ = rig.vm.truncate(cx, object, (COPIES - 1) << 12).expect("shorter")),
            ];
            assert_eq!(places, 2);
            assert!(counted.iter().all(|locks| *locks < 64), "{counted:?} of {COPIES}");
        });
    });
}

/// Reschedule points that were passed.
fn points(cx: &Cx<'_, '_>) -> u64 {
    cx.platform().counters().reschedules.get()
}

/// Areas of which none shows a page, but all lie near it, are looked at in vain: others run then too.
#[test]
fn looks_in_vain_let_others_run() {
    with_rig(64, 62, |rig| {
        with_copies(rig, (4, |_| 0), |cx, _, space| {
            let deferred = rig.deferred();
            let head = show(rig, cx, space, THERE + 0x5000);
            let before = points(cx);
            assert_eq!(age(rig, cx, head).users, 1);
            assert_eq!(points(cx) - before, 1, "aged");
            let before = points(cx);
            rig.vm.unhook(cx, rig.hold(head), &deferred).expect("nobody else has it").put_back(cx);
            assert_eq!(points(cx) - before, 1, "taken, and put back in one place");
        });
    });
}

/// More relatives than one page has places for. A page is looked for until all who have it are found, and not in all of thousands; one
/// that only a late relative has stays.
#[test]
fn a_page_of_a_crowd_is_looked_for_in_some() {
    const PLACES: u64 = 4096;
    with_rig(256, 63, |rig| {
        rig.on(0, |cx| {
            let deferred = rig.deferred();
            let (space, at) = (rig.space(cx, span(AT, 0x1000), SMALL), VirtAddr::new(AT));
            let children: Vec<_> = (0..PLACES + 8).map(|_| rig.vm.fork(cx, &space).expect("forked")).collect();
            // The parent has it alone, and is the first.
            rig.vm.fault(cx, &space, at, Access::Write).expect("memory");
            let counted = [
                locks(|| rig.unhook(cx, &space, AT, &deferred).put_back(cx)),
                locks(|| {
                    let page = rig.unhook(cx, &space, AT, &deferred);
                    page_out(rig, cx, page, 1).expect("room");
                }),
            ];
            assert!(counted.iter().all(|locks| *locks < 32), "{counted:?}");
            // The last that is looked at is the parent's area or a child's.
            for (child, stays) in [(PLACES - 2, false), (PLACES - 1, true)] {
                let child = &children[child as usize];
                rig.vm.fault(cx, child, at, Access::Write).expect("memory");
                let head = rig.leaf(cx, child, AT).frame;
                // SAFETY: the child has another.
                let held = unsafe { rig.vm.hold_mapped(cx, head) };
                assert_eq!(held.is_none(), stays, "to be moved");
                held.into_iter().for_each(|folio| let_go(rig, cx, folio));
                let mut refused = None;
                let counted = locks(|| match rig.vm.unhook(cx, rig.hold(head), &deferred) {
                    Ok(page) => page.put_back(cx),
                    Err(folio) => refused = Some(folio),
                });
                assert_eq!(refused.is_some(), stays);
                // Followers twice and the table to take it, and the table to put it back.
                assert!(counted <= 4 * PLACES + 8, "{counted}");
                refused.into_iter().for_each(|folio| let_go(rig, cx, folio));
            }
            children.into_iter().chain([space]).for_each(|space| rig.vm.destroy(cx, space).expect("destroyed"));
        });
    });
}

/// A page that only the last of many relatives has goes away: others run after each time that it is looked for.
#[test]
fn a_page_that_one_of_many_has_lets_others_run() {
    with_rig(64, 64, |rig| {
        rig.on(0, |cx| {
            let deferred = rig.deferred();
            let (space, at) = (rig.space(cx, span(AT, 0x1000), SMALL), VirtAddr::new(AT));
            let children: Vec<_> = (0..200).map(|_| rig.vm.fork(cx, &space).expect("forked")).collect();
            let last = &children[199];
            rig.vm.fault(cx, last, at, Access::Write).expect("memory");
            for given_up in [false, true] {
                rig.vm.fault(cx, last, at, Access::Write).expect("memory");
                if given_up {
                    rig.vm.discard(cx, last, span(AT, 0x1000), Discard::WhenShort).expect("private");
                }
                let before = points(cx);
                let page = rig.unhook(cx, last, AT, &deferred);
                assert_eq!(points(cx) - before, 1, "taken");
                page_out(rig, cx, page, 1).expect("room");
                assert_eq!(points(cx) - before, 2, "said where it is");
            }
            children.into_iter().chain([space]).for_each(|space| rig.vm.destroy(cx, space).expect("destroyed"));
        });
    });
}
