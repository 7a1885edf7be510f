//! The manager of address spaces: what all spaces of a system share.

use crate::area::Area;
use crate::cpu_masks;
use crate::error::VmError;
use crate::followers::Node;
use crate::guarded::Guarded;
use crate::object::{Object, Registry};
use crate::pager::Pager;
use crate::setup::{Cx, Setup, Task};
use crate::space::Space;
use crate::tables::Tables;
use core::fmt;
use core::ptr::NonNull;
use hugemm_base::counters::Counter;
use hugemm_base::platform::Preempt;
use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{Order, Pressure, Shortfall};
use hugemm_clear::Clearer;
use hugemm_frames::{AllocError, Env, Frames, From, Slab};
use hugemm_paging::{PageTable, ShootdownPolicy, Tlbs};

/// How often exhaustion asks for relief before it is final.
const RELIEF_ROUNDS: u32 = 3;

/// What a manager is made of.
pub struct Parts<'m, S: Setup> {
    /// Where pages and tables come from.
    pub frames: &'m Frames<'m, S::Env>,
    /// The TLBs of all CPUs.
    pub tlbs: &'m Tlbs<'m, S::Tlb>,
    /// What clears pages, by which policy.
    pub clearer: Clearer,
    /// How batches are flushed.
    pub shootdown: ShootdownPolicy,
    /// Who takes pages away and brings them back, and is asked first when memory is short.
    pub pager: S::Pager,
    /// Who is asked then.
    pub pressure: S::Pressure,
    /// Where pages of pooled areas come from.
    pub pool: S::Pool,
}

impl<S: Setup> fmt::Debug for Parts<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parts").finish_non_exhaustive()
    }
}

/// Small objects of one type.
pub(crate) type SlabOf<S> = Slab<<<S as Setup>::Env as Env>::Lock>;

