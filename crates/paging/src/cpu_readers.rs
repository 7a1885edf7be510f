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
//! A reader leaves by the line on which it was counted, wherever it runs by then. Lines may be shared: counting is atomic. Three locks have
//! one count each in a line's word, so that those that are often taken together are entered and left by one atomic.
//!
//! Waiting is the raw lock's: who waits to be alone goes before those who come later, if it does so in the raw lock. Not for interrupt
//! handlers that may have interrupted a holder.

use crate::edit_lock::RawEditLock;
use core::fmt;
use core::marker::PhantomData;
use core::ptr::{self, NonNull};
use hugemm_base::sync::{AtomicBool, AtomicPtr, AtomicU64, FencePoint, Ordering, sequenced};

/// Which of the three locks that share lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The first.
    Low,
    /// The second.
    Middle,
    /// The third.
    High,
}

impl Part {
    /// What one reader adds to a line's word.
    const fn one(self) -> u64 {
        match self {
            Part::Low => 1,
            Part::Middle => 1 << BITS,
            Part::High => 1 << (2 * BITS),
        }
    }

    /// Where its readers stand in a line's word.
    const fn mask(self) -> u64 {
        self.one() * ((1 << BITS) - 1)
    }
}

/// Of a line's word for each lock: two million readers on one line.
const BITS: u32 = 21;

