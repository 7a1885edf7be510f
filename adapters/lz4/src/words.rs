//! Pages of 64-bit words, by a small dictionary: after P. R. Wilson, S. F. Kaplan and Y. Smaragdakis, "The Case for Compressed
//! Caching in Virtual Memory Systems" (USENIX 1999), with words of 64 bits, and with repetition.
//!
//! Most words of a program's data are zero, or like one that was there shortly before: the same pointer, one into the same object, a
//! small number. So each word is one of four things, said by two bits, its tag:
//!
//! | tag | the word |
//! |---|---|
//! | 0 | zero |
//! | 1 | the last word that was neither zero nor this |
//! | 2 | like a word of the dictionary: a byte with its place and how many low bytes differ (0, 1, 2 or 4), then these |
//! | 3 | another: eight bytes |
//!
//! The dictionary has the last word for each of 64 hashes of a word's bits from 16 on, for compressing and restoring alike. What is written:
//! 16 bits that say which of the page's 16 groups of 32 words have tags other than 0; the tags of these, 64 bits each; and what belongs to
//! the tags 2 and 3, in the order of the page.

use hugemm_reclaim::{Corrupt, PageBytes};

/// Bytes that a page may take: beyond, LZ4 is worth its time.
const MOST: usize = 2048;

/// Words in a group: as many as there are tags in 64 bits.
const GROUP: usize = 32;
const GROUPS: usize = size_of::<PageBytes>() / 8 / GROUP;

/// Bytes in front of the values, at most.
const HEAD: usize = 2 + 8 * GROUPS;

/// Words of the dictionary.
const PLACES: usize = 64;

/// By the kind of what differs from a word of the dictionary, bytes that it takes, and the bits that it brings.
const BYTES: [u8; 4] = [1, 2, 3, 5];
const BROUGHT: [u64; 4] = [0, 0xff, 0xffff, 0xffff_ffff];

