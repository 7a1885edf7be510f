//! `hugemm bench pool`: a pool grown and shrunk, with vmemmap optimization and without, flushes per batch and per page.

pub mod args;
pub mod kernel;
pub mod machine;
pub mod projection;

use crate::document::Row;
use crate::goals::Goals;
use crate::machine::Machine;
use crate::pool::args::Pool;
use crate::pool::machine::{Ground, GroundPlan};
use crate::pool::projection::Here;
use crate::stats::Samples;
use crate::{environment_text, progress, table};
use anyhow::{Result, bail};
use hugemm_base::{Clock, CpuCx, CpuId, Never, PageSize};
use hugemm_host::cpu::{CpuError, Host};
use hugemm_hugetlb::{FlushPolicy, HugePool, Nodes, OptimizerPolicy, Resize};
use hugemm_inspect::environment::Environment;
use hugemm_inspect::interrupt;
use hugemm_workloads::pool::{self, Cycle, Timed};
use hugemm_workloads::request::{FlushEach, Optimization, Pool as Resizes};
use hugemm_workloads::words::{List, Named};
use std::hint::spin_loop;
use std::sync::atomic::{AtomicU32, Ordering};

/// One way to resize, and what was measured of it.
struct Side {
    hvo: Optimization,
    flush: FlushEach,
    threads: u32,
    n: u64,
    up: Samples,
    down: Samples,
    last: Cycle,
}

impl Side {
    fn name(&self) -> String {
        match (self.hvo, self.flush) {
            (Optimization::Off, _) => "off".to_owned(),
            (Optimization::On, FlushEach::Batch) => "on".to_owned(),
            (Optimization::On, FlushEach::Page) => "on, flush per page".to_owned(),
            (Optimization::InPlace, _) => "on, in place".to_owned(),
        }
    }
}

/// Runs the command.
pub fn run(args: &Pool) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let Resizes { n, page: size, hvo, flush, runs } = args.resizes;
    let default = if size == PageSize::Size2M { 2000 } else { 8 };
    let counts: Vec<u64> = n.map_or(vec![default], |counts| counts.iter().collect());
    let most = counts.iter().copied().max().unwrap_or(default);
    let threads = args.threads.iter().copied().max().unwrap_or(1);
    let plan = GroundPlan::new(size, most, threads)?;
    let mut environment = Environment::read()?;
    let bytes = (plan.metadata as u64).next_multiple_of(PageSize::Size2M.bytes());
    let mut metadata = machine.memory(bytes, PageSize::Size2M, crate::args::Kind::Thp)?;
    environment.note_region("metadata", &metadata);
    let host = Host::new(&machine.places(threads as usize)?, &mut [])?;
    let mut sides = Vec::new();
    for n in &counts {
        for threads in &args.threads {
            for hvo in hvo.iter() {
                // Without the optimizer there is nothing to flush; page by page nothing can be swapped.
                let ways = if hvo == Optimization::On { flush } else { List::one(FlushEach::Batch) };
                for flush in ways.iter() {
                    let (up, down, last) = (Samples::default(), Samples::default(), Cycle::default());
                    sides.push(Side { hvo, flush, threads: *threads, n: *n, up, down, last });
                }
            }
        }
    }
    let bar = progress::bar(sides.len() as u64 * u64::from(runs), machine.quiet());
    if !machine.quiet() {
        environment_text::print(&environment);
        println!(
            "\nFrames are numbers and descriptors are behind software tables; nothing is cleared. Median of {} runs.\n\
             Interrupts are modelled: a flush interrupts every other CPU.",
            runs
        );
    }
    for run in 0..runs {
        for index in 0..sides.len() {
            interrupt::check()?;
            let turn = (index + run as usize) % sides.len();
            let side = &mut sides[turn];
            bar.inc(1);
            // Each side has a machine of its own, so that none finds what another left of the tables.
            plan.build(&host, threads, &mut metadata, |ground| measure(&host, ground, size, side))?;
        }
    }
    bar.finish_and_clear();
    let (mut rows, mut goals) = (Vec::new(), Goals::new());
    for side in &sides {
        rows.extend(side_rows(args, side, size));
    }
    if !machine.quiet() {
        print(args, &sides, size);
    }
    summarise(&sides, size, &plan, machine.quiet(), &mut goals, &mut rows);
    if !machine.quiet() {
        goals.print();
    }
    rows.extend(goals.into_rows());
    machine.report(&args.common, environment, rows)
}

