//! Private mappings of files: what is read is the file's page, shown to all; what is stored to is one's own from then on. On both formats.

use crate::sources::{File, drops};
use crate::support::{
    AT, Cx, Handle, Rig, SMALL, at_supply, before_flush, before_flushes, bounds, on_both_formats, span,
};
use hugemm_base::{CpuId, Never, VirtAddr, with};
use hugemm_paging::{Flags, Lookup, PageFormat};
use hugemm_vm::{Access, Backing, Discard, LENT, Protection, Served, SharedRef, Usage, VmError};
use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

const READ: Protection = Protection::USER;
/// Where the file itself is shown.
const THERE: u64 = 0x70_0000_0000;
const PAGES: u64 = 32;

type Model<'h, F> = crate::support::Model<'h, F, true>;

fn at(page: u64) -> u64 {
    AT + (page << 12)
}

fn pages(first: u64, count: u64) -> hugemm_base::VirtRange {
    span(at(first), count << 12)
}

/// Runs `test` with a space that copies a file, and shows it elsewhere.
fn with_file<'h, F: PageFormat>(
    rig: &Rig<'h, F, true>,
    test: impl FnOnce(&mut Cx<'_, 'h>, &'static File, &SharedRef<'_, Model<'h, F>>, &Handle<'_, 'h, F, true>),
) {
    rig.on(0, |cx| {
        let file = File::new((PAGES as usize) << 12);
        let object = rig.vm.open_source(cx, file).expect("memory");
        let space = rig.vm.create(cx, bounds()).expect("memory");
        let kind = rig.vm.map(cx, &space, pages(0, PAGES), SMALL, Backing::Copied(&object, 0)).expect("an area").kind;
        assert!(kind.sourced && !kind.shared);
        rig.vm.map(cx, &space, span(THERE, PAGES << 12), SMALL, Backing::Shared(&object, 0)).expect("an area");
        rig.enter(cx, &space);
        test(cx, file, &object, &space);
        rig.vm.close(cx, object).expect("its own");
        assert_eq!(file.closed.load(Ordering::Relaxed), 0);
        rig.end(cx, space);
        assert_eq!(file.closed.load(Ordering::Relaxed), 1, "the last that copies it is gone");
    });
}

/// Whether an address shows the file's page.
fn is_lent<'h, F: PageFormat>(
    rig: &Rig<'h, F, true>,
    cx: &mut Cx<'_, 'h>,
    space: &Handle<'_, 'h, F, true>,
    page: u64,
) -> bool {
    let leaf = rig.leaf(cx, space, at(page));
    let same = matches!(rig.vm.lookup(cx, space, VirtAddr::new(THERE + (page << 12))),
        Lookup::Mapped(shown) if shown.frame == leaf.frame);
    assert!(!leaf.flags.contains(LENT) || !leaf.flags.contains(Flags::WRITE));
    assert!(!same || leaf.flags.contains(LENT), "a page of the file's, with a reference of an entry");
    leaf.flags.contains(LENT)
}

fn shown<F: PageFormat>(rig: &Rig<'_, F, true>) {
    with_file(rig, |cx, file, object, space| {
        assert_eq!(rig.load(cx, space, THERE), Ok(0));
        assert_eq!(rig.load(cx, space, at(3)), Ok(3 << 12));
        let (used, mapped) = (rig.used(cx), space.counters().mapped);
        // What lies behind it in the same window too.
        assert!((3..16).all(|page| rig.mmu.load(CpuId::new(0), VirtAddr::new(at(page))) == Ok(page << 12)));
        assert_eq!(rig.load(cx, space, at(1)), Ok(1 << 12));
        assert_eq!((rig.used(cx), space.counters().mapped - mapped), (used, 1), "no page of its own");
        assert_eq!(rig.load(cx, space, THERE + 0x3000), Ok(3 << 12));
        assert!(is_lent(rig, cx, space, 3));
        assert_eq!(rig.leaf(cx, space, at(3)).frame, rig.leaf(cx, space, THERE + 0x3000).frame);
        let present = with!(Usage::default(), present = 15);
        assert_eq!(rig.vm.usage(cx, space, pages(0, PAGES)), Ok(present));
        // The reverse map finds it.
        let (frame, mut found) = (rig.leaf(cx, space, at(3)).frame, Vec::new());
        rig.vm.walk_mappings(cx, frame, |_, place| found.push(place.at.get()));
        found.sort_unstable();
        assert_eq!(found, [at(3), THERE + 0x3000]);
        // What others store to the file is seen until there is a page of its own.
        rig.store(cx, space, THERE + 0x3008, 5).expect("memory");
        assert_eq!(rig.load(cx, space, at(3) + 8), Ok(5));
        // Another process has no page more either.
        let other = rig.vm.create(cx, bounds()).expect("memory");
        rig.vm.map(cx, &other, pages(0, PAGES), SMALL, Backing::Copied(object, 0)).expect("an area");
        rig.enter(cx, &other);
        assert_eq!(rig.load(cx, &other, at(3) + 8), Ok(5));
        assert_eq!(rig.leaf(cx, &other, at(3)).frame, frame);
        assert_eq!(rig.vm.walk_mappings(cx, frame, |_, _| ()), 3);
        rig.leave(cx, &other);
        rig.vm.destroy(cx, other).expect("nobody uses it");
        rig.enter(cx, space);
        assert_eq!(rig.load(cx, space, at(3) + 8), Ok(5));
        assert!(file.fills().len() == 1 && file.writes().is_empty());
    });
}

