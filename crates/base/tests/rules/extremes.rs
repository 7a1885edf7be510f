//! Numbers at the end of their types, through everything that takes one: an answer or an error, and no panic.

use hugemm_base::{
    Dirty, Extent, Invalidation, Order, PageSize, Pfn, PhysAddr, RangeSet, TlbScope, VirtAddr, VirtRange,
};

const NUMBERS: [u64; 14] = [
    0,
    1,
    511,
    512,
    4095,
    4096,
    (1 << 40) - 1,
    1 << 40,
    (1 << 52) - 1,
    1 << 52,
    1 << 63,
    u64::MAX - 4095,
    u64::MAX - 1,
    u64::MAX,
];

#[test]
fn frames_and_extents() {
    for a in NUMBERS {
        let base = Pfn::new(a);
        assert!(base <= Pfn::LIMIT && base.start().get() >> 12 == base.get());
        assert!(
            base.alignment() >= base.get().trailing_zeros().min(64) && Pfn::containing(PhysAddr::new(a)) <= Pfn::LIMIT
        );
        for order in (0..=u32::MAX).step_by(1 << 30).chain(0..20).filter_map(|order| Order::new(order).ok()) {
            let block = Extent::block(base, order);
            assert!(block.is_empty() == (base == Pfn::LIMIT) && block.end() <= Pfn::LIMIT);
        }
        for b in NUMBERS {
            assert!(base.checked_add(b).is_none_or(|end| end <= Pfn::LIMIT));
            let _ = Extent::from_bytes(PhysAddr::new(a), b);
            let Ok(extent) = Extent::new(base, b) else { continue };
            assert!(extent.end() <= Pfn::LIMIT && extent.bytes() >> 12 == extent.pages());
            assert!(extent.chunks(Order::MAX).take(50).all(|(head, order)| extent.covers(Extent::block(head, order))));
            let _ = (extent.as_block(), extent.contains(Pfn::LIMIT), format!("{extent} {extent:?}"));
            for c in NUMBERS {
                let (left, right) = extent.split_at(c);
                assert_eq!(left.join(right), Some(extent));
                assert!(extent.covers(extent.slice(c, b)) && extent.covers(extent.slice(b, c)));
                let Ok(other) = Extent::new(Pfn::new(c), b) else { continue };
                let both = extent.intersection(other);
                assert!(extent.covers(both) && other.covers(both));
                // SAFETY: nobody has these frames, and nobody reaches any memory through them.
                let dirty = unsafe { Dirty::assume_owned(extent) };
                let _ = dirty.begin_around([other, both], left).map(|clearing| clearing.remaining());
            }
        }
    }
    assert_eq!((Order::largest_within(0), Order::largest_within(u64::MAX)), (None, Some(Order::MAX)));
}

#[test]
fn addresses_ranges_and_flushes() {
    let mut all = RangeSet::default();
    for a in NUMBERS {
        let at = VirtAddr::new(a);
        for b in NUMBERS {
            let _ = (at.is_aligned(b), at.align_down(b), at.checked_add(b), VirtRange::new(at, b));
            let Ok(range) = VirtRange::from_pages(a, b) else { continue };
            assert!(range.covers(range) && range.last().get() >> 12 == range.end_page() - 1);
            let _ = (range.bytes(), format!("{range} {range:?}"));
            all.add(range);
            let mut ranges = RangeSet::default();
            ranges.add(range);
            ranges.add(VirtRange::ALL);
            assert!(ranges.covers(range) && all.covers(range));
            for size in PageSize::ALL {
                assert!(range.touched(size) >= 1 && all.touched(size) >= 1 && ranges.touched(size) >= 1);
                for tables in [false, true] {
                    let mut one = RangeSet::default();
                    one.add(range);
                    let what = Invalidation { ranges: one, stride: size, tables, uniform: false };
                    for scope in [TlbScope::Space, TlbScope::Kernel] {
                        // One by one, so long as nobody says `ALL`: how many are too many is the shootdown's to say.
                        let _ = what.on_x86_64(scope, true).take(100).count();
                    }
                }
            }
        }
    }
}
