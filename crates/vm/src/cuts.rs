//! How often a file has lost parts: who reads from it enters what he has read only if none has gone since he began.
//!
//! The file has changed before it is said here. What the index has then is hidden under its lock, taken alone, and the count becomes odd; it is
//! unmapped and flushed, and the count is even again. Who reads looks at the count before, and under the lock when he enters.

use hugemm_base::sync::{AtomicWord, Ordering};

/// The count, of an index.
#[derive(Debug)]
pub(crate) struct Cuts<W>(W);

impl<W: AtomicWord> Cuts<W> {
    /// Of nothing yet: made of a word that is zero.
    pub(crate) const fn new(word: W) -> Self {
        Cuts(word)
    }

    /// For who is about to read; `None` while a flush is owed.
    pub(crate) fn before_read(&self) -> Option<u64> {
        // Acquire pairs with the Release of who took or changed something last: what is read is as the file is now.
        let began = self.0.load(Ordering::Acquire);
        began.is_multiple_of(2).then_some(began)
    }

    /// Whether nothing has gone since. With the index's lock; without it for who has read less than he wanted, and may try again.
    pub(crate) fn none_since(&self, began: u64) -> bool {
        // Acquire: for who has no lock.
        self.0.load(Ordering::Acquire) == began
    }

    /// A part is hidden from here on, and its flush owed. With the index's lock, taken alone.
    pub(crate) fn hide(&self) {
        // Relaxed: under the lock.
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// It has been flushed.
    pub(crate) fn flushed(&self) {
        // Release: after the flush; pairs with the Acquire of who reads then.
        self.0.fetch_add(1, Ordering::Release);
    }

    /// What was read before is not entered, and nothing is hidden. With the index's lock, taken alone.
    pub(crate) fn change(&self) {
        // Release: the file has changed; pairs with the Acquire of who reads then.
        self.0.fetch_add(2, Ordering::Release);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use hugemm_base::sync::AtomicU64;
    use hugemm_paging::{EditLock, RawEditLock};
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    /// What a file of one page has, before it is cut and after that.
    const OLD: u64 = 1;
    const NEW: u64 = 2;

    #[derive(Default)]
    struct Page {
        /// What the index shows, if anything.
        shown: Option<u64>,
        /// Whether it has been hidden.
        cut: bool,
    }

    struct File {
        cuts: Cuts<AtomicU64>,
        lock: EditLock,
        page: UnsafeCell<Page>,
        /// Nothing but the count orders these.
        has: AtomicU64,
        flushed: AtomicU64,
    }

    // SAFETY: the page is behind the lock; loom reports it if that is not so.
    unsafe impl Sync for File {}
    // SAFETY: as above.
    unsafe impl Send for File {}

    impl File {
        fn new() -> Arc<Self> {
            Arc::new(File {
                cuts: Cuts::new(AtomicU64::new(0)),
                lock: EditLock::new(),
                page: UnsafeCell::new(Page::default()),
                has: AtomicU64::new(OLD),
                flushed: AtomicU64::new(0),
            })
        }

        fn alone<R>(&self, f: impl FnOnce(&mut Page) -> R) -> R {
            self.lock.lock_exclusive();
            // SAFETY: alone.
            let result = self.page.with_mut(|page| f(unsafe { &mut *page }));
            // SAFETY: taken above.
            unsafe { self.lock.unlock_exclusive() };
            result
        }

        /// Fills the page from the file.
        fn fill(&self) {
            let Some(began) = self.cuts.before_read() else { return };
            let has = self.has.load(Ordering::Relaxed);
            // The lock is shared in fact, and a page's place is entered by one.
            self.alone(|page| {
                if self.cuts.none_since(began) && page.shown.is_none() {
                    page.shown = Some(has);
                    assert!(!page.cut || self.flushed.load(Ordering::Relaxed) == 1, "shown beside what it was");
                }
            });
        }

        fn shown(&self) -> Option<u64> {
            self.alone(|page| page.shown)
        }
    }

    /// After a part has gone nobody is shown what was there, and nobody what is there now while others use what was. Fails with the Acquire
    /// of `before_read` or the Release of `flushed` relaxed, if `before_read` lets who comes before the flush read, and if `hide` comes
    /// outside of the lock.
    #[test]
    fn what_was_read_before_a_part_went_is_not_shown_after() {
        loom::model(|| {
            let file = File::new();
            file.alone(|page| page.shown = Some(OLD));
            let other = Arc::clone(&file);
            let reader = thread::spawn(move || {
                other.fill();
                other.fill();
            });
            file.has.store(NEW, Ordering::Relaxed);
            file.alone(|page| {
                *page = Page { shown: None, cut: true };
                file.cuts.hide();
            });
            file.flushed.store(1, Ordering::Relaxed);
            file.cuts.flushed();
            reader.join().unwrap();
            assert_ne!(file.shown(), Some(OLD));
        });
    }

    /// The same of the rest of a last page, which is not hidden but zeroed where it is. Fails with the Release of `change` relaxed.
    #[test]
    fn what_was_read_before_an_end_came_nearer_is_not_shown_after() {
        loom::model(|| {
            let file = File::new();
            let other = Arc::clone(&file);
            let reader = thread::spawn(move || {
                other.fill();
                other.fill();
            });
            file.has.store(NEW, Ordering::Relaxed);
            file.alone(|_| file.cuts.change());
            file.alone(|page| page.shown = page.shown.map(|_| NEW));
            reader.join().unwrap();
            assert_ne!(file.shown(), Some(OLD));
        });
    }
}
