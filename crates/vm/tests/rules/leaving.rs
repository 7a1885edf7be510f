//! Areas that are being unmapped while others write back or take away what they show. On both formats.

use crate::sources::{File, drop_unhooked, end_of_other, show};
use crate::support::{
    AT, Cpus, Cx, Follower, Handle, Metered, Model, Rig, SMALL, as_first, at_unlock, before_flush, bounds, no_faults,
    on_both_formats, some_are_stale, span, with_format,
};
use hugemm_base::{CpuCx, CpuId, Never, Order, PageSize, Pfn, VirtAddr, VirtRange, with};
use hugemm_paging::{Aarch64, Flags, Lookup, PageFormat};
use hugemm_vm::{Access, AgeRun, Backing, Neighbours, Notifier, Protection, Recency, SharedRef, VmaKind};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

const SHARED: VmaKind = with!(SMALL, shared = true);
/// Where the file itself is shown.
const THERE: u64 = 0x70_0000_0000;
const PAGES: u64 = 4;

/// Calls back where a change ends.
struct AtEnd;

impl<'h> Notifier<Cpus<'h>> for AtEnd {
    fn begin(&self, _: &mut CpuCx<'_, Cpus<'h>>, _: VirtRange) {}

    fn end(&self, cx: &mut CpuCx<'_, Cpus<'h>>, _: VirtRange) {
        crate::support::called_back(cx);
    }
}

/// An area of a file has been unmapped in which nothing was mapped, and its addresses are another's, who has a page there: whatever is done
/// to the file meanwhile, the page is not the file's.
fn another<'h, F: PageFormat>(rig: &Rig<'h, F, true>, cx: &mut Cx<'_, 'h>) {
    for deed in ["truncate", "punch", "sync"] {
        let copied = deed == "truncate";
        let files = [(); 2].map(|()| File::new((PAGES as usize) << 12));
        let [file, other] = files.map(|file| rig.vm.open_source(cx, file).expect("memory"));
        let (space, here) = (rig.vm.create(cx, bounds()).expect("memory"), span(AT, PAGES << 12));
        let shows = if copied { Backing::Copied(&file, 0) } else { Backing::Shared(&file, 0) };
        rig.vm.map(cx, &space, here, with!(SMALL, shared = !copied), shows).expect("an area");
        rig.vm.map(cx, &space, span(THERE, PAGES << 12), SHARED, Backing::Shared(&file, 0)).expect("an area");
        let follower = rig.vm.follow(cx, &space, Follower(Arc::new(AtEnd))).expect("memory");
        rig.vm.fault(cx, &space, VirtAddr::new(THERE), Access::Write).expect("memory");
        let deeds = |cx: &mut Cx<'_, 'h>| {
            let shows = if copied { Backing::Shared(&other, 0) } else { Backing::Private };
            rig.vm.map(cx, &space, here, SMALL, shows).expect("nothing is there");
            rig.enter(cx, &space);
            rig.store(cx, &space, AT, 7).expect("memory");
            let frame = rig.leaf(cx, &space, AT).frame;
            let done = match deed {
                "truncate" => rig.vm.truncate(cx, &file, 0),
                "punch" => rig.vm.punch(cx, &file, 0, PAGES),
                _ => rig.vm.sync(cx, &file, 0, PAGES),
            };
            assert!(done.is_ok_and(|pages| pages > 0), "{deed}: {done:?}");
            let leaf = rig.leaf(cx, &space, AT);
            assert_eq!((leaf.frame, leaf.flags.contains(Flags::WRITE)), (frame, true), "{deed}");
            rig.leave(cx, &space);
        };
        // By another CPU: this one has locked the followers.
        let meanwhile = |_: &mut Cx<'_, 'h>| {
            let done = std::thread::scope(|scope| scope.spawn(|| rig.on(1, deeds)).join());
            assert!(done.is_ok(), "{deed}");
        };
        rig.calling_back(meanwhile, || {
            let unmapped = rig.vm.unmap(cx, &space, here).expect("unmapped");
            assert_eq!((unmapped.areas, unmapped.pages), (1, 0));
        });
        rig.enter(cx, &space);
        assert_eq!(rig.load(cx, &space, AT), Ok(7), "{deed}");
        // SAFETY: it follows this space.
        drop(unsafe { rig.vm.unfollow(cx, &space, follower) });
        rig.end(cx, space);
        [file, other].into_iter().for_each(|object| rig.vm.close(cx, object).expect("its own"));
    }
}