/// Grows and shrinks twice; the first time, which touches the memory, is not counted.
fn measure(host: &Host<'_>, ground: &Ground<'_>, size: PageSize, side: &mut Side) -> Result<()> {
    let policy = match side.flush {
        FlushEach::Batch => OptimizerPolicy { swap: side.hvo != Optimization::InPlace, ..OptimizerPolicy::default() },
        FlushEach::Page => OptimizerPolicy { flush: FlushPolicy::Page, swap: false, carve: true },
    };
    let optimizer = ground.optimizer(policy);
    optimizer.set_enabled(side.hvo != Optimization::Off);
    for counted in [false, true] {
        let cycle = ground.with_pool(size, |pool| match side.threads {
            1 => Ok(host.run_on(CpuId(0), |cx| pool::cycle(cx, pool, &optimizer, side.n))??),
            threads => {
                let up = together(host, pool, &optimizer, side.n, threads)?;
                let down = together(host, pool, &optimizer, 0, threads)?;
                Ok(Cycle { up, down })
            }
        })?;
        let (entered, left) = (cycle.up.report.entered, cycle.down.report.left);
        if (entered, left) != (side.n, side.n) {
            bail!("{entered} of {} pages entered and {left} left; use a smaller -n", side.n);
        }
        if counted {
            side.up.push(cycle.up.each());
            side.down.push(cycle.down.each());
        }
        // Tables are made the first time: what most flushes were about.
        if !counted {
            side.last = cycle;
        }
    }
    Ok(())
}

/// A resize by several CPUs: what one does first, and from there to the last CPU's last step. That all come in between is not
/// counted: a thread takes longer to start than a thousand pages to move.
fn together<'e>(
    host: &Host<'_>,
    pool: &HugePool<'_>,
    optimizer: &hugemm_hugetlb::VmemmapOptimizer<'e, crate::pool::machine::Soft<'e>, crate::pool::machine::Map<'e>>,
    target: u64,
    threads: u32,
) -> Result<Timed> {
    let arrived = AtomicU32::new(0);
    let work = |cx: &mut CpuCx<'_, Host<'_>>, resize: &Resize<'_, '_, '_, _, _, _>| {
        // Relaxed: the resize was there before the threads.
        arrived.fetch_add(1, Ordering::Relaxed);
        while arrived.load(Ordering::Relaxed) < threads {
            spin_loop();
        }
        let begin = cx.platform().now_ns();
        resize.work(cx, &Never);
        (begin, cx.platform().now_ns())
    };
    let mut nanos = Ok(0);
    let report = host.run_on(CpuId(0), |cx| {
        let first = cx.platform().now_ns();
        pool.resize(cx, optimizer, target, Nodes::All, |cx, resize| {
            let opened = cx.platform().now_ns() - first;
            let spans = std::thread::scope(|scope| {
                let others = scope.spawn(|| host.run_on_each((1..threads).map(CpuId), |cx| work(cx, resize)));
                let mine = work(cx, resize);
                let mut spans = others.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
                spans.push(mine);
                Ok::<_, CpuError>(spans)
            });
            nanos = spans.map(|spans| {
                let begin = spans.iter().map(|span| span.0).max().unwrap_or(0);
                let end = spans.iter().map(|span| span.1).max().unwrap_or(0);
                opened + end.saturating_sub(begin)
            });
        })
    })??;
    Ok(Timed { report, nanos: nanos? })
}

fn ipis(flushes: u64, cpus: u32) -> u64 {
    flushes * u64::from(cpus - 1)
}

fn saved_kib(side: &Side) -> f64 {
    side.last.up.saved_kib()
}

fn print(args: &Pool, sides: &[Side], size: PageSize) {
    let mut heads = vec!["hvo".to_owned(), "pages".into(), "threads".into()];
    heads.extend(["up ns/page", "down ns/page", "flushes up", "down", "KiB saved/page"].map(str::to_owned));
    heads.extend(args.cpus.iter().map(|cpus| format!("IPIs on {cpus}")));
    let mut lines = table::new(heads);
    for side in sides {
        let (up, down) = (side.last.up.report.flushes, side.last.down.report.flushes);
        let mut cells = vec![side.name(), side.n.to_string(), side.threads.to_string()];
        for samples in [&side.up, &side.down] {
            cells.push(format!("{:.1} ±{:.0}%", samples.median(), samples.stdev_percent()));
        }
        cells.extend([up.to_string(), down.to_string(), format!("{:.2}", saved_kib(side))]);
        cells.extend(args.cpus.iter().map(|cpus| format!("{} / {}", ipis(up, *cpus), ipis(down, *cpus))));
        lines.add_row(cells);
    }
    table::print(&format!("Pools of {size} pages, grown from nothing and shrunk to nothing"), &lines);
}

