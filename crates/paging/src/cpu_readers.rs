//! Readers who count themselves on a line of their CPU, for locks that are seldom taken alone.
//!
//! Whoever shares a [`RawEditLock`] writes its word, so that readers who have nothing to do with each other wait for one cache line.
//! Here a reader counts itself on a [`ReaderLine`], normally one that no other CPU uses, and looks whether the lock is closed. Whoever
//! wants to be alone closes it, and then visits every line:
//!
//! | reader | who wants to be alone |
//! |---|---|
//! | counts itself on its line | has the raw lock alone |
//! | *full fence* | closes |
//! | not closed: is inside | *full fence* |
//! | closed: takes itself back, and shares the raw lock | waits until nobody is counted on any line |
//!
//! Closing costs a visit of each line, and each CPU a line that comes back. So a lock stays closed for some readers more, a quarter as many
//! as there are lines, each of whom writes the raw lock; and who wants to be alone meanwhile visits nobody. Where that happens again and
//! again, it costs what the raw lock costs, on any number of CPUs. The last of those readers opens it.
//!
//! A reader leaves by the line on which it was counted, wherever it runs by then. Lines may be shared: counting is atomic. Two locks that
//! are often taken together have one count each in one word, and are entered and left by one atomic.
//!
//! Waiting is the raw lock's: who waits to be alone goes before those who come later, if it does so in the raw lock. Not for interrupt
//! handlers that may have interrupted a holder.

use crate::edit_lock::RawEditLock;
use core::fmt;
use core::marker::PhantomData;
use core::ptr::{self, NonNull};
use hugemm_base::sync::{AtomicPtr, AtomicU32, AtomicU64, FencePoint, Ordering, sequenced};

/// Which of the two locks that share lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// The first.
    Low,
    /// The second.
    High,
}

impl Half {
    /// What one reader adds to a line's word.
    const fn one(self) -> u64 {
        match self {
            Half::Low => 1,
            Half::High => 1 << 32,
        }
    }

    /// Where its readers stand in a line's word.
    const fn mask(self) -> u64 {
        self.one() * 0xffff_ffff
    }
}

/// Lines that are visited for each reader who shares the raw lock before it is opened: such a reader takes the lock's line from another and
/// has it taken, while others wait. loom has few lines.
const LINES_PER_READER: u32 = if cfg!(loom) { 2 } else { 4 };

/// How many readers who were counted here are inside, of either lock. To be put at the beginning of a cache line.
#[derive(Debug, Default)]
pub struct ReaderLine {
    inside: AtomicU64,
    /// The line that was added before.
    next: AtomicPtr<ReaderLine>,
}

/// The lines that whoever wants to be alone visits.
#[derive(Debug, Default)]
pub struct Readers {
    last: AtomicPtr<ReaderLine>,
}

impl Readers {
    /// Adds a line, with which readers may enter from here on.
    ///
    /// # Safety
    ///
    /// The line is new, and stays where it is as long as this and the locks that [count](CountedLock::count_on) on it.
    pub unsafe fn add(&self, line: NonNull<ReaderLine>) {
        // Relaxed: what counts is seen by the exchange.
        let mut last = self.last.load(Ordering::Relaxed);
        loop {
            // SAFETY: it lives. Relaxed: published by the exchange.
            unsafe { line.as_ref() }.next.store(last, Ordering::Relaxed);
            // SeqCst: before its readers count themselves; pairs with the loads in `lines`.
            match self.last.compare_exchange(last, line.as_ptr(), Ordering::SeqCst, Ordering::Relaxed) {
                Ok(_) => return,
                Err(other) => last = other,
            }
        }
    }

