//! arm64 primitives. All use general registers only.
//!
//! No arm64 store is ordered against a later one, so none of these differs from plain stores in what publishing them
//! takes: a store-release, or `dmb ishst` (Arm ARM, B2 "The AArch64 Application Level Memory Model").

use core::arch::asm;

/// Bytes that one `dc zva` zeroes, from DCZID_EL0: 16 to 2048. `None` where its DZP bit prohibits the instruction at
/// this exception level, or where a block is smaller than any that is made.
#[inline]
pub(crate) fn dc_zva_block() -> Option<usize> {
    let dczid: u64;
    // SAFETY: DCZID_EL0 is readable at every exception level; reading it has no side effect.
    unsafe { asm!("mrs {}, dczid_el0", out(reg) dczid, options(nomem, nostack, preserves_flags)) }
    let prohibited = dczid & (1 << 4) != 0;
    let block = 4usize << (dczid & 0xF);
    (!prohibited && matches!(block, 16..=2048)).then_some(block)
}

/// Four stores of two zero registers.
macro_rules! pair_loop {
    ($(#[$doc:meta])* $name:ident: $store:literal) => {
        line_loop! {
            $(#[$doc])*
            $name(ptr, end):
            "2:",
            concat!($store, " xzr, xzr, [{p}]"),
            concat!($store, " xzr, xzr, [{p}, #16]"),
            concat!($store, " xzr, xzr, [{p}, #32]"),
            concat!($store, " xzr, xzr, [{p}, #48]"),
            "add {p}, {p}, #64",
            "cmp {p}, {end}",
            "b.ne 2b",
            p = inout(reg) ptr => _, end = in(reg) end
        }
    };
}

pair_loop! {
    /// # Safety
    /// As [`super::zero`], with a granule of 64 bytes.
    unrolled: "stp"
}

pair_loop! {
    /// # Safety
    /// As [`super::zero`], with a granule of 64 bytes.
    stnp: "stnp"
}

/// Zeroes whole blocks by `dc zva` and what lies before and after them by plain stores. Where the instruction is
/// prohibited, or no whole block fits, all of it by plain stores, so it never faults. The block size is read on each
/// call: a core register, and big.LITTLE cores may differ.
///
/// # Safety
/// As [`super::zero`], with a granule of 64 bytes; the memory must be Normal, `dc zva` faults on Device memory. The
/// caller stays on this CPU, or on CPUs of the same block size, for the call.
#[inline]
pub(super) unsafe fn dc_zva(ptr: *mut u8, len: usize) {
    let len = len & !(super::LINE - 1);
    let block = dc_zva_block().unwrap_or(usize::MAX / 2 + 1);
    // A multiple of 64, because `ptr` is one and a block is one, or divides 64 (and the head is empty).
    let head = ptr.addr().wrapping_neg() & (block - 1);
    if len < block || len - head.min(len) < block {
        // SAFETY: the caller's promises.
        return unsafe { unrolled(ptr, len) };
    }
    let body = (len - head) & !(block - 1);
    let start = ptr.wrapping_add(head);
    let end = start.wrapping_add(body);
    // SAFETY: head, body and tail split `ptr..ptr + len`, which the caller owns; `start` is aligned to the block, and
    // `body` is a non-zero number of blocks of exactly the size that each `dc zva` stores.
    unsafe {
        unrolled(ptr, head);
        asm!(
            "2:",
            "dc zva, {p}",
            "add {p}, {p}, {block}",
            "cmp {p}, {end}",
            "b.ne 2b",
            p = inout(reg) start => _,
            end = in(reg) end,
            block = in(reg) block,
            options(nostack),
        );
        unrolled(end, len - head - body);
    }
}
