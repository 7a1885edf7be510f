//! Runs of positions, 64 to a word.

use super::{Pages, Position, SPAN, SPAN_SHIFT, WORD_BITS, WORDS};

/// Bits `from..from + count` of a word; `count` is at most 64.
pub(super) const fn mask(from: usize, count: usize) -> u64 {
    if count >= WORD_BITS { u64::MAX } else { ((1 << count) - 1) << from }
}

/// The words that `[first, first + count)` touches, by number, and its bits in each.
#[inline]
pub(crate) fn spans<L: Copy>(first: Position<L>, count: usize) -> impl Iterator<Item = (usize, u64)> {
    let (mut next, end) = (first.get(), (first.get() + count).min(SPAN));
    core::iter::from_fn(move || {
        if next >= end {
            return None;
        }
        let (at, bit) = (next / WORD_BITS, next % WORD_BITS);
        next = ((at + 1) * WORD_BITS).min(end);
        Some((at, u64::MAX << bit & u64::MAX >> (next.wrapping_neg() % WORD_BITS)))
    })
}

/// Where naturally aligned runs of `2^order` set bits begin, order at most 6.
#[inline(never)]
pub(crate) fn runs_in(word: u64, order: u32) -> u64 {
    let (mut runs, mut length) = (word, 1);
    while length >> order == 0 {
        runs &= runs >> length;
        length *= 2;
    }
    runs & every(order)
}

/// The first naturally aligned run of `2^order` positions that are all set. One copy of that code, for all who look for a place.
pub(crate) fn first_run<L>(order: u32, words: &[u64; WORDS]) -> Option<Position<L>> {
    first_in(order, words).map(Position::new)
}

#[inline(never)]
fn first_in(order: u32, words: &[u64; WORDS]) -> Option<usize> {
    let each = 1_usize << (order.clamp(WORD_BITS.ilog2(), SPAN_SHIFT) - WORD_BITS.ilog2());
    words.chunks_exact(each).enumerate().find_map(|(at, run)| {
        let runs = match run {
            [0] => 0,
            [word] => runs_in(*word, order),
            _ => run.iter().all(|word| *word == u64::MAX).into(),
        };
        (runs != 0).then(|| at * each * WORD_BITS + runs.trailing_zeros() as usize)
    })
}

/// How many naturally aligned runs of each order the words consist of, each as large as can be.
#[inline(never)]
pub(crate) fn count_runs(words: [u64; WORDS]) -> [u64; SPAN_SHIFT as usize + 1] {
    let mut counts = [0; SPAN_SHIFT as usize + 1];
    let mut left = words;
    for order in (0..=SPAN_SHIFT).rev() {
        while let Some(first) = first_run::<Pages>(order, &left) {
            counts[order as usize] += 1;
            spans(first, 1 << order).for_each(|(at, bits)| left[at % WORDS] &= !bits);
        }
    }
    counts
}

/// Adds such numbers to sums, of which there may be fewer.
#[inline(never)]
pub(crate) fn add(sums: &mut [u64], counts: &[u64]) {
    sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum = sum.saturating_add(*count));
}

/// Every `2^order`th bit of a word, order at most 6 (bit 0 only).
pub(crate) const fn every(order: u32) -> u64 {
    match order {
        0 => u64::MAX,
        1 => 0x5555_5555_5555_5555,
        2 => 0x1111_1111_1111_1111,
        3 => 0x0101_0101_0101_0101,
        4 => 0x0001_0001_0001_0001,
        5 => 0x0000_0001_0000_0001,
        _ => 1,
    }
}
