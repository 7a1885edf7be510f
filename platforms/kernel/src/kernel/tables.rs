//! The kernel's half of all address spaces: made at boot, on frames that the memory map gives, by the same range mapper as
//! everything later.
//!
//! Leaves are as large as the place allows: 1 GiB where the CPU has such pages. Only the image's code may be executed.

use super::arch::{Format, mmu};
use super::irq_lock::Noted;
use super::layout;
use super::machine::Machine;
use super::set_up;
use crate::memory_map::MemoryMap;
use core::ptr::NonNull;
use hugemm_base::{Extent, Order, PAGE_BYTES, PageSize, Pfn, VirtAddr, VirtRange};
use hugemm_paging::{EditLock, Editing, Flags, Mapping, NoTable, PageTable, PagingError, TableContent, TableMemory};
use spin::Once;

/// Data of the kernel. Hardware has nothing left to note.
const DATA: Flags = Flags::WRITE.with(Flags::GLOBAL).with(Flags::ACCESSED).with(Flags::DIRTY);
const CONSTANTS: Flags = Flags::GLOBAL.with(Flags::ACCESSED);
const CODE: Flags = CONSTANTS.with(Flags::EXEC);

/// With a lock that is looked for at reschedule points.
pub type KernelTable = PageTable<Format, EditLock<Noted>>;

static TABLE: Once<KernelTable> = Once::new();

/// The kernel's half.
pub fn kernel() -> &'static KernelTable {
    set_up(&TABLE)
}

/// The same, where every address space has it under its own root.
pub fn in_all_roots() -> Option<&'static KernelTable> {
    (!mmu::OWN_ROOT).then(kernel)
}

/// How leaves that CPUs are using are divided and joined by one store. `None` where an entry has to be broken first (arm64
/// without FEAT_BBM level 2): the kernel's own readers cannot wait until it is made again.
pub fn resizing() -> Option<Editing> {
    mmu::resizing()
}

/// Physical address of its root table.
pub(crate) fn root() -> u64 {
    kernel().root().start().get()
}

/// Tables from the memory map, before there is an allocator.
struct BootTables<'a>(&'a mut MemoryMap);

// SAFETY: the map gives each frame once; the direct map, of which the boot tables have the first 4 GiB, always has it at
// the same address, as it has the allocator's later.
unsafe impl TableMemory for BootTables<'_> {
    fn alloc(&mut self, _content: TableContent) -> Result<Pfn, NoTable> {
        let frame = self.0.take(1, Order::ZERO).map_err(|_| NoTable)?.base();
        // SAFETY: just taken, and reachable.
        unsafe { self.reach(frame).write_bytes(0, PAGE_BYTES as usize) };
        Ok(frame)
    }

    unsafe fn free(&mut self, table: Pfn) {
        if let Ok(frame) = Extent::new(table, 1) {
            // A map that is too fragmented to take it back loses a frame.
            let _ = self.0.give(frame);
        }
    }

    fn reach(&self, table: Pfn) -> NonNull<u8> {
        NonNull::new(layout::direct(table.start().get())).unwrap_or(NonNull::dangling())
    }
}

/// Whether leaves are changed later.
enum Changes {
    Never,
    /// One at a time: descriptors.
    ByLeaf,
}

/// Maps an extent at an address by the largest leaves that fit; folded, where the format knows that, if none of it is ever changed.
fn map(table: &KernelTable, free: &mut MemoryMap, at: u64, extent: Extent, flags: Flags, changes: Changes) {
    let largest = if mmu::has_gigantic_leaves() { PageSize::Size1G } else { PageSize::Size2M };
    let mapped = VirtRange::new(VirtAddr::new(at), extent.bytes())
        .map_err(|_| PagingError::OutOfBounds { at: VirtAddr::new(at) })
        .and_then(|span| {
            let (mut table, how) = (table.shared(BootTables(free)), Mapping { flags, largest });
            match changes {
                Changes::Never => table.map_folded(span, [extent], how),
                Changes::ByLeaf => table.map(span, [extent], how),
            }
        });
    mmu::wait_for_entries();
    mapped.unwrap_or_else(|error| panic!("the kernel cannot be mapped: {error}; use a larger --memory"));
}

