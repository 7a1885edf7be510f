//! Who may hold translations of an address space: the CPUs that have it loaded, and which of them are lazy.
//!
//! Whoever says which tables are a space's answers for them, and so does who says that a CPU uses none of its addresses:
//!
//! ```compile_fail,E0133
//! # use hugemm_paging::{Counting, TlbSpace, TlbShootdown, UserSpace};
//! fn rule(shootdown: &TlbShootdown<'_, Counting>) {
//!     let _space: Result<TlbSpace<UserSpace>, _> = TlbSpace::new(shootdown, hugemm_base::PhysAddr::new(0x1000)); // error: unsafe
//! }
//! ```
//!
//! ```compile_fail,E0133
//! # use hugemm_base::{CpuCx, platform::Cpu};
//! # use hugemm_paging::{Counting, TlbSpace, TlbShootdown, UserSpace};
//! fn rule<P: Cpu>(space: &TlbSpace<UserSpace>, shootdown: &TlbShootdown<'_, Counting>, cx: &CpuCx<'_, P>) {
//!     space.enter_lazy(shootdown, cx); // error: unsafe
//! }
//! ```

use crate::ipi::Request;
use crate::tlb_shootdown::{TlbShootdown, TlbShootdownError, WORD, same_machine};
use core::fmt;
use hugemm_base::platform::{Cpu, CpuId};
use hugemm_base::sync::{AtomicU64, FencePoint, Ordering, full_fence};
use hugemm_base::{CpuCx, FlushDomain, Invalidation, PhysAddr, Quarantine, TlbHw, TlbScope, VirtRange};

/// Kinds of domains.
pub trait SpaceKind {
    /// Which half of the translations.
    const SCOPE: TlbScope;
}

/// An address space that CPUs load and leave.
#[derive(Debug)]
pub enum UserSpace {}

/// The kernel's half, which every CPU uses.
#[derive(Debug)]
pub enum KernelSpace {}

impl SpaceKind for UserSpace {
    const SCOPE: TlbScope = TlbScope::Space;
}

impl SpaceKind for KernelSpace {
    const SCOPE: TlbScope = TlbScope::Kernel;
}

/// The quarantine that keeps what it is given for ever: dropped debts stay unfreed, and their count
/// ([`FlushDomain::dropped_debts`]) says so.
#[derive(Clone, Copy, Debug, Default)]
pub struct Keep;

// SAFETY: nobody ever gets it.
unsafe impl<T> Quarantine<T> for Keep {
    fn take(&self, value: T, _range: VirtRange) {
        core::mem::forget(value);
    }
}

/// What one address space, or the kernel, needs for shootdowns: its flush domain and the CPUs that may hold its
/// translations.
///
/// `M` is where the masks live: two for each 64 CPUs, in the space itself for up to 64 CPUs, or lent.
pub struct TlbSpace<K, Q = Keep, M = [AtomicU64; 2]> {
    pub(crate) domain: FlushDomain<K, Q>,
    /// Never 0 and never used twice.
    pub(crate) id: u64,
    /// Whose CPUs load it: [`TlbShootdown::machine`].
    pub(crate) machine: usize,
    root: PhysAddr,
    masks: M,
    words: usize,
    /// See [`deferred`](crate::deferred).
    pub(crate) deferred: AtomicU64,
}

impl<K, Q, M> fmt::Debug for TlbSpace<K, Q, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlbSpace").field("id", &self.id).field("root", &self.root).finish_non_exhaustive()
    }
}

impl<K: SpaceKind> TlbSpace<K> {
    /// A space on at most 64 CPUs.
    ///
    /// # Errors
    ///
    /// [`TooFewWords`](TlbShootdownError::TooFewWords) if there are more than 64 CPUs: use
    /// [`with_masks`](TlbSpace::with_masks).
    ///
    /// # Safety
    ///
    /// As [`with_masks`](TlbSpace::with_masks).
    pub unsafe fn new<H: TlbHw>(shootdown: &TlbShootdown<'_, H>, root: PhysAddr) -> Result<Self, TlbShootdownError> {
        // SAFETY: the caller's promise, passed on.
        unsafe { Self::with_masks(shootdown, root, Keep, [AtomicU64::new(0), AtomicU64::new(0)]) }
    }
}

