//! Page tables' memory, from the same frames as everything else.

use crate::setup::{Setup, Task};
use crate::vm::Vm;
use core::ptr::NonNull;
use hugemm_base::Pfn;
use hugemm_paging::{FrameTables, NoTable, TableContent, TableMemory};

/// [`FrameTables`] that borrow the task's context only while they use it, so that whoever visits entries can use it too.
pub(crate) struct Tables<'a, 't, 'p, 'm, S: Setup> {
    vm: &'a Vm<'m, S>,
    task: &'a Task<'t, 'p, S>,
}

impl<'a, 't, 'p, 'm, S: Setup> Tables<'a, 't, 'p, 'm, S> {
    /// # Safety
    ///
    /// As [`FrameTables::new`].
    pub(crate) unsafe fn new(vm: &'a Vm<'m, S>, task: &'a Task<'t, 'p, S>) -> Self {
        Tables { vm, task }
    }

    fn with<R>(&self, use_it: impl FnOnce(FrameTables<'_, 'p, 'm, S::Platform, S::Env>) -> R) -> R {
        let cx = self.task.borrow();
        // SAFETY: the promise made to `new`.
        use_it(unsafe { FrameTables::new(self.vm.frames(), &cx) })
    }
}

// SAFETY: passes everything on to `FrameTables` over the same frames and the same platform.
unsafe impl<S: Setup> TableMemory for Tables<'_, '_, '_, '_, S> {
    /// Tables are for what is new: what comes back, goes, or loses rights has its own.
    fn alloc(&mut self, content: TableContent) -> Result<Pfn, NoTable> {
        if self.vm.holds_back(&self.task.borrow()) {
            return Err(NoTable);
        }
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
