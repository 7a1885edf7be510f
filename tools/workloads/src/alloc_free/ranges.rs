//! Blocks divided into single pages and freed again: the loop of "Optimize free_contig_range()"; claims.

use super::{Exhausted, Source, Spent, timed};
use crate::record::{Metric, record};
use hugemm_base::platform::Cpu;
use hugemm_base::{Clock, CpuCx, Extent, Order, Pfn};

use hugemm_frames::{Env, Frames, NoMigration};

/// How divided blocks are freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreeMethod {
    /// One call for all pages of a block.
    Range,
    /// A call for each page.
    EachPage,
}

/// What blocks of one order took; what was not done is nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct DividedBlocks {
    /// Taking and dividing them.
    pub taking: Spent,
    /// Freeing each by one call.
    pub range: Spent,
    /// Freeing each page by page.
    pub each: Spent,
    /// Freeing undivided ones.
    pub whole: Spent,
    /// Lock rounds of the allocator for each block that was freed by one call; not a number where they are not counted.
    pub lock_rounds: f64,
}

record! {
    DividedBlocks = "divided-blocks" {
        taking.operations: u64,
        taking.nanos: u64,
        range.operations: u64,
        range.nanos: u64,
        each.operations: u64,
        each.nanos: u64,
        whole.operations: u64,
        whole.nanos: u64,
        lock_rounds: f64,
    }
}

/// Nanoseconds for each; not a number if nothing was done.
fn each(spent: Spent) -> f64 {
    if spent.operations == 0 { f64::NAN } else { spent.each() }
}

/// All metrics of divided blocks.
pub const METRICS: [Metric<DividedBlocks>; 8] = [
    Metric::new("bench.free.take_divide", "ns per block", |it: &DividedBlocks| each(it.taking))
        .column("take and split"),
    Metric::new("bench.free.free_range", "ns per block", |it: &DividedBlocks| each(it.range)).column("free as range"),
    Metric::new("bench.free.free_each", "ns per block", |it: &DividedBlocks| each(it.each)).column("free page by page"),
    Metric::new("bench.free.speedup", "ratio", |it: &DividedBlocks| each(it.each) / each(it.range)).column("speedup"),
    Metric::new("bench.free.free_whole", "ns per block", |it: &DividedBlocks| each(it.whole)).column("free unsplit"),
    Metric::new("bench.free.lock_rounds", "per block", |it: &DividedBlocks| it.lock_rounds).column("lock rounds"),
    Metric::new("bench.free.loop_range", "s", |it: &DividedBlocks| all(it, it.range)).column("loop, range, s"),
    Metric::new("bench.free.loop_each", "s", |it: &DividedBlocks| all(it, it.each)).column("loop, by page, s"),
];

/// Seconds of taking, dividing and freeing all blocks of a run in one way.
fn all(it: &DividedBlocks, freeing: Spent) -> f64 {
    (each(it.taking) + each(freeing)) * freeing.operations as f64 / 1e9
}

/// Takes `n` blocks of `order`, divides them into pages and frees those, as many at a time as `held` has places; either way once, `first`
/// first, each after the CPU has given back what it had cached. Nothing comes of it where blocks cannot be divided. `lock_rounds` is what
/// the allocator has counted so far; `beat` is called now and then.
pub fn divided<P: Cpu + Clock, S: Source<P>>(
    cx: &mut CpuCx<'_, P>,
    source: &S,
    (order, n): (Order, u64),
    held: &mut [Extent],
    first: FreeMethod,
    lock_rounds: impl Fn(&CpuCx<'_, P>) -> u64,
    beat: impl Fn(),
) -> Result<DividedBlocks, Exhausted> {
    let mut spent = DividedBlocks::default();
    let other = if first == FreeMethod::Range { FreeMethod::EachPage } else { FreeMethod::Range };
    for way in [first, other] {
        source.settle(cx);
        let (before, mut left, mut freeing) = (lock_rounds(cx), n, Spent::default());
        while left > 0 {
            beat();
            let now = left.min(held.len() as u64);
            let held = &mut held[..now as usize];
            let Some(taking) = take(cx, source, order, held)? else { return Ok(DividedBlocks::default()) };
            spent.taking = spent.taking.plus(taking);
            freeing = freeing.plus(give(cx, source, held, way));
            left -= now;
        }
        match way {
            FreeMethod::Range => {
                spent.range = freeing;
                spent.lock_rounds = (lock_rounds(cx) - before) as f64 / n as f64;
            }
            FreeMethod::EachPage => spent.each = freeing,
        }
    }
    Ok(spent)
}

/// Takes a block for each place of `held` and divides it into pages; an operation is one block. Nothing if that cannot be done.
#[inline(never)]
fn take<P: Cpu + Clock, S: Source<P>>(
    cx: &mut CpuCx<'_, P>,
    source: &S,
    order: Order,
    held: &mut [Extent],
) -> Result<Option<Spent>, Exhausted> {
    let mut got = 0;
    let (result, spent) = timed(cx, held.len() as u64, |cx| {
        for place in held.iter_mut() {
            let Some(block) = source.alloc(cx, order) else { return Err(Exhausted(order)) };
            match source.divide(block, order, Order::ZERO) {
                Ok(pages) => *place = pages,
                Err(block) => {
                    source.free(cx, block, order);
                    return Ok(false);
                }
            }
            got += 1;
        }
        Ok(true)
    });
    if result != Ok(true) {
        give(cx, source, &held[..got], FreeMethod::Range);
    }
    result.map(|all| all.then_some(spent))
}

/// Frees divided blocks; an operation is one extent of `held`.
#[inline(never)]
fn give<P: Cpu + Clock, S: Source<P>>(cx: &mut CpuCx<'_, P>, source: &S, held: &[Extent], way: FreeMethod) -> Spent {
    let ((), spent) = timed(cx, held.len() as u64, |cx| {
        for extent in held {
            match way {
                FreeMethod::Range => source.free_pages(cx, *extent),
                FreeMethod::EachPage => {
                    for page in extent.base().get()..extent.end().get() {
                        source.free_page(cx, Pfn::new(page));
                    }
                }
            }
        }
    });
    spent
}

/// Claims each of `extents` (2 MiB-aligned), which must be free, and frees it as one range. Returns what claiming and what
/// freeing cost; an operation is one extent. Nothing if one is in use.
pub fn claims<P: Cpu + Clock, E: Env>(
    cx: &mut CpuCx<'_, P>,
    frames: &Frames<'_, E>,
    extents: &[Extent],
) -> Option<(Spent, Spent)> {
    let (mut claiming, mut freeing) = (Spent::default(), Spent::default());
    for extent in extents {
        let (claimed, spent) = timed(cx, 1, |cx| frames.alloc_contig_range(cx, *extent, &mut NoMigration));
        let claimed = claimed.ok()?;
        claiming = claiming.plus(spent);
        let (_, spent) = timed(cx, 1, |cx| frames.free_extent(cx, claimed));
        freeing = freeing.plus(spent);
    }
    Some((claiming, freeing))
}
