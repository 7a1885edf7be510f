//! What is called back calls the manager, as the traits say that it may, and is answered.

use crate::sources::File;
use crate::support::{
    AT, Cpus, Cx, Follower, Metered, Model, Rig, SMALL, bounds, called_back, no_faults, span, with_format,
};
use hugemm_base::{CpuCx, Never, Order, PageSize, VirtAddr, VirtRange, with};
use hugemm_frames::{AllocRequest, Frozen};
use hugemm_paging::{DeferredUnmap, Flags, Lookup};
use hugemm_vm::{
    Access, AddressSpace, Backing, Notifier, PageSource, Protection, Served, SourceError, StoredPages, VmError,
};
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::Ordering;

type Away<'h> = Rig<'h, Metered, true>;
type Space<'h> = AddressSpace<Model<'h, Metered, true>>;

/// Calls back where it is told of beginnings, or of ends.
struct Calling {
    at_begin: bool,
}

impl<'h> Notifier<Cpus<'h>> for Calling {
    fn begin(&self, cx: &mut CpuCx<'_, Cpus<'h>>, _range: VirtRange) {
        if self.at_begin {
            called_back(cx);
        }
    }

    fn end(&self, cx: &mut CpuCx<'_, Cpus<'h>>, _range: VirtRange) {
        if !self.at_begin {
            called_back(cx);
        }
    }
}

/// A file of ones that calls back when it has been read.
struct Ones;

impl<'h> PageSource<Model<'h, Metered, true>> for Ones {
    fn bytes(&self) -> u64 {
        16 << 12
    }

    fn fill(&self, cx: &mut Cx<'_, 'h>, _first: u64, pages: &mut [u8]) -> Result<usize, SourceError> {
        pages.fill(1);
        called_back(cx);
        Ok(pages.len())
    }

    fn write_back(&self, _: &mut Cx<'_, 'h>, _first: u64, _: &StoredPages<'_>) -> Result<(), SourceError> {
        Err(SourceError(1))
    }
}

/// Takes the page at [`AT`] out of its entries and puts it back.
fn unhook<'h>(rig: &Away<'h>, cx: &mut Cx<'_, 'h>, space: &Space<'h>) {
    let Lookup::Mapped(leaf) = rig.vm.lookup(cx, space, VirtAddr::new(AT)) else { panic!("not mapped") };
    // SAFETY: used with this manager's TLBs only.
    let deferred = unsafe { DeferredUnmap::new(rig.vm.shootdown()) }.expect("few CPUs");
    // SAFETY: it is mapped, and nobody else is there to let it go.
    let folio = unsafe { rig.vm.frames().get_at(leaf.frame) }.expect("it has references");
    let page = rig.vm.unhook(cx, folio, &deferred).expect("nobody else has it");
    page.put_back(cx);
}

fn unmap<'h>(rig: &Away<'h>, cx: &mut Cx<'_, 'h>, space: &Space<'h>) {
    rig.vm.unmap(cx, space, span(AT, 0x1000)).expect("unmapped");
}

fn fork<'h>(rig: &Away<'h>, cx: &mut Cx<'_, 'h>, space: &Space<'h>) {
    let child = rig.vm.fork(cx, space).expect("forked");
    rig.vm.destroy(cx, child).expect("nobody uses it");
}

fn store<'h>(rig: &Away<'h>, cx: &mut Cx<'_, 'h>, space: &Space<'h>) {
    rig.vm.fault(cx, space, VirtAddr::new(AT), Access::Write).expect("memory");
}

fn touch<'h>(rig: &Away<'h>, cx: &mut Cx<'_, 'h>, space: &Space<'h>) {
    rig.vm.fault(cx, space, VirtAddr::new(AT + 0x1000), Access::Write).expect("memory");
}

fn prefault<'h>(rig: &Away<'h>, cx: &mut Cx<'_, 'h>, space: &Space<'h>) {
    rig.vm.prefault(space, span(AT, 0x8000), None).work(cx, &Never).expect("memory");
}

