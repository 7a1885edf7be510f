//! Frames that a flush has released, and pages whose descriptors are whole.

use super::Resize;
use crate::group::{Group, runs};
use crate::mapping::DescriptorMap;
use hugemm_base::lock::RawLock;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Dirty, Extent, Zeroed};
use hugemm_frames::Env;

/// Extents that are freed between two reschedule points.
const FREES: usize = 64;

impl<L: RawLock, E: Env, V: DescriptorMap> Resize<'_, '_, '_, L, E, V> {
    /// Frees extents that a flush has released; whether there were any.
    pub(super) fn free_some<P: Cpu>(&mut self, cx: &CpuCx<'_, P>) -> bool {
        for count in 0..FREES {
            let Some(extent) = self.debts.loose.pop(self.optimizer.frames) else { return count > 0 };
            self.report.freed_frames += self.optimizer.free(cx, extent);
        }
        true
    }

    /// Frees pages whose descriptors are whole: a run at once.
    pub(super) fn free_pages<P: Cpu>(&mut self, cx: &CpuCx<'_, P>, index: usize, group: &Group, pages: u64) {
        let Some(area) = self.pool.area_of(index) else { return };
        let size = self.pool.page_size();
        let zero = group.zero.get() & pages;
        group.zero.remove_shared(pages);
        // Poison is noted of what is staged: a strike in between would wait for the page's next stay.
        self.pool.locked(cx, |_| {
            group.bad.remove_shared(pages);
            group.staged.remove_shared(pages);
        });
        for (known, bits) in [(true, zero), (false, pages & !zero)] {
            for (first, length) in runs(bits) {
                let Ok(run) = Extent::new(area.page(size, index, first), length * size.pages()) else { continue };
                if known {
                    // SAFETY: the pages were staged, so they are the resize's, and are not any more; their descriptors are
                    // restored and flushed; whoever staged them noted that they are zero.
                    self.optimizer.frames.free_zeroed(cx, unsafe { Zeroed::assume_owned(run) });
                } else {
                    // SAFETY: as above.
                    self.optimizer.frames.free_extent(cx, unsafe { Dirty::assume_owned(run) });
                }
            }
        }
        self.report.left += u64::from(pages.count_ones());
    }
}
