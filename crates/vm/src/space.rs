//! Making and ending address spaces, and their page tables.

use crate::address_space::{AddressSpace, AddressSpaceRef, SpaceId};
use crate::cpu_lines::{self, CpuLines};
use crate::cpu_masks::{self, CpuMasks};
use crate::discard::may_go_unstored;
use crate::error::VmError;
use crate::setup::{Cx, Setup, Task};
use crate::vm::Vm;
use crate::vma::pages;
use core::cell::RefCell;
use core::marker::PhantomData;
use hugemm_base::{Pfn, VirtAddr, VirtRange};
use hugemm_paging::{Flags, Keep, Leaf, Lookup, PageFormat, PageTable, TableMemory, TlbSpace};

impl<'m, S: Setup> Vm<'m, S> {
    /// An empty address space for the addresses of `bounds`, one half of what the format translates at most. Two
    /// allocations: the root table and the space itself.
    ///
    /// # Errors
    ///
    /// [`NoMemory`](VmError::NoMemory); [`OutOfBounds`](VmError::OutOfBounds) if the format does not translate all of
    /// `bounds`; [`Paging`](VmError::Paging) if they share a root entry (512 GiB) with [the kernel's](Vm::beside).
    pub fn create<'v>(&'v self, cx: &mut Cx<'_, S>, bounds: VirtRange) -> Result<AddressSpaceRef<'v, S>, VmError> {
        let table = self.new_table(cx, bounds, self.common())?;
        let root = table.root();
        let memory = match self.memory_for::<AddressSpace<S>>(cx) {
            Ok(memory) => memory,
            Err(error) => {
                self.free_root(cx, root);
                return Err(error);
            }
        };
        // SAFETY: the slab was made for these CPUs; the masks are in the space, which is gone before its memory is.
        let masks = unsafe { CpuMasks::behind::<_, S::Tlb>(memory, self.shootdown().cpus()) };
        let (before, _) = cpu_masks::layout::<AddressSpace<S>, S::Tlb>(self.shootdown().cpus());
        // SAFETY: as above.
        let lines =
            unsafe { CpuLines::behind(memory.cast(), before, self.shootdown().cpus(), cpu_lines::cpu::<S>(cx)) };
        // SAFETY: the table was made above, with the half that all spaces have in common, and is retired after the space.
        let Ok(tlb) = (unsafe { TlbSpace::with_masks(self.shootdown(), root.start(), Keep, masks) }) else {
            // There are as many words as it takes, so this cannot be.
            // SAFETY: made above; nobody has seen it.
            unsafe { self.free_memory(cx, memory) };
            self.free_root(cx, root);
            return Err(VmError::OutOfBounds { at: bounds.start() });
        };
        let identity = SpaceId(self.identity(), self.next_space());
        let space = AddressSpace::new(identity, bounds, table, tlb, lines);
        // SAFETY: memory for a space, this task's.
        unsafe { memory.write(space) };
        Ok(AddressSpaceRef(memory, PhantomData))
    }

