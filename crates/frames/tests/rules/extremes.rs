//! Numbers at the end of their types, through every call that takes one: an error or nothing, no panic, and no loop over
//! frames that do not exist.

use super::support::{arena, with_one_arena};
use hugemm_base::{CpuId, Extent, NodeId, Order, PageSize, Pfn, with};
use hugemm_frames::{AllocRequest, Frames, FramesConfig, HwPoisoned, NoMigration, NodeStats, Placement, Plain, Slab};

const NUMBERS: [u64; 9] = [0, 1, 4095, 4096, 1 << 39, (1 << 40) - 1, 1 << 40, 1 << 63, u64::MAX];

#[test]
fn frames_that_do_not_exist() {
    with_one_arena(4096, 4096, 1, |frames, _, mut cx| {
        for a in NUMBERS {
            let pfn = Pfn::new(a);
            let managed = (4096..8192).contains(&a);
            assert_eq!(frames.node_of(pfn).is_some(), managed);
            assert_eq!((frames.head_of(pfn).is_some(), frames.descriptor(pfn).is_some()), (managed, managed));
            assert!(!frames.is_hwpoisoned(pfn) && frames.references(pfn) == 0);
            // SAFETY: no LRU lists these frames.
            assert!(!matches!(unsafe { frames.try_get(pfn) }, Ok(Some(_))));
            if !managed {
                assert_eq!(frames.hwpoison(&cx, pfn), HwPoisoned::NotManaged);
            }
            for pages in NUMBERS {
                let Ok(extent) = Extent::new(pfn, pages) else { continue };
                assert_eq!(frames.first_hwpoisoned(extent), None);
                if let Ok(taken) = frames.take_range(&cx, extent) {
                    assert!(managed && extent.end().get() <= 8192);
                    frames.free_extent(&cx, taken);
                }
                if let Ok(taken) = frames.alloc_contig_range(&mut cx, extent, &mut NoMigration) {
                    assert!(managed && extent.end().get() <= 8192);
                    frames.free_extent(&cx, taken);
                }
            }
        }
        for node in [1, 63, 64, u32::MAX].map(NodeId::new) {
            assert_eq!(frames.node_stats(&cx, node), NodeStats::default());
            assert_eq!(frames.node_available(&cx, node), 0);
            for from in [Placement::Only(node), Placement::Prefer(node)] {
                if let Ok(page) = frames.alloc(&cx, AllocRequest::order(Order::ZERO).from(from)) {
                    frames.free(&cx, page);
                }
            }
        }
        assert!(frames.alloc(&cx, Order::MAX).is_err() && frames.alloc(&cx, PageSize::Size1G).is_err());
        // SAFETY: no such CPU runs, so none of them does.
        [1, 64, u32::MAX].map(CpuId::new).into_iter().for_each(|cpu| unsafe { frames.drain_offline(&cx, cpu) });
        frames.drain(&cx);
        assert_eq!(frames.stats(&cx).available(), 4096);
    });
}

#[test]
fn layouts_and_objects_of_any_size() {
    for base in NUMBERS {
        for pages in NUMBERS {
            let Ok(extent) = Extent::new(Pfn::new(base), pages) else { continue };
            for cpus in [0, 1, 1 << 16, u32::MAX] {
                for node in [0, 1, u32::MAX] {
                    let arenas = [with!(arena(0, 1, node), extent)];
                    let config = FramesConfig::new(&arenas, cpus);
                    let _ = Frames::<Plain>::required_bytes(&config);
                }
            }
        }
    }
    for size in [0, 1, 4032, 4096, usize::MAX / 2, usize::MAX - 1, usize::MAX] {
        for align in [0, 1, 3, 64, 4096, 1 << 63, usize::MAX] {
            let slab: Option<Slab> = Slab::new(size, align);
            assert!(slab.is_none_or(|slab| (1..=4096).contains(&slab.per_frame())));
        }
    }
}

#[test]
fn statistics_of_anything() {
    for a in NUMBERS {
        for b in NUMBERS {
            let one = |n| with!(NodeStats::default(), blocks = [n; 19], free = n, cached = n, deferred = n);
            let both = one(a).plus(&one(b));
            assert!(both.free >= a.max(b) && both.available() >= a.max(b));
            for order in [0, 9, 18].map(|order| Order::new(order).expect("valid")) {
                let _ = (both.extents(order), both.fragmentation_permille(order));
            }
        }
    }
}
