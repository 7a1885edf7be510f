//! `hugemm bench alloc`: pairs, bulk and random frees on one to N CPUs, and the cost over the number of CPUs.

use crate::boot::transcript::{Transcript, of_guest as lines_of};
use crate::document::Row;
use crate::frames::area::{Area, AreaPlan, Sides, Work};
use crate::frames::args::{Alloc, Pattern};
use crate::frames::peers::{self, Arrays};
use crate::goals::{ARRAY, ATOMIC, COUNTED, FROZEN};
use crate::headline;
use crate::machine::Machine;
use crate::progress;
use crate::results::{Line, Results};
use crate::sides::{Run, alternate, labelled, mean_each, pivot, rounds_in};
use anyhow::{Result, bail};
use hugemm_base::{CpuId, Order};
use hugemm_host::cpu::Host;
use hugemm_workloads::alloc_free::bulk::{self, Freeing};
use hugemm_workloads::alloc_free::pairs::{self, PAIR, PIN, Pair};
use hugemm_workloads::alloc_free::{CountedPages, FrozenBlocks, Source, Spent};
use hugemm_workloads::record::Metric;
use hugemm_workloads::words::Named;

/// Most blocks that are freed at random where an allocator's time grows with the number of holes.
const MOST_HOLES: u64 = 16_384;

/// What a run took, in nanoseconds for each block, and lock rounds for each; what was not done is no number.
#[derive(Clone, Copy)]
struct Taken {
    pair: f64,
    alloc: f64,
    free: f64,
    locks: f64,
}

const NOTHING: Taken = Taken { pair: f64::NAN, alloc: f64::NAN, free: f64::NAN, locks: f64::NAN };

const LOCKS: Metric<Taken> =
    Metric::new("bench.alloc.lock_rounds", "per operation", |it: &Taken| it.locks).column("lock rounds");
static OF_PAIRS: [Metric<Taken>; 2] =
    [Metric::new("bench.alloc.pair", "ns", |it: &Taken| it.pair).column("pair"), LOCKS];
static OF_BLOCKS: [Metric<Taken>; 3] = [
    Metric::new("bench.alloc.alloc", "ns", |it: &Taken| it.alloc).column("alloc"),
    Metric::new("bench.alloc.free", "ns", |it: &Taken| it.free).column("free"),
    LOCKS,
];

fn metrics(pattern: Pattern) -> &'static [Metric<Taken>] {
    match pattern {
        Pattern::Pair => &OF_PAIRS,
        Pattern::Bulk | Pattern::Random => &OF_BLOCKS,
    }
}

#[derive(Clone, Copy)]
struct Case {
    pattern: Pattern,
    order: Order,
}

pub fn run(args: &Alloc) -> Result<()> {
    let machine = Machine::new(&args.measured.common)?;
    let threads = machine.or_doubling(&args.threads);
    let most = threads.iter().max().copied().unwrap_or(1);
    let largest = args.pairs.orders.iter().max().unwrap_or(Order::ZERO);
    machine.places(most as usize)?;
    let plan = AreaPlan::new(&machine, args.size, most, largest)?;
    for order in args.pairs.orders.iter() {
        if plan.extent.pages() / u64::from(most) < 2 * order.pages() {
            let block = hugemm_workloads::size::Size(order.bytes());
            bail!("{} hold too few blocks of order {order} ({block}) for {most} CPUs; use a larger --size", args.size);
        }
    }
    let mut memory = plan.memory(&machine)?;
    machine.note_region("metadata", &memory);
    let area = plan.area(&machine, &mut memory)?;

    let cases: Vec<Case> = args
        .pattern
        .iter()
        .flat_map(|pattern| args.pairs.orders.iter().map(|order| Case { pattern: *pattern, order }))
        .collect();
    let pin = pin(&area)?;
    let pin_note = format!(
        "Pinning costs {pin:.1} ns here; a kernel turns interrupts off and on for it: 'hugemm boot -- bench alloc' has the same \
         loop both ways"
    );
    let sides = 2 + usize::from(args.counted) + peers::count(args.measured.no_peers);
    let turns = cases.len() * threads.len() * sides * args.measured.repeat(args.pairs.runs).all();
    let bar = progress::bar(turns as u64, machine.quiet());
    let intro = format!("{} of numbered frames; median of {} runs; ns per operation", args.size, args.pairs.runs);
    let mut results = Results { intro, ..Results::default() };
    for case in cases {
        let mut lines = Vec::new();
        for threads in &threads {
            lines.extend(measure(&area, case, *threads, args, &bar)?);
        }
        let metrics = metrics(case.pattern);
        results.add(title(case), pivot(&lines, "", &["side"], "cpus", metrics), &lines, metrics);
    }
    bar.finish_and_clear();
    results.remarks.extend(peers::note(args.measured.no_peers).map(str::to_owned));
    let how = "A figure is the mean over CPUs. Lock rounds are hugemm's own, per operation.";
    results.remarks.push(format!("{how} {pin_note}."));
    results.rows.push(Row::single(PIN.name, pin, PIN.unit).label("side", "host"));
    results.rows.push(Row::median(ATOMIC, &headline::atomic(), "ns"));
    machine.show(results)
}

/// Nanoseconds of pinning and unpinning, which each allocation and each free does once.
fn pin(area: &Area<'_>) -> Result<f64> {
    const PINS: u64 = 1_000_000;
    Ok(area.host.run_on(CpuId::new(0), |cx| {
        let start = std::time::Instant::now();
        for _ in 0..PINS {
            cx.pinned(|pin| std::hint::black_box(pin.cpu()));
        }
        start.elapsed().as_nanos() as f64 / PINS as f64
    })?)
}

