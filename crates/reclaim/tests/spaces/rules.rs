//! One CPU, one rule each.

use crate::rig::{Follower, Handle, NODE, Rig, Size, bounds, no_faults, span, with_rig};
use hugemm_base::inject::every_fault;
use hugemm_base::{CpuId, Never, NodeId, Order, PageSize, Pfn, Shortfall, VirtAddr, VirtRange};
use hugemm_frames::{AllocRequest, HwPoisoned, Placement};
use hugemm_paging::{Flags, Lookup, ShootdownBatch, ShootdownPolicy};
use hugemm_reclaim::{Ageing, LruPolicy, ShrinkBudget, Swap, Turn};
use hugemm_vm::{Backing, Notifier, Pager, VmError, VmaKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const AT: u64 = 0x4000_0000;
const SIZE: Size = Size { mib: 16, swap: 2000, cpus: 2, policy: LruPolicy::Generations, nodes: 1 };
const SIZES: [PageSize; 2] = [PageSize::Size4K, PageSize::Size2M];

fn filled<'v, 'h>(rig: &'v Rig<'h>, cx: &mut crate::rig::Cx<'_, 'h>, page: PageSize, pages: u64) -> Handle<'v, 'h> {
    let space = rig.vm.create(cx, bounds()).expect("a space");
    let area = span(AT, pages * page.bytes());
    rig.vm.map(cx, &space, area, VmaKind::private(page), Backing::Private).expect("an area");
    rig.enter(cx, &space);
    for index in 0..pages {
        rig.put(cx, &space, AT + index * page.bytes() + 8, index + 1).expect("memory");
    }
    space
}

fn expect(rig: &Rig<'_>, away: bool, found: Lookup) {
    let _ = rig;
    assert_eq!(matches!(found, Lookup::Owner(_)), away, "{found:?}");
}

#[test]
fn private_pages_go_away_and_come_back() {
    for page in SIZES {
        let pages = if page == PageSize::Size4K { 100 } else { 3 };
        with_rig(SIZE, 1, &no_faults(), |rig| {
            rig.mmu.as_cpu(CpuId(0), |cx| {
                let space = filled(rig, cx, page, pages);
                let before = rig.vm.frames().stats(cx).available();
                // Young at first, idle after that.
                let freed = rig.evict_all(cx) + rig.evict_all(cx) + rig.evict_all(cx);
                assert_eq!(freed, pages * page.pages());
                assert!(rig.vm.frames().stats(cx).available() > before);
                for index in 0..pages {
                    expect(rig, true, rig.vm.lookup(cx, &space, VirtAddr::new(AT + index * page.bytes())));
                }
                for index in 0..pages {
                    assert_eq!(rig.get(cx, &space, AT + index * page.bytes() + 8), Ok(index + 1));
                    assert_eq!(rig.get(cx, &space, AT + index * page.bytes() + 16), Ok(0));
                    rig.put(cx, &space, AT + index * page.bytes() + 16, 7).expect("writable");
                }
                assert_eq!(space.counters().refaulted.get(), pages);
                assert_eq!(rig.store.stats(cx).pages, 0, "a slot goes with its page");
                rig.leave(cx, &space);
                rig.vm.destroy(cx, space).expect("destroyed");
            });
        });
    }
}

#[test]
fn unmapping_what_is_away_frees_its_slots() {
    for page in SIZES {
        with_rig(SIZE, 2, &no_faults(), |rig| {
            rig.mmu.as_cpu(CpuId(0), |cx| {
                let space = filled(rig, cx, page, 3);
                (0..3).for_each(|_| _ = rig.evict_all(cx));
                assert!(rig.store.stats(cx).stores > 0);
                rig.vm.unmap(cx, &space, span(AT + page.bytes(), page.bytes())).expect("unmapped");
                assert_eq!(rig.get(cx, &space, AT + 8), Ok(1));
                assert_eq!(
                    rig.get(cx, &space, AT + page.bytes() + 8),
                    Err(VmError::NoArea { at: VirtAddr::new(AT + page.bytes() + 8) })
                );
                assert_eq!(rig.get(cx, &space, AT + 2 * page.bytes() + 8), Ok(3));
                // One stays away: its slot goes with the space.
                (0..3).for_each(|_| _ = rig.evict_all(cx));
                rig.leave(cx, &space);
                rig.vm.destroy(cx, space).expect("destroyed");
            });
        });
    }
}

#[test]
fn a_fork_shares_what_is_away_and_each_gets_its_own() {
    for page in SIZES {
        with_rig(SIZE, 3, &no_faults(), |rig| {
            rig.mmu.as_cpu(CpuId(0), |cx| {
                let parent = filled(rig, cx, page, 2);
                (0..3).for_each(|_| _ = rig.evict_all(cx));
                let stored = rig.store.stats(cx);
                let child = rig.vm.fork(cx, &parent).expect("forked");
                assert_eq!(rig.store.stats(cx).stores, stored.stores, "nothing is stored twice");
                rig.put(cx, &parent, AT + 8, 100).expect("memory");
                rig.leave(cx, &parent);
                rig.enter(cx, &child);
                assert_eq!(rig.get(cx, &child, AT + 8), Ok(1));
                assert_eq!(rig.get(cx, &child, AT + page.bytes() + 8), Ok(2));
                rig.leave(cx, &child);
                // Shared by fork while present: stored once, found by both.
                let grandchild = rig.vm.fork(cx, &child).expect("forked");
                let stores = rig.store.stats(cx).stores;
                (0..4).for_each(|_| _ = rig.evict_all(cx));
                // The child's two pages, which the grandchild shares, and the parent's own.
                assert_eq!(rig.store.stats(cx).stores - stores, 3 * page.pages());
                for space in [&child, &grandchild] {
                    rig.enter(cx, space);
                    assert_eq!(rig.get(cx, space, AT + 8), Ok(1));
                    rig.put(cx, space, AT + 8, 55).expect("its own");
                    rig.leave(cx, space);
                }
                for space in [parent, child, grandchild] {
                    rig.vm.destroy(cx, space).expect("destroyed");
                }
            });
        });
    }
}

#[test]
fn a_shared_page_is_stored_once_and_read_once() {
    for page in SIZES {
        with_rig(SIZE, 4, &no_faults(), |rig| {
            rig.mmu.as_cpu(CpuId(0), |cx| {
                let object = rig.vm.create_shared(cx, 2 * page.pages(), page, false).expect("an object");
                let spaces: Vec<_> = (0..5)
                    .map(|_| {
                        let space = rig.vm.create(cx, bounds()).expect("a space");
                        let from = Backing::Shared(&object, 0);
                        rig.vm
                            .map(cx, &space, span(AT, 2 * page.bytes()), VmaKind::private(page), from)
                            .expect("an area");
                        space
                    })
                    .collect();
                for (value, space) in (1..).zip(&spaces) {
                    rig.enter(cx, space);
                    rig.put(cx, space, AT + value * 8, value).expect("memory");
                    rig.leave(cx, space);
                }
                (0..3).for_each(|_| _ = rig.evict_all(cx));
                let stats = rig.store.stats(cx);
                assert_eq!((stats.stores, stats.loads), (page.pages(), 0));
                for space in &spaces {
                    rig.enter(cx, space);
                    for value in 1..=5 {
                        assert_eq!(rig.get(cx, space, AT + value * 8), Ok(value));
                    }
                    rig.leave(cx, space);
                }
                assert_eq!(rig.store.stats(cx).loads, page.pages(), "one read serves all");
                // Away again, and the object goes with what is in swap.
                (0..3).for_each(|_| _ = rig.evict_all(cx));
                for space in spaces {
                    rig.vm.destroy(cx, space).expect("destroyed");
                }
                assert!(rig.store.stats(cx).pages > 0);
                rig.vm.close(cx, object).expect("its own");
            });
        });
    }
}

/// Whatever the way, the same pages are found young; only the flushing ways flush.
#[test]
fn ageing_flushes_nothing_at_any_leaf_size() {
    for (page, way) in SIZES.into_iter().flat_map(|page| Ageing::ALL.map(|way| (page, way))) {
        with_rig(SIZE, 5, &no_faults(), |rig| {
            rig.mmu.as_cpu(CpuId(0), |cx| {
                let object = rig.vm.create_shared(cx, 4 * page.pages(), page, false).expect("an object");
                let spaces: Vec<_> = (0..3)
                    .map(|_| {
                        let space = rig.vm.create(cx, bounds()).expect("a space");
                        let from = Backing::Shared(&object, 0);
                        rig.vm
                            .map(cx, &space, span(AT, 4 * page.bytes()), VmaKind::private(page), from)
                            .expect("an area");
                        rig.enter(cx, &space);
                        for index in 0..4 {
                            rig.put(cx, &space, AT + index * page.bytes(), index).expect("memory");
                        }
                        rig.leave(cx, &space);
                        space
                    })
                    .collect();
                let pager = rig.vm.pager();
                pager.set_ageing(way);
                let flushed = rig.vm.shootdown().counts();
                let budget = ShrinkBudget { free: u64::MAX, scan: 4 * page.pages() };
                let progress = pager.shrink(&rig.vm, cx, NODE, budget, &Never);
                assert_eq!(progress.freed, 0, "all are young");
                assert_eq!(pager.counts().young.get(), 12, "3 mappings of 4 pages");
                let flushes = pager.counts().age_flushes.get();
                match way {
                    Ageing::Flush | Ageing::NoSync => assert_eq!(flushes, 12),
                    Ageing::NoFlush | Ageing::Batch => assert_eq!(flushes, 0),
                }
                if way != Ageing::Flush {
                    assert_eq!(rig.vm.shootdown().counts(), flushed, "no TLB was touched");
                }
                for space in spaces {
                    rig.vm.destroy(cx, space).expect("destroyed");
                }
                rig.vm.close(cx, object).expect("its own");
            });
        });
    }
}

/// Neighbours are harvested once each, in all mappings.
#[test]
fn look_around_takes_a_page_with_all_its_mappings() {
    const PAGES: u64 = 64;
    with_rig(SIZE, 6, &no_faults(), |rig| {
        rig.mmu.as_cpu(CpuId(0), |cx| {
            let object = rig.vm.create_shared(cx, PAGES, PageSize::Size4K, false).expect("an object");
            let kind = VmaKind::private(PageSize::Size4K);
            let spaces = [(); 3].map(|()| {
                let space = rig.vm.create(cx, bounds()).expect("a space");
                let all = span(AT, PAGES << 12);
                rig.vm.map(cx, &space, all, kind, Backing::Shared(&object, 0)).expect("an area");
                rig.enter(cx, &space);
                (0..PAGES).for_each(|page| rig.put(cx, &space, AT + (page << 12), page).expect("memory"));
                rig.leave(cx, &space);
                space
            });
            let pager = rig.vm.pager();
            let look =
                |cx: &mut _, scan| pager.shrink(&rig.vm, cx, NODE, ShrinkBudget { free: u64::MAX, scan }, &Never);
            assert_eq!(look(cx, 32).freed, 0, "all are young");
            assert_eq!(pager.counts().young.get(), 3 * 32);
            assert_eq!(pager.counts().around.get(), 32, "the other half, once each");
            look(cx, PAGES);
            assert_eq!(pager.counts().young.get(), 3 * 32, "nobody has used one since");
            assert_eq!(pager.counts().around.get(), 32);
            for space in spaces {
                rig.vm.destroy(cx, space).expect("destroyed");
            }
            rig.vm.close(cx, object).expect("its own");
        });
    });
}

/// Makes the CPU forget the space's translations: what is used from then on shows in the tables.
fn forget<'h>(rig: &Rig<'h>, cx: &mut crate::rig::Cx<'_, 'h>, space: &Handle<'_, 'h>) {
    let mut batch = ShootdownBatch::new(space.tlb());
    batch.changed(span(AT, 1 << 30), PageSize::Size4K);
    let _ = batch.flush(rig.vm.shootdown(), cx, &ShootdownPolicy::BATCHED);
}

