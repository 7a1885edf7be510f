//! Nothing is lost when memory is short: on all CPUs, processes share more memory than there is, have some of their own,
//! fork, and unmap and map anew, while pages go to compressed swap and come back. Every touch checks what is in the page.

use super::super::processes::{self, ProcessPlan};
use super::super::swapped::{HELD_BACK, free_held};
use super::{Cx, Done, Failure, Finding, vec_for};
use ::alloc::vec::Vec;
use hugemm_base::{Clock, Order, PAGE_BYTES, PageSize};
use hugemm_frames::Frozen;
use hugemm_kernel::memory::frames;
use hugemm_kernel::percpu;
use hugemm_reclaim::{Ageing, LruPolicy};
use hugemm_workloads::age::AgeFigures;
use hugemm_workloads::request::Plant;

/// Frames that the processes may have, and more for each CPU; pages of 2 MiB need a multiple.
const FRAMES: u64 = 2048;
const FRAMES_PER_CPU: u64 = 256;
const HUGE: u64 = 6;

/// Pages that come back in a round at each page size, at least: otherwise nothing would have been shown.
const LEAST: u64 = 1024;

/// Pages of a window that its process uses all the time.
const HOT: u64 = 8;

/// Order of the pieces that memory may be in.
const PIECE: u32 = 3;

/// Processes: one for each CPU, as far as pages do not get more than sixteen references, which take a frame for a counter,
/// for ever.
const PROCESSES: core::ops::RangeInclusive<u32> = 6..=12;

/// A round at each page size, until `until` at the latest. `plant` is the bug of a flush that is not made.
pub fn round(cx: Cx<'_>, seed: u64, plant: Plant, until: u64) -> Result<(), Failure> {
    for (index, page) in [PageSize::Size4K, PageSize::Size2M].into_iter().enumerate() {
        let left = until.saturating_sub(cx.platform().now_ns());
        let each = if page == PageSize::Size4K { 1 } else { HUGE };
        // All ways of choosing and of looking get their turn.
        let policy = if seed >> 1 & 1 == 0 { LruPolicy::Generations } else { LruPolicy::TwoList };
        let ageing = if seed.is_multiple_of(5) { Ageing::NoFlush } else { Ageing::Batch };
        let procs = percpu::count().clamp(*PROCESSES.start(), *PROCESSES.end());
        let wanted = each * (FRAMES + FRAMES_PER_CPU * u64::from(percpu::count().min(*PROCESSES.end())));
        let frames = wanted.min(frames().available(cx) / 4 * 3);
        let shared = (frames * PAGE_BYTES / 4 * 5).next_multiple_of(page.bytes());
        let (swap, time) = (frames / 2, left / (2 - index as u64));
        let (forks, unflushed) = (true, plant == Plant::UnflushedSwap);
        let (least, hot) = (LEAST, HOT);
        let plan =
            ProcessPlan { page, policy, ageing, procs, frames, swap, shared, time, least, hot, forks, unflushed, seed };
        // Every other round of small pages begins with more memory in pieces than they may have.
        let pieces = (page == PageSize::Size4K && seed & 1 == 1).then(|| pieces(cx, 4 * frames)).transpose()?;
        let figures = processes::run(cx, &plan);
        if let Some(pieces) = pieces {
            free_held(cx, pieces);
        }
        let figures = figures?;
        if figures.swap.loads < least {
            let AgeFigures { touched, swap, aged, age_flushes, seconds, .. } = figures;
            let what = format_args!(
                "{} pages came back from swap, not {least}: nothing was shown (pages of {page}, ageing {}: {} touched, {} of \
                 them without memory, {aged} looked at, {age_flushes} flushes for that, {} stored in {seconds:.0} s)",
                swap.loads,
                ageing.name(),
                touched.pages,
                touched.refused,
                swap.stores
            );
            return Err(Finding::new("pressure", what).into());
        }
        Done::Checked.add(figures.touched.pages);
        Done::Stored.add(figures.swap.stores);
        Done::Refaults.add(figures.swap.loads);
        Done::Refused.add(figures.touched.refused);
    }
    Ok(())
}

/// Every other block of 32 KiB of so many frames, or of half of those that are free; what lies between is free.
fn pieces(cx: Cx<'_>, pages: u64) -> Result<Vec<Frozen>, Failure> {
    let Ok(order) = Order::new(PIECE) else { return Err(Failure::Memory) };
    let count = pages.min(frames().available(cx) / 2) / order.pages();
    let (mut between, mut held) = (vec_for(count as usize)?, vec_for(count as usize)?);
    for index in 0..count {
        percpu::beat();
        let Ok(block) = frames().alloc_for(cx, HELD_BACK, order) else { break };
        if index % 2 == 0 { between.push(block) } else { held.push(block) }
    }
    free_held(cx, between);
    Ok(held)
}
