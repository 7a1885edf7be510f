//! How a CPU's cache is filled from its node: with as many blocks as it wants, in one lock round. How many that is, is said in
//! [`pcp`](crate::pcp).

use crate::arena::BLOCK_ORDER;
use crate::chunk;
use crate::class::Class;
use crate::frames::{Env, Frames};
use crate::free2m::Batch;
use crate::free4k::Run;
use crate::freelist::FreeLists;
use crate::node::Taken;
use crate::page_alloc::Wanted;
use crate::pcp::PerCpu;
use hugemm_base::CpuPin;

/// Words of a 2 MiB that a refill takes blocks of in one lock round: 1024 pages at most.
const RUNS: usize = 16;

/// Words of 2 MiB blocks that a refill takes of in one lock round.
const BATCHES: usize = 4;

impl<'m, E: Env> Frames<'m, E> {
    /// Moves blocks from the node into a cache: one lock round, in pieces as large as are free.
    pub(crate) fn refill(&self, pin: CpuPin<'_>, own: &PerCpu<'m>, class: &Class<'m>, wanted: &Wanted) {
        let (want, node, order) = (class.want(), own.node, wanted.order.get());
        if order == BLOCK_ORDER {
            let mut batches = [Batch::default(); BATCHES];
            let _ = self.with_node(pin, node, |lists| self.take_many_2m(lists, want, &mut batches));
            for batch in batches.iter().rev() {
                self.cache_batch(own, class, wanted, batch);
            }
            return;
        }
        let apart = chunk::is_worth_it(want).then_some(own);
        let mut runs = [Run::default(); RUNS];
        let mut fill = |lists: &mut FreeLists| {
            self.return_gathered(lists, own);
            let (mut got, mut place) = (0, None);
            for run in &mut runs {
                if got >= want {
                    break;
                }
                let Some(found) = place.take().or_else(|| self.find_4k(lists, wanted, apart)) else {
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
        };
        if self.try_with_node(pin, node, &mut fill).is_none() {
            // Another CPU is there.
            let _ = self.with_node(pin, node, fill);
            class.widen();
        }
        // Last first, so that they come out in ascending order.
        for run in runs.iter().rev() {
            class.extend(run.descending().map(|taken| wanted.block(taken)));
        }
    }

    /// Blocks of 2 MiB go to the cache.
    #[inline(never)]
    fn cache_batch(&self, own: &PerCpu<'m>, class: &Class<'m>, wanted: &Wanted, batch: &Batch) {
        for taken in batch.descending() {
            own.found(class, BLOCK_ORDER, taken.pfn);
            // At most half of what the watermark allows.
            let _ = class.push(wanted.block(taken));
        }
    }
}
