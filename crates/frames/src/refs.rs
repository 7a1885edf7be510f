//! References: packed, outside the descriptor array, get and put through the same word.
//!
//! # Representation
//!
//! Two bits per frame, 32 frames to a 64-bit word, and a *side count* of four bits, 16 frames to a word:
//!
//! | HELD | SIDE | meaning | references |
//! |---|---|---|---|
//! | 0 | 0 | frozen: free, in a cache, a tail, or held by one owner who needs no count | none |
//! | 1 | 0 | referenced exactly once | 1 |
//! | 1 | 1 | referenced, and the side count is in use | 1 + side |
//! | 0 | 1 | a put is deciding whether it was the last | 1 + side |
//!
//! That is 0.75 bytes per frame. A side count that outgrows its four bits moves to a *wide* array of 512 counters for
//! the frame's 2 MiB block, which the caller donates when asked to ([`RefError::Saturated`]); it stays there for good.
//! Nothing here is ever in read-only memory, so a speculative getter that comes too late for a page whose descriptor
//! has become a shared tail still writes only to memory that is always writable.
//!
//! # Protocol
//!
//! * Dropping a frame that is HELD without SIDE takes one compare-and-swap, and one drops up to 32 such frames: 512
//!   frames are 16 atomic operations. HELD goes first and alone, so the winner knows that it was the last.
//! * SIDE is set by the first extra get and stays until the frame is frozen. A get then adds to the side count; a
//!   *speculative* one afterwards looks at the bits again, and backs out unless both are still set.
//! * A put under SIDE takes from the side count; if that is empty it swaps HELD+SIDE for SIDE alone, and looks at the
//!   side count again. Still empty: frozen, this was the last. Otherwise a getter came: HELD is put back and the put
//!   starts over.
//! * The getter adds, then reads the bits; the putter changes the bits, then reads the count: each sees the other or
//!   both do (store-load order on both sides, hence `SeqCst` on exactly these four accesses).
//! * Backing out is a put like any other, because in the meantime another put may have consumed what the getter added.
//!   If that is the last, the getter has the only reference there is, and keeps it.
//!
//! At every step *references held + gets backing out = HELD-or-deciding + side*, from which all of this follows: no
//! count goes below zero, and exactly one put is the last. loom runs these functions (`tests/loom.rs`).
//!
//! No step waits for another CPU, so all of this may run in an interrupt, also one that interrupts a put half way.

mod lanes;
mod side;

pub use lanes::{Dropped, hold_lanes, put_lanes};
pub(crate) use side::install_wide;
pub use side::{PackedSide, SideCount, WideCounts};

use crate::blockmap::{Pages, Position};
use core::fmt;
use hugemm_base::sync::{AtomicPtr, AtomicU64, AtomicWord, Ordering, fence, spin_loop};
use side::{SIDE_LANES, SIDE_WIDE};

/// Frames whose state shares a word.
pub const LANES: usize = 32;

const HELD: u64 = 1;
const SIDE: u64 = 2;

/// Why a reference could not be taken or dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefError {
    /// The frame is outside every arena.
    NotManaged,
    /// The frame has no references: it is free, frozen or a tail.
    NotCounted,
    /// The frame's count needs more than four bits and its 2 MiB block has no wide counters yet: donate 4 KiB with
    /// [`Frames::widen`](crate::Frames::widen) and try again. Nothing has changed.
    Saturated,
}

impl fmt::Display for RefError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RefError::NotManaged => "the frame is in no arena of this manager",
            RefError::NotCounted => "the frame is not reference counted: it is free, frozen or a tail",
            RefError::Saturated => "the frame's block needs wide counters; donate 4 KiB with widen() and try again",
        })
    }
}

impl core::error::Error for RefError {}

/// What a put found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "it says whether the frame is gone"]
pub enum Put {
    /// Others still hold references.
    Kept,
    /// That was the last one: the frame is frozen and the caller's.
    Last,
}

