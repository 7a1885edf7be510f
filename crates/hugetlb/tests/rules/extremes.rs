//! Numbers at the end of their types, through every call that takes one: an error or nothing, no panic, and an end.

use crate::support::{Shape, with_pool_of};
use hugemm_base::inject::NoFaults;
use hugemm_base::{Never, NodeId, PageSize, Pfn};
use hugemm_hugetlb::{HugePage, HugePageCounts, Nodes, PoolError};

const NUMBERS: [u64; 7] = [1, 1 << 20, 1 << 40, 1 << 52, 1 << 63, u64::MAX - 1, u64::MAX];

#[test]
fn a_pool_asked_for_anything() {
    for (size, spans) in [(PageSize::Size2M, 2), (PageSize::Size1G, 20)] {
        with_pool_of(size, &Shape::spans(spans), NoFaults, |m, pool, mut cx| {
            m.set(&pool, 1);
            for number in NUMBERS {
                let frame = Pfn::new(number << 18 | number);
                assert_eq!(pool.note_hwpoison(&cx, frame), Err(PoolError::NotInPool));
                assert!(pool.dissolve(&mut cx, &m.optimizer, frame).is_err());
                assert!(pool.unreserve(&cx, number).is_err(), "nothing is promised");
                assert_eq!(pool.reserve(&cx, number).is_ok(), number == 1);
                if number == 1 {
                    assert!(pool.reserve(&cx, u64::MAX).is_err());
                    pool.unreserve(&cx, 1).expect("promised");
                }
                for limit in [0, u64::MAX] {
                    pool.set_overcommit(&cx, limit);
                    let short = pool.reserve_or_overcommit(&mut cx, &m.optimizer, number);
                    assert_eq!(short.is_ok(), number == 1);
                    if short.is_ok() {
                        pool.unreserve(&cx, 1).expect("promised");
                    }
                }
                let node = NodeId::new(number as u32 | 1 << 31);
                assert_eq!(pool.node_counts(&cx, node), HugePageCounts::default());
                assert!(pool.take(&cx, Nodes::Only(node), false).is_err());
                for nodes in [Nodes::Only(node), Nodes::All] {
                    // As many as there is memory for.
                    let report = pool.resize(&mut cx, &m.optimizer, number, nodes, &Never).expect("idle");
                    assert!(report.entered < spans * 64, "{report:?}");
                }
                // SAFETY: it goes nowhere, unless a pool takes it for one of its own.
                let stray = unsafe { HugePage::assume_owned(frame, size) };
                let (stray, error) = pool.put(&cx, stray, true).expect_err("not its own");
                assert_eq!(error, PoolError::NotInPool);
                let _ = stray.extent();
            }
            pool.set_overcommit(&cx, 0);
            m.set(&pool, 0);
            assert!(pool.is_consistent(&cx));
            m.nothing_is_lost(0);
        });
    }
}
