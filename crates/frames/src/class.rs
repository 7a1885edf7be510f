//! A stack of blocks of one order and mobility: what a CPU's cache consists of.
//!
//! Only its owner touches it, pinned, with relaxed loads and stores (see [`pcp`](crate::pcp)); others read the length.

use crate::frozen::Frozen;
use crate::highest::highest_first;
use hugemm_base::Pfn;
use hugemm_base::sync::{AtomicU64, Ordering};

/// Which way a class last went to its node, plus [`STREAK`] for each time in a row after the first, two at most.
const NEITHER: u64 = 0;
const REFILLED: u64 = 1;
const DRAINED: u64 = 2;
const STREAK: u64 = 4;

/// Entries that leave in one free, at most, each by another word: eight lock rounds of [`ROUNDS_PER_PIN`](crate::ROUNDS_PER_PIN), the rest of
/// which are for what is on its way already.
const AT_ONCE: u64 = 512;

/// A stack of blocks of one order and mobility.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Class<'m> {
    /// How many there are: never above `high`, but for a watermark that was lowered.
    len: AtomicU64,
    /// How many there may be: never above the entries.
    high: AtomicU64,
    /// The stack.
    entries: &'m [AtomicU64],
    /// Which way the class last went to its node, and how often in a row.
    last: AtomicU64,
    /// Where the watermark starts, and what it shrinks to.
    least: u64,
    /// How far it is raised where CPUs do not meet at the node; beyond that there are entries for [`widen`](Class::widen).
    usual: u64,
    /// How many frames, from the CPU's first local one on, are near: see [`PerCpu::is_near`](crate::pcp::PerCpu::is_near).
    near: AtomicU64,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Class<'_>>() == 64);

// Relaxed throughout: only the owner writes, and nobody draws a conclusion from what they read (see the protocol).
impl<'m> Class<'m> {
    /// A class over entries, with a watermark of `least` at least and `usual` in general, to which `near` frames are near.
    pub(crate) fn new(entries: &'m [AtomicU64], least: u64, usual: u64, near: u64) -> Self {
        let (least, usual) = (least.min(entries.len() as u64), usual.min(entries.len() as u64));
        let (len, high, last) = (AtomicU64::new(0), AtomicU64::new(least), AtomicU64::new(NEITHER));
        Class { len, high, entries, last, least, usual, near: AtomicU64::new(near) }
    }

    /// How many frames are near.
    #[inline]
    pub(crate) fn near(&self) -> u64 {
        self.near.load(Ordering::Relaxed)
    }

