//! The day on a terminal: one table, the books, and a paragraph.

use super::{Log, Measured, Side};
use crate::run::args::Run;
use crate::size::Size;
use crate::table;
use hugemm_workloads::day::books::Books;
use hugemm_workloads::day::{By, GUESTS, Phase};

const OURS: Side = Side::Day(By::Extent);
const OLD: Side = Side::Day(By::Page);

/// Prints everything.
pub fn print(log: &Log, books: &Books, bytes: u64, workers: u32, args: &Run, sides: &[Side]) {
    let with_kernel = sides.contains(&Side::Kernel);
    let mut heads =
        vec!["", "memory", "by extent", "GB/s", "flushes", "IPIs", "page by page", "flushes", "IPIs", "slower"];
    if with_kernel {
        heads.extend(["this kernel", "slower"]);
    }
    let mut lines = table::new(heads);
    for phase in Phase::ALL {
        let (Some(ours), Some(old)) = (log.get(OURS, phase), log.get(OLD, phase)) else { continue };
        let figures = &ours.figures;
        let mut cells = vec![phase.name().to_owned(), Size(figures.bytes).rounded(), millis(ours)];
        cells.push(format!("{:.1}", figures.bytes as f64 / ours.millis.median().max(f64::MIN_POSITIVE) / 1e6));
        cells.extend([figures.flushes.to_string(), figures.interrupts.to_string(), millis(old)]);
        cells.extend([old.figures.flushes.to_string(), old.figures.interrupts.to_string(), slower(ours, old)]);
        if with_kernel {
            match log.get(Side::Kernel, phase) {
                Some(kernel) => {
                    let mark = if kernel.figures.bytes < figures.bytes { "*" } else { "" };
                    cells.extend([format!("{}{mark}", millis(kernel)), slower(ours, kernel)]);
                }
                None => cells.extend(["–".to_owned(), "–".to_owned()]),
            }
        }
        lines.add_row(cells);
    }
    let cpus = workers + (GUESTS as u32 + 1) * args.vcpus;
    table::print(
        &format!(
            "A day on {} of memory, median of {} (GB = 10^9). {workers} CPUs create machines; flushes are counted for \
             {cpus} CPUs",
            Size(bytes).rounded(),
            args.runs
        ),
        &lines,
    );
    if with_kernel && log.get(Side::Kernel, Phase::Destroy).is_some() {
        println!(
            "  * this kernel has the prefaulted machine and the guests only: as much of the day as a process can ask for"
        );
    }
    if let (Some(ours), Some(old)) = (log.get(OURS, Phase::Pressure), log.get(OLD, Phase::Pressure)) {
        let (ours, old) = (&ours.figures.reclaimed, &old.figures.reclaimed);
        println!(
            "\nUnder pressure {} pages went to compressed swap and {} came back. {} looks at accessed bits caused {} flushes \
             by extent, {} caused {} page by page",
            ours.stored, ours.loaded, ours.aged, ours.age_flushes, old.aged, old.age_flushes
        );
    }
    println!("\nThe books, after every day: {} checks, all of them right", books.checks);
    println!(
        "  {} frames: all are back, but for {} that went bad and {} that descriptor economy keeps for the next time",
        books.frames, books.poisoned, books.kept
    );
    println!(
        "  {} of zeroed memory given out, {} of it cleared; {} accesses failed when memory was used up, {} machine refused",
        Size(books.given).rounded(),
        Size(books.cleared).rounded(),
        books.failed_accesses,
        books.refused_machines
    );
    println!("\n{}", verdict(log, with_kernel));
}

fn millis(measured: &Measured) -> String {
    format!("{:.1} ms ±{:.0}%", measured.millis.median(), measured.millis.stdev_percent())
}

/// How many times as long the other took for the same number of bytes.
fn factor(ours: &Measured, other: &Measured) -> f64 {
    let each = |m: &Measured| m.millis.median() / (m.figures.bytes.max(1)) as f64;
    each(other) / each(ours).max(f64::MIN_POSITIVE)
}

fn slower(ours: &Measured, other: &Measured) -> String {
    format!("{:.1}×", factor(ours, other))
}

/// What it comes to, in plain words.
fn verdict(log: &Log, with_kernel: bool) -> String {
    let both = |phase| Some((log.get(OURS, phase)?, log.get(OLD, phase)?));
    let mut said = format!(
        "Verdict: the day took {:.2} s by extent and {:.2} s page by page.",
        log.whole(OURS) / 1e3,
        log.whole(OLD) / 1e3
    );
    if let Some((ours, old)) = both(Phase::Prefault) {
        said += &format!(
            " Creating a machine by extent is {:.1} times as fast, because its memory is cleared in whole extents, past \
             the cache.",
            factor(ours, old)
        );
    }
    if let Some((ours, old)) = both(Phase::Fill) {
        said += &format!(
            " Filling the pool gives {:.0} MiB of descriptors back with {} flushes instead of {}.",
            ours.figures.saved as f64 / f64::from(1 << 20),
            ours.figures.flushes,
            old.figures.flushes
        );
    }
    if let Some((ours, old)) = both(Phase::Destroy) {
        said += &format!(
            " Destroying everything interrupts {} CPUs instead of {}.",
            ours.figures.interrupts, old.figures.interrupts
        );
    }
    if let Some((ours, old)) = both(Phase::Pressure) {
        said += &format!(
            " With more memory in use than there is, guests ran {:.1} times as fast where ageing flushes nothing, and found \
             in every page what they had written.",
            factor(ours, old)
        );
    }
    if let (true, Some(ours), Some(kernel)) =
        (with_kernel, log.get(OURS, Phase::Prefault), log.get(Side::Kernel, Phase::Prefault))
    {
        let factor = factor(ours, kernel);
        said += &match factor >= 1.0 {
            true => format!(" This machine's own kernel takes {factor:.1} times as long to create the same machine."),
            false => format!(" This machine's own kernel creates the same machine in {factor:.2} of the time."),
        };
    }
    wrap(&said)
}

/// Breaks a paragraph at 100 columns.
fn wrap(text: &str) -> String {
    let (mut lines, mut line) = (Vec::new(), String::new());
    for word in text.split_whitespace() {
        if !line.is_empty() && line.chars().count() + word.chars().count() >= 100 {
            lines.push(std::mem::take(&mut line));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line += word;
    }
    lines.push(line);
    lines.join("\n")
}