type Work = for<'h> fn(&Away<'h>, &mut Cx<'_, 'h>, &Space<'h>);

/// A space with 32 KiB of which the first page is there, and 256 KiB that are all there.
fn with_space(test: impl for<'h> Fn(&Away<'h>, &mut Cx<'_, 'h>, &Space<'h>)) {
    with_format(16, 1, 61, &no_faults(), |rig: &Away<'_>| {
        rig.on(0, |cx| {
            let space = rig.vm.create(cx, bounds()).expect("a space");
            for (at, bytes) in [(AT, 0x8000), (2 * AT, 0x4_0000)] {
                rig.vm.map(cx, &space, span(at, bytes), SMALL, Backing::Private).expect("an area");
            }
            store(rig, cx, &space);
            rig.vm.prefault(&space, span(2 * AT, 0x4_0000), None).work(cx, &Never).expect("memory");
            test(rig, cx, &space);
            rig.vm.destroy(cx, space).expect("destroyed");
        });
    });
}

/// A follower looks up what changes: the old entry at the beginning, the new one at the end, whatever the change is.
#[test]
fn followers_look_up_what_changes() {
    // Whether what is found can be written, if anything is.
    let cases: [(Work, bool, _, _); 4] = [
        (unmap, false, Some(true), None),
        (fork, false, Some(true), Some(false)),
        (store, true, Some(false), Some(true)),
        (unhook, false, Some(true), None),
    ];
    for (change, forked, before, after) in cases {
        for (at_begin, expected) in [(true, before), (false, after)] {
            with_space(|rig, cx, space| {
                let child = forked.then(|| rig.vm.fork(cx, space).expect("forked"));
                let follower = rig.vm.follow(cx, space, Follower(Arc::new(Calling { at_begin }))).expect("memory");
                let seen = Cell::new(None);
                rig.calling_back(
                    |cx| {
                        seen.set(match rig.vm.lookup(cx, space, VirtAddr::new(AT)) {
                            Lookup::Mapped(leaf) => Some(leaf.flags.contains(Flags::WRITE)),
                            _ => None,
                        });
                    },
                    || change(rig, cx, space),
                );
                assert_eq!(seen.get(), expected, "at begin: {at_begin}");
                // SAFETY: it follows this space.
                drop(unsafe { rig.vm.unfollow(cx, space, follower) });
                if let Some(child) = child {
                    rig.vm.destroy(cx, child).expect("nobody uses it");
                }
            });
        }
    }
}

/// While a part of an area goes, each page of what remains is found once, and each that goes still is.
#[test]
fn no_page_is_shown_twice_while_its_area_is_cut() {
    with_space(|rig, cx, space| {
        let follower = rig.vm.follow(cx, space, Follower(Arc::new(Calling { at_begin: false }))).expect("memory");
        let Lookup::Mapped(leaf) = rig.vm.lookup(cx, space, VirtAddr::new(AT)) else { panic!("not mapped") };
        let places = Cell::new(None);
        rig.calling_back(
            |cx| places.set(Some(rig.vm.walk_mappings(cx, leaf.frame, |_, _| ()))),
            || assert_eq!(rig.vm.unmap(cx, space, span(AT + 0x1000, 0x1000)).expect("memory").areas, 1),
        );
        assert_eq!(places.get(), Some(1));
        // SAFETY: it follows this space.
        drop(unsafe { rig.vm.unfollow(cx, space, follower) });
    });
}

/// A window of a file is read for its first page. What has been unmapped there meanwhile is not shown with it: it may be anybody's by then,
/// and nobody would take it away any more.
#[test]
fn what_is_unmapped_while_it_is_read_is_not_shown() {
    with_space(|rig, cx, space| {
        let object = rig.vm.open_source(cx, &Ones).expect("memory");
        let at = |page: u64| VirtAddr::new(3 * AT + (page << 12));
        let shared = with!(SMALL, shared = true);
        rig.vm.map(cx, space, span(3 * AT, 16 << 12), shared, Backing::Shared(&object, 0)).expect("an area");
        rig.calling_back(
            |cx| assert_eq!(rig.vm.unmap(cx, space, span(3 * AT + 0x5000, 0x4000)).expect("memory").pages, 0),
            || assert_eq!(rig.vm.fault(cx, space, at(0), Access::Read), Ok(Served::Mapped)),
        );
        let shown: Vec<u64> = (0..16).filter(|page| rig.vm.lookup(cx, space, at(*page)) != Lookup::Absent).collect();
        assert_eq!(shown, [0, 1, 2, 3, 4]);
        rig.vm.unmap(cx, space, span(3 * AT, 16 << 12)).expect("unmapped");
        rig.vm.close(cx, object).expect("its own");
    });
}

