//! Unmapping now and flushing later: reclaim unmaps many pages of many spaces and pays one flush for all of them.
//!
//! Two kinds of people depend on such a flush.
//!
//! *Whoever unmapped* must not write a page out, or free it, while some CPU can still store into it. A [`DeferredUnmap`]
//! gathers the CPUs that may, over all spaces, and its [`flush`](DeferredUnmap::flush), one round of requests, gives the
//! receipt that releases the pages.
//!
//! *Whoever meets the entries later* finds them empty or read-only and could conclude that nobody uses the old
//! translation. That holds only if the deferred flush has been done. So each space has a packed word of two counts: how
//! many deferred unmaps there have been (*pending*), and how many of those are known to be flushed. Before relying on
//! entries, [`TlbSpace::settle`] flushes the space if the two differ.
//!
//! Unmapping and relying are serialised by the lock of the space's tables: [`DeferredUnmap::unmapped`] is called under the
//! lock under which the entries were changed, and `settle` under it too (a lock that is never taken with interrupts off).
//! Without that, one could see the empty entry and not yet the count.
//!
//! Each unmap also counts the space's generation, so a CPU that switches to the space later catches up by itself and
//! need not be among those gathered.
//!
//! Those CPUs let go of what they keep of tables too, which costs nothing where all leaves go. What was unmapped may be in a table that
//! somebody else has detached as a whole and not flushed yet, and by the table they would load it anew. As a receipt neither flush
//! pays for tables: CPUs that are lazily in a space are left out, and use nothing of it.
//!
//! Whose CPUs are gathered is said once, by whoever answers for their being there:
//!
//! ```compile_fail,E0133
//! # use hugemm_paging::{Counting, DeferredUnmap, TlbShootdown};
//! fn rule(shootdown: &TlbShootdown<'_, Counting>) {
//!     let _deferred = DeferredUnmap::new(shootdown); // error: unsafe
//! }
//! ```

use crate::ipi::{ANY_SPACE, Request};
use crate::stale::Stale;
use crate::tlb_shootdown::{TlbShootdown, TlbShootdownError, same_machine};
use crate::tlb_space::{Keep, TlbSpace, UserSpace};
use core::fmt;
use hugemm_base::platform::Cpu;
use hugemm_base::sync::{AtomicBool, AtomicU64, AtomicWord, Ordering, spin_loop};
use hugemm_base::{
    CpuCx, FlushDomain, Flushed, Invalidation, Pending, Quarantine, TlbFlush, TlbHw, TlbScope, VirtRange,
};

/// The pure transitions of a space's word: pending count in the low half, flushed count in the high half. Both wrap; they
/// are compared by their difference, which is kept below 2^31.
pub(crate) mod word {
    /// How far the flushed count may be behind.
    const FURTHEST: u32 = i32::MAX as u32;

    /// One more unmap is pending. A space that nobody settles for very long has its flushed count taken along: it stays
    /// behind, so nothing is taken for flushed, and a flush that began before is not taken for a later one.
    pub(crate) const fn unmapped(word: u64) -> u64 {
        let (pending, flushed) = (word as u32, (word >> 32) as u32);
        let flushed = flushed.wrapping_add((pending.wrapping_sub(flushed) >= FURTHEST) as u32);
        (flushed as u64) << 32 | pending.wrapping_add(1) as u64
    }

    /// The pending count, if it is ahead of the flushed one.
    pub(crate) const fn pending(word: u64) -> Option<u32> {
        let (pending, flushed) = (word as u32, (word >> 32) as u32);
        if pending == flushed { None } else { Some(pending) }
    }

    /// A flush that started when `pending` was read is done. `None` if a later one is done already.
    pub(crate) const fn flushed(word: u64, pending: u32) -> Option<u64> {
        let ahead = pending.wrapping_sub((word >> 32) as u32) as i32;
        if ahead > 0 { Some((pending as u64) << 32 | word & 0xffff_ffff) } else { None }
    }
}

/// The domain of one [`DeferredUnmap`].
#[derive(Debug)]
pub enum Deferred {}

/// Pages unmapped from any number of spaces, waiting for one flush. One per reclaiming worker.
pub struct DeferredUnmap<Q = Keep, M = [AtomicU64; 2]> {
    domain: FlushDomain<Deferred, Q>,
    /// CPUs that may hold translations of what was unmapped; then those that the flush under way is asking.
    masks: M,
    /// Held by the flush under way: the next must not find the mask empty before this one's CPUs have answered.
    flushing: AtomicBool,
    /// Whose CPUs they are: [`TlbShootdown::machine`].
    machine: usize,
    words: usize,
}

impl<Q, M> fmt::Debug for DeferredUnmap<Q, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeferredUnmap").finish_non_exhaustive()
    }
}

