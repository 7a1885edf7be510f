//! The run on a terminal: its table, what frames are in use for, and the accounting.

use super::{Log, Measured, RunConditions, Side, rows};
use crate::results::Results;
use crate::sides::figure;
use crate::table;
use comfy_table::Table;
use hugemm_workloads::size::Size;
use hugemm_workloads::vm_host::accounting::Accounting;
use hugemm_workloads::vm_host::{FramesUsed, RunPhase};
use hugemm_workloads::words::Named;

pub fn results_of(log: &Log, accounting: &Accounting, setting: &RunConditions) -> Results {
    let RunConditions { workers, flushed_cpus, .. } = setting;
    let runs = log.0.first().map_or(0, |line| line.runs.len());
    let title = format!(
        "{} of memory, median of {runs} runs (GB = 10^9). {workers} CPUs create machines; flushes are counted for \
         {flushed_cpus} CPUs",
        Size(setting.bytes).rounded()
    );
    let used = "By use, when each phase is over, more than before the run (below zero: fewer); by extent".to_owned();
    let tables = vec![(title, phases(log)), (used, uses(log))];
    let mut remarks = vec![
        "each: bytes that are stored to per second, past the cache; ns per page (of 2 MiB or 4 KiB) where no memory is touched"
            .to_owned(),
        "as fast: past the cache, of what the other side takes for as many bytes; flushes, IPIs: page by page → by extent"
            .to_owned(),
    ];
    if log.get(Side::Kernel, RunPhase::Destroy).is_some() {
        remarks.push(
            "* this kernel has the prefaulted machine and the guests only: as much of the run as a process can ask for"
                .to_owned(),
        );
    }
    if let (Some(ours), Some(old)) =
        (log.get(Side::Extent, RunPhase::Pressure), log.get(Side::Page, RunPhase::Pressure))
    {
        let (ours, old) = (&ours.figures.reclaimed, &old.figures.reclaimed);
        remarks.push(format!(
            "Under pressure {} pages went to compressed swap (a worker freed {}), and {} came back. {} looks at accessed bits \
             caused {} flushes by extent, {} caused {} page by page",
            ours.stored, ours.worker_freed, ours.loaded, ours.aged, ours.age_flushes, old.aged, old.age_flushes
        ));
    }
    remarks.push(format!("Accounting, after every run: {} checks, all of them right", accounting.checks));
    remarks.push(format!(
        "{} frames: all are back, but for {} that went bad and {} that vmemmap optimization keeps for the next time",
        accounting.frames, accounting.poisoned, accounting.kept
    ));
    remarks.push(format!(
        "{} of zeroed memory given out, {} of it cleared; {} accesses failed when memory was used up, {} machine refused",
        Size(accounting.given).rounded(),
        Size(accounting.cleared).rounded(),
        accounting.failed_accesses,
        accounting.refused_machines
    ));
    let [page, cached, extent] = [Side::Page, Side::Cached, Side::Extent].map(|side| log.whole(side) / 1e3);
    remarks
        .push(format!("whole runs: {page:.2} s page by page, {cached:.2} s by extent, {extent:.2} s past the cache"));
    Results { tables, remarks, rows: rows(log, setting, accounting), ..Results::default() }
}

/// What each phase took on each side.
fn phases(log: &Log) -> Table {
    let with_kernel = RunPhase::ALL.iter().any(|phase| log.get(Side::Kernel, *phase).is_some());
    let mut heads =
        vec!["", "memory", "page by page", "by extent, cached", "past the cache", "each", "flushes", "IPIs", "as fast"];
    heads.extend(["this kernel", "as fast"].iter().filter(|_| with_kernel));
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
        cells.extend([pair(|m| m.figures.flushes), pair(|m| m.figures.interrupts), times(&ours, &page)]);
        match of(Side::Kernel) {
            Some(kernel) => {
                let mark = if kernel.figures.bytes < figures.bytes { "*" } else { "" };
                cells.extend([format!("{}{mark}", millis(&kernel)), times(&ours, &kernel)]);
            }
            None if with_kernel => cells.extend(["–".to_owned(), "–".to_owned()]),
            None => {}
        }
        lines.add_row(cells);
    }
    lines
}

/// What frames are in use for when each phase is over.
fn uses(log: &Log) -> Table {
    let mut lines = table::new(["frames in use"].into_iter().chain(FramesUsed::default().each().map(|(of, _)| of)));
    for &phase in RunPhase::ALL {
        let Some(measured) = log.get(Side::Extent, phase) else { continue };
        let used = measured.figures.used.each().map(|(_, frames)| frames.to_string());
        lines.add_row([phase.name().to_owned()].into_iter().chain(used));
    }
    lines
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
fn times(ours: &Measured, other: &Measured) -> String {
    let each = |m: &Measured| m.millis.median() / (m.figures.bytes.max(1)) as f64;
    format!("{:.2}×", each(other) / each(ours).max(f64::MIN_POSITIVE))
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