fn stored<F: PageFormat>(rig: &Rig<'_, F, true>) {
    with_file(rig, |cx, file, object, space| {
        assert_eq!(rig.load(cx, space, at(3)), Ok(3 << 12));
        let (used, flushes) = (rig.used(cx), rig.flushes());
        assert_eq!(rig.vm.fault(cx, space, VirtAddr::new(at(3)), Access::Write), Ok(Served::Copied));
        assert_eq!((rig.flushes() - flushes, rig.used(cx) - used), (1, 1), "the first store");
        assert_eq!(rig.store(cx, space, at(3), 9), Ok(()));
        assert_eq!((rig.load(cx, space, at(3)), rig.load(cx, space, at(3) + 8)), (Ok(9), Ok((3 << 12) + 8)));
        assert_eq!((rig.flushes() - flushes, is_lent(rig, cx, space, 3)), (1, false));
        // Where nothing was shown there is nothing to flush.
        assert_eq!(rig.store(cx, space, at(0), 7), Ok(()));
        assert_eq!((rig.load(cx, space, at(0) + 8), rig.flushes() - flushes), (Ok(8), 1));
        assert_eq!([0, 3].map(|page| rig.load(cx, space, THERE + (page << 12))), [Ok(0), Ok(3 << 12)], "the file's");
        assert_eq!(rig.vm.sync(cx, object, 0, PAGES), Ok(0));
        // What the file gets since is not in it.
        rig.store(cx, space, THERE + 0x3010, 1).expect("memory");
        assert_eq!(rig.load(cx, space, at(3) + 16), Ok((3 << 12) + 16));
        // Its own goes to swap, and the file's page just goes.
        rig.page_out(cx, space, at(3));
        assert_eq!(rig.vm.sync(cx, object, 0, PAGES), Ok(1));
        assert_eq!(drops(rig, cx, space, THERE + 0x3000), Ok(1));
        assert_eq!(rig.load(cx, space, at(3)), Ok(9));
        assert_eq!(file.word(3 << 12), 3 << 12);
    });
}

/// Whether the other CPU had an old translation of a page that is stored to.
fn stale<F: PageFormat>(seed: u64) -> bool {
    let stale = Cell::new(false);
    crate::support::with_format::<F, true>(16, 2, seed, &crate::support::no_faults(), |rig| {
        let (space, object) = rig.on(0, |cx| {
            let object = rig.vm.open_source(cx, File::new(4 << 12)).expect("memory");
            let space = rig.vm.create(cx, bounds()).expect("memory");
            rig.vm.map(cx, &space, pages(0, 4), SMALL, Backing::Copied(&object, 0)).expect("an area");
            (space, object)
        });
        for cpu in [0, 1] {
            rig.on(cpu, |cx| {
                rig.enter(cx, &space);
                (0..4).for_each(|page| assert_eq!(rig.load(cx, &space, at(page)), Ok(page << 12)));
            });
        }
        let old = |page| rig.mmu.load(CpuId::new(1), VirtAddr::new(at(page))) == Ok(page << 12);
        before_flush(&|| stale.set(old(1)), || {
            rig.on(0, |cx| rig.store(cx, &space, at(1), 9).expect("memory"));
        });
        let found = rig.mmu.load(CpuId::new(1), VirtAddr::new(at(1)));
        assert!(found.is_err() || found == Ok(9), "{found:?}: the file's after a store");
        // And what the file loses nobody reads.
        rig.on(0, |cx| rig.vm.punch(cx, &object, 2, 3).expect("its own"));
        assert!(rig.mmu.load(CpuId::new(1), VirtAddr::new(at(2))).is_err());
        rig.on(0, |cx| rig.vm.truncate(cx, &object, 0).expect("its own"));
        assert!((0..4).all(|page| rig.mmu.load(CpuId::new(1), VirtAddr::new(at(page))).is_err()));
        rig.end_for_both(space);
        rig.on(0, |cx| rig.vm.close(cx, object).expect("its own"));
    });
    stale.get()
}

