//! `hugemm linux`: the same work in stock Linux guests on the same virtual machine, one table out.

pub mod args;
pub mod image;
pub mod modules;
mod report;

use crate::arch::Arch;
use crate::boot::machine::VirtualMachine;
use crate::boot::transcript::Transcript;
use crate::linux::args::{Linux, Work};
use crate::linux::image::{Initramfs, LinuxImage};
use crate::machine::Machine;
use crate::progress;
use crate::qemu::{Accel, Ended, Guest};
use anyhow::{Result, bail};
use hugemm_inspect::interrupt;
use hugemm_workloads::request::Request;
use hugemm_workloads::words::Named;
use std::ops::ControlFlow;
use std::time::Duration;

#[derive(Clone, Copy)]
pub struct VirtualCpu<'a> {
    pub arch: Arch,
    /// In QEMU's notation.
    pub model: &'a str,
}

/// The reference kernel's name in the column of kernels.
pub const NAME: &str = "hugemm";

/// What a guest that reclaims needs besides its image.
const MODULES: [&str; 2] = ["lz4", "zram"];

/// Emulated machines now and then panic while they boot, before the first process; such a boot is tried again.
const BOOTS: u32 = 3;

pub fn run(args: &Linux) -> Result<()> {
    let work = args::work(&args.command, args.runs)?;
    let images = args.kernels.iter().map(|file| LinuxImage::open(file)).collect::<Result<Vec<_>>>()?;
    let arch = LinuxImage::common_arch(&images)?;
    let virtual_cpu = VirtualCpu { arch, model: args.cpu_model.as_deref().unwrap_or(arch.linux_cpu_model()) };
    let machine = Machine::new(&args.common)?;
    arch.linux_init().check(args.init.as_deref())?;
    let modules = images.iter().map(|image| match &work {
        Work::Age(_) => modules::of(image, &MODULES),
        _ => Ok(Vec::new()),
    });
    let modules = modules.collect::<Result<Vec<_>>>()?;
    args.accel.ready(arch, args.memory)?;
    let request = work.request();
    let init = arch.linux_init().find(args.init.as_deref())?;
    let initramfs = modules.iter().enumerate().map(|(number, modules)| Initramfs::new(number, &init, modules));
    let initramfs = initramfs.collect::<Result<Vec<_>>>()?;
    let reference = if args.reference { Some(arch.kernel().find(None)?) } else { None };
    let kernel = reference.as_deref().map(|image| VirtualMachine {
        image,
        arch,
        accel: Accel::Tcg,
        cpu_model: virtual_cpu.model,
        cpus: 1,
        memory: args.memory,
        timeout: Duration::from_secs(args.timeout),
    });
    if let Some(kernel) = kernel {
        args.cpus.iter().try_for_each(|&cpus| VirtualMachine { cpus, ..kernel }.check())?;
    }
    let accel = args.accel.decide(arch, &machine.environment());
    let kernels = images.len() + usize::from(kernel.is_some());
    let bar = progress::bar((kernels * args.cpus.len()) as u64, machine.quiet());
    let mut cells = Vec::new();
    for (image, initramfs) in images.iter().zip(&initramfs) {
        for &cpus in &args.cpus {
            bar.set_message(format!("{} on {cpus} CPUs", image.release));
            let transcript = boot(args, virtual_cpu, accel, image, initramfs, cpus, &request)?;
            cells.push(Cell { kernel: image.release.clone(), cpus, transcript });
            bar.inc(1);
        }
    }
    if let Some(kernel) = kernel {
        for &cpus in &args.cpus {
            bar.set_message(format!("{NAME} on {cpus} CPUs"));
            let done = VirtualMachine { accel, cpus, ..kernel }.run(&request, |_, _, _| {});
            interrupt::check()?;
            let transcript = done.map(|done| done.transcript).map_err(|error| format!("{error:#}"));
            cells.push(Cell { kernel: NAME.to_owned(), cpus, transcript });
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    // A side that clears its pages does more.
    let compares = args.reference && !args.init_on_alloc;
    let mut results = match &work {
        Work::Pool(work) => report::pool(work, &cells, compares),
        Work::VmCreate(work) => report::faults(work, &cells, compares),
        Work::Age(work) => report::age(work, &cells, compares),
        Work::Vmalloc(_) => report::vmalloc(&cells, compares),
    };
    let failed = cells.iter().filter(|cell| cell.transcript.is_err());
    results.remarks = failed.map(|cell| format!("{} on {} CPUs: no result", cell.kernel, cell.cpus)).collect();
    let goals = results.goals();
    if !machine.quiet() {
        machine.print_environment();
        println!("  guests    {} each, QEMU {}, CPU model {}", args.memory, accel.name(), virtual_cpu.model);
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
    args: &Linux,
    VirtualCpu { arch, model }: VirtualCpu<'_>,
    accel: Accel,
    image: &LinuxImage,
    initramfs: &Initramfs,
    cpus: u32,
    request: &Request,
) -> Result<Result<Transcript, String>> {
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
             {request}",
            arch.linux_console()
        ),
        options: Vec::new(),
        deadline: Duration::from_secs(args.timeout),
        silence: Duration::MAX,
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