    /// All lines, the latest first.
    pub fn lines(&self) -> impl Iterator<Item = NonNull<ReaderLine>> {
        // SeqCst: pairs with the exchange in `add`.
        let mut next = NonNull::new(self.last.load(Ordering::SeqCst));
        core::iter::from_fn(move || {
            let line = next?;
            // SAFETY: lines that were added stay. Relaxed: written before the line was added, and never again.
            next = NonNull::new(unsafe { line.as_ref() }.next.load(Ordering::Relaxed));
            Some(line)
        })
    }
}

/// A reader-writer lock some of whose readers are counted on lines.
pub struct CountedLock<L> {
    raw: L,
    /// Unless it is 0, readers share the raw lock, and so many of them do before it is opened.
    closed: AtomicU32,
    /// How many that are, after somebody was alone.
    stays: AtomicU32,
    half: Half,
    readers: Option<NonNull<Readers>>,
}

// SAFETY: `Readers` are shared by many threads; the rest is a lock and a flag.
unsafe impl<L: Send> Send for CountedLock<L> {}
// SAFETY: as above.
unsafe impl<L: Sync> Sync for CountedLock<L> {}

impl<L> fmt::Debug for CountedLock<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CountedLock").finish_non_exhaustive()
    }
}

impl<L: RawEditLock> Default for CountedLock<L> {
    fn default() -> Self {
        Self::new()
    }
}

impl<L: RawEditLock> CountedLock<L> {
    /// All of whose readers share the raw lock.
    pub fn new() -> Self {
        let (closed, stays) = (AtomicU32::new(0), AtomicU32::new(0));
        CountedLock { raw: L::new(), closed, stays, half: Half::Low, readers: None }
    }

    /// Lets readers be counted on lines.
    ///
    /// # Safety
    ///
    /// `readers` stays where it is as long as the lock is used, and no other of the locks that count on its lines has the same half.
    pub unsafe fn count_on(&mut self, readers: NonNull<Readers>, half: Half) {
        (self.readers, self.half) = (Some(readers), half);
    }

    /// Shares the raw lock.
    #[inline]
    pub fn lock_shared(&self) {
        self.raw.lock_shared();
    }

    /// Leaves.
    ///
    /// # Safety
    ///
    /// As [`RawEditLock::unlock_shared`].
    #[inline]
    pub unsafe fn unlock_shared(&self) {
        // SAFETY: the caller's promise.
        unsafe { self.raw.unlock_shared() }
    }

    /// Waits until nobody is inside. O(lines), unless it is still closed.
    #[inline]
    pub fn lock_exclusive(&self) {
        self.raw.lock_exclusive();
        let Some(readers) = self.readers else { return };
        // Relaxed: it is opened by who shares the raw lock. Nobody has been inside by a line since it was closed.
        if self.closed.load(Ordering::Relaxed) != 0 {
            return L::alone(self.place());
        }
        // SeqCst: before the looks at the lines; pairs with a reader's count and its look at this. An exchange, because on x86 it is
        // the fence as well.
        self.closed.swap(1, Ordering::SeqCst);
        sequenced(FencePoint::Closed);
        let mut lines = 0;
        // SAFETY: `count_on` requires it.
        for line in unsafe { readers.as_ref() }.lines() {
            lines += 1;
            // SAFETY: lines that were added stay.
            let line = unsafe { line.as_ref() };
            // SeqCst as above; with Acquire, that pairs with the Release of who leaves.
            let gone = || line.inside.load(Ordering::SeqCst) & self.half.mask() == 0;
            if !gone() {
                // loom may answer a plain load with an old value for ever; a read-modify-write always sees the latest.
                #[cfg(loom)]
                let gone = || line.inside.fetch_add(0, Ordering::Acquire) & self.half.mask() == 0;
                L::wait_until(&gone);
            }
        }
        // Relaxed: under the raw lock.
        self.stays.store(lines / LINES_PER_READER, Ordering::Relaxed);
        L::alone(self.place());
    }

