//! A guest's accesses: a walk of its tables in software that notes accesses and stores as hardware does.

use core::marker::PhantomData;
use core::ptr::NonNull;
use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{CpuPin, Extent, PAGE_SHIFT, Pfn, PhysAddr, PhysMap, VirtAddr};
use hugemm_paging::{Flags, PageFormat};

/// Words of a page.
const WORDS: usize = 512;

/// A page that was found, as long as the CPU that found it is pinned: until then it answers no flush, and the page is nobody else's.
pub(super) struct Reached<'pin> {
    first: NonNull<u64>,
    pinned: PhantomData<CpuPin<'pin>>,
}

impl Reached<'_> {
    /// The word of this index, which counts modulo a page's words.
    pub(super) fn read(&self, index: usize) -> u64 {
        // SAFETY: a word of the page, by `reach`'s contract.
        unsafe { self.first.add(index % WORDS).read() }
    }

    /// Writes that word, and returns what was there. To be used only if the page was reached for writing.
    pub(super) fn replace(&self, index: usize, value: u64) -> u64 {
        // SAFETY: as in `read`.
        unsafe { self.first.add(index % WORDS).replace(value) }
    }
}

/// The page at `at`, for an access of this kind; `None` is a page fault.
///
/// # Safety
///
/// That of [`walk`]. Whoever takes a page away waits until the calling CPU is not pinned, before it uses the page.
pub(super) unsafe fn reach<'pin, F: PageFormat>(
    platform: &impl PhysMap,
    _pin: CpuPin<'pin>,
    root: PhysAddr,
    at: VirtAddr,
    write: bool,
) -> Option<Reached<'pin>> {
    // SAFETY: the caller's promise.
    let Leaf { start, level, .. } = unsafe { walk::<F>(platform, root, at, write) }?;
    let within = at.get() & ((1 << (PAGE_SHIFT + 9 * level)) - (1 << PAGE_SHIFT));
    Some(Reached { first: word(platform, start + within)?, pinned: PhantomData })
}

/// A leaf as a walk has left it.
#[derive(Clone, Copy, Debug)]
pub struct Leaf {
    /// The first byte of its memory.
    pub start: u64,
    /// 0 is 4 KiB.
    pub level: u32,
    /// What it allows, and what has been noted in it before.
    pub flags: Flags,
}

/// Walks tables as hardware does for an access to `at`, and notes it in the leaf; `None` is a page fault.
///
/// # Safety
///
/// `root` is the root of tables of this format that are not freed meanwhile, and the platform's map is direct.
pub unsafe fn walk<F: PageFormat>(platform: &impl PhysMap, root: PhysAddr, at: VirtAddr, write: bool) -> Option<Leaf> {
    let (needs, notes) = if write { (Flags::WRITE, Flags::HARDWARE) } else { (Flags::NONE, Flags::ACCESSED) };
    let mut table = root.get();
    for level in (0..F::LEVELS).rev() {
        let index = at.get() >> (PAGE_SHIFT + 9 * level) & 511;
        let entry = word(platform, table | index << 3)?.cast::<AtomicU64>();
        // SAFETY: an aligned word of a table, which everybody accesses atomically.
        let entry = unsafe { entry.as_ref() };
        // Acquire pairs with the Release that entered the table or the page: its content comes first.
        let mut value = entry.load(Ordering::Acquire);
        loop {
            // Bit 0 alone says whether hardware uses an entry.
            if value & 1 == 0 {
                return None;
            }
            if level > 0 && !F::is_leaf(value, level) {
                if write && (value ^ F::table(Pfn::new(0))) & F::READ_ONLY_TABLE != 0 {
                    return None;
                }
                table = F::frame(value).start().get();
                break;
            }
            let flags = F::flags(value);
            if !flags.contains(needs) {
                return None;
            }
            let start = F::frame(value).start().get();
            // As hardware does: an atomic update of the entry, if it says anything new. Acquire as above; nothing is published by it.
            if flags.contains(notes) {
                return Some(Leaf { start, level, flags });
            }
            match entry.compare_exchange(
                value,
                F::change(value, notes, Flags::NONE),
                Ordering::Acquire,
                Ordering::Acquire,
            ) {
                Ok(_) => return Some(Leaf { start, level, flags }),
                Err(now) => value = now,
            }
        }
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