/// A pager that is asked for memory unmaps some of the very space that wants it, and faults there, also where the fault is
/// under way that waits for it.
#[test]
fn relief_may_fault_and_unmap() {
    for work in [touch as Work, prefault, fork] {
        with_space(|rig, cx, space| {
            rig.vm.pager().helps.store(true, Ordering::Relaxed);
            let all = core::iter::from_fn(|| rig.vm.frames().alloc(cx, AllocRequest::order(Order::ZERO)).ok());
            let held: Vec<Frozen> = all.collect();
            rig.calling_back(
                |cx| {
                    let unmapped = rig.vm.unmap(cx, space, span(2 * AT, 0x4_0000)).expect("its own");
                    assert_eq!(unmapped.pages, 64);
                    for at in [AT, AT + 0x1000] {
                        rig.vm.fault(cx, space, VirtAddr::new(at), Access::Read).expect("memory");
                    }
                },
                || work(rig, cx, space),
            );
            held.into_iter().for_each(|block| rig.vm.frames().free(cx, block));
        });
    }
}

/// Memory runs out for a page of an object that another CPU enters meanwhile: it is there, so nothing is wanting. Pages that
/// are under way keep each other out of a few places, hence the many pages, of which one is another's neighbour.
#[test]
fn a_shared_page_that_another_has_made_wants_no_memory() {
    let met = Cell::new(0);
    for page in 1..16 {
        with_space(|rig, cx, space| {
            let object = rig.vm.create_shared(cx, 32, PageSize::Size4K, false).expect("an object");
            let at = |page: u64| VirtAddr::new(4 * AT + (page << 12));
            rig.vm.map(cx, space, span(4 * AT, 32 << 12), SMALL, Backing::Shared(&object, 0)).expect("an area");
            // The page tables of both.
            rig.vm.fault(cx, space, at(31), Access::Write).expect("memory");
            rig.vm.pager().helps.store(true, Ordering::Relaxed);
            let all = core::iter::from_fn(|| rig.vm.frames().alloc(cx, AllocRequest::order(Order::ZERO)).ok());
            let mut held: Vec<Frozen> = all.collect();
            let spare = Cell::new(held.pop());
            rig.calling_back(
                |cx| {
                    let served = Cell::new(Err(VmError::NoMemory));
                    // SAFETY: another task's, which runs while this one waits and frees memory for nobody.
                    let other = &mut unsafe { CpuCx::new(cx.platform()) };
                    rig.calling_back(
                        |cx| {
                            rig.vm.frames().free(cx, spare.take().expect("one"));
                            let served = rig.vm.fault(cx, space, at(page), Access::Write);
                            met.set(met.get() + u32::from(served == Ok(Served::Mapped)));
                        },
                        || served.set(rig.vm.fault(other, space, at(page), Access::Write)),
                    );
                    assert!(served.get().is_ok(), "{served:?}");
                },
                || assert_eq!(rig.vm.fault(cx, space, at(0), Access::Write), Err(VmError::NoMemory)),
            );
            held.into_iter().for_each(|block| rig.vm.frames().free(cx, block));
            rig.vm.close(cx, object).expect("its own");
        });
    }
    assert!(met.get() > 0);
}