    /// Leaves.
    ///
    /// # Safety
    ///
    /// As [`RawEditLock::unlock_exclusive`].
    #[inline]
    pub unsafe fn unlock_exclusive(&self) {
        // Release pairs with the look at it of a reader who enters, also where others have counted it down by then.
        self.closed.store(self.stays.load(Ordering::Relaxed), Ordering::Release);
        // SAFETY: the caller's promise.
        unsafe { self.raw.unlock_exclusive() }
    }

    /// A reader shares the raw lock because it is closed, and opens it if it is the last one.
    fn shared_while_closed(&self) {
        // Relaxed: it has nothing to show, and its count goes on with the release of who was alone.
        let _ = self.closed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
    }

    fn place(&self) -> usize {
        ptr::from_ref(self).addr()
    }
}

/// Is inside some locks, shared, until dropped.
#[clippy::has_significant_drop]
#[must_use = "dropping this leaves"]
pub struct Inside<'l, L: RawEditLock, const N: usize> {
    locks: [&'l CountedLock<L>; N],
    /// Where it is counted, and as what; nowhere if it shares the raw locks.
    line: Option<(&'l ReaderLine, u64)>,
    /// Some raw locks must be given back where they were taken.
    stays: PhantomData<*const ()>,
}

impl<L: RawEditLock, const N: usize> fmt::Debug for Inside<'_, L, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inside").finish_non_exhaustive()
    }
}

impl<'l, L: RawEditLock, const N: usize> Inside<'l, L, N> {
    /// Waits until nobody is alone inside one of the locks, which are entered in this order. One atomic to enter and one to leave,
    /// however many they are, both on the line.
    ///
    /// # Safety
    ///
    /// The locks [count](CountedLock::count_on) on the same lines, of which this is one; no two have the same half.
    #[inline]
    pub unsafe fn enter(line: &'l ReaderLine, locks: [&'l CountedLock<L>; N]) -> Self {
        let ones = locks.iter().fold(0, |sum, lock| sum + lock.half.one());
        // SeqCst: before the looks; pairs with who closes and then looks at the line.
        line.inside.fetch_add(ones, Ordering::SeqCst);
        sequenced(FencePoint::Counted);
        // SeqCst as above; with Acquire, that pairs with the Release in `unlock_exclusive`.
        if locks.iter().any(|lock| lock.closed.load(Ordering::SeqCst) != 0) {
            return Self::wait(line, locks, ones);
        }
        locks.iter().for_each(|lock| L::entered(lock.place()));
        Inside { locks, line: Some((line, ones)), stays: PhantomData }
    }

    #[cold]
    fn wait(line: &ReaderLine, locks: [&'l CountedLock<L>; N], ones: u64) -> Self {
        // Relaxed: nothing was read.
        line.inside.fetch_sub(ones, Ordering::Relaxed);
        locks.iter().for_each(|lock| {
            lock.lock_shared();
            lock.shared_while_closed();
        });
        Inside { locks, line: None, stays: PhantomData }
    }
}

