//! `hugemm bench scale`: what one CPU takes, measured; what CPUs share, from the table of `make sharing`; and what that comes to on 1 to
//! 256 CPUs. No machine with many CPUs is needed, and none is measured.

use crate::document::Row;
use crate::machine::Machine;
use crate::options::{Calibration, Common, Kind};
use crate::results::Results;
use crate::sides::figure;
use crate::stats::Samples;
use crate::table;
use anyhow::{Context, Result, anyhow};
use clap::Args;
use hugemm_base::sync::AtomicU64;
use hugemm_base::{CpuCx, Extent, Never, Order, PageSize, Pfn, SingleCpu, VirtAddr, VirtRange};
use hugemm_clear::{ClearPolicy, Clearer};
use hugemm_frames::{Carved, Frames, Frozen};
use hugemm_paging::{Counting, TlbCpu, TlbShootdown};
use hugemm_vm::{Access, AddressSpaceRef, Backing, DefaultSetup, Parts, Vm, VmaKind};
use std::time::Instant;

#[derive(Debug, Args)]
pub struct Scale {
    /// What it takes to move a cache line from one CPU to another, in nanoseconds.
    #[arg(long, value_name = "NS", default_value_t = 100.0)]
    pub transfer: f64,
    /// Runs of each measurement.
    #[arg(short, long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub runs: u32,
    #[command(flatten)]
    pub calibration: Calibration,
    #[command(flatten)]
    pub common: Common,
}

/// The table of `make sharing`.
const GOLDEN: &str = include_str!("scale/golden.txt");

const CPUS: [u32; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];

/// What is assumed, in plain words.
const ASSUMPTIONS: [&str; 6] = [
    "All CPUs do the same at once, without a pause, on one node. One CPU's time was measured in this run, warm, in a process.",
    "A line of the table that two CPUs share moves once for each write that the row counts, and once where it counts none. Each time \
     takes as long as --transfer says, and the CPU waits for it.",
    "All transfers wait for each other, as if one lock held all lines: a lower bound, since most lines have locks of their own.",
    "While a node refills a CPU's cache or takes back from it, it serves nobody else: what a block costs more by batches than as a pair \
     is counted as held. So it is for faults and range frees.",
    "Unmaps in one space exclude each other: the whole of each is counted as held.",
    "Left out: memory bandwidth, page faults' traps, interrupts of shootdowns, a pager, and what two CPUs share only while both are at \
     it.",
];

