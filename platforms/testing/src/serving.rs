//! Simulated CPUs beside each other: whoever waits for a lock, or has finished, goes on answering the others' shootdowns,
//! as a CPU with interrupts on does.

use hugemm_paging::RawEditLock;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

thread_local! {
    /// What this thread does while it waits for a lock.
    static SERVE: Cell<Option<&'static dyn Fn()>> = const { Cell::new(None) };
}

/// A lock whose waiters serve. Readers in the low half, bit 32 for a writer.
pub struct ServingLock(AtomicU64);

const WRITER: u64 = 1 << 32;

impl ServingLock {
    fn wait(&self, take: impl Fn(u64) -> Option<u64>) {
        while self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, &take).is_err() {
            if let Some(serve) = SERVE.get() {
                serve();
            }
            std::thread::yield_now();
        }
    }
}

// SAFETY: while the writer's bit is set nobody else gets in, and it is set only when nobody is.
unsafe impl RawEditLock for ServingLock {
    fn new() -> Self {
        ServingLock(AtomicU64::new(0))
    }

    fn lock_shared(&self) {
        self.wait(|word| (word & WRITER == 0).then_some(word + 1));
    }

    unsafe fn unlock_shared(&self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }

    fn lock_exclusive(&self) {
        self.wait(|word| (word == 0).then_some(WRITER));
    }

    unsafe fn unlock_exclusive(&self) {
        self.0.store(0, Ordering::SeqCst);
    }
}

/// CPUs that work beside each other, each a thread.
#[derive(Debug, Default)]
pub struct Crew {
    working: AtomicU64,
}

impl Crew {
    /// Does a CPU's work. It calls `serve` while it waits for a [`ServingLock`]; when it has finished it goes on doing so,
    /// as an idle CPU does, until all have: somebody may have asked it just before it left an address space.
    pub fn work<R>(&self, serve: &dyn Fn(), work: impl FnOnce() -> R) -> R {
        self.working.fetch_add(1, Ordering::SeqCst);
        // SAFETY: taken out again before `serve` ends, also by a panic.
        SERVE.set(Some(unsafe { std::mem::transmute::<&dyn Fn(), &'static dyn Fn()>(serve) }));
        let ends = Ends(self);
        let result = work();
        drop(ends);
        while self.working.load(Ordering::SeqCst) > 0 {
            serve();
            std::thread::yield_now();
        }
        result
    }
}

/// One CPU of those that work: not any more when it goes.
struct Ends<'a>(&'a Crew);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        SERVE.set(None);
        self.0.working.fetch_sub(1, Ordering::SeqCst);
    }
}
