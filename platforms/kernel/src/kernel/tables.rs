//! The kernel's half of all address spaces: made at boot, on frames that the memory map gives, by the same range mapper as
//! everything later.
//!
//! Leaves are as large as the place allows: 1 GiB where the CPU has such pages. Only the image's code may be executed.

use super::layout;
use super::once::Once;
use crate::memory_map::MemoryMap;
use core::ptr::NonNull;
use hugemm_base::{Extent, Order, PAGE_BYTES, PageSize, Pfn, VirtAddr, VirtRange};
use hugemm_paging::{Flags, Mapping, NoTable, PageTable, PagingError, TableContent, TableMemory, X86_64};
use raw_cpuid::CpuId;
use x86_64::registers::control::{Cr0, Cr0Flags, Cr4, Cr4Flags};

/// Data of the kernel. Hardware has nothing left to note.
const DATA: Flags = Flags::WRITE.with(Flags::GLOBAL).with(Flags::ACCESSED).with(Flags::DIRTY);
const CONSTANTS: Flags = Flags::GLOBAL.with(Flags::ACCESSED);
const CODE: Flags = CONSTANTS.with(Flags::EXEC);

static TABLE: Once<PageTable<X86_64>> = Once::new();

/// The kernel's half.
pub fn kernel() -> &'static PageTable<X86_64> {
    TABLE.get()
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

/// Maps an extent at an address by the largest leaves that fit.
fn map(table: &PageTable<X86_64>, free: &mut MemoryMap, at: u64, extent: Extent, flags: Flags) {
    let gib = CpuId::new().get_extended_processor_and_feature_identifiers().is_some_and(|info| info.has_1gib_pages());
    let largest = if gib { PageSize::Size1G } else { PageSize::Size2M };
    let mapped = VirtRange::new(VirtAddr::new(at), extent.bytes())
        .map_err(|_| PagingError::OutOfBounds { at: VirtAddr::new(at) })
        .and_then(|span| table.shared(BootTables(free)).map(span, [extent], Mapping { flags, largest }));
    mapped.unwrap_or_else(|error| panic!("the kernel cannot be mapped: {error}; use a larger --memory"));
}

fn extent(start: u64, end: u64) -> Extent {
    let (start, end) = (start / PAGE_BYTES, end.div_ceil(PAGE_BYTES));
    Extent::new(Pfn::new(start), end.saturating_sub(start)).unwrap_or_else(|error| panic!("{error}"))
}

/// Makes the kernel's half for the memory of `map`, on frames of `free`. Runs on the boot tables. `cpus` CPUs get stacks;
/// `apic` is where the interrupt controller's registers are.
pub(crate) fn build(memory: &MemoryMap, free: &mut MemoryMap, cpus: u32, apic: u64) {
    set_control_bits();
    let upper = VirtRange::new(VirtAddr::new(layout::DIRECT), 1 << 47).unwrap_or_else(|error| panic!("{error}"));
    // SAFETY: every guard gets tables of the direct map's frames; what is taken away is flushed by `tlb::kernel_half`,
    // which every CPU joins as it starts.
    let table = unsafe { PageTable::<X86_64>::with_fixed_top(&mut BootTables(free), upper) };
    let table = table.unwrap_or_else(|error| panic!("{error}"));
    // The direct map: from the first byte on, widened to 2 MiB; nothing is there twice.
    let huge = PageSize::Size2M.bytes();
    let mut from = 0;
    for piece in memory.pieces() {
        let start = if from == 0 { 0 } else { (piece.start().get() & !(huge - 1)).max(from) };
        let end = piece.end().start().get().next_multiple_of(huge);
        if end > start {
            map(&table, free, layout::DIRECT + start, extent(start, end), DATA);
        }
        from = end.max(from);
    }
    let [text, rodata, data, end] = layout::image_parts();
    for (from, to, flags) in [(text, rodata, CODE), (rodata, data, CONSTANTS), (data, end, DATA)] {
        map(&table, free, from, extent(from - layout::IMAGE, to - layout::IMAGE), flags);
    }
    for cpu in 0..cpus {
        let stack = free.take(layout::STACK_BYTES / PAGE_BYTES, Order::ZERO).unwrap_or_else(|error| panic!("{error}"));
        map(&table, free, layout::stack_bottom(cpu), stack, DATA);
    }
    map(&table, free, layout::DEVICES, extent(apic, apic + PAGE_BYTES), DATA | Flags::UNCACHED);
    // SAFETY: only the boot CPU runs, and nobody has asked for it.
    unsafe { TABLE.set(table) };
}

/// Maps the descriptors of an arena at their place, by 2 MiB leaves on blocks of `free`, as far as `from` says that they
/// are not yet; returns where the next arena's begin. The boot CPU, on the kernel's tables, before other CPUs run.
pub(crate) fn map_descriptors(free: &mut MemoryMap, arena: Extent, from: u64) -> u64 {
    let huge = PageSize::Size2M;
    let at = |frame: u64| layout::DESCRIPTORS + frame * layout::DESCRIPTOR_BYTES;
    let start = (at(arena.base().number()) & !(huge.bytes() - 1)).max(from);
    let end = at(arena.end().number()).next_multiple_of(huge.bytes());
    let mut address = start;
    while address < end {
        let block = free.take(huge.pages(), huge.order()).unwrap_or_else(|error| panic!("{error}"));
        map(kernel(), free, address, block, DATA);
        // SAFETY: just mapped; nobody else knows of it. The entries were empty before, so there is nothing to flush.
        unsafe { (address as *mut u8).write_bytes(0, huge.bytes() as usize) };
        address += huge.bytes();
    }
    end.max(from)
}

/// Control bits that every CPU has: write protection for the kernel too, global pages.
pub(crate) fn set_control_bits() {
    // SAFETY: the boot tables are writable where the kernel writes, and have no global entries.
    unsafe {
        Cr0::update(|cr0| {
            cr0.insert(Cr0Flags::WRITE_PROTECT);
            cr0.remove(Cr0Flags::CACHE_DISABLE | Cr0Flags::NOT_WRITE_THROUGH);
        });
        Cr4::update(|cr4| cr4.insert(Cr4Flags::PAGE_GLOBAL));
    }
}
