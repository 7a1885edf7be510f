//! Some 15 000 pages of both sizes, here and there in areas of TiB and in an object of TiB, through whole rounds of reclaim: what
//! is used stays, what is idle goes, all of it comes back as it was, and every number adds up.

use crate::rig::{NODE, Size, with_cpu};
use hugemm_base::{Never, PageSize, VirtAddr, VirtRange};
use hugemm_paging::Lookup;
use hugemm_reclaim::{LruPolicy, ShrinkBudget, Swap, Watermarks};
use hugemm_vm::{Backing, Usage, VmaKind};
use std::collections::BTreeMap;

const GIB: u64 = 1 << 18;
const TIB: u64 = 1 << 28;
const SIZE: Size =
    Size { mib: 192, swap: 30_000, cpus: 2, policy: LruPolicy::Generations, nodes: 1, marks: None, strange: false };

/// In pages: a small, a huge and a shared area.
const SMALL: (u64, u64) = (GIB - 7, GIB - 7 + 2 * TIB);
const HUGE: (u64, u64) = (8 * TIB, 9 * TIB);
const SHARED: (u64, u64) = (20 * TIB + 3, 21 * TIB);
/// Of the object: where it is shown from.
const OFFSET: u64 = 5 * TIB - 1;

fn at(page: u64) -> VirtAddr {
    VirtAddr::new(page << 12)
}

fn pages((first, end): (u64, u64)) -> VirtRange {
    VirtRange::from_pages(first, end - first).expect("a range")
}

/// Pages that are touched: around borders of tables of all levels, and in rows of their own; the first 4 KiB of huge ones.
fn touched() -> BTreeMap<u64, u64> {
    let mut all = BTreeMap::new();
    for (number, border) in [GIB, 2 * GIB, 512 * GIB, TIB + 512, TIB + GIB - 40, 2 * TIB].into_iter().enumerate() {
        for page in (border - 7..border + 400).filter(|page| (SMALL.0..SMALL.1).contains(page)) {
            all.insert(page, page * 3 + number as u64);
        }
    }
    for number in 0..24 {
        all.insert(HUGE.0 + number * (25 * GIB + 512), number | 1 << 40);
    }
    for page in (0..600).chain(GIB - 60..GIB + 60).chain((1 << 27) - 3..(1 << 27) + 3) {
        all.insert(SHARED.0 + page, page << 8 | 7);
    }
    all
}

fn run(policy: LruPolicy) {
    with_cpu(Size { policy, marks: Watermarks::new(3076, 3100, 3200), ..SIZE }, 91, |rig, cx| {
        let object = rig.vm.create_shared(cx, 6 * TIB, PageSize::Size4K, false).expect("memory");
        let whole = VirtRange::from_pages(0, 1 << 35).expect("a range");
        let space = rig.vm.create(cx, whole).expect("memory");
        let small = VmaKind::private(PageSize::Size4K);
        rig.vm.map(cx, &space, pages(SMALL), small, Backing::Private).expect("memory");
        rig.vm.map(cx, &space, pages(HUGE), VmaKind::private(PageSize::Size2M), Backing::Private).expect("memory");
        rig.vm.map(cx, &space, pages(SHARED), small, Backing::Shared(&object, OFFSET)).expect("memory");
        let all = touched();
        for (page, word) in &all {
            rig.vm.write(cx, &space, at(*page), &word.to_le_bytes()).expect("memory");
        }
        let size = |page: u64| if (HUGE.0..HUGE.1).contains(&page) { 512 } else { 1 };
        let total: u64 = all.keys().map(|page| size(*page)).sum();
        let lru = rig.vm.pager().lru(NODE).expect("one").stats(cx);
        assert_eq!((lru.pages(), lru.folios), (total, all.len() as u64));
        // One in 32 is used again before each pass.
        let used: Vec<(u64, u64)> = all.iter().step_by(32).map(|(page, word)| (*page, *word)).collect();
        let mut freed = 0;
        for _ in 0..4000 {
            for (page, word) in &used {
                let mut found = [0; 8];
                rig.vm.read(cx, &space, at(*page), &mut found).expect("memory");
                assert_eq!(u64::from_le_bytes(found), *word);
            }
            let budget = ShrinkBudget::new(3000, total / 3);
            let pass = rig.vm.pager().shrink(&rig.vm, cx, NODE, budget, &Never);
            assert!(pass.freed <= pass.scanned && !pass.full, "{pass:?}");
            freed += pass.freed;
            if freed >= total / 2 {
                break;
            }
        }
        assert!(freed >= total / 2, "{policy:?}: {freed} of {total}");
        for (page, _) in &used {
            let there = rig.vm.lookup(cx, &space, at(*page));
            assert!(matches!(there, Lookup::Mapped(_)), "{policy:?}: {there:?} at {page:#x}");
        }
        // What is here is on the LRU, what is not is in swap.
        let mut sum = Usage::default();
        for area in [SMALL, HUGE, SHARED] {
            let usage = rig.vm.usage(cx, &space, pages(area)).expect("within");
            sum.present += usage.present;
            sum.swapped += usage.swapped;
        }
        let lru = rig.vm.pager().lru(NODE).expect("one").stats(cx);
        assert_eq!((sum.swapped, lru.pages()), (freed, total - freed), "{policy:?}");
        assert!(sum.present <= total - freed);
        assert_eq!(rig.store.stats(cx).pages, freed, "{policy:?}");
        for (page, word) in &all {
            let mut found = [0; 8];
            rig.vm.read(cx, &space, at(*page), &mut found).expect("memory");
            assert_eq!(u64::from_le_bytes(found), *word, "{page:#x}");
        }
        assert_eq!(rig.store.stats(cx).pages, 0);
        rig.vm.destroy(cx, space).expect("idle");
        rig.vm.close(cx, object).expect("its own");
    });
}

#[test]
fn what_is_idle_among_many_goes_and_comes_back() {
    LruPolicy::ALL.into_iter().for_each(run);
}