/// The same of an area in which something was mapped, where the next one has pages, a folded group of them, before the flush has begun: what
/// is written of the file meanwhile changes nothing of the other's.
fn beside<'h, F: PageFormat>(rig: &Rig<'h, F>, cx: &mut Cx<'_, 'h>) {
    const FOLDED: u64 = 16;
    let (here, next) = (span(AT, (2 * FOLDED) << 12), span(AT + (FOLDED << 12), FOLDED << 12));
    let object = rig.vm.open_source(cx, File::new((2 * FOLDED as usize) << 12)).expect("memory");
    let space = rig.vm.create(cx, bounds()).expect("memory");
    for at in [AT, THERE] {
        rig.vm.map(cx, &space, span(at, here.bytes()), SHARED, Backing::Shared(&object, 0)).expect("an area");
    }
    for (at, access) in [(AT, Access::Read), (THERE, Access::Write), (THERE + (20 << 12), Access::Write)] {
        rig.vm.fault(cx, &space, VirtAddr::new(at), access).expect("memory");
    }
    let deeds = |cx: &mut Cx<'_, 'h>| {
        rig.vm.map(cx, &space, here, SMALL, Backing::Private).expect("nothing is there");
        rig.vm.prefault(&space, next, None).work(cx, &Never).expect("memory");
        let before = rig.leaf(cx, &space, AT + (20 << 12));
        assert_eq!(rig.vm.sync(cx, &object, 0, 2 * FOLDED), Ok(2));
        let after = rig.leaf(cx, &space, AT + (20 << 12));
        assert!(after.flags.contains(Flags::WRITE) && after == before, "{after:?}");
    };
    let meanwhile = || {
        let done = std::thread::scope(|scope| scope.spawn(|| rig.on(1, deeds)).join());
        assert!(done.is_ok());
    };
    before_flush(&meanwhile, || {
        let unmapped = rig.vm.unmap(cx, &space, here).expect("unmapped");
        assert_eq!((unmapped.areas, unmapped.pages), (1, FOLDED));
    });
    rig.end_shown(cx, (object, space));
}

fn beside_others<F: PageFormat>() {
    as_first::<F, false>(16, 2, 6, beside);
}

/// Unmaps a range; what CPU 1 says of its `deeds` before the flush has begun.
fn before_unmapped<'h, F: PageFormat, R: Send>(
    rig: &Rig<'h, F>,
    cx: &mut Cx<'_, 'h>,
    (space, range): (&Handle<'_, 'h, F>, VirtRange),
    deeds: impl Fn(&mut Cx<'_, 'h>) -> R + Sync,
) -> R {
    let said = Cell::new(None);
    let meanwhile = || {
        let done = std::thread::scope(|scope| scope.spawn(|| rig.mmu.as_cpu(CpuId::new(1), &deeds)).join());
        said.set(done.ok());
    };
    before_flush(&meanwhile, || assert_eq!(rig.vm.unmap(cx, space, range).expect("unmapped").areas, 1));
    said.take().expect("it did not panic")
}

