//! A task that has a space to itself, across reschedule points: until it has finished areas neither come nor go, nothing is entered in
//! them, nothing copied and nothing pinned. That is a mark in the area list, not a lock: whoever meets it lets others run and
//! comes again.

use crate::address_space::AddressSpace;
use crate::cpu_masks::CpuMasks;
use crate::setup::{Cx, Setup};
use crate::vm::Vm;
use hugemm_base::Flushed;
use hugemm_paging::{Keep, ShootdownBatch, UserSpace};

/// However it ends: entries may have lost rights, and no access through an old one goes on when the space is everybody's again.
pub(crate) struct Alone<'a, 'v, 'p, S: Setup> {
    pub(crate) vm: &'a Vm<'v, S>,
    pub(crate) cx: &'a mut Cx<'p, S>,
    pub(crate) space: &'a AddressSpace<S>,
    pub(crate) batch: ShootdownBatch<'a, UserSpace, Keep, CpuMasks>,
}

impl<'a, 'v, 'p, S: Setup> Alone<'a, 'v, 'p, S> {
    /// Waits until nobody else has it.
    pub(crate) fn wait(vm: &'a Vm<'v, S>, cx: &'a mut Cx<'p, S>, space: &'a AddressSpace<S>) -> Self {
        while core::mem::replace(&mut space.areas().exclusive().alone, true) {
            vm.cond_resched(cx);
        }
        Alone::marked(vm, cx, space)
    }

    /// For whoever has marked the list.
    pub(crate) fn marked(vm: &'a Vm<'v, S>, cx: &'a mut Cx<'p, S>, space: &'a AddressSpace<S>) -> Self {
        Alone { vm, cx, space, batch: ShootdownBatch::new(space.tlb()) }
    }

    /// Flushes what has changed so far, if anything has.
    pub(crate) fn flush(&mut self) -> Option<Flushed<'a, UserSpace, Keep>> {
        let batch = core::mem::replace(&mut self.batch, ShootdownBatch::new(self.space.tlb()));
        (!batch.is_empty()).then(|| batch.flush(self.vm.shootdown(), self.cx, self.vm.shootdown_policy()))
    }
}

impl<S: Setup> Drop for Alone<'_, '_, '_, S> {
    fn drop(&mut self) {
        let _ = self.flush();
        self.space.areas().exclusive().alone = false;
    }
}
