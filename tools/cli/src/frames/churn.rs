//! `hugemm bench churn`: mixed sizes with random lifetimes for a while, then the extents that can still be had.

use crate::frames::area::AreaPlan;
use crate::frames::args::Churn;
use crate::frames::peers::{self, Managed, Peer, Visit};
use crate::machine::Machine;
use crate::progress;
use crate::results::{Line, Results};
use crate::sides::{pivot, sheet};
use anyhow::{Result, anyhow};
use hugemm_base::random::Random;
use hugemm_base::{Clock, CpuId, Extent, Order, PAGE_SHIFT};
use hugemm_host::cpu::Host;
use hugemm_inspect::interrupt;
use hugemm_workloads::alloc_free::churn::{self, Churned, Live};
use hugemm_workloads::alloc_free::{FrozenBlocks, Source};
use hugemm_workloads::record::Metric;
use indicatif::ProgressBar;

/// Steps between looks at the clock.
const STEPS: u64 = 4096;

/// How often each place is replaced on average after the time is over, by the same requests for every allocator.
const LAST_TURNS: u64 = 4;

/// Of 1000 live blocks, how many are left when most has been freed.
const KEEP: u64 = 100;

/// What a side did, and how often each place was replaced on average.
struct Done {
    churned: Churned,
    turns: f64,
}

const DONE: [Metric<Done>; 4] = [
    Metric::new("bench.churn.operation", "ns", |it: &Done| it.churned.spent.each()).column("ns per operation"),
    Metric::new("bench.churn.operations", "count", |it: &Done| it.churned.spent.operations as f64).column("operations"),
    Metric::new("bench.churn.turns", "count", |it: &Done| it.turns).column("turnover"),
    Metric::new("bench.churn.failed", "count", |it: &Done| it.churned.failed as f64).column("failed"),
];

/// Extents that could be had at one moment: blocks of 2 MiB and of 1 GiB; and pages in use.
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
    let sides = 1 + peers::count(args.no_peers) as u64;
    let bar = progress::bar(sides * args.seconds, machine.quiet());
    let mut sides =
        Sides { host: &area.host, extent: area.extent, args, bar: &bar, done: Vec::new(), left: Vec::new() };
    sides.add("hugemm", &FrozenBlocks(&area.frames))?;
    peers::each(args.no_peers, &mut sides)?;
    let Sides { done, left, .. } = sides;
    bar.finish_and_clear();
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

struct Sides<'a> {
    host: &'a Host<'a>,
    extent: Extent,
    args: &'a Churn,
    bar: &'a ProgressBar,
    done: Vec<Line<Done>>,
    left: Vec<Line<State>>,
}

impl Visit for Sides<'_> {
    fn visit<T: Peer>(&mut self) -> Result<()> {
        let peer = Managed::<T>::new(self.extent)?;
        self.add(T::NAME, &peer)
    }
}

impl<'a> Sides<'a> {
    /// Uses one allocator for the time, and counts what is left.
    fn add<S>(&mut self, name: &'static str, source: &S) -> Result<()>
    where
        S: Source<Host<'a>> + Sync,
        S::Block: Send,
    {
        let pages = self.extent.pages();
        let places = (pages * self.args.fill / 100 * 1000 / churn::MILLIPAGES).max(8);
        self.bar.set_message(name);
        let host = self.host;
        let done = host.run_on(CpuId::new(0), |cx| {
            let mut live: Vec<Live<S, Host<'a>>> = (0..places).map(|_| None).collect();
            let mut random = Random(self.args.seed);
            let mut churned = Churned::default();
            let (from, budget) = (self.host.now_ns(), self.args.seconds * 1_000_000_000);
            let (mut steps, mut told) = (0, 0);
            loop {
                let spent = self.host.now_ns() - from;
                // Every place is filled before time runs out, however slow.
                if spent >= budget && steps >= places {
                    break;
                }
                if spent / 1_000_000_000 > told {
                    told += 1;
                    self.bar.inc(1);
                }
                interrupt::check()?;
                let more = churn::run(cx, source, &mut live, STEPS, &mut random);
                churned.spent = churned.spent.plus(more.spent);
                churned.failed += more.failed;
                steps += STEPS;
            }
            // The last requests are the same for all; so is what is live before them, and at the end: how much had to be
            // held at which moment decides what is left.
            let mut random = Random(!self.args.seed);
            churned.failed += churn::settle(cx, source, &mut live, &mut random);
            let mut left = places * LAST_TURNS;
            while left > 0 {
                interrupt::check()?;
                churned.failed += churn::run(cx, source, &mut live, left.min(STEPS), &mut random).failed;
                left = left.saturating_sub(STEPS);
            }
            churned.failed += churn::settle(cx, source, &mut live, &mut random);
            for when in ["in use", "when nine of ten are freed", "when all is freed"] {
                match when {
                    "in use" => {}
                    "when all is freed" => churn::thin(cx, source, &mut live, 0, &mut random),
                    _ => churn::thin(cx, source, &mut live, KEEP, &mut random),
                }
                source.settle(cx);
                let mut held: Vec<Option<S::Block>> = (0..pages >> 9).map(|_| None).collect();
                let gigantic = churn::available(cx, source, Order::MAX, &mut held) as u64;
                source.settle(cx);
                let huge = churn::available(cx, source, Order::new(9)?, &mut held) as u64;
                source.settle(cx);
                let mut line = Line::new([("side", name.into()), ("when", when.into())]);
                line.runs.push(State { used: churn::pages::<_, S>(&live), huge, gigantic });
                self.left.push(line);
            }
            Ok::<_, anyhow::Error>(Done { churned, turns: steps as f64 / places as f64 })
        })??;
        if done.churned.spent.operations == 0 {
            return Err(anyhow!("{name} did nothing; use a larger --size"));
        }
        let mut line = Line::new([("side", name.into())]);
        line.runs.push(done);
        self.done.push(line);
        Ok(())
    }
}
