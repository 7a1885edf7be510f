//! What ageing alone costs, by the run and page by page, with all that it causes.

use crate::age::config::RunConfig;
use crate::age::rig::{NODE, OnHost, Rig, Touches, on_machine};
use crate::machine::Machine;
use crate::measure::Repeat;
use crate::results::Line;
use crate::sides::by_turns;
use anyhow::{Context, Result};
use hugemm_base::{CpuCx, CpuId, Never, VirtAddr};
use hugemm_host::cpu::{CpuPlace, Host};
use hugemm_reclaim::{Ageing, BATCH, ShrinkBudget, Step};
use hugemm_vm::AddressSpaceRef;
use hugemm_workloads::age::{SHARED_AT, Touch};
use hugemm_workloads::record::Metric;
use indicatif::ProgressBar;
use std::time::Instant;

/// Ours first.
const WAYS: [Ageing; 2] = [Ageing::Batch, Ageing::NoFlush];

/// What is saved of each.
pub const COSTS: [Metric<Cost>; 2] = [
    Metric::new("bench.age.rate", "1/s", Cost::rate),
    Metric::new("bench.age.wrongly_old", "pages", |it| it.refaults as f64),
];

/// What ageing of the same pages has cost in one way.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Pages of which it was found out whether they had been used.
    pub pages: u64,
    /// Nanoseconds of reading accessed bits.
    pub age_ns: u64,
    /// Nanoseconds of LRU rounds that it causes besides.
    pub lists_ns: u64,
    /// Nanoseconds in which pages came back that were in use and taken for old.
    pub refault_ns: u64,
    /// How many did.
    pub refaults: u64,
}

impl Cost {
    /// Pages per second of ageing, all that it causes included.
    pub fn rate(&self) -> f64 {
        self.pages as f64 * 1e9 / (self.age_ns + self.lists_ns + self.refault_ns).max(1) as f64
    }
}

/// What ageing by the run and page by page costs, over the same mappings of the same pages. The sides take turns at
/// beginning. In each turn a round over pages of which all have been used, so that nothing is evicted; then one in which a
/// half has, and the other half goes; then who was wrongly sent away comes back.
///
/// A line for each way, ours first; none if a TLB remembered all pages of the only process, and so hid that they were used.
pub fn ageing_costs(
    machine: &Machine,
    memory: &mut [u8],
    places: &[CpuPlace],
    config: &RunConfig,
    runs: u32,
) -> Result<Option<[Line<Cost>; 2]>> {
    on_machine(machine, memory, places, None, config, |rig| rig.costs(config, runs))
}