/// What scales.
struct Case {
    what: &'static str,
    /// Its row of the table.
    row: &'static str,
    /// For how long it keeps others out: as long as the first case takes more than the second.
    held: Option<(&'static str, &'static str)>,
    /// Does it for a while; nanoseconds for each.
    run: fn(&mut Ground<'_, '_, '_>) -> Result<f64>,
}

const fn case(
    what: &'static str,
    row: &'static str,
    held: Option<(&'static str, &'static str)>,
    run: fn(&mut Ground<'_, '_, '_>) -> Result<f64>,
) -> Case {
    Case { what, row, held, run }
}

/// What batches of a node cost.
const SMALL: Option<(&str, &str)> = Some(("4 KiB by batches", "4 KiB pair"));
const LARGE: Option<(&str, &str)> = Some(("2 MiB by batches", "2 MiB pair"));

const CASES: [Case; 9] = [
    case("4 KiB pair", "4 KiB taken and freed, one node", None, |on| on.blocks(Order::ZERO, 1)),
    case("4 KiB by batches", "4 KiB taken, then all freed, one node", SMALL, |on| on.blocks(Order::ZERO, 1024)),
    case("2 MiB pair", "2 MiB taken and freed, one node", None, |on| on.blocks(HUGE, 1)),
    case("2 MiB by batches", "2 MiB taken, then all freed, one node", LARGE, |on| on.blocks(HUGE, 64)),
    case("4 KiB fault", "a fault each in one space, two areas, far apart, many", SMALL, |on| {
        on.faults(PageSize::Size4K, 1024)
    }),
    case("2 MiB fault", "a fault of 2 MiB each in one space, far apart, many", LARGE, |on| {
        on.faults(PageSize::Size2M, 32)
    }),
    case(PREFAULT, "2 MiB prefaulted each in one space, far apart, 4 KiB pages", None, |on| on.prefault()),
    case("512 pages freed", "512 counted pages freed as a range, many, one node", LARGE, |on| on.range_frees()),
    case("4 KiB unmapped", "a page unmapped each in one space, far apart", Some(("4 KiB unmapped", "")), |on| {
        on.unmaps()
    }),
];

const PREFAULT: &str = "4 KiB prefaulted";

/// A block of 2 MiB.
const HUGE: Order = PageSize::Size2M.order();

/// What a row of the table says of one operation.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Shared {
    lines: u32,
    /// Writes to them, by each CPU.
    transfers: f64,
}

/// The row of this name.
fn shared(golden: &str, row: &str) -> Option<Shared> {
    let names =
        |line: &&str| line.strip_prefix(row).is_some_and(|rest| rest.starts_with(':') || rest.starts_with(" in "));
    let mut lines = golden.lines().skip_while(|line| !names(line));
    let head = lines.next()?.strip_prefix(row)?;
    let operations = head.strip_prefix(" in ").and_then(|rest| rest.split(' ').next()?.parse().ok()).unwrap_or(1.0);
    let mut sum = Shared { lines: 0, transfers: 0.0 };
    for line in lines.map_while(|line| line.strip_prefix("    ")) {
        let words = line.trim_start_matches(|c: char| c.is_ascii_lowercase() || c == ' ');
        let count: u32 = words.split_once(" × ").and_then(|(count, _)| count.parse().ok()).unwrap_or(1);
        let writes = line.rsplit_once("; ").and_then(|(_, writes)| writes.strip_suffix(" writes")?.parse().ok());
        sum.lines += count;
        sum.transfers += f64::from(count) * writes.unwrap_or(1.0);
    }
    Some(Shared { transfers: sum.transfers / operations, ..sum })
}

/// What one CPU takes, what is shared, and for how long others are kept out, for one operation, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Cost {
    alone: f64,
    transfers: f64,
    held: f64,
}

impl Cost {
    /// Operations per second on so many CPUs.
    fn rate(self, cpus: u32) -> f64 {
        if cpus == 1 {
            return 1e9 / self.alone;
        }
        (f64::from(cpus) / (self.alone + self.transfers)).min(1.0 / (self.transfers + self.held)) * 1e9
    }

    /// On how many CPUs no more can be had; infinite if nothing is shared.
    fn saturates(self) -> f64 {
        ((self.alone + self.transfers) / (self.transfers + self.held)).max(1.0)
    }
}

