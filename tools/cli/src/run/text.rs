//! The run on a terminal: its table, what frames are in use for, and the accounting.

use super::{Log, Measured, RunConditions, Side};
use crate::sides::figure;
use crate::table;
use hugemm_workloads::size::Size;
use hugemm_workloads::vm_host::accounting::Accounting;
use hugemm_workloads::vm_host::{FramesUsed, RunPhase};
use hugemm_workloads::words::Named;

pub fn print(log: &Log, accounting: &Accounting, setting: &RunConditions, sides: &[Side]) {
    let with_kernel = sides.contains(&Side::Kernel);
    let mut heads =
        vec!["", "memory", "page by page", "by extent, cached", "past the cache", "each", "flushes", "IPIs"];
    heads.push("as fast");
    if with_kernel {
        heads.extend(["this kernel", "as fast"]);
    }
    let mut lines = table::new(heads);
    for &phase in RunPhase::ALL {
        let of = |side| log.get(side, phase);
        let (Some(page), Some(cached), Some(ours)) = (of(Side::Page), of(Side::Cached), of(Side::Extent)) else {
            continue;
        };
        let figures = &ours.figures;
        let mut cells = vec![phase.name().to_owned(), Size(figures.bytes).rounded()];
        cells.extend([millis(&page), millis(&cached), millis(&ours), each(phase, &ours)]);
        let pair = |of: fn(&Measured) -> u64| format!("{} → {}", of(&page), of(&ours));
        cells.extend([pair(|m| m.figures.flushes), pair(|m| m.figures.interrupts), times(factor(&ours, &page))]);
        if with_kernel {
            match of(Side::Kernel) {
                Some(kernel) => {
                    let mark = if kernel.figures.bytes < figures.bytes { "*" } else { "" };
                    cells.extend([format!("{}{mark}", millis(&kernel)), times(factor(&ours, &kernel))]);
                }
                None => cells.extend(["–".to_owned(), "–".to_owned()]),
            }
        }
        lines.add_row(cells);
    }
    let RunConditions { workers, flushed_cpus, .. } = setting;
    table::print(
        &format!(
            "{} of memory, median of {} runs (GB = 10^9). {workers} CPUs create machines; flushes are counted for \
             {flushed_cpus} CPUs",
            Size(setting.bytes).rounded(),
            setting.runs
        ),
        &lines,
    );
    println!(
        "  each: bytes that are stored to per second, past the cache; ns per page (of 2 MiB or 4 KiB) where no memory is \
         touched\n  as fast: past the cache, of what the other side takes for as many bytes; flushes, IPIs: page by page → by \
         extent"
    );
    if with_kernel && log.get(Side::Kernel, RunPhase::Destroy).is_some() {
        println!(
            "  * this kernel has the prefaulted machine and the guests only: as much of the run as a process can ask for"
        );
    }
    if let (Some(ours), Some(old)) =
        (log.get(Side::Extent, RunPhase::Pressure), log.get(Side::Page, RunPhase::Pressure))
    {
        let (ours, old) = (&ours.figures.reclaimed, &old.figures.reclaimed);
        println!(
            "\nUnder pressure {} pages went to compressed swap (a worker freed {}), and {} came back. {} looks at accessed bits \
             caused {} flushes by extent, {} caused {} page by page",
            ours.stored, ours.worker_freed, ours.loaded, ours.aged, ours.age_flushes, old.aged, old.age_flushes
        );
    }
    uses(log);
    println!("\nAccounting, after every run: {} checks, all of them right", accounting.checks);
    println!(
        "  {} frames: all are back, but for {} that went bad and {} that vmemmap optimization keeps for the next time",
        accounting.frames, accounting.poisoned, accounting.kept
    );
    println!(
        "  {} of zeroed memory given out, {} of it cleared; {} accesses failed when memory was used up, {} machine refused",
        Size(accounting.given).rounded(),
        Size(accounting.cleared).rounded(),
        accounting.failed_accesses,
        accounting.refused_machines
    );
    println!(
        "  whole runs: {:.2} s page by page, {:.2} s by extent, {:.2} s past the cache",
        log.whole(Side::Page) / 1e3,
        log.whole(Side::Cached) / 1e3,
        log.whole(Side::Extent) / 1e3
    );
}

/// What frames are in use for when each phase is over.
fn uses(log: &Log) {
    let mut heads = vec!["frames in use"];
    heads.extend(FramesUsed::default().each().map(|(of, _)| of));
    let mut lines = table::new(heads);
    for &phase in RunPhase::ALL {
        let Some(measured) = log.get(Side::Extent, phase) else { continue };
        let mut cells = vec![phase.name().to_owned()];
        cells.extend(measured.figures.used.each().map(|(_, frames)| frames.to_string()));
        lines.add_row(cells);
    }
    table::print("By use, when each phase is over, more than before the run (below zero: fewer); by extent", &lines);
}

fn millis(measured: &Measured) -> String {
    format!("{:.1} ms ±{:.0}%", measured.millis.median(), measured.millis.stdev_percent())
}

/// What one byte or one page takes.
fn each(phase: RunPhase, measured: &Measured) -> String {
    let nanos = measured.millis.median().max(f64::MIN_POSITIVE) * 1e6;
    match phase.touches() {
        true => format!("{:.1} GB/s", measured.figures.bytes as f64 / nanos),
        false => format!("{} ns", figure(nanos / measured.figures.pages.max(1) as f64)),
    }
}

/// How many times as long the other took for the same number of bytes.
fn factor(ours: &Measured, other: &Measured) -> f64 {
    let each = |m: &Measured| m.millis.median() / (m.figures.bytes.max(1)) as f64;
    each(other) / each(ours).max(f64::MIN_POSITIVE)
}

fn times(factor: f64) -> String {
    format!("{factor:.2}×")
}

#[cfg(test)]
mod tests {
    use super::*;
    use hugemm_workloads::vm_host::PhaseFigures;

    fn log(phase: RunPhase, millis: [u64; 3]) -> Log {
        let mut log = Log::default();
        for (side, millis) in [Side::Page, Side::Cached, Side::Extent].into_iter().zip(millis) {
            let figures =
                PhaseFigures { nanos: millis * 1_000_000, bytes: 1 << 30, pages: 512, ..PhaseFigures::default() };
            log.push(side, phase, &figures);
        }
        log
    }

    #[test]
    fn what_is_not_touched_has_a_time_per_page() {
        let log = log(RunPhase::Destroy, [20, 30, 512]);
        let ours = log.get(Side::Extent, RunPhase::Destroy).expect("logged");
        assert_eq!(each(RunPhase::Destroy, &ours), "1000000 ns");
        assert_eq!(each(RunPhase::Prefault, &ours), "2.1 GB/s");
        for phase in [RunPhase::Fill, RunPhase::WorkingSets, RunPhase::Destroy, RunPhase::Shrink] {
            assert!(each(phase, &ours).ends_with(" ns"), "{phase:?}");
        }
    }
}
