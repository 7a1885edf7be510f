//! Which free pages leave: evenly from the nodes, the highest addresses first, by words.

use crate::counts::HugePageCounts;
use crate::group::{Group, highest};
use crate::pool::{HugePool, Nodes};
use hugemm_base::lock::RawLock;

/// Which pages leave first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaving {
    /// Persistent ones; the surplus stays what it is.
    Persistent,
    /// Surplus ones.
    Surplus,
}

impl Leaving {
    fn most(self, counts: HugePageCounts) -> u64 {
        match self {
            Leaving::Persistent => counts.free.min(counts.persistent()),
            Leaving::Surplus => counts.free.min(counts.surplus),
        }
    }

    pub(crate) fn leave(self, counts: HugePageCounts, pages: u64) -> Option<HugePageCounts> {
        match self {
            Leaving::Persistent => counts.leave_persistent(pages),
            Leaving::Surplus => counts.leave(pages),
        }
    }
}

impl<L: RawLock> HugePool<'_, L> {
    /// Dequeues free pages of some nodes, evenly, highest address first; how many. Under the lock.
    pub(crate) fn dequeue(
        &self,
        nodes: &mut [HugePageCounts],
        allowed: Nodes,
        mut pages: u64,
        leaving: Leaving,
        mut stage: impl FnMut(usize, u64),
    ) -> u64 {
        let wanted = pages;
        loop {
            let most =
                |node: usize, counts: HugePageCounts| if allowed.include(node) { leaving.most(counts) } else { 0 };
            let sharing = nodes.iter().enumerate().filter(|(node, counts)| most(*node, **counts) != 0).count() as u64;
            if sharing == 0 || pages == 0 {
                return wanted - pages;
            }
            let share = (pages / sharing).max(1);
            let before = pages;
            for (node, counts) in nodes.iter_mut().enumerate() {
                let got = self.dequeue_node(node, most(node, *counts).min(share).min(pages), &mut stage);
                *counts = leaving.leave(*counts, got).unwrap_or(*counts);
                pages -= got;
            }
            if pages == before {
                return wanted - pages;
            }
        }
    }

    fn dequeue_node(&self, node: usize, pages: u64, stage: &mut impl FnMut(usize, u64)) -> u64 {
        let mut left = pages;
        for area in self.areas().iter().rev().filter(|area| area.node().get() as usize == node) {
            for index in area.range(self.page_size()).rev() {
                if left == 0 {
                    return pages;
                }
                let Some(group) = self.group(index) else { continue };
                let bits = highest(group.good(), left);
                if bits != 0 {
                    self.remove_free(index, group, bits);
                    stage(index, bits);
                    left -= u64::from(bits.count_ones());
                }
            }
        }
        pages - left
    }

    /// Free pages cease to be the pool's. Under the lock.
    pub(crate) fn remove_free(&self, index: usize, group: &Group, bits: u64) {
        group.free.remove(bits);
        group.pool.remove(bits);
        self.summarise(index);
    }
}
