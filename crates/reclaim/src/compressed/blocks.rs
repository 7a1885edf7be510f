//! The blocks of one size class: which have free pieces, and which piece to take.
//!
//! Blocks with free pieces are on one of two lists, by whether at most or more than half of their pieces are free. New
//! pages go to fuller blocks first, so that sparse ones run empty and go back to the allocator. Pages cannot be moved
//! (a slot says where they are), so this is all that is done against fragmentation; [`Usage`] says how much there is.
//!
//! All of it is under the class's lock; a few dozen instructions per call beside microseconds of compression, so one lock
//! per class is contended only by dozens of CPUs that all store pages of one size.

use crate::compressed::classes::ClassSpec;
use crate::links::{List, Words};
use crate::words::FREE;
use hugemm_base::Pfn;

/// Where a block with so many free pieces is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shelf {
    /// Nothing free: on no list.
    Full,
    /// At most half free.
    Fuller,
    /// More than half free.
    Sparser,
    /// Nothing used: to be given back.
    Empty,
}

const fn shelf_of(free: u32, pieces: u32) -> Shelf {
    match free {
        0 => Shelf::Full,
        all if all == pieces => Shelf::Empty,
        some if some * 2 <= pieces => Shelf::Fuller,
        _ => Shelf::Sparser,
    }
}

/// How well a class's memory is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Bytes of a piece.
    pub piece_bytes: u32,
    /// Blocks now.
    pub blocks: u64,
    /// Pieces in them.
    pub pieces: u64,
    /// Of those, pieces in use.
    pub used: u64,
    /// Bytes of data in the pieces in use.
    pub data_bytes: u64,
}

/// The state of one class. Under its lock.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    fuller: List,
    sparser: List,
    blocks: u64,
    used: u64,
    data_bytes: u64,
}

impl Blocks {
    /// Takes a free piece for `bytes` of data, if there is one.
    pub(crate) fn take(&mut self, words: &impl Words, spec: ClassSpec, bytes: usize) -> Option<(Pfn, u32)> {
        let block = self.fuller.first().or(self.sparser.first())?;
        let free = words.word(block, FREE);
        let index = free.trailing_zeros();
        self.change(words, spec, block, free, free & free.wrapping_sub(1));
        self.used += 1;
        self.data_bytes += bytes as u64;
        Some((block, index))
    }

    /// Adds a block of which the first piece is in use at once, for `bytes` of data.
    pub(crate) fn add(&mut self, words: &impl Words, spec: ClassSpec, block: Pfn, bytes: usize) {
        self.blocks += 1;
        self.used += 1;
        self.data_bytes += bytes as u64;
        self.change(words, spec, block, 0, spec.all_free() & !1);
    }

    /// Gives a piece back that is in use; true if the block is empty now, off the lists and no longer the class's.
    pub(crate) fn give(&mut self, words: &impl Words, spec: ClassSpec, block: Pfn, index: u32, bytes: usize) -> bool {
        let free = words.word(block, FREE);
        self.used = self.used.saturating_sub(1);
        self.data_bytes = self.data_bytes.saturating_sub(bytes as u64);
        let empty = self.change(words, spec, block, free, free | 1 << index) == Shelf::Empty;
        self.blocks -= u64::from(empty);
        empty
    }

    /// Replaces the free pieces of a block and puts it where it belongs then.
    fn change(&mut self, words: &impl Words, spec: ClassSpec, block: Pfn, old: u64, new: u64) -> Shelf {
        words.set_word(block, FREE, new);
        let (from, to) = (shelf_of(old.count_ones(), spec.pieces), shelf_of(new.count_ones(), spec.pieces));
        if from != to {
            if let Some(list) = self.list(from) {
                list.remove(words, block);
            }
            if let Some(list) = self.list(to) {
                list.push_front(words, block);
            }
        }
        to
    }

    fn list(&mut self, shelf: Shelf) -> Option<&mut List> {
        match shelf {
            Shelf::Fuller => Some(&mut self.fuller),
            Shelf::Sparser => Some(&mut self.sparser),
            Shelf::Full | Shelf::Empty => None,
        }
    }

    pub(crate) fn usage(&self, spec: ClassSpec) -> Usage {
        Usage {
            piece_bytes: spec.piece,
            blocks: self.blocks,
            pieces: self.blocks * u64::from(spec.pieces),
            used: self.used,
            data_bytes: self.data_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compressed::classes::TABLE;
    use crate::links::Map;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..if cfg!(miri) { ProptestConfig::with_cases(4) } else { ProptestConfig::default() } })]

        /// No piece is handed out twice, none is lost, empty blocks leave at once, and fuller blocks come first.
        #[test]
        fn pieces_agree_with_a_set(class in 0..TABLE.len(), ops in proptest::collection::vec(any::<u16>(), 0..400)) {
            let spec = TABLE[class];
            let words = Map::<0xdead>::default();
            let mut blocks = Blocks::default();
            // Block → pieces in use; the pieces in use in order.
            let mut model: BTreeMap<u64, BTreeSet<u32>> = BTreeMap::new();
            let mut held: Vec<(Pfn, u32)> = Vec::new();
            let mut next_block = 7;
            for op in ops {
                if op % 5 < 3 {
                    let (block, index) = match blocks.take(&words, spec, 10) {
                        Some(piece) => piece,
                        None => {
                            prop_assert!(model.values().all(|used| used.len() as u32 == spec.pieces));
                            let block = Pfn::new(next_block);
                            next_block += 4;
                            blocks.add(&words, spec, block, 10);
                            model.insert(block.get(), BTreeSet::new());
                            (block, 0)
                        }
                    };
                    prop_assert!(index < spec.pieces);
                    let used = model.get(&block.get()).map_or(0, BTreeSet::len) as u32;
                    // A sparse block is used only when there is no fuller one with room.
                    if used > 0 && used * 2 < spec.pieces {
                        let fuller = |used: &BTreeSet<u32>| {
                            let used = used.len() as u32;
                            used < spec.pieces && used * 2 >= spec.pieces
                        };
                        prop_assert!(!model.values().any(fuller));
                    }
                    prop_assert!(model.get_mut(&block.get()).expect("known").insert(index), "handed out twice");
                    held.push((block, index));
                } else if !held.is_empty() {
                    let (block, index) = held.swap_remove(op as usize % held.len());
                    let used = model.get_mut(&block.get()).expect("known");
                    used.remove(&index);
                    let empty = used.is_empty();
                    prop_assert_eq!(blocks.give(&words, spec, block, index, 10), empty);
                    if empty {
                        model.remove(&block.get());
                    }
                }
                let usage = blocks.usage(spec);
                prop_assert_eq!(usage.used, held.len() as u64);
                prop_assert_eq!(usage.blocks, model.len() as u64);
                prop_assert_eq!(usage.data_bytes, held.len() as u64 * 10);
            }
        }
    }
}