/// See the [crate's documentation](crate). Everything takes `&self`; several can exist side by side over different frames.
pub struct Vm<'m, S: Setup> {
    pub(crate) frames: &'m Frames<'m, S::Env>,
    pub(crate) tlbs: &'m Tlbs<'m, S::Tlb>,
    pub(crate) clearer: Clearer,
    pub(crate) shootdown: ShootdownPolicy,
    pub(crate) pager: S::Pager,
    pressure: S::Pressure,
    pub(crate) pool: S::Pool,
    /// What every space has besides its own addresses.
    pub(crate) common: Option<&'m PageTable<S::Format, S::Lock>>,
    pub(crate) space_slab: SlabOf<S>,
    pub(crate) area_slab: SlabOf<S>,
    pub(crate) object_slab: SlabOf<S>,
    pub(crate) follower_slab: SlabOf<S>,
    pub(crate) registry: Guarded<S::Lock, Registry<S>>,
    objects_made: AtomicU64,
    /// Unhooked pages that were dropped.
    pub(crate) pages_lost: Counter,
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
    /// * All contexts that are passed to the manager come from one platform, whose TLBs `tlbs` are.
    /// * The clearer's policy uses no primitive that needs more than the platform gives.
    pub unsafe fn new(parts: Parts<'m, S>) -> Option<Self> {
        Some(Vm {
            frames: parts.frames,
            tlbs: parts.tlbs,
            clearer: parts.clearer,
            shootdown: parts.shootdown,
            pager: parts.pager,
            pressure: parts.pressure,
            pool: parts.pool,
            common: None,
            space_slab: cpu_masks::slab::<S>(parts.tlbs.cpus())?,
            area_slab: Slab::of::<Area<S>>()?,
            object_slab: Slab::of::<Object<S>>()?,
            follower_slab: Slab::of::<Node<S>>()?,
            registry: Guarded::new(Registry::new()),
            objects_made: AtomicU64::new(0),
            pages_lost: Counter::default(),
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
        self.frames
    }

    /// The TLBs.
    pub fn tlbs(&self) -> &'m Tlbs<'m, S::Tlb> {
        self.tlbs
    }

    /// What clears.
    pub fn clearer(&self) -> &Clearer {
        &self.clearer
    }

    /// Who takes pages away and brings them back.
    pub fn pager(&self) -> &S::Pager {
        &self.pager
    }

    /// The pool.
    pub fn pool(&self) -> &S::Pool {
        &self.pool
    }

    /// Gives back the frames that the manager keeps for its own small objects.
    pub fn trim(&self, cx: &Cx<'_, S>) {
        for slab in [&self.space_slab, &self.area_slab, &self.object_slab, &self.follower_slab] {
            // SAFETY: each slab is used with these frames and this platform's map only.
            unsafe { slab.trim(self.frames, cx, cx.platform()) };
        }
    }

    /// What tells the manager from others: it does not move while a space, an object or a pin of its own is there, all of
    /// which borrow it or keep something that does.
    pub(crate) fn identity(&self) -> usize {
        core::ptr::from_ref(self).addr()
    }

    /// An error unless the space is this manager's: another's is made of other frames and other small objects.
    pub(crate) fn check_own(&self, space: &Space<S>) -> Result<(), VmError> {
        if space.manager == self.identity() { Ok(()) } else { Err(VmError::Foreign) }
    }

    /// A number that neither an object nor a space has had.
    pub(crate) fn next_object(&self) -> u64 {
        // Relaxed: only the number counts.
        self.objects_made.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Page tables' memory for the calling task.
    pub(crate) fn tables<'a, 't, 'p>(&'a self, task: &'a Task<'t, 'p, S>) -> Tables<'a, 't, 'p, 'm, S> {
        // SAFETY: `new` requires a direct map of all frames.
        unsafe { Tables::new(self.frames, task) }
    }

    /// Tries until it succeeds, or nobody can give memory back. Called with nothing locked.
    pub(crate) fn relieved<'p, T>(
        &self,
        cx: &mut Cx<'p, S>,
        order: Order,
        from: From,
        mut attempt: impl FnMut(&mut Cx<'p, S>) -> Result<T, AllocError>,
    ) -> Result<T, VmError> {
        for _ in 0..RELIEF_ROUNDS {
            let tried = match S::Pager::ACTIVE && !self.pager.may_take(self.frames, cx, order) {
                true => Err(AllocError::OutOfMemory),
                false => attempt(cx),
            };
            match tried {
                Ok(done) => return Ok(done),
                Err(AllocError::OutOfMemory) => {}
                Err(_) => return Err(VmError::NoMemory),
            }
            if !self.relieve(cx, order, from) {
                break;
            }
        }
        // What is kept free for reclaim serves when reclaim has nothing to do.
        attempt(cx).map_err(|_| VmError::NoMemory)
    }

    /// Asks for a block of `order`, from where it is to be; whether it may have helped.
    pub(crate) fn relieve(&self, cx: &mut Cx<'_, S>, order: Order, from: From) -> bool {
        let may_sleep = cx.platform().may_sleep();
        let node = match from {
            From::Only(node) => Some(node),
            From::Local | From::Prefer(_) => None,
        };
        let need = Shortfall { order, pages: order.pages(), node, may_sleep };
        self.pager.relieve(self, cx, need) != 0 || self.pressure.relieve(cx, need) != 0
    }

    /// After a page table had no memory for the `round`th time: whether to try again.
    pub(crate) fn may_retry(&self, cx: &mut Cx<'_, S>, round: u32) -> bool {
        round < RELIEF_ROUNDS && self.relieve(cx, Order::ZERO, From::Local)
    }

    /// Puts a value into memory of its own.
    pub(crate) fn new_in<T>(&self, slab: &SlabOf<S>, cx: &mut Cx<'_, S>, value: T) -> Result<NonNull<T>, VmError> {
        let memory =
            self.relieved(cx, Order::ZERO, From::Local, |cx| slab.alloc(self.frames, cx, cx.platform()))?.cast::<T>();
        // SAFETY: the slab was made for this type, nobody else's.
        unsafe { memory.write(value) };
        Ok(memory)
    }

    /// The same without asking anybody for relief: for those who hold a lock.
    pub(crate) fn try_new_in<T>(&self, slab: &SlabOf<S>, cx: &Cx<'_, S>, value: T) -> Result<NonNull<T>, VmError> {
        let memory = slab.alloc(self.frames, cx, cx.platform()).map_err(|_| VmError::NoMemory)?.cast::<T>();
        // SAFETY: the slab was made for this type, and the object is nobody else's.
        unsafe { memory.write(value) };
        Ok(memory)
    }

    /// Takes a value out of its memory and frees that.
    ///
    /// # Safety
    ///
    /// The object came from [`new_in`](Vm::new_in) with this slab, and nobody refers to it any more.
    pub(crate) unsafe fn take_from<T>(&self, slab: &SlabOf<S>, cx: &Cx<'_, S>, object: NonNull<T>) -> T {
        // SAFETY: the caller's promise: initialised, nobody else's, and not read again.
        let value = unsafe { object.read() };
        // SAFETY: as above.
        unsafe { slab.free(self.frames, cx, cx.platform(), object.cast()) };
        value
    }
}