/// Others may take accessed bits too, and flush nothing. Speculation may set more than was used, never fewer.
#[test]
fn a_working_set_is_what_was_used_since_the_last_look() {
    for page in SIZES {
        with_rig(SIZE, 6, &no_faults(), |rig| {
            rig.mmu.as_cpu(CpuId(0), |cx| {
                let space = filled(rig, cx, page, 4);
                let at = |index: u64| AT + index * page.bytes();
                let all = span(AT, 4 * page.bytes());
                let look = |cx: &mut _, range| {
                    let mut runs = Vec::new();
                    let flushed = rig.vm.shootdown().counts();
                    let pages =
                        rig.vm.test_and_clear_young(cx, &space, range, |run| runs.push(run)).expect("in the space");
                    assert_eq!(rig.vm.shootdown().counts(), flushed, "no TLB was touched");
                    assert_eq!(runs.iter().map(|run| run.pages()).sum::<u64>(), pages);
                    assert!(runs.is_sorted_by_key(|run| run.first_page()));
                    runs
                };
                assert_eq!(look(cx, all), [all]);
                forget(rig, cx, &space);
                for index in [0, 2, 3] {
                    assert!(rig.get(cx, &space, at(index)).is_ok());
                }
                let runs = look(cx, all);
                let shown = |page: u64| runs.iter().any(|run| (run.first_page()..run.end_page()).contains(&page));
                assert!([0, 2, 3].into_iter().all(|index| shown(at(index) >> 12)), "{runs:?}");
                // A part of a page is used as far as it was asked for.
                forget(rig, cx, &space);
                assert!(rig.get(cx, &space, at(1)).is_ok());
                assert_eq!(look(cx, span(at(2) - 4096, 4096)), [span(at(2) - 4096, 4096)]);
                assert!(rig.vm.test_and_clear_young(cx, &space, span(0, 1 << 48), |_| ()).is_err());
                rig.leave(cx, &space);
                rig.vm.destroy(cx, space).expect("destroyed");
            });
        });
    }
}

