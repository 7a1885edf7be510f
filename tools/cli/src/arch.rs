//! The architectures that guests have: what is built for each, what runs it, and on which machine.

use crate::image::Image;
use clap::ValueEnum;

/// An architecture of a guest.
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

    /// The reference kernel's image.
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

    /// QEMU's name of the machine, with what it has to have.
    pub const fn machine(self) -> &'static str {
        match self {
            Arch::X86 => "q35",
            Arch::Arm64 => "virt,gic-version=3",
        }
    }
}
