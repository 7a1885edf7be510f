//! `hugemm linux`: the same work in stock Linux guests on the same virtual machine, one table out.

pub mod args;
pub mod image;
pub mod modules;
mod report;

use crate::boot::machine;
use crate::boot::transcript::Transcript;
use crate::linux::args::Linux;
use crate::linux::image::{Initramfs, LinuxImage};
use crate::machine::Machine;
use crate::progress;
use crate::qemu::{Guest, ready};
use anyhow::{Result, bail};
use hugemm_inspect::interrupt;
use hugemm_workloads::request::Request;
use std::ops::ControlFlow;

/// The reference kernel's name in the column of kernels.
pub const NAME: &str = "hugemm";

/// What a guest that reclaims needs besides its image.
const MODULES: [&str; 2] = ["lz4", "zram"];

/// Emulated machines now and then panic while they boot, before the first process; such a boot is tried again.
const BOOTS: u32 = 3;

pub fn run(args: &Linux) -> Result<()> {
    let request = args::work(&args.command, args.runs)?;
    let images = args.kernels.iter().map(|file| LinuxImage::open(file)).collect::<Result<Vec<_>>>()?;
    let arch = LinuxImage::common_arch(&images)?;
    let model = args.cpu_model.as_deref().unwrap_or(arch.linux_cpu_model());
    let machine = Machine::new(&args.common)?;
    arch.linux_init().check(args.init.as_deref())?;
    let modules = images.iter().map(|image| match &request {
        Request::Age(_) => modules::of(image, &MODULES),
        _ => Ok(Vec::new()),
    });
    let modules = modules.collect::<Result<Vec<_>>>()?;
    ready(arch, args.accel, args.memory)?;
    let init = arch.linux_init().find(args.init.as_deref())?;
    let initramfs = modules.iter().enumerate().map(|(number, modules)| Initramfs::new(number, &init, modules));
    let initramfs = initramfs.collect::<Result<Vec<_>>>()?;
    let reference = if args.reference { Some(arch.kernel().find(None)?) } else { None };
    let accel = args.accel.decide(arch, &machine.environment());
    let guest = Guest::new(arch, accel, model, args.memory, args.timeout);
    let guest = |cpus| Guest { cpus, ..guest.clone() };
    if reference.is_some() {
        args.cpus.iter().try_for_each(|&cpus| machine::check(&guest(cpus)))?;
    }
    let kernels = images.len() + usize::from(reference.is_some());
    let bar = progress::bar((kernels * args.cpus.len()) as u64, machine.quiet());
    let mut cells = Vec::new();
    for (image, initramfs) in images.iter().zip(&initramfs) {
        for &cpus in &args.cpus {
            bar.set_message(format!("{} on {cpus} CPUs", image.release));
            let transcript = boot(guest(cpus), image, initramfs, args.init_on_alloc, &request)?;
            cells.push(Cell { kernel: image.release.clone(), cpus, transcript });
            bar.inc(1);
        }
    }
    if let Some(kernel) = reference {
        for &cpus in &args.cpus {
            bar.set_message(format!("{NAME} on {cpus} CPUs"));
            let done = machine::run(Guest { kernel: kernel.clone(), ..guest(cpus) }, &request, |_, _, _| {});
            interrupt::check()?;
            let transcript = done.map(|done| done.transcript).map_err(|error| format!("{error:#}"));
            cells.push(Cell { kernel: NAME.to_owned(), cpus, transcript });
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    // A side that clears its pages does more.
    let compares = args.reference && !args.init_on_alloc;
    let mut results = match &request {
        Request::Pool(work) => report::pool(work, &cells, compares),
        Request::VmCreate(work) => report::faults(work, &cells, compares),
        Request::Age(work) => report::age(work, &cells, compares),
        // Kernel areas: what else there is was refused.
        _ => report::vmalloc(&cells, compares),
    };
    let failed = cells.iter().filter(|cell| cell.transcript.is_err());
    results.remarks = failed.map(|cell| format!("{} on {} CPUs: no result", cell.kernel, cell.cpus)).collect();
    let goals = results.goals();
    if !machine.quiet() {
        machine.print_environment();
        println!("  guests    {} each, QEMU {}, CPU model {}", args.memory, accel.name(), model);
        results.print(&goals);
    }
    for cell in &cells {
        if let Err(why) = &cell.transcript {
            eprintln!("hugemm: {} on {} CPUs: {why}", cell.kernel, cell.cpus);
        }
    }
    machine.report(results.rows.into_iter().chain(goals).collect())?;
    match cells.iter().filter(|cell| cell.transcript.is_err()).count() {
        0 => Ok(()),
        failed if failed == cells.len() => bail!("no guest did its work; the lines above say why"),
        failed => bail!("{failed} of {} guests did not do their work; the lines above say why", cells.len()),
    }
}

/// What one guest said, or why it did not do its work.
pub struct Cell {
    pub kernel: String,
    pub cpus: u32,
    pub transcript: Result<Transcript, String>,
}

/// Boots one guest, whose process 1 is asked, and answers, as the reference kernel is. The outer error ends the command, the inner one is the cell's.
fn boot(
    guest: Guest,
    image: &LinuxImage,
    initramfs: &Initramfs,
    init_on_alloc: bool,
    request: &Request,
) -> Result<Result<Transcript, String>> {
    let guest = Guest {
        kernel: image.file.clone(),
        initrd: Some(initramfs.path().to_owned()),
        append: format!(
            "console={} quiet loglevel=1 panic=-1 init_on_alloc={} hugetlb_free_vmemmap=on rdinit=/init -- {request}",
            guest.arch.linux_console(),
            u8::from(init_on_alloc)
        ),
        ..guest
    };
    let mut tries = 1;
    loop {
        let (mut transcript, mut panic) = (Transcript::default(), None);
        let ended = guest.run(|line| {
            if let Some(at) = line.find("Kernel panic") {
                panic.get_or_insert(line[at..].to_owned());
            }
            if let Err(error) = transcript.take(line) {
                transcript.result = Some(Err(format!("{error:#}")));
            }
            Ok(if transcript.result.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        return Ok(match (&transcript.result, panic) {
            (Some(Ok(())), _) => Ok(transcript),
            (Some(Err(why)), _) => Err(why.clone()),
            (None, Some(_)) if transcript.is_empty() && tries < BOOTS => {
                tries += 1;
                continue;
            }
            (None, Some(panic)) => Err(format!("the guest panicked: {panic}")),
            (None, None) => Err(ended.why(&guest)),
        });
    }
}
