//! x86-64 primitives on general registers only, for kernels that keep out of the vector registers.
//!
//! `rep stos` goes upwards because the direction flag is clear: the calling convention and `asm!` both guarantee that
//! on entry. Every loop stores whole 64-byte lines and stops at the last one that fits.

use core::arch::asm;

/// A line of zeros, the source of MOVDIR64B (which may be unaligned; aligned, it is one load).
#[repr(align(64))]
struct Line {
    _zeros: [u8; super::LINE],
}

static ZERO_LINE: Line = Line { _zeros: [0; super::LINE] };

/// Eight stores of a register, in ascending order: a write-combining buffer fills and leaves in one piece.
macro_rules! word_loop {
    ($(#[$doc:meta])* $name:ident: $store:literal) => {
        line_loop! {
            $(#[$doc])*
            $name(ptr, end):
            "2:",
            concat!($store, " qword ptr [{p}], {z}"),
            concat!($store, " qword ptr [{p} + 8], {z}"),
            concat!($store, " qword ptr [{p} + 16], {z}"),
            concat!($store, " qword ptr [{p} + 24], {z}"),
            concat!($store, " qword ptr [{p} + 32], {z}"),
            concat!($store, " qword ptr [{p} + 40], {z}"),
            concat!($store, " qword ptr [{p} + 48], {z}"),
            concat!($store, " qword ptr [{p} + 56], {z}"),
            "add {p}, 64",
            "cmp {p}, {end}",
            "jne 2b",
            p = inout(reg) ptr => _, end = in(reg) end, z = in(reg) 0u64
        }
    };
}

word_loop! {
    /// # Safety
    /// As [`super::zero`], with a granule of 64 bytes.
    unrolled: "mov"
}

word_loop! {
    /// # Safety
    /// As [`super::zero`], with a granule of 64 bytes. Streaming.
    movnti: "movnti"
}

line_loop! {
    /// The line that RAX points into is zeroed, and no register written (AMD APM vol. 3, "CLZERO").
    ///
    /// # Safety
    /// As [`super::zero`], with a granule of 64 bytes. Streaming. The CPU has CLZERO, and its lines are of 64 bytes.
    clzero(ptr, end):
    "2:", "clzero", "add rax, 64", "cmp rax, {end}", "jne 2b",
    inout("rax") ptr => _, end = in(reg) end
}

line_loop! {
    /// A destination that is not 64-byte aligned faults (Intel SDM vol. 2, "MOVDIR64B").
    ///
    /// # Safety
    /// As [`super::zero`], with a granule of 64 bytes. Streaming. The CPU has MOVDIR64B.
    movdir64b(ptr, end):
    "2:", "movdir64b {p}, [{zeros}]", "add {p}, 64", "cmp {p}, {end}", "jne 2b",
    p = inout(reg) ptr => _, end = in(reg) end, zeros = in(reg) &raw const ZERO_LINE
}

/// # Safety
/// As [`super::zero`], with a granule of 8 bytes.
#[inline]
pub(super) unsafe fn rep_stosq(ptr: *mut u8, len: usize) {
    // SAFETY: the caller owns the `len / 8` words from `ptr`; a count of 0 stores nothing. No flag is written.
    unsafe {
        asm!(
            "rep stosq",
            inout("rcx") len / 8 => _,
            inout("rdi") ptr => _,
            in("rax") 0u64,
            options(nostack, preserves_flags),
        );
    }
}

/// # Safety
/// As [`super::zero`], with a granule of 1 byte.
#[inline]
pub(super) unsafe fn rep_stosb(ptr: *mut u8, len: usize) {
    // SAFETY: the caller owns the `len` bytes from `ptr`; a count of 0 stores nothing. No flag is written.
    unsafe {
        asm!(
            "rep stosb",
            inout("rcx") len => _,
            inout("rdi") ptr => _,
            in("eax") 0u32,
            options(nostack, preserves_flags),
        );
    }
}