fn forked<F: PageFormat>(rig: &Rig<'_, F, true>) {
    with_file(rig, |cx, _, object, space| {
        for pinned in [false, true] {
            let pins = if pinned { rig.pin(cx, space, pages(20, 1)) } else { Vec::new() };
            assert_eq!(rig.load(cx, space, at(1)), Ok(1 << 12));
            rig.store(cx, space, at(2), 22).expect("memory");
            let frame = rig.leaf(cx, space, at(1)).frame;
            let references = rig.vm.frames().references(frame);
            let child = rig.vm.fork(cx, space).expect("memory");
            assert_eq!(rig.vm.frames().references(frame), references, "the index's");
            rig.store(cx, space, at(1), 11).expect("memory");
            rig.store(cx, space, at(2), 23).expect("memory");
            rig.enter(cx, &child);
            rig.leave(cx, space);
            let found = [1, 2, 9].map(|page| rig.load(cx, &child, at(page)));
            assert_eq!(found, [Ok(1 << 12), Ok(22), Ok(9 << 12)], "what nobody has touched too");
            rig.store(cx, &child, at(9), 99).expect("memory");
            // Of both.
            rig.vm.punch(cx, object, 0, PAGES).expect("its own");
            assert_eq!(rig.load(cx, &child, at(9)), Ok(99));
            rig.enter(cx, space);
            rig.leave(cx, &child);
            assert_eq!([1, 2, 9].map(|page| rig.load(cx, space, at(page))), [Ok(11), Ok(23), Ok(9 << 12)]);
            rig.vm.destroy(cx, child).expect("nobody uses it");
            rig.unpin(cx, space, pins);
            rig.vm.discard(cx, space, pages(0, PAGES), Discard::Now).expect("areas");
        }
    });
}

fn protected<F: PageFormat>(rig: &Rig<'_, F, true>) {
    with_file(rig, |cx, file, _, space| {
        assert_eq!(rig.load(cx, space, at(1)), Ok(1 << 12));
        rig.store(cx, space, at(2), 22).expect("memory");
        rig.vm.protect(cx, space, pages(0, PAGES), READ).expect("an area");
        assert_eq!(rig.store(cx, space, at(2), 1), Err(VmError::Denied { at: VirtAddr::new(at(2)) }));
        assert_eq!([1, 2].map(|page| rig.load(cx, space, at(page))), [Ok(1 << 12), Ok(22)]);
        rig.vm.protect(cx, space, pages(0, PAGES), READ.with(Protection::WRITE)).expect("an area");
        assert!(rig.mmu.store(CpuId::new(0), VirtAddr::new(at(1)), 9).is_err(), "the file's page becomes writable");
        assert!(rig.mmu.store(CpuId::new(0), VirtAddr::new(at(2)), 23).is_ok(), "its own does at once");
        rig.store(cx, space, at(1), 9).expect("memory");
        assert_eq!((rig.load(cx, space, THERE + 0x1000), file.word(1 << 12)), (Ok(1 << 12), 1 << 12));
    });
}

fn given_up<F: PageFormat>(rig: &Rig<'_, F, true>) {
    with_file(rig, |cx, _, _, space| {
        for page in [1, 2] {
            assert_eq!(rig.load(cx, space, at(page)), Ok(page << 12));
        }
        rig.store(cx, space, at(2), 22).expect("memory");
        rig.store(cx, space, at(3), 33).expect("memory");
        rig.page_out(cx, space, at(3));
        let frame = rig.leaf(cx, space, at(1)).frame;
        let references = rig.vm.frames().references(frame);
        rig.vm.discard(cx, space, pages(0, 8), Discard::Now).expect("an area");
        assert_eq!(rig.vm.frames().references(frame), references, "the index's stays");
        assert_eq!([1, 2, 3].map(|page| rig.load(cx, space, at(page))), [Ok(1 << 12), Ok(2 << 12), Ok(3 << 12)]);
        assert!(is_lent(rig, cx, space, 2));
    });
}