/// The same while a page is aged that a relative has there too, and while a page's places are looked for: the next area's pages are nobody's
/// neighbours, and stay young; and where it shows the same page, that is one place.
fn beside_ageing<'h, F: PageFormat>(rig: &Rig<'h, F>, cx: &mut Cx<'_, 'h>) {
    let [here, there] = [AT, THERE].map(|at| span(at, PAGES << 12));
    let object = rig.vm.create_shared(cx, PAGES, PageSize::Size4K, false).expect("memory");
    let parent = rig.space(cx, here, SMALL);
    rig.vm.fault(cx, &parent, here.start(), Access::Write).expect("memory");
    let child = rig.vm.fork(cx, &parent).expect("memory");
    rig.vm.map(cx, &parent, there, SHARED, Backing::Shared(&object, 0)).expect("an area");
    rig.vm.fault(cx, &parent, VirtAddr::new(THERE + 0x1000), Access::Write).expect("memory");
    let page = rig.leaf(cx, &parent, AT).frame;
    let lineage = parent.find_vma(cx, here.start()).expect("an area").object;
    let aged = before_unmapped(rig, cx, (&child, here), |cx| {
        rig.vm.map(cx, &child, here, SMALL, Backing::Private).expect("nothing is there");
        rig.enter(cx, &child);
        rig.store(cx, &child, AT + 0x1000, 1).expect("memory");
        rig.leave(cx, &child);
        let mut taken = 0;
        let mut take = |_: &Cx<'_, 'h>, heads: &[Pfn]| taken += heads.len();
        let neighbours = Neighbours { wants: &|_| true, take: &mut take };
        let run = AgeRun { object: lineage, pages: &[(0, page)], order: Order::ZERO };
        rig.vm.age(cx, &run, &mut [Recency::UNUSED], Some(neighbours));
        (taken, rig.leaf(cx, &child, AT + 0x1000).flags.contains(Flags::ACCESSED))
    });
    assert_eq!(aged, (0, true));
    let places = before_unmapped(rig, cx, (&parent, there), |cx| {
        let kind = with!(SHARED, protection = Protection::USER);
        rig.vm.map(cx, &parent, there, kind, Backing::Shared(&object, 0)).expect("nothing is there");
        rig.vm.fault(cx, &parent, there.start(), Access::Read).expect("memory");
        let (shown, mut places) = (rig.leaf(cx, &parent, THERE).frame, Vec::new());
        rig.vm.walk_mappings(cx, shown, |_, place| places.push(place.area.kind.protection));
        places
    });
    assert_eq!(places, [Protection::USER]);
    [child, parent].into_iter().for_each(|space| rig.vm.destroy(cx, space).expect("nobody uses it"));
    rig.vm.close(cx, object).expect("its own");
}

fn beside_others_age<F: PageFormat>() {
    as_first::<F, false>(16, 2, 7, beside_ageing);
}

/// How many CPUs unmap.
const OTHERS: u32 = 3;

/// Whoever comes to the first area has another CPU begin to unmap one behind it.
#[derive(Default)]
struct Turns {
    /// How often somebody has come there: so many may begin.
    come: AtomicU32,
    begun: AtomicU32,
    ended: AtomicBool,
}

impl Turns {
    fn wait(what: &AtomicU32, until: u32, meanwhile: impl Fn()) {
        let end = Instant::now() + Duration::from_secs(10);
        while what.load(Ordering::SeqCst) < until && Instant::now() < end {
            meanwhile();
            std::thread::yield_now();
        }
    }
}

impl<'h> Notifier<Cpus<'h>> for Turns {
    fn begin(&self, _: &mut CpuCx<'_, Cpus<'h>>, _: VirtRange) {
        let come = self.come.fetch_add(1, Ordering::SeqCst) + 1;
        Turns::wait(&self.begun, come.min(OTHERS), || ());
    }

    fn end(&self, _: &mut CpuCx<'_, Cpus<'h>>, _: VirtRange) {}
}

