//! Filling and pinning ranges that begin and end anywhere: every page once, where it belongs.

use crate::support::{AT, Cx, Handle, Rig, SMALL, bounds, span, with_cpu};
use hugemm_base::{Cancel, Cpu, Never, Order, PageSize, Pfn, VirtAddr, VirtRange};
use hugemm_frames::AllocRequest;
use hugemm_paging::{Flags, Lookup};
use hugemm_vm::{Access, Backing, Owner, Phase, Pinned, Protection, VmError, VmaKind, ZeroTurn, ZeroWorker};
use std::cell::Cell;

const LARGE: VmaKind = VmaKind::private(PageSize::Size2M);

/// The 4 KiB pages that are mapped in so many bytes from `AT` on, and that their flags are those of pages that were filled.
fn mapped<'h>(rig: &Rig<'h>, cx: &mut Cx<'_, 'h>, space: &Handle<'_, 'h>, bytes: u64) -> Vec<u64> {
    let is = |page: &u64| match rig.vm.lookup(cx, space, VirtAddr::new(AT + (page << 12))) {
        Lookup::Mapped(leaf) => {
            assert_eq!(leaf.flags, SMALL.flags() | Flags::ACCESSED);
            true
        }
        _ => false,
    };
    (0..bytes >> 12).filter(is).collect()
}

/// Areas of different pages, in pieces whose ends lie within them: all that the range meets is filled, once, and nothing
/// else.
#[test]
fn a_range_is_filled_whatever_it_meets() {
    for (first, pages) in [(0, 1), (5, 4096), (511, 4097), (700, 8192), (1537, 511), (1000, 9000)] {
        with_cpu(64, 1, 61, |rig, cx| {
            let space = rig.vm.create(cx, bounds()).expect("a space");
            // Small pages up to 3 MiB, large ones from 4 MiB up to 22 MiB, none between; small ones again up to 48 MiB.
            for (from, to, kind) in [(0, 4, SMALL), (4, 22, LARGE), (22, 48, SMALL)] {
                let area = span(AT + (from << 20), (to - from) << 20);
                rig.vm.map(cx, &space, area, kind, Backing::Private).expect("an area");
            }
            let filling = rig.vm.prefault(&space, span(AT + (first << 12), pages << 12), None);
            let before = cx.platform().counters().snapshot();
            filling.work(cx, &Never).expect("memory");
            let cleared = cx.platform().counters().snapshot().since(before);
            let large = 1024..5632;
            // A large page that the range meets is filled as a whole.
            let begins = if large.contains(&first) { first / 512 * 512 } else { first };
            let end = first + pages;
            let ends = if large.contains(&end) { end.next_multiple_of(512) } else { end };
            let found = mapped(rig, cx, &space, 48 << 20);
            assert_eq!(found, (begins..ends).collect::<Vec<_>>(), "{pages} from {first}");
            assert_eq!(filling.done(), ends - begins);
            assert_eq!(cleared.bytes_cached + cleared.bytes_bulk, (ends - begins) << 12, "nothing is made in vain");
            rig.vm.destroy(cx, space).expect("destroyed");
        });
    }
}

/// What is there already stays, however it is strewn; what is missing between is filled.
#[test]
fn gaps_are_filled() {
    for kind in [SMALL, LARGE] {
        with_cpu(64, 1, 62, |rig, cx| {
            let (size, count) = (kind.page.bytes(), if kind == SMALL { 1200 } else { 24 });
            let space = rig.space(cx, span(AT, count * size), kind);
            rig.enter(cx, &space);
            let there: Vec<u64> = [0, 1, 5, 17, 18, 19, count / 2, count - 2].into();
            for page in &there {
                rig.store(cx, &space, AT + page * size, page + 1).expect("memory");
            }
            let filling = rig.vm.prefault(&space, span(AT, count * size), None);
            filling.work(cx, &Never).expect("memory");
            assert_eq!(filling.done(), count * kind.page.pages());
            for page in 0..count {
                let expected = if there.contains(&page) { page + 1 } else { 0 };
                assert!(matches!(rig.vm.lookup(cx, &space, VirtAddr::new(AT + page * size)), Lookup::Mapped(_)));
                assert_eq!(rig.load(cx, &space, AT + page * size), Ok(expected));
            }
            assert_eq!(rig.vm.prefault(&space, span(AT, count * size), None).work(cx, &Never), Ok(()), "again");
            rig.end(cx, space);
        });
    }
}