/// What somebody else found used is young for reclaim.
#[test]
fn reclaim_is_told_of_bits_that_others_take() {
    with_rig(Size { policy: LruPolicy::Generations, ..SIZE }, 6, &no_faults(), |rig| {
        rig.mmu.as_cpu(CpuId(0), |cx| {
            let space = filled(rig, cx, PageSize::Size4K, 64);
            let shrink = |cx: &mut _, free, scan| {
                rig.vm.pager().shrink(&rig.vm, cx, NODE, ShrinkBudget { free, scan }, &Never).freed
            };
            assert_eq!(shrink(cx, u64::MAX, 32), 0, "all are young, half by look-around");
            forget(rig, cx, &space);
            // Those that reclaim would look at first.
            let used = 32..64;
            used.clone().for_each(|index| assert!(rig.get(cx, &space, AT + (index << 12)).is_ok()));
            let taken = rig.vm.test_and_clear_young(cx, &space, span(AT, 64 << 12), |_| ()).expect("in the space");
            assert!((32..=48).contains(&taken), "{taken}");
            assert_eq!(shrink(cx, 16, 1 << 10), 16);
            for index in used {
                let at = VirtAddr::new(AT + (index << 12));
                assert!(matches!(rig.vm.lookup(cx, &space, at), Lookup::Mapped(_)), "page {index} was used");
            }
            rig.leave(cx, &space);
            rig.vm.destroy(cx, space).expect("destroyed");
        });
    });
}

