//! A virtual machine that runs the reference kernel.

use crate::arch::Arch;
use crate::boot::symbols::Symbols;
use crate::boot::transcript::{BootLine, Transcript};
use crate::qemu::{Accel, Ended, Guest};
use anyhow::{Result, bail};
use hugemm_workloads::request::Request;
use hugemm_workloads::size::Size;
use std::ops::ControlFlow;
use std::path::Path;
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

#[derive(Clone, Copy)]
pub struct VirtualMachine<'a> {
    pub image: &'a Path,
    pub arch: Arch,
    pub accel: Accel,
    pub cpu_model: &'a str,
    pub cpus: u32,
    pub memory: Size,
    pub timeout: Duration,
}

pub struct Done {
    pub boot: BootLine,
    pub transcript: Transcript,
}

impl VirtualMachine<'_> {
    /// For how long it may say nothing.
    fn silence(&self) -> Duration {
        if self.accel == Accel::Icount { SILENCE_COUNTED } else { SILENCE }
    }

    /// Whether the kernel runs on such a machine.
    pub fn check(&self) -> Result<()> {
        if self.cpus == 0 || self.cpus > MAX_CPUS {
            let most = self.cpus.clamp(1, MAX_CPUS);
            bail!("the kernel runs on 1 to {MAX_CPUS} CPUs, not on {}; use --cpus {most}", self.cpus);
        }
        if self.memory.0 < MIN_MEMORY {
            bail!(
                "the kernel needs {} of memory at least, not {}; use a larger --memory",
                Size(MIN_MEMORY),
                self.memory
            );
        }
        Ok(())
    }

    /// Boots the kernel and lets it do what is asked; `progress` hears how far it is.
    pub fn run(&self, request: &Request, mut progress: impl FnMut(u64, u64, String)) -> Result<Done> {
        let options: &[&str] = match self.arch {
            Arch::X86 => &["-device", "isa-debug-exit,iobase=0xf4,iosize=0x4"],
            Arch::Arm64 => &[],
        };
        let guest = Guest {
            arch: self.arch,
            accel: self.accel,
            cpu_model: self.cpu_model.to_owned(),
            cpus: self.cpus,
            memory: self.memory,
            kernel: self.image.to_owned(),
            initrd: None,
            append: request.to_string(),
            options: options.iter().map(Into::into).collect(),
            deadline: self.timeout,
            silence: self.silence(),
        };
        let mut transcript = Transcript::default();
        let ended = guest.run(|line| {
            if let Some((done, of, what)) = transcript.take(line)? {
                progress(done, of, what);
            }
            Ok(ControlFlow::Continue(()))
        })?;
        let Some(boot) = transcript.boot.clone().filter(|_| transcript.report.is_empty()) else {
            return Err(broken(self, &transcript, &ended));
        };
        match &transcript.result {
            Some(Ok(())) => Ok(Done { boot, transcript }),
            Some(Err(why)) => bail!("{why}"),
            None => Err(broken(self, &transcript, &ended)),
        }
    }
}

/// Why there is no result: the guest's report with names for its addresses on standard error, and one line for all.
fn broken(machine: &VirtualMachine<'_>, transcript: &Transcript, ended: &Ended) -> anyhow::Error {
    let symbols = Symbols::read(machine.image);
    for line in transcript.report.iter().skip(1) {
        eprintln!("{}", symbols.line(line));
    }
    if let Some(line) = transcript.report.first() {
        return anyhow::anyhow!("the guest broke: {}", symbols.line(line));
    }
    let last = ended.last_word();
    let complaint = ended.complaint.lines().next().unwrap_or("").trim();
    let why = match ended.status {
        _ if ended.timed_out => format!(
            "the guest had not finished after {} s; use a larger --timeout; its last words: {last}",
            machine.timeout.as_secs()
        ),
        None => format!(
            "the guest hangs: no word for {} s, not even from its watchdog; its last words: {last}",
            machine.silence().as_secs()
        ),
        Some(status) if status.success() => format!("the guest reset by itself; its last words: {last}"),
        Some(status) if status.code() == Some(BROKEN) => {
            format!("the guest broke and could not say why; its last words: {last}")
        }
        Some(status) if complaint.is_empty() => format!("QEMU ended with {status}; the guest's last words: {last}"),
        Some(status) => format!("QEMU ended with {status}: {complaint}"),
    };
    anyhow::anyhow!(why)
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