    /// Ends a space: everything is unmapped with one flush, and all memory given back. No CPU may have it loaded, except
    /// lazily; if one has, the space comes back with nothing mapped. If memory of it is pinned, though it may have been
    /// unmapped since, if somebody follows it, or if it is another manager's, it comes back as it was.
    ///
    /// Frames that small objects were in stay with their slabs: [`trim`](Vm::trim) gives back those that are empty.
    ///
    /// # Errors
    ///
    /// The space, and [`InUse`](VmError::InUse) or [`Foreign`](VmError::Foreign), as said.
    pub fn destroy<'v>(
        &'v self,
        cx: &mut Cx<'_, S>,
        space: AddressSpaceRef<'v, S>,
    ) -> Result<(), (VmError, AddressSpaceRef<'v, S>)> {
        if let Err(error) = self.check_own(&space) {
            return Err((error, space));
        }
        // The space is this task's alone, so nobody pins or follows it from here on.
        if space.lines().any_pinned() || space.is_followed() {
            return Err((VmError::InUse, space));
        }
        let bounds = space.table().bounds();
        space.set_exiting(true);
        if let Err(error) = self.unmap_all(cx, &space, bounds) {
            space.set_exiting(false);
            return Err((error, space));
        }
        let handle = space.0;
        // SAFETY: this task owns the space; no area is left through which others could reach it. If it is put back
        // below, the value read here is forgotten by being written.
        let mut owned = unsafe { handle.read() };
        let root = owned.table().root();
        match owned.tlb.retire(self.shootdown(), cx) {
            Ok(()) => {}
            Err(tlb) => {
                owned.tlb = tlb;
                owned.set_exiting(false);
                // SAFETY: as above; the memory holds what was moved out of it.
                unsafe { handle.write(owned) };
                return Err((VmError::InUse, space));
            }
        }
        self.discount_zeroes(cx, &owned.shows_zeroes);
        // No CPU walks the tables any more, and nothing hangs below the root.
        self.free_root(cx, root);
        // SAFETY: the space is this task's alone.
        for line in unsafe { owned.lines.drain() } {
            // SAFETY: made by `here`; nobody uses it any more.
            unsafe { self.free_memory(cx, line) };
        }
        // SAFETY: made by `create`; the contents were moved out above and are taken apart.
        unsafe { self.free_memory(cx, handle) };
        Ok(())
    }

    /// What an address is mapped to. For tests, tools and followers; right only while nothing changes. Of another manager's
    /// spaces this one knows nothing: [`Absent`](Lookup::Absent).
    pub fn lookup(&self, cx: &mut Cx<'_, S>, space: &AddressSpace<S>, at: VirtAddr) -> Lookup {
        if self.check_own(space).is_err() {
            return Lookup::Absent;
        }
        let here = self.here(cx, space);
        let task = RefCell::new(cx);
        let found = here.table(self.tables(&task)).lookup(at);
        match found {
            // Who stores by a table of his own is not noted in this one: a fault notes it first.
            Lookup::Mapped(leaf) if may_go_unstored(leaf.flags) => {
                Lookup::Mapped(Leaf { flags: leaf.flags.without(Flags::WRITE), ..leaf })
            }
            found => found,
        }
    }

    /// A page table, for a space, or for a shared object's index, which has no addresses `beside` its own. It translates
    /// whole entries of its root, so that nothing remains below the root when all of it has been unmapped.
    pub(crate) fn new_table(
        &self,
        cx: &mut Cx<'_, S>,
        span: VirtRange,
        beside: Option<&PageTable<S::Format, S::Lock>>,
    ) -> Result<PageTable<S::Format, S::Lock>, VmError> {
        let entry = 1_u64 << (9 * (S::Format::LEVELS - 1));
        let (first, end) = (span.first_page() / entry * entry, span.end_page().next_multiple_of(entry));
        let bounds = pages(first, end).ok_or(VmError::OutOfBounds { at: span.start() })?;
        for round in 0.. {
            let task: Task<'_, '_, S> = RefCell::new(cx);
            let mut memory = self.tables(&task);
            // SAFETY: all guards get memory over the manager's frames; everything that is detached in a space is flushed
            // through its `TlbSpace` (see `unmap.rs`, `cow.rs`), and no CPU walks an index. What `Vm::beside` was given is
            // over the same frames.
            let made = unsafe {
                match beside {
                    Some(common) => PageTable::beside(&mut memory, bounds, common),
                    None => PageTable::new(&mut memory, bounds),
                }
            };
            match made {
                Ok(table) => return Ok(table),
                Err(hugemm_paging::PagingError::NoTable) if self.may_retry(cx, round) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(VmError::NoMemory)
    }

    /// Frees the root of a table that is empty and that nobody walks.
    pub(crate) fn free_root(&self, cx: &mut Cx<'_, S>, root: Pfn) {
        let task = RefCell::new(cx);
        // SAFETY: by the contract; the root came from `PageTable::new` over the same memory.
        unsafe { self.tables(&task).free(root) };
    }
}
