//! Bits of a word, where each stands for a page or for 2 MiB.

/// The lowest run of each order in a word.
pub(crate) const RUNS: [u64; 7] = [1, 3, 0xf, 0xff, 0xffff, 0xffff_ffff, u64::MAX];

/// The same items, by one copy of the code that finds the next: for iterators that consist of much, and are used in several places.
pub(crate) fn one_copy<I: Iterator>(mut items: I) -> impl Iterator<Item = I::Item> {
    #[inline(never)]
    fn next<I: Iterator>(items: &mut I) -> Option<I::Item> {
        items.next()
    }
    core::iter::from_fn(move || next(&mut items))
}

/// The same items, of which the compiler does not know how many there are: a loop over them stays one.
#[inline]
pub(crate) fn one_loop<S>(items: S) -> S {
    core::hint::black_box(items)
}

/// How many bits of a word are set. One copy of it: without an instruction for it, it is fifteen others.
#[inline(never)]
pub(crate) fn ones(word: u64) -> u64 {
    word.count_ones().into()
}

/// How many bits of some words are set.
#[inline(never)]
pub(crate) fn count(words: &[u64]) -> u64 {
    one_loop(words).iter().copied().map(ones).sum()
}

/// The lowest `count` bits of a word.
#[inline(never)]
pub(crate) fn lowest(word: u64, count: u64) -> u64 {
    // The common case: all of them lie side by side.
    let (first, wanted) = (word.trailing_zeros(), u64::MAX.unbounded_shr(64 - count.min(64) as u32));
    if word.unbounded_shr(first) & wanted == wanted {
        return wanted.unbounded_shl(first);
    }
    let (mut rest, mut left) = (word, count);
    while rest != 0 && left != 0 {
        rest &= rest - 1;
        left -= 1;
    }
    word ^ rest
}

/// The set bits of a word, highest first.
pub(crate) fn descending(mut word: u64) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let bit = word.checked_ilog2()?;
        word ^= 1 << bit;
        Some(bit as usize)
    })
}

/// How often a property of maps and words is tried.
#[cfg(all(test, not(loom)))]
pub(crate) fn cases() -> proptest::test_runner::Config {
    let cases = if cfg!(miri) { 3 } else { 256 };
    proptest::test_runner::Config { cases, failure_persistence: None, ..Default::default() }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(crate::bits::cases())]

        #[test]
        fn the_lowest_bits_are_found_as_by_counting(word: u64, run in 0_u32..64, count in 0_u64..80) {
            for word in [word, word << run, u64::MAX << run, 0] {
                let each = (0..64).filter(|bit| word >> bit & 1 != 0);
                let expected = each.take(count as usize).fold(0, |sum, bit| sum | 1_u64 << bit);
                prop_assert_eq!(lowest(word, count), expected);
            }
            let up = (0..64).filter(|bit| word >> bit & 1 != 0);
            prop_assert!(descending(word).eq(up.rev()));
        }
    }
}
