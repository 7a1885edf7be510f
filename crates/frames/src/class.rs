//! A stack of blocks of one order and mobility: what a CPU's cache consists of.
//!
//! Only its owner touches it, pinned, with relaxed loads and stores (see [`pcp`](crate::pcp)); others read the length.

use crate::frozen::Frozen;
use hugemm_base::sync::{AtomicU64, Ordering};

/// Watermarks start, and shrink, to this.
const LEAST: u64 = 8;

/// Which way a class last went to its node.
const NEITHER: u64 = 0;
const REFILLED: u64 = 1;
const DRAINED: u64 = 2;

/// A stack of blocks of one order and mobility.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Class<'m> {
    /// How many there are: never above `high`, but for a watermark that was lowered.
    len: AtomicU64,
    /// How many there may be: never above the number of entries.
    high: AtomicU64,
    entries: &'m [AtomicU64],
    last: AtomicU64,
}

// Relaxed throughout: only the owner writes, and nobody draws a conclusion from what they read (see the protocol).
impl<'m> Class<'m> {
    pub(crate) fn new(entries: &'m [AtomicU64]) -> Self {
        let high = LEAST.min(entries.len() as u64);
        Class { len: AtomicU64::new(0), high: AtomicU64::new(high), last: AtomicU64::new(NEITHER), entries }
    }

    #[inline]
    pub(crate) fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    #[inline]
    fn entry(&self, index: u64) -> &AtomicU64 {
        debug_assert!(index < self.entries.len() as u64);
        // SAFETY: every index is below `len`, or is `len` where that is below `high`; `push` alone raises `len`, and to
        // `high` at most, which `new`, `note` and `shrink` keep at the number of entries or below.
        unsafe { self.entries.get_unchecked(index as usize) }
    }

    /// The most recently freed block: three loads, a store and a branch.
    #[inline]
    pub(crate) fn pop(&self) -> Option<Frozen> {
        let len = self.len.load(Ordering::Relaxed).checked_sub(1)?;
        let word = self.entry(len).load(Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        Some(Frozen::from_word(word))
    }

    /// Whether the block that `pop` would return is known to be zero.
    pub(crate) fn next_is_zero(&self) -> bool {
        let last = self.len.load(Ordering::Relaxed).checked_sub(1);
        last.is_some_and(|last| Frozen::from_word(self.entry(last).load(Ordering::Relaxed)).is_zero())
    }

    /// Adds a block; gives it back if the watermark is reached. Three loads, two stores and a branch.
    #[inline]
    pub(crate) fn push(&self, block: Frozen) -> Result<(), Frozen> {
        let len = self.len.load(Ordering::Relaxed);
        if len >= self.high.load(Ordering::Relaxed) {
            return Err(block);
        }
        self.entry(len).store(block.into_word(), Ordering::Relaxed);
        self.len.store(len + 1, Ordering::Relaxed);
        Ok(())
    }

    /// The cache ran empty: raises the watermark if that keeps happening, and says how many to fetch: half of what there
    /// may be, or all if it does keep happening.
    pub(crate) fn want(&self) -> u64 {
        let again = self.note(REFILLED);
        let high = self.high.load(Ordering::Relaxed);
        if again { high } else { (high / 2).max(1) }
    }

    /// The cache is full: raises the watermark if that keeps happening, and says how many must go: three quarters, or seven
    /// eighths if it does keep happening. 0: there is room now.
    pub(crate) fn excess(&self) -> u64 {
        let again = self.note(DRAINED);
        let high = self.high.load(Ordering::Relaxed);
        let keep = if again { high / 8 } else { high / 4 };
        if self.len() < high { 0 } else { self.len() - keep }
    }

    /// Returns whether the same happened the last time.
    fn note(&self, event: u64) -> bool {
        let again = self.last.load(Ordering::Relaxed) == event;
        let high = if again { self.high.load(Ordering::Relaxed) * 2 } else { LEAST };
        self.high.store(high.min(self.entries.len() as u64), Ordering::Relaxed);
        self.last.store(event, Ordering::Relaxed);
        again
    }

    /// Back to the smallest size.
    pub(crate) fn shrink(&self) {
        self.high.store(LEAST.min(self.entries.len() as u64), Ordering::Relaxed);
        self.last.store(NEITHER, Ordering::Relaxed);
    }

    /// Whether the class caches anything at all.
    #[inline]
    pub(crate) fn enabled(&self) -> bool {
        !self.entries.is_empty()
    }

    /// Hands up to `count` entries over, those that lie highest, in ascending order, and keeps the lowest, the lowest of
    /// all on top. They are counted until `f` returns, so that nobody takes a cache that is being drained for an empty
    /// one. O(len) where they lie in order, O(len log len) otherwise.
    pub(crate) fn drain_highest(&self, count: u64, f: impl FnOnce(&[u64])) {
        let len = self.len();
        let count = count.min(len) as usize;
        // SAFETY: there are at least `len` entries (see `entry`). Only the owner touches them, it is pinned, and `f`
        // knows nothing of this class; an `AtomicU64` has the layout of a `u64` and may be written where it is shared.
        let words = unsafe { core::slice::from_raw_parts_mut(self.words(), len as usize) };
        // By frame: the frame's number is the word's highest part.
        words.sort_unstable_by(|a, b| b.cmp(a));
        words[..count].reverse();
        f(&words[..count]);
        words.copy_within(count.., 0);
        self.len.store(len - count as u64, Ordering::Relaxed);
    }

    /// The entries as plain words.
    #[cfg(not(loom))]
    fn words(&self) -> *mut u64 {
        self.entries.as_ptr().cast_mut().cast()
    }

    /// loom's atomics are no plain words; its tests do not come here.
    #[cfg(loom)]
    fn words(&self) -> *mut u64 {
        unreachable!("loom runs the protocols, not the cache")
    }
}
