//! `hugemm bench scale`: what one CPU takes, measured; what CPUs share, from the table of `make sharing`; and what that comes to on 1 to
//! 256 CPUs. With `--measure` also what as many as there are do.

mod work;

use crate::document::Row;
use crate::frames::area::AreaPlan;
use crate::machine::Machine;
use crate::options::{Common, Kind};
use crate::results::Results;
use crate::sides::figure;
use crate::stats::Samples;
use crate::table;
use anyhow::{Context, Result, anyhow};
use clap::Args;
use comfy_table::Table;
use hugemm_base::sync::AtomicU64;
use hugemm_base::{CpuId, Order, PageSize, VirtAddr, VirtRange};
use hugemm_clear::{ClearPolicy, Clearer};
use hugemm_host::cpu::Host;
use hugemm_inspect::interrupt;
use hugemm_paging::{Counting, TlbCpu, TlbShootdown};
use hugemm_vm::{Parts, Vm};
use std::time::Duration;
use work::{Machinery, Run};

#[derive(Debug, Args)]
pub struct Scale {
    /// What it takes to move a cache line from one CPU to another, in nanoseconds.
    #[arg(long, value_name = "NS", default_value_t = 100.0)]
    pub transfer: f64,
    /// Measure 1, 2, 4 ... CPUs too, up to those that this process may use, each for so long. Takes 256 MiB for each CPU.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "1")]
    pub measure: Option<f64>,
    /// Runs of each measurement on one CPU.
    #[arg(short, long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub runs: u32,
    #[command(flatten)]
    pub common: Common,
}

/// The table of `make sharing`.
const GOLDEN: &str = include_str!("scale/golden.txt");

const CPUS: [u32; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];

/// What is assumed, in plain words.
const ASSUMPTIONS: [&str; 6] = [
    "All CPUs do the same at once, without a pause, on one node. One CPU's time was measured in this run, warm, in a process.",
    "A line of the table that two CPUs share moves once for each write that the row counts, and once where it counts none; one of the \
     node's, once for each lock round at most. Each time takes as long as --transfer says, and the CPU waits for it.",
    "Transfers of a node's lines wait for each other, for they are made under its lock; those of any other line wait for that line.",
    "While a node refills a CPU's cache or takes back from it, it serves nobody else: what a block costs more by batches than as a pair \
     is counted as held. So it is for faults and range frees.",
    "Unmaps in one space exclude each other, and so do areas mapped: the whole of each, with all of its transfers, is counted as held.",
    "Left out: memory bandwidth, page faults' traps, interrupts of shootdowns, a pager, and what two CPUs share only while both are at \
     it.",
];

/// How it is measured.
const MEASURED: &str = "Measured: each CPU is a thread that is bound to one, and does the same at other addresses. All begin a round at once; a round's rate \
     is what all have done by the time of the slowest; a figure is the median of the rounds, ± their deviation.";

/// What scales.
struct Case {
    what: &'static str,
    /// Its row of the table.
    row: &'static str,
    /// For how long it keeps others out: as long as the first case takes more than the second.
    held: Option<(&'static str, &'static str)>,
    /// Does it for a while, as one of all CPUs.
    run: Run,
}

const fn case(what: &'static str, row: &'static str, held: Option<(&'static str, &'static str)>, run: Run) -> Case {
    Case { what, row, held, run }
}

/// What batches of a node cost.
const SMALL: Option<(&str, &str)> = Some(("4 KiB by batches", "4 KiB pair"));
const LARGE: Option<(&str, &str)> = Some(("2 MiB by batches", "2 MiB pair"));

const CASES: [Case; 11] = [
    case("4 KiB pair", "4 KiB taken and freed, one node", None, |on| on.blocks(Order::ZERO, 1)),
    case("4 KiB by batches", "4 KiB taken, then all freed, one node", SMALL, |on| on.blocks(Order::ZERO, 8192)),
    case("2 MiB pair", "2 MiB taken and freed, one node", None, |on| on.blocks(HUGE, 1)),
    case("2 MiB by batches", "2 MiB taken, then all freed, one node", LARGE, |on| on.blocks(HUGE, 64)),
    case("4 KiB fault", "a fault each in one space, two areas, far apart, one node, many", SMALL, |on| {
        on.faults(PageSize::Size4K, 1024)
    }),
    case("4 KiB fault, a space each", "a fault each in two spaces, one node, many", SMALL, |on| on.faults_apart(1024)),
    case("2 MiB fault", "a fault of 2 MiB each in one space, far apart, many, one node", LARGE, |on| {
        on.faults(PageSize::Size2M, 32)
    }),
    case(PREFAULT, "2 MiB prefaulted each in one space, far apart, 4 KiB pages, one node", None, |on| on.prefault()),
    case("512 pages freed", "512 counted pages freed as a range, many, one node", LARGE, |on| on.range_frees()),
    case(
        "4 KiB unmapped",
        "a page unmapped each in one space, far apart, one node",
        Some(("4 KiB unmapped", "")),
        |on| on.unmaps(),
    ),
    case("area mapped", "an area mapped each in one space, far apart, one node", Some(("area mapped", "")), |on| {
        on.maps()
    }),
];

