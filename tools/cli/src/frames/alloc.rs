//! `hugemm bench alloc`: pairs, bulk and random frees on one to N CPUs, and the cost over the number of CPUs.

use crate::boot::lines::Transcript;
use crate::document::Row;
use crate::frames::area::{Area, AreaPlan, Columns, Sides, Work, alternate, cell, figure, mean_each, rounds_in};
use crate::frames::args::{Alloc, Pattern};
use crate::frames::peers;
use crate::goals::Goals;
use crate::headline;
use crate::machine::Machine;
use crate::results::{self, Line, Results};
use crate::stats::Samples;
use crate::{progress, table};
use anyhow::{Result, bail};
use comfy_table::Table;
use hugemm_base::{CpuId, Order};
use hugemm_host::cpu::Host;
use hugemm_workloads::alloc_free::bulk::{self, Freeing};
use hugemm_workloads::alloc_free::pairs::{self, PAIR, PIN, Pair};
use hugemm_workloads::alloc_free::{CountedPages, FrozenBlocks, Source, Spent};

/// Most blocks that are freed at random where an allocator's time grows with the number of holes.
const MOST_HOLES: u64 = 16_384;

const FROZEN: &str = "hugemm, frozen";
const COUNTED: &str = "hugemm, counted";

#[derive(Clone, Copy)]
struct Case {
    pattern: Pattern,
    order: Order,
}

pub fn run(args: &Alloc) -> Result<()> {
    let machine = Machine::new(&args.measured.common)?;
    let threads = threads(args, &machine);
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
    let sides = 1 + usize::from(args.counted) + peers::count(args.measured.no_peers);
    let turns = cases.len() * threads.len() * sides * args.measured.repeat(args.pairs.runs).all();
    let bar = progress::bar(turns as u64, machine.quiet());
    let atomic = headline::atomic().median();
    let intro = format!("{} of numbered frames; median of {} runs; ns per operation", args.size, args.pairs.runs);
    let mut results = Results { intro, ..Results::default() };
    for case in cases {
        let mut curve = Vec::new();
        let mut names = Vec::new();
        for threads in &threads {
            let (found, columns) = measure(&area, case, *threads, args, &bar)?;
            note_goals(&mut results.goals, case, *threads, &found, &columns, &Scale { atomic, pin: &pin_note });
            names = found;
            curve.push(columns);
        }
        results.tables.push(curve_table(case, &threads, &names, &curve));
        results.rows.extend(rows_of(case, &threads, &names, &curve));
    }
    bar.finish_and_clear();
    results.remarks.extend(peers::note(args.measured.no_peers).map(str::to_owned));
    let how = "A figure is the mean over CPUs. Lock rounds are hugemm's own, per operation.";
    results.remarks.push(format!("{how} {pin_note}."));
    results.rows.push(Row::single(PIN.name, pin, PIN.unit).label("side", "host"));
    machine.show(results)
}

/// Nanoseconds of pinning and unpinning, which each allocation and each free does once.
fn pin(area: &Area<'_>) -> Result<f64> {
    const PINS: u64 = 1_000_000;
    Ok(area.host.run_on(CpuId(0), |cx| {
        let start = std::time::Instant::now();
        for _ in 0..PINS {
            cx.pinned(|pin| std::hint::black_box(pin.cpu()));
        }
        start.elapsed().as_nanos() as f64 / PINS as f64
    })?)
}

/// The user's numbers of CPUs, or the powers of two and all.
fn threads(args: &Alloc, machine: &Machine) -> Vec<u32> {
    if !args.threads.is_empty() {
        return args.threads.clone();
    }
    let all = machine.topology.cpus.len() as u32;
    let mut threads: Vec<u32> = (0..).map(|i| 1 << i).take_while(|n| *n < all).collect();
    threads.push(all);
    threads
}

#[derive(Clone, Copy)]
struct Loops {
    case: Case,
    threads: u32,
    nanos: u64,
    held: u64,
}

impl<'a> Work<'a> for Loops {
    fn makes_many_holes(&self) -> bool {
        self.case.pattern == Pattern::Random && self.held > MOST_HOLES
    }

