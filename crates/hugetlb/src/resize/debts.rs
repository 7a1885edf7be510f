//! What a resize owes: frames that are mapped no longer, until a flush has released them.
//!
//! Debts belong to whoever made them, until they are paid or put with those of the whole resize. A worker that pays for
//! itself therefore waits for the flush of its own edits, never for one that somebody else is still about to make.

use super::{Resize, add};
use crate::mapping::DescriptorMap;
use crate::vmemmap::{Debt, Edit, VmemmapOptimizer, Work};
use hugemm_base::lock::RawLock;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, ExtentChain, VirtRange};
use hugemm_frames::Env;

/// What is owed: frames behind the next flush, or frames that only need freeing; and what the edits cost.
pub(super) struct Debts<'v, V: DescriptorMap> {
    pub(super) owed: Option<Debt<'v, V>>,
    pub(super) loose: ExtentChain,
    pub(super) taken: u64,
}

impl<'v, V: DescriptorMap> Debts<'v, V> {
    pub(super) fn new() -> Self {
        Debts { owed: None, loose: ExtentChain::new(), taken: 0 }
    }

    /// Puts what an edit left behind the next flush.
    pub(super) fn settle<E: Env>(&mut self, optimizer: &VmemmapOptimizer<'v, E, V>, work: &Work, mut edit: Edit) {
        self.taken += edit.allocated;
        if edit.stored {
            self.owe(optimizer, optimizer.owe(&mut edit, work.range()));
        }
    }

    fn owe<E: Env>(&mut self, optimizer: &VmemmapOptimizer<'v, E, V>, debt: Debt<'v, V>) {
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

    /// Takes over what others owe.
    fn append<E: Env>(&mut self, optimizer: &VmemmapOptimizer<'v, E, V>, others: Debts<'v, V>) {
        if let Some(debt) = others.owed {
            self.owe(optimizer, debt);
        }
        // SAFETY: as above.
        unsafe { self.loose.append(optimizer.frames, others.loose) };
        self.taken += others.taken;
    }
}

impl<'e, L: RawLock, E: Env, V: DescriptorMap> Resize<'_, '_, 'e, L, E, V> {
    /// Puts a worker's debts with those of the whole resize.
    pub(super) fn share<P: Cpu>(&self, cx: &CpuCx<'_, P>, debts: Debts<'e, V>) {
        cx.pinned(|pin| self.debts.lock(pin).append(self.optimizer, debts));
    }

    /// Flushes if something is owed, and releases it. When this returns, no CPU knows anything older than these edits.
    pub(super) fn pay<P: Cpu>(&self, cx: &CpuCx<'_, P>, debts: &mut Debts<'e, V>) {
        add(&self.tally.taken_frames, core::mem::take(&mut debts.taken));
        let Some(debt) = debts.owed.take() else { return };
        let range: VirtRange = debt.barrier().range();
        let receipt = self.optimizer.flush(cx, range);
        add(&self.tally.flushes, 1);
        match debt.release(&receipt) {
            // SAFETY: as above.
            Ok(chain) => unsafe { debts.loose.append(self.optimizer.frames, chain) },
            Err(debt) => debts.owed = Some(debt),
        }
    }

    /// The same for what the whole resize owes. Between two phases, when no worker has debts of its own.
    pub(super) fn flush<P: Cpu>(&self, cx: &CpuCx<'_, P>) {
        let mut all = cx.pinned(|pin| core::mem::replace(&mut *self.debts.lock(pin), Debts::new()));
        self.pay(cx, &mut all);
        self.share(cx, all);
    }
}
