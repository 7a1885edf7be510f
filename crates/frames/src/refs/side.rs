//! The count of a frame's references beyond the first: four bits, or 64 where those are not enough.
//!
//! When it is added to, taken from and looked at is the protocol's business: see [`refs`](crate::refs).

use super::RefError;
use hugemm_base::sync::{AtomicPtr, AtomicU64, AtomicWord, Ordering};

/// Side counts that share a word.
pub(super) const SIDE_LANES: usize = 16;

/// Largest count that stays in the four bits.
pub(super) const SIDE_MAX: u64 = 14;

/// Four bits that say: look in the wide array.
pub(super) const SIDE_WIDE: u64 = 15;

/// 512 counters of 64 bits, for one 2 MiB block.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct WideCounts {
    pub(super) counts: [AtomicU64; 512],
}

impl WideCounts {
    /// All zero.
    pub fn new() -> Self {
        WideCounts { counts: core::array::from_fn(|_| AtomicU64::new(0)) }
    }
}

impl Default for WideCounts {
    fn default() -> Self {
        Self::new()
    }
}

/// The side count of one frame: its references beyond the first. Any context, any number of CPUs at once, no waiting. One atomic
/// while the count fits in its four bits; three where it moves to the wide counter.
pub trait SideCount {
    /// Adds one.
    ///
    /// # Errors
    ///
    /// [`Saturated`](RefError::Saturated): there is no room for one more.
    fn add(&self) -> Result<(), RefError>;
    /// Takes one away if there is one.
    fn take(&self) -> bool;
    /// Whether there is none.
    fn is_zero(&self) -> bool;
}

/// The side count of one frame in its packed form. `W` is the word, so that loom can run this.
#[derive(Debug)]
pub struct PackedSide<'a, W, F> {
    /// The word with this frame's four bits.
    pub word: &'a W,
    /// Where in the word they begin.
    pub shift: u32,
    /// Finds the wide counter, if the block has any by now. Asked after the word has been read, because it may appear
    /// at any moment.
    pub wide: F,
}

impl<'a, W: AtomicWord, F: Fn() -> Option<&'a W>> PackedSide<'a, W, F> {
    fn with(&self, word: u64, count: u64) -> u64 {
        word & !(15 << self.shift) | count << self.shift
    }

    pub(super) fn packed(&self, word: u64) -> u64 {
        word >> self.shift & 15
    }
}

impl<'a, W: AtomicWord, F: Fn() -> Option<&'a W>> SideCount for PackedSide<'a, W, F> {
    fn add(&self) -> Result<(), RefError> {
        loop {
            // SeqCst on what changes the count: the getter's half of the store-load order in `try_get`.
            // Acquire on what does not: whoever sees that the count has moved sees where to.
            let step = self.word.transition(Ordering::SeqCst, Ordering::Acquire, |word| {
                let count = self.packed(word);
                (count < SIDE_MAX).then(|| self.with(word, count + 1))
            });
            let Err(seen) = step else { return Ok(()) };
            let wide = (self.wide)().ok_or(RefError::Saturated)?;
            if self.packed(seen) == SIDE_WIDE {
                wide.fetch_add(1, Ordering::SeqCst);
                return Ok(());
            }
            // Move to the wide counter: everything is there before the four bits send anybody there. Too large a count
            // for a moment is harmless: it delays a last put to the one that makes it right.
            wide.fetch_add(SIDE_MAX + 1, Ordering::SeqCst);
            let moved = self.word.transition(Ordering::SeqCst, Ordering::Relaxed, |word| {
                (self.packed(word) == SIDE_MAX).then(|| self.with(word, SIDE_WIDE))
            });
            match moved {
                Ok(_) => return Ok(()),
                Err(seen) if self.packed(seen) == SIDE_WIDE => {
                    // Somebody else moved it: only the one reference is ours to add.
                    wide.fetch_add(SIDE_MAX.wrapping_neg(), Ordering::SeqCst);
                    return Ok(());
                }
                Err(_) => {
                    wide.fetch_add((SIDE_MAX + 1).wrapping_neg(), Ordering::SeqCst);
                }
            }
        }
    }

    fn take(&self) -> bool {
        // AcqRel: whoever takes the last of the count sees what the others did before they put.
        let step = self.word.transition(Ordering::AcqRel, Ordering::Acquire, |word| {
            let count = self.packed(word);
            (count > 0 && count != SIDE_WIDE).then(|| self.with(word, count.wrapping_sub(1)))
        });
        match step {
            Ok(_) => true,
            Err(seen) if self.packed(seen) == SIDE_WIDE => (self.wide)().is_some_and(|wide| {
                wide.transition(Ordering::AcqRel, Ordering::Acquire, |count| count.checked_sub(1)).is_ok()
            }),
            Err(_) => false,
        }
    }

    fn is_zero(&self) -> bool {
        // SeqCst: the putter's half of the store-load order in `put`.
        match self.packed(self.word.load(Ordering::SeqCst)) {
            0 => true,
            SIDE_WIDE => (self.wide)().is_none_or(|wide| wide.load(Ordering::SeqCst) == 0),
            _ => false,
        }
    }
}

/// Installs wide counters for a block. False if it has some already.
pub(crate) fn install_wide(slot: &AtomicPtr<WideCounts>, counts: *mut WideCounts) -> bool {
    // Release pairs with the Acquire in `BlockRefs::side`.
    slot.compare_exchange(core::ptr::null_mut(), counts, Ordering::Release, Ordering::Relaxed).is_ok()
}