fn extent(start: u64, end: u64) -> Extent {
    let (start, end) = (start / PAGE_BYTES, end.div_ceil(PAGE_BYTES));
    Extent::new(Pfn::new(start), end.saturating_sub(start)).unwrap_or_else(|error| panic!("{error}"))
}

/// Makes the kernel's half for a machine, on frames that it has free. Runs on the boot tables.
pub(crate) fn build(machine: &mut Machine) {
    mmu::set_control_bits();
    let Machine { map: memory, free, devices, .. } = machine;
    let upper = VirtRange::new(VirtAddr::new(layout::DIRECT), 1 << 47).unwrap_or_else(|error| panic!("{error}"));
    // SAFETY: every guard gets tables of the direct map's frames; what is taken away is flushed by `tlb::kernel_half`,
    // which every CPU joins as it starts.
    let table = unsafe { KernelTable::with_fixed_top(&mut BootTables(&mut *free), upper) };
    let table = table.unwrap_or_else(|error| panic!("{error}"));
    // The direct map, widened to 2 MiB; nothing is there twice.
    let huge = PageSize::Size2M.bytes();
    let mut from = 0;
    for piece in memory.pieces() {
        let start = (piece.start().get() & !(huge - 1)).max(from);
        let end = piece.end().start().get().next_multiple_of(huge);
        if end > start {
            map(&table, free, layout::DIRECT + start, extent(start, end), DATA, Changes::Never);
        }
        from = end.max(from);
    }
    let [text, rodata, data, end] = layout::image_parts();
    for (from, to, flags) in [(text, rodata, CODE), (rodata, data, CONSTANTS), (data, end, DATA)] {
        map(&table, free, from, extent(from - layout::IMAGE, to - layout::IMAGE), flags, Changes::Never);
    }
    let stack = free.take(layout::STACK_BYTES / PAGE_BYTES, Order::ZERO).unwrap_or_else(|error| panic!("{error}"));
    // SAFETY: just taken, and reachable on the boot tables; nobody runs on it yet. `stack::deepest` tells by it what was used.
    unsafe { layout::direct(stack.base().start().get()).write_bytes(0, layout::STACK_BYTES as usize) };
    map(&table, free, layout::BOOT_STACK[0], stack, DATA, Changes::Never);
    for (at, registers) in devices.iter().filter(|(_, registers)| !registers.is_empty()) {
        map(&table, free, *at, *registers, DATA | Flags::UNCACHED, Changes::Never);
    }
    TABLE.call_once(|| table);
}

/// Maps the descriptors of an arena at their place, by 2 MiB leaves on blocks of `free`, as far as `from` says that they
/// are not yet; returns where the next arena's begin. The boot CPU, on the kernel's tables, before other CPUs run.
pub(crate) fn map_descriptors(free: &mut MemoryMap, arena: Extent, from: u64) -> u64 {
    let huge = PageSize::Size2M;
    let at = |frame: u64| layout::DESCRIPTORS + frame * layout::DESCRIPTOR_BYTES;
    let start = (at(arena.base().get()) & !(huge.bytes() - 1)).max(from);
    let end = at(arena.end().get()).next_multiple_of(huge.bytes());
    let mut address = start;
    while address < end {
        let block = free.take(huge.pages(), huge.order()).unwrap_or_else(|error| panic!("{error}"));
        map(kernel(), free, address, block, DATA, Changes::ByLeaf);
        // SAFETY: just mapped; nobody else knows of it. The entries were empty before, so there is nothing to flush.
        unsafe { (address as *mut u8).write_bytes(0, huge.bytes() as usize) };
        address += huge.bytes();
    }
    end.max(from)
}