/// The two bits of lane `lane`.
#[inline]
const fn bits(word: u64, lane: u32) -> u64 {
    word >> (lane * 2) & 3
}

#[inline]
const fn with_bits(word: u64, lane: u32, bits: u64) -> u64 {
    word & !(3 << (lane * 2)) | bits << (lane * 2)
}

/// Marks a reference the caller holds already as one of several, so that the side count is looked at. Returns whether
/// the frame is referenced at all.
fn open_side<W: AtomicWord>(word: &W, lane: u32) -> bool {
    let step = word.transition(Ordering::SeqCst, Ordering::SeqCst, |w| {
        (bits(w, lane) == HELD).then(|| with_bits(w, lane, HELD | SIDE))
    });
    match step {
        Ok(_) => true,
        Err(seen) => bits(seen, lane) != 0,
    }
}

/// Takes another reference to a frame to which the caller holds one. Two atomics the first time, one afterwards.
///
/// # Errors
///
/// [`NotCounted`](RefError::NotCounted), or [`Saturated`](RefError::Saturated) where `side` has no room.
pub fn get<W: AtomicWord>(word: &W, lane: u32, side: &impl SideCount) -> Result<(), RefError> {
    // The caller's reference keeps the frame alive: a put that is deciding will find the side count not empty.
    if open_side(word, lane) { side.add() } else { Err(RefError::NotCounted) }
}

/// Takes a reference to a frame that may lose its last, or be frozen, at any moment; false if it has none, or lost its last
/// meanwhile.
///
/// # Errors
///
/// [`Saturated`](RefError::Saturated) where `side` has no room.
pub fn try_get<W: AtomicWord>(word: &W, lane: u32, side: &impl SideCount) -> Result<bool, RefError> {
    let step = word.transition(Ordering::SeqCst, Ordering::SeqCst, |w| {
        (bits(w, lane) == HELD).then(|| with_bits(w, lane, HELD | SIDE))
    });
    if let Err(seen) = step
        && bits(seen, lane) != HELD | SIDE
    {
        return Ok(false);
    }
    side.add()?;
    // SeqCst: after the add, before the decision; pairs with the swap and the look at the count in `put`.
    fence(Ordering::SeqCst);
    if bits(word.load(Ordering::SeqCst), lane) == HELD | SIDE {
        return Ok(true);
    }
    loop {
        if side.take() {
            return Ok(false);
        }
        // Another put consumed what was added here; so this frame lives, and backing out is putting.
        match put(word, lane, side) {
            Ok(Put::Kept) => return Ok(false),
            Ok(Put::Last) => {
                // Nobody else has it, so it is what it was, and the reference is to be had after all.
                hold(word, lane);
                return Ok(true);
            }
            Err(_) => spin_loop(),
        }
    }
}

