//! What several tests do with pages: look at them, hold them, page them out; spaces that both CPUs have in their TLBs.

use super::{Cx, Handle, Model, Rig, span};
use hugemm_base::{CpuId, PageSize, Pfn, VirtAddr};
use hugemm_frames::{FolioRef, Frozen};
use hugemm_paging::{DeferredUnmap, Leaf, Lookup, PageFormat};
use hugemm_vm::{AddressSpace, UnhookedPage, VmError, VmaKind};

/// Where the tests' areas begin.
pub const AT: u64 = 0x4000_0000;

impl<'h, F: PageFormat, const AWAY: bool> Rig<'h, F, AWAY> {
    /// How many flushes there have been.
    pub fn flushes(&self) -> u64 {
        self.vm.shootdown().counts().flushes()
    }

    /// What is mapped at an address.
    pub fn leaf(&self, cx: &mut Cx<'_, 'h>, space: &AddressSpace<Model<'h, F, AWAY>>, at: u64) -> Leaf {
        match self.vm.lookup(cx, space, VirtAddr::new(at)) {
            Lookup::Mapped(leaf) => leaf,
            found => panic!("{found:?} at {at:#x}"),
        }
    }

    /// Another reference to a page that is mapped or unhooked.
    pub fn hold(&self, head: Pfn) -> FolioRef {
        // SAFETY: nobody else is there to let the tests' pages go.
        unsafe { self.vm.frames().get_at(head) }.expect("it has references")
    }

    /// One machine, one manager: whatever is unhooked is flushed by its TLBs.
    pub fn deferred(&self) -> DeferredUnmap {
        // SAFETY: used with this manager's TLBs only.
        unsafe { DeferredUnmap::new(self.vm.shootdown()) }.expect("few CPUs")
    }

    /// A space that both CPUs use, with so many pages at [`AT`], all written, and known to both TLBs.
    pub fn filled_for_both(&self, size: PageSize, pages: u64) -> Handle<'_, 'h, F, AWAY> {
        let area = span(AT, pages * size.bytes());
        let space = self.mmu.as_cpu(CpuId::new(0), |cx| self.space(cx, area, VmaKind::private(size)));
        for cpu in [0, 1] {
            self.mmu.as_cpu(CpuId::new(cpu), |cx| {
                self.enter(cx, &space);
                (0..pages).for_each(|page| self.store(cx, &space, AT + page * size.bytes(), page + 1).expect("memory"));
            });
        }
        space
    }

    /// Ends a space that both CPUs use.
    pub fn end_for_both(&self, space: Handle<'_, 'h, F, AWAY>) {
        self.mmu.as_cpu(CpuId::new(1), |cx| self.leave(cx, &space));
        self.mmu.as_cpu(CpuId::new(0), |cx| self.end(cx, space));
    }
}

impl<'h, F: PageFormat> Rig<'h, F, true> {
    /// Pages out what is mapped at an address.
    pub fn page_out(&self, cx: &mut Cx<'_, 'h>, space: &AddressSpace<Model<'h, F, true>>, at: u64) {
        let leaf = self.leaf(cx, space, at);
        let deferred = self.deferred();
        let unhooked = self.vm.unhook(cx, self.hold(leaf.frame), &deferred).expect("nobody else has it");
        let store = |cx: &Cx<'_, 'h>, block: &Frozen, page| self.vm.pager().store(cx, block, page);
        let freed: Result<u64, (VmError, UnhookedPage<'_, 'h, Model<'h, F, true>>)> =
            // SAFETY: the slots are new ones of this pager.
            unsafe {
                unhooked.page_out(
                    cx,
                    |cx: &Cx<'_, 'h>, block| Ok((store(cx, &block, 0), Some(block))),
                    |cx: &Cx<'_, 'h>, block: &Frozen, page| Ok(store(cx, block, page)),
                )
            };
        assert_eq!(freed.ok(), Some(leaf.size.pages()));
    }
}
