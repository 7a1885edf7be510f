//! Memory for the manager's own small objects.

use crate::error::VmError;
use crate::setup::{Cx, Setup};
use crate::small_objects::{Kept, Slabs};
use crate::vm::Vm;
use core::ptr::NonNull;
use hugemm_base::Order;
use hugemm_frames::{AllocError, Placement};

impl<S: Setup> Vm<'_, S> {
    /// Memory for a `T`, uninitialised; whoever takes memory away is asked if there is none. For those who free more by it: it may be
    /// what is kept for pages that come back. Called with nothing locked.
    pub(crate) fn memory_for<T: Kept<S>>(&self, cx: &mut Cx<'_, S>) -> Result<NonNull<T>, VmError> {
        self.relieved(cx, Order::ZERO, Placement::Local, |cx| self.slab_memory(cx))
    }

    fn slab_memory<T: Kept<S>>(&self, cx: &Cx<'_, S>) -> Result<NonNull<T>, AllocError> {
        // SAFETY: the slabs are used with this manager's frames and platform only, which outlive it.
        unsafe { T::slab(self.slabs()).alloc(self.frames(), cx, cx.platform()) }.map(NonNull::cast)
    }

    fn new_memory<T: Kept<S>>(&self, cx: &Cx<'_, S>) -> Result<NonNull<T>, AllocError> {
        if self.holds_back(cx) { Err(AllocError::OutOfMemory) } else { self.slab_memory(cx) }
    }

    /// Puts a value into memory of its own. Called with nothing locked.
    pub(crate) fn keep<T: Kept<S>>(&self, cx: &mut Cx<'_, S>, value: T) -> Result<NonNull<T>, VmError> {
        let memory = self.relieved(cx, Order::ZERO, Placement::Local, |cx| self.new_memory(cx))?;
        // SAFETY: memory for a value of this type, nobody else's.
        unsafe { memory.write(value) };
        Ok(memory)
    }

    /// The same without asking anybody for relief: for those who hold a lock.
    pub(crate) fn try_keep<T: Kept<S>>(&self, cx: &Cx<'_, S>, value: T) -> Result<NonNull<T>, VmError> {
        let memory = self.new_memory(cx).map_err(|_| VmError::NoMemory)?;
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

    /// Gives back the frames that the manager keeps for its own small objects, and pages of zeroes that no space shows. Any context but NMI; a lock round for each frame, and for each kind.
    pub fn trim(&self, cx: &Cx<'_, S>) {
        self.trim_zeroes(cx);
        let Slabs { spaces, areas, objects, followers, lines } = self.slabs();
        for slab in [spaces, areas, objects, followers, lines] {
            // SAFETY: each slab is used with these frames and this platform's map only.
            unsafe { slab.trim(self.frames(), cx, cx.platform()) };
        }
    }
}
