//! The decoder of LZ4 blocks: a page is known to be 4 KiB, so matches are copied by eight bytes at a time, also those that
//! overlap themselves, by which LZ4 says that something repeats.

use hugemm_reclaim::PageBytes;

/// So many bytes are copied at once.
const STEP: usize = 8;

/// Decodes a block that fills `into` exactly; `None` if this one does not, or is none: then `into` has anything.
pub(crate) fn decode(from: &[u8], into: &mut PageBytes) -> Option<()> {
    let (mut read, mut wrote) = (0, 0);
    loop {
        let token = usize::from(*from.get(read)?);
        read += 1;
        let literals = length(token >> 4, from, &mut read)?;
        if literals <= 2 * STEP && read + 2 * STEP <= from.len() && wrote + 2 * STEP <= into.len() {
            // What is too much is written over.
            for at in [0, STEP] {
                into[wrote + at..wrote + at + STEP].copy_from_slice(&word(from, read + at));
            }
        } else {
            into.get_mut(wrote..wrote + literals)?.copy_from_slice(from.get(read..read + literals)?);
        }
        (read, wrote) = (read + literals, wrote + literals);
        if read == from.len() {
            return (wrote == into.len()).then_some(());
        }
        let distance = usize::from(u16::from_le_bytes([*from.get(read)?, *from.get(read + 1)?]));
        read += 2;
        let end = wrote + 4 + length(token & 15, from, &mut read)?;
        if distance == 0 || distance > wrote || end > into.len() {
            return None;
        }
        repeat(into, wrote, end, distance);
        wrote = end;
    }
}

/// A length of which a token has four bits: 15 says that bytes follow, to be added, the last of which is not 255.
#[inline]
fn length(bits: usize, from: &[u8], read: &mut usize) -> Option<usize> {
    let mut length = bits;
    let mut more = bits == 15;
    while more {
        let byte = *from.get(*read)?;
        *read += 1;
        length += usize::from(byte);
        more = byte == 255;
    }
    Some(length)
}

/// Fills `at..end` with what lies `distance` before, which may be what is just being written.
#[inline]
fn repeat(into: &mut PageBytes, at: usize, end: usize, distance: usize) {
    // Until what is read at once has been written: then it lies a step or more before, by a multiple of the distance.
    let apart = if distance < STEP { STEP.next_multiple_of(distance) } else { distance };
    let first = if end + STEP > into.len() { end } else { end.min(at + apart - distance) };
    for to in at..first {
        into[to] = into[to - distance];
    }
    if first == end {
        return;
    }
    let mut to = first;
    if apart == STEP {
        // The same each time.
        let bytes = word(into, to - STEP);
        while to < end {
            into[to..to + STEP].copy_from_slice(&bytes);
            to += STEP;
        }
        return;
    }
    while to < end {
        let bytes = word(into, to - apart);
        into[to..to + STEP].copy_from_slice(&bytes);
        to += STEP;
    }
}

#[inline]
fn word(bytes: &[u8], at: usize) -> [u8; STEP] {
    // Of that length.
    bytes[at..at + STEP].try_into().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use lz4_flex::block::{compress_into, get_maximum_output_size};
    use proptest::prelude::*;

    fn compressed(page: &PageBytes) -> Vec<u8> {
        let mut block = vec![0; get_maximum_output_size(page.len())];
        let len = compress_into(page, &mut block).expect("room");
        block.truncate(len);
        block
    }

    /// Something of every distance that repeats, up to every length, at every place in a word, and up to the page's end.
    #[test]
    #[cfg_attr(miri, ignore = "too many pages; the property tests do the same")]
    fn whatever_repeats_is_decoded() {
        for distance in 1..=40 {
            for length in [0, 1, 4, 7, 8, 9, 15, 16, 17, 40, 300] {
                let mut page = [0; 4096];
                let mut random = 1_u32;
                for at in 0..page.len() {
                    random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let repeats = at >= distance && at % (distance + length + 9) >= distance + 9;
                    page[at] = if repeats { page[at - distance] } else { (random >> 24) as u8 };
                }
                // To the last literals, which a block ends with.
                (4000..4091).for_each(|at| page[at] = page[at - distance]);
                let mut into = [0xa5; 4096];
                assert_eq!(decode(&compressed(&page), &mut into), Some(()));
                assert!(into == page, "distance {distance}, length {length}");
            }
        }
    }

    /// By hand, for what the library's coder does not write: a match that ends with the page, and one without literals.
    #[test]
    fn blocks_of_others_are_decoded() {
        let mut into = [0; 4096];
        // One literal, which repeats 4095 times: 15 + 4 + 15 * 255 + 251.
        let mut block = vec![0x1f, 7, 1, 0];
        block.extend([255; 15]);
        block.push(251);
        assert_eq!(decode(&block, &mut into), None, "a block ends with literals");
        block.push(0);
        assert_eq!(decode(&block, &mut into), Some(()));
        assert!(into.iter().all(|byte| *byte == 7));
        *block.last_mut().expect("not empty") = 0x10;
        block.push(9);
        assert_eq!(decode(&block, &mut into), None, "a byte more than the page");
        for (wrong, why) in [(0, "no distance"), (2, "from before the page")] {
            let mut block = block.clone();
            block[2] = wrong;
            assert_eq!(decode(&block, &mut into), None, "{why}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..if cfg!(miri) { ProptestConfig::with_cases(2) } else { ProptestConfig::default() } })]

        #[test]
        fn what_was_compressed_comes_back(bytes in prop::collection::vec(0_u8..4, 4096), noise: u64) {
            let mut page: PageBytes = bytes.try_into().expect("a page");
            page[(noise % 4096) as usize] = (noise >> 12) as u8;
            let mut into = [0xa5; 4096];
            prop_assert_eq!(decode(&compressed(&page), &mut into), Some(()));
            prop_assert!(into == page);
        }

        /// It is as the library's decoder has it, which is not told how long the page is.
        #[test]
        fn damage_is_found_or_decoded_as_elsewhere(bytes in prop::collection::vec(0_u8..4, 4096), damage: [(u16, u8); 4], cut: u16) {
            let page: PageBytes = bytes.try_into().expect("a page");
            let mut block = compressed(&page);
            for (at, byte) in damage {
                let at = usize::from(at) % block.len();
                block[at] = byte;
            }
            block.truncate(block.len() - usize::from(cut) % 64);
            let (mut into, mut elsewhere) = ([0xa5; 4096], [0xa5; 4096]);
            let expected = lz4_flex::block::decompress_into(&block, &mut elsewhere).is_ok_and(|len| len == 4096);
            prop_assert_eq!(decode(&block, &mut into).is_some(), expected);
            prop_assert!(!expected || into == elsewhere);
        }
    }
}