impl<K: SpaceKind, Q, M: AsRef<[AtomicU64]>> TlbSpace<K, Q, M> {
    /// A space whose tables begin at `root`. `masks` has two words for each 64 CPUs, all 0. Nobody uses it yet.
    ///
    /// # Errors
    ///
    /// [`TooFewWords`](TlbShootdownError::TooFewWords) says how many words of masks it takes.
    ///
    /// # Safety
    ///
    /// * Any CPU of `shootdown` may load `root` at any time: the tables map what runs there as those that it walks now do, and
    ///   stay until the space has been [retired](TlbSpace::retire), or for ever.
    /// * It is the only space with this root, and CPUs load the root through it only.
    /// * The slices of `shootdown` are there as long as the space is used.
    pub unsafe fn with_masks<H: TlbHw>(
        shootdown: &TlbShootdown<'_, H>,
        root: PhysAddr,
        quarantine: Q,
        masks: M,
    ) -> Result<Self, TlbShootdownError> {
        let words = TlbShootdown::<H>::mask_words(shootdown.cpus());
        let (needed, given) = (2 * words, masks.as_ref().len());
        if given < needed {
            return Err(TlbShootdownError::TooFewWords { needed, given });
        }
        // Relaxed: only the number counts, and a read-modify-write never gives one twice.
        let id = shootdown.cpus[0].spaces.fetch_add(1, Ordering::Relaxed) + 1;
        let (domain, machine) = (FlushDomain::new(quarantine), shootdown.machine());
        Ok(TlbSpace { domain, id, machine, root, masks, words, deferred: AtomicU64::new(0) })
    }

    /// Its flush domain.
    pub fn domain(&self) -> &FlushDomain<K, Q> {
        &self.domain
    }

    /// Where its tables begin.
    pub fn root(&self) -> PhysAddr {
        self.root
    }

    pub(crate) fn users(&self) -> &[AtomicU64] {
        &self.masks.as_ref()[..self.words]
    }

    pub(crate) fn lazy(&self) -> &[AtomicU64] {
        &self.masks.as_ref()[self.words..2 * self.words]
    }
}

