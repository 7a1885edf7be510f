//! Page descriptors: 64 bytes per frame, for whoever owns the frame. The allocator itself needs two words of a block that
//! is queued because its freer could not wait.
//!
//! # Protocol
//!
//! * The descriptor of a frame that is not the head of a block is **don't-care**: nobody reads a meaning out of it and
//!   nobody has to write it. Which frames are heads is said by the block map (`blockmap.rs`), never by a descriptor.
//!   So allocating a 2 MiB block writes no tails, and tails may be mapped read-only or share one page.
//! * The head of a **free** block belongs to the allocator, which does not touch it: what is free is said by bits (see
//!   `freelist.rs`). Only a block on the way from `free_nowait` to its node has a link and its order in words 0 and 1.
//! * The head of an **allocated** block belongs to the block's owner, all eight words. They are unspecified after an
//!   allocation, and those of the heads that [`split`](crate::Frames::split) makes are so after it. So whoever wants to
//!   store shows the block ([`descriptor_mut`](crate::Frames::descriptor_mut)), or says that it may; anybody can read.
//! * References are not here (see [`refs`](crate::refs)), so no atomic read-modify-write ever targets a descriptor, not
//!   even a failing one.
//!
//! Descriptors may be remapped while the manager runs. No `&Descriptor` is kept: a [`DescRef`] holds a raw pointer and
//! makes each access on its own, a relaxed load or store of eight bytes.
//!
//! ```compile_fail,E0599
//! # use hugemm_base::Pfn;
//! # use hugemm_frames::Frames;
//! fn rule(frames: &Frames<'_>, anybodys: Pfn) {
//!     frames.descriptor(anybodys).expect("managed").store(0, 7); // error: whose block is that?
//! }
//! ```
//!
//! ```
//! # use hugemm_frames::{Frames, Frozen};
//! fn rule(frames: &Frames<'_>, mine: &mut Frozen) {
//!     frames.descriptor_mut(mine).expect("managed").store(0, 7);
//! }
//! ```

use core::marker::PhantomData;
use core::ops::Deref;
use hugemm_base::prefetch;
use hugemm_base::sync::{AtomicU64, Ordering};

/// Words in a descriptor.
pub const DESCRIPTOR_WORDS: usize = 8;

/// The storage of one descriptor. Only ever reached through a [`DescRef`].
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Descriptor {
    words: [AtomicU64; DESCRIPTOR_WORDS],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Descriptor>() == 64);

/// A handle on one frame's descriptor, to read it.
#[derive(Clone, Copy, Debug)]
pub struct DescRef<'m> {
    ptr: *mut Descriptor,
    memory: PhantomData<&'m Descriptor>,
}

impl<'m> DescRef<'m> {
    /// A handle on the descriptor at `ptr`.
    ///
    /// # Safety
    ///
    /// `ptr` is aligned and its 64 bytes are initialised and readable for `'m`, and writable whenever the frame is the
    /// head of a block.
    pub(crate) const unsafe fn new(ptr: *mut Descriptor) -> Self {
        DescRef { ptr, memory: PhantomData }
    }

    #[inline]
    fn word(&self, index: usize) -> &AtomicU64 {
        let index = index & (DESCRIPTOR_WORDS - 1);
        // SAFETY: `ptr` is valid by the contract of `new` and the index is below 8; the reference covers one word and
        // ends with the access, so none lives across a remap of the descriptor array.
        unsafe { &(*self.ptr).words[index] }
    }

    /// Reads word `index` (modulo 8): one relaxed load. Meaningless unless the frame is the head of a block.
    #[inline]
    pub fn load(self, index: usize) -> u64 {
        // Relaxed: a descriptor's words are handed over together with the block, by a lock or by the owner's own means.
        self.word(index).load(Ordering::Relaxed)
    }

    /// Asks for its cache line ahead, without waiting.
    #[inline]
    pub fn prefetch(self) {
        prefetch::read(self.word(0));
    }
}

/// The descriptor of a block's head, to write to it: as long as the block is in the caller's hands.
#[derive(Debug)]
pub struct DescMut<'a>(DescRef<'a>);

impl<'a> Deref for DescMut<'a> {
    type Target = DescRef<'a>;

    #[inline]
    fn deref(&self) -> &DescRef<'a> {
        &self.0
    }
}

impl<'a> DescMut<'a> {
    /// # Safety
    ///
    /// The frame stays the head of a block that is allocated for `'a`.
    #[inline]
    pub(crate) const unsafe fn new(desc: DescRef<'a>) -> Self {
        DescMut(desc)
    }

    /// Writes word `index` (modulo 8): one relaxed store.
    #[inline]
    pub fn store(&self, index: usize, value: u64) {
        // Relaxed: as for `load`.
        self.0.word(index).store(value, Ordering::Relaxed);
    }

    /// Sets all words to zero.
    pub fn reset(&self) {
        for index in 0..DESCRIPTOR_WORDS {
            self.store(index, 0);
        }
    }
}
