//! Who was used: ageing in all its ways, and what TLBs hide.

use crate::rig::{Handle, NODE, Rig, Size, bounds, span, with_cpu};
use crate::rules::{AT, SIZE, SIZES, filled, size_for};
use hugemm_base::{Never, PageSize, VirtAddr, with};
use hugemm_paging::{Lookup, ShootdownBatch, ShootdownCounts, ShootdownPolicy};
use hugemm_reclaim::{Ageing, LruPolicy, ShrinkBudget};
use hugemm_vm::{Backing, VmaKind};

/// Whatever the way, the same pages are found young, and no TLB is touched.
#[test]
fn ageing_flushes_nothing_at_any_leaf_size() {
    for (page, way) in SIZES.into_iter().flat_map(|page| Ageing::ALL.map(move |way| (page, way))) {
        with_cpu(SIZE, 5, |rig, cx| {
            let object = rig.vm.create_shared(cx, 4 * page.pages(), page, false).expect("an object");
            let spaces: Vec<_> = (0..3)
                .map(|_| {
                    let space = rig.vm.create(cx, bounds()).expect("a space");
                    let from = Backing::Shared(&object, 0);
                    rig.vm.map(cx, &space, span(AT, 4 * page.bytes()), VmaKind::private(page), from).expect("an area");
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
            let budget = ShrinkBudget::new(u64::MAX, 4 * page.pages());
            let progress = pager.shrink(&rig.vm, cx, NODE, budget, &Never);
            assert_eq!(progress.freed, 0, "all are young");
            assert_eq!(pager.counts().young.get(), 12, "3 mappings of 4 pages");
            assert_eq!(pager.counts().age_flushes.get(), 0);
            assert_eq!(rig.vm.shootdown().counts().since(flushed), ShootdownCounts::default(), "no TLB was touched");
            for space in spaces {
                rig.vm.destroy(cx, space).expect("destroyed");
            }
            rig.vm.close(cx, object).expect("its own");
        });
    }
}

/// Neighbours are harvested once each, in all mappings.
#[test]
fn look_around_takes_a_page_with_all_its_mappings() {
    const PAGES: u64 = 64;
    with_cpu(SIZE, 6, |rig, cx| {
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
        let look = |cx: &mut _, scan| pager.shrink(&rig.vm, cx, NODE, ShrinkBudget::new(u64::MAX, scan), &Never);
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
}

/// Page by page nothing is looked at on the way.
#[test]
fn page_by_page_looks_at_nothing_else() {
    with_cpu(SIZE, 6, |rig, cx| {
        let space = filled(rig, cx, PageSize::Size4K, 64);
        let pager = rig.vm.pager();
        pager.set_ageing(Ageing::NoFlush);
        let budget = ShrinkBudget::new(u64::MAX, 32);
        assert_eq!(pager.shrink(&rig.vm, cx, NODE, budget, &Never).freed, 0, "all are young");
        assert_eq!((pager.counts().young.get(), pager.counts().around.get()), (32, 0));
        rig.end(cx, space);
    });
}

/// A process's own copy of a page lies at the same place of the same object, and is a page of its own: in one batch with the other,
/// both are looked at. What is looked at on the way, and is in the batch too, has been looked at.
#[test]
fn copies_in_one_batch_are_looked_at_each() {
    const PAGES: u64 = 16;
    with_cpu(SIZE, 6, |rig, cx| {
        let parent = filled(rig, cx, PageSize::Size4K, PAGES);
        let child = rig.vm.fork(cx, &parent).expect("forked");
        for space in [&child, &parent] {
            rig.enter(cx, space);
            (0..PAGES).for_each(|page| rig.put(cx, space, AT + (page << 12), page).expect("memory"));
            rig.leave(cx, space);
        }
        let pager = rig.vm.pager();
        let budget = ShrinkBudget::new(u64::MAX, 2 * PAGES);
        let looked = pager.shrink(&rig.vm, cx, NODE, budget, &Never);
        assert_eq!((looked.scanned, looked.young, looked.freed), (2 * PAGES, 2 * PAGES, 0), "all have been used");
        assert_eq!(pager.counts().around.get(), 0, "nothing is beside the batch");
        for space in [child, parent] {
            rig.vm.destroy(cx, space).expect("destroyed");
        }
    });
}

/// Makes the CPU forget the space's translations: what is used from then on shows in the tables.
fn forget<'h>(rig: &Rig<'h>, cx: &mut crate::rig::Cx<'_, 'h>, space: &Handle<'_, 'h>) {
    let mut batch = ShootdownBatch::new(space.tlb());
    batch.changed(span(AT, 1 << 30), PageSize::Size4K);
    let _ = batch.flush(rig.vm.shootdown(), cx, &ShootdownPolicy::BATCHED);
}

/// What somebody else found used is young for reclaim.
#[test]
fn reclaim_is_told_of_bits_that_others_take() {
    with_cpu(Size { policy: LruPolicy::Generations, ..SIZE }, 6, |rig, cx| {
        let space = filled(rig, cx, PageSize::Size4K, 64);
        let shrink = |cx: &mut _, free, scan| {
            rig.vm.pager().shrink(&rig.vm, cx, NODE, ShrinkBudget::new(free, scan), &Never).freed
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
        rig.end(cx, space);
    });
}

/// Pages that are used all the time become the youngest, and stay it when others are too few and those are looked at.
#[test]
fn used_pages_stay_the_youngest() {
    const PAGES: u64 = 32;
    with_cpu(Size { policy: LruPolicy::TwoList, ..SIZE }, 6, |rig, cx| {
        let space = filled(rig, cx, PageSize::Size4K, PAGES);
        let pager = rig.vm.pager();
        for round in 1..=4 {
            let budget = ShrinkBudget::new(u64::MAX, PAGES);
            assert_eq!(pager.shrink(&rig.vm, cx, NODE, budget, &Never).looked_at(), PAGES, "look {round}");
            let stats = pager.lru(NODE).expect("one").stats(cx);
            assert_eq!((stats.youngest, stats.deactivated), (if round < 2 { 0 } else { PAGES }, 0), "look {round}");
            forget(rig, cx, &space);
            (0..PAGES).for_each(|page| assert_eq!(rig.get(cx, &space, AT + (page << 12) + 8), Ok(page + 1)));
        }
        rig.end(cx, space);
    });
}

/// Locked pages stay; areas without recency do not count.
#[test]
fn areas_say_what_counts() {
    with_cpu(SIZE, 6, |rig, cx| {
        let kind = VmaKind::private(PageSize::Size4K);
        let space = rig.space(cx, span(AT, 8 << 12), kind);
        rig.vm.lock(cx, &space, span(AT, 8 << 12), 8).expect("within the limit");
        let other = with!(kind, pattern = hugemm_vm::Pattern::Sequential);
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
        rig.end(cx, space);
    });
}

/// A CPU that goes on using a page through its TLB hides that from ageing without flushes. That costs at most a
/// refault for each round of looks.
#[test]
fn a_page_hidden_by_the_tlb_costs_one_refault_a_round() {
    const ROUNDS: u64 = 40;
    for page in SIZES {
        with_cpu(size_for(page), 12, |rig, cx| {
            let space = filled(rig, cx, page, 3);
            for round in 0..ROUNDS {
                // Used between any two looks, mostly by what the TLB knows.
                rig.put(cx, &space, AT + 8, round).expect("memory");
                assert_eq!(rig.get(cx, &space, AT + 8), Ok(round));
                // One look; the others are soon gone.
                let budget = ShrinkBudget::new(u64::MAX, page.pages());
                rig.vm.pager().shrink(&rig.vm, cx, NODE, budget, &Never);
            }
            let refaults = space.counters().refaulted;
            // Two looks are needed to lose it.
            assert!(refaults <= ROUNDS / 2, "{refaults}");
            rig.end(cx, space);
        });
    }
}

/// Two spaces take turns on a CPU that keeps translations of both. Each uses a page in each of its turns, and a round of
/// the lists lies between two of them: what is kept does not hide that.
#[test]
fn translations_kept_under_tags_do_not_hide_use_for_ever() {
    for page in SIZES {
        with_cpu(size_for(page), 14, |rig, cx| {
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
                    let budget = ShrinkBudget::new(u64::MAX, 2 * page.pages());
                    rig.vm.pager().shrink(&rig.vm, cx, NODE, budget, &Never);
                }
            }
            let refaults: u64 = spaces.iter().map(|space| space.counters().refaulted).sum();
            // Until the others are gone a round is more than one look at all.
            assert!(refaults <= 4, "pages that are used all the time went to swap {refaults} times");
            spaces.iter().for_each(|space| rig.leave(cx, space));
            for space in spaces {
                rig.vm.destroy(cx, space).expect("destroyed");
            }
        });
    }
}
