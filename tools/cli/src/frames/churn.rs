//! `hugemm bench churn`: mixed sizes with random lifetimes for a while, then the extents that can still be had.

use crate::frames::area::{Area, AreaPlan, Sides, Work};
use crate::frames::args::Churn;
use crate::frames::peers;
use crate::machine::Machine;
use crate::measure::Repeat;
use crate::progress;
use crate::results::{Line, Results};
use crate::sides::{Run, alternate, pivot, sheet};
use anyhow::Result;
use hugemm_base::random::Random;
use hugemm_base::{Clock, CpuCx, CpuId, Order, PAGE_SHIFT, PageSize};
use hugemm_host::cpu::Host;
use hugemm_inspect::interrupt;
use hugemm_workloads::alloc_free::churn::{self, Churned, Live};
use hugemm_workloads::alloc_free::{FrozenBlocks, Source};
use hugemm_workloads::record::Metric;

/// Steps between looks at the clock.
const STEPS: u64 = 4096;

/// How often each place is replaced on average after the time is over, by the same requests for every allocator.
const LAST_TURNS: u64 = 4;

/// When extents are counted, and how many of 1000 live blocks are left then.
const MOMENTS: [(&str, u64); 3] = [("in use", 1000), ("when nine of ten are freed", 100), ("when all is freed", 0)];

/// What a side did, how often each place was replaced on average, and what could be had at each of the moments.
struct Done {
    churned: Churned,
    turns: f64,
    left: [State; MOMENTS.len()],
}

const DONE: [Metric<Done>; 4] = [
    Metric::new("bench.churn.operation", "ns", |it: &Done| it.churned.spent.each()).column("ns per operation"),
    Metric::new("bench.churn.operations", "count", |it: &Done| it.churned.spent.operations as f64).column("operations"),
    Metric::new("bench.churn.turns", "count", |it: &Done| it.turns).column("turnover"),
    Metric::new("bench.churn.failed", "count", |it: &Done| it.churned.failed as f64).column("failed"),
];

/// Extents that could be had at one moment: blocks of 2 MiB and of 1 GiB; and pages in use.
#[derive(Clone, Copy)]
struct State {
    used: u64,
    huge: u64,
    gigantic: u64,
}

const LEFT: [Metric<State>; 3] = [
    Metric::new("bench.churn.extents_2m", "blocks", |it: &State| it.huge as f64).column("2 MiB"),
    Metric::new("bench.churn.extents_1g", "blocks", |it: &State| it.gigantic as f64).column("1 GiB"),
    Metric::new("bench.churn.used", "bytes", |it: &State| (it.used << PAGE_SHIFT) as f64),
];

pub fn run(args: &Churn) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let plan = AreaPlan::new(&machine, args.size, 1, Order::MAX)?;
    let mut memory = plan.memory(&machine)?;
    machine.note_region("metadata", &memory);
    let area = plan.area(&machine, &mut memory)?;
    let mut sides = Sides::new(&area, Mixture { args });
    sides.add("hugemm", FrozenBlocks(&area.frames), true);
    peers::each(args.no_peers, &mut sides)?;
    let bar = progress::bar(sides.sides.len() as u64, machine.quiet());
    let done = alternate(sides.sides, Repeat::new(1, 0), &bar)?;
    bar.finish_and_clear();
    let left: Vec<Line<State>> = done.iter().flat_map(states).collect();
    let intro = format!(
        "{}, {} % in use: orders 0 to {} with random lifetimes, {} s each; the last requests are the same for all,\nand so is what is in \
         use then. How many extents can be allocated now without moving anything?",
        args.size,
        args.fill,
        churn::LARGEST,
        args.seconds
    );
    let remarks = peers::note(args.no_peers).map(str::to_owned).into_iter().collect();
    let mut results = Results { intro, remarks, ..Results::default() };
    results.add("What was done", sheet(&done, &[("side", "")], &DONE), &done, &DONE);
    results.add("Extents left", pivot(&left, "", &["side"], "when", &LEFT[..2]), &left, &LEFT);
    machine.show(results)
}

/// What was left to a side, a line for each moment.
fn states(done: &Line<Done>) -> impl Iterator<Item = Line<State>> {
    MOMENTS.iter().enumerate().map(|(moment, (when, _))| {
        let runs = done.runs.iter().map(|done| done.left[moment]).collect();
        Line { runs, ..Line::new([("side", done.label("side").into()), ("when", (*when).into())]) }
    })
}

#[derive(Clone, Copy)]
struct Mixture<'a> {
    args: &'a Churn,
}

impl<'a> Work<'a> for Mixture<'a> {
    type Record = Done;

    fn with<S>(self, area: &'a Area<'a>, source: S, _own: bool) -> Run<'a, Done>
    where
        S: Source<Host<'a>> + Sync + 'a,
        S::Block: Send,
    {
        Box::new(move || area.host.run_on(CpuId::new(0), |cx| churned(cx, &source, area.extent.pages(), self.args))?)
    }
}

/// Uses an allocator for the time, and counts what is left.
fn churned<'h, S: Source<Host<'h>>>(
    cx: &mut CpuCx<'_, Host<'h>>,
    source: &S,
    pages: u64,
    args: &Churn,
) -> Result<Done> {
    let places = (pages * args.fill / 100 * 1000 / churn::MILLIPAGES).max(8);
    let mut live: Vec<Live<S, Host<'h>>> = (0..places).map(|_| None).collect();
    let (mut random, mut churned) = (Random(args.seed), Churned::default());
    let until = cx.platform().now_ns() + args.seconds * 1_000_000_000;
    let mut steps = 0;
    // Every place is filled before time runs out, however slow.
    while cx.platform().now_ns() < until || steps < places {
        interrupt::check()?;
        let more = churn::run(cx, source, &mut live, STEPS, &mut random);
        churned.spent = churned.spent.plus(more.spent);
        churned.failed += more.failed;
        steps += STEPS;
    }
    // The last requests are the same for all; so is what is live before them, and at the end: how much had to be held at which moment
    // decides what is left.
    let mut random = Random(!args.seed);
    churned.failed += churn::settle(cx, source, &mut live, &mut random);
    let mut left = places * LAST_TURNS;
    while left > 0 {
        interrupt::check()?;
        churned.failed += churn::run(cx, source, &mut live, left.min(STEPS), &mut random).failed;
        left = left.saturating_sub(STEPS);
    }
    churned.failed += churn::settle(cx, source, &mut live, &mut random);
    let left = MOMENTS.map(|(_, keep)| {
        if keep < 1000 {
            churn::thin(cx, source, &mut live, keep, &mut random);
        }
        let mut held: Vec<Option<S::Block>> = (0..pages >> 9).map(|_| None).collect();
        let [gigantic, huge] = [PageSize::Size1G, PageSize::Size2M].map(|size| {
            source.settle(cx);
            churn::available(cx, source, size.order(), &mut held) as u64
        });
        source.settle(cx);
        State { used: churn::pages::<_, S>(&live), huge, gigantic }
    });
    Ok(Done { churned, turns: steps as f64 / places as f64, left })
}
