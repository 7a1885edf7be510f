//! The manager of address spaces: what all spaces of a system share.

use crate::address_space::AddressSpace;
use crate::cpu_lines::cpu;
use crate::error::VmError;
use crate::guarded::{Apart, Guarded};
use crate::object::{Object, REGISTRIES, Registry};
use crate::pager::Pager;
use crate::pool::Pools;
use crate::promises::Promises;
use crate::setup::{Cx, PoolsOf, Setup, Task};
use crate::small_objects::Slabs;
use crate::tables::Tables;
use crate::zeroes::ZeroPages;
use core::fmt;
use core::ptr::NonNull;
use hugemm_base::counters::Counter;
use hugemm_base::platform::Cpu;
use hugemm_base::sync::{AtomicU64, Ordering, spin_loop};
use hugemm_base::{Order, Relief, Shortfall};
use hugemm_clear::Clearer;
use hugemm_frames::{AllocError, Frames, Placement, RELIEF_ROUNDS};
use hugemm_paging::{PageTable, ShootdownPolicy, TlbShootdown};

/// What a manager is made of. [`Parts::new`] knows what most of it is at first.
#[non_exhaustive]
pub struct Parts<'m, S: Setup> {
    /// Where pages and tables come from.
    pub frames: &'m Frames<'m, S::Env>,
    /// The TLBs of all CPUs.
    pub shootdown: &'m TlbShootdown<'m, S::Tlb>,
    /// What clears pages, by which policy.
    pub clearer: Clearer,
    /// How batches are flushed.
    pub shootdown_policy: ShootdownPolicy,
    /// Who takes pages away and brings them back, and is asked first when memory is short.
    pub pager: S::Pager,
    /// Who is asked when the pager has nothing to give: a balloon, whoever decides which process has to go. It may use the manager.
    pub last_resort: Option<&'m (dyn Relief<S::Platform> + Sync)>,
    /// Where pages of pooled areas come from. They lock as the frame allocator does.
    pub pools: PoolsOf<'m, S>,
}

impl<'m, S: Setup> Parts<'m, S> {
    /// What there has to be; whatever has a default value has it, and batches are flushed [once](ShootdownPolicy::BATCHED).
    pub fn new(frames: &'m Frames<'m, S::Env>, shootdown: &'m TlbShootdown<'m, S::Tlb>, clearer: Clearer) -> Self
    where
        S::Pager: Default,
    {
        Parts::with_pager(frames, shootdown, clearer, S::Pager::default())
    }

    /// The same with somebody who takes pages away.
    pub fn with_pager(
        frames: &'m Frames<'m, S::Env>,
        shootdown: &'m TlbShootdown<'m, S::Tlb>,
        clearer: Clearer,
        pager: S::Pager,
    ) -> Self {
        let (shootdown_policy, pools) = (ShootdownPolicy::BATCHED, Pools::default());
        Parts { frames, shootdown, clearer, shootdown_policy, pager, last_resort: None, pools }
    }
}

impl<S: Setup> fmt::Debug for Parts<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parts").finish_non_exhaustive()
    }
}

/// See the [crate's documentation](crate). Everything takes `&self`; several can exist side by side over different frames.
///
/// What it is lent, it is lent for all of `'m`, which is neither made shorter nor longer: it may use a [source](crate::source) as long as it
/// lives itself.
///
/// ```
/// # use hugemm_vm::{Setup, Vm};
/// fn same<'s, 'm, S: Setup>(vm: &'s Vm<'m, S>) -> &'s Vm<'m, S> { vm }
/// ```
///
/// ```compile_fail
/// # use hugemm_vm::{Setup, Vm};
/// fn shorter<'s, 'm, S: Setup>(vm: &'s Vm<'m, S>) -> &'s Vm<'s, S> { vm } // error: lifetime may not live long enough
/// ```
pub struct Vm<'m, S: Setup> {
    parts: Parts<'m, S>,
    /// What every space has besides its own addresses.
    common: Option<&'m PageTable<S::Format, S::Lock>>,
    slabs: Slabs<S>,
    registries: [Apart<Guarded<S::Lock, Registry<S>>>; REGISTRIES],
    promises: Guarded<S::Lock, Promises>,
    spaces_made: Apart<AtomicU64>,
    /// Unhooked pages that were dropped.
    pages_lost: Counter,
    /// Tasks that are writing pages back to their sources.
    writing: AtomicU64,
    zeroes: Apart<ZeroPages<S>>,
}