/// Whoever makes a hole in a file goes on at areas that others have begun to unmap, instead of beginning anew for each.
fn ended<F: PageFormat>() {
    with_format::<F, true>(16, OTHERS + 1, 5, &no_faults(), |rig| {
        let turns = Arc::new(Turns::default());
        let (object, spaces, follower) = rig.on(0, |cx| {
            let object = rig.vm.open_source(cx, File::new((PAGES as usize) << 12)).expect("memory");
            // Areas of one size and offset are in the order in which they came.
            let spaces = [(); OTHERS as usize + 1].map(|()| {
                let space = rig.vm.create(cx, bounds()).expect("memory");
                rig.vm.map(cx, &space, span(AT, PAGES << 12), SHARED, Backing::Shared(&object, 0)).expect("an area");
                space
            });
            for space in &spaces {
                rig.vm.fault(cx, space, VirtAddr::new(AT), Access::Read).expect("memory");
            }
            let follower = rig.vm.follow(cx, &spaces[0], Follower(turns.clone())).expect("memory");
            (object, spaces, follower)
        });
        std::thread::scope(|scope| {
            for cpu in 1..=OTHERS {
                let (turns, spaces) = (&turns, &spaces);
                scope.spawn(move || {
                    rig.beside_others(cpu, |cx| {
                        let space = &spaces[cpu as usize];
                        rig.enter(cx, space);
                        Turns::wait(&turns.come, cpu, || rig.vm.shootdown().handle_ipi(cx));
                        let begun = || {
                            turns.begun.fetch_add(1, Ordering::SeqCst);
                        };
                        if !turns.ended.load(Ordering::SeqCst) {
                            before_flush(&begun, || {
                                let unmapped = rig.vm.unmap(cx, space, span(AT, PAGES << 12));
                                assert_eq!(unmapped.expect("unmapped").pages, PAGES);
                            });
                        }
                        rig.leave(cx, space);
                    });
                });
            }
            rig.beside_others(0, |cx| {
                assert_eq!(rig.vm.punch(cx, &object, 0, PAGES), Ok(PAGES));
                turns.ended.store(true, Ordering::SeqCst);
                // The others need not begin.
                assert_eq!(turns.come.swap(OTHERS, Ordering::SeqCst), 1);
            });
        });
        rig.on(0, |cx| {
            // SAFETY: it follows this space.
            drop(unsafe { rig.vm.unfollow(cx, &spaces[0], follower) });
            spaces.into_iter().for_each(|space| rig.vm.destroy(cx, space).expect("nobody uses it"));
            rig.vm.close(cx, object).expect("its own");
        });
    });
}

/// Writes a file's first page back, makes it a hole, or drops it.
fn takes<'h, F: PageFormat>(
    rig: &Rig<'h, F, true>,
    cx: &mut Cx<'_, 'h>,
    object: &SharedRef<'_, Model<'h, F, true>>,
    frame: Pfn,
    deed: &str,
) {
    match deed {
        "sync" => assert_eq!(rig.vm.sync(cx, object, 0, 1), Ok(1)),
        "punch" => assert!(rig.vm.punch(cx, object, 0, 1).is_ok_and(|pages| pages > 0)),
        _ => {
            let deferred = rig.deferred();
            let unhooked = rig.vm.unhook(cx, rig.hold(frame), &deferred).expect("nobody else has it");
            assert_eq!(drop_unhooked(cx, unhooked), Ok(1));
        }
    }
}

/// An area of which whole tables have been detached, and whose flush has not begun: what of a file is written back, dropped or made a hole
/// meanwhile no CPU reaches through a table that it keeps. Whether one did before.
fn by_table<F: PageFormat>(seed: u64, deed: &str) -> bool {
    const BYTES: u64 = 4 << 20;
    let stale = Cell::new(false);
    with_format::<F, true>(16, 3, seed, &no_faults(), |rig| {
        // What is clean nobody may store to before.
        let through = || match (deed, CpuId::new(1), VirtAddr::new(AT)) {
            ("drop", cpu, at) => rig.mmu.load(cpu, at).is_ok(),
            (_, cpu, at) => rig.mmu.store(cpu, at, 1).is_ok(),
        };
        let (object, space) = rig.on(0, |cx| show(rig, cx, File::new(BYTES as usize)));
        rig.on(1, |cx| {
            rig.enter(cx, &space);
            rig.store(cx, &space, AT, 1).expect("memory");
        });
        rig.on(0, |cx| {
            if deed == "drop" {
                assert_eq!(rig.vm.sync(cx, &object, 0, 1), Ok(1));
            }
            let frame = rig.leaf(cx, &space, AT).frame;
            let meanwhile = || {
                if rig.on(2, |cx| rig.vm.lookup(cx, &space, VirtAddr::new(AT))) != Lookup::Busy {
                    return false;
                }
                stale.set(through());
                let deeds = || rig.on(2, |cx| takes(rig, cx, &object, frame, deed));
                let done = std::thread::scope(|scope| scope.spawn(deeds).join());
                assert!(done.is_ok() && !through(), "{deed}");
                true
            };
            at_unlock(&meanwhile, || {
                rig.vm.unmap(cx, &space, span(AT, BYTES)).expect("unmapped");
            });
        });
        end_of_other(rig, (object, space));
    });
    stale.get()
}

