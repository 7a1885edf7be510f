//! `hugemm bench churn`: mixed sizes with random lifetimes for a while, then the extents that can still be had.

use crate::document::Row;
use crate::frames::area::{AreaPlan, figure};
use crate::frames::args::Churn;
use crate::frames::peers::{self, Managed, Peer, Visit};
use crate::goals::{Bound, Goals};
use crate::machine::Machine;
use crate::results::Results;
use crate::stats::Samples;
use crate::{progress, table};
use anyhow::{Result, anyhow};
use hugemm_base::{Clock, CpuId, Extent, Order, PAGE_SHIFT};
use hugemm_host::cpu::Host;
use hugemm_inspect::interrupt;
use hugemm_workloads::alloc_free::churn::{self, Churned, Live};
use hugemm_workloads::alloc_free::{FrozenBlocks, Source};
use hugemm_workloads::random::Random;
use hugemm_workloads::size::Size;
use indicatif::ProgressBar;

/// Steps between looks at the clock.
const STEPS: u64 = 4096;

/// How often each place is replaced on average after the time is over, by the same requests for every allocator.
const LAST_TURNS: u64 = 4;

/// Of 1000 live blocks, how many are left when most has been freed.
const KEEP: u64 = 100;

/// What one side did, and what it has left.
struct Outcome {
    name: &'static str,
    churned: Churned,
    /// How often each place was replaced, on average.
    turns: f64,
    states: Vec<State>,
}

/// Extents that could be had at one moment.
struct State {
    when: &'static str,
    /// Pages in use.
    used: u64,
    /// Blocks of 2 MiB and of 1 GiB.
    huge: u64,
    gigantic: u64,
}

pub fn run(args: &Churn) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let plan = AreaPlan::new(&machine, args.size, 1, Order::MAX)?;
    let mut memory = plan.memory(&machine)?;
    machine.note_region("metadata", &memory);
    let area = plan.area(&machine, &mut memory)?;
    let sides = 1 + peers::count(args.no_peers) as u64;
    let bar = progress::bar(sides * args.seconds, machine.quiet());
    let mut sides = Sides { host: &area.host, extent: area.extent, args, bar: &bar, outcomes: Vec::new() };
    sides.add("hugemm", &FrozenBlocks(&area.frames))?;
    peers::each(args.no_peers, &mut sides)?;
    let outcomes = sides.outcomes;
    bar.finish_and_clear();

    let mut rows = Vec::new();
    let mut lines =
        table::new(["", "ns per operation", "operations", "turnover", "failed", "in use", "2 MiB", "1 GiB"]);
    let pages = area.extent.pages();
    for outcome in &outcomes {
        for (index, state) in outcome.states.iter().enumerate() {
            let free = pages - state.used;
            let share = |blocks: u64, order: u32| {
                let possible = free >> order;
                let percent = if possible == 0 { 0.0 } else { blocks as f64 * 100.0 / possible as f64 };
                format!("{blocks} ({percent:.0} %)")
            };
            let spent = outcome.churned.spent;
            let first = |text: String| if index == 0 { text } else { String::new() };
            lines.add_row([
                if index == 0 { outcome.name.to_owned() } else { format!("  {}", state.when) },
                first(figure(spent.each())),
                first(spent.operations.to_string()),
                first(format!("{:.0} ×", outcome.turns)),
                first(outcome.churned.failed.to_string()),
                Size(state.used << PAGE_SHIFT).rounded(),
                share(state.huge, 9),
                share(state.gigantic, 18),
            ]);
            let label = |row: Row| row.label("side", outcome.name).label("when", state.when);
            rows.push(label(Row::single("bench.churn.extents_2m", state.huge as f64, "blocks")));
            rows.push(label(Row::single("bench.churn.extents_1g", state.gigantic as f64, "blocks")));
            rows.push(label(Row::single("bench.churn.used", (state.used << PAGE_SHIFT) as f64, "bytes")));
        }
        let label = |row: Row| row.label("side", outcome.name);
        rows.push(label(Row::single("bench.churn.operation", outcome.churned.spent.each(), "ns")));
        rows.push(label(Row::single("bench.churn.operations", outcome.churned.spent.operations as f64, "count")));
        rows.push(label(Row::single("bench.churn.failed", outcome.churned.failed as f64, "count")));
    }
    let lost = lost(&outcomes);
    let met = lost.is_none();
    if outcomes.len() > 1 {
        let row = Row::single("frames.churn_vs_peers", f64::from(u8::from(met)), "bool");
        rows.push(row.label("goal", 1.0).label("met", met).label("bound", Bound::AtLeast.name()));
    }
    let mut goals = Goals::new();
    if let Some(worst) = worst_2m(&outcomes) {
        goals.at_least("frames.churn_2m_vs_best", &Samples::once(worst), 1.0);
    }
    let intro = format!(
        "{}, {} % in use: orders 0 to {} with random lifetimes, {} s each; the last requests are the same for all,\nand so is what is in \
         use then. How many extents can be allocated now without moving anything?",
        args.size,
        args.fill,
        churn::LARGEST,
        args.seconds
    );
    let mut remarks = Vec::new();
    if outcomes.len() > 1 {
        let word = lost.map_or("yes".to_owned(), |Lost { name, percent, size, when }| {
            format!("NO; {name} has {percent:.1} % more of {size} {when}")
        });
        remarks.push(format!("At least as many 2 MiB and 1 GiB extents as any other: {word}"));
    }
    remarks.extend(peers::note(args.no_peers).map(str::to_owned));
    let tables = vec![("Extents left (of what the free memory could hold)".to_owned(), lines)];
    machine.show(Results { intro, tables, remarks, rows, goals })
}