pub fn run(args: &Scale) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let mut memory = machine.memory(256 << 20, PageSize::Size2M, Kind::Thp)?;
    let profile = machine.profile(&args.calibration, memory.as_mut_slice())?.profile;
    let clearer = Clearer::new(machine.features, ClearPolicy::new(profile))?;
    let times = measure(memory.as_mut_slice(), clearer, args.runs)?;
    let alone = |what| CASES.iter().zip(&times).find(|(case, _)| case.what == what).map_or(0.0, |(_, it)| it.median());
    let mut results = Results::default();
    let heads = ["", "1 CPU", "lines", "transfers", "held"].map(str::to_owned).into_iter();
    let mut out = table::new(heads.chain(CPUS.map(|cpus| cpus.to_string())).chain(["saturates".to_owned()]));
    for (case, time) in CASES.iter().zip(&times) {
        let shared = shared(GOLDEN, case.row).with_context(|| format!("the table has no row `{}`", case.row))?;
        let held = case.held.map_or(0.0, |(this, without)| (alone(this) - alone(without)).max(0.0));
        let cost = Cost { alone: time.median(), transfers: shared.transfers * args.transfer, held };
        let saturates = cost.saturates();
        let mut cells = vec![case.what.to_owned(), format!("{} ns", figure(cost.alone)), shared.lines.to_string()];
        cells.extend([figure(shared.transfers), format!("{} ns", figure(held))]);
        cells.extend(CPUS.map(|cpus| figure(cost.rate(cpus) / 1e6)));
        cells.push(if saturates.is_finite() { format!("{saturates:.0} CPUs") } else { "never".to_owned() });
        out.add_row(cells);
        let row = |metric, value, unit| Row::single(metric, value, unit).label("what", case.what);
        results.rows.push(Row::median("bench.scale.alone", time, "ns").label("what", case.what));
        results.rows.push(row("bench.scale.transfers", shared.transfers, "lines"));
        results.rows.extend(CPUS.map(|cpus| {
            row("bench.scale.rate", cost.rate(cpus), "/s").label("cpus", cpus).label("transfer_ns", args.transfer)
        }));
        if case.what == PREFAULT {
            let seconds = CPUS.map(|cpus| format!("{} s on {cpus}", figure((1_u64 << 28) as f64 / cost.rate(cpus))));
            results.remarks.push(format!("1 TiB prefaulted by pages of 4 KiB: {} CPUs.", seconds.join(", ")));
        }
    }
    results.tables.push((format!("millions a second by CPUs, {} ns a transfer", figure(args.transfer)), out));
    results.remarks.extend(ASSUMPTIONS.map(str::to_owned));
    machine.show(results)
}

/// One CPU, its memory and a space.
struct Ground<'s, 'a, 'm> {
    cx: CpuCx<'m, SingleCpu>,
    frames: &'a Frames<'m, Carved>,
    vm: &'a Vm<'a, DefaultSetup<SingleCpu>>,
    space: &'s AddressSpaceRef<'a, DefaultSetup<SingleCpu>>,
}

/// The time of each case, run by run, by turns.
fn measure(memory: &mut [u8], clearer: Clearer, runs: u32) -> Result<Vec<Samples>> {
    let ram = Extent::new(Pfn::new(0), memory.len() as u64 / PageSize::Size4K.bytes())?;
    // SAFETY: the memory is borrowed until this returns, and by nobody else; it is populated.
    let (mut cx, ram) = unsafe { SingleCpu::start(ram, memory.as_mut_ptr()) };
    let frames = Frames::carve(&cx, ram)?;
    let (slots, inboxes) = ([TlbCpu::default()], [AtomicU64::new(0)]);
    // SAFETY: no CPU translates by these tables.
    let shootdown = unsafe { TlbShootdown::new(&slots, &inboxes, Counting) }?;
    let parts = Parts::new(&frames, &shootdown, clearer);
    // SAFETY: all memory is mapped as one; all contexts are this platform's.
    let vm = unsafe { Vm::new(parts) }.context("a lock too large for a slab")?;
    let space = vm.create(&mut cx, VirtRange::new(VirtAddr::new(0), 1 << 47)?)?;
    let mut ground = Ground { cx, frames: &frames, vm: &vm, space: &space };
    let mut times = vec![Samples::default(); CASES.len()];
    for run in 0..=runs {
        for (case, times) in CASES.iter().zip(&mut times) {
            let nanos = (case.run)(&mut ground)?;
            // The first touches what is new.
            if run > 0 {
                times.push(nanos);
            }
        }
    }
    let Ground { mut cx, .. } = ground;
    vm.destroy(&mut cx, space).map_err(|(error, _)| anyhow!("{error}"))?;
    Ok(times)
}

/// Nanoseconds for each of so many.
fn timed(count: u64, work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_nanos() as f64 / count as f64)
}

