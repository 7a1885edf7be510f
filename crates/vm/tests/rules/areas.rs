//! Areas, faults, unmapping, the reverse map: one rule per test, on the model MMU.

use crate::support::{AT, SMALL, bounds, no_faults, span, with_cpu, with_rig};
use hugemm_base::{Cpu, CpuId, Never, PageSize, VirtAddr, with};
use hugemm_hugetlb::Nodes;
use hugemm_paging::Lookup;
use hugemm_vm::{Access, Backing, Phase, Protection, Served, VmError, VmaKind};

/// A store faults once, the memory around it reads as zero, and everything is back at the end.
#[test]
fn a_page_is_cleared_before_it_is_seen() {
    for page in [PageSize::Size4K, PageSize::Size2M] {
        with_cpu(16, 2, 1, |rig, cx| {
            let space = rig.space(cx, span(AT, 4 << 20), VmaKind::private(page));
            rig.enter(cx, &space);
            let touched = AT + 0x12_3458;
            rig.store(cx, &space, touched, 7).expect("a page");
            for word in (0..page.bytes()).step_by(8) {
                let at = (touched & !(page.bytes() - 1)) + word;
                assert_eq!(rig.load(cx, &space, at).expect("mapped"), if at == touched { 7 } else { 0 });
            }
            assert_eq!((space.counters().mapped, space.counters().wasted), (1, 0));
            rig.end(cx, space);
        });
    }
}

