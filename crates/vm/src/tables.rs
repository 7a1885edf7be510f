//! Page tables' memory, from the same frames as everything else.

use core::cell::RefCell;
use core::ptr::NonNull;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Pfn, PhysMap};
use hugemm_frames::{Env, Frames};
use hugemm_paging::{FrameTables, NoTable, TableContent, TableMemory};

/// [`FrameTables`] that borrow the task's context only while they use it, so that whoever visits entries can use it too.
pub(crate) struct Tables<'a, 't, 'p, 'm, P, E: Env> {
    frames: &'a Frames<'m, E>,
    task: &'a RefCell<&'t mut CpuCx<'p, P>>,
}

impl<'a, 't, 'p, 'm, P: Cpu + PhysMap, E: Env> Tables<'a, 't, 'p, 'm, P, E> {
    /// # Safety
    ///
    /// As [`FrameTables::new`].
    pub(crate) unsafe fn new(frames: &'a Frames<'m, E>, task: &'a RefCell<&'t mut CpuCx<'p, P>>) -> Self {
        Tables { frames, task }
    }

    fn with<R>(&self, use_it: impl FnOnce(FrameTables<'_, 'p, 'm, P, E>) -> R) -> R {
        let mut cx = self.task.borrow_mut();
        // SAFETY: the promise made to `new`.
        use_it(unsafe { FrameTables::new(self.frames, &mut cx) })
    }
}

// SAFETY: passes everything on to `FrameTables` over the same frames and the same platform.
unsafe impl<P: Cpu + PhysMap, E: Env> TableMemory for Tables<'_, '_, '_, '_, P, E> {
    fn alloc(&mut self, content: TableContent) -> Result<Pfn, NoTable> {
        self.with(|mut tables| tables.alloc(content))
    }

    unsafe fn free(&mut self, table: Pfn) {
        // SAFETY: the caller's promise, passed on.
        self.with(|mut tables| unsafe { tables.free(table) });
    }

    fn reach(&self, table: Pfn) -> NonNull<u8> {
        self.with(|tables| tables.reach(table))
    }
}