impl<S: Setup> fmt::Debug for Vm<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vm").finish_non_exhaustive()
    }
}

impl<'m, S: Setup> Vm<'m, S> {
    /// A manager without spaces. `None` if one of its own objects does not fit in a frame, which depends on the size of
    /// [`Setup::Lock`] and on the number of CPUs: 8192 fit.
    ///
    /// # Safety
    ///
    /// * The platform's [`PhysMap`](hugemm_base::PhysMap) is a direct map of all frames of `frames`: windows stay valid
    ///   without being closed, and one on a whole block spans it.
    /// * All contexts that are passed to the manager come from one platform, whose TLBs `shootdown` are.
    /// * The clearer's policy uses no primitive that needs more than the platform gives.
    pub unsafe fn new(parts: Parts<'m, S>) -> Option<Self> {
        Some(Vm {
            slabs: Slabs::new(parts.shootdown.cpus())?,
            parts,
            common: None,
            registries: core::array::from_fn(|own| Apart(Guarded::new(Registry::new(own)))),
            promises: Guarded::new(Promises::default()),
            spaces_made: Apart(AtomicU64::new(0)),
            pages_lost: Counter::default(),
            writing: AtomicU64::new(0),
            zeroes: Apart(ZeroPages::new()),
        })
    }

    /// The same, with the addresses of `common` in every space that is made from here on: a kernel's half. See
    /// [`PageTable::beside`].
    ///
    /// # Safety
    ///
    /// The tables of `common` are in frames that the manager's platform reaches as its own, and it is edited through its
    /// own handle only.
    pub unsafe fn beside(self, common: &'m PageTable<S::Format, S::Lock>) -> Self {
        Vm { common: Some(common), ..self }
    }

    /// The frame allocator.
    pub fn frames(&self) -> &'m Frames<'m, S::Env> {
        self.parts.frames
    }

    /// The TLBs.
    pub fn shootdown(&self) -> &'m TlbShootdown<'m, S::Tlb> {
        self.parts.shootdown
    }

    /// What clears.
    pub fn clearer(&self) -> &Clearer {
        &self.parts.clearer
    }

    /// Who takes pages away and brings them back.
    pub fn pager(&self) -> &S::Pager {
        &self.parts.pager
    }

