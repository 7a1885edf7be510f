//! What a resize owes: frames that are mapped no longer, until a flush has released them.

use super::{Resize, add};
use crate::mapping::DescriptorMap;
use crate::vmemmap::{Debt, Edit, Work};
use hugemm_base::lock::RawLock;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, ExtentChain, VirtRange};
use hugemm_frames::Env;

/// What is owed: frames behind the next flush, or frames that only need freeing.
pub(super) struct Debts<'v, V: DescriptorMap> {
    pub(super) owed: Option<Debt<'v, V>>,
    pub(super) loose: ExtentChain,
}

impl<L: RawLock, E: Env, V: DescriptorMap> Resize<'_, '_, '_, L, E, V> {
    /// Puts what an edit left behind the next flush.
    pub(super) fn settle<P: Cpu>(&self, cx: &CpuCx<'_, P>, work: &Work, mut edit: Edit) {
        add(&self.tally.taken_frames, edit.allocated);
        if !edit.stored {
            return;
        }
        let debt = self.economy.owe(&mut edit, work.range());
        cx.pinned(|pin| {
            let mut debts = self.debts.lock(pin);
            debts.owed = Some(match debts.owed.take() {
                None => debt,
                Some(others) => {
                    let links = self.economy.frames;
                    let joined = others.merge(debt, |mut a: ExtentChain, b| {
                        // SAFETY: every chain of debts is linked through the economy's manager, here and below.
                        unsafe { a.append(links, b) };
                        a
                    });
                    match joined {
                        Ok(joined) => joined,
                        // One mapping has one domain; a debt of another would be dropped into its quarantine.
                        Err((others, _)) => others,
                    }
                }
            })
        });
    }

    /// Flushes if something is owed, and releases it.
    pub(super) fn flush<P: Cpu>(&self, cx: &CpuCx<'_, P>) {
        let Some(debt) = cx.pinned(|pin| self.debts.lock(pin).owed.take()) else { return };
        let range: VirtRange = debt.barrier().range();
        let receipt = self.economy.flush(cx, range);
        add(&self.tally.flushes, 1);
        match debt.release(&receipt) {
            // SAFETY: as above.
            Ok(chain) => cx.pinned(|pin| unsafe { self.debts.lock(pin).loose.append(self.economy.frames, chain) }),
            Err(debt) => cx.pinned(|pin| self.debts.lock(pin).owed = Some(debt)),
        }
    }
}
