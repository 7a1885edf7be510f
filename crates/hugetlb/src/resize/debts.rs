//! What a resize owes: frames that are mapped no longer, until a flush has released them.

use super::Resize;
use crate::mapping::DescriptorMap;
use crate::vmemmap::{Debt, Edit, VmemmapOptimizer, Work};
use hugemm_base::lock::RawLock;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, ExtentChain, VirtRange};
use hugemm_frames::Env;

/// What is owed: frames behind the next flush, or frames that only need freeing; and what the edits cost.
pub(super) struct Debts<'v, V: DescriptorMap> {
    owed: Option<Debt<'v, V>>,
    pub(super) loose: ExtentChain,
    taken: u64,
}

impl<'v, V: DescriptorMap> Debts<'v, V> {
    pub(super) fn new() -> Self {
        Debts { owed: None, loose: ExtentChain::new(), taken: 0 }
    }

    /// Puts what an edit left behind the next flush.
    pub(super) fn settle<E: Env>(&mut self, optimizer: &VmemmapOptimizer<'v, E, V>, work: &Work, mut edit: Edit) {
        self.taken += edit.allocated;
        if !edit.stored {
            return;
        }
        let debt = optimizer.owe(&mut edit, work.range());
        self.owed = Some(match self.owed.take() {
            None => debt,
            Some(others) => {
                // SAFETY: every chain of debts is linked through the optimizer's manager, here and below.
                match unsafe { others.append(optimizer.frames, debt) } {
                    Ok(joined) => joined,
                    // One mapping has one domain; a debt of another would be dropped into its quarantine.
                    Err((others, _)) => others,
                }
            }
        });
    }
}

impl<L: RawLock, E: Env, V: DescriptorMap> Resize<'_, '_, '_, L, E, V> {
    /// Flushes if something is owed, and releases it. When this returns, no CPU knows anything older than these edits.
    pub(super) fn pay<P: Cpu>(&mut self, cx: &CpuCx<'_, P>) {
        self.report.taken_frames += core::mem::take(&mut self.debts.taken);
        let Some(debt) = self.debts.owed.take() else { return };
        let range: VirtRange = debt.barrier().range();
        let receipt = self.optimizer.flush(cx, range);
        self.report.flushes += 1;
        match debt.release(&receipt) {
            // SAFETY: as above.
            Ok(chain) => unsafe { self.debts.loose.append(self.optimizer.frames, chain) },
            Err(debt) => self.debts.owed = Some(debt),
        }
    }
}