    pub(crate) fn pools(&self) -> &PoolsOf<'m, S> {
        &self.parts.pools
    }

    /// How batches are flushed.
    pub(crate) fn shootdown_policy(&self) -> &ShootdownPolicy {
        &self.parts.shootdown_policy
    }

    pub(crate) fn common(&self) -> Option<&'m PageTable<S::Format, S::Lock>> {
        self.common
    }

    pub(crate) fn slabs(&self) -> &Slabs<S> {
        &self.slabs
    }

    /// Where an object of this number is.
    pub(crate) fn registry_of(&self, object: u64) -> &Guarded<S::Lock, Registry<S>> {
        &self.registries[object as usize % REGISTRIES].0
    }

    /// Where this CPU makes objects.
    pub(crate) fn own_registry(&self, cx: &Cx<'_, S>) -> &Guarded<S::Lock, Registry<S>> {
        self.registry_of(cpu::<S>(cx) as u64)
    }

    /// The object of this number, with a reference to it. O(log objects).
    pub(crate) fn object(&self, number: u64) -> Option<NonNull<Object<S>>> {
        self.registry_of(number).shared().get(number)
    }

    pub(crate) fn promises(&self) -> &Guarded<S::Lock, Promises> {
        &self.promises
    }

    /// Counts unhooked pages that are dropped.
    pub(crate) fn lost(&self) -> &Counter {
        &self.pages_lost
    }

    /// How many tasks are writing pages back.
    pub(crate) fn writing(&self) -> &AtomicU64 {
        &self.writing
    }

    pub(crate) fn zeroes(&self) -> &ZeroPages<S> {
        &self.zeroes.0
    }

    /// What tells the manager from others: it does not move while a space, an object or a pin of its own is there, all of
    /// which borrow it or keep something that does.
    pub(crate) fn identity(&self) -> usize {
        core::ptr::from_ref(self).addr()
    }

    /// An error unless the space is this manager's: another's is made of other frames and other small objects.
    pub(crate) fn check_own(&self, space: &AddressSpace<S>) -> Result<(), VmError> {
        if space.identity().is_of(self.identity()) { Ok(()) } else { Err(VmError::Foreign) }
    }

    /// A number that no space has had.
    pub(crate) fn next_space(&self) -> u64 {
        // Relaxed: only the number counts.
        self.spaces_made.0.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Page tables' memory for the calling task.
    pub(crate) fn tables<'a, 't, 'p>(&'a self, task: &'a Task<'t, 'p, S>) -> Tables<'a, 't, 'p, 'm, S> {
        // SAFETY: `new` requires a direct map of all frames.
        unsafe { Tables::new(self, task) }
    }

    /// Serves shootdowns and, where the caller may sleep, passes a reschedule point: for tasks that wait or work for long.
    pub(crate) fn cond_resched(&self, cx: &mut Cx<'_, S>) {
        self.shootdown().handle_ipi(cx);
        if cx.platform().may_sleep() {
            cx.cond_resched();
        } else {
            spin_loop();
        }
    }

    /// Tries until it succeeds, or nobody can give memory back. Called with nothing locked.
    pub(crate) fn relieved<'p, T>(
        &self,
        cx: &mut Cx<'p, S>,
        order: Order,
        from: Placement,
        mut attempt: impl FnMut(&mut Cx<'p, S>) -> Result<T, AllocError>,
    ) -> Result<T, VmError> {
        let pager = &self.parts.pager;
        let mut pager_gives = true;
        // What the pager keeps free is there: the pager alone is asked for more, and then it is taken. For a large block it is
        // asked as long as it gives: the next large page that it stores takes what it keeps.
        let rounds = if order == Order::ZERO { 1 } else { RELIEF_ROUNDS };
        for _ in 0..rounds {
            if !pager_gives || !S::Pager::ACTIVE || pager.may_take(self.parts.frames, cx, order) {
                break;
            }
            pager_gives = self.ask_relief(cx, order, from);
        }
        // Nobody is asked who had nothing to give just now.
        let done = match pager_gives {
            true => self.frames().or_relieve(cx, self, shortfall(order, from), attempt),
            false => attempt(cx).or_else(|_| attempt(cx)),
        };
        done.map_err(|_| VmError::NoMemory)
    }

    /// Asks for a block of `order`, from where it is to be; whether it may have helped.
    pub(crate) fn ask_relief(&self, cx: &mut Cx<'_, S>, order: Order, from: Placement) -> bool {
        self.frames().relieve(cx, self, shortfall(order, from))
    }

    /// After a page table had no memory for the `round`th time: whether to try again.
    pub(crate) fn may_retry(&self, cx: &mut Cx<'_, S>, round: u32) -> bool {
        round < RELIEF_ROUNDS && self.ask_relief(cx, Order::ZERO, Placement::Local)
    }
}

/// The one hook of all that allocates from the manager's frames, the manager itself included: the pager, and if that has nothing to give,
/// the [last resort](Parts::last_resort).
impl<S: Setup> Relief<S::Platform> for Vm<'_, S> {
    fn relieve(&self, cx: &mut Cx<'_, S>, need: Shortfall) -> u64 {
        match (self.parts.pager.relieve(self, cx, need), self.parts.last_resort) {
            (0, Some(last)) => last.relieve(cx, need),
            (freed, _) => freed,
        }
    }
}

/// That a block of `order` is missing, from where it is to be.
fn shortfall(order: Order, from: Placement) -> Shortfall {
    Shortfall::block(order).only(match from {
        Placement::Only(node) => Some(node),
        Placement::Local | Placement::Prefer(_) => None,
    })
}