const PREFAULT: &str = "4 KiB prefaulted";

/// A block of 2 MiB.
const HUGE: Order = PageSize::Size2M.order();

/// Each run of a case on one CPU: as long as it takes until the pages that come and go are in its cache.
const WARM: Duration = Duration::from_millis(50);

/// Memory for each CPU.
const SHARE: u64 = 256 << 20;

/// What a row of the table says of one operation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Shared {
    lines: u32,
    /// How often they move, for each CPU.
    transfers: f64,
    /// Of that, the node's.
    of_node: f64,
    /// How often the busiest of the others does.
    busiest: f64,
    /// Lock rounds of the node.
    rounds: f64,
}

/// The node's lock.
const LOCK: &str = "nodes[0].lists.raw";

/// Whether a line is reached under the node's lock only: all of the node and its arenas but references, which have no lock.
fn is_of_node(line: &str) -> bool {
    line.contains(" frames.") && !line.contains(".refs.")
}

/// The row of this name.
fn shared(golden: &str, row: &str) -> Option<Shared> {
    let names =
        |line: &&str| line.strip_prefix(row).is_some_and(|rest| rest.starts_with(':') || rest.starts_with(" in "));
    let mut lines = golden.lines().skip_while(|line| !names(line));
    let head = lines.next()?.strip_prefix(row)?;
    let operations = head.strip_prefix(" in ").and_then(|rest| rest.split(' ').next()?.parse().ok()).unwrap_or(1.0);
    let lines: Vec<&str> = lines.map_while(|line| line.strip_prefix("    ")).collect();
    let writes =
        |line: &str| line.rsplit_once("; ").and_then(|(_, writes)| writes.strip_suffix(" writes")?.parse().ok());
    // Taken and given back.
    let rounds = lines.iter().find(|line| line.contains(LOCK)).and_then(|line| writes(line)).unwrap_or(0.0) / 2.0;
    let mut sum = Shared { rounds: rounds / operations, ..Shared::default() };
    for line in lines {
        let words = line.trim_start_matches(|c: char| c.is_ascii_lowercase() || c == ' ');
        let count: u32 = words.split_once(" × ").and_then(|(count, _)| count.parse().ok()).unwrap_or(1);
        let moves = writes(line).unwrap_or(1.0_f64);
        let moves = if rounds > 0.0 && is_of_node(line) { moves.min(rounds) } else { moves } / operations;
        sum.lines += count;
        sum.transfers += f64::from(count) * moves;
        if is_of_node(line) {
            sum.of_node += f64::from(count) * moves;
        } else {
            sum.busiest = sum.busiest.max(moves);
        }
    }
    Some(sum)
}

/// What one CPU takes, what is shared, and for how long others are kept out, for one operation, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Cost {
    alone: f64,
    lines: u32,
    transfers: f64,
    held: f64,
    /// What others wait for: what is held, with its transfers, or the busiest line.
    serial: f64,
    /// Lock rounds of the node.
    rounds: f64,
}

impl Cost {
    /// Operations per second on so many CPUs.
    fn rate(self, cpus: u32) -> f64 {
        if cpus == 1 {
            return 1e9 / self.alone;
        }
        (f64::from(cpus) / (self.alone + self.transfers)).min(1.0 / self.serial) * 1e9
    }

    /// On how many CPUs no more can be had; infinite if nothing is shared.
    fn saturates(self) -> f64 {
        ((self.alone + self.transfers) / self.serial).max(1.0)
    }
}

