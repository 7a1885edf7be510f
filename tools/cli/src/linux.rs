//! `hugemm linux`: the same work in stock Linux guests on the same virtual machine, one table out.

pub mod age;
pub mod args;
pub mod faults;
pub mod image;
pub mod modules;
pub mod reference;

use crate::arch::Arch;
use crate::document::{self, Document, Row};
use crate::image::Image;
use crate::linux::args::{GuestBench, GuestCommand, GuestLine, GuestMem, GuestPool, Linux};
use crate::linux::faults::Populate;
use crate::linux::image::{Initramfs, LinuxImage};
use crate::linux::reference::Reference;
use crate::qemu::{Accel, Ended, Guest};
use crate::stats::Samples;
use crate::{cli_text, environment_text, noise, progress, table};
use anyhow::{Result, bail};
use clap::Parser;
use hugemm_base::PageSize;
use hugemm_inspect::environment::Environment;
use hugemm_workloads::request::Optimization;
use hugemm_workloads::size::Size;
use hugemm_workloads::words::Named;
use serde_json::Value;
use std::ops::ControlFlow;
use std::time::Duration;

/// Process 1 of the guests.
const INIT: Image = Image { package: "hugemm-guest", beside: "hugemm-guest", target: "x86_64-unknown-linux-musl" };

/// Emulated machines now and then panic while they boot, before the first process; such a boot is tried again.
const BOOTS: u32 = 3;