impl<L: RawEditLock, const N: usize> Drop for Inside<'_, L, N> {
    #[inline]
    fn drop(&mut self) {
        let Some((line, ones)) = self.line else {
            // SAFETY: `wait` shared them.
            return self.locks.iter().rev().for_each(|lock| unsafe { lock.unlock_shared() });
        };
        self.locks.iter().rev().for_each(|lock| L::left(lock.place()));
        // Release pairs with the look at the line of who wants to be alone.
        line.inside.fetch_sub(ones, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::edit_lock::EditLock;

    /// Nobody waits for readers who are counted elsewhere.
    struct Impatient(EditLock);

    // SAFETY: as of what is inside; whoever would have to wait does not get in.
    unsafe impl RawEditLock for Impatient {
        fn new() -> Self {
            Impatient(EditLock::new())
        }

        fn lock_shared(&self) {
            self.0.lock_shared();
        }

        unsafe fn unlock_shared(&self) {
            // SAFETY: the caller's promise.
            unsafe { self.0.unlock_shared() }
        }

        fn lock_exclusive(&self) {
            self.0.lock_exclusive();
        }

        unsafe fn unlock_exclusive(&self) {
            // SAFETY: the caller's promise.
            unsafe { self.0.unlock_exclusive() }
        }

        fn wait_until(_gone: &dyn Fn() -> bool) {
            panic!("somebody is on a line");
        }
    }

    /// Whoever is inside by a line stands there once, in the lock's half, and is gone afterwards.
    #[test]
    fn a_reader_is_counted_in_the_half_of_its_lock() {
        for (half, word) in [(Half::Low, 1), (Half::High, 1 << 32)] {
            let (readers, line): (_, ReaderLine) = (Readers::default(), ReaderLine::default());
            let mut lock = CountedLock::<Impatient>::new();
            // SAFETY: both stay; there is no other lock.
            unsafe { lock.count_on(NonNull::from(&readers), half) };
            // SAFETY: it stays, and is added once.
            unsafe { readers.add(NonNull::from(&line)) };
            // SAFETY: the line is one of the lock's.
            let inside = unsafe { Inside::enter(&line, [&lock]) };
            assert_eq!((line.inside.load(Ordering::Relaxed), word & half.mask()), (word, word));
            drop(inside);
            assert_eq!(line.inside.load(Ordering::Relaxed), 0);
        }
    }

    /// Eight lines: closed for two readers more, and nobody is visited meanwhile.
    #[test]
    fn a_lock_that_has_been_alone_stays_closed_for_a_few_readers() {
        let (readers, lines): (_, [ReaderLine; 8]) = (Readers::default(), Default::default());
        let mut lock = CountedLock::<Impatient>::new();
        // SAFETY: all of them stay; there is no other lock.
        unsafe { lock.count_on(NonNull::from(&readers), Half::Low) };
        // SAFETY: as above; each once.
        lines.iter().for_each(|line| unsafe { readers.add(NonNull::from(line)) });
        let alone = || {
            lock.lock_exclusive();
            // SAFETY: locked above.
            unsafe { lock.unlock_exclusive() };
        };
        let by_line = || {
            // SAFETY: the line is one of the lock's.
            unsafe { Inside::enter(&lines[0], [&lock]) }.line.is_some()
        };
        assert!(by_line());
        for _ in 0..2 {
            alone();
            // One who has counted itself and is about to see that it is closed.
            lines[3].inside.fetch_add(Half::Low.one(), Ordering::Relaxed);
            alone();
            lines[3].inside.fetch_sub(Half::Low.one(), Ordering::Relaxed);
            assert_eq!([by_line(), by_line(), by_line()], [false, false, true]);
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::edit_lock::EditLock;
    use loom::cell::UnsafeCell;
    use loom::thread;
    use std::boxed::Box;

    /// Two values, each behind a half; two lines.
    struct Model {
        readers: Readers,
        lines: [ReaderLine; 2],
        locks: [CountedLock<EditLock>; 2],
        values: [UnsafeCell<u64>; 2],
    }

    // SAFETY: the test's accesses follow the locks; loom reports it if they do not exclude each other.
    unsafe impl Sync for Model {}

    impl Model {
        /// Leaked: loom's threads want what is `'static`.
        fn new(added: usize) -> &'static Model {
            let model = Box::leak(Box::new(Model {
                readers: Readers::default(),
                lines: Default::default(),
                locks: [CountedLock::new(), CountedLock::new()],
                values: [UnsafeCell::new(0), UnsafeCell::new(0)],
            }));
            let readers = NonNull::from(&model.readers);
            for (lock, half) in model.locks.iter_mut().zip([Half::Low, Half::High]) {
                // SAFETY: it stays.
                unsafe { lock.count_on(readers, half) };
            }
            let model: &'static Model = model;
            model.lines[..added].iter().for_each(|line| model.add(line));
            model
        }

        fn add(&self, line: &'static ReaderLine) {
            // SAFETY: it stays, and is added once.
            unsafe { self.readers.add(NonNull::from(line)) };
        }

        fn look(&'static self, line: usize) -> u64 {
            let locks = [&self.locks[0], &self.locks[1]];
            // SAFETY: the line and the locks are of one model.
            let _inside = unsafe { Inside::enter(&self.lines[line], locks) };
            // SAFETY: nobody writes while the locks are shared.
            self.values.iter().map(|value| value.with(|value| unsafe { *value })).sum()
        }

        fn change(&self, which: usize) {
            self.locks[which].lock_exclusive();
            // SAFETY: alone.
            self.values[which].with_mut(|value| unsafe { *value += 1 });
            assert_ne!(self.locks[which].closed.load(Ordering::Relaxed), 0, "opened under whoever is alone");
            // SAFETY: locked above.
            unsafe { self.locks[which].unlock_exclusive() };
        }
    }

    fn check(test: impl Fn() + Sync + Send + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = model.preemption_bound.or(Some(3));
        model.check(test);
    }

    fn a_reader_excludes_who_changes() {
        check(|| {
            let model = Model::new(2);
            // On the line that is visited last.
            let other = thread::spawn(move || model.look(0));
            model.change(1);
            // As a reader who counted itself before, so that no fence of its own comes after the change. It opens the lock.
            let lock = &model.locks[1];
            lock.lock_shared();
            lock.shared_while_closed();
            // SAFETY: shared above.
            unsafe { lock.unlock_shared() };
            assert!(other.join().expect("the reader") <= 1);
            assert_eq!(model.look(1), 1);
        });
    }

    /// Fails with any of the four orderings that are not about the fences weakened: entering, leaving, waiting, opening; and with a store
    /// instead of the exchange by which a reader opens.
    #[test]
    fn loom_readers_of_lines_exclude_who_changes_and_see_it() {
        a_reader_excludes_who_changes();
    }

    /// The line is none of the lock's.
    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_a_reader_whose_line_is_not_visited_is_not_seen() {
        check(|| {
            let model = Model::new(1);
            let other = thread::spawn(move || model.look(1));
            model.change(1);
            other.join().expect("the reader");
        });
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_a_reader_who_does_not_fence_is_not_seen() {
        let _removed = FencePoint::Counted.remove();
        a_reader_excludes_who_changes();
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_a_reader_does_not_see_who_does_not_fence() {
        let _removed = FencePoint::Closed.remove();
        a_reader_excludes_who_changes();
    }

    /// Who changes twice visits the lines once, or readers have opened the lock in between.
    #[test]
    fn loom_a_lock_that_stays_closed_excludes_as_well() {
        check(|| {
            let model = Model::new(2);
            let other = thread::spawn(move || model.look(0) + model.look(1));
            model.change(1);
            model.change(1);
            assert!(other.join().expect("the reader") <= 4);
            // Closed for one more at most.
            assert_eq!([model.look(0), model.look(1)], [2, 2]);
            assert_eq!(model.locks[1].closed.load(Ordering::Relaxed), 0);
        });
    }

    /// A line that is added while somebody closes is visited, or its readers find the lock closed.
    #[test]
    fn loom_a_new_line_is_visited() {
        check(|| {
            let model = Model::new(1);
            let other = thread::spawn(move || {
                model.add(&model.lines[1]);
                model.look(1)
            });
            model.change(0);
            assert!(other.join().expect("the reader") <= 1);
        });
    }

    /// Each half by itself: who changes one value waits for readers of that, and not for those who have the other.
    #[test]
    fn loom_halves_do_not_wait_for_each_other() {
        check(|| {
            let model = Model::new(2);
            // SAFETY: the line and the lock are of one model.
            let _inside = unsafe { Inside::enter(&model.lines[0], [&model.locks[0]]) };
            let other = thread::spawn(move || model.change(1));
            model.change(1);
            other.join().expect("nobody is in its way");
        });
    }
}
