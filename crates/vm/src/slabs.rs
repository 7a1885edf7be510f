//! Memory for the manager's own small objects: one slab for each type, which only that type reaches.

use crate::cpu_masks;
use crate::error::VmError;
use crate::notifier::Node;
use crate::object::Object;
use crate::setup::{Cx, Setup};
use crate::space::AddressSpace;
use crate::vm::Vm;
use crate::vma::Vma;
use core::ptr::NonNull;
use hugemm_base::Order;
use hugemm_frames::{Env, Placement, Slab};

type SlabOf<S> = Slab<<<S as Setup>::Env as Env>::Lock>;

/// The slabs of one manager.
pub(crate) struct Slabs<S: Setup> {
    spaces: SlabOf<S>,
    areas: SlabOf<S>,
    objects: SlabOf<S>,
    followers: SlabOf<S>,
}

impl<S: Setup> Slabs<S> {
    /// For spaces on so many CPUs. `None` if an object does not fit in a frame.
    pub(crate) fn new(cpus: usize) -> Option<Self> {
        let (size, align) = cpu_masks::layout::<AddressSpace<S>, S::Tlb>(cpus);
        Some(Slabs {
            spaces: Slab::new(size, align)?,
            areas: Slab::of::<Vma<S>>()?,
            objects: Slab::of::<Object<S>>()?,
            followers: Slab::of::<Node<S::Notifier>>()?,
        })
    }
}

/// A type that has a slab, whose objects are as large and aligned as a value of it at least.
pub(crate) trait Kept<S: Setup>: Sized {
    fn slab(slabs: &Slabs<S>) -> &SlabOf<S>;
}

impl<S: Setup> Kept<S> for AddressSpace<S> {
    fn slab(slabs: &Slabs<S>) -> &SlabOf<S> {
        &slabs.spaces
    }
}

impl<S: Setup> Kept<S> for Vma<S> {
    fn slab(slabs: &Slabs<S>) -> &SlabOf<S> {
        &slabs.areas
    }
}

impl<S: Setup> Kept<S> for Object<S> {
    fn slab(slabs: &Slabs<S>) -> &SlabOf<S> {
        &slabs.objects
    }
}

impl<S: Setup> Kept<S> for Node<S::Notifier> {
    fn slab(slabs: &Slabs<S>) -> &SlabOf<S> {
        &slabs.followers
    }
}

impl<S: Setup> Vm<'_, S> {
    /// Memory for a `T`, uninitialised; whoever takes memory away is asked if there is none. Called with nothing locked.
    pub(crate) fn memory_for<T: Kept<S>>(&self, cx: &mut Cx<'_, S>) -> Result<NonNull<T>, VmError> {
        let slab = T::slab(self.slabs());
        self.relieved(cx, Order::ZERO, Placement::Local, |cx| slab.alloc(self.frames(), cx, cx.platform()))
            .map(NonNull::cast)
    }

    /// Puts a value into memory of its own. Called with nothing locked.
    pub(crate) fn keep<T: Kept<S>>(&self, cx: &mut Cx<'_, S>, value: T) -> Result<NonNull<T>, VmError> {
        let memory = self.memory_for(cx)?;
        // SAFETY: memory for a value of this type, nobody else's.
        unsafe { memory.write(value) };
        Ok(memory)
    }

    /// The same without asking anybody for relief: for those who hold a lock.
    pub(crate) fn try_keep<T: Kept<S>>(&self, cx: &Cx<'_, S>, value: T) -> Result<NonNull<T>, VmError> {
        let memory =
            T::slab(self.slabs()).alloc(self.frames(), cx, cx.platform()).map_err(|_| VmError::NoMemory)?.cast();
        // SAFETY: as above.
        unsafe { memory.write(value) };
        Ok(memory)
    }

    /// Takes a value out of its memory and frees that.
    ///
    /// # Safety
    ///
    /// The value is this manager's, initialised, and nobody refers to it any more.
    pub(crate) unsafe fn take_back<T: Kept<S>>(&self, cx: &Cx<'_, S>, object: NonNull<T>) -> T {
        // SAFETY: the caller's promise: it is not read again.
        let value = unsafe { object.read() };
        // SAFETY: as above.
        unsafe { self.free_memory(cx, object) };
        value
    }

    /// Frees memory whose value, if it had one, has been taken out.
    ///
    /// # Safety
    ///
    /// It is this manager's, and nobody uses it any more.
    pub(crate) unsafe fn free_memory<T: Kept<S>>(&self, cx: &Cx<'_, S>, memory: NonNull<T>) {
        // SAFETY: the caller's promise; `T`'s memory comes from this slab only.
        unsafe { T::slab(self.slabs()).free(self.frames(), cx, cx.platform(), memory.cast()) };
    }

    /// Gives back the frames that the manager keeps for its own small objects. Any context but NMI; a lock round for each kind.
    pub fn trim(&self, cx: &Cx<'_, S>) {
        let Slabs { spaces, areas, objects, followers } = self.slabs();
        for slab in [spaces, areas, objects, followers] {
            // SAFETY: each slab is used with these frames and this platform's map only.
            unsafe { slab.trim(self.frames(), cx, cx.platform()) };
        }
    }
}
