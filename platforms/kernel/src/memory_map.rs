//! Which memory is ours, and who gets it before there is an allocator.

use crate::pvh::Entry;
use core::fmt;
use hugemm_base::{Extent, Order, PAGE_BYTES, Pfn};

/// Most pieces that a map can have.
pub const MOST: usize = 64;

/// Memory below this is left to the firmware and to the start of CPUs.
pub const LOW: u64 = 1 << 20;

/// Extents of free memory: ascending, not touching, at most [`MOST`]. Fixed size, because it exists before any memory.
#[derive(Clone, Debug)]
pub struct MemoryMap {
    pieces: [Extent; MOST],
    count: usize,
}

/// Why memory cannot be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapError {
    /// More than [`MOST`] pieces.
    TooFragmented,
    /// No run of this many frames is left.
    Exhausted {
        /// How many were asked for.
        pages: u64,
    },
}

impl fmt::Display for MapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MapError::TooFragmented => write!(f, "the memory map has more than {MOST} pieces"),
            MapError::Exhausted { pages } => {
                write!(f, "no {} KiB of memory in a row are left to boot with; use a larger --memory", pages * 4)
            }
        }
    }
}

impl core::error::Error for MapError {}

impl MemoryMap {
    /// The usable memory of a loader's map: whole frames of RAM above [`LOW`] that no other entry overlaps.
    pub fn new(entries: impl Iterator<Item = Entry> + Clone) -> Result<Self, MapError> {
        let mut map = MemoryMap { pieces: [Extent::default(); MOST], count: 0 };
        for entry in entries.clone().filter(|entry| entry.ram) {
            let end = entry.start.saturating_add(entry.bytes) / PAGE_BYTES;
            let start = entry.start.max(LOW).div_ceil(PAGE_BYTES);
            if let Ok(extent) = Extent::new(Pfn::new(start), end.saturating_sub(start)) {
                map.remove(extent)?;
                map.give(extent)?;
            }
        }
        for entry in entries.filter(|entry| !entry.ram && entry.bytes > 0) {
            let start = entry.start / PAGE_BYTES;
            let end = entry.start.saturating_add(entry.bytes).div_ceil(PAGE_BYTES).min(Pfn::LIMIT.get());
            if let Ok(extent) = Extent::new(Pfn::new(start), end.saturating_sub(start)) {
                map.remove(extent)?;
            }
        }
        Ok(map)
    }

    /// The pieces, ascending.
    pub fn pieces(&self) -> &[Extent] {
        &self.pieces[..self.count]
    }

    /// Frames in all.
    pub fn pages(&self) -> u64 {
        self.pieces().iter().map(|piece| piece.pages()).sum()
    }

    /// Adds memory that is not in the map, joined with what it touches.
    pub fn give(&mut self, extent: Extent) -> Result<(), MapError> {
        if extent.is_empty() {
            return Ok(());
        }
        let at = self.pieces().partition_point(|piece| piece.base() < extent.base());
        let mut merged = extent;
        let mut first = at;
        if let Some(joined) = at.checked_sub(1).and_then(|before| self.pieces[before].join(merged)) {
            (merged, first) = (joined, at - 1);
        }
        let mut last = at;
        if let Some(joined) = self.pieces().get(at).and_then(|next| merged.join(*next)) {
            (merged, last) = (joined, at + 1);
        }
        self.replace(first, last, &[merged])
    }

    /// Takes memory out; what of it is not in the map does not matter.
    pub fn remove(&mut self, extent: Extent) -> Result<(), MapError> {
        let mut index = 0;
        while let Some(piece) = self.pieces().get(index).copied() {
            let hit = piece.intersection(extent);
            if hit.is_empty() {
                index += 1;
                continue;
            }
            let (before, after) = piece.without(hit);
            let both = [before, after];
            let rest = match (before.is_empty(), after.is_empty()) {
                (true, true) => &both[..0],
                (false, true) => &both[..1],
                (true, false) => &both[1..],
                (false, false) => &both[..],
            };
            self.replace(index, index + 1, rest)?;
            index += rest.len();
        }
        Ok(())
    }