/// Locked pages stay; areas without recency do not count.
#[test]
fn areas_say_what_counts() {
    with_rig(SIZE, 6, &no_faults(), |rig| {
        rig.mmu.as_cpu(CpuId(0), |cx| {
            let space = rig.vm.create(cx, bounds()).expect("a space");
            let kind = VmaKind::private(PageSize::Size4K);
            rig.vm.map(cx, &space, span(AT, 8 << 12), VmaKind { locked: true, ..kind }, Backing::Private).expect("one");
            let other = VmaKind { no_recency: true, ..kind };
            rig.vm.map(cx, &space, span(2 * AT, 8 << 12), other, Backing::Private).expect("two");
            rig.enter(cx, &space);
            for index in 0..8 {
                rig.put(cx, &space, AT + (index << 12), 1).expect("memory");
                rig.put(cx, &space, 2 * AT + (index << 12), 1).expect("memory");
            }
            // Idle at the first look although just used.
            assert_eq!(rig.evict_all(cx), 8);
            (0..3).for_each(|_| assert_eq!(rig.evict_all(cx), 0));
            for index in 0..8 {
                assert!(matches!(rig.vm.lookup(cx, &space, VirtAddr::new(AT + (index << 12))), Lookup::Mapped(_)));
                assert_eq!(rig.get(cx, &space, 2 * AT + (index << 12)), Ok(1));
            }
            rig.leave(cx, &space);
            rig.vm.destroy(cx, space).expect("destroyed");
        });
    });
}

/// A pinned page stays, and is where it was.
#[test]
fn pinned_pages_stay() {
    for page in SIZES {
        with_rig(SIZE, 7, &no_faults(), |rig| {
            rig.mmu.as_cpu(CpuId(0), |cx| {
                let space = filled(rig, cx, page, 2);
                let mut pins = Vec::new();
                rig.vm.pin(cx, &space, span(AT, page.bytes()), None, &Never, |pin| pins.push(pin)).expect("pinned");
                (0..4).for_each(|_| _ = rig.evict_all(cx));
                let Lookup::Mapped(leaf) = rig.vm.lookup(cx, &space, VirtAddr::new(AT)) else { panic!("gone") };
                assert_eq!(leaf.frame, pins[0].extent().base());
                expect(rig, true, rig.vm.lookup(cx, &space, VirtAddr::new(AT + page.bytes())));
                rig.put(cx, &space, AT + 8, 9).expect("still writable");
                pins.into_iter().for_each(|pin| rig.vm.unpin(cx, &space, pin).expect("its own"));
                (0..4).for_each(|_| _ = rig.evict_all(cx));
                expect(rig, true, rig.vm.lookup(cx, &space, VirtAddr::new(AT)));
                assert_eq!(rig.get(cx, &space, AT + 8), Ok(9));
                rig.leave(cx, &space);
                rig.vm.destroy(cx, space).expect("destroyed");
            });
        });
    }
}

/// What is poisoned is neither stored nor moved: both would read it. It goes with its space, and stays out of use.
#[test]
fn a_page_with_a_poisoned_frame_stays() {
    for page in SIZES {
        with_rig(SIZE, 7, &no_faults(), |rig| {
            rig.mmu.as_cpu(CpuId(0), |cx| {
                let space = filled(rig, cx, page, 2);
                let Lookup::Mapped(before) = rig.vm.lookup(cx, &space, VirtAddr::new(AT)) else { panic!("mapped") };
                let last = Pfn::new(before.frame.number() + page.pages() - 1);
                assert_eq!(rig.vm.frames().hwpoison(cx, last), HwPoisoned::InUse);
                (0..4).for_each(|_| _ = rig.evict_all(cx));
                rig.vm.pager().gather(&rig.vm, cx, NODE);
                let Lookup::Mapped(leaf) = rig.vm.lookup(cx, &space, VirtAddr::new(AT)) else { panic!("gone") };
                assert_eq!(leaf.frame, before.frame);
                expect(rig, true, rig.vm.lookup(cx, &space, VirtAddr::new(AT + page.bytes())));
                rig.leave(cx, &space);
                rig.vm.destroy(cx, space).expect("destroyed");
                rig.vm.frames().drain(cx);
                assert_eq!(rig.vm.frames().stats(cx).refused, 1);
            });
        });
    }
}