    fn with<S>(self, area: &'a Area<'a>, source: S, own: bool) -> Box<dyn FnMut() -> Result<Vec<Option<f64>>> + 'a>
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
            let (figures, operations) = match case.pattern {
                Pattern::Pair => {
                    let rounds = rounds.unwrap_or(1);
                    let all =
                        area.on_cpus(threads, &source, |cx, _| Ok(pairs::run(cx, &source, case.order, rounds)?))?;
                    (vec![Some(mean_each(&all))], rounds)
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
                    (vec![Some(mean_each(&taking)), Some(mean_each(&giving))], count * done)
                }
            };
            let locks = (area.lock_rounds()? - before) as f64 / (operations * u64::from(threads)) as f64;
            Ok(figures.into_iter().chain([own.then_some(locks)]).collect())
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
) -> Result<(Vec<&'static str>, Vec<Columns>)> {
    let mut sides = Sides::new(area, Loops { case, threads, nanos: args.pairs.millis * 1_000_000, held: args.held });
    sides.add(FROZEN, FrozenBlocks(&area.frames), true);
    if args.counted {
        sides.add(COUNTED, CountedPages(&area.frames), true);
    }
    peers::each(args.measured.no_peers, &mut sides)?;
    let columns = alternate(&mut sides.sides, args.measured.repeat(args.pairs.runs), bar)?;
    Ok((sides.sides.iter().map(|side| side.name).collect(), columns))
}

/// What the figures of a pattern are, the lock rounds apart.
fn figures(pattern: Pattern) -> &'static [&'static str] {
    match pattern {
        Pattern::Pair => &["pair"],
        Pattern::Bulk | Pattern::Random => &["alloc", "free"],
    }
}

fn name(pattern: Pattern) -> &'static str {
    match pattern {
        Pattern::Pair => "pair",
        Pattern::Bulk => "bulk",
        Pattern::Random => "random",
    }
}

struct Scale<'a> {
    /// Nanoseconds of an uncontended atomic.
    atomic: f64,
    pin: &'a str,
}

fn note_goals(goals: &mut Goals, case: Case, threads: u32, names: &[&str], columns: &[Columns], scale: &Scale<'_>) {
    let get = |side: &str, figure: usize| -> Option<&Samples> {
        columns.get(names.iter().position(|name| *name == side)?)?.get(figure)?.as_ref()
    };
    // The peer that was fastest.
    let best = |figure: usize| {
        let peers = names.iter().filter(|name| ![FROZEN, COUNTED].contains(name)).filter_map(|name| get(name, figure));
        peers.min_by(|a, b| a.median().total_cmp(&b.median()))
    };
    let mut nanos = |metric: &str, samples: Option<&Samples>, goal: f64| {
        if let Some(samples) = samples {
            goals.at_most(metric, samples, "ns", goal);
        }
    };
    if let (Pattern::Bulk, 9, 2) = (case.pattern, case.order.get(), threads) {
        nanos("frames.alloc9_2t_ns", get(FROZEN, 0), 10.0);
        nanos("frames.free9_2t_ns", get(FROZEN, 1), 12.0);
    }
    let mut ratio = |metric: &str, samples: Option<&Samples>, to: Option<Samples>, goal: f64| {
        if let (Some(samples), Some(to)) = (samples, to) {
            goals.at_most(metric, &samples.map(|ns| ns / to.median()), "ratio", goal);
        }
    };
    match (case.pattern, case.order.get(), threads) {
        (Pattern::Pair, 0, 1) => {
            let floor = get(FROZEN, 0).map(|frozen| frozen.map(|ns| ns + 2.0 * scale.atomic));
            ratio("frames.counted_pair0_over_floor", get(COUNTED, 0), floor, 1.05);
        }
        (Pattern::Bulk, 0, 1) => ratio("frames.free0_bulk_1t_vs_best", get(FROZEN, 1), best(1).cloned(), 1.0),
        (Pattern::Random, 0, 1) => ratio("frames.free0_random_1t_vs_best", get(FROZEN, 1), best(1).cloned(), 1.3),
        _ => {}
    }
    let mut atomics = |metric: &str, samples: Option<&Samples>, goal: f64| {
        if let Some(samples) = samples {
            goals.at_most(metric, &samples.map(|ns| ns / scale.atomic), "atomics", goal);
            if metric.contains("pair0") {
                goals.note(scale.pin);
            }
        }
    };
    match (case.pattern, case.order.get(), threads) {
        (Pattern::Pair, 0, 1) => atomics("frames.pair0_1t_atomics", get(FROZEN, 0), 1.0),
        (Pattern::Pair, 0, 2) => atomics("frames.pair0_2t_atomics", get(FROZEN, 0), 1.0),
        (Pattern::Pair, 6, 1) => atomics("frames.pair6_atomics", get(FROZEN, 0), 6.0),
        (Pattern::Random, 0, 2) => atomics("frames.free0_random_2t_atomics", get(FROZEN, 1), 5.0),
        (Pattern::Random, 9, 2) => {
            atomics("frames.alloc9_random_2t_atomics", get(FROZEN, 0), 1.2);
            atomics("frames.free9_random_2t_atomics", get(FROZEN, 1), 2.0);
        }
        _ => {}
    }
}