/// A visitor that ends by unwinding has what it was given: the rest is pinned by nobody, and the space can go.
#[test]
fn what_no_visitor_was_given_is_not_pinned() {
    with_space(|rig, cx, space| {
        // No two adjoin, so each is a run.
        (0..8).rev().for_each(|page| _ = rig.vm.fault(cx, space, VirtAddr::new(AT + (page << 12)), Access::Write));
        let mut pins = Vec::new();
        let visit = |pin| {
            pins.push(pin);
            assert!(pins.len() < 3, "no more");
        };
        let pin = || rig.vm.pin(cx, space, span(AT, 0x8000), Access::Write, None, &Never, visit);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(pin)).is_err());
        assert_eq!(pins.len(), 3);
        for pin in pins {
            assert_eq!((pin.extent().pages(), rig.vm.frames().references(pin.extent().base())), (1, 2));
            rig.vm.unpin(cx, space, pin).expect("its own");
        }
        for page in 0..8 {
            let Lookup::Mapped(leaf) = rig.vm.lookup(cx, space, VirtAddr::new(AT + (page << 12))) else { panic!() };
            assert_eq!(rig.vm.frames().references(leaf.frame), 1);
        }
    });
}

/// Does `work` while no frame is free, and `then`, which has one, where a callback first says that it was called.
fn with_last_frame_called_back<'h>(
    rig: &Away<'h>,
    cx: &mut Cx<'_, 'h>,
    then: impl Fn(&mut Cx<'_, 'h>),
    work: impl FnOnce(&mut Cx<'_, 'h>),
) {
    let frames = rig.vm.frames();
    let all = core::iter::from_fn(|| frames.alloc(cx, AllocRequest::order(Order::ZERO)).ok());
    let mut held: Vec<Frozen> = all.collect();
    let spare = Cell::new(held.pop());
    let with_spare = |cx: &mut Cx<'_, 'h>| {
        frames.free(cx, spare.take().expect("one"));
        then(cx);
    };
    rig.calling_back(with_spare, || work(cx));
    held.into_iter().for_each(|block| frames.free(cx, block));
}

/// Memory runs out for a page that another task enters meanwhile with the last frame: it is there, so nothing is wanting. A
/// fault meets a task that fills the range, and the other way round.
#[test]
fn a_page_that_another_has_entered_wants_no_memory() {
    fn fill<'h>(rig: &Away<'h>, cx: &mut Cx<'_, 'h>, space: &Space<'h>) {
        rig.vm.prefault(space, span(AT + 0x1000, 0x1000), None).work(cx, &Never).expect("memory");
    }
    for (work, other) in [(touch as Work, fill as Work), (fill, touch)] {
        with_space(|rig, cx, space| {
            with_last_frame_called_back(rig, cx, |cx| other(rig, cx, space), |cx| work(rig, cx, space));
        });
    }
}

/// A page that is being copied stays what it is, though all whom it belongs to unmap it meanwhile: the copy has a reference of
/// its own.
#[test]
fn a_page_that_is_copied_stays_for_that_long() {
    with_space(|rig, cx, space| {
        let child = rig.vm.fork(cx, space).expect("forked");
        let Lookup::Mapped(leaf) = rig.vm.lookup(cx, space, VirtAddr::new(AT)) else { panic!("not mapped") };
        rig.vm.pager().helps.store(true, Ordering::Relaxed);
        with_last_frame_called_back(
            rig,
            cx,
            |cx| {
                unmap(rig, cx, space);
                unmap(rig, cx, &child);
                assert_eq!(rig.vm.frames().references(leaf.frame), 1);
            },
            |cx| assert_eq!(rig.vm.fault(cx, space, VirtAddr::new(AT), Access::Write), Ok(Served::Meanwhile)),
        );
        assert_eq!(rig.vm.frames().references(leaf.frame), 0, "it went with that");
        rig.vm.destroy(cx, child).expect("nobody uses it");
    });
}

/// A page that is being copied for a store becomes the space's own, is pinned, and is read-only again: the copy does not take its place.
/// Also beside a neighbour's fault, which may keep this page's from saying that it is under way.
#[test]
fn a_page_that_is_pinned_while_it_is_copied_stays() {
    let pinned = Cell::new(false);
    for neighbour in 0..16 {
        with_space(|rig, cx, space| pin_while_copied(rig, cx, space, neighbour, &pinned));
    }
    assert!(pinned.get());
}