/// What is there of a space of ones own, in memory and in swap, and of the file's.
fn mixed<'h, F: PageFormat>(rig: &Rig<'h, F, true>, cx: &mut Cx<'_, 'h>, space: &Handle<'_, 'h, F, true>) {
    for page in [9, 10, 11] {
        rig.store(cx, space, at(page), page).expect("memory");
    }
    rig.page_out(cx, space, at(10));
    assert_eq!([8, 12].map(|page| rig.load(cx, space, at(page))), [Ok(8 << 12), Ok(12 << 12)]);
}

/// Of those, what a file has that ends within the page after the first.
fn ends<'h, F: PageFormat>(rig: &Rig<'h, F, true>, cx: &mut Cx<'_, 'h>, space: &Handle<'_, 'h, F, true>) {
    assert_eq!([8, 9].map(|page| rig.load(cx, space, at(page))), [Ok(8 << 12), Ok(9)]);
    assert_eq!(rig.load(cx, space, at(9) + 8), Ok((9 << 12) + 8), "the rest of its own last page stays");
    for page in [10, 11, 12] {
        let beyond = VmError::OutOfBounds { at: VirtAddr::new(at(page)) };
        assert!(rig.mmu.load(CpuId::new(0), VirtAddr::new(at(page))).is_err());
        assert_eq!(rig.load(cx, space, at(page)), Err(beyond));
        assert_eq!(rig.store(cx, space, at(page), 1), Err(beyond));
    }
}

fn shorter<F: PageFormat>(rig: &Rig<'_, F, true>) {
    with_file(rig, |cx, file, object, space| {
        mixed(rig, cx, space);
        // A child has its own, too.
        let child = rig.vm.fork(cx, space).expect("memory");
        assert_eq!(rig.load(cx, space, at(8)), Ok(8 << 12));
        let used = rig.used(cx);
        file.bytes().truncate((9 << 12) + 8);
        rig.vm.truncate(cx, object, (9 << 12) + 8).expect("shorter");
        assert!(used - rig.used(cx) >= 2, "what was beyond its end is free");
        ends(rig, cx, space);
        rig.enter(cx, &child);
        rig.leave(cx, space);
        ends(rig, cx, &child);
        rig.enter(cx, space);
        rig.leave(cx, &child);
        rig.vm.destroy(cx, child).expect("nobody uses it");
        // Longer again: what was there is no longer.
        file.bytes().resize((PAGES as usize) << 12, 0);
        rig.vm.truncate(cx, object, PAGES << 12).expect("longer");
        assert_eq!([10, 11, 12].map(|page| rig.load(cx, space, at(page))), [Ok(0); 3]);
        let flushes = rig.flushes();
        rig.vm.truncate(cx, object, 0).expect("shorter");
        assert_eq!(rig.flushes() - flushes, 1, "of what is only lent and its own");
    });
}