pub fn run(args: &Scale) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let counts: Vec<u32> = match args.measure {
        Some(_) => machine.or_doubling(&[]),
        None => Vec::new(),
    };
    let cpus = counts.last().copied().unwrap_or(1);
    let mut memory = machine.memory(SHARE * u64::from(cpus), PageSize::Size2M, Kind::Thp)?;
    machine.note_region("memory", &memory);
    let profile = machine.profile(memory.as_mut_slice())?.0;
    let clearer = Clearer::new(machine.features, ClearPolicy::new(profile))?;
    let host = Host::new(&machine.places(cpus as usize)?, memory.as_mut_slice())?;
    let plan = AreaPlan::over(host.frames(), cpus)?;
    let mut metadata = plan.memory(&machine)?;
    // SAFETY: the frames are the host's alone, initialised, and reached by its contexts only.
    let frames = unsafe { plan.frames(&host, metadata.as_mut_slice()) }?;
    let slots: Vec<TlbCpu> = (0..cpus).map(|_| TlbCpu::default()).collect();
    let words = TlbShootdown::<Counting>::inbox_words(slots.len());
    let inboxes: Vec<_> = (0..words).map(|_| AtomicU64::new(0)).collect();
    // SAFETY: no CPU translates by these tables.
    let shootdown = unsafe { TlbShootdown::new(&slots, &inboxes, Counting) }?;
    // SAFETY: all memory is mapped as one; all contexts are the host's.
    let vm = unsafe { Vm::new(Parts::new(&frames, &shootdown, clearer)) }.context("a lock too large for a slab")?;
    let vm = &vm;
    let space = host.run_on(CpuId::new(0), |cx| {
        vm.create(cx, VirtRange::new(VirtAddr::new(0), 1 << 47)?).map_err(anyhow::Error::from)
    })??;
    let machinery = Machinery { host: &host, frames: &frames, vm, space: &space };

    let mut times = vec![Samples::default(); CASES.len()];
    for _ in 0..args.runs {
        for (case, times) in CASES.iter().zip(&mut times) {
            let rates = machinery.rates(1, WARM, case.run)?;
            times.push(1e9 / rates.median());
        }
    }
    let mut results = Results::default();
    let costs = costs(&times, args.transfer)?;
    results.tables.push((
        format!("millions a second by CPUs, {} ns a transfer", figure(args.transfer)),
        predicted(&costs, &times, args.transfer, &mut results.rows, &mut results.remarks),
    ));
    if let Some(seconds) = args.measure {
        let time = Duration::try_from_secs_f64(seconds).context("--measure")?;
        let heads = ["".to_owned(), "".to_owned()].into_iter();
        let mut out = table::new(heads.chain(counts.iter().map(u32::to_string)));
        for (case, cost) in CASES.iter().zip(&costs) {
            let mut cells =
                [vec![case.what.to_owned(), "measured".to_owned()], vec!["".to_owned(), "from one CPU".to_owned()]];
            for cpus in counts.iter().copied() {
                interrupt::check()?;
                let rates = machinery.rates(cpus, time, case.run)?;
                cells[0].push(format!("{} ±{:.0}%", figure(rates.median() / 1e6), rates.stdev_percent()));
                cells[1].push(figure(cost.rate(cpus) / 1e6));
                let row = Row::median("bench.scale.measured", &rates, "/s");
                results.rows.push(row.label("what", case.what).label("cpus", cpus));
            }
            cells.into_iter().for_each(|cells| _ = out.add_row(cells));
        }
        results.tables.push(("millions a second, measured on so many CPUs, beside the table above".to_owned(), out));
        results.remarks.push(MEASURED.to_owned());
    }
    results.remarks.extend(ASSUMPTIONS.map(str::to_owned));
    host.run_on(CpuId::new(0), move |cx| vm.destroy(cx, space).map_err(|(error, _)| anyhow!("{error}")))??;
    machine.show(results)
}

/// What each case costs.
fn costs(times: &[Samples], transfer: f64) -> Result<Vec<Cost>> {
    let alone = |what| CASES.iter().zip(times).find(|(case, _)| case.what == what).map_or(0.0, |(_, it)| it.median());
    let cost = |(case, time): (&Case, &Samples)| {
        let shared = shared(GOLDEN, case.row).with_context(|| format!("the table has no row `{}`", case.row))?;
        let held = case.held.map_or(0.0, |(this, without)| (alone(this) - alone(without)).max(0.0));
        // Who is kept out by the whole of it waits for all of its lines.
        let whole = case.held.is_some_and(|(_, without)| without.is_empty());
        let within = if whole { shared.transfers } else { shared.of_node };
        Ok(Cost {
            alone: time.median(),
            lines: shared.lines,
            transfers: shared.transfers * transfer,
            held,
            serial: (within * transfer + held).max(shared.busiest * transfer),
            rounds: shared.rounds,
        })
    };
    CASES.iter().zip(times).map(cost).collect()
}

