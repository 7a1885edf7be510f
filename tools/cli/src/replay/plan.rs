//! From events to a plan: which block each event means, and what to do with it.
//!
//! * A free of frames that no event has allocated is **adopted**: the block is allocated before the replay starts. They were in use before
//!   the trace, or come from paths that Linux does not trace (bulk allocation for vmalloc and kernel stacks, compaction's targets).
//! * A free of a part splits the block.
//! * An allocation of frames that are in use means that their free was not recorded. It is **supplied**, and counted.
//!
//! Blocks are naturally aligned powers of two, so two of them are either disjoint or one contains the other.

use super::ops::Op;
use hugemm_base::{Extent, Order, Pfn};
use hugemm_frames::Mobility;
use std::collections::{BTreeMap, BTreeSet};

/// What was in the trace: events, or pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub allocs: u64,
    /// Allocations that failed in the traced kernel; they are not replayed.
    pub failed: u64,
    pub frees: u64,
    /// Frees that were adopted, wholly or in part.
    pub adopted: u64,
    pub adopted_pages: u64,
    /// Frees that the trace does not have.
    pub supplied: u64,
    /// Blocks that were freed in parts.
    pub splits: u64,
}

/// Operations that follow each other on one CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The trace's number of the CPU.
    pub cpu: u32,
    /// The end of its operations.
    pub end: usize,
}

/// A block in use.
#[derive(Clone, Copy, Debug)]
struct Block {
    order: Order,
    slot: u32,
}

/// The plan under construction.
#[derive(Debug, Default)]
pub struct Planner {
    plan: Plan,
    live: BTreeMap<u64, Block>,
    /// Blocks that are freed without having been allocated, by their first frame: slot and order.
    adopted: Vec<(u64, u32, Order)>,
    /// Pages in use beyond those at the start, and the most there were.
    net: i64,
    peak: i64,
}

/// What to replay.
#[derive(Debug, Default)]
pub struct Plan {
    /// To be run before the start: what was in use already, in the trace's order of frames.
    pub before: Vec<Op>,
    pub ops: Vec<Op>,
    /// To be run after the end: what is in use then is freed.
    pub after: Vec<Op>,
    /// Whose `ops` are.
    pub turns: Vec<Turn>,
    /// The trace's CPUs, ascending.
    pub cpus: Vec<u32>,
    /// Slots of all operations.
    pub slots: u32,
    /// The most pages in use at once.
    pub peak_pages: u64,
    pub counts: Counts,
}

impl Planner {
    /// Adds an allocation, which has failed if it has no frames. O(log blocks in use).
    pub fn alloc(&mut self, cpu: u32, pfn: Option<u64>, order: Order, mobility: Mobility) -> Result<(), String> {
        let Some(pfn) = pfn else {
            self.plan.counts.failed += 1;
            return Ok(());
        };
        if self.first_in(pfn, order).is_some() {
            self.plan.counts.supplied += 1;
            self.release(cpu, pfn, order)?;
        }
        let slot = self.new_slots(1)?;
        self.push(cpu, Op::Alloc { slot, order, mobility });
        self.live.insert(pfn, Block { order, slot });
        self.plan.counts.allocs += 1;
        self.net += order.pages() as i64;
        self.peak = self.peak.max(self.net);
        Ok(())
    }

    /// Adds a free. O(log blocks in use), and O(pieces) for one of a part.
    pub fn free(&mut self, cpu: u32, pfn: u64, order: Order) -> Result<(), String> {
        self.plan.counts.frees += 1;
        let gaps = self.release(cpu, pfn, order)?;
        self.plan.counts.adopted += u64::from(!gaps.is_empty());
        gaps.into_iter().try_for_each(|gap| self.adopt(cpu, gap))
    }

    /// Whether there is nothing to replay.
    pub fn is_empty(&self) -> bool {
        self.plan.ops.is_empty() && self.plan.counts.failed == 0
    }

