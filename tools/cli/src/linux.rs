//! `hugemm linux`: the same work in stock Linux guests on the same virtual machine, one table out.

pub mod age;
pub mod args;
pub mod faults;
pub mod image;
pub mod modules;
pub mod pool;
pub mod reference;

use crate::arch::Arch;
use crate::document::{self, Document};
use crate::linux::args::{Linux, Work};
use crate::linux::image::{Initramfs, LinuxImage};
use crate::linux::reference::Reference;
use crate::qemu::{Accel, Ended, Guest};
use crate::stats::Samples;
use crate::{environment_text, noise, progress};
use anyhow::{Result, bail};
use hugemm_base::PageSize;
use hugemm_inspect::environment::Environment;
use serde_json::Value;
use std::ops::ControlFlow;
use std::time::Duration;

#[derive(Clone, Copy)]
pub struct VirtualCpu<'a> {
    pub arch: Arch,
    /// In QEMU's notation.
    pub model: &'a str,
}

/// Emulated machines now and then panic while they boot, before the first process; such a boot is tried again.
const BOOTS: u32 = 3;

pub fn run(args: &Linux) -> Result<()> {
    let work = args::work(&args.command, args.runs)?;
    let images = args.kernels.iter().map(|file| LinuxImage::open(file)).collect::<Result<Vec<_>>>()?;
    let arch = LinuxImage::common_arch(&images)?;
    let virtual_cpu = VirtualCpu { arch, model: args.cpu_model.as_deref().unwrap_or(arch.linux_cpu_model()) };
    document::check_writable(args.common.json.as_deref())?;
    let quiet = args.common.json_only();
    let environment = Environment::read()?;
    args.accel.ready(arch, args.memory)?;
    let words = words(&work, args.runs);
    let init = arch.linux_init().find(args.init.as_deref())?;
    let modules = |image: &LinuxImage| match &work {
        Work::Age(_) => modules::of(image, &age::MODULES),
        _ => Ok(Vec::new()),
    };
    let initramfs = images.iter().enumerate().map(|(number, image)| Initramfs::new(number, &init, &modules(image)?));
    let initramfs = initramfs.collect::<Result<Vec<_>>>()?;
    let reference = if args.reference { Some(Reference::new(args, virtual_cpu, work)?) } else { None };
    let accel = args.accel.decide(arch, || arch.kernel().find(None))?;
    let kernels = images.len() + usize::from(reference.is_some());
    let bar = progress::bar((kernels * args.cpus.len()) as u64, quiet);
    let mut cells = Vec::new();
    for (image, initramfs) in images.iter().zip(&initramfs) {
        for &cpus in &args.cpus {
            bar.set_message(format!("{} on {cpus} CPUs", image.release));
            let events = boot(args, virtual_cpu, accel, image, initramfs, cpus, &words)?;
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
        println!("  guests    {} each, QEMU {}, CPU model {}", args.memory, accel.name(), virtual_cpu.model);
    }
    let mut rows = match &work {
        Work::Pool(work) => pool::report(work, &cells, quiet),
        Work::VmCreate(work) => faults::report(work, &cells, quiet),
        Work::Age(work) => age::report(work, &cells, quiet),
    };
    // A side that clears its pages does more.
    if reference.is_some() && !args.init_on_alloc {
        rows.extend(match &work {
            Work::Pool(_) => reference::compare(&rows, quiet),
            Work::VmCreate(_) => faults::compare(&rows, quiet),
            Work::Age(_) => age::compare(&rows, quiet),
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

/// The arguments of the guest's init.
fn words(work: &Work, runs: u32) -> String {
    match work {
        Work::Pool(pool) => format!("pool {} {} {runs} {}", pool::wanted(pool), kib(pool.page), pool.hvo),
        Work::VmCreate(work) => faults::words(work),
        Work::Age(work) => age::words(work, runs),
    }
}

pub fn kib(page: PageSize) -> u64 {
    page.bytes() >> 10
}

/// Boots one guest and collects its events. The outer error ends the command, the inner one is the cell's.
fn boot(
    args: &Linux,
    VirtualCpu { arch, model }: VirtualCpu<'_>,
    accel: Accel,
    image: &LinuxImage,
    initramfs: &Initramfs,
    cpus: u32,
    words: &str,
) -> Result<Result<Vec<Value>, String>> {
    let init_on_alloc = u8::from(args.init_on_alloc);
    let guest = Guest {
        arch,
        accel,
        cpu_model: model.to_owned(),
        cpus,
        memory: args.memory,
        kernel: image.file.clone(),
        initrd: Some(initramfs.path().to_owned()),
        append: format!(
            "console={} quiet loglevel=1 panic=-1 init_on_alloc={init_on_alloc} hugetlb_free_vmemmap=on rdinit=/init -- \
             {words}",
            arch.linux_console()
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_first_run_only_warms_up() {
        let events =
            [json!({"run": 0, "k": "a", "v": 9}), json!({"run": 1, "k": "a", "v": 1}), json!({"run": 1, "k": "b"})];
        assert_eq!(samples(&events, "k", "a", |event| event["v"].as_f64()).median(), 1.0);
    }
}
