//! Taking the right to store away from pages of a space, giving it back, and what is known of stores.

use super::{BareSpace, memory};
use core::sync::atomic::{AtomicU64, Ordering};
use hugemm_base::{CpuCx, VirtAddr, VirtRange};
use hugemm_kernel::arch::Format;
use hugemm_kernel::layout;
use hugemm_kernel::platform::Kernel;
use hugemm_kernel::tlb::shootdown;
use hugemm_paging::{Change, Editing, Flags, Lookup, PageFormat, PagingError, ShootdownBatch, ShootdownPolicy, Stale};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By whole tables where the span covers them.
    Tables,
    Leaves,
    /// By whole tables, and no CPU is told: a planted bug.
    Untold,
}

impl BareSpace<'_> {
    /// Whether a store that was refused is tried again until it is allowed: the right to it is somebody else's to give back.
    pub(super) fn waits_for_rights(&self, at: VirtAddr) -> bool {
        core::hint::spin_loop();
        self.pages.is_some_and(|pages| pages.size(at).is_some())
    }

    fn settle(&self, cx: &CpuCx<'static, Kernel>, stale: Stale) {
        let mut batch = ShootdownBatch::new(&self.tlb);
        batch.stale(stale);
        let _receipt = batch.flush(shootdown(), cx, &ShootdownPolicy::BATCHED);
    }

    /// After it, no CPU stores to the span.
    pub fn seal(&self, cx: &mut CpuCx<'static, Kernel>, span: VirtRange, way: Way) -> Result<(), PagingError> {
        let mut table = self.table.exclusive(memory(cx));
        let stale = match way {
            Way::Tables | Way::Untold => table.write_protect(span)?,
            Way::Leaves => table.protect(span, Change { set: Flags::NONE, clear: Flags::WRITE }, Editing::LIVE)?,
        };
        drop(table);
        if way != Way::Untold {
            self.settle(cx, stale);
        }
        Ok(())
    }

    /// Allows stores to what is mapped in the span. More rights need no flush: who faults looks again.
    pub fn unseal(&self, cx: &mut CpuCx<'static, Kernel>, span: VirtRange) -> Result<(), PagingError> {
        let change = Change { set: Flags::WRITE, clear: Flags::NONE };
        self.table.shared(memory(cx)).protect(span, change).map(|_| ())
    }

    /// Forgets that the span was written.
    pub fn clean(&self, cx: &mut CpuCx<'static, Kernel>, span: VirtRange) -> Result<(), PagingError> {
        let change = Change { set: Flags::NONE, clear: Flags::DIRTY };
        let stale = self.table.shared(memory(cx)).protect(span, change)?;
        self.settle(cx, stale);
        Ok(())
    }

    /// Whether the page at an address is known to have been written; `None` if none is there.
    pub fn is_dirty(&self, cx: &mut CpuCx<'static, Kernel>, at: VirtAddr) -> Option<bool> {
        let found = self.table.shared(memory(cx)).lookup(at);
        match found {
            Lookup::Mapped(leaf) => Some(leaf.flags.contains(Flags::DIRTY)),
            Lookup::Absent | Lookup::Owner(_) | Lookup::Busy => None,
        }
    }

    pub fn age(&self, cx: &mut CpuCx<'static, Kernel>, span: VirtRange) -> Result<(), PagingError> {
        self.table.shared(memory(cx)).test_and_clear_young(span, |_| ()).map(|_| ())
    }

    /// The same of one page in the wrong way, on purpose: by a load and a store, `between` which hardware may have set
    /// the dirty bit.
    pub fn age_plainly(&self, at: VirtAddr, between: impl FnOnce()) {
        let mut table = self.table.root();
        for level in (0..4).rev() {
            let index = (at.get() >> (12 + 9 * level) & 511) as usize;
            let entry = layout::direct(table.start().get()).cast::<AtomicU64>().wrapping_add(index);
            // SAFETY: an entry of a table in the direct map; nothing of this space is unmapped while it is stressed.
            let entry = unsafe { &*entry };
            let seen = entry.load(Ordering::Relaxed);
            if seen & 1 == 0 {
                return;
            }
            if level == 0 {
                between();
                return entry.store(seen & !Format::ACCESSED, Ordering::Relaxed);
            }
            table = Format::frame(seen);
        }
    }
}