    pub fn finish(mut self) -> Plan {
        self.adopted.sort_unstable_by_key(|adopted| adopted.0);
        // Nothing is known of what they were for; most pages of a running system are movable.
        let before = |(_, slot, order)| Op::Alloc { slot, order, mobility: Mobility::Movable };
        let cpus: BTreeSet<u32> = self.plan.turns.iter().map(|turn| turn.cpu).collect();
        Plan {
            before: self.adopted.into_iter().map(before).collect(),
            after: self.live.into_values().map(|Block { order, slot }| Op::Free { slot, order }).collect(),
            cpus: cpus.into_iter().collect(),
            // Adopted pages are in use from the start.
            peak_pages: self.peak as u64 + self.plan.counts.adopted_pages,
            ..self.plan
        }
    }

    /// The block that contains `pfn`.
    fn covering(&self, pfn: u64) -> Option<(u64, Block)> {
        let (at, block) = self.live.range(..=pfn).next_back()?;
        (pfn < at + block.order.pages()).then_some((*at, *block))
    }

    /// The first block that shares frames with a range.
    fn first_in(&self, pfn: u64, order: Order) -> Option<(u64, Block)> {
        let inside = || self.live.range(pfn..pfn + order.pages()).next().map(|(at, block)| (*at, *block));
        self.covering(pfn).or_else(inside)
    }

    /// Frees what is in use of a range; returns the gaps between.
    fn release(&mut self, cpu: u32, pfn: u64, order: Order) -> Result<Vec<Extent>, String> {
        if let Some((head, block)) = self.covering(pfn)
            && block.order > order
        {
            self.split(cpu, head, block, order)?;
        }
        let (mut at, mut gaps) = (pfn, Vec::new());
        let end = pfn + order.pages();
        let mut gap =
            |from: u64, to: u64| gaps.extend(Extent::new(Pfn::new(from), to - from).ok().filter(|e| !e.is_empty()));
        while let Some((head, block)) = self.live.range(at..end).next() {
            let (head, block) = (*head, *block);
            self.live.remove(&head);
            self.push(cpu, Op::Free { slot: block.slot, order: block.order });
            gap(at, head);
            self.net -= block.order.pages() as i64;
            at = head + block.order.pages();
        }
        gap(at, end);
        Ok(gaps)
    }

    fn split(&mut self, cpu: u32, head: u64, block: Block, to: Order) -> Result<(), String> {
        let pieces = 1_u32 << (block.order.get() - to.get());
        let first = self.new_slots(pieces)?;
        self.push(cpu, Op::Split { slot: block.slot, order: block.order, to, first });
        // From now on these are blocks of their own.
        self.plan.counts.splits += 1;
        for index in 0..pieces {
            let at = head + (u64::from(index) << to.get());
            self.live.insert(at, Block { order: to, slot: first + index });
        }
        Ok(())
    }

    /// Frees blocks that nobody has allocated, in the largest pieces.
    fn adopt(&mut self, cpu: u32, gap: Extent) -> Result<(), String> {
        for (head, order) in gap.chunks(Order::MAX) {
            let slot = self.new_slots(1)?;
            self.adopted.push((head.get(), slot, order));
            self.push(cpu, Op::Free { slot, order });
        }
        self.plan.counts.adopted_pages += gap.pages();
        self.net -= gap.pages() as i64;
        Ok(())
    }

    fn new_slots(&mut self, count: u32) -> Result<u32, String> {
        let first = self.plan.slots;
        self.plan.slots =
            first.checked_add(count).ok_or("expected fewer than 2^32 blocks; replay a part of the trace")?;
        Ok(first)
    }

    fn push(&mut self, cpu: u32, op: Op) {
        self.plan.ops.push(op);
        let end = self.plan.ops.len();
        match self.plan.turns.last_mut() {
            Some(turn) if turn.cpu == cpu => turn.end = end,
            _ => self.plan.turns.push(Turn { cpu, end }),
        }
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
