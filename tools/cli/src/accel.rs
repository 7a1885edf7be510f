//! What executes guests.

use crate::arch::Arch;
use crate::qemu::{self, Accel};
use anyhow::Result;
use clap::ValueEnum;
use hugemm_inspect::environment::Environment;
use hugemm_workloads::size::Size;

/// What a user asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Choice {
    /// Translation in software: works everywhere, and only ratios and counts mean something.
    Tcg,
    /// The same by one thread, by a clock that an instruction advances by a nanosecond: ratios hold on a busy machine too,
    /// and caches cost nothing.
    Icount,
    /// The processor, through /dev/kvm.
    Kvm,
    /// kvm where it can be had and this machine is no virtual one itself, else tcg.
    Auto,
}

impl Choice {
    /// Whether a guest of this size can be started at all: asked before anything is built for it.
    ///
    /// # Errors
    /// Those of [`qemu::ready`].
    pub fn ready(self, arch: Arch, memory: Size) -> Result<()> {
        qemu::ready(arch, if self == Choice::Kvm { Accel::Kvm } else { Accel::Tcg }, memory)
    }

    /// What it is to be. If `auto` comes to tcg on this machine's architecture, a line on standard error says why.
    pub fn decide(self, arch: Arch, environment: &Environment) -> Accel {
        let why = match self {
            Choice::Tcg => return Accel::Tcg,
            Choice::Icount => return Accel::Icount,
            Choice::Kvm => return Accel::Kvm,
            // Another architecture is always emulated.
            Choice::Auto if arch != Arch::NATIVE => return Accel::Tcg,
            Choice::Auto => match qemu::kvm_usable() {
                // Without nested page tables below, page faults and flushes take a thousand times as long as under emulation.
                Ok(()) if environment.virtualization.hypervisor => {
                    "this machine is a virtual one, whose kvm may be slower than emulation; --accel kvm takes it"
                        .to_owned()
                }
                Ok(()) => return Accel::Kvm,
                Err(error) => format!("{error:#}"),
            },
        };
        eprintln!("hugemm: tcg executes the guest: {why}");
        Accel::Tcg
    }
}
