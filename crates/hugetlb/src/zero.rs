//! Clearing pages before somebody waits for them.
//!
//! A pool knows which of its free pages are zero: those that the allocator knew to be, and those cleared here. They are
//! handed out as zero, so whoever takes one clears nothing; and when they leave, the allocator knows. One primitive for
//! all of it: the allocator's [`Zeroer`].

use crate::group::each;
use crate::pool::HugePool;
use hugemm_base::lock::RawLock;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Dirty, Extent};
use hugemm_frames::Zeroer;

impl<L: RawLock> HugePool<'_, L> {
    /// Clears up to `pages` free pages that are not known to be zero and not promised; how many. Each is out of the pool's
    /// free pages while it is cleared (it counts as active). For a worker, or for filling a pool with zeroed pages. May
    /// sleep; O(groups) for a call, one lock round before and after each page.
    pub fn zero_free<P: Cpu>(&self, cx: &mut CpuCx<'_, P>, zeroer: &impl Zeroer<P>, pages: u64) -> u64 {
        let mut done = 0;
        for area in self.areas() {
            for index in area.range(self.size()) {
                let Some(group) = self.group(index) else { continue };
                for bit in each(group.good() & !group.zero.get()) {
                    if done == pages {
                        return done;
                    }
                    let (mask, node) = (1 << bit, area.node().0 as usize);
                    let taken = self.locked(cx, |state| {
                        let Some(counts) = state.nodes[node].take().filter(|_| state.available() > 0) else {
                            return false;
                        };
                        let mine = group.good() & !group.zero.get() & mask != 0;
                        if mine {
                            state.nodes[node] = counts;
                            group.free.remove(mask);
                            self.summarise(index);
                        }
                        mine
                    });
                    if !taken {
                        continue;
                    }
                    let page = Extent::block(area.page(self.size(), index, bit), self.size().order());
                    // SAFETY: the page is free no more, and nobody was given it.
                    let zeroed = zeroer.zero(cx, unsafe { Dirty::assume_owned(page) });
                    let is_zero = zeroed.is_ok();
                    let back = zeroed.map_or_else(Dirty::into_extent, hugemm_base::Zeroed::into_extent);
                    if back != page {
                        // Whoever cleared keeps the page and gave something else: it stays in use.
                        return done;
                    }
                    self.locked(cx, |state| {
                        state.give(node, group, mask);
                        if is_zero {
                            group.zero.add_shared(mask);
                        }
                        self.summarise(index);
                    });
                    done += u64::from(is_zero);
                    if !is_zero {
                        return done;
                    }
                }
            }
        }
        done
    }
}