impl DeferredUnmap {
    /// For at most 64 CPUs.
    ///
    /// # Errors
    ///
    /// [`TooFewWords`](TlbShootdownError::TooFewWords) if there are more than 64 CPUs: use
    /// [`with_masks`](DeferredUnmap::with_masks).
    ///
    /// # Safety
    ///
    /// As [`with_masks`](DeferredUnmap::with_masks).
    pub unsafe fn new<H: TlbHw>(shootdown: &TlbShootdown<'_, H>) -> Result<Self, TlbShootdownError> {
        // SAFETY: the caller's promise, passed on.
        unsafe { Self::with_masks(shootdown, Keep, [AtomicU64::new(0), AtomicU64::new(0)]) }
    }
}

impl<Q, M: AsRef<[AtomicU64]>> DeferredUnmap<Q, M> {
    /// Nothing unmapped yet. `masks` has two words for each 64 CPUs, all 0.
    ///
    /// # Errors
    ///
    /// [`TooFewWords`](TlbShootdownError::TooFewWords) says how many words of masks it takes.
    ///
    /// # Safety
    ///
    /// The slices of `shootdown` are there as long as it is used. Its methods take that, or another view of them, and spaces that were made
    /// with one, and panic otherwise.
    pub unsafe fn with_masks<H: TlbHw>(
        shootdown: &TlbShootdown<'_, H>,
        quarantine: Q,
        masks: M,
    ) -> Result<Self, TlbShootdownError> {
        let words = TlbShootdown::<H>::mask_words(shootdown.cpus());
        let (needed, given) = (2 * words, masks.as_ref().len());
        if given < needed {
            return Err(TlbShootdownError::TooFewWords { needed, given });
        }
        let (domain, machine) = (FlushDomain::new(quarantine), shootdown.machine());
        Ok(DeferredUnmap { domain, masks, flushing: AtomicBool::new(false), machine, words })
    }

    /// Its flush domain.
    pub fn domain(&self) -> &FlushDomain<Deferred, Q> {
        &self.domain
    }

    /// Panics unless it was made with `shootdown`, or another view of the same slices: for who is about to take away what is hard to put back.
    pub fn assert_of<H: TlbHw>(&self, shootdown: &TlbShootdown<'_, H>) {
        same_machine(self.machine, shootdown.machine());
    }

    /// Leaf entries of `space` in `range` that pointed to `value` have been made non-present. Called under the lock under
    /// which that was done; no tables may have been unhooked. 3 full fences, 2 atomics and 1 per 64 CPUs; waits for
    /// nobody.
    pub fn unmapped<T, R, N: AsRef<[AtomicU64]>>(
        &self,
        space: &TlbSpace<UserSpace, R, N>,
        value: T,
        range: VirtRange,
    ) -> Pending<T, TlbFlush<'_, Deferred, Q>>
    where
        Q: Quarantine<T>,
    {
        same_machine(self.machine, space.machine);
        // Who joins after this sees the generation; who has joined is in the mask, as in a shootdown of the space.
        space.domain.advance();
        for (gathered, users) in self.masks.as_ref().iter().zip(space.users()) {
            // Acquire as in a shootdown. Release pairs with the Acquire of the swap in `flush`: whoever takes the bit
            // away flushes after our entry stores. Always a read-modify-write: a bit found set may be about to be taken
            // by a flush that does not see them.
            gathered.fetch_or(users.load(Ordering::Acquire), Ordering::Release);
        }
        // Release pairs with the Acquire in `settle` (whose caller the lock has put after us anyway). It always succeeds.
        let _ = AtomicWord::transition(&space.deferred, Ordering::Release, Ordering::Relaxed, |now| {
            Some(word::unmapped(now))
        });
        self.domain.unhooked(value, range)
    }

    /// Flushes everything that was unmapped before the call, on every CPU that may use it: before the pages are written
    /// out or freed. The receipt releases them. May not be called with interrupts off.
    pub fn flush<P: Cpu, H: TlbHw>(
        &self,
        shootdown: &TlbShootdown<'_, H>,
        cx: &CpuCx<'_, P>,
    ) -> Flushed<'_, Deferred, Q> {
        self.assert_of(shootdown);
        let need = self.domain.due();
        // Acquire pairs with the Release below: the flush before us has had its answers.
        while self.flushing.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            shootdown.handle_ipi(cx);
            spin_loop();
        }
        let latest = self.domain.latest(false);
        let receipt = if latest.generation() >= need {
            latest
        } else {
            let invalidate = |_| {
                let (gathered, asked) = self.masks.as_ref().split_at(self.words);
                for (gathered, asked) in gathered.iter().zip(asked) {
                    // Acquire pairs with the Release in `unmapped`. Relaxed: only the flush under way uses it.
                    asked.store(gathered.swap(0, Ordering::Acquire), Ordering::Relaxed);
                }
                let what = Invalidation::ALL;
                let request = Request { space: ANY_SPACE, generation: 0, scope: TlbScope::Space, unload: false, what };
                shootdown.shoot(cx, asked, None, &request);
            };
            // SAFETY: `shootdown` has the CPUs of the spaces, as was asserted. Those that could use a translation
            // unmapped before the count were gathered before it; each
            // either invalidates everything now, or was taken by an earlier flush that did so after that unmap and is
            // over, or has left the space since and sees the space's generation before it uses it again.
            unsafe { self.domain.flush(&Invalidation::ALL_LEAVES, invalidate) }
        };
        self.flushing.store(false, Ordering::Release);
        receipt
    }
}

