//! The architectures that guests have: what is built for each, what runs it, and on which machine.

use crate::image::Image;
use clap::ValueEnum;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Arch {
    /// A PC.
    #[value(name = "x86-64")]
    X86,
    /// QEMU's `virt` with a GICv3.
    Arm64,
}

impl Arch {
    /// This machine's; x86-64 on any that is neither.
    pub const NATIVE: Arch = if cfg!(target_arch = "aarch64") { Arch::Arm64 } else { Arch::X86 };

    pub const fn kernel(self) -> Image {
        let (beside, target) = match self {
            Arch::X86 => ("hugemm-kernel-commands", "x86_64-unknown-none"),
            Arch::Arm64 => ("hugemm-kernel-commands-arm64", "aarch64-unknown-none-softfloat"),
        };
        Image { package: "hugemm-kernel-commands", beside, target }
    }

    /// The program that runs guests, and the package that it comes in on Debian and on Fedora.
    pub const fn qemu(self) -> (&'static str, [&'static str; 2]) {
        match self {
            Arch::X86 => ("qemu-system-x86_64", ["qemu-system-x86", "qemu-system-x86"]),
            Arch::Arm64 => ("qemu-system-aarch64", ["qemu-system-arm", "qemu-system-aarch64"]),
        }
    }

    /// Process 1 of stock Linux guests.
    pub const fn linux_init(self) -> Image {
        let (beside, target) = match self {
            Arch::X86 => ("hugemm-guest", "x86_64-unknown-linux-musl"),
            Arch::Arm64 => ("hugemm-guest-arm64", "aarch64-unknown-linux-musl"),
        };
        Image { package: "hugemm-guest", beside, target }
    }

    /// Linux's name of the first serial port.
    pub const fn linux_console(self) -> &'static str {
        match self {
            Arch::X86 => "ttyS0",
            Arch::Arm64 => "ttyAMA0",
        }
    }

    /// The CPU model on which Linux guests are emulated without what emulation makes slow: `rep stosb`, and pointer authentication
    /// by its own algorithm.
    pub const fn linux_cpu_model(self) -> &'static str {
        match self {
            Arch::X86 => "max,-erms",
            Arch::Arm64 => "max,pauth-impdef=on",
        }
    }

    /// QEMU's name of the machine, with what it has to have.
    pub const fn machine(self) -> &'static str {
        match self {
            Arch::X86 => "q35",
            Arch::Arm64 => "virt,gic-version=3",
        }
    }
}
