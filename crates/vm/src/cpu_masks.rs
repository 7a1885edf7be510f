//! Which CPUs use a space: mask words for as many CPUs as there are, behind the space (a `T`) in its own memory.

use core::fmt;
use core::ptr::NonNull;
use core::slice;
use hugemm_base::TlbHw;
use hugemm_base::sync::AtomicU64;
use hugemm_paging::{Keep, TlbShootdown, TlbSpace, UserSpace};

/// A space's part in shootdowns.
pub type SpaceTlb = TlbSpace<UserSpace, Keep, CpuMasks>;

/// The masks of one space. They live as long as its memory.
pub struct CpuMasks {
    first: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: a view of atomics, which may be sent and shared.
unsafe impl Send for CpuMasks {}
// SAFETY: as above.
unsafe impl Sync for CpuMasks {}

impl fmt::Debug for CpuMasks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuMasks").field("words", &self.words).finish_non_exhaustive()
    }
}

impl AsRef<[AtomicU64]> for CpuMasks {
    fn as_ref(&self) -> &[AtomicU64] {
        // SAFETY: `behind` made so many words there, and the space that has this is gone before its memory is.
        unsafe { slice::from_raw_parts(self.first.as_ptr(), self.words) }
    }
}

/// Two masks: who uses the space, and who of those is lazy.
const fn words<H: TlbHw>(cpus: usize) -> usize {
    2 * TlbShootdown::<H>::mask_words(cpus)
}

/// Size and alignment of a `T` and masks for so many CPUs. A space fits in a frame up to ten thousand CPUs.
pub(crate) fn layout<T, H: TlbHw>(cpus: usize) -> (usize, usize) {
    const { assert!(align_of::<T>() >= align_of::<AtomicU64>()) };
    (size_of::<T>() + words::<H>(cpus) * size_of::<AtomicU64>(), align_of::<T>())
}

impl CpuMasks {
    /// The masks behind a space for so many CPUs, all 0.
    ///
    /// # Safety
    ///
    /// The memory is the caller's, as large as the [`layout`] for as many CPUs, and outlives the value.
    pub(crate) unsafe fn behind<T, H: TlbHw>(space: NonNull<T>, cpus: usize) -> CpuMasks {
        let words = words::<H>(cpus);
        // SAFETY: the slab's objects have room for a space and so many words, and the space's size is a multiple of its
        // alignment, which is enough for a word.
        let first = unsafe { space.add(1) }.cast::<AtomicU64>();
        for word in 0..words {
            // SAFETY: as above.
            unsafe { first.add(word).write(AtomicU64::new(0)) };
        }
        CpuMasks { first, words }
    }
}
