//! Page tables' memory, from the same frames as everything else.

use crate::setup::{Setup, Task};
use core::ptr::NonNull;
use hugemm_base::Pfn;
use hugemm_frames::Frames;
use hugemm_paging::{FrameTables, NoTable, TableContent, TableMemory};

/// [`FrameTables`] that borrow the task's context only while they use it, so that whoever visits entries can use it too.
pub(crate) struct Tables<'a, 't, 'p, 'm, S: Setup> {
    frames: &'a Frames<'m, S::Env>,
    task: &'a Task<'t, 'p, S>,
}

impl<'a, 't, 'p, 'm, S: Setup> Tables<'a, 't, 'p, 'm, S> {
    /// # Safety
    ///
    /// As [`FrameTables::new`].
    pub(crate) unsafe fn new(frames: &'a Frames<'m, S::Env>, task: &'a Task<'t, 'p, S>) -> Self {
        Tables { frames, task }
    }

    fn with<R>(&self, use_it: impl FnOnce(FrameTables<'_, 'p, 'm, S::Platform, S::Env>) -> R) -> R {
        let mut cx = self.task.borrow_mut();
        // SAFETY: the promise made to `new`.
        use_it(unsafe { FrameTables::new(self.frames, &mut cx) })
    }
}

// SAFETY: passes everything on to `FrameTables` over the same frames and the same platform.
unsafe impl<S: Setup> TableMemory for Tables<'_, '_, '_, '_, S> {
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
