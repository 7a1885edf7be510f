//! Whoever follows an address space: a hypervisor's second stage, an I/O memory management unit.
//!
//! A follower copies translations into tables of its own, which the primary's flushes do not reach. So it is told of a
//! range before its entries are taken away or lose rights ([`begin`](Notifier::begin)), and again when it may look the
//! range up anew ([`end`](Notifier::end)). When `begin` returns, nothing may use the follower's translations of the range
//! any more; until `end`, it makes none there. Frames are freed after both.
//!
//! A follower that looks an address up while a range is under way has to notice, and look again: see
//! [`Following`].

use hugemm_base::platform::Cpu;
use hugemm_base::sync::{AtomicU64, Ordering, fence};
use hugemm_base::{CpuCx, VirtRange};

/// Is told what happens to an address space. Called by the task that changes it, with its context and with no lock that is
/// needed for [looking addresses up](crate::Vm::lookup): the old entries are found at the beginning, the new ones at the end.
/// May wait for other CPUs, but passes no reschedule point. Calls nothing else of the manager. Following the space or ending that
/// waits for this change, for ever; where pages are being unhooked, so do forks, prefaults and pins, and what unmaps the same
/// range. If the change ends by unwinding, `end` comes all the same.
pub trait Notifier<P: Cpu> {
    /// Translations in the range are about to be taken away or to lose rights.
    fn begin(&self, cx: &mut CpuCx<'_, P>, range: VirtRange);

    /// Tests and clears what the follower knows of its own accesses to the range, without invalidating anything; whether
    /// there were any. Called under locks of the space: takes no lock that is held around `begin` or `end`, waits for
    /// nobody.
    fn young(&self, range: VirtRange) -> bool {
        let _ = range;
        false
    }

    /// That is over.
    fn end(&self, cx: &mut CpuCx<'_, P>, range: VirtRange);
}

/// Nobody follows.
impl<P: Cpu> Notifier<P> for () {
    fn begin(&self, _cx: &mut CpuCx<'_, P>, _range: VirtRange) {}
    fn end(&self, _cx: &mut CpuCx<'_, P>, _range: VirtRange) {}
}

impl<P: Cpu, N: Notifier<P> + ?Sized> Notifier<P> for &N {
    fn begin(&self, cx: &mut CpuCx<'_, P>, range: VirtRange) {
        (**self).begin(cx, range);
    }

    fn end(&self, cx: &mut CpuCx<'_, P>, range: VirtRange) {
        (**self).end(cx, range);
    }

    fn young(&self, range: VirtRange) -> bool {
        (**self).young(range)
    }
}

/// How a follower that looks translations up without the space's lock knows that they are still right: read the
/// [`state`](Following::state), look up, take the lock of its own tables, and use what was found only if the state
/// [is unchanged](Following::is_unchanged). `begin` and `end` of its [`Notifier`] call those of this under that same lock.
#[derive(Debug, Default)]
pub struct Following {
    /// How many ranges are under way.
    under_way: AtomicU64,
    /// How many have ended.
    ended: AtomicU64,
}

impl Following {
    /// Nothing under way.
    pub fn new() -> Self {
        Self::default()
    }

    /// A range begins. Under the lock of the follower's tables.
    pub fn begin(&self) {
        // Relaxed: ordered by the lock.
        self.under_way.fetch_add(1, Ordering::Relaxed);
    }

    /// A range ends. Under the lock of the follower's tables.
    pub fn end(&self) {
        // Relaxed: ordered by the lock.
        self.ended.fetch_add(1, Ordering::Relaxed);
        self.under_way.fetch_sub(1, Ordering::Relaxed);
    }

    /// To be read before looking up.
    pub fn state(&self) -> u64 {
        let ended = self.ended.load(Ordering::Relaxed);
        // Acquire: the look-up comes after; whoever ends a range after this is seen by `is_unchanged`.
        fence(Ordering::Acquire);
        ended
    }

    /// Whether what was looked up since may be used. Under the lock of the follower's tables.
    pub fn is_unchanged(&self, state: u64) -> bool {
        // Relaxed: ordered by the lock.
        self.under_way.load(Ordering::Relaxed) == 0 && self.ended.load(Ordering::Relaxed) == state
    }
}