#[test]
fn what_an_area_does_not_allow_is_denied() {
    with_cpu(8, 1, 2, |rig, cx| {
        let space = rig.vm.create(cx, bounds()).expect("a space");
        let at = VirtAddr::new(AT);
        let fault = |cx: &mut _, access| rig.vm.fault(cx, &space, at, access);
        assert_eq!(fault(cx, Access::Read), Err(VmError::NoArea { at }));
        let kind = SMALL.allowing(Protection::USER);
        rig.vm.map(cx, &space, span(AT, 0x4000), kind, Backing::Private).expect("an area");
        assert_eq!(fault(cx, Access::Write), Err(VmError::Denied { at }));
        assert_eq!(fault(cx, Access::Exec), Err(VmError::Denied { at }));
        assert_eq!(fault(cx, Access::Read), Ok(Served::Mapped));
        assert_eq!(fault(cx, Access::Read), Ok(Served::Meanwhile), "it is there");
        let overlapping = rig.vm.map(cx, &space, span(AT + 0x3000, 0x2000), kind, Backing::Private);
        assert_eq!(overlapping, Err(VmError::Overlap { at }));
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// Unmapping the middle of an area leaves its ends with their content, costs one flush however many pages, and the
/// addresses can be used again.
#[test]
fn a_hole_leaves_both_ends() {
    with_cpu(16, 2, 3, |rig, cx| {
        let space = rig.space(cx, span(AT, 0x40_0000), SMALL);
        rig.enter(cx, &space);
        for page in 0..1024 {
            rig.store(cx, &space, AT + page * 4096, page + 1).expect("a page");
        }
        let before = rig.flushes();
        let unmapped = rig.vm.unmap(cx, &space, span(AT + 0x10_0000, 0x20_0000)).expect("unmapped");
        assert_eq!((unmapped.areas, unmapped.pages), (1, 512));
        assert_eq!(rig.flushes() - before, 1);
        let areas = space.vmas(span(0, 4 << 30)).map(|area| (area.range, area.offset));
        assert!(areas.eq([(span(AT, 0x10_0000), 0), (span(AT + 0x30_0000, 0x10_0000), 768)]));
        let hole = span(AT + 0x10_0000, 0x20_0000);
        assert_eq!(space.vmas(hole).count(), 0, "one ends where it begins, one begins where it ends");
        for page in 0..1024 {
            let found = rig.load(cx, &space, AT + page * 4096);
            match page {
                256..768 => assert_eq!(found, Err(VmError::NoArea { at: VirtAddr::new(AT + page * 4096) })),
                _ => assert_eq!(found, Ok(page + 1)),
            }
        }
        rig.vm.map(cx, &space, span(AT + 0x20_0000, 0x1000), SMALL, Backing::Private).expect("there is room");
        assert_eq!(rig.load(cx, &space, AT + 0x20_0000), Ok(0));
        rig.end(cx, space);
    });
}

#[test]
fn holes_in_the_middle_of_a_page_are_refused() {
    with_cpu(16, 1, 4, |rig, cx| {
        let space = rig.vm.create(cx, bounds()).expect("a space");
        let kind = VmaKind::private(PageSize::Size2M);
        let at = VirtAddr::new(AT + 0x1000);
        let misaligned = rig.vm.map(cx, &space, span(AT + 0x1000, 2 << 20), kind, Backing::Private);
        assert_eq!(misaligned, Err(VmError::Misaligned { at }));
        rig.vm.map(cx, &space, span(AT, 4 << 20), kind, Backing::Private).expect("an area");
        assert_eq!(rig.vm.unmap(cx, &space, span(AT + 0x1000, 0x1000)), Err(VmError::Misaligned { at }));
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// Two spaces show one shared object; its memory outlives either, and goes with the last.
#[test]
fn shared_memory_is_shared_and_freed_with_its_last_user() {
    with_cpu(16, 2, 5, |rig, cx| {
        let object = rig.vm.create_shared(cx, 1024, PageSize::Size4K, false).expect("an object");
        let spaces = [0, 1].map(|_| rig.vm.create(cx, bounds()).expect("a space"));
        let [first, second] = spaces;
        rig.vm.map(cx, &first, span(AT, 0x10_0000), SMALL, Backing::Shared(&object, 0)).expect("an area");
        rig.vm.map(cx, &second, span(2 * AT, 0x8_0000), SMALL, Backing::Shared(&object, 0x40)).expect("an area");
        let beyond = rig.vm.map(cx, &second, span(3 * AT, 0x10_0000), SMALL, Backing::Shared(&object, 1000));
        assert!(matches!(beyond, Err(VmError::OutOfBounds { .. })));
        rig.enter(cx, &first);
        rig.store(cx, &first, AT + 0x4_2000, 5).expect("a page");
        rig.enter(cx, &second);
        rig.leave(cx, &first);
        assert_eq!(rig.load(cx, &second, 2 * AT + 0x2000), Ok(5), "page 0x42 of the object");
        rig.store(cx, &second, 2 * AT + 0x3000, 6).expect("a page");
        rig.leave(cx, &second);
        // The reverse map finds both.
        let frame = rig.vm.lookup(cx, &second, VirtAddr::new(2 * AT + 0x2000));
        let hugemm_paging::Lookup::Mapped(leaf) = frame else { panic!("mapped") };
        let mut places = Vec::new();
        assert_eq!(rig.vm.walk_mappings(cx, leaf.frame, |_, place| places.push(place.at.get())), 2);
        places.sort_unstable();
        assert_eq!(places, [AT + 0x4_2000, 2 * AT + 0x2000]);
        rig.end_shown(cx, (object, second));
        rig.enter(cx, &first);
        assert_eq!(rig.load(cx, &first, AT + 0x4_3000), Ok(6), "what the other wrote is there");
        rig.end(cx, first);
    });
}

/// Promised pages are there when they are faulted in, nobody else gets them, and what was never used is given back.
#[test]
fn pools_keep_their_promises() {
    with_cpu(32, 1, 6, |rig, cx| {
        rig.fill_pool(cx, 4);
        let kind = VmaKind::private(PageSize::Size2M).pooled();
        let space = rig.space(cx, span(AT, 6 << 20), kind);
        let more = rig.vm.map(cx, &space, span(2 * AT, 4 << 20), kind, Backing::Private);
        assert_eq!(more, Err(VmError::NoPool), "one page is left");
        assert_eq!(rig.pool_available(cx), 1);
        rig.enter(cx, &space);
        rig.store(cx, &space, AT, 1).expect("promised");
        rig.store(cx, &space, AT + (4 << 20), 1).expect("promised");
        assert_eq!(rig.pool_available(cx), 1);
        rig.vm.unmap(cx, &space, span(AT + (2 << 20), 4 << 20)).expect("unmapped");
        assert_eq!(rig.pool_available(cx), 3, "one page came back, one promise was never used");
        let object = rig.vm.create_shared(cx, 3 * 512, PageSize::Size2M, true).expect("three pages");
        let shared = with!(kind, shared = true);
        rig.vm.map(cx, &space, span(2 * AT, 6 << 20), shared, Backing::Shared(&object, 0)).expect("an area");
        rig.store(cx, &space, 2 * AT, 1).expect("promised");
        rig.vm.close(cx, object).expect("its own");
        rig.end(cx, space);
        assert_eq!(rig.pool_available(cx), 4);
    });
}

/// A fault that cannot be served asks for relief, then fails that one access; the space goes on.
#[test]
fn out_of_memory_fails_one_access() {
    with_cpu(8, 1, 7, |rig, cx| {
        let kind = VmaKind::private(PageSize::Size2M);
        let space = rig.space(cx, span(AT, 16 << 20), kind);
        rig.enter(cx, &space);
        let mut stored = 0;
        let error = loop {
            match rig.store(cx, &space, AT + (stored << 21), stored) {
                Ok(()) => stored += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(error, VmError::NoMemory);
        assert!((2..4).contains(&stored), "{stored} pages of 8 MiB");
        for page in 0..stored {
            assert_eq!(rig.load(cx, &space, AT + (page << 21)), Ok(page));
        }
        rig.vm.unmap(cx, &space, span(AT, 2 << 20)).expect("unmapped");
        rig.store(cx, &space, AT + (stored << 21), 9).expect("there is memory again");
        rig.end(cx, space);
    });
}

/// Parent and child see the same until one writes; each then sees its own; one flush, and no copy for the last user.
#[test]
fn forks_share_until_somebody_writes() {
    for page in [PageSize::Size4K, PageSize::Size2M] {
        with_cpu(48, 2, 8, |rig, cx| {
            let parent = rig.space(cx, span(AT, 8 << 20), VmaKind::private(page));
            rig.enter(cx, &parent);
            let at = |index: u64| AT + index * page.bytes();
            for index in 0..4 {
                rig.store(cx, &parent, at(index), 100 + index).expect("a page");
            }
            let before = rig.flushes();
            let child = rig.vm.fork(cx, &parent).expect("forked");
            assert_eq!(rig.flushes() - before, 1);
            rig.store(cx, &parent, at(0), 1).expect("a copy");
            assert_eq!(parent.counters().copied, 1);
            rig.enter(cx, &child);
            rig.leave(cx, &parent);
            for index in 0..4 {
                assert_eq!(rig.load(cx, &child, at(index)), Ok(100 + index));
            }
            rig.store(cx, &child, at(1), 2).expect("a copy");
            rig.store(cx, &child, at(0), 3).expect("the only user");
            assert_eq!((child.counters().copied, child.counters().reused), (1, 1));
            rig.enter(cx, &parent);
            rig.leave(cx, &child);
            assert_eq!([0, 1, 2, 3].map(|index| rig.load(cx, &parent, at(index)).expect("there")), [1, 101, 102, 103]);
            rig.vm.destroy(cx, child).expect("destroyed");
            rig.store(cx, &parent, at(2), 4).expect("the only user");
            assert_eq!(parent.counters().reused, 1);
            rig.end(cx, parent);
        });
    }
}

/// Sixteen children share a page: more references than its packed count holds.
#[test]
fn many_children_share_a_page() {
    with_cpu(16, 1, 9, |rig, cx| {
        let parent = rig.space(cx, span(AT, 0x1000), SMALL);
        rig.enter(cx, &parent);
        rig.store(cx, &parent, AT, 42).expect("a page");
        rig.leave(cx, &parent);
        let children: Vec<_> = (0..20).map(|_| rig.vm.fork(cx, &parent).expect("forked")).collect();
        for child in children {
            rig.enter(cx, &child);
            assert_eq!(rig.load(cx, &child, AT), Ok(42));
            rig.end(cx, child);
        }
        // The counters' frame stays.
        rig.keep(1);
        rig.vm.destroy(cx, parent).expect("destroyed");
    });
}

/// What a device writes to is what the space sees, across forks; the child gets a copy.
#[test]
fn pinned_pages_stay_where_they_are() {
    for page in [PageSize::Size4K, PageSize::Size2M] {
        with_cpu(48, 1, 10, |rig, cx| {
            let parent = rig.space(cx, span(AT, 8 << 20), VmaKind::private(page));
            rig.enter(cx, &parent);
            rig.store(cx, &parent, AT, 1).expect("a page");
            // Shared by a fork before: the pin makes it the parent's own.
            let early = rig.vm.fork(cx, &parent).expect("forked");
            let pinned = rig.pin(cx, &parent, span(AT, 4 << 20));
            assert_eq!(pinned.iter().map(|run| run.extent().pages()).sum::<u64>(), 1024);
            rig.store(cx, &parent, AT + (6 << 20), 5).expect("a page");
            let late = rig.vm.fork(cx, &parent).expect("forked");
            let frame = |cx: &mut _, space: &_| rig.vm.lookup(cx, space, VirtAddr::new(AT + (6 << 20)));
            let [Lookup::Mapped(own), Lookup::Mapped(childs)] = [frame(cx, &parent), frame(cx, &late)] else {
                panic!("mapped")
            };
            assert_eq!(own.frame, childs.frame, "what is not pinned is shared");
            // The device.
            let first = rig.mmu.host().address(pinned[0].extent().base()).expect("memory");
            // SAFETY: the first word of a pinned page, which is nobody else's.
            unsafe { first.cast::<u64>().write(77) };
            assert_eq!(rig.load(cx, &parent, AT), Ok(77));
            rig.store(cx, &parent, AT, 78).expect("mapped");
            // SAFETY: as above.
            assert_eq!(unsafe { first.cast::<u64>().read() }, 78);
            for child in [early, late] {
                rig.enter(cx, &child);
                assert_eq!(rig.load(cx, &child, AT), Ok(1));
                rig.end(cx, child);
            }
            rig.enter(cx, &parent);
            rig.leave(cx, &parent);
            rig.vm.unmap(cx, &parent, span(AT, 8 << 20)).expect("unmapped");
            assert!(rig.used(cx) >= 1024, "pinned pages outlive their mapping");
            rig.unpin(cx, &parent, pinned);
            rig.vm.destroy(cx, parent).expect("destroyed");
        });
    }
}

/// Every page of a range is filled once, whatever was there, by several CPUs; huge requests are cleared past the cache.
#[test]
fn prefault_fills_what_is_missing() {
    for page in [PageSize::Size4K, PageSize::Size2M] {
        with_rig(64, 4, 11, &no_faults(), |rig| {
            let space = rig.on(0, |cx| {
                let kind = VmaKind::private(page);
                let space = rig.space(cx, span(AT, 20 << 20), kind);
                rig.vm.map(cx, &space, span(AT + (20 << 20), 16 << 20), kind, Backing::Private).expect("an area");
                rig.enter(cx, &space);
                rig.store(cx, &space, AT + 0x70_1230, 5).expect("a page");
                rig.leave(cx, &space);
                space
            });
            let range = span(AT + (2 << 20), 32 << 20);
            let prefault = rig.vm.prefault(&space, range, None);
            std::thread::scope(|scope| {
                for cpu in 0..4 {
                    let prefault = &prefault;
                    scope.spawn(move || rig.beside_others(cpu, |cx| prefault.work(cx, &Never)).expect("memory"));
                }
            });
            assert_eq!(prefault.done(), range.pages());
            rig.on(0, |cx| {
                for at in (0..32 << 20).step_by(4096) {
                    let at = VirtAddr::new(range.start().get() + at);
                    assert!(matches!(rig.vm.lookup(cx, &space, at), Lookup::Mapped(_)), "{at}");
                }
                let beyond = rig.vm.lookup(cx, &space, VirtAddr::new(AT));
                assert_eq!(beyond, Lookup::Absent, "only the range");
                rig.enter(cx, &space);
                assert_eq!(rig.load(cx, &space, AT + 0x70_1230), Ok(5), "what was there stays");
                assert_eq!(rig.load(cx, &space, AT + 0x70_2230), Ok(0));
                rig.end(cx, space);
            });
        });
    }
}

/// The fallocate path: an object that is mapped nowhere is filled, and faults find its pages.
#[test]
fn objects_are_filled_without_being_mapped() {
    with_cpu(32, 2, 12, |rig, cx| {
        let object = rig.vm.create_shared(cx, 4096, PageSize::Size2M, false).expect("an object");
        let used = rig.used(cx);
        let prefault = rig.vm.prefault_shared(&object, 1024, 3072);
        prefault.work(cx, &Never).expect("memory");
        assert_eq!(prefault.done(), 2048);
        assert!((2048..2052).contains(&(rig.used(cx) - used)));
        let space = rig.vm.create(cx, bounds()).expect("a space");
        let kind = VmaKind::private(PageSize::Size2M);
        rig.vm.map(cx, &space, span(AT, 16 << 20), kind, Backing::Shared(&object, 0)).expect("an area");
        let cleared = rig.on(0, |cx| cx.platform().counters().snapshot());
        rig.enter(cx, &space);
        assert_eq!(rig.load(cx, &space, AT + (4 << 20) + 8), Ok(0));
        let after = rig.on(0, |cx| cx.platform().counters().snapshot());
        assert_eq!(after.since(cleared).units, 0, "nothing was cleared again");
        rig.end(cx, space);
        rig.vm.close(cx, object).expect("its own");
    });
}

/// Tables that small pages leave behind do not break up the huge pages that come after them.
#[test]
fn a_huge_page_is_one_entry() {
    with_cpu(16, 1, 13, |rig, cx| {
        let small = SMALL;
        let space = rig.space(cx, span(AT, 0x10_0000), small);
        rig.enter(cx, &space);
        rig.store(cx, &space, AT, 1).expect("a page");
        rig.vm.unmap(cx, &space, span(AT, 0x10_0000)).expect("unmapped");
        let large = VmaKind::private(PageSize::Size2M);
        rig.vm.map(cx, &space, span(AT, 2 << 20), large, Backing::Private).expect("an area");
        rig.store(cx, &space, AT + 0x1000, 2).expect("a page");
        let found = rig.vm.lookup(cx, &space, VirtAddr::new(AT + 0x1000));
        assert!(matches!(found, Lookup::Mapped(leaf) if leaf.size == PageSize::Size2M), "{found:?}");
        rig.end(cx, space);
    });
}

/// An area that is taken away while a fault clears a page for it gets no page.
#[test]
fn a_fault_looks_again_before_it_maps() {
    with_cpu(16, 2, 14, |rig, cx| {
        let area = span(AT, 0x1000);
        let space = rig.space(cx, area, SMALL);
        let meanwhile = |phase| {
            if phase == Phase::Map {
                rig.on(1, |cx| rig.vm.unmap(cx, &space, area)).expect("unmapped");
            }
        };
        let at = VirtAddr::new(AT);
        let served = rig.vm.fault_observed(cx, &space, at, Access::Write, &meanwhile);
        assert_eq!(served, Ok(Served::Meanwhile));
        assert_eq!(rig.vm.lookup(cx, &space, at), Lookup::Absent);
        assert_eq!(space.counters().wasted, 1);
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// A machine of more CPUs than a mask's word has bits: each has its place, in every space.
#[test]
fn a_space_is_used_on_many_cpus() {
    const CPUS: u32 = 150;
    with_rig(16, CPUS, 15, &no_faults(), |rig| {
        let spaces = rig.on(0, |cx| [0, 1, 2].map(|_| rig.space(cx, span(AT, 0x1000), SMALL)));
        for cpu in 0..CPUS {
            rig.on(cpu, |cx| {
                let space = &spaces[cpu as usize % 3];
                rig.enter(cx, space);
                rig.store(cx, space, AT + u64::from(cpu) * 8, u64::from(cpu) + 1).expect("memory");
            });
        }
        rig.on(0, |cx| {
            for space in &spaces {
                rig.vm.unmap(cx, space, span(AT, 0x1000)).expect("unmapped");
            }
        });
        for cpu in 0..CPUS {
            let found = rig.mmu.load(CpuId::new(cpu), VirtAddr::new(AT));
            assert!(found.is_err(), "cpu{cpu} has been flushed");
            rig.on(cpu, |cx| rig.leave(cx, &spaces[cpu as usize % 3]));
        }
        rig.on(0, |cx| {
            for space in spaces {
                rig.vm.destroy(cx, space).expect("destroyed");
            }
        });
    });
}

/// A space may lie in either half of the addresses, anywhere in it.
#[test]
fn a_space_lies_where_it_is_asked_for() {
    with_cpu(8, 1, 16, |rig, cx| {
        for start in [AT, 3 << 39, 0xffff_8000_0000_0000, 0xffff_ffff_c000_0000] {
            let space = rig.vm.create(cx, span(start, 1 << 30)).expect("within one half");
            rig.vm.map(cx, &space, span(start, 1 << 30), SMALL, Backing::Private).expect("all of it");
            for at in [start, start + ((1 << 30) - 0x1000)].map(VirtAddr::new) {
                assert_eq!(rig.vm.fault(cx, &space, at, Access::Write), Ok(Served::Mapped));
                assert!(matches!(rig.vm.lookup(cx, &space, at), Lookup::Mapped(_)));
            }
            rig.vm.destroy(cx, space).expect("destroyed");
        }
    });
}

/// Pages that lie behind each other in the pool are filled in as one run, and each of them keeps a promise of its own: the
/// promise of another area goes back to the pool with that one.
#[test]
fn pages_that_adjoin_keep_a_promise_each() {
    with_cpu(16, 1, 18, |rig, cx| {
        rig.fill_pool(cx, 3);
        let kind = VmaKind::private(PageSize::Size2M).pooled();
        let space = rig.space(cx, span(AT, 4 << 20), kind);
        rig.vm.map(cx, &space, span(2 * AT, 2 << 20), kind, Backing::Private).expect("promised");
        rig.vm.prefault(&space, span(AT, 4 << 20), None).work(cx, &Never).expect("promised");
        rig.vm.unmap(cx, &space, span(2 * AT, 2 << 20)).expect("unmapped");
        assert_eq!(rig.pool_available(cx), 1);
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// The same with pages from the pool: the page goes back, and no promise is left or returned twice.
#[test]
fn a_promised_page_whose_area_has_gone_goes_back() {
    for pages in [1, 2] {
        with_cpu(16, 2, 16, |rig, cx| {
            rig.fill_pool(cx, 3);
            let area = span(AT, pages * PageSize::Size2M.bytes());
            let kind = VmaKind::private(PageSize::Size2M).pooled();
            let space = rig.space(cx, area, kind);
            let meanwhile = |phase| {
                if phase == Phase::Map {
                    rig.on(1, |cx| rig.vm.unmap(cx, &space, area)).expect("unmapped");
                }
            };
            let served = rig.vm.fault_observed(cx, &space, VirtAddr::new(AT), Access::Write, &meanwhile);
            assert_eq!(served, Ok(Served::Meanwhile));
            assert_eq!(rig.pool_available(cx), 3);
            rig.vm.destroy(cx, space).expect("destroyed");
        });
    }
}

/// A promise that cannot be kept, because the page went bad, is an error for whoever comes last, and not a wait: at a fault, when
/// a range is filled, and when an object is.
#[test]
fn a_promise_that_poison_broke_is_an_error() {
    for way in 0..3 {
        with_cpu(16, 1, 19, |rig, cx| {
            rig.fill_pool(cx, 2);
            let space = rig.vm.create(cx, bounds()).expect("a space");
            let kind = VmaKind::private(PageSize::Size2M).pooled();
            let area = span(AT, 4 << 20);
            let object = (way == 2).then(|| rig.vm.create_shared(cx, 1024, kind.page, true).expect("promised"));
            let backing = object.as_ref().map_or(Backing::Private, |object| Backing::Shared(object, 0));
            rig.vm.map(cx, &space, area, kind, backing).expect("promised");
            let bad = rig.pool.take(cx, Nodes::All, true).expect("promised");
            let frame = bad.extent().base();
            rig.pool.put(cx, bad, true).expect("its own");
            rig.pool.note_hwpoison(cx, frame).expect("its own");
            let (filled, done) = match &object {
                _ if way == 0 => {
                    assert_eq!(rig.vm.fault(cx, &space, area.start(), Access::Write), Ok(Served::Mapped));
                    let second = VirtAddr::new(AT + kind.page.bytes());
                    (rig.vm.fault(cx, &space, second, Access::Write).map(|_| ()), 512)
                }
                None => {
                    let filling = rig.vm.prefault(&space, area, None);
                    (filling.work(cx, &Never), filling.done())
                }
                Some(object) => {
                    let filling = rig.vm.prefault_shared(object, 0, 1024);
                    (filling.work(cx, &Never), filling.done())
                }
            };
            assert_eq!((filled, done), (Err(VmError::NoPool), 512));
            rig.vm.destroy(cx, space).expect("destroyed");
            object.into_iter().for_each(|object| rig.vm.close(cx, object).expect("its own"));
        });
    }
}

/// What an area is backed by says the mapping, whatever the kind said that was asked for: it may be that of another area.
#[test]
fn a_kind_says_what_an_area_is_backed_by() {
    with_cpu(16, 1, 20, |rig, cx| {
        rig.fill_pool(cx, 2);
        let space = rig.vm.create(cx, bounds()).expect("a space");
        let asked = with!(VmaKind::private(PageSize::Size2M), shared = true, reserved = true);
        let area = span(AT, 2 << 20);
        let private = rig.vm.map(cx, &space, area, asked, Backing::Private).expect("an area").kind;
        assert_eq!((private.shared, private.reserved), (false, false));
        let object = rig.vm.create_shared(cx, 512, PageSize::Size2M, true).expect("promised");
        let (area, asked) = (span(2 * AT, 2 << 20), asked.pooled());
        let shared = rig.vm.map(cx, &space, area, asked, Backing::Shared(&object, 0)).expect("an area").kind;
        assert_eq!((shared.shared, shared.reserved), (true, false));
        assert_eq!(rig.vm.fault(cx, &space, area.start(), Access::Write), Ok(Served::Mapped));
        assert_eq!(rig.pool.counts(cx).reserved, 0, "the promise is kept");
        rig.end_shown(cx, (object, space));
    });
}

/// Two areas that adjoin show pages of an object that adjoin: each page is at one place.
#[test]
fn a_page_is_where_its_area_is() {
    with_cpu(8, 1, 21, |rig, cx| {
        let space = rig.vm.create(cx, bounds()).expect("a space");
        let object = rig.vm.create_shared(cx, 8, PageSize::Size4K, false).expect("an object");
        for offset in [0, 4] {
            let part = span(AT + (offset << 12), 0x4000);
            rig.vm.map(cx, &space, part, SMALL, Backing::Shared(&object, offset)).expect("an area");
        }
        rig.vm.prefault(&space, span(AT, 0x8000), None).work(cx, &Never).expect("memory");
        for page in 0..8 {
            let at = VirtAddr::new(AT + (page << 12));
            let Lookup::Mapped(leaf) = rig.vm.lookup(cx, &space, at) else { panic!("mapped") };
            assert_eq!(rig.vm.walk_mappings(cx, leaf.frame, |_, place| assert_eq!(place.at, at)), 1);
        }
        rig.end_shown(cx, (object, space));
    });
}

/// An area of small pages takes tables over that are there: nobody is flushed.
#[test]
fn an_area_is_made_without_a_flush() {
    with_cpu(8, 1, 22, |rig, cx| {
        let space = rig.space(cx, span(AT, 0x1000), SMALL);
        rig.enter(cx, &space);
        rig.store(cx, &space, AT, 1).expect("a page");
        rig.vm.unmap(cx, &space, span(AT, 0x1000)).expect("unmapped");
        let before = rig.vm.shootdown().counts();
        rig.vm.map(cx, &space, span(AT, 2 << 20), SMALL, Backing::Private).expect("an area");
        assert_eq!(rig.vm.shootdown().counts().since(before).flushes(), 0);
        rig.end(cx, space);
    });
}

/// What no pager knows of is dropped as a range: it is one block again at once, and goes through no CPU's cache page by page.
#[test]
fn what_is_unmapped_is_freed_as_a_range() {
    with_cpu(16, 1, 93, |rig, cx| {
        let area = span(AT, 2 << 20);
        let space = rig.space(cx, area, SMALL);
        rig.vm.prefault(&space, area, None).work(cx, &Never).expect("memory");
        let before = rig.vm.frames().stats(cx).cached;
        rig.vm.unmap(cx, &space, area).expect("in the space");
        let after = rig.vm.frames().stats(cx).cached;
        assert!(after < before + 8, "{before} frames were cached, and now {after}");
        rig.end(cx, space);
    });
}
