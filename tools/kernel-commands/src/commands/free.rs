//! Blocks divided into pages and freed, as ranges and page by page: the loop of "Optimize free_contig_range()".

use super::{Cx, Failure};
use crate::output::{progress, sample};
use hugemm_base::{Extent, Order};
use hugemm_kernel::memory::{Scratch, frames};
use hugemm_kernel::{percpu, platform::Kernel};
use hugemm_workloads::alloc_free::ranges::{self, FreeMethod};
use hugemm_workloads::alloc_free::{CountedPages, FrozenBlocks, Source, Spent};
use hugemm_workloads::request::Free;

/// Pages that the default number of blocks makes.
const PAGES: u64 = 1 << 18;

/// Blocks held at once, if they fit.
const HELD: u64 = 64;

/// Runs the command.
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
    let extents = Scratch::new(cx, held as usize, Extent::default)?;
    let ways = if run.is_multiple_of(2) {
        [FreeMethod::Range, FreeMethod::EachPage]
    } else {
        [FreeMethod::EachPage, FreeMethod::Range]
    };
    let mut taking = Spent::default();
    let (mut range, mut each) = (Spent::default(), Spent::default());
    for way in ways {
        source.settle(cx);
        let mut left = n;
        while left > 0 {
            percpu::beat();
            let now = left.min(held);
            let part = &mut extents.items[..now as usize];
            taking = taking.plus(ranges::take(cx, source, order, part)?);
            let spent = ranges::give(cx, source, part, way);
            if way == FreeMethod::Range {
                range = range.plus(spent)
            } else {
                each = each.plus(spent)
            }
            left -= now;
        }
    }
    extents.free(cx);
    let labels = [("side", (&name).into()), ("order", order.get().into()), ("n", n.into())];
    sample("bench.free.take_divide", taking.each(), "ns per block", &labels);
    sample("bench.free.free_range", range.each(), "ns per block", &labels);
    sample("bench.free.free_each", each.each(), "ns per block", &labels);
    sample("bench.free.speedup", each.each() / range.each().max(f64::MIN_POSITIVE), "ratio", &labels);
    Ok(())
}