    /// From now on, `frames` are near.
    #[inline(never)]
    pub(crate) fn set_near(&self, frames: u64) {
        self.near.store(frames, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    #[inline]
    fn entry(&self, index: u64) -> &AtomicU64 {
        debug_assert!(index < self.entries.len() as u64);
        // SAFETY: every index is below `len`, or is `len` where that is below `high`; `push` alone raises `len`, and to
        // `high` at most, which `new`, `note` and `shrink` keep at the entries or below.
        unsafe { self.entries.get_unchecked(index as usize) }
    }

    /// The most recently freed block: three loads, a store and a branch.
    #[inline]
    pub(crate) fn pop(&self) -> Option<Frozen> {
        let len = self.len.load(Ordering::Relaxed).checked_sub(1)?;
        let word = self.entry(len).load(Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        // SAFETY: what is below `len` was pushed, and this is not any more.
        Some(unsafe { Frozen::from_word(word) })
    }

    /// The lowest block, if it lies below a frame. O(len).
    #[inline]
    pub(crate) fn pop_lowest(&self, end: Pfn) -> Option<Frozen> {
        if self.len() > 1 {
            self.sort();
        }
        let last = self.len.load(Ordering::Relaxed).checked_sub(1)?;
        // SAFETY: what is below `len` was pushed. It is looked at, not popped and pushed: there may be more than a watermark that was
        // lowered lets in.
        let lowest = unsafe { Frozen::from_word(self.entry(last).load(Ordering::Relaxed)) };
        if lowest.pfn() < end { self.pop() } else { None }
    }

    /// The lowest block comes last.
    fn sort(&self) {
        let _ = self.in_order(0);
    }

    /// Whether the block that `pop` would return is known to be zero.
    pub(crate) fn next_is_zero(&self) -> bool {
        let last = self.len.load(Ordering::Relaxed).checked_sub(1);
        // SAFETY: as above.
        last.is_some_and(|last| unsafe { Frozen::from_word(self.entry(last).load(Ordering::Relaxed)) }.is_zero())
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

    /// Adds blocks for as long as there is room. What is beyond is lost: whoever fetches them asks [`want`](Class::want) first.
    pub(crate) fn extend(&self, blocks: impl Iterator<Item = Frozen>) {
        let (mut len, high) = (self.len(), self.high.load(Ordering::Relaxed));
        for block in blocks.take(high.saturating_sub(len) as usize) {
            self.entry(len).store(block.into_word(), Ordering::Relaxed);
            len += 1;
        }
        self.len.store(len, Ordering::Relaxed);
    }

    /// The cache ran empty: raises the watermark if that keeps happening, and says how many to fetch: half of what there
    /// may be, or all if it does keep happening.
    pub(crate) fn want(&self) -> u64 {
        let again = self.note(REFILLED);
        let high = self.high.load(Ordering::Relaxed);
        if again { high } else { (high / 2).max(1) }
    }

    /// The cache is full: raises the watermark if that keeps happening, and says how many must go: three quarters, or all if
    /// it does keep happening: whoever only frees takes nothing soon, and nobody has to choose. 0: there is room now. Of a cache that was
    /// widened so many at a time that the lock rounds of one free stay bounded.
    pub(crate) fn excess(&self) -> u64 {
        let again = self.note(DRAINED);
        let high = self.high.load(Ordering::Relaxed);
        let keep = if again { 0 } else { high / 4 };
        if self.len() < high { 0 } else { (self.len() - keep).min(AT_ONCE) }
    }

    /// Returns whether the same has happened three times in a row or more. Twice proves nothing: whoever takes and frees at
    /// random gets there as often as not.
    fn note(&self, event: u64) -> bool {
        let last = self.last.load(Ordering::Relaxed);
        let same = last % STREAK == event;
        let streak = if same { (last / STREAK + 1).min(2) } else { 0 };
        let high = self.high.load(Ordering::Relaxed);
        let high = match (same, streak) {
            (false, _) => self.least,
            (true, 1) => high,
            _ => (high * 2).min(self.usual.max(high)),
        };
        self.high.store(high, Ordering::Relaxed);
        self.last.store(event + streak * STREAK, Ordering::Relaxed);
        streak == 2
    }

    /// Another CPU was at the node when this class was refilled. If that keeps happening in one direction, batches become larger than they
    /// usually are, so that fewer CPUs meet there.
    pub(crate) fn widen(&self) {
        if self.last.load(Ordering::Relaxed) == REFILLED + 2 * STREAK {
            let high = self.high.load(Ordering::Relaxed) * 2;
            self.high.store(high.min(self.entries.len() as u64), Ordering::Relaxed);
        }
    }

    /// Back to the smallest size.
    #[inline(never)]
    pub(crate) fn shrink(&self) {
        self.high.store(self.least, Ordering::Relaxed);
        self.last.store(NEITHER, Ordering::Relaxed);
    }

    /// A block of this class has been freed that is not to be allocated again: whoever frees as much as it takes needs no larger cache,
    /// wherever that lies.
    pub(crate) fn note_given_back(&self) {
        if self.last.load(Ordering::Relaxed) % STREAK != DRAINED {
            self.note(DRAINED);
        }
    }

    /// Whether the class caches anything at all.
    #[inline]
    pub(crate) fn enabled(&self) -> bool {
        !self.entries.is_empty()
    }

    /// Hands up to `count` entries over, those that lie highest, in any order, and keeps the lowest, the lowest of all on top.
    /// They are counted until `f` returns, so that nobody takes a cache that is being drained for an empty one. O(len).
    pub(crate) fn drain_highest(&self, count: u64, f: impl FnOnce(&mut [u64])) {
        let (count, words) = self.in_order(count);
        f(&mut words[..count]);
        words.copy_within(count.., 0);
        self.len.store((words.len() - count) as u64, Ordering::Relaxed);
    }

    /// How many of `count` there are, and all entries, so many of the highest first. One copy of it for all who drain.
    #[inline(never)]
    #[allow(clippy::mut_from_ref, reason = "as `plain`, for the owner, who has no other way to them meanwhile")]
    fn in_order(&self, count: u64) -> (usize, &mut [u64]) {
        let len = self.len();
        let count = count.min(len) as usize;
        // SAFETY: there are at least `len` entries (see `entry`), and what gets them knows nothing of this class.
        let words = unsafe { plain(self.entries, len as usize) };
        highest_first(words, count);
        (count, words)
    }
}

/// The first `count` entries as plain words.
///
/// # Safety
///
/// There are as many. The caller is their owner, pinned, so that nobody else touches them, and reaches them in no
/// other way while it has the slice.
#[cfg(not(loom))]
#[allow(clippy::mut_from_ref, reason = "the entries are atomics that only the owner touches")]
pub(crate) unsafe fn plain(entries: &[AtomicU64], count: usize) -> &mut [u64] {
    // SAFETY: in bounds and unaliased by the contract; an `AtomicU64` has the layout of a `u64` and may be written where
    // it is shared.
    unsafe { core::slice::from_raw_parts_mut(entries.as_ptr().cast_mut().cast(), count) }
}

/// loom's atomics are no plain words; its tests do not come here.
#[cfg(loom)]
#[allow(clippy::mut_from_ref, reason = "as above")]
pub(crate) unsafe fn plain(_: &[AtomicU64], _: usize) -> &mut [u64] {
    unreachable!("loom runs the protocols, not the cache")
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::mobility::Mobility;
    use hugemm_base::Order;

    fn block(pfn: u64) -> Frozen {
        Frozen::make(Pfn::new(pfn), Order::ZERO, Mobility::Movable, false)
    }

    const LEAST: u64 = 8;

    /// What is not taken stays, also where there is more than the watermark lets in.
    #[test]
    fn the_lowest_is_taken_or_stays() {
        let entries: [AtomicU64; 32] = core::array::from_fn(|_| AtomicU64::new(0));
        let class = Class::new(&entries, 2, 32, 0);
        class.high.store(8, Ordering::Relaxed);
        for pfn in [7, 3, 9, 5] {
            assert!(class.push(block(pfn)).is_ok());
        }
        class.shrink();
        assert!(class.pop_lowest(Pfn::new(3)).is_none());
        assert_eq!(class.len(), 4);
        assert_eq!(class.pop_lowest(Pfn::new(4)).map(|block| block.pfn().get()), Some(3));
        assert_eq!(class.len(), 3);
        let lowest = || class.pop_lowest(Pfn::new(10)).map(|block| block.pfn().get());
        // Of three, of two, and the one that is left.
        assert_eq!([lowest(), lowest(), lowest(), lowest()], [Some(5), Some(7), Some(9), None]);
        for pfn in [3, 7] {
            assert!(class.push(block(pfn)).is_ok());
        }
        assert_eq!(lowest(), Some(3), "not the one that came last");
    }

    #[test]
    fn a_class_grows_for_streaks_only() {
        let entries: Vec<AtomicU64> = (0..64).map(|_| AtomicU64::new(0)).collect();
        let class = Class::new(&entries, LEAST, 64, u64::MAX);
        // Both ways by turns: as small as can be.
        for _ in 0..4 {
            assert_eq!(class.want(), LEAST / 2);
            assert_eq!(class.excess(), 0);
        }
        // One way: all that there may be, from the third time on.
        let wants: Vec<u64> = (0..6).map(|_| class.want()).collect();
        assert_eq!(wants, [LEAST / 2, LEAST / 2, 2 * LEAST, 4 * LEAST, 64, 64]);
        assert_eq!(class.excess(), 0);
    }

    /// Who meets others at the node fetches more than who does not, as long as it goes on fetching, and never more than there are entries.
    #[test]
    fn a_class_is_wider_where_cpus_meet() {
        let entries: Vec<AtomicU64> = (0..64).map(|_| AtomicU64::new(0)).collect();
        let class = Class::new(&entries, LEAST, 32, u64::MAX);
        let met = || {
            let want = class.want();
            class.widen();
            want
        };
        let wants: Vec<u64> = (0..6).map(|_| class.want()).collect();
        assert_eq!(wants, [LEAST / 2, LEAST / 2, 16, 32, 32, 32], "alone");
        assert_eq!([met(), met(), met()], [32, 64, 64]);
        assert_eq!(class.want(), 64, "and so it stays");
        // Room is there already; what comes in the other direction is no reason.
        let _ = class.excess();
        assert_eq!([met(), met()], [LEAST / 2, LEAST / 2]);
    }

    #[test]
    fn blocks_that_go_back_are_a_change_of_direction() {
        let entries: Vec<AtomicU64> = (0..64).map(|_| AtomicU64::new(0)).collect();
        let class = Class::new(&entries, LEAST, 64, u64::MAX);
        for _ in 0..8 {
            assert_eq!(class.want(), LEAST / 2, "no reason to fetch more: as much is given back");
            class.note_given_back();
        }
    }

    #[test]
    fn the_highest_go() {
        let entries: Vec<AtomicU64> = (0..8).map(|_| AtomicU64::new(0)).collect();
        let class = Class::new(&entries, LEAST, 64, u64::MAX);
        for pfn in [5, 1, 7, 3] {
            assert_eq!(class.push(block(pfn)), Ok(()));
        }
        class.drain_highest(2, |words| {
            words.sort_unstable();
            assert_eq!(words, [5, 7].map(|pfn| block(pfn).into_word()));
        });
        assert_eq!((class.pop(), class.pop(), class.pop()), (Some(block(1)), Some(block(3)), None));
    }

    fn filled(class: &Class<'_>) -> u64 {
        for pfn in class.len()..200 {
            if class.push(block(pfn)).is_err() {
                break;
            }
        }
        class.len()
    }

    /// Three quarters go, or all of what is full again and again; then there is more room, to the most that there may be.
    #[test]
    fn a_full_class_keeps_a_quarter_or_nothing() {
        let entries: Vec<AtomicU64> = (0..64).map(|_| AtomicU64::new(0)).collect();
        let class = Class::new(&entries, LEAST, 64, u64::MAX);
        assert_eq!((filled(&class), class.excess(), class.excess()), (LEAST, 6, 6));
        let mut sizes = Vec::new();
        for _ in 0..4 {
            // Room is made by growing, until there is no more to grow.
            sizes.push((class.excess(), filled(&class)));
        }
        assert_eq!(sizes, [(0, 16), (0, 32), (0, 64), (64, 64)]);
        class.shrink();
        assert_eq!(class.excess(), 64 - LEAST / 4, "as small as at first, and the first time again");
    }

    #[test]
    fn what_comes_next_is_known_without_taking_it() {
        let entries: Vec<AtomicU64> = (0..10).map(|_| AtomicU64::new(0)).collect();
        let class = Class::new(&entries, LEAST, 64, 3);
        assert!(!class.next_is_zero() && class.enabled() && !Class::new(&[], LEAST, 64, 3).enabled());
        assert_eq!(class.push(Frozen::make(Pfn::new(1), Order::ZERO, Mobility::Movable, true)), Ok(()));
        assert!(class.next_is_zero());
        assert_eq!(class.push(block(2)), Ok(()));
        assert!(!class.next_is_zero());
        assert_eq!((class.len(), class.near()), (2, 3));
        class.set_near(9);
        assert_eq!(class.near(), 9);
    }
}
