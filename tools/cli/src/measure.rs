//! Repeated measurement of several subjects on the same memory, in alternating order.

use crate::stats::Samples;
use anyhow::Result;
use hugemm_base::{CpuCx, Dirty, PAGE_SHIFT};
use hugemm_clear::{Clearer, Primitive, Warmth};
use hugemm_host::cpu::Host;
use hugemm_inspect::interrupt;
use hugemm_workloads::Pass;
use hugemm_workloads::size::Size;
use hugemm_workloads::sweep::{self, ClearWith};

/// Bytes that are cleared untimed before a hot measurement, at least.
const SETTLE: u64 = 64 << 20;

/// Passes over the region before it, of regions that a cache may hold: a last level of 260 MiB takes eleven to settle on 32 MiB.
const SETTLE_PASSES: u64 = 12;

/// Where that ends: what is larger than 64 MiB has fewer passes, and one at least.
const SETTLE_MOST: u64 = 768 << 20;

#[derive(Clone, Copy, Debug)]
pub struct Repeat {
    pub runs: u32,
    /// Untimed runs before them.
    pub warmup: u32,
    /// Runs of what takes long, at most.
    pub of_long: u32,
}

impl Repeat {
    pub fn new(runs: u32, warmup: u32) -> Self {
        Repeat { runs, warmup, of_long: u32::MAX }
    }

    /// All runs, for a loop or a progress bar.
    pub fn all(self) -> usize {
        self.runs as usize + self.warmup as usize
    }

    pub fn is_measured(self, run: usize) -> bool {
        run >= self.warmup as usize
    }

    /// Each side in each run, and whether that counts: in an order that changes from run to run, so that drift hits all alike.
    pub fn turns(self, sides: usize) -> impl Iterator<Item = (usize, bool)> {
        let run = move |run| (0..sides).map(move |side| ((side + run) % sides, self.is_measured(run)));
        (0..self.all()).flat_map(run)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    Primitive(Primitive),
    /// The engine with its policy.
    Policy,
}

impl Subject {
    pub fn name(&self) -> String {
        match self {
            Subject::Primitive(p) => p.name().to_owned(),
            Subject::Policy => "policy".to_owned(),
        }
    }
}

/// One line of a table: what is cleared, and how.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    pub size: u64,
    /// Bytes that a run clears, at least.
    total: u64,
    warmth: Warmth,
    touch: bool,
}

impl Field {
    /// Regions of a size one after the other through memory, `enough` bytes of it in all.
    pub fn cold(region: u64, enough: u64, touch: bool) -> Self {
        Field { size: region, total: region.max(enough), warmth: Warmth::Cold, touch }
    }

    /// One region again and again, until `enough` bytes have been cleared.
    pub fn hot(region: u64, enough: u64) -> Self {
        Field { size: region, total: region.max(enough), warmth: Warmth::Hot, touch: false }
    }

    pub fn title(&self) -> String {
        let warmth = if self.warmth == Warmth::Hot { "hot" } else { "cold" };
        let touch = if self.touch { ", read" } else { "" };
        format!("{} {warmth}{touch}", Size(self.size))
    }
}

/// The bandwidth of every subject in GB/s, over runs whose order rotates, so that drift hits all alike.
///
/// Cold runs move through memory: each starts where the one before ended.
pub fn bandwidths(
    cx: &mut CpuCx<'_, Host<'_>>,
    clearer: &Clearer,
    subjects: &[Subject],
    field: &Field,
    mut memory: Dirty,
    repeat: Repeat,
    mut tick: impl FnMut(),
) -> Result<(Dirty, Vec<Samples>)> {
    let mut samples = vec![Samples::default(); subjects.len()];
    let total = memory.extent().pages();
    let span = (field.total >> PAGE_SHIFT).min(total);
    let mut cursor = 0;
    for (index, counts) in repeat.turns(subjects.len()) {
        interrupt::check()?;
        let how = match subjects[index] {
            Subject::Primitive(primitive) => ClearWith::Primitive { primitive, features: clearer.features() },
            Subject::Policy => ClearWith::Policy { clearer, warmth: field.warmth },
        };
        let pass;
        (memory, pass) = match field.warmth {
            Warmth::Hot => part(memory, 0, field.size >> PAGE_SHIFT, |region| hot(cx, how, region, field))?,
            Warmth::Cold => {
                if cursor + span > total {
                    cursor = 0;
                }
                let from = cursor;
                cursor += span;
                part(memory, from, span, |region| Ok(sweep::pass(cx, how, region, field.size, field.touch)?))?
            }
        };
        if counts {
            samples[index].push(pass.bytes as f64 / pass.nanos.max(1) as f64);
        }
        tick();
    }
    Ok((memory, samples))
}

/// Clears a region over and over. The first passes are untimed: whoever came before may have pushed it out of the caches,
/// and some take a dozen passes to settle.
fn hot(cx: &mut CpuCx<'_, Host<'_>>, how: ClearWith<'_>, mut region: Dirty, field: &Field) -> Result<(Dirty, Pass)> {
    let untimed = ((SETTLE_PASSES * field.size).clamp(SETTLE, SETTLE_MOST) / field.size).max(1);
    let mut sum = Pass::default();
    for i in 0..untimed + field.total / field.size {
        let pass;
        (region, pass) = sweep::pass(cx, how, region, field.size, field.touch)?;
        if i >= untimed {
            sum = sum.plus(pass);
        }
    }
    Ok((region, sum))
}

/// Runs `f` on a part of the memory and puts it together again.
pub fn part<T>(
    memory: Dirty,
    from: u64,
    pages: u64,
    f: impl FnOnce(Dirty) -> Result<(Dirty, T)>,
) -> Result<(Dirty, T)> {
    let (before, rest) = memory.split_at(from);
    let (middle, after) = rest.split_at(pages);
    let (middle, result) = f(middle)?;
    let whole = before.join(middle).and_then(|front| front.join(after));
    let whole = whole.map_err(|_| anyhow::anyhow!("the workload returned other memory than it was given"))?;
    Ok((whole, result))
}
