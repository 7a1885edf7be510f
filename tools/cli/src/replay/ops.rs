//! What a trace is replayed as: operations on numbered blocks, *slots*, each of which is filled once and emptied once.
//!
//! No text, no map from foreign frame numbers is left for the time that is measured, only the allocator and a loop. [`run`] does the
//! work on a [`Target`]: this allocator ([`Counted`]), another, which keeps no references ([`Other`]), or none ([`Nobody`]): the
//! difference is the allocator's. Memory is not touched.

use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Order, Pfn, with};
use hugemm_frames::{AllocRequest, FolioRef, Frames, Mobility, Put};
use hugemm_workloads::alloc_free::Source;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Alloc {
        slot: u32,
        order: Order,
        mobility: Mobility,
    },
    /// Drops the only reference of a block.
    Free {
        slot: u32,
        order: Order,
    },
    /// A block becomes blocks of one smaller order, which fill consecutive slots.
    Split {
        slot: u32,
        pieces: u32,
        to: Order,
        first: u32,
    },
}

/// Where the blocks are. A slot is empty before its block is allocated, after it is freed, and if allocating it failed.
pub struct Slots<'s>(&'s mut [u64]);

/// No block: the highest number is no frame's.
const EMPTY: u64 = u64::MAX;

impl<'s> Slots<'s> {
    pub fn new(words: &'s mut [u64]) -> Self {
        words.fill(EMPTY);
        Slots(words)
    }

    pub fn holds(&self, slot: u32) -> bool {
        self.0.get(slot as usize).is_some_and(|word| *word != EMPTY)
    }

    #[inline]
    fn take(&mut self, slot: u32) -> Option<Pfn> {
        let word = std::mem::replace(self.0.get_mut(slot as usize)?, EMPTY);
        (word != EMPTY).then_some(Pfn::new(word))
    }

    #[inline]
    fn put(&mut self, slot: u32, head: Pfn) {
        if let Some(word) = self.0.get_mut(slot as usize) {
            *word = head.get();
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplayCounts {
    pub ops: u64,
    /// Allocations for which there was no memory.
    pub failed: u64,
    /// Frees and splits of blocks whose allocation had failed: nothing was done.
    pub skipped: u64,
    /// Why the first operation was refused that was, although its block is there: a bug in the allocator or the plan.
    pub refused: Option<&'static str>,
}

impl ReplayCounts {
    pub fn plus(self, other: ReplayCounts) -> ReplayCounts {
        ReplayCounts {
            ops: self.ops + other.ops,
            failed: self.failed + other.failed,
            skipped: self.skipped + other.skipped,
            refused: self.refused.or(other.refused),
        }
    }
}

/// What the operations are done to. An error says why one was refused.
pub trait Target {
    /// `None` if there is no memory.
    fn alloc(&mut self, order: Order, mobility: Mobility) -> Result<Option<Pfn>, &'static str>;
    fn free(&mut self, head: Pfn, order: Order) -> Result<(), &'static str>;
    fn split(&mut self, head: Pfn, pieces: u32, to: Order) -> Result<(), &'static str>;
}

const UNKNOWN: &str = "it knows no reference to the block";
const REFERENCED: &str = "the block has more references than the one it was given";
const INDIVISIBLE: &str = "it cannot split blocks";

/// This allocator. Every block is counted, with one reference on its head, as a page or folio of Linux is.
pub struct Counted<'a, 'm, 'p, P: Cpu>(pub &'a Frames<'m>, pub &'a CpuCx<'p, P>);

impl<P: Cpu> Target for Counted<'_, '_, '_, P> {
    #[inline]
    fn alloc(&mut self, order: Order, mobility: Mobility) -> Result<Option<Pfn>, &'static str> {
        let Ok(block) = self.0.alloc(self.1, with!(AllocRequest::order(order), mobility)) else {
            return Ok(None);
        };
        // The plan keeps numbers.
        self.0.count(block).map(|folio| Some(folio.into_pfn())).map_err(|_| UNKNOWN)
    }

    #[inline]
    fn free(&mut self, head: Pfn, _: Order) -> Result<(), &'static str> {
        // SAFETY: the plan frees what it allocated, or divided, once.
        match self.0.put(self.1, unsafe { FolioRef::from_pfn(head) }) {
            Ok(Put::Last) => Ok(()),
            Ok(Put::Kept) => Err(REFERENCED),
            Err(_) => Err(UNKNOWN),
        }
    }

    #[inline]
    fn split(&mut self, head: Pfn, _: u32, to: Order) -> Result<(), &'static str> {
        // SAFETY: as above; what it is divided into is freed instead.
        let parts = self.0.split_counted(unsafe { FolioRef::from_pfn(head) }, to);
        parts.map(|parts| _ = parts.into_extent()).map_err(|_| REFERENCED)
    }
}

/// Another allocator, whose blocks are numbers.
pub struct Other<'a, 'p, S, P: Cpu>(pub &'a S, pub &'a CpuCx<'p, P>);

impl<P: Cpu, S: Source<P, Block = u64>> Target for Other<'_, '_, S, P> {
    #[inline]
    fn alloc(&mut self, order: Order, _: Mobility) -> Result<Option<Pfn>, &'static str> {
        Ok(self.0.alloc(self.1, order).map(Pfn::new))
    }

    #[inline]
    fn free(&mut self, head: Pfn, order: Order) -> Result<(), &'static str> {
        self.0.free(self.1, head.get(), order);
        Ok(())
    }

    #[inline]
    fn split(&mut self, head: Pfn, pieces: u32, to: Order) -> Result<(), &'static str> {
        let from = Order::new(to.get() + pieces.ilog2()).map_err(|_| INDIVISIBLE)?;
        self.0.divide(head.get(), from).map(|_| ()).map_err(|_| INDIVISIBLE)
    }
}

/// Hands out numbers, from its own on.
pub struct Nobody(pub u64);

impl Target for Nobody {
    #[inline]
    fn alloc(&mut self, order: Order, _: Mobility) -> Result<Option<Pfn>, &'static str> {
        self.0 += order.pages();
        Ok(Some(Pfn::new(self.0)))
    }

    #[inline]
    fn free(&mut self, head: Pfn, _: Order) -> Result<(), &'static str> {
        std::hint::black_box(head);
        Ok(())
    }

    #[inline]
    fn split(&mut self, head: Pfn, _: u32, _: Order) -> Result<(), &'static str> {
        std::hint::black_box(head);
        Ok(())
    }
}

#[inline]
pub fn run(target: &mut impl Target, ops: &[Op], slots: &mut Slots<'_>) -> ReplayCounts {
    let mut tally = ReplayCounts { ops: ops.len() as u64, ..ReplayCounts::default() };
    for op in ops {
        let outcome = match *op {
            Op::Alloc { slot, order, mobility } => Some(target.alloc(order, mobility).map(|block| match block {
                Some(head) => slots.put(slot, head),
                None => tally.failed += 1,
            })),
            Op::Free { slot, order } => slots.take(slot).map(|head| target.free(head, order)),
            Op::Split { slot, pieces, to, first } => slots.take(slot).map(|head| {
                target.split(head, pieces, to)?;
                for index in 0..pieces {
                    slots.put(first + index, Pfn::new(head.get() + (u64::from(index) << to.get())));
                }
                Ok(())
            }),
        };
        tally.skipped += u64::from(outcome.is_none());
        tally.refused = tally.refused.or(outcome.and_then(Result::err));
    }
    tally
}
