//! The block map against partitions kept as plain numbers.

use super::*;
use proptest::prelude::*;

/// A partition of 512 positions as plain numbers.
fn blocks(bits: &Bits512) -> Vec<(usize, u32)> {
    let (mut at, mut list) = (0, Vec::new());
    while at < SPAN {
        let (start, order) = bits.block_at(at);
        assert_eq!(start, at);
        for inside in at..at + (1 << order) {
            assert_eq!(bits.block_at(inside), (at, order));
        }
        list.push((at, order));
        at += 1 << order;
    }
    list
}

#[test]
fn one_block_and_all_single() {
    let bits = Bits512::default();
    bits.reset(true);
    assert_eq!(blocks(&bits), [(0, 9)]);
    assert!((0..SPAN).all(|index| !bits.is_single(index)));
    bits.reset(false);
    assert_eq!(blocks(&bits).len(), 512);
    // All but the last of each word, which only the next word tells.
    assert!((0..SPAN).all(|index| bits.is_single(index) == ((index + 1) % WORD_BITS != 0)));
    bits.merge(6, 1);
    assert_eq!([5, 6, 7, 8].map(|index| bits.is_single(index)), [true, false, false, true]);
}

#[test]
fn every_even_split_and_merge_back() {
    // Every combination, but for the interpreter, which gets the largest.
    for from in if cfg!(miri) { 9 } else { 0 }..=9_u32 {
        for to in 0..=from {
            for index in (0..SPAN).step_by(1 << from) {
                let bits = Bits512::default();
                bits.reset(true);
                bits.cut(index);
                bits.cut((index + (1 << from)) % SPAN);
                assert_eq!(bits.block_at(index), (index, from));
                bits.split_even(index, from, to);
                for piece in (index..index + (1 << from)).step_by(1 << to) {
                    assert_eq!(bits.block_at(piece), (piece, to));
                }
                blocks(&bits);
                bits.merge(index, from);
                assert_eq!(bits.block_at(index), (index, from));
                blocks(&bits);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 3 } else { 256 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn cuts_make_the_canonical_partition(cuts in proptest::collection::vec(0_usize..SPAN, 0..20)) {
        let bits = Bits512::default();
        bits.reset(true);
        for &cut in &cuts {
            bits.cut(cut);
        }
        let list = blocks(&bits);
        for (start, order) in list {
            prop_assert_eq!(start % (1 << order), 0);
            prop_assert!(!cuts.iter().any(|&c| c > start && c < start + (1 << order)));
            // No finer than needed: the sibling pair holds a cut inside.
            if order < 9 {
                let pair = start & !((2 << order) - 1);
                prop_assert!(cuts.iter().any(|&c| c > pair && c < pair + (2 << order)));
            }
        }
    }

    #[test]
    fn spans_are_the_range(first in 0_usize..SPAN, count in 0_usize..SPAN) {
        let (locked, shared) = (Bits512::default(), Bits512::default());
        for (at, bits) in spans(first, count) {
            locked.set_locked(at, bits, true);
            shared.set_shared(at, bits, true);
        }
        for index in 0..SPAN {
            prop_assert_eq!(locked.get(index), (first..first + count).contains(&index));
        }
        prop_assert_eq!(locked.snapshot(), shared.snapshot());
        for (at, bits) in spans(first, count) {
            locked.set_locked(at, bits, false);
            shared.set_shared(at, bits, false);
        }
        prop_assert_eq!((locked.snapshot(), shared.snapshot()), ([0; WORDS], [0; WORDS]));
    }

    #[test]
    fn runs_are_found_as_by_looking_at_each(
        ranges in proptest::collection::vec((0_usize..SPAN, 0_usize..SPAN), 0..6),
        holes in proptest::collection::vec(0_usize..SPAN, 0..40),
    ) {
        let bits = Bits512::default();
        for (first, count) in ranges {
            spans(first, count).for_each(|(at, bits_in)| bits.set_locked(at, bits_in, true));
        }
        holes.iter().for_each(|hole| bits.put_locked(*hole, false));
        let whole = |first: usize, order: u32| (first..first + (1 << order)).all(|index| bits.get(index));
        let counts = count_runs(bits.snapshot());
        for order in 0..=SPAN_SHIFT {
            let aligned = || (0..SPAN).step_by(1 << order);
            let expected = aligned().find(|first| whole(*first, order));
            prop_assert_eq!(first_run(order, |at| bits.load(at)), expected);
            let larger = |first: usize| order < SPAN_SHIFT && whole(first & !((2 << order) - 1), order + 1);
            let maximal = aligned().filter(|first| whole(*first, order) && !larger(*first)).count();
            prop_assert_eq!(counts[order as usize], maximal as u64);
            if order <= 6 {
                let within = |first: usize| runs_in(bits.load(first / WORD_BITS), order) >> (first % WORD_BITS) & 1 != 0;
                prop_assert!((0..SPAN).all(|first| within(first) == (first % (1 << order) == 0 && whole(first, order))));
            }
        }
    }
}
