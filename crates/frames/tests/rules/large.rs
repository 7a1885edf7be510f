//! Extents of any size, from a page to more than a GiB, taken and freed beside a bitmap: no frame has two owners, none is lost.

use super::support::{arena, with_arenas};
use super::{GIB, order};
use crate::support::Threads;
use hugemm_base::{CpuCx, Dirty, Extent, Order};
use hugemm_frames::{AllocRequest, Frames, Frozen, Mobility};
use hugemm_threads::Random;
use std::mem::replace;

/// What is taken, and by which blocks.
struct Owned<'a, 'm> {
    frames: &'a Frames<'m>,
    cx: &'a CpuCx<'a, Threads>,
    taken: Vec<bool>,
    blocks: Vec<Extent>,
}

const BASE: u64 = GIB;
const PAGES: u64 = 3 * GIB;

impl Owned<'_, '_> {
    /// Says that frames have another owner, which they had not.
    fn set(&mut self, extent: Extent, taken: bool) {
        for page in extent.base().get()..extent.end().get() {
            assert_ne!(replace(&mut self.taken[(page - BASE) as usize], taken), taken, "frame {page:#x}");
        }
    }

    fn take(&mut self, order: Order) -> bool {
        let Ok(block) = self.frames.alloc(self.cx, AllocRequest::order(order)) else { return false };
        let extent = block.into_dirty().into_extent();
        self.set(extent, true);
        self.blocks.push(extent);
        true
    }

    fn free(&mut self, extent: Extent) {
        self.set(extent, false);
        // SAFETY: taken as blocks that are whole in it, and forgotten.
        self.frames.free_extent(self.cx, unsafe { Dirty::assume_owned(extent) });
    }

    /// Frees blocks of `blocks`, those that adjoin together, or each by itself.
    fn free_all(&mut self, blocks: Vec<Extent>, together: bool) {
        let mut run = Extent::default();
        for next in blocks {
            if !together {
                self.set(next, false);
                let order = next.as_block().expect("a block");
                // SAFETY: taken as this block, and forgotten.
                self.frames.free(self.cx, unsafe { Frozen::assume_owned(next.base(), order, Mobility::Unmovable) });
            } else if let Some(joined) = run.join(next).or_else(|| next.join(run)) {
                run = joined;
            } else {
                self.free(replace(&mut run, next));
            }
        }
        if !run.is_empty() {
            self.free(run);
        }
    }

    /// All that is not taken is free, and everything that is free can be taken.
    fn check(&mut self) {
        let free = self.taken.iter().filter(|taken| !**taken).count() as u64;
        assert_eq!(self.frames.stats(self.cx).available(), free);
    }
}

#[test]
#[cfg_attr(miri, ignore = "gibibytes of descriptors")]
fn extents_of_any_size_have_one_owner() {
    for seed in 0..8 {
        // The arenas meet inside a 128 MiB.
        let arenas = [arena(BASE, GIB + 0x4a00, 0), arena(BASE + GIB + 0x4a00, 2 * GIB - 0x4a00, 0)];
        with_arenas(&arenas, 1, &[], |frames, threads| {
            let (cx, mut random) = (threads.cx(), Random(seed));
            let mut owned = Owned { frames, cx: &cx, taken: vec![false; PAGES as usize], blocks: Vec::new() };
            for _ in 0..60 {
                let largest = order([0, 3, 7, 9, 9, 9, 12, 18][random.below(8) as usize]);
                let count = random.below((PAGES / 2) >> largest.get()).min(2000) + 1;
                for _ in 0..count {
                    if !owned.take(if random.below(50) == 0 { Order::ZERO } else { largest }) {
                        break;
                    }
                }
                // A stretch of all that is held goes, by frame.
                owned.blocks.sort_by_key(|block| block.base());
                let from = random.below(owned.blocks.len() as u64 + 1) as usize;
                let to = (from + random.below(2500) as usize).min(owned.blocks.len());
                let mut gone: Vec<Extent> = owned.blocks.drain(from..to).collect();
                if random.below(2) == 0 {
                    gone.reverse();
                }
                owned.free_all(gone, random.below(4) != 0);
                owned.check();
            }
            let rest = std::mem::take(&mut owned.blocks);
            owned.free_all(rest, true);
            owned.check();
            frames.drain(&cx);
            for _ in 0..2 {
                assert!(owned.take(Order::MAX), "all of it is whole again");
            }
        });
    }
}