/// A follower's accesses keep a page, and it is told before a page goes.
#[test]
fn followers_are_asked_and_told() {
    #[derive(Default)]
    struct Second {
        asked: AtomicU64,
        told: AtomicU64,
        uses: AtomicU64,
    }
    impl<P: hugemm_base::platform::Cpu> Notifier<P> for Second {
        fn begin(&self, _cx: &mut hugemm_base::CpuCx<'_, P>, _range: VirtRange) {
            self.told.fetch_add(1, Ordering::Relaxed);
        }
        fn young(&self, _range: VirtRange) -> bool {
            self.asked.fetch_add(1, Ordering::Relaxed);
            self.uses.load(Ordering::Relaxed) != 0
        }
        fn end(&self, _cx: &mut hugemm_base::CpuCx<'_, P>, _range: VirtRange) {}
    }
    with_rig(SIZE, 8, &no_faults(), |rig| {
        rig.mmu.as_cpu(CpuId(0), |cx| {
            let space = filled(rig, cx, PageSize::Size4K, 4);
            let second = Arc::new(Second::default());
            second.uses.store(1, Ordering::Relaxed);
            let follower = rig.vm.follow(cx, &space, Follower(second.clone())).expect("followed");
            (0..4).for_each(|_| assert_eq!(rig.evict_all(cx), 0));
            assert!(second.asked.load(Ordering::Relaxed) >= 16);
            assert_eq!(second.told.load(Ordering::Relaxed), 0);
            let mut runs = Vec::new();
            let taken = rig.vm.test_and_clear_young(cx, &space, span(AT, 4 << 12), |run| runs.push(run));
            assert_eq!((taken, runs), (Ok(4), vec![span(AT, 4 << 12)]), "what only a follower has used counts");
            second.uses.store(0, Ordering::Relaxed);
            assert_eq!((0..4).map(|_| rig.evict_all(cx)).sum::<u64>(), 4);
            assert_eq!(second.told.load(Ordering::Relaxed), 4);
            // SAFETY: it came from `follow` on this space.
            let _ = unsafe { rig.vm.unfollow(cx, &space, follower) };
            rig.leave(cx, &space);
            rig.vm.destroy(cx, space).expect("destroyed");
        });
    });
}

/// Swap that is full is an error to nobody: pages stay and keep what is in them.
#[test]
fn full_swap_keeps_pages() {
    for page in SIZES {
        // Just the compressor's working memory and a little.
        with_rig(Size { swap: 60, ..SIZE }, 9, &no_faults(), |rig| {
            rig.mmu.as_cpu(CpuId(0), |cx| {
                let pages = if page == PageSize::Size4K { 800 } else { 4 };
                let space = rig.vm.create(cx, bounds()).expect("a space");
                let kind = VmaKind::private(page);
                rig.vm.map(cx, &space, span(AT, pages * page.bytes()), kind, Backing::Private).expect("an area");
                rig.enter(cx, &space);
                let mut rng = crate::support::Rng(5);
                let mut content = Vec::new();
                for index in 0..pages * page.pages() {
                    // Too much to compress well.
                    for word in 0..100 {
                        let value = rng.below(u64::MAX >> 32);
                        rig.put(cx, &space, AT + index * 4096 + word * 40, value).expect("memory");
                        content.push((AT + index * 4096 + word * 40, value));
                    }
                }
                (0..5).for_each(|_| _ = rig.evict_all(cx));
                assert!(rig.store.stats(cx).refused_full > 0);
                for (at, value) in content {
                    assert_eq!(rig.get(cx, &space, at), Ok(value));
                }
                rig.leave(cx, &space);
                rig.vm.destroy(cx, space).expect("destroyed");
            });
        });
    }
}

/// Whichever allocation fails, nothing is lost.
#[test]
fn every_allocation_may_fail() {
    for page in SIZES {
        let asked = every_fault(|plan| {
            with_rig(SIZE, 10, plan, |rig| {
                rig.mmu.as_cpu(CpuId(0), |cx| {
                    let Ok(space) = rig.vm.create(cx, bounds()) else { return };
                    let kind = VmaKind::private(page);
                    let _ = rig.vm.map(cx, &space, span(AT, 2 * page.bytes()), kind, Backing::Private);
                    rig.enter(cx, &space);
                    let known: Vec<u64> =
                        (0..2).filter(|i| rig.put(cx, &space, AT + i * page.bytes(), i + 1).is_ok()).collect();
                    (0..3).for_each(|_| _ = rig.evict_all(cx));
                    let child = rig.vm.fork(cx, &space);
                    for index in known {
                        let at = AT + index * page.bytes();
                        // One failure is one access's; the next finds the page.
                        let got = rig.get(cx, &space, at).or_else(|_| rig.get(cx, &space, at));
                        assert_eq!(got, Ok(index + 1));
                    }
                    rig.leave(cx, &space);
                    if let Ok(child) = child {
                        rig.vm.destroy(cx, child).expect("destroyed");
                    }
                    rig.vm.destroy(cx, space).expect("destroyed");
                });
            });
        });
        assert!(asked > 10, "{asked}");
    }
}

/// More is written than there is memory: direct reclaim serves the faults.
#[test]
fn memory_may_be_overcommitted() {
    for (page, policy) in SIZES.into_iter().flat_map(|page| LruPolicy::ALL.map(|policy| (page, policy))) {
        with_rig(Size { policy, ..SIZE }, 11, &no_faults(), |rig| {
            rig.mmu.as_cpu(CpuId(0), |cx| {
                let pages = (24 << 20) / page.bytes();
                let space = filled(rig, cx, page, pages);
                for index in 0..pages {
                    assert_eq!(rig.get(cx, &space, AT + index * page.bytes() + 8), Ok(index + 1));
                }
                assert!(rig.vm.pager().counts().direct_freed.get() > 0);
                let flags = rig.vm.lookup(cx, &space, VirtAddr::new(AT + (pages - 1) * page.bytes()));
                assert!(matches!(flags, Lookup::Mapped(leaf) if leaf.flags.contains(Flags::WRITE)));
                rig.leave(cx, &space);
                rig.vm.destroy(cx, space).expect("destroyed");
            });
        });
    }
}

/// A CPU that goes on using a page through its TLB hides that from ageing without flushes. That costs at most a
/// refault for each round of looks, and with a flush nothing.
#[test]
fn a_page_hidden_by_the_tlb_costs_one_refault_a_round() {
    const ROUNDS: u64 = 40;
    for (page, way) in SIZES.into_iter().flat_map(|page| [Ageing::Flush, Ageing::Batch].map(|way| (page, way))) {
        with_rig(SIZE, 12, &no_faults(), |rig| {
            rig.mmu.as_cpu(CpuId(0), |cx| {
                let space = filled(rig, cx, page, 3);
                rig.vm.pager().set_ageing(way);
                for round in 0..ROUNDS {
                    // Used between any two looks, mostly by what the TLB knows.
                    rig.put(cx, &space, AT + 8, round).expect("memory");
                    assert_eq!(rig.get(cx, &space, AT + 8), Ok(round));
                    // One look; the others are soon gone.
                    let budget = ShrinkBudget { free: u64::MAX, scan: page.pages() };
                    rig.vm.pager().shrink(&rig.vm, cx, NODE, budget, &Never);
                }
                let refaults = space.counters().refaulted.get();
                match way {
                    Ageing::Flush => assert_eq!(refaults, 0, "a flush at each look shows each use"),
                    // Two looks are needed to lose it.
                    _ => assert!(refaults <= ROUNDS / 2, "{refaults}"),
                }
                rig.leave(cx, &space);
                rig.vm.destroy(cx, space).expect("destroyed");
            });
        });
    }
}

/// Two spaces take turns on a CPU that keeps translations of both. Each uses a page in each of its turns, and a round of
/// the lists lies between two of them: what is kept does not hide that.
#[test]
fn translations_kept_under_tags_do_not_hide_use_for_ever() {
    for page in SIZES {
        with_rig(SIZE, 14, &no_faults(), |rig| {
            rig.mmu.as_cpu(CpuId(0), |cx| {
                let spaces = [0, 1].map(|_| {
                    let space = filled(rig, cx, page, 2);
                    rig.leave(cx, &space);
                    space
                });
                for turn in 0..80 {
                    let (space, other) = (&spaces[turn % 2], &spaces[(turn + 1) % 2]);
                    rig.enter(cx, space);
                    rig.leave(cx, other);
                    rig.put(cx, space, AT + 8, turn as u64).expect("memory");
                    if turn % 2 == 1 {
                        // One look at each of those that are used; the others are soon gone.
                        let budget = ShrinkBudget { free: u64::MAX, scan: 2 * page.pages() };
                        rig.vm.pager().shrink(&rig.vm, cx, NODE, budget, &Never);
                    }
                }
                let refaults: u64 = spaces.iter().map(|space| space.counters().refaulted.get()).sum();
                // Until the others are gone a round is more than one look at all.
                assert!(refaults <= 4, "pages that are used all the time went to swap {refaults} times");
                spaces.iter().for_each(|space| rig.leave(cx, space));
                for space in spaces {
                    rig.vm.destroy(cx, space).expect("destroyed");
                }
            });
        });
    }
}

/// Memory is free, but in pieces: pages move, and a page of 2 MiB comes back whole. What cannot move stays.
#[test]
fn a_large_page_comes_back_where_memory_is_in_pieces() {
    for (shared, policy) in [false, true].into_iter().zip(LruPolicy::ALL) {
        with_rig(Size { mib: 32, policy, ..SIZE }, 13, &no_faults(), |rig| {
            rig.mmu.as_cpu(CpuId(0), |cx| {
                let large = filled(rig, cx, PageSize::Size2M, 1);
                (0..3).for_each(|_| _ = rig.evict_all(cx));
                expect(rig, true, rig.vm.lookup(cx, &large, VirtAddr::new(AT)));
                rig.leave(cx, &large);
                // All other memory in small pages of two spaces in turn, of which one goes.
                let pages = rig.vm.frames().stats(cx).available() / 2 - 100;
                let object = rig.vm.create_shared(cx, pages, PageSize::Size4K, false).expect("an object");
                let at = |index: u64| AT + (index << 12);
                let [gone, small] = [false, shared].map(|shared| {
                    let space = rig.vm.create(cx, bounds()).expect("a space");
                    let from = if shared { Backing::Shared(&object, 0) } else { Backing::Private };
                    let kind = VmaKind::private(PageSize::Size4K);
                    rig.vm.map(cx, &space, span(AT, pages << 12), kind, from).expect("an area");
                    space
                });
                for index in 0..pages {
                    for space in [&gone, &small] {
                        rig.enter(cx, space);
                        rig.put(cx, space, at(index) + 8, index).expect("memory");
                        rig.leave(cx, space);
                    }
                }
                let child = rig.vm.fork(cx, &small).expect("forked");
                let mut pins = Vec::new();
                rig.vm.pin(cx, &small, span(at(7), 4096), None, &Never, |pin| pins.push(pin)).expect("pinned");
                rig.vm.destroy(cx, gone).expect("destroyed");
                rig.vm.frames().drain(cx);
                let stored = rig.store.stats(cx).stores;
                assert_eq!(rig.vm.frames().stats(cx).extents(PageSize::Size2M.order()), 0, "in pieces");
                rig.enter(cx, &large);
                assert_eq!(rig.get(cx, &large, AT + 8), Ok(1));
                rig.leave(cx, &large);
                assert_eq!(rig.vm.pager().counts().gathered.get(), 1);
                assert_eq!(rig.store.stats(cx).stores, stored, "pages move, none goes away");
                for space in [&small, &child] {
                    rig.enter(cx, space);
                    for index in 0..pages {
                        assert_eq!(rig.get(cx, space, at(index) + 8), Ok(index));
                    }
                    rig.leave(cx, space);
                }
                for pin in pins {
                    let found = rig.vm.lookup(cx, &small, pin.at());
                    assert!(matches!(found, Lookup::Mapped(leaf) if leaf.frame == pin.extent().base()), "{found:?}");
                    rig.vm.unpin(cx, &small, pin).expect("its own");
                }
                for space in [large, small, child] {
                    rig.vm.destroy(cx, space).expect("destroyed");
                }
                rig.vm.close(cx, object).expect("its own");
            });
        });
    }
}

/// On which node the page is that is mapped at an address.
fn node_at<'h>(rig: &Rig<'h>, cx: &mut crate::rig::Cx<'_, 'h>, space: &Handle<'_, 'h>, at: u64) -> Option<NodeId> {
    match rig.vm.lookup(cx, space, VirtAddr::new(at)) {
        Lookup::Mapped(leaf) => rig.vm.frames().node_of(leaf.frame),
        _ => None,
    }
}

