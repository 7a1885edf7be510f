//! How a CPU's cache is filled from its node: with as many blocks as it wants, in one lock round. How many that is, is said in
//! [`pcp`](crate::pcp).

use crate::arena::BLOCK_ORDER;
use crate::bits::one_loop;
use crate::chunk;
use crate::class::Class;
use crate::frames::{Env, Frames};
use crate::free2m::Batch;
use crate::free4k::Run;
use crate::freelist::FreeLists;
use crate::node::Taken;
use crate::page_alloc::Wanted;
use crate::pcp::PerCpu;
use hugemm_base::{CpuPin, Pfn};

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
            let batches = one_loop(&mut batches[..]);
            let _ = self.with_node(pin, node, |lists| self.take_many_2m(lists, want, batches));
            return self.cache_batches(own, class, wanted, batches);
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
                    self.note_found(own, class, order, pfn);
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
    fn cache_batches(&self, own: &PerCpu<'m>, class: &Class<'m>, wanted: &Wanted, batches: &[Batch]) {
        for batch in batches.iter().rev() {
            for taken in batch.descending() {
                // At most half of what the watermark allows.
                let _ = class.push(wanted.block(taken));
            }
            // Of all, the lowest comes last.
            batch.lowest().into_iter().for_each(|pfn| self.note_found(own, class, BLOCK_ORDER, pfn));
        }
    }

    /// A refill found room at a frame.
    #[inline(never)]
    fn note_found(&self, own: &PerCpu<'m>, class: &Class<'m>, order: u32, pfn: Pfn) {
        if !own.is_local(pfn) {
            self.follow(own, pfn);
        }
        own.found(class, order, pfn);
    }

    /// What is around a frame of the CPU's node is local from now on, unless it may go again.
    #[cold]
    #[inline(never)]
    fn follow(&self, own: &PerCpu<'m>, pfn: Pfn) {
        self.arena_table().around(pfn).into_iter().for_each(|frames| own.settle(frames));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::arena::ArenaSpec;
    use crate::frames::Plain;
    use crate::layout::FramesConfig;
    use crate::mobility::Mobility;
    use crate::page_alloc::AllocRequest;
    use hugemm_base::{Dirty, Extent, NodeId, Order};
    use hugemm_threads::{Memory, Threads, run_as};

    /// What is freed where the CPU takes from is cached at the first look, in whichever piece of memory; but not what lies in a hole.
    #[test]
    fn frames_are_local_where_the_cpu_takes_them() {
        let piece = |first, pages| Extent::new(Pfn::new(first), pages).expect("in range");
        let pieces = [piece(0, 1024), piece(1024, 1024), piece(4096, 1 << 14)];
        let arenas = pieces.map(|piece| ArenaSpec::new(piece, NodeId::new(0)));
        let config = FramesConfig::new(&arenas, 1);
        let memory = Memory::new(Frames::<Plain>::required_bytes(&config).expect("valid"));
        // SAFETY: zeroed, as large and aligned as asked for, used once, and with one platform.
        let frames: Frames<'_> =
            unsafe { Frames::new(&config, Plain::default(), memory.ptr(), memory.bytes()) }.expect("enough");
        let threads: Threads = Threads::new(());
        run_as(0);
        let (cx, own) = (threads.cx(), &frames.caches()[0]);
        // SAFETY: once; there is no memory behind the numbers.
        pieces.iter().for_each(|piece| _ = unsafe { frames.release(&cx, Dirty::assume_owned(*piece)) });
        let request = AllocRequest::order(Order::ZERO);
        let near = |pfn| own.is_near(own.class_of(&frames.alloc(&cx, request).expect("memory")).expect("cached"), pfn);
        let (low, hole, high) = (Pfn::new(1), Pfn::new(3000), Pfn::new(5000));
        let class = own.class(0, Mobility::Unmovable).expect("cached");
        assert_eq!(
            [low, hole, high].map(|pfn| own.is_near(class, pfn)),
            [true, false, false],
            "where it will take first"
        );
        assert_eq!([low, Pfn::new(600), hole, high].map(near), [true, false, false, false]);
        while frames.alloc(&cx, request).expect("memory").pfn() < pieces[2].base() {}
        assert_eq!([low, hole, Pfn::new(4100), high].map(near), [false, false, true, false]);
    }
}