impl Ground<'_, '_, '_> {
    /// Blocks taken, so many before they are freed.
    fn blocks(&mut self, order: Order, hand: usize) -> Result<f64> {
        let mut blocks: Vec<Frozen> = Vec::with_capacity(hand);
        let rounds = 4096 / hand;
        timed((rounds * hand) as u64, || {
            for _ in 0..rounds {
                for _ in 0..hand {
                    blocks.push(self.frames.alloc(&self.cx, order)?);
                }
                blocks.drain(..).for_each(|block| self.frames.free(&self.cx, block));
            }
            Ok(())
        })
    }

    /// A new area of so many pages; what is done with it, for each page; and it is gone.
    fn area(
        &mut self,
        page: PageSize,
        pages: u64,
        work: impl FnOnce(&mut Self, VirtRange) -> Result<f64>,
    ) -> Result<f64> {
        let span = VirtRange::new(VirtAddr::new(1 << 40), pages * page.bytes())?;
        self.vm.map(&mut self.cx, self.space, span, VmaKind::private(page), Backing::Private)?;
        let nanos = work(self, span)?;
        self.vm.unmap(&mut self.cx, self.space, span)?;
        Ok(nanos)
    }

    fn faults(&mut self, page: PageSize, pages: u64) -> Result<f64> {
        self.area(page, pages, |on, span| {
            timed(pages, || {
                for index in 0..pages {
                    let at = VirtAddr::new(span.start().get() + index * page.bytes());
                    on.vm.fault(&mut on.cx, on.space, at, Access::Write)?;
                }
                Ok(())
            })
        })
    }

    fn prefault(&mut self) -> Result<f64> {
        let pages = 8192;
        self.area(PageSize::Size4K, pages, |on, span| {
            timed(pages, || Ok(on.vm.prefault(on.space, span, None).work(&mut on.cx, &Never)?))
        })
    }

    fn unmaps(&mut self) -> Result<f64> {
        let pages = 512;
        self.area(PageSize::Size4K, pages, |on, span| {
            on.vm.prefault(on.space, span, None).work(&mut on.cx, &Never)?;
            timed(pages, || {
                for index in (0..pages).rev() {
                    let page = VirtRange::new(VirtAddr::new(span.start().get() + (index << 12)), 1 << 12)?;
                    on.vm.unmap(&mut on.cx, on.space, page)?;
                }
                Ok(())
            })
        })
    }

    fn range_frees(&mut self) -> Result<f64> {
        let mut runs = Vec::new();
        for _ in 0..64 {
            let run =
                self.frames.split(self.frames.alloc(&self.cx, HUGE)?, Order::ZERO).map_err(|_| anyhow!("a block"))?;
            runs.push(self.frames.count_run(run).map_err(|_| anyhow!("nobody else's"))?);
        }
        timed(64, || {
            for run in runs {
                self.frames.free_range(&mut self.cx, run);
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every case has its row; lines are counted with their multiples, and writes by operation.
    #[test]
    fn rows_are_read() {
        for case in &CASES {
            assert!(shared(GOLDEN, case.row).is_some(), "{}", case.row);
        }
        let golden = "a pair, many in 4 operations each: 9 lines touched, 3 both write, 1 one writes and the other reads\n    \
                      both write  2 × a.b; 6 writes\n    both write  c\n    one writes  d; 3 writes\na pair: 1 lines touched, 0 both\n";
        assert_eq!(shared(golden, "a pair, many"), Some(Shared { lines: 4, transfers: 4.0 }));
        assert_eq!(shared(golden, "a pair"), Some(Shared { lines: 0, transfers: 0.0 }));
        assert_eq!(shared(golden, "a"), None);
    }

    /// What is shared by nobody grows with the CPUs; what is, until it is had all the time.
    #[test]
    fn curves_end_where_all_wait() {
        let free = Cost { alone: 100.0, transfers: 0.0, held: 0.0 };
        assert_eq!((free.rate(1), free.rate(256), free.saturates()), (1e7, 256e7, f64::INFINITY));
        let shared = Cost { alone: 100.0, transfers: 20.0, held: 10.0 };
        assert_eq!((shared.rate(1), shared.rate(3), shared.saturates()), (1e7, 3e9 / 120.0, 4.0));
        assert_eq!((shared.rate(4), shared.rate(256)), (1e9 / 30.0, 1e9 / 30.0));
    }
}