/// Each node has its own LRU and marks: what is short on one is freed there, whatever the other has.
#[test]
fn each_node_is_reclaimed_by_itself() {
    with_rig(Size { nodes: 2, ..SIZE }, 14, &no_faults(), |rig| {
        rig.mmu.as_cpu(CpuId(0), |cx| {
            let pager = rig.vm.pager();
            let free = |cx: &crate::rig::Cx<'_, '_>, node| rig.vm.frames().node_stats(cx, NodeId(node)).available();
            let space = rig.vm.create(cx, bounds()).expect("a space");
            let at = |node: u32, index: u64| AT * u64::from(node + 1) + (index << 12) + 8;
            rig.enter(cx, &space);
            // Node 1 down to its low mark, node 0 less than half full.
            for (node, pages) in [(0, 500), (1, free(cx, 1) - pager.marks().low() / 2)] {
                let kind = VmaKind { from: Placement::Only(NodeId(node)), ..VmaKind::private(PageSize::Size4K) };
                rig.vm.map(cx, &space, span(at(node, 0) - 8, pages << 12), kind, Backing::Private).expect("an area");
                (0..pages).for_each(|index| rig.put(cx, &space, at(node, index), index).expect("memory"));
            }
            assert!(free(cx, 1) < pager.marks().low() && free(cx, 0) > pager.marks().high());
            let (turn, done) = pager.balance(&rig.vm, cx, NodeId(0), u64::MAX, &Never);
            assert_eq!((turn, done.scanned), (Turn::Balanced, 0));
            let (turn, done) = pager.balance(&rig.vm, cx, NodeId(1), u64::MAX, &Never);
            assert_eq!(turn, Turn::Balanced);
            assert!(done.freed > 0 && free(cx, 1) >= pager.marks().high());
            assert!(
                (0..500).all(|index| node_at(rig, cx, &space, at(0, index)) == Some(NodeId(0))),
                "nothing of node 0 went"
            );
            let away =
                (0..500).find(|index| node_at(rig, cx, &space, at(1, *index)).is_none()).expect("some of node 1 did");
            assert_eq!(rig.get(cx, &space, at(1, away)), Ok(away));
            assert_eq!(node_at(rig, cx, &space, at(1, away)), Some(NodeId(1)), "back where the area wants it");
            // A fault that finds its node empty takes from that node too, and no longer than it needs.
            let (before, pages) = (pager.counts().direct_freed.get(), free(cx, 1) + 256);
            let kind = VmaKind { from: Placement::Only(NodeId(1)), ..VmaKind::private(PageSize::Size4K) };
            rig.vm.map(cx, &space, span(5 * AT, pages << 12), kind, Backing::Private).expect("an area");
            for index in 0..pages {
                // Where all are young, the first looks find nothing.
                let put = (0..8).any(|_| rig.put(cx, &space, 5 * AT + (index << 12), index).is_ok());
                assert!(put, "page {index} of {pages}");
            }
            assert!(pager.counts().direct_freed.get() > before, "no fault had to take pages");
            assert!(
                (0..500).all(|index| node_at(rig, cx, &space, at(0, index)) == Some(NodeId(0))),
                "nothing of node 0 went"
            );
            // An object is filled where it is wanted, not where the worker is.
            let object = rig.vm.create_shared(cx, 16, PageSize::Size4K, false).expect("an object");
            rig.vm.prefault_shared(&object, 0, 16).from(Placement::Only(NodeId(1))).work(cx, &Never).expect("memory");
            let kind = VmaKind::private(PageSize::Size4K);
            rig.vm.map(cx, &space, span(4 * AT, 16 << 12), kind, Backing::Shared(&object, 0)).expect("an area");
            for index in 0..16 {
                assert_eq!(rig.get(cx, &space, 4 * AT + (index << 12)), Ok(0));
                assert_eq!(node_at(rig, cx, &space, 4 * AT + (index << 12)), Some(NodeId(1)));
            }
            rig.leave(cx, &space);
            rig.vm.destroy(cx, space).expect("destroyed");
            rig.vm.close(cx, object).expect("its own");
        });
    });
}