/// The middle of an area is being unmapped, and its flush has not begun, while another CPU writes the file back, makes it a hole or shorter:
/// no CPU stores to any page of it afterwards, and nobody waits for ever. Whether one could before.
fn in_part<F: PageFormat>(seed: u64, deed: &str) -> bool {
    let stale = Cell::new(false);
    with_format::<F, true>(16, 3, seed, &no_faults(), |rig| {
        let file = File::new((PAGES as usize) << 12);
        let store = |page: u64, value| rig.mmu.store(CpuId::new(1), VirtAddr::new(AT + (page << 12)), value).is_ok();
        let (object, space) = rig.on(0, |cx| show(rig, cx, file));
        rig.on(1, |cx| {
            rig.enter(cx, &space);
            (0..PAGES).for_each(|page| rig.store(cx, &space, AT + (page << 12), 1).expect("memory"));
        });
        let through = rig.beside_a_flush(
            |cx| assert_eq!(rig.vm.unmap(cx, &space, span(AT + 0x1000, 0x2000)).expect("memory").pages, 2),
            || stale.set(store(1, 2)),
            |cx| {
                let done = match deed {
                    "sync" => rig.vm.sync(cx, &object, 0, PAGES),
                    "punch" => rig.vm.punch(cx, &object, 0, PAGES),
                    _ => {
                        file.bytes().clear();
                        rig.vm.truncate(cx, &object, 0)
                    }
                };
                assert_eq!(done, Ok(PAGES), "{deed}");
                (0..PAGES).any(|page| store(page, 3))
            },
        );
        assert!(!through, "{deed}");
        let first = if stale.get() { 2 } else { 1 };
        let expected = match deed {
            "sync" => [Ok(1), Ok(first)],
            "punch" => [Ok(0), Ok(0x1000)],
            _ => [Err(()), Err(())],
        };
        rig.on(1, |cx| {
            // Nothing of a file that is empty.
            let _ = rig.vm.map(cx, &space, span(THERE, PAGES << 12), SHARED, Backing::Shared(&object, 0));
            let found = [AT, THERE + 0x1000].map(|at| rig.load(cx, &space, at).map_err(|_| ()));
            assert_eq!(found, expected, "{deed}");
            assert!(rig.load(cx, &space, AT + 0x1000).is_err(), "unmapped");
        });
        if deed == "sync" {
            assert_eq!([0, 1, 3].map(|page| file.word(page << 12)), [1, first, 1]);
        }
        end_of_other(rig, (object, space));
    });
    stale.get()
}

#[test]
fn nobody_stores_to_what_is_written_while_a_part_is_unmapped() {
    some_are_stale([|seed| in_part::<Metered>(seed, "sync"), |seed| in_part::<Aarch64>(seed, "sync")]);
}

#[test]
fn nobody_stores_to_a_hole_while_a_part_is_unmapped() {
    some_are_stale([|seed| in_part::<Metered>(seed, "punch"), |seed| in_part::<Aarch64>(seed, "punch")]);
}

#[test]
fn nobody_stores_behind_the_end_while_a_part_is_unmapped() {
    some_are_stale([|seed| in_part::<Metered>(seed, "truncate"), |seed| in_part::<Aarch64>(seed, "truncate")]);
}

#[test]
fn nobody_stores_through_a_detached_table_to_what_is_written() {
    some_are_stale([|seed| by_table::<Metered>(seed, "sync"), |seed| by_table::<Aarch64>(seed, "sync")]);
}

#[test]
fn nobody_stores_through_a_detached_table_to_a_hole() {
    some_are_stale([|seed| by_table::<Metered>(seed, "punch"), |seed| by_table::<Aarch64>(seed, "punch")]);
}

#[test]
fn nobody_reaches_what_is_dropped_through_a_detached_table() {
    some_are_stale([|seed| by_table::<Metered>(seed, "drop"), |seed| by_table::<Aarch64>(seed, "drop")]);
}

on_both_formats! {
    fn what_an_area_showed_is_not_taken_from_the_next_one_there: another (first);
    fn what_is_written_is_not_forbidden_to_the_next_one_there: beside_others ();
    fn what_is_aged_meanwhile_takes_nothing_from_the_next_one_there: beside_others_age ();
    fn a_hole_is_made_though_others_unmap: ended ();
}
