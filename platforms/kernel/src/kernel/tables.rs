//! The kernel's own page tables, as they are at boot: built once by the boot CPU, on frames that the memory map gives.
//!
//! Leaves are as large as the place allows: 1 GiB where the CPU has such pages. Only the image's code may be executed.

use super::layout;
use core::sync::atomic::{AtomicU64, Ordering};
use hugemm_base::{Extent, Order, PAGE_BYTES, PageSize};
use hugemm_kernel::memory_map::MemoryMap;
use raw_cpuid::CpuId;
use x86_64::registers::control::{Cr0, Cr0Flags, Cr4, Cr4Flags};

const PRESENT: u64 = 1;
const WRITE: u64 = 1 << 1;
/// Uncached: the two cache bits, write-through and cache-disable.
const UNCACHED: u64 = 3 << 3;
const LARGE: u64 = 1 << 7;
const GLOBAL: u64 = 1 << 8;
const NO_EXECUTE: u64 = 1 << 63;

/// Address bits of an entry.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

const DATA: u64 = PRESENT | WRITE | GLOBAL | NO_EXECUTE;

static ROOT: AtomicU64 = AtomicU64::new(0);

/// Physical address of the kernel's root table.
pub fn root() -> u64 {
    ROOT.load(Ordering::Relaxed)
}

/// Tables under construction. Their frames are reached at their physical addresses plus `offset`.
struct Builder<'a> {
    root: u64,
    offset: u64,
    free: &'a mut MemoryMap,
    largest: PageSize,
}

impl Builder<'_> {
    fn frame(&mut self) -> u64 {
        let frame = self.free.take(1, Order::ZERO).unwrap_or_else(|error| panic!("{error}"));
        let at = frame.start().get();
        // SAFETY: the frame has just been taken and is reachable at the offset.
        unsafe { ((at + self.offset) as *mut u8).write_bytes(0, PAGE_BYTES as usize) };
        at
    }

    /// The entry for `address` in the table at `table`, which is `level` levels above the leaves.
    fn entry(&self, table: u64, level: u32, address: u64) -> *mut u64 {
        let index = address >> (12 + 9 * level) & 511;
        (table + self.offset + 8 * index) as *mut u64
    }

    /// Maps `bytes` bytes at `address` to `physical`, all multiples of 4 KiB, by the largest leaves that fit.
    fn map(&mut self, mut address: u64, mut physical: u64, mut bytes: u64, flags: u64) {
        while bytes > 0 {
            let size = [PageSize::Size1G, PageSize::Size2M, PageSize::Size4K].into_iter().find(|size| {
                *size <= self.largest && bytes >= size.bytes() && (address | physical).is_multiple_of(size.bytes())
            });
            let Some(size) = size else { panic!("a boot mapping of parts of pages") };
            let level = size.order().get() / 9;
            let mut table = self.root;
            for above in (level + 1..4).rev() {
                let entry = self.entry(table, above, address);
                // SAFETY: an entry of a table of this builder, which nobody else uses yet or changes.
                unsafe {
                    if entry.read() == 0 {
                        let below = self.frame();
                        entry.write(below | PRESENT | WRITE);
                    }
                    assert!(entry.read() & LARGE == 0, "two boot mappings at {address:#x}");
                    table = entry.read() & ADDRESS;
                }
            }
            let large = if level > 0 { LARGE } else { 0 };
            // SAFETY: as above.
            unsafe { self.entry(table, level, address).write(physical | flags | large) };
            (address, physical, bytes) = (address + size.bytes(), physical + size.bytes(), bytes - size.bytes());
        }
    }
}

/// Builds the tables for the memory of `map` on frames of `free`. Runs on the boot tables, where the first 4 GiB are
/// mapped one to one. `cpus` CPUs get stacks; `apic` is where the interrupt controller's registers are. Returns the root's physical address.
pub fn build(map: &MemoryMap, free: &mut MemoryMap, cpus: u32, apic: u64) -> u64 {
    set_control_bits();
    let gib = CpuId::new().get_extended_processor_and_feature_identifiers().is_some_and(|info| info.has_1gib_pages());
    let largest = if gib { PageSize::Size1G } else { PageSize::Size2M };
    let mut builder = Builder { root: 0, offset: 0, free, largest };
    builder.root = builder.frame();
    // All upper-half tables of the first level exist from the start, so that every address space can share them.
    for slot in 256..512_u64 {
        let table = builder.frame();
        let at = (builder.root + 8 * slot) as *mut u64;
        // SAFETY: an entry of the root table, which nobody uses yet.
        unsafe { at.write(table | PRESENT | WRITE) };
    }
    // The direct map: memory from the first 2 MiB on, widened to 2 MiB; nothing is there twice.
    let mut from = 0;
    for piece in map.pieces() {
        let huge = PageSize::Size2M.bytes();
        let start = (piece.start().get() & !(huge - 1)).max(from);
        let end = piece.end().start().get().next_multiple_of(huge);
        let start = if from == 0 { 0 } else { start };
        builder.map(layout::DIRECT + start, start, end.saturating_sub(start), DATA);
        from = end.max(from);
    }
    let [text, rodata, data, end] = layout::image_parts();
    let parts = [(text, rodata, PRESENT | GLOBAL), (rodata, data, PRESENT | GLOBAL | NO_EXECUTE), (data, end, DATA)];
    for (from, to, flags) in parts {
        builder.map(from, from - layout::IMAGE, to - from, flags);
    }
    for cpu in 0..cpus {
        for page in 0..layout::STACK_BYTES / PAGE_BYTES {
            let frame = builder.frame();
            builder.map(layout::stack_bottom(cpu) + page * PAGE_BYTES, frame, PAGE_BYTES, DATA);
        }
    }
    builder.map(layout::DEVICES, apic & ADDRESS, PAGE_BYTES, DATA | UNCACHED);
    ROOT.store(builder.root, Ordering::Relaxed);
    builder.root
}

/// Maps the descriptors of an arena at their place, by 2 MiB entries on blocks of `free`, as far as `from` says that they
/// are not yet; returns where the next arena's begin. The boot CPU, on the kernel's tables, before other CPUs run.
pub fn map_descriptors(free: &mut MemoryMap, arena: Extent, from: u64) -> u64 {
    let huge = PageSize::Size2M.bytes();
    let at = |frame: u64| layout::DESCRIPTORS + frame * 64;
    let start = (at(arena.base().number()) & !(huge - 1)).max(from);
    let end = at(arena.end().number()).next_multiple_of(huge);
    let mut address = start;
    while address < end {
        let block = free.take(PageSize::Size2M.pages(), PageSize::Size2M.order());
        let block = block.unwrap_or_else(|error| panic!("{error}"));
        let mut builder = Builder { root: root(), offset: layout::DIRECT, free, largest: PageSize::Size2M };
        builder.map(address, block.start().get(), huge, DATA);
        // SAFETY: just mapped; nobody else knows of it. The entries were empty before, so there is nothing to flush.
        unsafe { (address as *mut u8).write_bytes(0, huge as usize) };
        address += huge;
    }
    end.max(from)
}

/// Control bits that every CPU has: write protection for the kernel too, global pages.
pub fn set_control_bits() {
    // SAFETY: the boot tables are writable where the kernel writes, and have no global entries.
    unsafe {
        Cr0::update(|cr0| {
            cr0.insert(Cr0Flags::WRITE_PROTECT);
            cr0.remove(Cr0Flags::CACHE_DISABLE | Cr0Flags::NOT_WRITE_THROUGH);
        });
        Cr4::update(|cr4| cr4.insert(Cr4Flags::PAGE_GLOBAL));
    }
}