/// A page of 4 KiB may always be taken, a larger one only if enough stays free for storing two of 2 MiB.
#[test]
fn large_pages_leave_room_for_storing_them() {
    with_rig(SIZE, 12, &no_faults(), |rig| {
        rig.mmu.as_cpu(CpuId(0), |cx| {
            const RESERVE: u64 = 2 * 513;
            let (frames, pager) = (rig.vm.frames(), rig.vm.pager());
            let mut taken = Vec::new();
            for (order, room) in [(9, 512 + RESERVE), (3, 8 + RESERVE), (0, 0)] {
                let order = Order::new(order).expect("valid");
                for room in [room + 1, room, room.saturating_sub(1)] {
                    while frames.stats(cx).available() > room {
                        taken.push(frames.alloc(cx, AllocRequest::order(Order::ZERO)).expect("there is some"));
                    }
                    let enough = order == Order::ZERO || frames.stats(cx).available() >= order.pages() + RESERVE;
                    let may = Pager::<crate::rig::Model<'_>>::may_take(pager, frames, cx, order);
                    assert_eq!(may, enough, "order {} with {room} free", order.get());
                }
            }
            taken.into_iter().for_each(|block| frames.free(cx, block));
        });
    });
}

/// Direct reclaim of a task that may not sleep does nothing; of others it is counted, with what it freed; so is a worker's.
#[test]
fn what_is_reclaimed_is_counted() {
    with_rig(SIZE, 13, &no_faults(), |rig| {
        rig.mmu.as_cpu(CpuId(0), |cx| {
            let space = filled(rig, cx, PageSize::Size4K, 200);
            rig.leave(cx, &space);
            let pager = rig.vm.pager();
            let need = Shortfall { order: Order::ZERO, pages: 50, node: None, may_sleep: true };
            assert_eq!(pager.relieve(&rig.vm, cx, Shortfall { may_sleep: false, ..need }), 0);
            assert_eq!((pager.counts().direct.get(), pager.counts().direct_freed.get()), (0, 0));
            assert_eq!(pager.relieve(&rig.vm, cx, Shortfall { node: Some(NodeId(7)), ..need }), 0);
            let freed = pager.relieve(&rig.vm, cx, need);
            assert!((50..114).contains(&freed), "{freed}");
            assert_eq!((pager.counts().direct.get(), pager.counts().direct_freed.get()), (2, freed));
            assert_eq!(pager.balance(&rig.vm, cx, NODE, 1000, &Never).0, Turn::Balanced);
            assert_eq!(pager.balance(&rig.vm, cx, NodeId(7), 1000, &Never).0, Turn::Hopeless, "no such node");
            assert_eq!(pager.counts().worker_freed.get(), 0);
            rig.vm.destroy(cx, space).expect("destroyed");
        });
    });
}