impl<Q, M: AsRef<[AtomicU64]>> TlbSpace<UserSpace, Q, M> {
    /// Loads the space on the calling CPU, or wakes the CPU if it has it loaded lazily. What was flushed while it was away
    /// is caught up with. The space that was loaded before is to be given to [`switch_out`](TlbSpace::switch_out) after
    /// this. Any context; pins. Two atomics and one full fence; the invalidation only if a flush was missed.
    ///
    /// # Panics
    ///
    /// As every method that is given a `shootdown`: if that is not the one that the space was [made](TlbSpace::with_masks) with, nor another
    /// view of the same slices.
    pub fn switch_in<P: Cpu, H: TlbHw>(&self, shootdown: &TlbShootdown<'_, H>, cx: &CpuCx<'_, P>) {
        same_machine(self.machine, shootdown.machine());
        cx.pinned(|pin| {
            let cpu = pin.cpu();
            let (word, bit) = place(cpu);
            let own = &shootdown.cpus[cpu.get() as usize];
            // Relaxed on `own`: only this CPU reads or writes it.
            if own.loaded.load(Ordering::Relaxed) == self.id {
                // Relaxed: ordered by the fence.
                self.lazy()[word].fetch_and(!bit, Ordering::Relaxed);
                // Pairs with the fence after the count in `FlushDomain::advance`: either the initiator sees that we are not
                // lazy and asks us, or we see its generation.
                full_fence(FencePoint::AfterWaking);
                let generation = self.domain.generation();
                let tag = own.tag.load(Ordering::Relaxed) as usize % own.tags.len();
                let tagged = &own.tags[tag];
                if own.notice_expiry(Some(tag)) || tagged.seen.load(Ordering::Relaxed) < generation {
                    // SAFETY: pinned.
                    unsafe { shootdown.hw.invalidate(cpu, TlbScope::Space, &Invalidation::ALL) };
                    tagged.seen.store(generation, Ordering::Relaxed);
                    own.counters.caught_up.add(1);
                }
                return;
            }
            // Whoever loaded another space over this one while it was lazy here left the bit behind. Before it is a user's
            // again: an initiator must not find both. Relaxed: ordered by the fence.
            self.lazy()[word].fetch_and(!bit, Ordering::Relaxed);
            // Relaxed: ordered by the fence.
            self.users()[word].fetch_or(bit, Ordering::Relaxed);
            // Pairs with the fence after the count in `FlushDomain::advance`: either the initiator sees our bit, and that we
            // are not lazy, and asks us, or we see its generation, and with it its entries.
            full_fence(FencePoint::AfterJoining);
            let generation = self.domain.generation();
            own.notice_expiry(None);
            let (tag, known) = own.tag_of(self.id, shootdown.hw.tags());
            let keep = known && own.tags[tag].seen.load(Ordering::Relaxed) == generation;
            own.counters.caught_up.add(u64::from(known && !keep));
            // SAFETY: pinned; the root of this space, whose tables stay until no CPU has it loaded, by `new`'s contract; `tag_of` keeps below
            // the number of tags.
            unsafe { shootdown.hw.load(cpu, self.root, tag, keep) };
            own.tags[tag].seen.store(generation, Ordering::Relaxed);
            own.tag.store(tag as u64, Ordering::Relaxed);
            own.loaded.store(self.id, Ordering::Relaxed);
        })
    }

    /// Ends the calling CPU's use of the space: loads the kernel's tables if nothing else has been loaded meanwhile, and
    /// is asked nothing more. Any context; pins. Two atomics.
    pub fn switch_out<P: Cpu, H: TlbHw>(&self, shootdown: &TlbShootdown<'_, H>, cx: &CpuCx<'_, P>) {
        same_machine(self.machine, shootdown.machine());
        cx.pinned(|pin| {
            let cpu = pin.cpu();
            let (word, bit) = place(cpu);
            let own = &shootdown.cpus[cpu.get() as usize];
            // Relaxed: only this CPU reads or writes it.
            if own.loaded.load(Ordering::Relaxed) == self.id {
                // SAFETY: pinned.
                unsafe { shootdown.hw.unload(cpu) };
                own.loaded.store(0, Ordering::Relaxed);
            }
            // Release pairs with the Acquire of an initiator that finds us gone: what we did through our translations has
            // happened.
            self.lazy()[word].fetch_and(!bit, Ordering::Release);
            self.users()[word].fetch_and(!bit, Ordering::Release);
        })
    }

    /// Whether every flush of the space that is not a [broadcast](TlbHw::broadcast) asks the calling CPU: it has switched in, and is not
    /// lazy. For who reaches pages by walking the tables in software. Any context; pins.
    pub fn asks_this_cpu<P: Cpu>(&self, cx: &CpuCx<'_, P>) -> bool {
        cx.pinned(|pin| {
            let (word, bit) = place(pin.cpu());
            // Relaxed: only this CPU changes its own bits.
            let has = |words: &[AtomicU64]| words[word].load(Ordering::Relaxed) & bit != 0;
            has(self.users()) && !has(self.lazy())
        })
    }