/// The figures over the number of CPUs: a title and a table.
fn curve_table(case: Case, threads: &[u32], names: &[impl AsRef<str>], curve: &[Vec<Columns>]) -> (String, Table) {
    let mut heads = vec![String::new()];
    for threads in threads {
        let cpus = if *threads == 1 { "1 CPU".to_owned() } else { format!("{threads} CPUs") };
        heads.extend(figures(case.pattern).iter().map(|figure| format!("{figure}, {cpus}")));
    }
    if threads.len() > 1 {
        heads.push("last/first".into());
    }
    heads.push("lock rounds".into());
    let mut lines = table::new(heads);
    let count = figures(case.pattern).len();
    for (side, name) in names.iter().enumerate() {
        let mut line = vec![name.as_ref().to_owned()];
        let mut sums = Vec::new();
        for columns in curve {
            let columns = &columns[side][..count];
            line.extend(columns.iter().map(|samples| cell(samples.as_ref())));
            sums.push(columns.iter().flatten().map(Samples::median).sum::<f64>());
        }
        if let ([first, .., last], true) = (sums.as_slice(), threads.len() > 1) {
            line.push(format!("{:.2} ×", last / first));
        }
        let locks = curve.last().and_then(|columns| columns[side][count].as_ref());
        line.push(locks.map_or(String::new(), |locks| figure(locks.median())));
        lines.add_row(line);
    }
    let what = match case.pattern {
        Pattern::Pair => "taken and freed at once",
        Pattern::Bulk => "taken, then freed last first",
        Pattern::Random => "taken, then freed at random",
    };
    (format!("Order {}, {what}", case.order), lines)
}

pub fn of_guest(transcript: &Transcript) -> Results {
    let (pairs, pins): (Vec<_>, Vec<_>) =
        results::of_guest(transcript).into_iter().partition(|line: &Line<Pair>| line.label("pattern") == "pair");
    let mut results =
        Results { rows: pairs.iter().flat_map(|line| line.rows(&[PAIR])).collect(), ..Results::default() };
    for line in &pins {
        results.rows.extend(line.rows(&[PIN]));
        results.remarks.push(format!("A pin takes {:.1} ns here; each pair has two.", line.samples(&PIN).median()));
    }
    for lines in pairs.chunk_by(|a, b| a.number("order") == b.number("order")) {
        let Ok(order) = Order::new(lines[0].number("order") as u32) else { continue };
        let name = |line: &Line<Pair>| format!("{}, interrupts {}", line.label("side"), line.label("interrupts"));
        let cpus: Vec<&[Line<Pair>]> = lines.chunk_by(|a, b| a.number("cpus") == b.number("cpus")).collect();
        let threads: Vec<u32> = cpus.iter().map(|lines| lines[0].number("cpus") as u32).collect();
        let names: Vec<String> = cpus[0].iter().map(name).collect();
        let column = |line| vec![Some(Line::samples(line, &PAIR)), None];
        let curve: Vec<Vec<Columns>> = cpus.iter().map(|lines| lines.iter().map(column).collect()).collect();
        results.tables.push(curve_table(Case { pattern: Pattern::Pair, order }, &threads, &names, &curve));
    }
    results
}

fn rows_of(case: Case, threads: &[u32], names: &[&str], curve: &[Vec<Columns>]) -> Vec<Row> {
    let mut rows = Vec::new();
    for (threads, columns) in threads.iter().zip(curve) {
        for (name_of_side, columns) in names.iter().zip(columns) {
            let figures = figures(case.pattern).iter().chain(&["lock_rounds"]);
            for (figure, samples) in figures.zip(columns) {
                let Some(samples) = samples else { continue };
                let unit = if *figure == "lock_rounds" { "per operation" } else { "ns" };
                let row = Row::median(format!("bench.alloc.{figure}"), samples, unit).label("side", *name_of_side);
                let row = row.label("pattern", name(case.pattern)).label("order", case.order.get());
                rows.push(row.label("cpus", *threads));
            }
        }
    }
    rows
}