/// Runs the command.
pub fn run(args: &Linux) -> Result<()> {
    let GuestCommand::Bench(work) = GuestLine::try_parse_from(&args.command).map_err(one_line)?.command;
    let images = args.kernels.iter().map(|file| LinuxImage::open(file)).collect::<Result<Vec<_>>>()?;
    document::check_writable(args.common.json.as_deref())?;
    let quiet = args.common.json_only();
    let environment = Environment::read()?;
    args.accel.ready(Arch::X86, args.memory)?;
    let words = words(&work, args.runs)?;
    let init = INIT.find(args.init.as_deref())?;
    let modules = |image: &LinuxImage| match &work {
        GuestBench::Age(_) => modules::of(image, &age::MODULES),
        _ => Ok(Vec::new()),
    };
    let initramfs = images.iter().enumerate().map(|(number, image)| Initramfs::new(number, &init, &modules(image)?));
    let initramfs = initramfs.collect::<Result<Vec<_>>>()?;
    let reference = if args.reference { Some(Reference::new(args, &work)?) } else { None };
    let accel = args.accel.decide(Arch::X86, || Arch::X86.kernel().find(None))?;
    let kernels = images.len() + usize::from(reference.is_some());
    let bar = progress::bar((kernels * args.cpus.len()) as u64, quiet);
    let mut cells = Vec::new();
    for (image, initramfs) in images.iter().zip(&initramfs) {
        for &cpus in &args.cpus {
            bar.set_message(format!("{} on {cpus} CPUs", image.release));
            let events = boot(args, accel, image, initramfs, cpus, &words)?;
            cells.push(Cell { kernel: image.release.clone(), cpus, events });
            bar.inc(1);
        }
    }
    if let Some(reference) = &reference {
        for &cpus in &args.cpus {
            bar.set_message(format!("{} on {cpus} CPUs", reference::NAME));
            let events = reference.boot(args, accel, cpus)?;
            cells.push(Cell { kernel: reference::NAME.to_owned(), cpus, events });
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    if !quiet {
        environment_text::print(&environment);
        println!("  guests    {} each, QEMU {}, CPU model {}", args.memory, accel.name(), args.cpu_model);
    }
    let mut rows = match &work {
        GuestBench::Pool(pool) => report_pool(pool, &cells, quiet),
        GuestBench::Mem(GuestMem::Mmap(mmap)) => Populate::from(mmap).report(&cells, quiet),
        GuestBench::VmCreate(create) => Populate::from(create).report(&cells, quiet),
        GuestBench::Age(work) => age::report(work, &cells, quiet),
    };
    // A side that clears its pages does more.
    if reference.is_some() && !args.init_on_alloc {
        rows.extend(match &work {
            GuestBench::Pool(_) => reference::compare(&rows, quiet),
            GuestBench::Age(_) => age::compare(&rows, quiet),
            _ => faults::compare(&rows, quiet),
        });
    }
    for cell in &cells {
        if let Err(why) = &cell.events {
            eprintln!("hugemm: {} on {} CPUs: {why}", cell.kernel, cell.cpus);
        }
    }
    if let Some(warning) = noise::warning(&rows).filter(|_| !quiet) {
        println!("\n  {warning}");
    }
    Document::new(environment, rows).write(args.common.json.as_deref())?;
    match cells.iter().filter(|cell| cell.events.is_err()).count() {
        0 => Ok(()),
        failed if failed == cells.len() => bail!("no guest did its work; the lines above say why"),
        failed => bail!("{failed} of {} guests did not do their work; the lines above say why", cells.len()),
    }
}

/// One guest's results, or why there are none.
pub struct Cell {
    pub kernel: String,
    pub cpus: u32,
    pub events: Result<Vec<Value>, String>,
}

/// A usage error of the guest's command on one line.
fn one_line(error: clap::Error) -> anyhow::Error {
    anyhow::anyhow!("the command after '--': {}; see 'hugemm linux --help'", cli_text::usage_error(&error))
}

/// The arguments of the guest's init.
fn words(work: &GuestBench, runs: u32) -> Result<String> {
    Ok(match work {
        GuestBench::Pool(pool) => {
            format!("pool {} {} {runs} {}", pool.n, kib(pool.page), pool.hvo)
        }
        GuestBench::Mem(GuestMem::Mmap(mmap)) => Populate::from(mmap).words(runs),
        GuestBench::VmCreate(create) => Populate::from(create).words(runs),
        GuestBench::Age(work) => age::words(work, runs)?,
    })
}

/// A page's size in KiB.
pub fn kib(page: PageSize) -> u64 {
    page.bytes() >> 10
}

/// Boots one guest and collects its events. The outer error ends the command, the inner one is the cell's.
fn boot(
    args: &Linux,
    accel: Accel,
    image: &LinuxImage,
    initramfs: &Initramfs,
    cpus: u32,
    words: &str,
) -> Result<Result<Vec<Value>, String>> {
    let init_on_alloc = u8::from(args.init_on_alloc);
    let guest = Guest {
        arch: Arch::X86,
        accel,
        cpu_model: args.cpu_model.clone(),
        cpus,
        memory: args.memory,
        kernel: image.file.clone(),
        initrd: Some(initramfs.path().to_owned()),
        append: format!(
            "console=ttyS0 quiet loglevel=1 panic=-1 init_on_alloc={init_on_alloc} hugetlb_free_vmemmap=on \
             rdinit=/init -- {words}"
        ),
        options: Vec::new(),
        deadline: Duration::from_secs(args.timeout),
        silence: Duration::MAX,
    };
    let mut tries = 1;
    loop {
        let (mut events, mut panic, mut last) = (Vec::new(), None, None);
        let ended = guest.run(|line| {
            if let Some(at) = line.find("Kernel panic") {
                panic.get_or_insert(line[at..].to_owned());
            }
            let Ok(event) = serde_json::from_str::<Value>(line) else { return Ok(ControlFlow::Continue(())) };
            match event["event"].as_str() {
                Some("done") => last = Some(Ok(())),
                Some("error") => last = Some(Err(event["message"].as_str().unwrap_or("no reason given").to_owned())),
                _ => events.push(event),
            }
            Ok(if last.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        return Ok(match (last, panic) {
            (Some(Ok(())), _) => Ok(events),
            (Some(Err(why)), _) => Err(why),
            (None, Some(_)) if events.is_empty() && tries < BOOTS => {
                tries += 1;
                continue;
            }
            (None, Some(panic)) => Err(format!("the guest panicked: {panic}")),
            (None, None) => Err(died(&ended, accel, args.timeout)),
        });
    }
}

/// Why a guest that neither finished nor panicked ended.
fn died(ended: &Ended, accel: Accel, seconds: u64) -> String {
    let (last, accel) = (ended.last_word(), accel.name());
    match ended.status {
        _ if ended.timed_out => {
            format!("the guest took longer than {seconds} s under {accel}; its last words: {last}; use --timeout")
        }
        Some(status) if !status.success() => {
            format!("QEMU failed ({status}: {}); the guest's last words: {last}", ended.complaint.trim())
        }
        _ => format!("the guest ended before its work was done; its last words: {last}"),
    }
}

/// The values of one field over the measured runs (run 0 warms up) of events where `key` is `value`.
pub fn samples(events: &[Value], key: &str, value: &str, field: impl Fn(&Value) -> Option<f64>) -> Samples {
    let mut samples = Samples::default();
    let measured = events.iter().filter(|event| event["run"].as_u64() != Some(0) && event[key] == value);
    measured.filter_map(field).for_each(|value| samples.push(value));
    samples
}

/// What is shown of a pool, per page: its heading, its metric, its unit, and how it follows from an event.
type Column = (&'static str, &'static str, fn(&Value) -> Option<f64>);

const POOL: [Column; 4] = [
    ("linux.pool.up_ns", "ns per page", |event| per_page(event, event["up_ns"].as_f64()?)),
    ("linux.pool.down_ns", "ns per page", |event| per_page(event, event["down_ns"].as_f64()?)),
    ("linux.pool.up_ipis", "per resize", |event| {
        Some(event["up_function_calls"].as_f64()? + event["up_tlb"].as_f64()?)
    }),
    ("linux.pool.down_ipis", "per resize", |event| {
        Some(event["down_function_calls"].as_f64()? + event["down_tlb"].as_f64()?)
    }),
];

fn per_page(event: &Value, sum: f64) -> Option<f64> {
    let pages = event["pages"].as_f64()?;
    (pages > 0.0).then(|| sum / pages)
}

fn report_pool(pool: &GuestPool, cells: &[Cell], quiet: bool) -> Vec<Row> {
    let heads = ["kernel", "CPUs", "hvo", "pages", "up µs", "down µs", "up IPIs", "down IPIs"];
    let mut lines = table::new(heads);
    let mut taxes = table::new(["kernel", "CPUs", "tax up", "tax down", "IPIs more, up", "down"]);
    let mut rows = Vec::new();
    for cell in cells {
        let Ok(events) = &cell.events else {
            lines.add_row([&cell.kernel, &cell.cpus.to_string(), "no result"]);
            continue;
        };
        let mut sides = Vec::new();
        for optimizer in pool.hvo.iter() {
            let name = optimizer.name();
            let columns = POOL.map(|(.., field)| samples(events, "hvo", name, field));
            let pages = samples(events, "hvo", name, |event| event["pages"].as_f64()).median();
            for ((metric, unit, _), samples) in POOL.iter().zip(&columns) {
                let row = Row::median(*metric, samples, *unit).label("kernel", cell.kernel.as_str());
                rows.push(row.label("cpus", cell.cpus).label("hvo", name).label("pages", pages));
            }
            let median = columns.map(|samples| samples.median());
            let [up, down, up_ipis, down_ipis] = median;
            let short = if pages < pool.n as f64 { " (short)" } else { "" };
            lines.add_row([
                cell.kernel.clone(),
                cell.cpus.to_string(),
                name.to_owned(),
                format!("{pages:.0}{short}"),
                format!("{:.2}", up / 1e3),
                format!("{:.2}", down / 1e3),
                format!("{up_ipis:.0}"),
                format!("{down_ipis:.0}"),
            ]);
            sides.push((optimizer, median));
        }
        let side = |which| sides.iter().find(|(optimizer, _)| *optimizer == which).map(|(_, median)| median);
        if let (Some(off), Some(on)) = (side(Optimization::Off), side(Optimization::On)) {
            let tax = [on[0] / off[0], on[1] / off[1]];
            taxes.add_row([
                cell.kernel.clone(),
                cell.cpus.to_string(),
                format!("{:.1}", tax[0]),
                format!("{:.1}", tax[1]),
                format!("{:.0}", on[2] - off[2]),
                format!("{:.0}", on[3] - off[3]),
            ]);
            for (metric, value) in [("linux.pool.tax_up", tax[0]), ("linux.pool.tax_down", tax[1])] {
                let row = Row::single(metric, value, "ratio").label("kernel", cell.kernel.as_str());
                rows.push(row.label("cpus", cell.cpus));
            }
        }
    }
    if !quiet {
        table::print(&format!("Pool of {} {} pages, per page; medians", pool.n, Size(kib(pool.page) << 10)), &lines);
        if !taxes.is_empty() {
            table::print("What vmemmap optimization costs: on / off, and IPIs more per resize", &taxes);
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn figures_are_per_page_that_was_had() {
        let event = json!({"run": 1, "hvo": "on", "pages": 10, "page_kib": 2048, "up_ns": 500, "down_ns": 200,
            "up_function_calls": 3, "up_tlb": 1, "down_function_calls": 0, "down_tlb": 2});
        let figures = POOL.map(|(.., field)| field(&event));
        assert_eq!(figures, [Some(50.0), Some(20.0), Some(4.0), Some(2.0)]);
        assert_eq!((POOL[0].2)(&json!({"pages": 0, "up_ns": 5})), None);
    }

    #[test]
    fn the_first_run_only_warms_up() {
        let events =
            [json!({"run": 0, "k": "a", "v": 9}), json!({"run": 1, "k": "a", "v": 1}), json!({"run": 1, "k": "b"})];
        assert_eq!(samples(&events, "k", "a", |event| event["v"].as_f64()).median(), 1.0);
    }
}
