//! The block map against partitions kept as plain numbers.

use super::*;
use proptest::prelude::*;

type Bits = Bits512<Pages>;

fn at(number: usize) -> Position<Pages> {
    Position::new(number)
}

/// A partition of 512 positions as plain numbers.
fn blocks(bits: &Bits) -> Vec<(usize, u32)> {
    let (mut next, mut list) = (0, Vec::new());
    while next < SPAN {
        let (start, order) = bits.block_at(at(next));
        assert_eq!(start, at(next));
        for inside in next..next + (1 << order) {
            assert_eq!(bits.block_at(at(inside)), (start, order));
        }
        list.push((next, order));
        next += 1 << order;
    }
    list
}

#[test]
fn one_block_and_all_single() {
    let bits = Bits::default();
    bits.reset(true);
    assert_eq!(blocks(&bits), [(0, 9)]);
    assert!((0..SPAN).all(|index| !bits.is_single(at(index))));
    bits.reset(false);
    assert_eq!(blocks(&bits).len(), 512);
    // All but the last of each word, which only the next word tells.
    assert!((0..SPAN).all(|index| bits.is_single(at(index)) == ((index + 1) % WORD_BITS != 0)));
    bits.merge(at(6), 1);
    assert_eq!([5, 6, 7, 8].map(|index| bits.is_single(at(index))), [true, false, false, true]);
}

#[test]
fn every_even_split_and_merge_back() {
    // Every combination, but for the interpreter, which gets the largest.
    for from in if cfg!(miri) { 9 } else { 0 }..=9_u32 {
        for to in 0..=from {
            for index in (0..SPAN).step_by(1 << from) {
                let bits = Bits::default();
                bits.reset(true);
                bits.split_even(at(0), SPAN_SHIFT, from);
                assert_eq!(bits.block_at(at(index)), (at(index), from));
                bits.split_even(at(index), from, to);
                for piece in (index..index + (1 << from)).step_by(1 << to) {
                    assert_eq!(bits.block_at(at(piece)), (at(piece), to));
                }
                blocks(&bits);
                bits.merge(at(index), from);
                assert_eq!(bits.block_at(at(index)), (at(index), from));
                blocks(&bits);
            }
        }
    }
}

proptest! {
    #![proptest_config(crate::bits::cases())]

    #[test]
    fn spans_are_the_range(first in 0_usize..SPAN, count in 0_usize..SPAN) {
        let (locked, shared) = (Bits::default(), Bits::default());
        for (word, bits) in spans(at(first), count) {
            locked.set_locked(word, bits, true);
            shared.set_shared(word, bits, true);
        }
        for index in 0..SPAN {
            prop_assert_eq!(locked.get(at(index)), (first..first + count).contains(&index));
        }
        prop_assert_eq!(locked.snapshot(), shared.snapshot());
        for (word, bits) in spans(at(first), count) {
            locked.set_locked(word, bits, false);
            shared.set_shared(word, bits, false);
        }
        prop_assert_eq!((locked.snapshot(), shared.snapshot()), ([0; WORDS], [0; WORDS]));
    }

    #[test]
    fn runs_are_found_as_by_looking_at_each(
        ranges in proptest::collection::vec((0_usize..SPAN, 0_usize..SPAN), 0..6),
        holes in proptest::collection::vec(0_usize..SPAN, 0..40),
    ) {
        let bits = Bits::default();
        for (first, count) in ranges {
            spans(at(first), count).for_each(|(word, bits_in)| bits.set_locked(word, bits_in, true));
        }
        holes.iter().for_each(|hole| bits.put_locked(at(*hole), false));
        let whole = |first: usize, order: u32| (first..first + (1 << order)).all(|index| bits.get(at(index)));
        let counts = count_runs(bits.snapshot());
        for order in 0..=SPAN_SHIFT {
            let aligned = || (0..SPAN).step_by(1 << order);
            let expected = aligned().find(|first| whole(*first, order));
            prop_assert_eq!(first_run(order, &bits.snapshot()), expected.map(at));
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