/// While a fork has a page in hand of which the child is to get a copy, because it is pinned, the file ends before that page. `held`: the
/// page is gone from the parent, and what the child has got there is just being taken away, when the copy is ready.
fn shorter_beside<F: PageFormat>(rig: &Rig<'_, F, true>, held: bool) {
    // Of the second table, which goes as a whole.
    const LONG: u64 = 1024;
    let [first, pinned] = [600, 601];
    const HELD: u32 = 200_000;
    let (space, object, pin) = rig.on(0, |cx| {
        let object = rig.vm.open_source(cx, File::new((LONG as usize) << 12)).expect("memory");
        let space = rig.vm.create(cx, bounds()).expect("memory");
        rig.vm.map(cx, &space, pages(0, LONG), SMALL, Backing::Copied(&object, 0)).expect("an area");
        rig.enter(cx, &space);
        [first, pinned].into_iter().for_each(|page| rig.store(cx, &space, at(page), page).expect("memory"));
        let mut pin = None;
        rig.vm.pin(cx, &space, pages(pinned, 1), Access::Write, None, &Never, |made| pin = Some(made)).expect("memory");
        (space, object, pin.expect("one page"))
    });
    let frame = rig.on(0, |cx| rig.leaf(cx, &space, at(pinned)).frame);
    // 1: the fork has the page in hand, 2: it may go on, 3: it is over.
    let step = AtomicU32::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while step.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            rig.beside_others(1, |cx| {
                let flushes = Cell::new(0);
                let second = || {
                    flushes.set(flushes.get() + 1);
                    if flushes.get() == 2 && held {
                        step.store(2, Ordering::SeqCst);
                        // A fork that fails gives the child up, for which it waits for this.
                        let goes_on = |_: &u32| step.load(Ordering::SeqCst) < 3;
                        (0..HELD).take_while(goes_on).for_each(|_| std::thread::yield_now());
                    }
                    flushes.get() == 2
                };
                before_flushes(&second, || _ = rig.vm.truncate(cx, &object, 1 << 12).expect("shorter"));
                step.fetch_max(2, Ordering::SeqCst);
            });
        });
        let child = rig.beside_others(0, |cx| {
            rig.leave(cx, &space);
            let mut child = None;
            let in_hand = || {
                // The entry's, the pin's, and the fork's.
                let there = rig.vm.frames().references(frame) == 3;
                if there {
                    step.store(1, Ordering::SeqCst);
                    while step.load(Ordering::SeqCst) == 1 {
                        std::thread::yield_now();
                    }
                }
                there
            };
            at_supply(&in_hand, || child = Some(rig.vm.fork(cx, &space)));
            step.store(3, Ordering::SeqCst);
            child.expect("forked")
        });
        rig.on(0, |cx| {
            let child = child.expect("memory");
            rig.enter(cx, &child);
            for page in [first, pinned] {
                let beyond = VmError::OutOfBounds { at: VirtAddr::new(at(page)) };
                assert_eq!(rig.load(cx, &child, at(page)), Err(beyond), "{held}");
            }
            rig.end(cx, child);
        });
    });
    rig.on(0, |cx| {
        rig.vm.unpin(cx, &space, pin).expect("its own");
        rig.end_shown(cx, (object, space));
    });
}

fn shorter_beside_forks<F: PageFormat>(rig: &Rig<'_, F, true>) {
    [true, false].into_iter().for_each(|held| shorter_beside(rig, held));
}

fn punched<F: PageFormat>(rig: &Rig<'_, F, true>) {
    with_file(rig, |cx, file, object, space| {
        // Two areas that copy it, and one that shows it.
        rig.vm.protect(cx, space, pages(12, 20), READ).expect("an area");
        mixed(rig, cx, space);
        assert_eq!(rig.load(cx, space, THERE + 0x8000), Ok(8 << 12));
        file.bytes()[8 << 12..13 << 12].fill(0);
        let flushes = rig.flushes();
        rig.vm.punch(cx, object, 8, 13).expect("its own");
        assert_eq!(rig.flushes() - flushes, 1);
        for page in [8, 12] {
            assert!(rig.mmu.load(CpuId::new(0), VirtAddr::new(at(page))).is_err(), "{page}");
        }
        let found = [8, 9, 10, 11, 12].map(|page| rig.load(cx, space, at(page)));
        assert_eq!(found, [Ok(0), Ok(9), Ok(10), Ok(11), Ok(0)], "its own stays");
    });
}

fn reclaimed<F: PageFormat>(rig: &Rig<'_, F, true>) {
    with_file(rig, |cx, file, _, space| {
        assert_eq!(rig.load(cx, space, at(2)), Ok(2 << 12));
        rig.store(cx, space, at(3), 33).expect("memory");
        file.fills();
        assert_eq!(drops(rig, cx, space, at(2)), Ok(1), "clean");
        assert!(rig.mmu.load(CpuId::new(0), VirtAddr::new(at(2))).is_err(), "it is used");
        assert_eq!((rig.load(cx, space, at(2)), file.fills()), (Ok(2 << 12), vec![(2, 1 << 12)]));
        // Wherever it is by now.
        rig.vm.move_to(cx, space, pages(0, 8), span(2 * THERE, 8 << 12)).expect("nothing is there");
        let moved = VirtAddr::new(2 * THERE + 0x2000);
        assert_eq!(rig.mmu.load(CpuId::new(0), moved).or_else(|_| rig.load(cx, space, moved.get())), Ok(2 << 12));
        assert_eq!(rig.load(cx, space, 2 * THERE + 0x3000), Ok(33));
        assert_eq!(drops(rig, cx, space, moved.get()), Ok(1));
        assert!(rig.mmu.load(CpuId::new(0), moved).is_err());
        // Stored to by others: it is dirty there.
        rig.store(cx, space, THERE + 0x2000, 7).expect("memory");
        assert_eq!(rig.load(cx, space, moved.get()), Ok(7));
        assert_eq!(drops(rig, cx, space, moved.get()), Err(VmError::NotWritten));
        assert_eq!(rig.load(cx, space, moved.get()), Ok(7));
    });
}

