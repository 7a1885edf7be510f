//! What other CPUs may do to a slab without waiting for anybody: give a piece back, and tell the slab's owner that they did.
//!
//! # Protocol
//!
//! * A slab has a [`Remote`]: a stack of the pieces that others have freed. Anybody pushes; only the owner takes, all of them
//!   at once. So a push that was overtaken finds another word or one that means the same: no ABA problem.
//! * An owner with no more pieces in a slab puts it to [`sleep`](Remote::sleep). The first push after that wakes it: who makes
//!   that push also pushes the slab onto its owner's [`Woken`] list, and is done with it then. Later pushes have nothing to say.
//! * So a slab is on the list at most once, from the push that found it asleep until the owner has taken the list, and only in
//!   between may its link be written by another CPU. An owner that gives the memory back first makes sure that the slab is
//!   neither asleep nor on the way: [`wake`](Remote::wake).
//!
//! A free from another CPU costs one compare-and-swap, the first one of a slab two. Generic over the words so that loom runs it.

use hugemm_base::sync::{AtomicWord, Ordering};

/// Whoever pushes next tells the owner.
const ASLEEP: u64 = 1 << 63;
const COUNT_SHIFT: u32 = 32;

/// The pieces of a slab that other CPUs have freed: offset of the first one (0: none) from bit 0, how many from bit 32,
/// [`ASLEEP`]. Each piece holds the offset of the next.
#[derive(Debug)]
pub(crate) struct Remote<W>(W);

impl<W: AtomicWord> Remote<W> {
    /// No pieces, and awake: made of a word that is zero.
    pub(crate) const fn new(word: W) -> Self {
        Remote(word)
    }

    /// Gives the piece at `offset` back. `link` stores in it the offset that it is given. Whether the slab was asleep: then the
    /// caller pushes it onto its owner's list.
    pub(crate) fn push(&self, offset: u32, mut link: impl FnMut(u32)) -> bool {
        // Release pairs with the Acquire in `take` and `count`: the link, and the pusher's last use of the piece, come before.
        // Acquire pairs with the Release in `sleep`: the owner has read the slab's link in the list of woken ones before.
        let before = self.0.transition(Ordering::AcqRel, Ordering::Relaxed, |word| {
            link(word as u32);
            Some(((((word & !ASLEEP) >> COUNT_SHIFT) + 1) << COUNT_SHIFT) + u64::from(offset))
        });
        before.is_ok_and(|word| word & ASLEEP != 0)
    }

    /// The owner's: takes all pieces. Offset of the first, and how many.
    pub(crate) fn take(&self) -> Option<(u32, u32)> {
        // Acquire pairs with the Release in `push`.
        let taken = self.0.transition(Ordering::Acquire, Ordering::Relaxed, |word| (word as u32 != 0).then_some(0));
        taken.ok().map(|word| (word as u32, (word >> COUNT_SHIFT) as u32))
    }

    /// The owner's: asks to be told of the next push; not if there are pieces.
    pub(crate) fn sleep(&self) -> bool {
        // Release pairs with the Acquire in `push`.
        self.0.transition(Ordering::Release, Ordering::Relaxed, |word| (word == 0).then_some(ASLEEP)).is_ok()
    }

    /// The owner's: withdraws that. Not if somebody is telling already.
    pub(crate) fn wake(&self) -> bool {
        // Relaxed: nobody has done anything.
        self.0.transition(Ordering::Relaxed, Ordering::Relaxed, |word| (word == ASLEEP).then_some(0)).is_ok()
    }

    /// The owner's: how many pieces there are.
    pub(crate) fn count(&self) -> u32 {
        // Acquire pairs with the Release in `push`: who finds all pieces here may give their memory to others.
        ((self.0.load(Ordering::Acquire) & !ASLEEP) >> COUNT_SHIFT) as u32
    }
}

/// Slabs that were asleep and have been given pieces: the address of the first one, 0 for none. Each holds the address of the
/// next.
#[derive(Debug)]
pub(crate) struct Woken<W>(W);

impl<W: AtomicWord> Woken<W> {
    /// No slabs: made of a word that is zero.
    pub(crate) const fn new(word: W) -> Self {
        Woken(word)
    }

    /// Adds the slab at `address`, which a [`Remote::push`] of the caller's has found asleep. `link` stores in it the address
    /// that it is given.
    pub(crate) fn push(&self, address: u64, mut link: impl FnMut(u64)) {
        // Release pairs with the Acquire in `take`: the link is there before the slab is.
        let _ = self.0.transition(Ordering::Release, Ordering::Relaxed, |first| {
            link(first);
            Some(address)
        });
    }

    /// The owner's: takes all slabs. The address of the first.
    pub(crate) fn take(&self) -> u64 {
        // Acquire pairs with the Release in `push`.
        let taken = self.0.transition(Ordering::Acquire, Ordering::Relaxed, |first| (first != 0).then_some(0));
        taken.unwrap_or(0)
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use hugemm_base::sync::AtomicU64;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    const PIECES: usize = 3;

    /// A word that loom sees being changed also where it is only read: of the accesses before a change it remembers the last, so
    /// that a read by who makes the change hides an earlier one by another thread, and the orders of these two are not explored.
    #[derive(Default)]
    struct Word(AtomicU64);

    impl AtomicWord for Word {
        fn load(&self, order: Ordering) -> u64 {
            self.0.fetch_add(0, order)
        }

        fn store(&self, value: u64, order: Ordering) {
            self.0.store(value, order);
        }

        fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
            self.0.fetch_add(value, order)
        }

        fn compare_exchange_weak(&self, current: u64, new: u64, yes: Ordering, no: Ordering) -> Result<u64, u64> {
            self.0.compare_exchange_weak(current, new, yes, no)
        }
    }

