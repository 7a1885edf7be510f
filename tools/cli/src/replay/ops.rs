//! What a trace is replayed as: operations on numbered blocks, *slots*, each of which is filled once and emptied once.
//!
//! No text, no map from foreign frame numbers is left for the time that is measured, only the allocator and a loop. [`run`] does the
//! work on a [`Source`]: this allocator, another, or none ([`Nobody`]): the difference is the allocator's. Memory is not touched.

use crate::frames::peers::Peer;
use anyhow::Result;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Order, Pfn};
use hugemm_frames::Mobility;
use hugemm_workloads::alloc_free::Source;
use std::sync::atomic::{AtomicU64, Ordering};

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
        order: Order,
        to: Order,
        first: u32,
    },
}

/// Where the blocks are. A slot is empty before its block is allocated, after it is freed, and if allocating it failed.
pub type Slots<B> = [Option<B>];

/// Hands out numbers.
pub struct Nobody(AtomicU64);

impl Peer for Nobody {
    const NAME: &'static str = "loop";
    const DIVISIBLE: bool = true;

    fn new(_frames: u64) -> Result<Self> {
        Ok(Nobody(AtomicU64::new(0)))
    }

    #[inline]
    fn alloc(&self, order: Order) -> Option<u64> {
        // Relaxed, and no exchange: one thread uses it, and it is to cost nothing.
        let first = self.0.load(Ordering::Relaxed);
        self.0.store(first + order.pages(), Ordering::Relaxed);
        Some(first)
    }

    #[inline]
    fn free(&self, frame: u64, _order: Order) {
        std::hint::black_box(frame);
    }

    fn free_range(&self, _first: u64, _pages: u64) {}
}

/// Does operations; returns how many allocations there was no memory for. Frees and splits of such blocks do nothing.
#[inline]
pub fn run<P: Cpu, S: Source<P>>(source: &S, cx: &CpuCx<'_, P>, ops: &[Op], slots: &mut Slots<S::Block>) -> u64 {
    let mut failed = 0;
    for op in ops {
        match *op {
            Op::Alloc { slot, order, mobility } => {
                let block = source.alloc_for(cx, order, mobility);
                failed += u64::from(block.is_none());
                slots[slot as usize] = block;
            }
            Op::Free { slot, order } => {
                if let Some(block) = slots[slot as usize].take() {
                    source.free(cx, block, order);
                }
            }
            // One that is refused is in use for ever.
            Op::Split { slot, order, to, first } => {
                if let Some(Ok(parts)) = slots[slot as usize].take().map(|block| source.divide(block, order, to)) {
                    let heads = (parts.base().get()..parts.end().get()).step_by(to.pages() as usize);
                    for (slot, head) in slots[first as usize..].iter_mut().zip(heads) {
                        *slot = Some(source.part(Pfn::new(head), to));
                    }
                }
            }
        }
    }
    failed
}
