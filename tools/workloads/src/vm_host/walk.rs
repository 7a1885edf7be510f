//! A guest's accesses: a walk of x86-64 tables in software that sets accessed and dirty bits as hardware does.

use core::ptr::NonNull;
use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{Extent, PAGE_SHIFT, Pfn, PhysAddr, PhysMap, VirtAddr};

const PRESENT: u64 = 1;
const WRITE: u64 = 1 << 1;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LEAF: u64 = 1 << 7;
const FRAME: u64 = 0x000f_ffff_ffff_f000;

/// Where the word at `at` is, for an access of this kind; `None` is a page fault.
///
/// # Safety
///
/// `root` is the root of four levels of tables that are not freed meanwhile, and the platform's map is direct.
pub(super) unsafe fn reach(platform: &impl PhysMap, root: PhysAddr, at: VirtAddr, write: bool) -> Option<NonNull<u64>> {
    let mut table = root.get();
    for level in (0..4).rev() {
        let index = at.get() >> (PAGE_SHIFT + 9 * level) & 511;
        let entry = word(platform, (table & FRAME) | index << 3)?.cast::<AtomicU64>();
        // SAFETY: an aligned word of a table, which everybody accesses atomically.
        let entry = unsafe { entry.as_ref() };
        // Acquire pairs with the Release that entered the table or the page: its content comes first.
        let value = entry.load(Ordering::Acquire);
        if value & PRESENT == 0 || (write && value & WRITE == 0) {
            return None;
        }
        if level > 0 && value & LEAF == 0 {
            table = value;
            continue;
        }
        // As hardware does: a locked update of the entry. Relaxed: nothing is published by it.
        entry.fetch_or(if write { ACCESSED | DIRTY } else { ACCESSED }, Ordering::Relaxed);
        let within = at.get() & ((1 << (PAGE_SHIFT + 9 * level)) - 1);
        let first = value & FRAME & !((1 << (PAGE_SHIFT + 9 * level)) - 1);
        return word(platform, first + within);
    }
    None
}

/// Where a word of physical memory is.
fn word(platform: &impl PhysMap, at: u64) -> Option<NonNull<u64>> {
    let frame = Extent::new(Pfn::containing(PhysAddr::new(at)), 1).ok()?;
    let window = platform.open(frame, None)?;
    // A direct map's window stays.
    NonNull::new(window.ptr.wrapping_add((at & 0xff8) as usize).cast())
}