/// What the first has of 2 MiB, as a part of what the best of the others has, at the moment where that is least.
fn worst_2m(outcomes: &[Outcome]) -> Option<f64> {
    let (own, others) = outcomes.split_first()?;
    let moments = own.states.iter().enumerate().filter_map(|(moment, mine)| {
        let best = others.iter().filter_map(|other| Some(other.states.get(moment)?.huge)).max()?;
        Some(mine.huge as f64 / best.max(1) as f64)
    });
    moments.min_by(f64::total_cmp)
}

/// Where another has most more than the first, as a share of what the first has; none if nobody has more at any moment.
fn lost(outcomes: &[Outcome]) -> Option<Lost> {
    let (own, others) = outcomes.split_first()?;
    let mut worst: Option<Lost> = None;
    for other in others {
        for (mine, theirs) in own.states.iter().zip(&other.states) {
            for (size, mine_has, theirs_has) in
                [("2 MiB", mine.huge, theirs.huge), ("1 GiB", mine.gigantic, theirs.gigantic)]
            {
                let percent = (theirs_has as f64 / mine_has.max(1) as f64 - 1.0) * 100.0;
                if theirs_has > mine_has && worst.as_ref().is_none_or(|worst| percent > worst.percent) {
                    worst = Some(Lost { name: other.name, percent, size, when: theirs.when });
                }
            }
        }
    }
    worst
}

/// Another allocator that has more.
struct Lost {
    name: &'static str,
    percent: f64,
    size: &'static str,
    when: &'static str,
}

struct Sides<'a> {
    host: &'a Host<'a>,
    extent: Extent,
    args: &'a Churn,
    bar: &'a ProgressBar,
    outcomes: Vec<Outcome>,
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
        let done = self.host.run_on(CpuId(0), |cx| {
            let mut live: Vec<Live<S, Host<'a>>> = (0..places).map(|_| None).collect();
            let mut random = Random::new(self.args.seed);
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
            let mut random = Random::new(!self.args.seed);
            churned.failed += churn::settle(cx, source, &mut live, &mut random);
            let mut left = places * LAST_TURNS;
            while left > 0 {
                interrupt::check()?;
                churned.failed += churn::run(cx, source, &mut live, left.min(STEPS), &mut random).failed;
                left = left.saturating_sub(STEPS);
            }
            churned.failed += churn::settle(cx, source, &mut live, &mut random);
            let mut states = Vec::new();
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
                states.push(State { when, used: churn::pages::<_, S>(&live), huge, gigantic });
            }
            Ok::<_, anyhow::Error>(Outcome { name, churned, turns: steps as f64 / places as f64, states })
        })??;
        if done.churned.spent.operations == 0 {
            return Err(anyhow!("{name} did nothing; use a larger --size"));
        }
        self.outcomes.push(done);
        Ok(())
    }
}