impl<'h> Rig<'_, 'h> {
    fn costs(&self, config: &RunConfig, runs: u32) -> Result<Option<[Line<Cost>; 2]>> {
        let (object, spaces) = self.spaces(config)?;
        let line = |way: Ageing| Line::new([("young", way.name().into()), ("procs", config.procs.into())]);
        let (mut lines, mut hidden) = (WAYS.map(line), false);
        self.as_cpu(CpuId::new(0), |cx| {
            by_turns(&mut lines, Repeat::new(runs, 1), &ProgressBar::hidden(), |index| {
                self.vm.pager().set_ageing(WAYS[index]);
                let cost = if hidden { None } else { self.cost(cx, &spaces, config)? };
                hidden |= cost.is_none();
                Ok(cost.unwrap_or_default())
            })
        })??;
        self.end(object, spaces)?;
        Ok((!hidden).then_some(lines))
    }

    /// One turn of one side.
    fn cost(
        &self,
        cx: &mut CpuCx<'_, Host<'h>>,
        spaces: &[AddressSpaceRef<'_, OnHost<'h>>],
        config: &RunConfig,
    ) -> Result<Option<Cost>> {
        let pages = config.shared >> 12;
        for space in spaces {
            space.tlb().switch_in(self.vm.shootdown(), cx);
            self.touch_all(cx, space, 0..pages)?;
            space.tlb().switch_out(self.vm.shootdown(), cx);
        }
        let before = self.seen();
        let mut evicted = 0;
        self.round(cx, config, pages, &mut evicted);
        let after = self.seen();
        if evicted > 0 || after.pages - before.pages < pages {
            return Ok(None);
        }
        // Every other page on average, and no two spaces forget what they used but the one that runs.
        let used = || (0..pages).filter(|page| (page + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 63 == 0);
        let (last, others) = spaces.split_last().context("a process")?;
        for space in others {
            space.tlb().switch_in(self.vm.shootdown(), cx);
            self.touch_all(cx, space, used())?;
            space.tlb().switch_out(self.vm.shootdown(), cx);
        }
        last.tlb().switch_in(self.vm.shootdown(), cx);
        self.touch_all(cx, last, used())?;
        self.round(cx, config, pages, &mut evicted);
        let done = self.seen();
        // What comes back now had been used, and was taken for old.
        let (mut refaults, mut refault_ns) = self.touch_all(cx, last, used())?;
        last.tlb().switch_out(self.vm.shootdown(), cx);
        for space in others {
            space.tlb().switch_in(self.vm.shootdown(), cx);
            let (faults, nanos) = self.touch_all(cx, space, used())?;
            space.tlb().switch_out(self.vm.shootdown(), cx);
            (refaults, refault_ns) = (refaults + faults, refault_ns + nanos);
        }
        Ok(Some(Cost {
            pages: done.pages - before.pages,
            age_ns: done.age_ns - before.age_ns,
            lists_ns: done.lists_ns - before.lists_ns,
            refault_ns,
            refaults,
        }))
    }

    /// A process writes to pages, each of them once. How many had to be brought for it, and how long that took.
    fn touch_all(
        &self,
        cx: &mut CpuCx<'_, Host<'h>>,
        space: &AddressSpaceRef<'_, OnHost<'h>>,
        pages: impl Iterator<Item = u64>,
    ) -> Result<(u64, u64)> {
        let touches = Touches(self.mmu);
        let (mut faults, mut nanos) = (0, 0);
        for page in pages {
            let at = VirtAddr::new(SHARED_AT.get() + (page << 12));
            while touches.reach(cx, at, true).is_none() {
                let start = Instant::now();
                self.vm.fault(cx, space, at, hugemm_vm::Access::Write)?;
                (faults, nanos) = (faults + 1, nanos + start.elapsed().as_nanos() as u64);
            }
        }
        Ok((faults, nanos))
    }

    /// Looks at so many pages, once each: a second look would find all of them idle.
    fn round(&self, cx: &mut CpuCx<'_, Host<'h>>, config: &RunConfig, pages: u64, evicted: &mut u64) {
        let pager = self.vm.pager();
        let first = self.seen().pages;
        loop {
            let left = pages.saturating_sub(self.seen().pages - first);
            if left == 0 {
                return;
            }
            let budget = ShrinkBudget::new(u64::MAX, left.min(config.page.pages() * BATCH as u64));
            let progress = pager.shrink(self.vm, cx, NODE, budget, &Never);
            *evicted += progress.freed;
            if progress.empty || progress.full {
                return;
            }
        }
    }

    fn seen(&self) -> Seen {
        let pager = self.vm.pager();
        let (counts, of) = (pager.counts(), |step| pager.steps().of(step));
        Seen { pages: counts.aged.get() + counts.around.get(), age_ns: of(Step::Age), lists_ns: of(Step::Around) }
    }
}

#[derive(Clone, Copy)]
struct Seen {
    pages: u64,
    age_ns: u64,
    lists_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_that_ageing_causes_is_charged() {
        let cost = Cost { pages: 2000, age_ns: 1000, lists_ns: 500, refault_ns: 500, refaults: 1 };
        assert_eq!(cost.rate(), 1e9);
        for dearer in [Cost { age_ns: 1001, ..cost }, Cost { lists_ns: 501, ..cost }, Cost { refault_ns: 501, ..cost }]
        {
            assert!(dearer.rate() < cost.rate(), "{dearer:?}");
        }
    }
}
