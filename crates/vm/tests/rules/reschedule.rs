//! Nothing that takes long goes on for long without letting others run, and what others do then is right.

use crate::support::metered::{TABLE, most_between_reschedules};
use crate::support::{AT, Cx, Handle, Rig, SMALL, at_flush, bounds, no_faults, span, with_cpu, with_rig};
use hugemm_base::{Cancel, Cpu, Never, Order, PageSize, Pfn, VirtAddr};
use hugemm_hugetlb::Nodes;
use hugemm_paging::{DeferredUnmap, Lookup};
use hugemm_vm::{Access, AgeRun, Backing, Discard, Phase, Phases, Protection, Recency, VmError, VmaKind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Pages of a part, what lies in the tables at its ends, and the tables above.
const PART: u64 = 16_384 + 5 * TABLE;

/// A fork of 50000 pages, and one of 20000 that may be pinned.
#[test]
fn forks_let_others_run() {
    for pinned in [false, true] {
        with_cpu(256, 1, 41, |rig, cx| {
            let pages = if pinned { 20_000 } else { 50_000 };
            let area = span(AT + 0x5000, pages << 12);
            let space = rig.space(cx, area, SMALL);
            rig.vm.prefault(&space, area, None).work(cx, &Never).expect("memory");
            let first = span(area.start().get(), 0x1000);
            let pins = if pinned { rig.pin(cx, &space, first) } else { Vec::new() };
            let counters: *const _ = cx.platform().counters();
            let mut child = None;
            // SAFETY: the CPU's counters stay where they are.
            let most = most_between_reschedules(unsafe { &*counters }, || {
                child = Some(rig.vm.fork(cx, &space).expect("forked"));
            });
            // One by one, a page is looked at in the parent and made for the child besides.
            let bound = if pinned { 3 * PART } else { PART };
            assert!((bound / 2..bound).contains(&most), "{most} entries");
            rig.unpin(cx, &space, pins);
            for space in child.into_iter().chain([space]) {
                rig.vm.destroy(cx, space).expect("destroyed");
            }
        });
    }
}

/// Other rights for 50000 pages, leaf by leaf; to take only the right to store away, no leaf is looked at.
#[test]
fn other_rights_let_others_run() {
    with_cpu(256, 1, 45, |rig, cx| {
        let area = span(AT + 0x5000, 50_000 << 12);
        let space = rig.space(cx, area, SMALL);
        rig.vm.prefault(&space, area, None).work(cx, &Never).expect("memory");
        let counters: *const _ = cx.platform().counters();
        let user = Protection::USER;
        let (write, exec) = (user.with(Protection::WRITE), user.with(Protection::EXEC));
        for (rights, bound) in [(user, TABLE), (write, 2 * PART), (exec, 2 * PART), (user, 2 * PART), (write, 2 * PART)]
        {
            let points = cx.platform().counters().reschedules.get();
            // SAFETY: the CPU's counters stay where they are.
            let most = most_between_reschedules(unsafe { &*counters }, || {
                rig.vm.protect(cx, &space, area, rights).expect("an area");
            });
            let points = cx.platform().counters().reschedules.get() - points;
            assert!(most < bound && (points > 3) == (bound > TABLE), "{most} entries, {points} points");
        }
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// A fork of areas whose pages stay in their object: no page is looked at, and after each area others may run all the same.
#[test]
fn forks_of_many_areas_let_others_run() {
    const AREAS: u64 = 64;
    with_cpu(16, 1, 44, |rig, cx| {
        let space = rig.vm.create(cx, bounds()).expect("a space");
        let object = rig.vm.create_shared(cx, AREAS, PageSize::Size4K, false).expect("an object");
        for page in 0..AREAS {
            let area = span(AT + (page << 13), 0x1000);
            rig.vm.map(cx, &space, area, SMALL, Backing::Shared(&object, page)).expect("an area");
        }
        let before = cx.platform().counters().snapshot();
        let child = rig.vm.fork(cx, &space).expect("forked");
        let during = cx.platform().counters().snapshot().since(before);
        assert!(during.reschedules >= AREAS, "{} in {AREAS} areas", during.reschedules);
        for space in [child, space] {
            rig.vm.destroy(cx, space).expect("destroyed");
        }
        rig.vm.close(cx, object).expect("its own");
    });
}

/// The pages and the forks of [`pages_with_many_places_let_others_run`].
const PAGES: u64 = 16;
const CHILDREN: u64 = 200;

/// Areas leave one by one, whether something was mapped in them or not: others run between them.
#[test]
fn many_areas_that_leave_let_others_run() {
    const AREAS: u64 = 200;
    with_cpu(16, 1, 46, |rig, cx| {
        let space = rig.vm.create(cx, bounds()).expect("a space");
        for mapped in [false, true] {
            for area in 0..AREAS {
                rig.vm.map(cx, &space, span(AT + (area << 12), 0x1000), SMALL, Backing::Private).expect("an area");
            }
            if mapped {
                rig.vm.fault(cx, &space, VirtAddr::new(AT), Access::Write).expect("memory");
            }
            let before = cx.platform().counters().reschedules.get();
            let unmapped = rig.vm.unmap(cx, &space, span(AT, AREAS << 12)).expect("unmapped");
            assert_eq!(unmapped.areas, AREAS);
            let points = cx.platform().counters().reschedules.get() - before;
            assert!(points >= AREAS / 64 * if mapped { 2 } else { 1 }, "{points} points");
        }
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// Areas of a page each.
fn map_each<'h>(rig: &Rig<'h>, cx: &mut Cx<'_, 'h>, space: &Handle<'_, 'h>, areas: u64) {
    for page in 0..areas {
        rig.vm.map(cx, space, span(AT + (page << 12), 0x1000), SMALL, Backing::Private).expect("an area");
    }
}

/// However many areas a range has, others run after a thousand, and nothing is locked then; what is refused is refused before any has changed.
#[test]
fn many_areas_are_gone_through_in_parts() {
    const AREAS: u64 = 3000;
    const PARTS: u64 = AREAS / 1024;
    with_cpu(64, 1, 48, |rig, cx| {
        let space = rig.vm.create(cx, bounds()).expect("a space");
        let all = span(AT, AREAS << 12);
        map_each(rig, cx, &space, AREAS);
        let points = |cx: &Cx<'_, '_>| cx.platform().counters().reschedules.get();
        let (before, last) = (points(cx), VirtAddr::new(AT + (AREAS << 12)));
        let refused = rig.vm.protect(cx, &space, span(AT, (AREAS + 1) << 12), Protection::USER);
        assert_eq!((refused, points(cx) - before), (Err(VmError::NoArea { at: last }), PARTS));
        let before = points(cx);
        assert_eq!(rig.vm.lock(cx, &space, all, AREAS - 1), Err(VmError::LockLimit { locked: AREAS }));
        assert_eq!((points(cx) - before, space.locked()), (PARTS, 0));
        rig.vm.lock(cx, &space, all, AREAS).expect("memory");
        assert!(space.vmas(all).all(|area| area.kind.locked) && space.locked() == AREAS);
        let before = points(cx);
        rig.vm.unlock(cx, &space, all).expect("areas");
        assert_eq!((points(cx) - before, space.locked()), (PARTS, 0));
        assert!(space.vmas(all).all(|area| !area.kind.locked));
        let before = points(cx);
        rig.vm.protect(cx, &space, all, Protection::USER.with(Protection::WRITE)).expect("areas");
        assert_eq!(points(cx) - before, PARTS + AREAS, "looked at, and nothing to change");
        // With pages, which leave their objects by themselves, and without.
        for (pages, goes) in [(AREAS, 2), (0, 1)] {
            let before = points(cx);
            assert_eq!(rig.vm.unmap(cx, &space, all).map(|unmapped| unmapped.pages), Ok(pages));
            assert_eq!(points(cx) - before, PARTS + goes * (AREAS / 64), "{pages} pages");
            map_each(rig, cx, &space, AREAS);
        }
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// What few pages have left of many tables is read off in parts, and so are tables that have nothing more.
#[test]
fn tables_go_in_parts() {
    const GIB: u64 = 512;
    const TABLES: u64 = 2 * GIB + 256;
    // What lies under a GiB is not divided; otherwise 32 tables at a time.
    const POINTS: u64 = 2 + 256 / 32 - 1;
    with_cpu(32, 1, 50, |rig, cx| {
        let all = span(AT, TABLES << 21);
        let space = rig.space(cx, all, VmaKind::private(PageSize::Size4K));
        let points = |cx: &Cx<'_, '_>| cx.platform().counters().reschedules.get();
        let touch = |cx: &mut _| {
            for table in 0..TABLES {
                rig.vm.fault(cx, &space, VirtAddr::new(AT + (table << 21)), Access::Write).expect("memory");
            }
        };
        touch(cx);
        let before = points(cx);
        assert_eq!(rig.vm.unmap(cx, &space, all).expect("an area").pages, TABLES);
        assert_eq!(points(cx) - before, POINTS);
        rig.vm.map(cx, &space, all, VmaKind::private(PageSize::Size4K), Backing::Private).expect("an area");
        touch(cx);
        // None of these has all that a table has.
        for table in 0..=TABLES {
            rig.vm.unmap(cx, &space, span(AT + (table << 21) - (1 << 20), 2 << 20)).expect("in the space");
        }
        let (before, used) = (points(cx), rig.used(cx));
        rig.vm.map(cx, &space, all, VmaKind::private(PageSize::Size2M), Backing::Private).expect("nothing is there");
        assert_eq!(points(cx) - before, POINTS);
        assert!(used - rig.used(cx) >= TABLES);
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// Does `work` with each page; how many reschedule points it passes.
fn with_each<'h>(
    rig: &Rig<'h>,
    cx: &mut Cx<'_, 'h>,
    space: &Handle<'_, 'h>,
    mut work: impl FnMut(&mut Cx<'_, 'h>, Pfn),
) -> u64 {
    let before = cx.platform().counters().reschedules.get();
    for page in 0..PAGES {
        let at = VirtAddr::new(AT + (page << 12));
        let Lookup::Mapped(leaf) = rig.vm.lookup(cx, space, at) else { panic!("not mapped") };
        work(cx, leaf.frame);
    }
    cx.platform().counters().reschedules.get() - before
}

/// Pages with two hundred places are aged, taken away, put back and moved one after the other, as a reclaiming task does with its
/// batch: others run after each walk.
#[test]
fn pages_with_many_places_let_others_run() {
    with_cpu(64, 1, 45, |rig, cx| {
        let area = span(AT, PAGES << 12);
        let space = rig.space(cx, area, SMALL);
        rig.vm.prefault(&space, area, None).work(cx, &Never).expect("memory");
        // References beyond fifteen are counted in a frame.
        rig.keep(1);
        let children: Vec<_> = (0..CHILDREN).map(|_| rig.vm.fork(cx, &space).expect("forked")).collect();
        // SAFETY: used with this manager's TLBs only.
        let deferred: DeferredUnmap = unsafe { DeferredUnmap::new(rig.vm.shootdown()) }.expect("few CPUs");
        let aged = with_each(rig, cx, &space, |cx, frame| {
            let owner = rig.vm.owner(frame).expect("an object's");
            let pages = [(owner.offset, frame)];
            let run = AgeRun { object: owner.object, pages: &pages, order: Order::ZERO };
            rig.vm.age(cx, &run, &mut [Recency::default()], None);
        });
        // SAFETY: the test's pages are mapped.
        let hold = |frame| unsafe { rig.vm.frames().get_at(frame) }.expect("it has references");
        let back = with_each(rig, cx, &space, |cx, frame| {
            rig.vm.unhook(cx, hold(frame), &deferred).expect("nobody else has it").put_back(cx);
        });
        let moved = with_each(rig, cx, &space, |cx, frame| {
            assert!(rig.vm.unhook(cx, hold(frame), &deferred).expect("nobody else has it").move_elsewhere(cx));
        });
        // Places are looked at once; looked at and taken under one lock; and entered. The copy passes a point too.
        assert_eq!([aged, back, moved], [1, 2, 3].map(|walks| walks * PAGES));
        // Also if the page stays, because somebody has it, and most places have it no more.
        for child in &children {
            rig.vm.discard(cx, child, area, Discard::Now).expect("given up");
        }
        let stays = with_each(rig, cx, &space, |cx, frame| {
            let device = hold(frame);
            let refused = rig.vm.unhook(cx, hold(frame), &deferred).expect_err("a device has it");
            for reference in [refused, device] {
                assert!(rig.vm.frames().put(cx, reference).is_ok());
            }
        });
        assert_eq!(stays, PAGES);
        for space in children.into_iter().chain([space]) {
            rig.vm.destroy(cx, space).expect("destroyed");
        }
    });
}

/// Stops when somebody has finished, or after a minute.
struct Finished {
    done: AtomicU64,
    began: Instant,
}

impl Cancel for Finished {
    fn requested(&self) -> bool {
        self.done.load(Ordering::Relaxed) != 0 || self.began.elapsed().as_secs() > 60
    }
}

/// A task that waits answers the shootdowns of others, who may be those that it waits for.
#[test]
fn who_waits_serves_shootdowns() {
    with_rig(16, 3, 46, &no_faults(), |rig| {
        let finished = Finished { done: AtomicU64::new(0), began: Instant::now() };
        rig.on(0, |cx| {
            rig.fill_pool(cx, 2);
            let object = rig.vm.create_shared(cx, 1024, PageSize::Size2M, true).expect("two pages");
            let (area, kind) = (span(AT, 4 << 20), VmaKind::private(PageSize::Size2M).pooled());
            let space = rig.vm.create(cx, bounds()).expect("a space");
            rig.vm.map(cx, &space, area, kind, Backing::Shared(&object, 0)).expect("an area");
            let small = span(AT, 0x1000);
            let loaded = rig.space(cx, small, SMALL);
            // CPU 1 waits as in the test below, while CPU 2 unmaps what it has loaded.
            let waits = |phase| {
                if phase != Phase::Map {
                    return;
                }
                rig.on(1, |cx| {
                    rig.enter(cx, &loaded);
                    rig.store(cx, &loaded, AT, 1).expect("memory");
                    let missing = rig.pool.take(cx, Nodes::All, true).expect("promised");
                    std::thread::scope(|scope| {
                        let unmaps = scope.spawn(|| {
                            rig.on(2, |cx| rig.vm.unmap(cx, &loaded, small).expect("unmapped"));
                            finished.done.store(1, Ordering::Relaxed);
                        });
                        let filled = rig.vm.prefault_shared(&object, 512, 1024).work(cx, &finished);
                        let served = finished.done.load(Ordering::Relaxed);
                        while !unmaps.is_finished() {
                            rig.vm.shootdown().handle_ipi(cx);
                        }
                        assert_eq!((filled, served), (Err(VmError::Cancelled), 1), "the other one waited in vain");
                    });
                    rig.pool.put(cx, missing, true).expect("its own");
                    rig.leave(cx, &loaded);
                });
            };
            rig.vm.fault_observed(cx, &space, area.start(), Access::Write, &waits).expect("promised");
            [space, loaded].into_iter().for_each(|space| rig.vm.destroy(cx, space).expect("destroyed"));
            rig.vm.close(cx, object).expect("its own");
        });
    });
}

/// Says when somebody makes pages.
struct Making(AtomicU64);

impl Phases for Making {
    fn enter(&self, phase: Phase) {
        self.0.fetch_add(u64::from(phase == Phase::Allocate), Ordering::Relaxed);
    }
}

/// Whoever fills a space while it is being forked waits, and does not clear pages over and over that cannot be entered.
#[test]
fn nothing_is_made_for_a_space_that_is_being_forked() {
    with_cpu(16, 2, 47, |rig, cx| {
        let area = span(AT, 0x4000);
        let space = rig.space(cx, area, SMALL);
        rig.on(1, |cx| {
            rig.enter(cx, &space);
            rig.store(cx, &space, AT, 1).expect("memory");
        });
        let made = Making(AtomicU64::new(0));
        // The fork's own, when all has been shared.
        let fill = || {
            rig.on(1, |cx| {
                let filled = rig.vm.prefault(&space, area, None).work_observed(cx, &After(AtomicU64::new(9)), &made);
                assert_eq!(filled, Err(VmError::Cancelled));
            });
        };
        let mut child = None;
        at_flush(&fill, || child = Some(rig.vm.fork(cx, &space).expect("forked")));
        assert_eq!(made.0.load(Ordering::Relaxed), 0, "pages were made in vain");
        rig.vm.prefault(&space, area, None).work_observed(cx, &Never, &made).expect("memory");
        assert_ne!(made.0.load(Ordering::Relaxed), 0);
        rig.on(1, |cx| rig.leave(cx, &space));
        for space in child.into_iter().chain([space]) {
            rig.vm.destroy(cx, space).expect("destroyed");
        }
    });
}

/// Ends what the other threads do.
struct Stop<'a>(&'a AtomicU64);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(1, Ordering::Relaxed);
    }
}

/// While a fork lets others run, the parent's threads go on. The child sees no store without those that the same thread
/// made before it; and what comes or goes meanwhile is in the child as a whole or not at all.
#[test]
fn a_fork_is_one_moment_for_each_thread() {
    with_rig(64, 3, 42, &no_faults(), |rig| {
        // Four thousand parts.
        let bytes = 256 << 30;
        let (low, high) = (AT, AT + bytes - 0x1000);
        let (before, behind) = (AT - 0x10_0000, AT + 2 * bytes);
        let stop = AtomicU64::new(0);
        let space = rig.on(0, |cx| rig.space(cx, span(AT, bytes), SMALL));
        std::thread::scope(|scope| {
            let (space, stop) = (&space, &stop);
            // Stores a number at a place, in a page of its own, and last high up.
            scope.spawn(move || {
                rig.beside_others(1, |cx| {
                    rig.enter(cx, space);
                    let mut number = 0;
                    while stop.load(Ordering::Relaxed) == 0 {
                        number += 1;
                        rig.store(cx, space, low, number).expect("memory");
                        rig.store(cx, space, low + (1 + number % 2000) * 0x1000, number).expect("memory");
                        rig.store(cx, space, high, number).expect("memory");
                    }
                    rig.leave(cx, space);
                });
            });
            // Areas come and go: one above all others, never without one below.
            scope.spawn(move || {
                rig.beside_others(2, |cx| {
                    while stop.load(Ordering::Relaxed) == 0 {
                        let areas = [before, behind].map(|at| span(at, 0x2000));
                        for area in areas {
                            rig.vm.map(cx, space, area, SMALL, Backing::Private).expect("an area");
                        }
                        for area in areas {
                            rig.vm.fault(cx, space, area.start(), Access::Write).expect("memory");
                            rig.vm.prefault(space, area, None).work(cx, &Never).expect("memory");
                        }
                        for area in areas.into_iter().rev() {
                            rig.vm.unmap(cx, space, area).expect("unmapped");
                        }
                    }
                });
            });
            rig.beside_others(0, |cx| {
                // Also when something is found wrong.
                let _stop = Stop(stop);
                for _ in 0..60 {
                    let child = rig.vm.fork(cx, space).expect("forked");
                    rig.enter(cx, &child);
                    let last = rig.load(cx, &child, high).expect("memory");
                    let first = rig.load(cx, &child, low).expect("memory");
                    assert!(first >= last, "{last} was stored after {first}");
                    let own = rig.load(cx, &child, low + (1 + last % 2000) * 0x1000).expect("memory");
                    assert!(own >= last, "{last} was stored after {own}");
                    let [below, above] = [before, behind].map(|at| rig.load(cx, &child, at));
                    assert!(below == Ok(0) || above != Ok(0), "{above:?} without {below:?}");
                    rig.end(cx, child);
                }
            });
        });
        rig.on(0, |cx| rig.vm.destroy(cx, space).expect("destroyed"));
    });
}

/// Stops after so many looks.
struct After(AtomicU64);

impl Cancel for After {
    fn requested(&self) -> bool {
        self.0.fetch_sub(1, Ordering::Relaxed) == 0
    }
}

/// Whoever fills an object while somebody else holds the pool's last page lets that one run before every other look.
#[test]
fn waiting_for_a_promised_page_lets_others_run() {
    const LOOKS: u64 = 100;
    with_cpu(16, 2, 43, |rig, cx| {
        rig.fill_pool(cx, 2);
        let object = rig.vm.create_shared(cx, 1024, PageSize::Size2M, true).expect("two pages");
        let space = rig.vm.create(cx, bounds()).expect("a space");
        let kind = VmaKind::private(PageSize::Size2M).pooled();
        let area = span(AT, 4 << 20);
        rig.vm.map(cx, &space, area, kind, Backing::Shared(&object, 0)).expect("an area");
        let waits = |phase| {
            if phase != Phase::Map {
                return;
            }
            // The first page is taken and not entered yet; the second is missing for now.
            rig.on(1, |cx| {
                let missing = rig.pool.take(cx, Nodes::All, true).expect("promised");
                let before = cx.platform().counters().reschedules.get();
                let filled = rig.vm.prefault_shared(&object, 512, 1024).work(cx, &After(AtomicU64::new(LOOKS)));
                assert_eq!(filled, Err(VmError::Cancelled));
                let passed = cx.platform().counters().reschedules.get() - before;
                assert!(passed >= LOOKS - 2, "{passed} reschedule points in {LOOKS} looks");
                rig.pool.put(cx, missing, true).expect("its own");
            });
        };
        rig.vm.fault_observed(cx, &space, area.start(), Access::Write, &waits).expect("promised");
        rig.vm.prefault_shared(&object, 0, 1024).work(cx, &Never).expect("promised");
        rig.end_shown(cx, (object, space));
    });
}