#[derive(Clone, Copy)]
struct Loops {
    case: Case,
    threads: u32,
    nanos: u64,
    held: u64,
}

impl<'a> Work<'a> for Loops {
    type Record = Taken;

    fn makes_many_holes(&self) -> bool {
        self.case.pattern == Pattern::Random && self.held > MOST_HOLES
    }

    fn with<S>(self, area: &'a Area<'a>, source: S, own: bool) -> Run<'a, Taken>
    where
        S: Source<Host<'a>> + Sync + 'a,
        S::Block: Send,
    {
        let Loops { case, threads, nanos, held: most } = self;
        let (mut rounds, mut passes) = (None, 0);
        Box::new(move || {
            if case.pattern == Pattern::Pair && rounds.is_none() {
                // How many pairs fill the time is found on all CPUs at once: that is where an allocator may be slow.
                rounds = Some(rounds_in(nanos, |rounds| {
                    let all =
                        area.on_cpus(threads, &source, |cx, _| Ok(pairs::run(cx, &source, case.order, rounds)?))?;
                    all.into_iter().max_by_key(|spent| spent.nanos).ok_or_else(|| anyhow::anyhow!("no CPU"))
                })?);
            }
            area.on_cpus(threads, &source, |_, _| Ok(()))?;
            let before = area.lock_rounds()?;
            let (taken, operations) = match case.pattern {
                Pattern::Pair => {
                    let rounds = rounds.unwrap_or(1);
                    let all =
                        area.on_cpus(threads, &source, |cx, _| Ok(pairs::run(cx, &source, case.order, rounds)?))?;
                    (Taken { pair: mean_each(&all), ..NOTHING }, rounds)
                }
                Pattern::Bulk | Pattern::Random => {
                    let freeing = match case.pattern {
                        Pattern::Random => Freeing::Random(1),
                        _ => Freeing::Lifo,
                    };
                    let count = blocks(area, case.order, threads, most);
                    let pass = |timed: u64| {
                        area.on_cpus(threads, &source, |cx, _| {
                            let mut held: Vec<Option<S::Block>> = (0..count).map(|_| None).collect();
                            if timed > 1 {
                                // The caches of the CPU and of the allocator get used to it.
                                bulk::run(cx, &source, case.order, &mut held, freeing)?;
                            }
                            let mut sum = (Spent::default(), Spent::default());
                            for _ in 0..timed {
                                let (taking, giving) = bulk::run(cx, &source, case.order, &mut held, freeing)?;
                                sum = (sum.0.plus(taking), sum.1.plus(giving));
                            }
                            Ok(sum)
                        })
                    };
                    if passes == 0 {
                        let once = pass(1)?.iter().map(|(taking, giving)| taking.plus(*giving).nanos).max();
                        passes = (nanos / once.unwrap_or(1).max(1)).clamp(1, 64);
                    }
                    let (taking, giving): (Vec<_>, Vec<_>) = pass(passes)?.into_iter().unzip();
                    let done = if passes > 1 { passes + 1 } else { 1 };
                    (Taken { alloc: mean_each(&taking), free: mean_each(&giving), ..NOTHING }, count * done)
                }
            };
            let locks = (area.lock_rounds()? - before) as f64 / (operations * u64::from(threads)) as f64;
            Ok(Taken { locks: if own { locks } else { f64::NAN }, ..taken })
        })
    }
}

/// How many blocks each CPU takes in bulk: all together half of the memory at most.
fn blocks(area: &Area<'_>, order: Order, threads: u32, most: u64) -> u64 {
    ((area.extent.pages() >> order.get()) / 2 / u64::from(threads)).clamp(1, most)
}

/// All sides on `threads` CPUs.
fn measure<'a>(
    area: &'a Area<'a>,
    case: Case,
    threads: u32,
    args: &Alloc,
    bar: &indicatif::ProgressBar,
) -> Result<Vec<Line<Taken>>> {
    let mut sides = Sides::new(area, Loops { case, threads, nanos: args.pairs.millis * 1_000_000, held: args.held });
    sides.add(FROZEN, FrozenBlocks(&area.frames), true);
    if args.counted {
        sides.add(COUNTED, CountedPages(&area.frames), true);
    }
    if case.pattern == Pattern::Pair && case.order == Order::ZERO {
        sides.add(ARRAY, Arrays::new(threads), false);
    }
    peers::each(args.measured.no_peers, &mut sides)?;
    let lines = alternate(sides.sides, args.measured.repeat(args.pairs.runs), bar)?;
    let labels =
        [("pattern", case.pattern.name().into()), ("order", case.order.get().into()), ("cpus", threads.into())];
    Ok(labelled(lines, &labels))
}

fn title(case: Case) -> String {
    let what = match case.pattern {
        Pattern::Pair => "taken and freed at once",
        Pattern::Bulk => "taken, then freed last first",
        Pattern::Random => "taken, then freed at random",
    };
    format!("Order {}, {what}", case.order)
}

pub fn of_guest(transcript: &Transcript) -> Results {
    let (pairs, pins): (Vec<_>, Vec<_>) =
        lines_of(transcript).into_iter().partition(|line: &Line<Pair>| line.label("pattern") == "pair");
    let mut results = Results::default();
    results.record(&pins, &[PIN]);
    for line in &pins {
        results.remarks.push(format!("A pin takes {:.1} ns here; each pair has two.", line.samples(&PIN).median()));
    }
    for lines in pairs.chunk_by(|a, b| a.number("order") == b.number("order")) {
        let Ok(order) = Order::new(lines[0].number("order") as u32) else { continue };
        let table = pivot(lines, "", &["side", "interrupts"], "cpus", &[PAIR]);
        results.add(title(Case { pattern: Pattern::Pair, order }), table, lines, &[PAIR]);
    }
    results
}
