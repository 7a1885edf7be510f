//! Size classes: which piece of which block a compressed page goes to.
//!
//! A class cuts blocks of 1 or 4 frames into equal pieces, at most 64 to a block, so that one word says which are free.
//! Up to a quarter of a page, single frames waste little; above, four contiguous frames hold 5, 6, 7, 9 to 11 or 13 to 15 pieces where
//! four single frames would hold 4, 8, 12 or 16. Where no such block is to be had, the next class of single frames does.

use hugemm_base::Order;

/// One size class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClassSpec {
    /// Bytes of a piece, header included; a multiple of 8.
    pub(crate) piece: u32,
    /// Pieces in a block.
    pub(crate) pieces: u32,
    /// log2 of a block's frames.
    pub(crate) order: u32,
}

/// In front of the data in each piece: its length, and how many hold it.
pub(crate) const HEADER: usize = 4;

const fn class(piece: u32, order: u32) -> ClassSpec {
    ClassSpec { piece, pieces: (4096 << order) / piece, order }
}

/// How many classes there are.
pub(crate) const CLASSES: usize = 24;

/// Every class, smallest piece first. Neighbours differ by at most a third.
pub(crate) const TABLE: [ClassSpec; CLASSES] = [
    class(64, 0),
    class(80, 0),
    class(104, 0),
    class(136, 0),
    class(168, 0),
    class(224, 0),
    class(288, 0),
    class(368, 0),
    class(448, 0),
    class(584, 0),
    class(680, 0),
    class(816, 0),
    class(1024, 0),
    class(1088, 2),
    class(1168, 2),
    class(1256, 2),
    class(1360, 0),
    class(1488, 2),
    class(1632, 2),
    class(1816, 2),
    class(2048, 0),
    class(2336, 2),
    class(2728, 2),
    class(3272, 2),
];

/// The smallest class whose pieces hold `bytes` of data; `None` if the page is better kept whole.
pub(crate) fn class_for(bytes: usize) -> Option<usize> {
    let need = bytes.checked_add(HEADER)?;
    let index = TABLE.partition_point(|class| (class.piece as usize) < need);
    (index < CLASSES).then_some(index)
}

/// The next larger class of single frames, for when no block of four is free.
pub(crate) fn single_frame_class(from: usize) -> Option<usize> {
    (from..CLASSES).find(|index| TABLE[*index].order == 0)
}

impl ClassSpec {
    /// A block all of whose pieces are free.
    pub(crate) const fn all_free(self) -> u64 {
        u64::MAX >> (64 - self.pieces)
    }

    /// The order of a block.
    pub(crate) const fn block_order(self) -> Order {
        match Order::new(self.order) {
            Ok(order) => order,
            Err(_) => Order::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sound() {
        for (index, class) in TABLE.iter().enumerate() {
            assert!(class.pieces >= 2 && class.pieces <= 64, "{class:?}");
            assert!(class.piece * class.pieces <= 4096 << class.order, "{class:?}");
            assert_eq!(class.piece % 8, 0);
            assert_eq!(class.all_free().count_ones(), class.pieces);
            if let Some(next) = TABLE.get(index + 1) {
                assert!(next.piece > class.piece);
                assert!(next.piece * 3 <= class.piece * 4, "{class:?} {next:?}");
            }
            // No larger piece of the same number would fit.
            assert!((class.piece + 8) * class.pieces > 4096 << class.order, "{class:?} wastes");
        }
    }

    #[test]
    fn every_length_gets_the_smallest_class() {
        for bytes in (0..5000_usize).step_by(if cfg!(miri) { 61 } else { 1 }) {
            match class_for(bytes) {
                Some(index) => {
                    assert!(bytes + HEADER <= TABLE[index].piece as usize);
                    assert!(index == 0 || bytes + HEADER > TABLE[index - 1].piece as usize);
                }
                None => assert!(bytes + HEADER > TABLE[CLASSES - 1].piece as usize),
            }
        }
        assert_eq!(class_for(usize::MAX), None);
    }

    #[test]
    fn classes_of_four_frames_have_a_way_out() {
        for (index, class) in TABLE.iter().enumerate() {
            match single_frame_class(index) {
                Some(other) => assert!(TABLE[other].order == 0 && TABLE[other].piece >= class.piece),
                // Kept whole then.
                None => assert!(class.piece > 2048),
            }
        }
    }

    /// What a page takes beyond its bytes: an eighth of its frames at most, from a quarter of a page to a half.
    #[test]
    fn little_is_wasted_where_most_pages_are() {
        for bytes in 1024 - HEADER..=2048 - HEADER {
            let class = TABLE[class_for(bytes).expect("below half a page")];
            let (frames, used) = (4096 << class.order, class.pieces * (bytes + HEADER) as u32);
            assert!(used * 8 >= frames * 7, "{bytes}: {class:?}");
        }
    }
}