/// How many readers who were counted here are inside, of each lock. To be put at the beginning of a cache line.
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
    /// Somebody is alone inside, or about to be.
    closed: AtomicBool,
    part: Part,
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
        CountedLock { raw: L::new(), closed: AtomicBool::new(false), part: Part::Low, readers: None }
    }

    /// Lets readers be counted on lines.
    ///
    /// # Safety
    ///
    /// `readers` stays where it is as long as the lock is used, and no other of the locks that count on its lines has the same part.
    pub unsafe fn count_on(&mut self, readers: NonNull<Readers>, part: Part) {
        (self.readers, self.part) = (Some(readers), part);
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

    /// Waits until nobody is inside. O(lines).
    #[inline]
    pub fn lock_exclusive(&self) {
        self.raw.lock_exclusive();
        for line in self.close() {
            if !self.is_gone(line) {
                // loom may answer a plain load with an old value for ever; a read-modify-write always sees the latest.
                #[cfg(loom)]
                let gone = || line.inside.fetch_add(0, Ordering::Acquire) & self.part.mask() == 0;
                #[cfg(not(loom))]
                let gone = || self.is_gone(line);
                L::wait_until(&gone);
            }
        }
    }

    /// The same if nobody is counted on a line; whether it is so. Waits for the raw lock only. O(lines).
    #[inline]
    pub fn try_lock_exclusive(&self) -> bool {
        self.raw.lock_exclusive();
        let gone = self.close().all(|line| self.is_gone(line));
        if !gone {
            // SAFETY: locked above.
            unsafe { self.unlock_exclusive() };
        }
        gone
    }

    /// Has those who come from here on share the raw lock, which the caller has alone; and who is inside is on these lines.
    #[inline]
    fn close(&self) -> impl Iterator<Item = &ReaderLine> {
        let lines = self.readers.map(|readers| {
            // SeqCst: before the looks at the lines; pairs with a reader's count and its look at this. An exchange, because on x86 it is
            // the fence as well.
            self.closed.swap(true, Ordering::SeqCst);
            sequenced(FencePoint::Closed);
            // SAFETY: `count_on` requires it.
            unsafe { readers.as_ref() }.lines()
        });
        // SAFETY: lines that were added stay.
        lines.into_iter().flatten().map(|line| unsafe { line.as_ref() })
    }

    /// Whether no reader of this lock is counted on a line.
    #[inline]
    fn is_gone(&self, line: &ReaderLine) -> bool {
        // SeqCst as in `close`; with Acquire, that pairs with the Release of who leaves.
        line.inside.load(Ordering::SeqCst) & self.part.mask() == 0
    }

    /// Leaves.
    ///
    /// # Safety
    ///
    /// As [`RawEditLock::unlock_exclusive`].
    #[inline]
    pub unsafe fn unlock_exclusive(&self) {
        // Release pairs with the look at it of a reader who enters.
        self.closed.store(false, Ordering::Release);
        // SAFETY: the caller's promise.
        unsafe { self.raw.unlock_exclusive() }
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
    /// The locks [count](CountedLock::count_on) on the same lines, of which this is one; no two have the same part.
    #[inline]
    pub unsafe fn enter(line: &'l ReaderLine, locks: [&'l CountedLock<L>; N]) -> Self {
        let ones = locks.iter().fold(0, |sum, lock| sum + lock.part.one());
        // SeqCst: before the looks; pairs with who closes and then looks at the line.
        line.inside.fetch_add(ones, Ordering::SeqCst);
        sequenced(FencePoint::Counted);
        // SeqCst as above; with Acquire, that pairs with the Release in `unlock_exclusive`.
        if locks.iter().any(|lock| lock.closed.load(Ordering::SeqCst)) {
            return Self::wait(line, locks, ones);
        }
        locks.iter().for_each(|lock| L::entered(lock.place()));
        Inside { locks, line: Some((line, ones)), stays: PhantomData }
    }

    #[cold]
    fn wait(line: &ReaderLine, locks: [&'l CountedLock<L>; N], ones: u64) -> Self {
        // Relaxed: nothing was read.
        line.inside.fetch_sub(ones, Ordering::Relaxed);
        locks.iter().for_each(|lock| lock.lock_shared());
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

/// Keeps everybody from being [alone](CountedLock::try_lock_exclusive) inside a lock, until dropped, for as long as its owner likes: it
/// holds nothing that others wait for, and its owner may sleep.
#[clippy::has_significant_drop]
#[must_use = "dropping this ends it"]
#[derive(Debug)]
pub struct Counted<'l> {
    line: &'l ReaderLine,
    one: u64,
}

impl<'l> Counted<'l> {
    /// Waits until nobody is alone inside. One atomic to begin and one to end, both on the line.
    ///
    /// # Safety
    ///
    /// The lock [counts](CountedLock::count_on) on lines of which this is one, and is taken alone by
    /// [`try_lock_exclusive`](CountedLock::try_lock_exclusive) only.
    #[inline]
    pub unsafe fn enter<L: RawEditLock>(line: &'l ReaderLine, lock: &CountedLock<L>) -> Self {
        let one = lock.part.one();
        // SeqCst as in `Inside::enter`.
        line.inside.fetch_add(one, Ordering::SeqCst);
        sequenced(FencePoint::Counted);
        // SeqCst as in `Inside::enter`.
        if lock.closed.load(Ordering::SeqCst) {
            // Whoever is alone goes first, and whoever comes to be sees the count: by the raw lock.
            lock.lock_shared();
            // SAFETY: locked above.
            unsafe { lock.unlock_shared() };
        }
        Counted { line, one }
    }
}

impl Drop for Counted<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release pairs with the look at the line of who wants to be alone.
        self.line.inside.fetch_sub(self.one, Ordering::Release);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::edit_lock::EditLock;
    use loom::cell::UnsafeCell;
    use loom::thread;
    use std::boxed::Box;

    /// Two values, each behind a part; two lines.
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
            for (lock, part) in model.locks.iter_mut().zip([Part::Low, Part::High]) {
                // SAFETY: it stays.
                unsafe { lock.count_on(readers, part) };
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
            assert!(other.join().expect("the reader") <= 1);
            assert_eq!(model.look(1), 1);
        });
    }

    /// Fails with any of the four orderings that are not about the fences weakened: entering, leaving, waiting, opening.
    #[test]
    fn loom_readers_of_lines_exclude_who_changes_and_see_it() {
        a_reader_excludes_who_changes();
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

    fn a_change_excludes_who_tries() {
        check(|| {
            let model = Model::new(2);
            let other = thread::spawn(move || {
                // SAFETY: the line and the lock are of one model.
                let _counted = unsafe { Counted::enter(&model.lines[0], &model.locks[1]) };
                // SAFETY: nobody writes meanwhile.
                model.values[1].with(|value| unsafe { *value })
            });
            let alone = model.locks[1].try_lock_exclusive();
            if alone {
                // SAFETY: alone.
                model.values[1].with_mut(|value| unsafe { *value += 1 });
                // SAFETY: locked above.
                unsafe { model.locks[1].unlock_exclusive() };
            }
            assert!(other.join().expect("the change") <= u64::from(alone));
            assert!(model.locks[1].try_lock_exclusive(), "nobody is counted any more");
        });
    }

    /// Who is counted is seen by who tries, or finds the lock closed and waits.
    #[test]
    fn loom_who_tries_is_alone_or_is_told() {
        a_change_excludes_who_tries();
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_a_change_that_does_not_fence_is_not_seen() {
        let _removed = FencePoint::Counted.remove();
        a_change_excludes_who_tries();
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_a_change_does_not_see_who_tries_without_a_fence() {
        let _removed = FencePoint::Closed.remove();
        a_change_excludes_who_tries();
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

    /// Each part by itself: who changes one value waits for readers of that, and not for those who have the other.
    #[test]
    fn loom_parts_do_not_wait_for_each_other() {
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
