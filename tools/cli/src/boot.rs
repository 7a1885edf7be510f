//! `hugemm boot`: a command in the reference kernel, its result as if it had run here.

pub mod args;
pub mod machine;
pub mod symbols;
pub mod transcript;

use crate::arch::Arch;
use crate::boot::args::Boot;
use crate::boot::machine::{Done, MAX_CPUS};
use crate::machine::Machine;
use crate::qemu::{Accel, Guest, ready};
use crate::{age, frames, paging, pool, progress, run, vm_create};
use anyhow::Result;
use hugemm_inspect::environment::GuestInfo;
use hugemm_workloads::request::Request;

pub fn run(args: &Boot) -> Result<()> {
    let request = args::request(&args.command, "hugemm boot", Request::commands())?;
    let host = Machine::new(&args.common)?;
    let cpus = args.cpus.unwrap_or((host.topology.cpus.len() as u32).clamp(1, MAX_CPUS));
    let arch = args.arch;
    let guest = Guest { cpus, ..Guest::new(arch, args.accel, &args.cpu_model, args.memory, args.timeout) };
    machine::check(&guest)?;
    arch.kernel().check(args.image.as_deref())?;
    ready(arch, args.accel, args.memory)?;
    let bar = progress::bar(0, host.quiet());
    bar.set_message("finding or building the kernel");
    let kernel = arch.kernel().find(args.image.as_deref())?;
    let accel = args.accel.decide(arch, &host.environment());
    bar.set_message("booting");
    let done = machine::run(Guest { kernel, accel, ..guest }, &request, |done, of, what| {
        bar.set_length(of);
        bar.set_position(done);
        bar.set_message(what);
    });
    bar.finish_and_clear();
    let Done { boot, transcript } = done?;
    host.note_guest(GuestInfo {
        kernel: "hugemm reference kernel".to_owned(),
        machine: format!("QEMU {}{}", accel.name().to_uppercase(), if arch == Arch::X86 { "" } else { ", arm64" }),
        cpus: boot.cpus,
        memory_bytes: args.memory.0,
        interrupt_controller: boot.interrupt_controller.clone(),
        managed_bytes: boot.memory,
    });
    let mut results = match &request {
        Request::VmCreate(_) => vm_create::of_guest(&transcript),
        Request::Free(_) => frames::free::of_guest(&transcript),
        Request::Alloc(_) => frames::alloc::of_guest(&transcript),
        Request::Pool(_) => pool::of_guest(&transcript),
        Request::Age(args) => age::of_guest(&transcript, args, boot.cpus),
        Request::Shootdown(_) => paging::shootdown::of_guest(&transcript),
        Request::Vmalloc(_) => paging::vmalloc::of_guest(&transcript),
        Request::Run(_) => run::of_guest(&transcript, &boot),
        Request::Selftest(_) | Request::Dump(_) | Request::CrashTest(_) => transcript.figures(),
    };
    results.emulated = accel != Accel::Kvm;
    results.remarks.extend(transcript.notes);
    host.show(results)
}
