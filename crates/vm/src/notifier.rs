//! Whoever follows an address space: a hypervisor's second stage, an I/O memory management unit.
//!
//! A follower copies translations into tables of its own, which the primary's flushes do not reach. So it is told of a
//! range before its entries are taken away or lose rights ([`begin`](Notifier::begin)), and again when it may look the
//! range up anew ([`end`](Notifier::end)). When `begin` returns, nothing may use the follower's translations of the range
//! any more; until `end`, it makes none there. Frames are freed after `begin`, some before `end`.
//!
//! A follower that looks an address up while a range is under way has to notice, and look again: see
//! [`Following`].

use hugemm_base::platform::Cpu;
use hugemm_base::sync::{AtomicU64, Ordering, fence};
use hugemm_base::{CpuCx, VirtRange};
use intrusive_collections::{LinkedList, LinkedListAtomicLink, UnsafeRef, intrusive_adapter};

/// Is told what happens to an address space. Called by the task that changes it, with its context and with no lock that is
/// needed for [looking addresses up](crate::Vm::lookup): the old entries are found at the beginning, the new ones at the end.
/// May wait for other CPUs, but passes no reschedule point. Calls nothing else of the manager. Following the space or ending that
/// waits for this change, for ever; where pages are being unhooked, so do forks, prefaults and pins, and what unmaps the same
/// range. If the change ends by unwinding, `end` comes all the same; if `end` itself unwinds, that ends the program.
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
///
/// ```
/// use hugemm_base::{CpuCx, SingleCpu, VirtAddr, VirtRange};
/// use hugemm_vm::{Following, Notifier};
/// use std::collections::BTreeMap;
/// use std::sync::Mutex;
///
/// /// A second stage: its own translations, by the first address of each page.
/// #[derive(Default)]
/// struct Stage2 {
///     entries: Mutex<BTreeMap<VirtAddr, u64>>,
///     following: Following,
/// }
///
/// impl Stage2 {
///     /// Copies a translation; false if it may have changed since it was looked up: then look again.
///     fn fill(&self, at: VirtAddr, look_up: impl FnOnce() -> u64) -> bool {
///         let state = self.following.state();
///         let frame = look_up(); // `Vm::lookup`, or `Vm::fault` first
///         let mut entries = self.entries.lock().expect("nobody panics");
///         self.following.is_unchanged(state) && entries.insert(at, frame).is_none()
///     }
/// }
///
/// impl Notifier<SingleCpu> for Stage2 {
///     fn begin(&self, _: &mut CpuCx<'_, SingleCpu>, range: VirtRange) {
///         let mut entries = self.entries.lock().expect("nobody panics");
///         self.following.begin();
///         entries.retain(|at, _| *at < range.start() || range.last() < *at); // and flush the guest's translations of them
///     }
///
///     fn end(&self, _: &mut CpuCx<'_, SingleCpu>, _: VirtRange) {
///         let _entries = self.entries.lock();
///         self.following.end();
///     }
/// }
///
/// let stage2 = Stage2::default();
/// let at = VirtAddr::new(0x1000);
/// assert!(stage2.fill(at, || 7));
/// // A range ends between the look-up and the copy: what was found may be old.
/// assert!(!stage2.fill(at, || { stage2.following.begin(); stage2.following.end(); 7 }));
/// ```
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

/// One notifier on its list.
pub(crate) struct Node<N> {
    link: LinkedListAtomicLink,
    pub(crate) notifier: N,
}

impl<N> Node<N> {
    pub(crate) fn new(notifier: N) -> Self {
        Node { link: LinkedListAtomicLink::new(), notifier }
    }
}

intrusive_adapter!(pub(crate) ByOrder<N> = UnsafeRef<Node<N>>: Node<N> { link => LinkedListAtomicLink });

/// The notifiers of a space.
pub(crate) struct Followers<N> {
    pub(crate) list: LinkedList<ByOrder<N>>,
    /// Changes that have begun and not ended: everybody on the list has been told of their beginning.
    pub(crate) under_way: AtomicU64,
}

// SAFETY: notifiers are told by any task; `follow` requires them to bear it. Links are changed through `&mut` only.
unsafe impl<N> Send for Followers<N> {}
// SAFETY: as above.
unsafe impl<N> Sync for Followers<N> {}

impl<N> Followers<N> {
    pub(crate) fn new() -> Self {
        Followers { list: LinkedList::new(ByOrder::NEW), under_way: AtomicU64::new(0) }
    }
}
