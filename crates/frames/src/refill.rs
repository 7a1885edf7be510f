//! What moves between a CPU's cache and its node: refills, drains, and the requests of other CPUs for them.
//!
//! When and how much is said in [`pcp`](crate::pcp). One lock round moves many blocks: a refill as many as the cache wants,
//! a drain 64 words of pages.

use crate::arena::BLOCK_ORDER;
use crate::chunk;
use crate::class::Class;
use crate::drain::Due;
use crate::frames::{Env, Frames};
use crate::free2m::Batch;
use crate::free4k::Run;
use crate::freelist::FreeLists;
use crate::frozen::Frozen;
use crate::mobility::Mobility;
use crate::node::Taken;
use crate::pcp::PerCpu;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, CpuId, CpuPin, NodeId, Order};

/// Words of a 2 MiB that a refill takes blocks of in one lock round.
const RUNS: usize = 16;

impl<'m, E: Env> Frames<'m, E> {
    /// Moves blocks from the node into a cache: one lock round, in pieces as large as are free.
    pub(crate) fn refill(
        &self,
        pin: CpuPin<'_>,
        own: &PerCpu<'m>,
        class: &Class<'m>,
        node: NodeId,
        size: Order,
        mobility: Mobility,
    ) {
        let want = class.want();
        let order = size.get();
        if order == BLOCK_ORDER {
            let batches = self.with_node(pin, node, |lists| self.take_many_2m(lists, want));
            for taken in batches.iter().flatten().rev().flat_map(Batch::descending) {
                own.found(class, order, taken.pfn);
                // At most half of what the watermark allows.
                let _ = class.push(Frozen::make(taken.pfn, size, mobility, taken.zero));
            }
            return;
        }
        let apart = chunk::is_worth_it(want).then_some(own);
        let mut runs = [Run::default(); RUNS];
        self.with_node(pin, node, |lists| {
            self.return_gathered(lists, own);
            let (mut got, mut place) = (0, None);
            for run in &mut runs {
                if got >= want {
                    break;
                }
                let Some(found) = place.take().or_else(|| self.find_4k(lists, order, mobility, false, apart)) else {
                    break;
                };
                let arena = found.arena;
                let (taken, next) = self.take_4k(lists, found, order, want - got);
                // What comes next may be in another CPU's chunk.
                (*run, place) = (taken, next.filter(|_| apart.is_none()));
                got += taken.count();
                // The highest of a word is as near as the lowest.
                for Taken { pfn, .. } in taken.descending().take(1) {
                    own.found(class, order, pfn);
                    self.note_chunk(own, arena, pfn);
                }
            }
        });
        // Last first, so that they come out in ascending order.
        for run in runs.iter().rev() {
            class.extend(run.descending().map(|taken| Frozen::make(taken.pfn, size, mobility, taken.zero)));
        }
    }

    /// Moves up to `count` of a class's entries to the node, those that lie highest, or to the CPU's table of words.
    pub(crate) fn drain_class(&self, pin: CpuPin<'_>, own: &PerCpu<'m>, class: &Class<'m>, order: u32, count: u64) {
        class.drain_highest(count, |words| self.free_cached(pin, own, order, words));
    }

    /// Under the node's lock: gives back the blocks of orders that are only gathered, which need no lock round of their own.
    pub(crate) fn return_gathered(&self, lists: &mut FreeLists, own: &PerCpu<'m>) {
        if lists.node == own.node {
            own.gathered().for_each(|class| {
                class.drain_highest(class.len(), |words| self.free_few(lists, words));
            });
        }
    }

    /// Moves blocks that are on their way to the node there.
    pub(crate) fn drain_leavers(&self, pin: CpuPin<'_>, own: &PerCpu<'m>, class: &Class<'m>, order: u32) {
        own.drain_leavers(class, |words| self.free_cached(pin, own, order, words));
    }

    /// Serves what others have asked this CPU for, if it has given back all that it had: what it still has goes before the next call.
    pub(crate) fn serve_own(&self, own: &PerCpu<'m>) {
        let asked = own.mailbox.wants_service(self.careful().is_watching());
        if asked && (!own.mailbox.pending() || own.pages() == 0) {
            own.mailbox.serve(|| own.shrink(), || self.careful().watch());
        }
    }

    /// How many frames CPUs have cached, or queued for a node.
    pub(crate) fn on_the_way(&self) -> u64 {
        self.caches().iter().map(PerCpu::pages).sum::<u64>() + self.queued().map(|(_, pages)| pages).sum::<u64>()
    }

    /// Asks every CPU that has something cached for it. This one's cache is empty.
    pub(crate) fn request_drains(&self) {
        self.caches().iter().filter(|cpu| cpu.pages() != 0).for_each(|cpu| cpu.mailbox.post());
    }

    /// For a CPU that has nothing to do, or that others have asked: gives everything that it has cached back to its node, and says that it
    /// has. To be called from idle loops, before interrupts go off there, because nobody wakes a CPU for what it has; and from an interrupt
    /// sent for the purpose. Cheap when there is nothing. Otherwise as [`drain`](Frames::drain).
    pub fn serve<P: Cpu>(&self, cx: &CpuCx<'_, P>) {
        self.after_giving_back(cx, Self::own, Due::All, |pin| {
            if let Some(own) = self.own(pin) {
                self.serve_own(own);
            }
        })
    }

    /// Gives everything that this CPU has cached back to its node, and shrinks the cache. Any context but NMI; a lock round
    /// per 64 words of pages or 64 larger blocks, a pin for each few of them.
    pub fn drain<P: Cpu>(&self, cx: &CpuCx<'_, P>) {
        self.after_giving_back(cx, Self::own, Due::All, |pin| {
            if let Some(own) = self.own(pin) {
                self.serve_own(own);
                own.shrink();
            }
        })
    }

    /// Gives everything that a CPU has cached back, on its behalf. Any context but NMI.
    ///
    /// # Safety
    ///
    /// The CPU runs nothing that uses this manager until this returns: it is offline, or has never been started.
    pub unsafe fn drain_offline<P: Cpu>(&self, cx: &CpuCx<'_, P>, cpu: CpuId) {
        self.after_giving_back(
            cx,
            |it, _| it.caches().get(cpu.0 as usize),
            Due::All,
            |_| {
                if let Some(cpu) = self.caches().get(cpu.0 as usize) {
                    self.serve_own(cpu);
                    cpu.shrink();
                }
            },
        )
    }
}
