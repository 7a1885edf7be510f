//! Mistakes that an adapter might make, for the tests to find.

use crate::allocators::INNER;
use core::alloc::Layout;
use core::sync::atomic::{AtomicUsize, Ordering};
use ostd::mm::frame::GlobalFrameAllocator;
use ostd::mm::{PAGE_SIZE, Paddr};

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

    fn add_free_memory(&self, address: Paddr, size: usize) {
        INNER.add_free_memory(address, size);
    }
}