/// Pins say where each run lies, in ascending order and without gaps, also where no two frames adjoin and where areas meet;
/// each page has one reference more until its pin is given back.
#[test]
fn pins_say_what_they_hold() {
    with_cpu(16, 1, 63, |rig, cx| {
        let space = rig.space(cx, span(AT, 300 << 12), SMALL);
        rig.vm.map(cx, &space, span(AT + (300 << 12), 212 << 12), SMALL, Backing::Private).expect("an area");
        rig.vm.map(cx, &space, span(AT + (2 << 20), 4 << 20), LARGE, Backing::Private).expect("an area");
        rig.enter(cx, &space);
        // Every second page first, so that frames of neighbours do not adjoin.
        for page in (0..200).step_by(2).chain((1..200).step_by(2)) {
            rig.store(cx, &space, AT + (page << 12), 1).expect("memory");
        }
        let pins = rig.pin(cx, &space, span(AT + 0x3000, (1533) << 12));
        let mut next = AT + 0x3000;
        let references = |rig: &Rig<'_>, head: Pfn| rig.vm.frames().references(head);
        for pin in &pins {
            assert_eq!(pin.at().get(), next);
            let Lookup::Mapped(leaf) = rig.vm.lookup(cx, &space, pin.at()) else { panic!("mapped") };
            assert_eq!(leaf.frame, pin.extent().base());
            for (head, _) in pin.extent().chunks(leaf.size.order()) {
                assert_eq!(references(rig, head), 2);
            }
            next += pin.extent().bytes();
        }
        assert_eq!(next, AT + (6 << 20));
        assert!(pins.len() > 190, "{}", pins.len());
        for pin in pins {
            let head = pin.extent().base();
            rig.vm.unpin(cx, &space, pin).expect("its own");
            assert_eq!(references(rig, head), 1);
        }
        rig.end(cx, space);
    });
}

/// A worker that clears ahead rests as its share of the time says, and looks up every 256 KiB.
#[test]
fn who_clears_ahead_rests() {
    with_cpu(64, 1, 64, |rig, cx| {
        use hugemm_base::Clock;
        let mut turn = |percent| {
            let worker = ZeroWorker::new(rig.vm.clearer(), PageSize::Size4K, percent);
            let looks = Cell::new(0);
            let asked = Asked(|| looks.set(looks.get() + 1));
            let start = cx.platform().now_ns();
            let ZeroTurn::Cleared { bytes, rest } = rig.vm.zero_ahead(cx, &worker, &asked) else {
                panic!("there is more")
            };
            assert_eq!(looks.get(), bytes / (256 << 10));
            assert_eq!(bytes, 4 << 20, "larger than what CPUs keep for themselves");
            (rest, cx.platform().now_ns() - start)
        };
        assert_eq!(turn(100).0, 0);
        let (rest, took) = turn(50);
        assert!(0 < rest && rest <= took, "{rest} ns after {took} ns");
        // Also when others have the CPU in between.
        let shares: Vec<_> = (0..4).map(|_| turn(1)).collect();
        assert!(shares.iter().all(|(rest, took)| *rest <= 99 * took), "{shares:?}");
        assert!(shares.iter().any(|(rest, took)| *rest >= 30 * took), "{shares:?}");
    });
}

/// Small pages that lie side by side are freed together: by lock rounds, of which page by page there is one for each refill of
/// a CPU's cache.
#[test]
fn unmapped_pages_are_freed_by_runs() {
    const PAGES: u64 = 2048;
    with_cpu(32, 1, 77, |rig, cx| {
        let all = span(AT, PAGES << 12);
        let space = rig.space(cx, all, SMALL);
        rig.vm.prefault(&space, all, None).work(cx, &Never).expect("memory");
        let before = rig.vm.frames().stats(cx).lock_rounds;
        rig.vm.unmap(cx, &space, all).expect("its own");
        let rounds = rig.vm.frames().stats(cx).lock_rounds - before;
        assert!(rounds <= 9, "{rounds}");
        rig.vm.destroy(cx, space).expect("nobody uses it");
    });
}

