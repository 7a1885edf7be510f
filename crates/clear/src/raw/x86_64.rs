//! x86-64 primitives on general registers only, for kernels that keep out of the vector registers.
//!
//! `rep stos` goes upwards because the direction flag is clear: the calling convention and `asm!` both guarantee that
//! on entry. Every loop stores whole 64-byte lines and stops at the last one that fits.

use core::arch::asm;

/// Bytes per iteration of the loops here, and the line size that CLZERO, MOVDIR64B and CLFLUSH work on.
const LINE: usize = 64;

/// A line of zeros, the source of MOVDIR64B (which may be unaligned; aligned, it is one load).
#[repr(align(64))]
struct Line {
    _zeros: [u8; LINE],
}

static ZERO_LINE: Line = Line { _zeros: [0; LINE] };

/// # Safety
/// As [`super::zero`], with a granule of 64 bytes.
#[inline]
pub(super) unsafe fn unrolled(ptr: *mut u8, len: usize) {
    let bytes = len & !(LINE - 1);
    if bytes == 0 {
        return;
    }
    // SAFETY: the caller owns `ptr..ptr + bytes`, and `bytes` is a whole, non-zero number of the loop's steps.
    unsafe {
        asm!(
            "2:",
            "mov qword ptr [{p}], {z}",
            "mov qword ptr [{p} + 8], {z}",
            "mov qword ptr [{p} + 16], {z}",
            "mov qword ptr [{p} + 24], {z}",
            "mov qword ptr [{p} + 32], {z}",
            "mov qword ptr [{p} + 40], {z}",
            "mov qword ptr [{p} + 48], {z}",
            "mov qword ptr [{p} + 56], {z}",
            "add {p}, 64",
            "cmp {p}, {end}",
            "jne 2b",
            p = inout(reg) ptr => _,
            end = in(reg) ptr.wrapping_add(bytes),
            z = in(reg) 0u64,
            options(nostack),
        );
    }
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

/// # Safety
/// As [`super::zero`], with a granule of 64 bytes. Streaming.
#[inline]
pub(super) unsafe fn movnti(ptr: *mut u8, len: usize) {
    let bytes = len & !(LINE - 1);
    if bytes == 0 {
        return;
    }
    // A whole line in ascending order per iteration, so that a write-combining buffer fills and leaves in one piece.
    // SAFETY: the caller owns `ptr..ptr + bytes`, and `bytes` is a whole, non-zero number of the loop's steps.
    unsafe {
        asm!(
            "2:",
            "movnti qword ptr [{p}], {z}",
            "movnti qword ptr [{p} + 8], {z}",
            "movnti qword ptr [{p} + 16], {z}",
            "movnti qword ptr [{p} + 24], {z}",
            "movnti qword ptr [{p} + 32], {z}",
            "movnti qword ptr [{p} + 40], {z}",
            "movnti qword ptr [{p} + 48], {z}",
            "movnti qword ptr [{p} + 56], {z}",
            "add {p}, 64",
            "cmp {p}, {end}",
            "jne 2b",
            p = inout(reg) ptr => _,
            end = in(reg) ptr.wrapping_add(bytes),
            z = in(reg) 0u64,
            options(nostack),
        );
    }
}

/// # Safety
/// As [`super::zero`], with a granule of 64 bytes. Streaming. The CPU has CLZERO, and its lines are of 64 bytes.
#[inline]
pub(super) unsafe fn clzero(ptr: *mut u8, len: usize) {
    let bytes = len & !(LINE - 1);
    if bytes == 0 {
        return;
    }
    // SAFETY: the caller owns `ptr..ptr + bytes`, a whole, non-zero number of aligned lines; CLZERO zeroes the line
    // that RAX points into (AMD APM vol. 3, "CLZERO") and writes no register.
    unsafe {
        asm!(
            "2:",
            "clzero",
            "add rax, 64",
            "cmp rax, {end}",
            "jne 2b",
            inout("rax") ptr => _,
            end = in(reg) ptr.wrapping_add(bytes),
            options(nostack),
        );
    }
}

/// # Safety
/// As [`super::zero`], with a granule of 64 bytes. Streaming. The CPU has MOVDIR64B.
#[inline]
pub(super) unsafe fn movdir64b(ptr: *mut u8, len: usize) {
    let bytes = len & !(LINE - 1);
    if bytes == 0 {
        return;
    }
    // SAFETY: the caller owns `ptr..ptr + bytes`, a whole, non-zero number of aligned lines: MOVDIR64B faults on a
    // destination that is not 64-byte aligned (Intel SDM vol. 2, "MOVDIR64B"). The source is a static.
    unsafe {
        asm!(
            "2:",
            "movdir64b {p}, [{zeros}]",
            "add {p}, 64",
            "cmp {p}, {end}",
            "jne 2b",
            p = inout(reg) ptr => _,
            end = in(reg) ptr.wrapping_add(bytes),
            zeros = in(reg) &raw const ZERO_LINE,
            options(nostack),
        );
    }
}