    /// Takes `pages` frames in a row, aligned to `align`, from the lowest place that has them.
    pub fn take(&mut self, pages: u64, align: Order) -> Result<Extent, MapError> {
        for piece in self.pieces() {
            let base = piece.base().get().next_multiple_of(align.pages());
            if let Ok(extent) = Extent::new(Pfn::new(base), pages)
                && piece.covers(extent)
            {
                self.remove(extent)?;
                return Ok(extent);
            }
        }
        Err(MapError::Exhausted { pages })
    }

    /// Replaces the pieces `first..last` by others.
    fn replace(&mut self, first: usize, last: usize, by: &[Extent]) -> Result<(), MapError> {
        let count = self.count - (last - first) + by.len();
        if count > MOST {
            return Err(MapError::TooFragmented);
        }
        self.pieces.copy_within(last..self.count, first + by.len());
        self.pieces[first..first + by.len()].copy_from_slice(by);
        self.count = count;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ram(start: u64, bytes: u64) -> Entry {
        Entry { start, bytes, ram: true }
    }

    fn extent(base: u64, pages: u64) -> Extent {
        Extent::new(Pfn::new(base), pages).expect("in range")
    }

    fn order(n: u32) -> Order {
        Order::new(n).expect("an order")
    }

    #[test]
    fn a_machine_with_memory_above_4_gib() {
        let reserved = Entry { start: 0x7ffe_0000, bytes: 0x2_0000, ram: false };
        let entries = [ram(0, 0x9fc00), ram(1 << 32, 1 << 30), ram(1 << 20, 0x7ff0_0000), reserved];
        let map = MemoryMap::new(entries.into_iter()).expect("fits");
        assert_eq!(map.pieces(), [extent(0x100, 0x7ffe0 - 0x100), extent(1 << 20, 1 << 18)]);
    }

    #[test]
    fn parts_of_frames_and_overlaps_are_left_out() {
        let entries = [ram(0x10_0800, 0x2000), ram(0x10_1000, 0x3000), ram(0x20_0000, u64::MAX)];
        let map = MemoryMap::new(entries.into_iter()).expect("fits");
        assert_eq!(map.pieces()[0], extent(0x101, 3));
    }

    #[test]
    fn frames_are_taken_aligned_and_from_the_lowest_place() {
        let mut map = MemoryMap::new([ram(1 << 20, 8 << 20)].into_iter()).expect("fits");
        assert_eq!(map.take(512, order(9)), Ok(extent(512, 512)));
        assert_eq!(map.take(1, order(0)), Ok(extent(256, 1)));
        assert_eq!(map.pieces(), [extent(257, 255), extent(1024, 1280)]);
        assert_eq!(map.take(2000, order(0)), Err(MapError::Exhausted { pages: 2000 }));
    }

    proptest! {
        /// Beside an oracle of single frames.
        #[test]
        fn the_map_is_the_set_of_ram_frames(list in prop::collection::vec((0_u64..400, 0_u64..64, any::<bool>()), 0..12)) {
            let entries: Vec<_> = list.iter().map(|(start, pages, ram)| Entry {
                start: LOW + start * 4096, bytes: pages * 4096, ram: *ram,
            }).collect();
            let map = MemoryMap::new(entries.iter().copied()).expect("few pieces");
            let base = LOW / 4096;
            let covered = |frame: u64, kind: bool| list.iter().any(|(start, pages, ram)| {
                *ram == kind && (base + start..base + start + pages).contains(&frame)
            });
            for frame in base..base + 500 {
                let expected = covered(frame, true) && !covered(frame, false);
                let found = map.pieces().iter().any(|piece| piece.contains(Pfn::new(frame)));
                prop_assert_eq!(found, expected, "frame {}", frame);
            }
            for pair in map.pieces().windows(2) {
                prop_assert!(pair[0].end() < pair[1].base());
            }
        }
    }
}