/// Does something whenever it is asked.
struct Asked<F>(F);

impl<F: Fn()> Cancel for Asked<F> {
    fn requested(&self) -> bool {
        self.0();
        false
    }
}

/// Pages that a fork makes read-only between being filled and being pinned are made the space's own first: what a device writes
/// is what the space reads, and not what the child does.
#[test]
fn what_is_pinned_is_the_spaces_own() {
    with_cpu(16, 2, 65, |rig, cx| {
        let area = span(AT, 0x4000);
        let space = rig.space(cx, area, SMALL);
        let child = Cell::new(None);
        // Once, when all are there.
        let forks = Asked(|| {
            rig.on(1, |cx| {
                let last = rig.vm.lookup(cx, &space, VirtAddr::new(AT + 0x3000));
                let forked = child.take();
                let forks = forked.is_none() && matches!(last, Lookup::Mapped(_));
                child.set(if forks { Some(rig.vm.fork(cx, &space).expect("forked")) } else { forked });
            });
        });
        let mut pins = Vec::new();
        assert_eq!(rig.vm.pin(cx, &space, area, Access::Write, None, &forks, |pin| pins.push(pin)), Ok(4));
        let child = child.take().expect("forked");
        for pin in pins {
            for (page, (frame, _)) in (0..).zip(pin.extent().chunks(SMALL.page.order())) {
                let at = VirtAddr::new(pin.at().get() + (page << 12));
                let [own, childs] = [&space, &child].map(|space| match rig.vm.lookup(cx, space, at) {
                    Lookup::Mapped(leaf) => (leaf.frame, leaf.flags.contains(Flags::WRITE)),
                    found => panic!("{found:?}"),
                });
                assert!(own == (frame, true) && childs.0 != frame, "{at}");
            }
            rig.vm.unpin(cx, &space, pin).expect("its own");
        }
        rig.vm.destroy(cx, child).expect("destroyed");
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// Filling copies nothing that is there, shared by a fork or not to be written.
#[test]
fn what_is_there_is_filled() {
    with_cpu(16, 1, 66, |rig, cx| {
        let (area, read_only) = (span(AT, 0x4000), span(2 * AT, 0x4000));
        let space = rig.space(cx, area, SMALL);
        rig.vm.map(cx, &space, read_only, SMALL.allowing(Protection::USER), Backing::Private).expect("an area");
        for range in [area, read_only] {
            rig.vm.prefault(&space, range, None).work(cx, &Never).expect("memory");
        }
        let child = rig.vm.fork(cx, &space).expect("forked");
        for range in [area, read_only] {
            rig.vm.prefault(&space, range, None).work(cx, &Never).expect("all is there");
        }
        for at in [area, read_only].map(VirtRange::start) {
            let [own, childs] = [&space, &child].map(|of| rig.vm.lookup(cx, of, at));
            assert!(
                matches!((own, childs), (Lookup::Mapped(own), Lookup::Mapped(childs)) if own.frame == childs.frame)
            );
        }
        rig.vm.destroy(cx, child).expect("destroyed");
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// A page that may only be read, and that a fork has given to another, is pinned; then it may be stored to, and a fork comes before that, or
/// not: who stores, and who has the pin, have one page.
#[test]
fn a_page_that_is_pinned_to_be_read_stays_when_it_is_stored_to() {
    for (size, forks_again) in [(PageSize::Size4K, false), (PageSize::Size4K, true), (PageSize::Size2M, false)] {
        let kind = VmaKind::private(size);
        with_cpu(16, 1, 70, |rig, cx| {
            let area = span(AT, 2 * size.bytes());
            let space = rig.space(cx, area, kind);
            rig.enter(cx, &space);
            for page in 0..2 {
                rig.store(cx, &space, AT + page * size.bytes(), 1).expect("memory");
            }
            let mut children = vec![rig.vm.fork(cx, &space).expect("forked")];
            rig.vm.protect(cx, &space, area, Protection::USER).expect("memory");
            let mut pins = Vec::new();
            rig.vm.pin(cx, &space, area, Access::Read, None, &Never, |pin| pins.push(pin)).expect("memory");
            rig.vm
                .pin(cx, &space, area, Access::Read, None, &Never, |pin| pins.push(pin))
                .expect("they are its own already");
            if forks_again {
                children.push(rig.vm.fork(cx, &space).expect("forked"));
            }
            rig.vm.protect(cx, &space, area, kind.protection).expect("memory");
            for page in 0..2 {
                let at = AT + page * size.bytes();
                rig.store(cx, &space, at, 2).expect("it is there");
                let Lookup::Mapped(leaf) = rig.vm.lookup(cx, &space, VirtAddr::new(at)) else { panic!("not mapped") };
                let has = |pin: &&Pinned<'_>| pin.extent().contains(leaf.frame);
                assert_eq!(pins.iter().filter(has).count(), 2, "{size:?}: {at:#x}");
            }
            rig.leave(cx, &space);
            for child in children {
                rig.enter(cx, &child);
                assert_eq!(rig.load(cx, &child, AT), Ok(1), "{size:?}");
                rig.end(cx, child);
            }
            rig.unpin(cx, &space, pins);
            rig.vm.destroy(cx, space).expect("destroyed");
        });
    }
}

/// No two free frames adjoin: pages are entered one by one all the same, many under one lock.
#[test]
fn strewn_frames_fill_a_range() {
    with_cpu(8, 1, 67, |rig, cx| {
        let area = span(AT, 100 << 12);
        let space = rig.space(cx, area, SMALL);
        let request = AllocRequest::order(Order::ZERO);
        let mut held: Vec<_> = core::iter::from_fn(|| rig.vm.frames().alloc(cx, request).ok()).collect();
        held.sort_unstable_by_key(|block| block.pfn());
        for index in (0..200).rev().step_by(2) {
            rig.vm.frames().free(cx, held.remove(index));
        }
        // For its tables.
        held.drain(150..170).for_each(|block| rig.vm.frames().free(cx, block));
        rig.vm.prefault(&space, area, None).work(cx, &Never).expect("enough");
        assert_eq!(mapped(rig, cx, &space, area.bytes()).len(), 100);
        held.into_iter().for_each(|block| rig.vm.frames().free(cx, block));
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// Runs of frames lie as runs of addresses do, so that they could become large pages; each page says where it belongs.
#[test]
fn frames_lie_as_addresses_do() {
    with_cpu(32, 1, 68, |rig, cx| {
        let space = rig.vm.create(cx, bounds()).expect("a space");
        let area = rig.vm.map(cx, &space, span(AT, 8 << 20), SMALL, Backing::Private).expect("an area");
        rig.vm.prefault(&space, span(AT + (200 << 12), (2048 - 200) << 12), None).work(cx, &Never).expect("memory");
        for page in 200..2048 {
            let found = rig.vm.lookup(cx, &space, VirtAddr::new(AT + (page << 12)));
            let Lookup::Mapped(leaf) = found else { panic!("{found:?}") };
            assert!(page < 512 || leaf.frame.get() % 512 == page % 512, "page {page}");
            assert_eq!(rig.vm.owner(leaf.frame), Some(Owner { object: area.object, offset: page }));
        }
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// An area that goes, shrinks or becomes another while its pages are being made gets none of them.
#[test]
fn an_area_that_has_changed_is_not_filled() {
    for change in 0..3 {
        with_cpu(16, 2, 69, |rig, cx| {
            let area = span(AT, 0x10_0000);
            let space = rig.space(cx, area, SMALL);
            let changed = Cell::new(false);
            let meanwhile = |phase| {
                if phase == Phase::Map && !changed.replace(true) {
                    rig.on(1, |cx| {
                        let gone = if change == 1 { span(AT + 0x8_0000, 0x8_0000) } else { area };
                        rig.vm.unmap(cx, &space, gone).expect("unmapped");
                        if change == 2 {
                            let kind = SMALL.allowing(Protection::USER);
                            rig.vm.map(cx, &space, area, kind, Backing::Private).expect("another");
                        }
                    });
                }
            };
            let filling = rig.vm.prefault(&space, area, None);
            let error = filling.work_observed(cx, &Never, &meanwhile).expect_err("it is not what it was");
            let first = if change == 1 { 128 } else { 0 };
            assert_eq!(error, VmError::NoArea { at: VirtAddr::new(AT + (first << 12)) });
            assert_eq!(mapped(rig, cx, &space, area.bytes()).len() as u64, first);
            rig.vm.destroy(cx, space).expect("destroyed");
        });
    }
}

/// An area of which a part gets other rights while it is filled is filled all the same: each page by the rights of now.
#[test]
fn an_area_whose_rights_change_is_filled() {
    with_cpu(16, 2, 80, |rig, cx| {
        let area = span(AT, 32 << 12);
        let space = rig.space(cx, area, SMALL);
        let changed = Cell::new(false);
        let meanwhile = |phase| {
            if phase == Phase::Map && !changed.replace(true) {
                rig.on(1, |cx| {
                    let part = span(AT + (8 << 12), 8 << 12);
                    rig.vm.protect(cx, &space, part, Protection::USER).expect("an area");
                });
            }
        };
        let filling = rig.vm.prefault(&space, area, None);
        filling.work_observed(cx, &Never, &meanwhile).expect("it is there");
        assert_eq!(filling.done(), 32);
        for page in 0..32 {
            let found = rig.vm.lookup(cx, &space, VirtAddr::new(AT + (page << 12)));
            let Lookup::Mapped(leaf) = found else { panic!("{found:?}") };
            assert_eq!(leaf.flags.contains(Flags::WRITE), !(8..16).contains(&page), "page {page}");
        }
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// An area that is mapped anew while it is filled, on the same pages and longer, is filled to its new end; each page counts once.
#[test]
fn an_area_that_has_grown_is_filled() {
    with_cpu(16, 2, 79, |rig, cx| {
        let space = rig.vm.create(cx, bounds()).expect("a space");
        let (kind, area) = (SMALL, span(AT, 32 << 12));
        let object = rig.vm.create_shared(cx, 32, PageSize::Size4K, false).expect("an object");
        rig.vm.map(cx, &space, span(AT, 8 << 12), kind, Backing::Shared(&object, 0)).expect("an area");
        let changed = Cell::new(false);
        let meanwhile = |phase| {
            if phase == Phase::Map && !changed.replace(true) {
                rig.on(1, |cx| {
                    rig.vm.unmap(cx, &space, span(AT, 8 << 12)).expect("unmapped");
                    rig.vm.map(cx, &space, area, kind, Backing::Shared(&object, 0)).expect("longer");
                });
            }
        };
        let filling = rig.vm.prefault(&space, area, None);
        filling.work_observed(cx, &Never, &meanwhile).expect("memory");
        let found = |page: u64| rig.vm.lookup(cx, &space, VirtAddr::new(AT + (page << 12)));
        assert_eq!((0..32).map(found).filter(|found| matches!(found, Lookup::Mapped(_))).count(), 32);
        assert_eq!(filling.done(), 32);
        rig.end_shown(cx, (object, space));
    });
}

/// Large pages are entered by sixteen.
#[test]
fn large_pages_are_filled_by_batches() {
    with_cpu(64, 1, 78, |rig, cx| {
        let area = span(AT, 8 * LARGE.page.bytes());
        let space = rig.space(cx, area, LARGE);
        let entered = Cell::new(0);
        let note = |phase| entered.set(entered.get() + u32::from(phase == Phase::Map));
        rig.vm.prefault(&space, area, None).work_observed(cx, &Never, &note).expect("memory");
        assert_eq!(entered.get(), 1);
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}