/// The curves.
fn predicted(
    costs: &[Cost],
    times: &[Samples],
    transfer: f64,
    rows: &mut Vec<Row>,
    remarks: &mut Vec<String>,
) -> Table {
    let heads = ["", "1 CPU", "lines", "transfers", "held"].map(str::to_owned).into_iter();
    let mut out = table::new(heads.chain(CPUS.map(|cpus| cpus.to_string())).chain(["saturates".to_owned()]));
    for ((case, time), cost) in CASES.iter().zip(times).zip(costs) {
        let (saturates, transfers) = (cost.saturates(), cost.transfers / transfer);
        let mut cells = vec![case.what.to_owned(), format!("{} ns", figure(cost.alone)), cost.lines.to_string()];
        cells.extend([figure(transfers), format!("{} ns", figure(cost.held))]);
        cells.extend(CPUS.map(|cpus| figure(cost.rate(cpus) / 1e6)));
        cells.push(if saturates.is_finite() { format!("{saturates:.0} CPUs") } else { "never".to_owned() });
        out.add_row(cells);
        let row = |metric, value, unit| Row::single(metric, value, unit).label("what", case.what);
        rows.push(Row::median("bench.scale.alone", time, "ns").label("what", case.what));
        rows.push(row("bench.scale.transfers", transfers, "lines"));
        rows.extend(CPUS.map(|cpus| {
            row("bench.scale.rate", cost.rate(cpus), "/s").label("cpus", cpus).label("transfer_ns", transfer)
        }));
        if cost.rounds > 0.0 {
            remarks.push(format!(
                "{}: a lock round of the node serves {}, and lasts {} ns at most beside what its lines take to move.",
                case.what,
                figure(1.0 / cost.rounds),
                figure(cost.held / cost.rounds)
            ));
        }
        if case.what == PREFAULT {
            let seconds = CPUS.map(|cpus| format!("{} s on {cpus}", figure((1_u64 << 28) as f64 / cost.rate(cpus))));
            remarks.push(format!("1 TiB prefaulted by pages of 4 KiB: {} CPUs.", seconds.join(", ")));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every case has its row; lines are counted with their multiples, and writes by operation, those under the node's lock by lock round.
    #[test]
    fn rows_are_read() {
        for case in &CASES {
            assert!(shared(GOLDEN, case.row).is_some(), "{}", case.row);
        }
        let golden = "a pair, many in 4 operations each: 9 lines touched, 3 both write, 1 one writes and the other reads\n    \
                      both write  2 × a.b; 6 writes\n    both write  c\n    one writes  d; 3 writes\na pair: 1 lines touched, 0 both\n\
                      under a lock in 2 operations each: 9 lines\n    both write  frames.arenas.given[0].a; 9 writes\n    \
                      both write  frames.arenas.given[0].refs.a; 7 writes\n    both write  frames.nodes[0].lists.raw; 4 writes\n";
        let many = Shared { lines: 4, transfers: 4.0, busiest: 1.5, ..Shared::default() };
        assert_eq!(shared(golden, "a pair, many"), Some(many));
        assert_eq!(shared(golden, "a pair"), Some(Shared::default()));
        let (transfers, of_node, busiest) = ((2.0 + 7.0 + 2.0) / 2.0, (2.0 + 2.0) / 2.0, 7.0 / 2.0);
        assert_eq!(shared(golden, "under a lock"), Some(Shared { lines: 3, transfers, of_node, busiest, rounds: 1.0 }));
        assert_eq!(shared(golden, "a"), None);
    }

    /// What is shared by nobody grows with the CPUs; what is, until it is had all the time.
    #[test]
    fn curves_end_where_all_wait() {
        let free = Cost { alone: 100.0, lines: 0, transfers: 0.0, held: 0.0, serial: 0.0, rounds: 0.0 };
        assert_eq!((free.rate(1), free.rate(256), free.saturates()), (1e7, 256e7, f64::INFINITY));
        let shared = Cost { transfers: 20.0, held: 10.0, serial: 30.0, ..free };
        assert_eq!((shared.rate(1), shared.rate(3), shared.saturates()), (1e7, 3e9 / 120.0, 4.0));
        assert_eq!((shared.rate(4), shared.rate(256)), (1e9 / 30.0, 1e9 / 30.0));
    }
}
