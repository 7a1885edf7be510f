//! Zeroing in plain Rust, for every architecture and for Miri.

/// # Safety
/// As [`super::zero`], with a granule of 8 bytes.
#[inline]
pub(super) unsafe fn zero(ptr: *mut u8, len: usize) {
    let words = ptr.cast::<u64>();
    for i in 0..len / 8 {
        // Volatile, so that the loop is not turned into a call of `memset`, which in a kernel may be anything.
        // SAFETY: the caller owns `ptr..ptr + len`, aligned to 8, and word `i` lies inside it.
        unsafe { words.add(i).write_volatile(0) }
    }
}
