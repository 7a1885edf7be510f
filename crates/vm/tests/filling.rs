//! Filling and pinning ranges that begin and end anywhere: every page once, where it belongs.

#![cfg(all(target_os = "linux", not(miri)))]

mod support;

use hugemm_base::{Cpu, CpuId, Never, PageSize, Pfn, VirtAddr};
use hugemm_paging::{Flags, Lookup};
use hugemm_vm::{Backing, Pinned, VmaKind, ZeroTurn, ZeroWorker};
use support::{Cx, Handle, Rig, bounds, no_faults, span, with_rig};

const AT: u64 = 0x4000_0000;
const SMALL: VmaKind = VmaKind::private(PageSize::Size4K);
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
        with_rig(64, 1, 61, &no_faults(), |rig| {
            rig.mmu.as_cpu(CpuId(0), |cx| {
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
        });
    }
}

/// What is there already stays, however it is strewn; what is missing between is filled.
#[test]
fn gaps_are_filled() {
    for kind in [SMALL, LARGE] {
        with_rig(64, 1, 62, &no_faults(), |rig| {
            rig.mmu.as_cpu(CpuId(0), |cx| {
                let space = rig.vm.create(cx, bounds()).expect("a space");
                let (size, count) = (kind.page.bytes(), if kind == SMALL { 1200 } else { 24 });
                rig.vm.map(cx, &space, span(AT, count * size), kind, Backing::Private).expect("an area");
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
                rig.leave(cx, &space);
                rig.vm.destroy(cx, space).expect("destroyed");
            });
        });
    }
}

/// Pins say where each run lies, in ascending order and without gaps, also where no two frames adjoin and where areas meet;
/// each page has one reference more until its pin is given back.
#[test]
fn pins_say_what_they_hold() {
    with_rig(16, 1, 63, &no_faults(), |rig| {
        rig.mmu.as_cpu(CpuId(0), |cx| {
            let space = rig.vm.create(cx, bounds()).expect("a space");
            rig.vm.map(cx, &space, span(AT, 300 << 12), SMALL, Backing::Private).expect("an area");
            rig.vm.map(cx, &space, span(AT + (300 << 12), 212 << 12), SMALL, Backing::Private).expect("an area");
            rig.vm.map(cx, &space, span(AT + (2 << 20), 4 << 20), LARGE, Backing::Private).expect("an area");
            rig.enter(cx, &space);
            // Every second page first, so that frames of neighbours do not adjoin.
            for page in (0..200).step_by(2).chain((1..200).step_by(2)) {
                rig.store(cx, &space, AT + (page << 12), 1).expect("memory");
            }
            let mut pins: Vec<Pinned<'_>> = Vec::new();
            let pinned = rig.vm.pin(cx, &space, span(AT + 0x3000, (1533) << 12), None, &Never, |pin| pins.push(pin));
            assert_eq!(pinned, Ok(1533));
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
            rig.leave(cx, &space);
            rig.vm.destroy(cx, space).expect("destroyed");
        });
    });
}

/// A worker that clears ahead rests as its share of the time says, and looks up every 256 KiB.
#[test]
fn who_clears_ahead_rests() {
    with_rig(64, 1, 64, &no_faults(), |rig| {
        rig.mmu.as_cpu(CpuId(0), |cx| {
            use hugemm_base::Clock;
            let mut turn = |percent| {
                let worker = ZeroWorker::new(rig.vm.clearer(), PageSize::Size4K, percent);
                assert_eq!(worker.policy().unit, Some(256 << 10));
                let start = cx.platform().now_ns();
                let ZeroTurn::Cleared { bytes, rest } = rig.vm.zero_ahead(cx, &worker, &Never) else {
                    panic!("there is more")
                };
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
    });
}

/// Small pages that lie side by side are freed together: by lock rounds, of which page by page there is one for each refill of
/// a CPU's cache.
#[test]
fn unmapped_pages_are_freed_by_runs() {
    const PAGES: u64 = 2048;
    with_rig(32, 1, 77, &no_faults(), |rig| {
        rig.mmu.as_cpu(CpuId(0), |cx| {
            let space = rig.vm.create(cx, bounds()).expect("a space");
            let all = span(AT, PAGES << 12);
            rig.vm.map(cx, &space, all, VmaKind::private(PageSize::Size4K), Backing::Private).expect("an area");
            rig.vm.prefault(&space, all, None).work(cx, &Never).expect("memory");
            let before = rig.vm.frames().stats(cx).lock_rounds;
            rig.vm.unmap(cx, &space, all).expect("its own");
            let rounds = rig.vm.frames().stats(cx).lock_rounds - before;
            assert!(rounds <= 9, "{rounds}");
            rig.vm.destroy(cx, space).expect("nobody uses it");
        });
    });
}
