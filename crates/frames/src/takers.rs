//! Who took from which chunk of 256 frames last: what [`chunk`](crate::chunk) goes by.

use crate::blockmap::{Pages, Position, SPAN_SHIFT};
use crate::mobility::Mobility;
use hugemm_base::Pfn;
use hugemm_base::sync::{AtomicU64, Ordering};

/// log2 of the frames in a chunk: two bits each fill a line of 64 bytes.
pub(crate) const CHUNK_SHIFT: u32 = 8;

/// Chunks of a 2 MiB block.
pub(crate) const HALVES: usize = 1 << (SPAN_SHIFT - CHUNK_SHIFT);

/// Which CPU took from each chunk of a 2 MiB block last: its number plus 1 in 32 bits each. Node's lock.
#[derive(Debug, Default)]
pub(crate) struct Takers(AtomicU64);

impl Takers {
    pub(crate) fn of(&self, half: usize) -> Option<u32> {
        // Relaxed: the lock orders, here and below.
        ((self.0.load(Ordering::Relaxed) >> (half % HALVES * 32)) as u32).checked_sub(1)
    }

    pub(crate) fn note(&self, half: usize, cpu: u32) {
        let (old, shift) = (self.0.load(Ordering::Relaxed), half % HALVES * 32);
        self.0.store(old & !(u64::from(u32::MAX) << shift) | (u64::from(cpu) + 1) << shift, Ordering::Relaxed);
    }
}

/// The chunk that a CPU took from last, for each mobility: its number plus 1.
#[derive(Debug, Default)]
pub(crate) struct Chunks([AtomicU64; 2]);

impl Chunks {
    pub(crate) fn of(&self, mobility: Mobility) -> Option<u64> {
        self.0[mobility.index()].load(Ordering::Relaxed).checked_sub(1)
    }

    pub(crate) fn note(&self, mobility: Mobility, chunk: u64) {
        self.0[mobility.index()].store(chunk + 1, Ordering::Relaxed);
    }
}

/// The number of the chunk that a frame is in.
pub(crate) const fn chunk_of(pfn: Pfn) -> u64 {
    pfn.get() >> CHUNK_SHIFT
}

/// Which of a 2 MiB block's chunks a frame is in.
pub(crate) const fn half_of(pfn: Pfn) -> usize {
    Position::<Pages>::of(pfn).get() >> CHUNK_SHIFT
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_block_remembers_the_last_taker_of_each_half() {
        let takers = Takers::default();
        let both = || [takers.of(0), takers.of(1)];
        assert_eq!(both(), [None, None]);
        takers.note(0, 7);
        assert_eq!(both(), [Some(7), None]);
        takers.note(1, 0);
        assert_eq!(both(), [Some(7), Some(0)]);
        takers.note(0, u32::MAX - 1);
        takers.note(1, 5);
        assert_eq!(both(), [Some(u32::MAX - 1), Some(5)]);
        takers.note(0, 2);
        assert_eq!(both(), [Some(2), Some(5)]);
    }

    #[test]
    fn a_cpu_has_one_chunk_of_each_mobility() {
        let chunks = Chunks::default();
        let both = || Mobility::ALL.map(|mobility| chunks.of(mobility));
        assert_eq!(both(), [None, None]);
        chunks.note(Mobility::Unmovable, 0);
        assert_eq!(both(), [Some(0), None]);
        chunks.note(Mobility::Movable, 9);
        chunks.note(Mobility::Unmovable, 4);
        assert_eq!(both(), [Some(4), Some(9)]);
    }
}