fn side_rows(args: &Pool, side: &Side, size: PageSize) -> Vec<Row> {
    let name = |what: &str| format!("bench.pool.{what}");
    let label = |row: Row| {
        row.label("hvo", side.hvo != Optimization::Off)
            .label("swap", side.hvo == Optimization::On && side.flush == FlushEach::Batch)
            .label("flush", side.flush.name())
            .label("page", size.to_string())
            .label("n", side.n)
            .label("threads", side.threads)
    };
    let mut rows = vec![
        Row::median(name("up_ns"), &side.up, "ns per page"),
        Row::median(name("down_ns"), &side.down, "ns per page"),
        Row::single(name("saved_kib"), saved_kib(side), "KiB per page"),
    ];
    for (direction, timed) in [("up", &side.last.up), ("down", &side.last.down)] {
        let flushes = timed.report.flushes;
        rows.push(Row::single(name(&format!("flushes_{direction}")), flushes as f64, "flushes"));
        rows.push(Row::single(name(&format!("batches_{direction}")), timed.report.batches as f64, "batches"));
        for cpus in &args.cpus {
            let modelled = ipis(flushes, *cpus) as f64;
            rows.push(Row::single(name(&format!("ipis_{direction}")), modelled, "modelled IPIs").label("cpus", *cpus));
        }
    }
    rows.into_iter().map(label).collect()
}

/// Goals and projections: of the largest number of pages on one thread.
fn summarise(sides: &[Side], size: PageSize, plan: &GroundPlan, quiet: bool, goals: &mut Goals, rows: &mut Vec<Row>) {
    let most = sides.iter().map(|side| side.n).max();
    let find = |hvo, flush| {
        sides.iter().find(|side| Some(side.n) == most && side.threads == 1 && side.hvo == hvo && side.flush == flush)
    };
    let (Some(off), Some(on)) = (find(Optimization::Off, FlushEach::Batch), find(Optimization::On, FlushEach::Batch))
    else {
        return;
    };
    let extra = |on: &Samples, off: &Samples| {
        let mut extra = Samples::default();
        extra.push(on.median() - off.median());
        extra
    };
    let (up, down) = (extra(&on.up, &off.up), extra(&on.down, &off.down));
    let once = |value: f64| {
        let mut samples = Samples::default();
        samples.push(value);
        samples
    };
    if size == PageSize::Size2M {
        goals.at_most("pool.extra_ns_up", &up, "ns per page", 200.0);
        goals.at_most("pool.extra_ns_down", &down, "ns per page", 60.0);
    }
    let flushes = |timed: &Timed| timed.report.flushes as f64 / timed.report.batches.max(1) as f64;
    goals.at_most("pool.flushes_up", &once(flushes(&on.last.up)), "per batch", 2.0);
    goals.at_most("pool.flushes_down", &once(flushes(&on.last.down)), "per batch", 1.0);
    // What is left of the descriptors, and the allocator's share of its other data.
    let bytes = (on.n * size.bytes()) as f64;
    let described = bytes / 64.0 - saved_kib(on) * 1024.0 * on.n as f64;
    let shared = plan.metadata_share();
    goals.at_most("frames.metadata_pct_pool", &once(100.0 * described / bytes + shared), "percent", 0.25);
    rows.push(Row::single("pool.tax_up", on.up.median() / off.up.median(), "ratio"));
    rows.push(Row::single("pool.tax_down", on.down.median() / off.down.median(), "ratio"));
    if let Some(old) = find(Optimization::On, FlushEach::Page).filter(|_| size == PageSize::Size2M) {
        let here = |extra: &Samples, timed: &Timed, old: &Timed| Here {
            extra_ns: extra.median(),
            flushes: timed.report.flushes as f64,
            old_flushes: old.report.flushes as f64 / on.n as f64,
        };
        let (up, down) = (here(&up, &on.last.up, &old.last.up), here(&down, &on.last.down, &old.last.down));
        projection::print(up, down, quiet, rows);
    }
}