/// Drops one reference of a frame that is referenced exactly once: true if it was the last. False says nothing:
/// [`put`] decides. One atomic, and nothing is prepared for a side count that is not needed.
#[inline]
pub fn put_only<W: AtomicWord>(word: &W, lane: u32) -> bool {
    // Relaxed: only a guess for the swap.
    let seen = word.load(Ordering::Relaxed);
    // Release: what the holder did to the frame comes before its end. Acquire: the last sees what all others did.
    bits(seen, lane) == HELD
        && word.compare_exchange_weak(seen, with_bits(seen, lane, 0), Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

/// Drops one reference, whoever else has some.
///
/// # Errors
///
/// [`NotCounted`](RefError::NotCounted): the caller had no reference.
pub fn put<W: AtomicWord>(word: &W, lane: u32, side: &impl SideCount) -> Result<Put, RefError> {
    loop {
        // Orderings as in `put_only`.
        let step = word.transition(Ordering::AcqRel, Ordering::Acquire, |w| {
            (bits(w, lane) == HELD).then(|| with_bits(w, lane, 0))
        });
        let Err(seen) = step else { return Ok(Put::Last) };
        match bits(seen, lane) {
            0 => return Err(RefError::NotCounted),
            _ if side.take() => return Ok(Put::Kept),
            bits if bits == HELD | SIDE => {}
            _ => {
                // Another put is deciding and this one saw the count before it changed: look again.
                spin_loop();
                continue;
            }
        }
        let deciding = word.transition(Ordering::SeqCst, Ordering::SeqCst, |w| {
            (bits(w, lane) == HELD | SIDE).then(|| with_bits(w, lane, SIDE))
        });
        if deciding.is_err() {
            continue;
        }
        // SeqCst: after the swap, before the look at the count; pairs with the add and the second look in `try_get`.
        fence(Ordering::SeqCst);
        let last = side.is_zero();
        let outcome = if last { 0 } else { HELD | SIDE };
        // Nobody but the one who is deciding changes these two bits, so this ends after at most as many tries as other
        // lanes change.
        let _ = word.transition(Ordering::AcqRel, Ordering::Acquire, |w| Some(with_bits(w, lane, outcome)));
        if last {
            return Ok(Put::Last);
        }
    }
}

/// Makes an owner's frozen frame a counted one with one reference. One atomic.
pub fn hold<W: AtomicWord>(word: &W, lane: u32) {
    // Release: the frame's initialisation comes before anybody's get, which acquires through the same word.
    word.fetch_add(HELD << (lane * 2), Ordering::Release);
}

/// Freezes a frame that is referenced exactly once, by the caller. False if others hold references. One atomic.
pub fn freeze<W: AtomicWord>(word: &W, lane: u32, side: &impl SideCount) -> bool {
    loop {
        let step = word.transition(Ordering::AcqRel, Ordering::Acquire, |w| {
            (bits(w, lane) == HELD).then(|| with_bits(w, lane, 0))
        });
        let Err(seen) = step else { return true };
        if bits(seen, lane) != HELD | SIDE || !side.is_zero() {
            return false;
        }
        // Once shared and no longer: the same decision as in `put`.
        let deciding = word.transition(Ordering::SeqCst, Ordering::SeqCst, |w| {
            (bits(w, lane) == HELD | SIDE).then(|| with_bits(w, lane, SIDE))
        });
        if deciding.is_err() {
            continue;
        }
        fence(Ordering::SeqCst);
        let alone = side.is_zero();
        let outcome = if alone { 0 } else { HELD | SIDE };
        let _ = word.transition(Ordering::AcqRel, Ordering::Acquire, |w| Some(with_bits(w, lane, outcome)));
        return alone;
    }
}

/// The references of one 2 MiB block: 384 bytes and a pointer.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct BlockRefs {
    state: [AtomicU64; 512 / LANES],
    side: [AtomicU64; 512 / SIDE_LANES],
}

impl BlockRefs {
    pub(crate) fn new() -> Self {
        BlockRefs {
            state: core::array::from_fn(|_| AtomicU64::new(0)),
            side: core::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// The state word of frame `index` of the block, and its lane.
    #[inline]
    pub(crate) fn word(&self, index: Position<Pages>) -> (&AtomicU64, u32) {
        let index = index.get() & 511;
        (&self.state[index / LANES], (index % LANES) as u32)
    }

    /// Drops one reference of each frame of `count` words, from word `first` on, as long as every frame of a word is referenced
    /// exactly once. Says of how many words: their frames are frozen and the caller's. An atomic for each.
    #[inline]
    pub(crate) fn drop_words(&self, first: usize, count: usize) -> u64 {
        let words = self.state.iter().skip(first).take(count);
        words.take_while(|word| lanes::put_all(*word)).count() as u64
    }

    #[inline]
    pub(crate) fn side<'a>(
        &'a self,
        index: Position<Pages>,
        wide: &'a AtomicPtr<WideCounts>,
    ) -> PackedSide<'a, AtomicU64, impl Fn() -> Option<&'a AtomicU64>> {
        let index = index.get() & 511;
        let wide = move || {
            // Acquire pairs with the Release in `install_wide`: the counters are zero before the pointer is seen.
            let wide = wide.load(Ordering::Acquire);
            // SAFETY: the pointer is null or was installed by `install_wide`, whose caller gave the counters away until the manager
            // or the arena goes, and nobody counts references of a frame of an arena that is gone.
            unsafe { wide.as_ref() }.map(|wide| &wide.counts[index])
        };
        PackedSide { word: &self.side[index / SIDE_LANES], shift: (index % SIDE_LANES) as u32 * 4, wide }
    }

    /// References now held on frame `index`. A guess unless the caller holds one.
    pub(crate) fn count(&self, index: Position<Pages>, wide: &AtomicPtr<WideCounts>) -> u64 {
        let (word, lane) = self.word(index);
        let side = self.side(index, wide);
        match bits(word.load(Ordering::Relaxed), lane) {
            0 => 0,
            HELD => 1,
            _ => match side.packed(side.word.load(Ordering::Relaxed)) {
                SIDE_WIDE => 1 + (side.wide)().map_or(0, |w| w.load(Ordering::Relaxed)),
                packed => 1 + packed,
            },
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::side::SIDE_MAX;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sixteen_atomics_drop_a_block() {
        let refs = BlockRefs::new();
        for index in (0..512).step_by(LANES).map(Position::new) {
            hold_lanes(refs.word(index).0, u32::MAX);
            assert_eq!(put_lanes(refs.word(index).0, u32::MAX), Dropped { last: u32::MAX, shared: 0, dead: 0 });
        }
        assert_eq!(refs.state.len(), 16);
        assert_eq!(size_of::<BlockRefs>(), 384);
    }

    proptest! {
        #![proptest_config(crate::bits::cases())]

        /// Against plain counters: any sequence of gets and puts on neighbouring lanes, far past the four bits.
        #[test]
        fn counts_like_counters(ops in proptest::collection::vec((0_usize..4, 0_u8..8), 0..400), wide in any::<bool>()) {
            let refs = BlockRefs::new();
            let mut memory = WideCounts::new();
            let slot = AtomicPtr::new(if wide { &raw mut memory } else { core::ptr::null_mut() });
            let mut model = [0_u64; 4];
            for (frame, op) in ops {
                let index = Position::new(30 + frame); // across a word border
                let (word, lane) = refs.word(index);
                let side = refs.side(index, &slot);
                let count = model[frame];
                let full = !wide && count == 1 + SIDE_MAX;
                match op {
                    0 => {
                        if count == 0 { hold(word, lane); }
                        model[frame] = count.max(1);
                    }
                    1 => {
                        prop_assert_eq!(freeze(word, lane, &side), count == 1);
                        if count == 1 { model[frame] = 0; }
                    }
                    2 | 3 => {
                        let expected = match count { 0 => Err(RefError::NotCounted), 1 => Ok(Put::Last), _ => Ok(Put::Kept) };
                        prop_assert_eq!(put(word, lane, &side), expected);
                        model[frame] = count.saturating_sub(1);
                    }
                    4 => {
                        let got = try_get(word, lane, &side);
                        let expected = match count { 0 => Ok(false), _ if full => Err(RefError::Saturated), _ => Ok(true) };
                        prop_assert_eq!(got, expected);
                        if count > 0 && !full { model[frame] += 1; }
                    }
                    _ => {
                        let expected = match count { 0 => Err(RefError::NotCounted), _ if full => Err(RefError::Saturated), _ => Ok(()) };
                        prop_assert_eq!(get(word, lane, &side), expected);
                        if count > 0 && !full { model[frame] += 1; }
                    }
                }
                for (frame, &count) in model.iter().enumerate() {
                    prop_assert_eq!(refs.count(Position::new(30 + frame), &slot), count);
                }
            }
        }
    }
}
