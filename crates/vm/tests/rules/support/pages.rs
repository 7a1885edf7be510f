//! What several tests do with pages: look at them, hold them, page them out; spaces that both CPUs have in their TLBs.

use super::{Cx, Handle, Model, Rig, bounds, span};
use hugemm_base::{Never, PageSize, Pfn, VirtAddr, VirtRange};
use hugemm_frames::{FolioRef, Frozen};
use hugemm_paging::{DeferredUnmap, Leaf, Lookup, PageFormat};
use hugemm_vm::{Access, AddressSpace, Backing, Pinned, SharedRef, UnhookedPage, VmError, VmaKind};

/// Where the tests' areas begin.
pub const AT: u64 = 0x4000_0000;

/// What most of them are.
pub const SMALL: VmaKind = VmaKind::private(PageSize::Size4K);

/// An object, and a space that shows it.
pub type Shown<'v, 'h, F, const AWAY: bool> = (SharedRef<'v, Model<'h, F, AWAY>>, Handle<'v, 'h, F, AWAY>);

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

    /// Takes a page that nobody else has out of its tables.
    pub fn unhook<'d>(
        &'d self,
        cx: &mut Cx<'_, 'h>,
        space: &AddressSpace<Model<'h, F, AWAY>>,
        at: u64,
        deferred: &'d DeferredUnmap,
    ) -> UnhookedPage<'d, 'h, Model<'h, F, AWAY>> {
        let head = self.leaf(cx, space, at).frame;
        let page = self.vm.unhook(cx, self.hold(head), deferred).expect("nobody else has it");
        assert_eq!(page.head(), head);
        page
    }

    /// Pins pages for a device that stores to them.
    pub fn pin(
        &self,
        cx: &mut Cx<'_, 'h>,
        space: &AddressSpace<Model<'h, F, AWAY>>,
        range: VirtRange,
    ) -> Vec<Pinned<'_>> {
        let mut pins = Vec::new();
        let pinned = self.vm.pin(cx, space, range, Access::Write, None, &Never, |pin| pins.push(pin));
        assert_eq!(pinned, Ok(range.pages()));
        pins
    }

    /// Ends that.
    pub fn unpin(&self, cx: &mut Cx<'_, 'h>, space: &AddressSpace<Model<'h, F, AWAY>>, pins: Vec<Pinned<'_>>) {
        pins.into_iter().for_each(|pin| self.vm.unpin(cx, space, pin).expect("its own"));
    }

    /// An object of so many pages, and a space that shows all of it at [`AT`].
    pub fn shown(&self, cx: &mut Cx<'_, 'h>, pages: u64) -> Shown<'_, 'h, F, AWAY> {
        let object = self.vm.create_shared(cx, pages, PageSize::Size4K, false).expect("an object");
        let space = self.vm.create(cx, bounds()).expect("a space");
        self.vm.map(cx, &space, span(AT, pages << 12), SMALL, Backing::Shared(&object, 0)).expect("an area");
        (object, space)
    }

    /// Ends a space that nobody uses, and an object.
    pub fn end_shown(&self, cx: &mut Cx<'_, 'h>, (object, space): Shown<'_, 'h, F, AWAY>) {
        self.vm.destroy(cx, space).expect("nobody uses it");
        self.vm.close(cx, object).expect("its own");
    }

    /// A space that both CPUs use, with so many pages at [`AT`], all written, and known to both TLBs.
    pub fn filled_for_both(&self, size: PageSize, pages: u64) -> Handle<'_, 'h, F, AWAY> {
        let area = span(AT, pages * size.bytes());
        let space = self.on(0, |cx| self.space(cx, area, VmaKind::private(size)));
        for cpu in [0, 1] {
            self.on(cpu, |cx| {
                self.enter(cx, &space);
                (0..pages).for_each(|page| self.store(cx, &space, AT + page * size.bytes(), page + 1).expect("memory"));
            });
        }
        space
    }

    /// Ends a space that both CPUs use.
    pub fn end_for_both(&self, space: Handle<'_, 'h, F, AWAY>) {
        self.on(1, |cx| self.leave(cx, &space));
        self.on(0, |cx| self.end(cx, space));
    }
}

impl<'h, F: PageFormat> Rig<'h, F, true> {
    /// Pages out what is mapped at an address.
    pub fn page_out(&self, cx: &mut Cx<'_, 'h>, space: &AddressSpace<Model<'h, F, true>>, at: u64) {
        let size = self.leaf(cx, space, at).size;
        let deferred = self.deferred();
        let unhooked = self.unhook(cx, space, at, &deferred);
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
        assert_eq!(freed.ok(), Some(size.pages()));
    }
}