/// Where the dictionary has a word.
fn place(word: u64) -> usize {
    ((word >> 16).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize
}

/// Compresses a page and returns how many bytes of `into` it took; `None` if more than half of a page would be needed.
pub(crate) fn compress(page: &PageBytes, into: &mut [u8]) -> Option<usize> {
    let values = into.get_mut(HEAD..MOST)?;
    let (mut known, mut last) = ([0_u64; PLACES], 0);
    let mut all_tags = [0_u64; GROUPS];
    // A value is stored as eight bytes, of which the next one may overwrite some.
    let (mut at, mut end) = (0, 0);
    for (group, all) in page.as_chunks::<{ 8 * GROUP }>().0.iter().zip(&mut all_tags) {
        let mut tags = 0;
        for word in group.as_chunks::<8>().0 {
            let word = u64::from_le_bytes(*word);
            tags >>= 2;
            if word == 0 {
                continue;
            }
            if word == last {
                tags |= 1 << 62;
                continue;
            }
            last = word;
            let place = place(word);
            let differs = known[place] ^ word;
            known[place] = word;
            let into = values.get_mut(at..)?.first_chunk_mut()?;
            end = at + 8;
            if differs >> 32 != 0 {
                *into = word.to_le_bytes();
                at += 8;
                tags |= 3 << 62;
                continue;
            }
            // Sums, because nobody foresees which it is.
            let kind = [0, 8, 16].iter().map(|low| usize::from(differs >> low != 0)).sum::<usize>();
            *into = (word << 32 >> 24 | (kind << 6 | place) as u64).to_le_bytes();
            at += usize::from(BYTES[kind]);
            tags |= 2 << 62;
        }
        *all = tags;
    }
    let (mut groups, mut head) = (0_u16, 2);
    for (index, tags) in all_tags.iter().enumerate().filter(|(_, tags)| **tags != 0) {
        groups |= 1 << index;
        into[head..head + 8].copy_from_slice(&tags.to_le_bytes());
        head += 8;
    }
    into[..2].copy_from_slice(&groups.to_le_bytes());
    into.copy_within(HEAD..HEAD + end, head);
    Some(head + end)
}

/// Restores a page from what [`compress`] wrote; of anything else, an error or some page.
pub(crate) fn decompress(from: &[u8], page: &mut PageBytes) -> Result<(), Corrupt> {
    let (groups, from) = from.split_first_chunk::<2>().ok_or(Corrupt)?;
    let groups = u16::from_le_bytes(*groups);
    let (tags, values) = from.split_at_checked(8 * groups.count_ones() as usize).ok_or(Corrupt)?;
    let mut tags = tags.as_chunks::<8>().0.iter();
    let (mut known, mut last, mut at) = ([0_u64; PLACES], 0, 0);
    for (index, group) in page.as_chunks_mut::<{ 8 * GROUP }>().0.iter_mut().enumerate() {
        if groups & 1 << index == 0 {
            group.fill(0);
            continue;
        }
        let mut tags = u64::from_le_bytes(*tags.next().ok_or(Corrupt)?);
        for into in group.as_chunks_mut::<8>().0 {
            let tag = tags & 3;
            tags >>= 2;
            let word = match tag {
                0 => 0,
                1 => last,
                _ => {
                    let value =
                        u64::from_le_bytes(*values.get(at..).and_then(|rest| rest.first_chunk()).ok_or(Corrupt)?);
                    last = if tag == 3 {
                        at += 8;
                        value
                    } else {
                        let kind = (value >> 6 & 3) as usize;
                        at += usize::from(BYTES[kind]);
                        // What it brings is behind the byte that says where.
                        let bits = BROUGHT[kind];
                        known[value as usize % PLACES] & !bits | value >> 8 & bits
                    };
                    known[place(last)] = last;
                    last
                }
            };
            *into = word.to_le_bytes();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use hugemm_base::random::Random;
    use proptest::prelude::*;

    /// Bytes that a page of these words takes, if it is as it was afterwards and nothing beyond was written.
    fn taken(words: &[u64]) -> Option<usize> {
        let mut page = [0; 4096];
        page.as_chunks_mut::<8>().0.iter_mut().zip(words).for_each(|(to, word)| *to = word.to_le_bytes());
        let (mut into, mut back) = ([0xee; MOST + 8], [1; 4096]);
        let taken = compress(&page, &mut into);
        assert!(into[MOST..] == [0xee; 8]);
        if let Some(taken) = taken {
            assert!(taken <= MOST);
            decompress(&into[..taken], &mut back).expect("what was compressed");
            assert!(back == page);
            assert_eq!(decompress(&into[..taken - 1], &mut back), Err(Corrupt), "cut short");
        }
        taken
    }

    /// What each tag and each kind of value takes.
    #[test]
    fn words_take_what_they_say() {
        let (a, b) = (0x1234_5678_9abc_def0, 0xfedc_ba98_7654_3210);
        assert_eq!(taken(&[]), Some(2), "zeroes");
        assert_eq!(taken(&[0, 0, a]), Some(2 + 8 + 8));
        assert_eq!(taken(&[a; 512]), Some(2 + 16 * 8 + 8), "one word all over");
        assert_eq!(taken(&[a, 0, a, a]), Some(2 + 8 + 8), "again, behind a zero too");
        // The last value takes eight bytes in any case; so the one before it shows.
        let second = |word| taken(&[a, word, b]).map(|taken| taken - (2 + 8 + 8 + 8));
        assert_eq!(second(a ^ 1), Some(2));
        assert_eq!(second(a ^ 0x100), Some(3));
        assert_eq!(second(a ^ 0xffff), Some(3));
        assert_ne!(place(a), place(b), "else the next is another");
        assert_eq!(taken(&[a, b, a, b]).map(|taken| taken - (2 + 8 + 16)), Some(1 + 8), "known, one after the other");
        // A word whose bits from 16 to 31 differ has the place of another by chance only.
        let mut near = (1..1 << 16).map(|bits| a ^ bits << 16).filter(|near| place(*near) == place(a));
        assert_eq!(near.next().and_then(second), Some(5));
        let far = (1..1 << 16).map(|bits| a ^ bits << 40).find(|far| place(*far) == place(a));
        assert_eq!(far.and_then(second), Some(8));
    }

    #[test]
    fn what_half_a_page_does_not_hold_is_left_to_others() {
        let mut random = Random(1);
        let words: Vec<u64> = (0..512).map(|_| random.word()).collect();
        let fits = (MOST - HEAD) / 8;
        assert!(taken(&words[..fits]).is_some() && taken(&words[..fits + 1]).is_none());
        assert_eq!(taken(&words), None);
        assert_eq!(compress(&[0; 4096], &mut [0; MOST - 1]), None, "no room");
    }

    fn likely() -> impl Strategy<Value = u64> {
        prop_oneof![
            3 => Just(0),
            2 => 0..256_u64,
            3 => (0..8_u64, any::<u16>()).prop_map(|(object, low)| 0x7f00_0000_0000 + (object << 20) + u64::from(low)),
            1 => any::<u32>().prop_map(|low| 0x7f00_0000_0000 | u64::from(low)),
            1 => any::<u64>(),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..if cfg!(miri) { ProptestConfig::with_cases(2) } else { ProptestConfig::default() } })]

        #[test]
        fn words_come_back(words in proptest::collection::vec((likely(), 1..9_usize), 0..300)) {
            let words: Vec<u64> = words.into_iter().flat_map(|(word, times)| core::iter::repeat_n(word, times)).collect();
            let words = &words[..words.len().min(512)];
            prop_assert!(taken(words).is_some() || words.iter().filter(|word| **word != 0).count() > 200);
        }

        #[test]
        fn anything_is_an_error_or_a_page(data in proptest::collection::vec(any::<u8>(), 0..3000)) {
            let mut guarded = [[0xee; 4096]; 3];
            let _ = decompress(&data, &mut guarded[1]);
            prop_assert!(guarded[0] == [0xee; 4096] && guarded[2] == [0xee; 4096]);
        }
    }
}