    /// A slab of three pieces, at offsets 1 to 3, and its owner's list. Links and content are cells in which loom sees every
    /// access that is not ordered.
    struct Slab {
        remote: Remote<Word>,
        woken: Woken<Word>,
        link: UnsafeCell<u64>,
        pieces: [UnsafeCell<u32>; PIECES],
    }

    impl Slab {
        fn new() -> Arc<Self> {
            Arc::new(Slab {
                remote: Remote::new(Word::default()),
                woken: Woken::new(Word::default()),
                link: UnsafeCell::new(0),
                pieces: std::array::from_fn(|_| UnsafeCell::new(0)),
            })
        }

        fn set(&self, offset: u32, value: u32) {
            // SAFETY: whoever has the piece; loom checks it.
            self.pieces[offset as usize - 1].with_mut(|piece| unsafe { *piece = value });
        }

        fn get(&self, offset: u32) -> u32 {
            // SAFETY: as above.
            self.pieces[offset as usize - 1].with(|piece| unsafe { *piece })
        }

        /// What another CPU does.
        fn free(&self, offset: u32) {
            if self.remote.push(offset, |next| self.set(offset, next)) {
                // SAFETY: only who has woken the slab writes its link; loom checks it.
                self.woken.push(77, |next| self.link.with_mut(|link| unsafe { *link = next }));
            }
        }

        /// The owner takes everything, and uses it; how many pieces that were.
        fn collect(&self) -> u32 {
            let Some((mut offset, count)) = self.remote.take() else { return 0 };
            let mut seen = 0;
            while offset != 0 {
                let next = self.get(offset);
                self.set(offset, 99);
                (offset, seen) = (next, seen + 1);
            }
            assert_eq!(seen, count);
            count
        }

        /// The owner serves its list; whether the slab was on it.
        fn serve(&self) -> bool {
            let first = self.woken.take();
            // SAFETY: the list was taken; loom checks that the writer is done.
            assert!(first == 0 || self.link.with(|link| unsafe { *link }) == 0, "on the list twice");
            first != 0
        }
    }

    /// Two CPUs free while the owner takes: no piece is lost or there twice, and each is seen as its freer left it. Fails with the
    /// Release of `push` or the Acquire of `take` relaxed.
    #[test]
    fn pieces_that_others_free_come_to_the_owner() {
        loom::model(|| {
            let slab = Slab::new();
            let (a, b) = (Arc::clone(&slab), Arc::clone(&slab));
            let first = thread::spawn(move || {
                a.free(1);
                a.free(2);
            });
            let second = thread::spawn(move || b.free(3));
            let early = slab.collect();
            first.join().unwrap();
            second.join().unwrap();
            assert_eq!(early + slab.collect(), 3);
        });
    }

    /// A slab that sleeps is on the list once, however many free, and sleeps again after it was served. Fails with `sleep`'s
    /// Release or `push`'s Acquire relaxed (the link is written while the owner may still read it), and with the Release or
    /// Acquire of the list relaxed.
    #[test]
    fn a_sleeping_slab_is_announced_once() {
        loom::model(|| {
            let slab = Slab::new();
            assert!(slab.remote.sleep() && !slab.remote.sleep());
            let (a, b) = (Arc::clone(&slab), Arc::clone(&slab));
            let first = thread::spawn(move || a.free(1));
            let second = thread::spawn(move || {
                b.free(2);
                b.free(3);
            });
            let (mut asleep, mut pieces) = (true, 0);
            if slab.serve() {
                pieces += slab.collect();
                // It may have got more meanwhile; if not, it is to be announced again.
                asleep = slab.remote.sleep();
            }
            first.join().unwrap();
            second.join().unwrap();
            // Announced if somebody has freed since it fell asleep, and else asleep still.
            assert_eq!(slab.serve(), asleep && !slab.remote.wake());
            pieces += slab.collect();
            assert_eq!(pieces, 3);
        });
    }

    /// An owner that finds all pieces freed gives the memory away, unless somebody is about to touch the slab. Fails if `wake`
    /// answers yes when there is nothing to withdraw.
    #[test]
    fn memory_is_given_away_when_nobody_comes_any_more() {
        loom::model(|| {
            let slab = Slab::new();
            assert!(slab.remote.sleep());
            let other = Arc::clone(&slab);
            let freer = thread::spawn(move || other.free(1));
            let asleep = !slab.serve();
            if slab.remote.count() == 1 && (!asleep || slab.remote.wake()) {
                slab.set(1, 55);
                // SAFETY: nobody else has the slab; loom checks it.
                slab.link.with_mut(|link| unsafe { *link = 55 });
            }
            freer.join().unwrap();
        });
    }

    /// The same of a slab that did not sleep, whose count alone says that all are done. Fails with the Acquire of `count` relaxed.
    #[test]
    fn memory_is_given_away_by_the_count() {
        loom::model(|| {
            let slab = Slab::new();
            let other = Arc::clone(&slab);
            let freer = thread::spawn(move || other.free(1));
            if slab.remote.count() == 1 {
                slab.set(1, 55);
            }
            freer.join().unwrap();
        });
    }
}