fn pin_while_copied<'h>(rig: &Away<'h>, cx: &mut Cx<'_, 'h>, space: &Space<'h>, neighbour: u64, pinned: &Cell<bool>) {
    let area = span(2 * AT, 0x4_0000);
    let page = |index: u64| span(area.start().get() + (index << 12), 0x1000);
    let pins = RefCell::new(Vec::new());
    let pin = |cx: &mut Cx<'_, 'h>, span| {
        rig.vm.pin(cx, space, span, Access::Write, None, &Never, |pin| pins.borrow_mut().push(pin)).expect("memory")
    };
    pin(cx, span(AT, 0x1000));
    let child = Cell::new(Some(rig.vm.fork(cx, space).expect("forked")));
    rig.vm.pager().helps.store(true, Ordering::Relaxed);
    let copy = |cx: &mut Cx<'_, 'h>| {
        let meanwhile = |cx: &mut Cx<'_, 'h>| {
            rig.vm.destroy(cx, child.take().expect("once")).expect("nobody uses it");
            let served = rig.vm.fault(cx, space, page(0).start(), Access::Write);
            // Otherwise it waits for who copies.
            if served == Ok(Served::Reused) {
                pin(cx, page(0));
            }
            for rights in [Protection::READ, SMALL.protection] {
                rig.vm.protect(cx, space, area, rights).expect("nothing is cut");
            }
        };
        with_last_frame_called_back(rig, cx, meanwhile, |cx| {
            rig.vm.fault(cx, space, page(0).start(), Access::Write).expect("memory");
        });
    };
    if neighbour == 0 {
        copy(cx);
    } else {
        // Relief is not asked for relief; another task is.
        let other = |_: &mut Cx<'_, 'h>| rig.on(0, |cx| copy(cx));
        with_last_frame_called_back(rig, cx, other, |cx| {
            rig.vm.fault(cx, space, page(neighbour).start(), Access::Write).expect("memory");
        });
    }
    let Lookup::Mapped(leaf) = rig.vm.lookup(cx, space, page(0).start()) else { panic!("not mapped") };
    if let Some(pin) = pins.borrow().get(1) {
        assert_eq!(pin.extent().base(), leaf.frame, "beside page {neighbour}");
        pinned.set(true);
    }
    pins.take().into_iter().for_each(|pin| rig.vm.unpin(cx, space, pin).expect("its own"));
}

/// A page of a file is copied for a store while the file becomes shorter: the copy is not entered beyond its end.
#[test]
fn a_page_that_is_copied_while_its_file_loses_it_is_not_entered() {
    with_space(|rig, cx, space| {
        let file = File::new(4 << 12);
        let object = rig.vm.open_source(cx, file).expect("memory");
        rig.vm.map(cx, space, span(3 * AT, 4 << 12), SMALL, Backing::Copied(&object, 0)).expect("an area");
        rig.vm.prefault_shared(&object, 0, 4).work(cx, &Never).expect("memory");
        // The page tables.
        rig.vm.fault(cx, space, VirtAddr::new(3 * AT), Access::Write).expect("memory");
        rig.vm.pager().helps.store(true, Ordering::Relaxed);
        let at = VirtAddr::new(3 * AT + 0x3000);
        with_last_frame_called_back(
            rig,
            cx,
            |cx| {
                file.bytes().truncate(0x2000);
                rig.vm.truncate(cx, &object, 0x2000).expect("its own");
            },
            |cx| assert_eq!(rig.vm.fault(cx, space, at, Access::Write), Ok(Served::Meanwhile)),
        );
        assert_eq!(rig.vm.lookup(cx, space, at), Lookup::Absent);
        assert_eq!(rig.vm.fault(cx, space, at, Access::Write), Err(VmError::OutOfBounds { at }));
        rig.vm.unmap(cx, space, span(3 * AT, 4 << 12)).expect("unmapped");
        rig.vm.close(cx, object).expect("its own");
    });
}