impl<Q, M: AsRef<[AtomicU64]>> TlbSpace<UserSpace, Q, M> {
    /// What an operation has left stale is pending, until somebody [settles](Self::settle) the space, which the caller does before he
    /// relies on it: changes to several ranges cost one flush. Called under the lock under which it was done; no tables may have been
    /// unhooked. Nothing if nothing is stale; one atomic otherwise.
    pub fn owe(&self, stale: Stale) {
        if stale.flush().is_some() {
            self.owe_flush();
        }
    }

    /// The same for what somebody else may have left stale, who has not flushed yet.
    pub fn owe_flush(&self) {
        // Release as in `DeferredUnmap::unmapped`. It always succeeds.
        let _ = AtomicWord::transition(&self.deferred, Ordering::Release, Ordering::Relaxed, |now| {
            Some(word::unmapped(now))
        });
    }

    /// Whether something that is pending has not been flushed yet. Exact under the lock under which it became so; one load.
    pub fn owes(&self) -> bool {
        // Acquire: as in `settle`.
        word::pending(AtomicWord::load(&self.deferred, Ordering::Acquire)).is_some()
    }

    /// Makes sure that entries found empty or demoted are so for every CPU: flushes the space if a deferred unmap of its
    /// pages may still be unflushed. Called under the lock of its tables (see the [module](self)), or after it by whoever has had it,
    /// not with interrupts off. One load if there is nothing to do.
    pub fn settle<P: Cpu, H: TlbHw>(&self, shootdown: &TlbShootdown<'_, H>, cx: &CpuCx<'_, P>) {
        same_machine(self.machine, shootdown.machine());
        // Acquire pairs with the Release in `DeferredUnmap::unmapped`.
        let Some(pending) = word::pending(AtomicWord::load(&self.deferred, Ordering::Acquire)) else { return };
        let what = Invalidation::ALL;
        let invalidate = |generation| {
            let request = Request { space: self.id, generation, scope: TlbScope::Space, unload: false, what };
            shootdown.shoot(cx, self.users(), Some(self.lazy()), &request);
        };
        // SAFETY: as in `ShootdownBatch::flush`, for all addresses and no tables.
        let _receipt = unsafe { self.domain.flush(&Invalidation::ALL_LEAVES, invalidate) };
        // Release: whoever finds the count settled comes after the flush. The error is that a later one is done.
        let _ = AtomicWord::transition(&self.deferred, Ordering::Release, Ordering::Relaxed, |now| {
            word::flushed(now, pending)
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::word;
    use proptest::prelude::*;

    #[test]
    fn counts_wrap() {
        let start = 0xffff_ffff_ffff_ffff;
        assert_eq!(word::pending(start), None);
        let one = word::unmapped(start);
        assert_eq!((one as u32, one >> 32, word::pending(one)), (0, 0xffff_ffff, Some(0)));
        assert_eq!(word::flushed(one, 0), Some(0));
    }

    /// 2^32 unmaps of a space that nobody settles do not make it look settled, and a flush that began before the last of
    /// them settles nothing.
    #[test]
    fn what_was_never_flushed_is_never_settled() {
        for flushed in [0_u32, 7, u32::MAX] {
            for behind in [1, i32::MAX as u32 - 1, i32::MAX as u32, u32::MAX] {
                let mut now = u64::from(flushed) << 32 | u64::from(flushed.wrapping_add(behind));
                for _ in 0..4 {
                    let began = word::pending(now).expect("pending");
                    now = word::unmapped(now);
                    assert!(word::pending(now).is_some(), "{behind}");
                    let settled = word::flushed(now, began).unwrap_or(now);
                    assert!(word::pending(settled).is_some(), "{behind}");
                }
                if behind < u32::MAX {
                    let all = word::flushed(now, word::pending(now).expect("pending")).expect("a later flush");
                    assert_eq!(word::pending(all), None);
                }
            }
        }
    }

    proptest! {
        /// Against two plain counters, from any point of the wrap: a space is settled exactly if a flush that started at
        /// the latest unmap is done, in whichever order flushes end.
        #[test]
        fn a_word_is_two_counters(start in any::<u32>(), steps in proptest::collection::vec(0u8..3, 1..200)) {
            let mut now = u64::from(start) << 32 | u64::from(start);
            let (mut unmapped, mut flushed, mut under_way) = (0_u64, 0, Vec::new());
            for step in steps {
                match step {
                    0 => {
                        now = word::unmapped(now);
                        unmapped += 1;
                    }
                    1 => under_way.extend(word::pending(now).map(|pending| (pending, unmapped))),
                    _ => {
                        // The one that started last ends first: the order that needs care.
                        if let Some((pending, at)) = under_way.pop() {
                            now = word::flushed(now, pending).unwrap_or(now);
                            flushed = flushed.max(at);
                        }
                    }
                }
                prop_assert_eq!(word::pending(now).is_none(), flushed == unmapped);
            }
        }
    }
}
