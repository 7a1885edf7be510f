//! Mistakes that an adapter might make, for the tests to find.

use crate::allocators::INNER;
use core::alloc::Layout;
use core::sync::atomic::{AtomicUsize, Ordering};
use ostd::mm::frame::GlobalFrameAllocator;
use ostd::mm::{PAGE_SIZE, Paddr};

/// How much memory is held back at the start.
const LATER: usize = 64 << 20;

/// Where it is, until it is added.
static HELD_BACK: AtomicUsize = AtomicUsize::new(0);

/// Adds the memory that was held back, or the first part of it; how many pages.
pub(crate) fn add_held_back(part: usize) -> usize {
    let address = HELD_BACK.load(Ordering::Relaxed);
    assert!(address != 0, "memory that can be held back");
    INNER.add_free_memory(address, LATER / part);
    LATER / part / PAGE_SIZE
}

/// In the order of their numbers, from 1.
const NAMES: [&str; 4] = ["double", "leak", "short", "refusal"];

static PLANT: AtomicUsize = AtomicUsize::new(0);
static CALLS: AtomicUsize = AtomicUsize::new(0);
static LAST: AtomicUsize = AtomicUsize::new(0);

/// From here on the mistake of this name is made now and then.
pub(crate) fn set(name: Option<&str>) {
    let number = name.map(|name| 1 + NAMES.iter().position(|known| *known == name).expect("a mistake that there is"));
    PLANT.store(number.unwrap_or(0), Ordering::Relaxed);
}

/// Whether the mistake is to be made now.
fn now(name: &str, every: usize) -> bool {
    let plant = PLANT.load(Ordering::Relaxed);
    plant != 0 && NAMES[plant - 1] == name && CALLS.fetch_add(1, Ordering::Relaxed) % every == every - 1
}

/// The kernel's allocator of frames, with mistakes.
#[derive(Debug)]
pub(crate) struct Planted;

impl GlobalFrameAllocator for Planted {
    #[inline]
    fn alloc(&self, layout: Layout) -> Option<Paddr> {
        if PLANT.load(Ordering::Relaxed) == 0 {
            return INNER.alloc(layout);
        }
        if layout.size() == PAGE_SIZE && now("double", 300) {
            return Some(LAST.load(Ordering::Relaxed));
        }
        if now("refusal", 400) {
            return None;
        }
        let address = INNER.alloc(layout)?;
        if layout.size() == PAGE_SIZE {
            LAST.store(address, Ordering::Relaxed);
        } else if now("short", 20) {
            INNER.dealloc(address + layout.size() - PAGE_SIZE, PAGE_SIZE);
        }
        Some(address)
    }

    #[inline]
    fn dealloc(&self, address: Paddr, size: usize) {
        if !now("leak", 500) {
            INNER.dealloc(address, size);
        }
    }

    /// Holds back the end of a large piece, for a test to add; and says everything twice, as who reads a map of memory might.
    fn add_free_memory(&self, address: Paddr, size: usize) {
        let mut rest = size;
        if size > 8 * LATER && HELD_BACK.load(Ordering::Relaxed) == 0 {
            rest -= LATER;
            HELD_BACK.store(address + rest, Ordering::Relaxed);
        }
        INNER.add_free_memory(address, rest);
        #[cfg(not(feature = "defaults"))]
        INNER.add_free_memory(address, rest);
    }
}