fn own<F: PageFormat>(rig: &Rig<'_, F, true>) {
    with_file(rig, |cx, file, object, space| {
        (0..8).for_each(|page| assert_eq!(rig.load(cx, space, at(page)), Ok(page << 12)));
        // From outside.
        rig.vm.zero(cx, space, VirtAddr::new(at(1) + 16), 8).expect("an area");
        rig.vm.write(cx, space, VirtAddr::new(at(2)), &22_u64.to_le_bytes()).expect("an area");
        assert_eq!(
            [at(1) + 8, at(1) + 16, at(2)].map(|at| rig.load(cx, space, at)),
            [Ok((1 << 12) + 8), Ok(0), Ok(22)]
        );
        let mut word = [0; 8];
        rig.vm.read(cx, space, VirtAddr::new(at(20)), &mut word).expect("an area");
        assert_eq!((u64::from_le_bytes(word), is_lent(rig, cx, space, 20)), (20 << 12, true));
        // What a device has, and what is locked, is not the file's to take away; also where nobody may store.
        rig.vm.protect(cx, space, pages(16, 16), READ).expect("an area");
        let mut pins = Vec::new();
        for page in [3, 20, 21] {
            rig.vm.pin(cx, space, pages(page, 1), Access::Read, None, &Never, |pin| pins.push(pin)).expect("memory");
            assert!(!is_lent(rig, cx, space, page), "{page}");
        }
        for page in [4, 22, 23] {
            rig.vm.lock(cx, space, pages(page, 1), 9).expect("memory");
            assert!(!is_lent(rig, cx, space, page), "{page}");
        }
        assert_eq!(rig.load(cx, space, THERE + 0x4000), Ok(4 << 12));
        assert_eq!(drops(rig, cx, space, THERE + 0x4000), Ok(1), "locked is a copy of it");
        file.bytes().fill(0);
        rig.vm.punch(cx, object, 0, PAGES).expect("its own");
        for page in [3, 4, 20, 21, 22, 23] {
            assert!(matches!(rig.vm.lookup(cx, space, VirtAddr::new(at(page))), Lookup::Mapped(_)), "{page}");
            assert_eq!(rig.load(cx, space, at(page)), Ok(page << 12));
        }
        rig.vm.unlock(cx, space, pages(0, PAGES)).expect("areas");
        rig.unpin(cx, space, pins);
        // Ahead of a touch it is lent.
        rig.vm.prefault(space, pages(8, 4), None).work(cx, &Never).expect("memory");
        assert!((8..12).all(|page| is_lent(rig, cx, space, page)));
    });
}

fn poisoned<F: PageFormat>(rig: &Rig<'_, F, true>) {
    with_file(rig, |cx, _, _, space| {
        assert_eq!(rig.load(cx, space, at(5)), Ok(5 << 12));
        let (frame, used) = (rig.leaf(cx, space, at(5)).frame, rig.used(cx));
        rig.vm.frames().hwpoison(cx, frame);
        assert_eq!(rig.store(cx, space, at(5), 1), Err(VmError::HwPoisoned { frame }));
        assert_eq!((rig.used(cx), is_lent(rig, cx, space, 5)), (used, true), "nothing has changed");
    });
}

on_both_formats! {
    fn what_is_read_is_the_files_page: shown (rig);
    fn what_is_stored_to_is_ones_own: stored (rig);
    fn no_cpu_reads_the_files_page_after_a_store: stale (stale);
    fn a_fork_shares_ones_own_and_the_file: forked (rig);
    fn rights_that_come_do_not_make_the_files_page_writable: protected (rig);
    fn what_is_given_up_is_the_files_again: given_up (rig);
    /// Ones own too, as everywhere.
    fn what_is_beyond_the_end_of_a_file_goes: shorter (rig);
    fn a_child_gets_no_copy_of_what_a_file_loses_meanwhile: shorter_beside_forks (rig);
    fn a_hole_takes_what_is_lent_and_nothing_else: punched (rig);
    fn reclaim_takes_the_files_page_from_those_who_copy_it: reclaimed (rig);
    fn who_needs_a_page_that_stays_has_its_own: own (rig);
    fn bad_memory_of_a_file_is_not_copied: poisoned (rig);
}
