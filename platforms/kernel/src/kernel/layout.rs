//! What is where in virtual memory.
//!
//! | from | what |
//! |---|---|
//! | `0x0000_0000_0000_0000` | address spaces of the self-test and the benchmarks |
//! | [`DIRECT`] | all memory, by 1 GiB and 2 MiB entries |
//! | [`DESCRIPTORS`] | one 64-byte descriptor per frame, by 2 MiB entries |
//! | [`AREAS`] | kernel virtual areas, other CPUs' data and stacks among them |
//! | [`STACKS`] | the boot CPU's stack, above as much that is never mapped |
//! | [`DEVICES`] | device registers, uncached |
//! | [`IMAGE`] | the image: code, constants and data by their rights |

use super::arch::mmu;
use hugemm_base::{Extent, PAGE_BYTES, Pfn};

/// The direct map.
pub const DIRECT: u64 = 0xffff_8000_0000_0000;
/// The descriptor array: frame 0's descriptor.
pub const DESCRIPTORS: u64 = 0xffff_e000_0000_0000;
/// Bytes of a descriptor.
pub const DESCRIPTOR_BYTES: u64 = 64;
/// Kernel virtual areas.
pub const AREAS: u64 = 0xffff_e800_0000_0000;
/// Bytes of them.
pub const AREA_BYTES: u64 = 1 << 40;
/// The hole below the boot CPU's stack.
pub const STACKS: u64 = 0xffff_f000_0000_0000;
/// Devices.
pub const DEVICES: u64 = 0xffff_f800_0000_0000;
/// The image's offset: its physical address is less by this.
pub const IMAGE: u64 = mmu::IMAGE;

/// Bytes of a stack, and of the hole below it. Half of it is for the commands, which keep what they count with there.
pub const STACK_BYTES: u64 = 128 << 10;

unsafe extern "C" {
    static image_start: u8;
    static text_end: u8;
    static rodata_end: u8;
    static image_end: u8;
}

/// Lowest address of the boot CPU's stack, and where it begins: it grows down.
pub const BOOT_STACK: [u64; 2] = [STACKS + STACK_BYTES, STACKS + 2 * STACK_BYTES];

/// First addresses of the image's code, constants and data, and its end.
pub fn image_parts() -> [u64; 4] {
    [&raw const image_start, &raw const text_end, &raw const rodata_end, &raw const image_end].map(|at| at as u64)
}

/// Whether an address is one of the image's code.
pub fn is_code(address: u64) -> bool {
    let [text, end, ..] = image_parts();
    (text..end).contains(&address)
}

/// The image's frames.
pub fn image() -> Extent {
    let [start, .., end] = image_parts();
    let base = Pfn::new((start - IMAGE) / PAGE_BYTES);
    Extent::new(base, (end - start).div_ceil(PAGE_BYTES)).unwrap_or_default()
}

/// Where the direct map has a physical address.
pub const fn direct(physical: u64) -> *mut u8 {
    (DIRECT + physical) as *mut u8
}
