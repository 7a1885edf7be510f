//! A virtual machine that runs the reference kernel.

use crate::arch::Arch;
use crate::boot::symbols::Symbols;
use crate::boot::transcript::{BootLine, Transcript};
use crate::qemu::{Accel, Ended, Guest};
use anyhow::{Result, anyhow, bail};
use hugemm_workloads::request::Request;
use hugemm_workloads::size::Size;
use std::ops::ControlFlow;
use std::time::Duration;

/// The most CPUs that the kernel runs on, and the least memory.
pub const MAX_CPUS: u32 = 64;
const MIN_MEMORY: u64 = 64 << 20;

/// What lines of its report of a panic, a fault or a hang begin with.
pub const LAST_WORDS: &str = "!! ";

/// How QEMU ends when the kernel has reported one.
const BROKEN: i32 = 37;

/// The kernel says something every few seconds while any of its CPUs takes interrupts.
const SILENCE: Duration = Duration::from_secs(30);

/// The same where its seconds are counted in instructions, of which a busy machine may take minutes for one.
const SILENCE_COUNTED: Duration = Duration::from_secs(300);

/// CPU model under emulation: all that it can do.
pub const CPU_MODEL: &str = "max";

pub struct Done {
    pub boot: BootLine,
    pub transcript: Transcript,
}

/// Whether the kernel runs on such a machine.
pub fn check(guest: &Guest) -> Result<()> {
    if guest.cpus == 0 || guest.cpus > MAX_CPUS {
        let most = guest.cpus.clamp(1, MAX_CPUS);
        bail!("the kernel runs on 1 to {MAX_CPUS} CPUs, not on {}; use --cpus {most}", guest.cpus);
    }
    if guest.memory.0 < MIN_MEMORY {
        bail!("the kernel needs {} of memory at least, not {}; use a larger --memory", Size(MIN_MEMORY), guest.memory);
    }
    Ok(())
}

/// Boots the kernel and lets it do what is asked; `progress` hears how far it is.
pub fn run(guest: Guest, request: &Request, mut progress: impl FnMut(u64, u64, String)) -> Result<Done> {
    let options: &[&str] = match guest.arch {
        Arch::X86 => &["-device", "isa-debug-exit,iobase=0xf4,iosize=0x4"],
        Arch::Arm64 => &[],
    };
    let options = options.iter().map(Into::into).collect();
    let silence = if guest.accel == Accel::Icount { SILENCE_COUNTED } else { SILENCE };
    let guest = Guest { append: request.to_string(), options, silence, ..guest };
    let mut transcript = Transcript::default();
    let ended = guest.run(|line| {
        if let Some((done, of, what)) = transcript.take(line)? {
            progress(done, of, what);
        }
        Ok(ControlFlow::Continue(()))
    })?;
    let Some(boot) = transcript.boot.clone().filter(|_| transcript.report.is_empty()) else {
        return Err(broken(&guest, &transcript, &ended));
    };
    match &transcript.result {
        Some(Ok(())) => Ok(Done { boot, transcript }),
        Some(Err(why)) => bail!("{why}"),
        None => Err(broken(&guest, &transcript, &ended)),
    }
}

/// Why there is no result: the guest's report with names for its addresses on standard error, and one line for all.
fn broken(guest: &Guest, transcript: &Transcript, ended: &Ended) -> anyhow::Error {
    let symbols = Symbols::read(&guest.kernel);
    for line in transcript.report.iter().skip(1) {
        eprintln!("{}", symbols.line(line));
    }
    match transcript.report.first() {
        Some(line) => anyhow!("the guest broke: {}", symbols.line(line)),
        None if ended.status.and_then(|status| status.code()) == Some(BROKEN) => {
            anyhow!("the guest broke and could not say why ({})", ended.why(guest))
        }
        None => anyhow!(ended.why(guest)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hugemm_kernel::ExitCode;

    /// The command is built without the kernel.
    #[test]
    fn the_kernel_is_as_it_is_said_to_be() {
        assert_eq!((MAX_CPUS, MIN_MEMORY), (hugemm_kernel::MAX_CPUS, hugemm_kernel::MIN_MEMORY));
        assert_eq!((LAST_WORDS, BROKEN), (hugemm_kernel::LAST_WORDS, ExitCode::Broken.of_qemu()));
    }
}
