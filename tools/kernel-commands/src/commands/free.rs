//! Blocks divided into pages and freed, as ranges and page by page: the loop of "Optimize free_contig_range()".

use super::{Cx, Failure, vec_of};
use crate::output::{progress, record};
use hugemm_base::{CpuCx, Extent, Order};
use hugemm_kernel::memory::frames;
use hugemm_kernel::{percpu, platform::Kernel};
use hugemm_workloads::alloc_free::ranges::{self, FreeMethod};
use hugemm_workloads::alloc_free::{CountedPages, FrozenBlocks, Source};
use hugemm_workloads::request::Free;

/// Pages that the default number of blocks makes.
const PAGES: u64 = 1 << 18;

/// Blocks held at once, if they fit.
const HELD: u64 = 64;

#[inline(never)]
pub fn run(cx: Cx<'_>, args: &Free) -> Result<(), Failure> {
    let of = u64::from(args.runs) * args.order.iter().count() as u64;
    let mut done = 0;
    for order in args.order.iter() {
        for run in 0..args.runs {
            progress(done, of, "free");
            done += 1;
            side(cx, "hugemm, counted", &CountedPages(frames()), order, args.n, run)?;
            side(cx, "hugemm, frozen", &FrozenBlocks(frames()), order, args.n, run)?;
        }
    }
    Ok(())
}

/// One run of one side: both ways of freeing, either first by turns.
fn side<S: Source<Kernel>>(
    cx: Cx<'_>,
    name: &str,
    source: &S,
    order: Order,
    n: Option<u64>,
    run: u32,
) -> Result<(), Failure> {
    let n = n.unwrap_or((PAGES >> order.get()).max(4));
    let fit = (frames().managed() >> order.get()) / 2;
    let held = HELD.min(n).min(fit.max(1));
    let mut extents = vec_of(held as usize, Extent::default)?;
    let first = if run.is_multiple_of(2) { FreeMethod::Range } else { FreeMethod::EachPage };
    let rounds = |cx: &CpuCx<'_, Kernel>| frames().stats(cx).lock_rounds;
    let spent = ranges::divided(cx, source, (order, n), &mut extents, first, rounds, percpu::beat)?;
    record(&spent, &[("side", (&name).into()), ("order", order.get().into()), ("n", n.into())]);
    Ok(())
}