    /// Leaves the calling CPU out of shootdowns that free no tables until it switches in again, though the space's tables
    /// stay loaded: an idle CPU, or a kernel task. Any context; pins. One atomic.
    ///
    /// # Safety
    ///
    /// Until then the CPU uses no address of the space: what it would use may have been freed.
    pub unsafe fn enter_lazy<P: Cpu, H: TlbHw>(&self, shootdown: &TlbShootdown<'_, H>, cx: &CpuCx<'_, P>) {
        same_machine(self.machine, shootdown.machine());
        cx.pinned(|pin| {
            let (word, bit) = place(pin.cpu());
            // Relaxed: only this CPU reads or writes it.
            if shootdown.cpus[pin.cpu().get() as usize].loaded.load(Ordering::Relaxed) == self.id {
                // Release pairs with the Acquire of an initiator that leaves us out: what we did through our translations has
                // happened.
                self.lazy()[word].fetch_or(bit, Ordering::Release);
            }
        })
    }

    /// Makes every lazy CPU let go of the tables, so that all of them, the root included, can be freed. The space comes
    /// back if some CPU uses it. May not be called with interrupts off.
    ///
    /// # Errors
    ///
    /// The space, if a CPU uses it: switch that one out first.
    pub fn retire<P: Cpu, H: TlbHw>(self, shootdown: &TlbShootdown<'_, H>, cx: &CpuCx<'_, P>) -> Result<(), Self> {
        same_machine(self.machine, shootdown.machine());
        // Acquire pairs with the Release in `enter_lazy` and `switch_out`. The space is ours alone, so nobody joins.
        let busy = |(users, lazy): (&AtomicU64, &AtomicU64)| {
            users.load(Ordering::Acquire) & !lazy.load(Ordering::Acquire) != 0
        };
        if self.users().iter().zip(self.lazy()).any(busy) {
            return Err(self);
        }
        let request =
            Request { space: self.id, generation: 0, scope: TlbScope::Space, unload: true, what: Invalidation::ALL };
        if self.users().iter().any(|users| users.load(Ordering::Acquire) != 0) {
            shootdown.shoot(cx, self.users(), None, &request);
        }
        Ok(())
    }
}

impl<Q, M: AsRef<[AtomicU64]>> TlbSpace<KernelSpace, Q, M> {
    /// The calling CPU may from here on hold translations of the kernel's half. At start-up, before it uses memory whose
    /// mapping may change; starts with a flush. Pins.
    pub fn online<P: Cpu, H: TlbHw>(&self, shootdown: &TlbShootdown<'_, H>, cx: &CpuCx<'_, P>) {
        same_machine(self.machine, shootdown.machine());
        cx.pinned(|pin| {
            let (word, bit) = place(pin.cpu());
            let own = &shootdown.cpus[pin.cpu().get() as usize];
            // Orders as in `TlbSpace::switch_in`.
            self.users()[word].fetch_or(bit, Ordering::Relaxed);
            full_fence(FencePoint::AfterJoining);
            let generation = self.domain.generation();
            // SAFETY: pinned.
            unsafe { shootdown.hw.invalidate(pin.cpu(), TlbScope::Kernel, &Invalidation::ALL) };
            own.kernel_of(self.id).seen.store(generation, Ordering::Relaxed);
        })
    }

    /// The calling CPU is about to stop, and is asked for no flush of the kernel's half any more. Pins.
    ///
    /// # Safety
    ///
    /// Until [`online`](Self::online) the CPU uses no address of the kernel's half whose mapping may change: what it would
    /// use may have been freed. So it has loaded tables of its own, or halts with interrupts off.
    pub unsafe fn offline<P: Cpu>(&self, cx: &CpuCx<'_, P>) {
        cx.pinned(|pin| {
            let (word, bit) = place(pin.cpu());
            // Release pairs with the Acquire of an initiator that finds us gone.
            self.users()[word].fetch_and(!bit, Ordering::Release);
        })
    }
}

/// The mask word of a CPU, and its bit there.
fn place(cpu: CpuId) -> (usize, u64) {
    (cpu.get() as usize / WORD, 1 << (cpu.get() as usize % WORD))
}
