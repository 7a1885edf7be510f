//! Which of some words are the highest, and the others in order: what a cache that is drained asks. The core library's selection and sorting
//! are as fast, and ten times as much code.
//!
//! Words part by the highest bit in which they differ, on the side that matters, until there are only a few: O(n) to select, and a pass per
//! bit at most, whatever the words are. Nothing branches on what is compared, because nobody could predict it.

/// So many are sorted by comparing all with all.
const FEW: usize = 12;

/// Brings the `count` highest words to the front, in any order, and the others behind them in descending order. Words in ascending order are
/// turned round, and those in descending order stay, so that neighbours stay together.
#[inline(never)]
pub(crate) fn highest_first(words: &mut [u64], count: usize) {
    let is_down = words.first() > words.last();
    // Of which all go, in any order.
    if is_down && count >= words.len() {
        return;
    }
    let is_in_order = |pair: &[u64]| if is_down { pair[0] >= pair[1] } else { pair[0] <= pair[1] };
    match (words.windows(2).all(is_in_order), is_down) {
        (true, true) => {}
        (true, false) => words.reverse(),
        (false, _) => part(words, count),
    }
}

/// The same of words in no order. The stack is as deep as the length's logarithm.
#[inline(never)]
fn part(mut words: &mut [u64], mut count: usize) {
    while count < words.len() {
        if words.len() <= FEW {
            return sort_few(words);
        }
        let (all, any) = words.iter().fold((u64::MAX, 0), |(all, any), word| (all & word, any | word));
        let Some(bit) = (all ^ any).checked_ilog2() else { return };
        let mut high = 0;
        for at in 0..words.len() {
            let is_high = words[at] >> bit & 1;
            words.swap(at, high);
            high += is_high as usize;
        }
        let (highs, lows) = words.split_at_mut(high);
        let (of_highs, of_lows) = (count.min(high), count.saturating_sub(high));
        if highs.len() < lows.len() {
            part(highs, of_highs);
            (words, count) = (lows, of_lows);
        } else {
            part(lows, of_lows);
            (words, count) = (highs, of_highs);
        }
    }
}

/// In descending order.
fn sort_few(words: &mut [u64]) {
    let mut rest = words;
    while let [first, others @ ..] = rest {
        for other in &mut *others {
            (*first, *other) = ((*first).max(*other), (*first).min(*other));
        }
        rest = others;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use hugemm_threads::Random;

    /// Against the library's sorting.
    fn check(words: &[u64], count: usize) {
        let mut sorted = words.to_vec();
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        let mut found = words.to_vec();
        highest_first(&mut found, count);
        assert_eq!(found[count..], sorted[count..], "{count} of {words:x?}");
        found[..count].sort_unstable_by(|a, b| b.cmp(a));
        assert_eq!(found, sorted, "{count} of {words:x?}");
    }

    #[test]
    fn the_highest_come_first_and_the_others_in_order() {
        let mut random = Random(1);
        for len in (0..=2 * FEW as u64 + 2).chain([64, 500]) {
            for range in [2, len.max(1), 1 << 20, u64::MAX] {
                let words: Vec<u64> = (0..len).map(|_| random.below(range)).collect();
                for count in [0, 1, len / 2, 3 * len / 4, len.saturating_sub(1), len] {
                    check(&words, count.min(len) as usize);
                }
            }
        }
    }

    /// One bit apart each: as many passes as can be, and a stack that is no deeper for it.
    #[test]
    fn words_that_part_one_by_one() {
        let words: Vec<u64> = (0..64).map(|bit| 1 << (bit * 37 % 64)).chain([0]).collect();
        (0..=words.len()).for_each(|count| check(&words, count));
    }

    #[test]
    fn what_is_in_order_keeps_together() {
        let ascending: Vec<u64> = (0..40).collect();
        let descending: Vec<u64> = (0..40).rev().collect();
        for words in [&ascending, &descending] {
            let mut found = words.clone();
            highest_first(&mut found, 30);
            assert_eq!(found, descending);
        }
    }
}
