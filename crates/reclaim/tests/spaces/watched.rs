//! A swap back end that is watched: it knows each slot's holders, so that the use of a slot that nobody holds is seen
//! whatever has become of it since; and a CPU can be stopped in it, so that a test decides what others do meanwhile.

#![allow(unreachable_pub, reason = "one test's modules")]

use hugemm_base::CpuCx;
use hugemm_base::platform::Cpu;
use hugemm_frames::Frozen;
use hugemm_reclaim::{Evicted, SlotError, StoreError, Swap, SwapSlot, SwapStats};
use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A place where one CPU can be stopped, once.
#[derive(Default)]
pub struct Stop {
    /// The CPU's number + 1, or 0.
    cpu: AtomicU64,
    reached: AtomicBool,
    open: AtomicBool,
}

impl Stop {
    /// The CPU stops here the next time it comes by.
    pub fn arm(&self, cpu: u32) {
        self.reached.store(false, Ordering::SeqCst);
        self.open.store(false, Ordering::SeqCst);
        self.cpu.store(u64::from(cpu) + 1, Ordering::SeqCst);
    }

    /// Waits until it has.
    pub fn wait(&self) {
        while !self.reached.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
    }

    /// Lets it go on.
    pub fn open(&self) {
        self.open.store(true, Ordering::SeqCst);
    }

    pub fn pass(&self, cpu: u32) {
        if self.cpu.compare_exchange(u64::from(cpu) + 1, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            self.reached.store(true, Ordering::SeqCst);
            while !self.open.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
        }
    }
}

/// See the [module](self).
pub struct Watched<W> {
    pub inner: W,
    /// Before a slot is shared, and before it is loaded.
    pub sharing: Stop,
    pub loading: Stop,
    holders: Mutex<HashMap<u64, u64>>,
    strays: AtomicU64,
}

impl<W> Watched<W> {
    pub fn new(inner: W) -> Self {
        Watched {
            inner,
            sharing: Stop::default(),
            loading: Stop::default(),
            holders: Mutex::default(),
            strays: AtomicU64::new(0),
        }
    }

    /// Uses of slots that nobody held.
    pub fn strays(&self) -> u64 {
        self.strays.load(Ordering::SeqCst)
    }

    fn held(&self, slot: &SwapSlot, change: i64) -> bool {
        let mut holders = self.holders.lock().expect("no test has failed");
        let count = holders.entry(slot.bits()).or_default();
        let held = *count > 0;
        if held {
            *count = count.wrapping_add_signed(change);
        } else {
            self.strays.fetch_add(1, Ordering::SeqCst);
        }
        held
    }

    fn gave(&self, slot: &SwapSlot) {
        *self.holders.lock().expect("no test has failed").entry(slot.bits()).or_default() += 1;
    }
}

// SAFETY: passes everything on.
unsafe impl<P: Cpu, W: Swap<P>> Swap<P> for Watched<W> {
    fn store(&self, cx: &CpuCx<'_, P>, from: &Frozen, page: u64) -> Result<SwapSlot, StoreError> {
        self.inner.store(cx, from, page).inspect(|slot| self.gave(slot))
    }

    fn evict(&self, cx: &CpuCx<'_, P>, page: Frozen) -> Result<Evicted, (StoreError, Frozen)> {
        self.inner.evict(cx, page).inspect(|evicted| self.gave(&evicted.slot))
    }

    fn is_whole(&self, slot: &SwapSlot) -> bool {
        self.inner.is_whole(slot)
    }

    fn load(&self, cx: &CpuCx<'_, P>, slot: &SwapSlot, into: &mut Frozen, page: u64) -> Result<(), SlotError> {
        self.loading.pass(cx.platform().current().get());
        if self.held(slot, 0) { self.inner.load(cx, slot, into, page) } else { Err(SlotError::NotMine) }
    }

    fn share(&self, cx: &CpuCx<'_, P>, slot: &SwapSlot) -> Result<SwapSlot, SlotError> {
        self.sharing.pass(cx.platform().current().get());
        if !self.held(slot, 0) {
            return Err(SlotError::NotMine);
        }
        self.inner.share(cx, slot).inspect(|slot| self.gave(slot))
    }

    fn free(&self, cx: &CpuCx<'_, P>, slot: SwapSlot) -> Result<(), (SlotError, SwapSlot)> {
        if self.held(&slot, -1) { self.inner.free(cx, slot) } else { Err((SlotError::NotMine, slot)) }
    }

    fn set_limit(&self, limit: u64) {
        self.inner.set_limit(limit);
    }

    fn stats(&self, cx: &CpuCx<'_, P>) -> SwapStats {
        self.inner.stats(cx)
    }
}
