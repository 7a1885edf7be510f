//! What the tests run on: tables from the heap that notice misuse, hardware that walks them, and a per-page oracle.
#![allow(dead_code, unreachable_pub)]

pub mod ops;
pub mod oracle;

use hugemm_base::inject::{Inject, NoFaults};
use hugemm_base::{Extent, PAGE_SHIFT, Pfn, VirtAddr, VirtRange};
use hugemm_paging::{FAULT_TABLE, NoTable, PageFormat, TableContent, TableMemory};
use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeSet;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of the first table frame: tables and mapped frames must not be confused.
const FIRST: u64 = 0x100_0000;

/// Looks like a present leaf, so that an entry that was never written is noticed.
const GARBAGE: u64 = 0x0000_0666_6666_6fff;

struct State {
    pages: Vec<NonNull<u8>>,
    free: Vec<u64>,
    live: BTreeSet<u64>,
}

/// Table frames from the heap. Freed ones are filled with garbage; all are released at the end.
pub struct Heap<I = NoFaults> {
    state: Mutex<State>,
    inject: I,
}

// SAFETY: the pages are plain memory.
unsafe impl<I: Sync> Sync for Heap<I> {}

const PAGE: Layout = match Layout::from_size_align(4096, 4096) {
    Ok(layout) => layout,
    Err(_) => panic!("a page"),
};

impl<I: Inject> Heap<I> {
    pub fn new(inject: I) -> Self {
        Heap { state: Mutex::new(State { pages: Vec::new(), free: Vec::new(), live: BTreeSet::new() }), inject }
    }

    /// How many tables are in use.
    pub fn live(&self) -> usize {
        self.state.lock().expect("heap").live.len()
    }
}

fn fill(page: NonNull<u8>, value: u64) {
    for index in 0..512 {
        // SAFETY: within a page that is nobody else's.
        unsafe { page.cast::<u64>().add(index).write(value) };
    }
}

// SAFETY: each number names one page, given out once at a time; pages are released only with the heap.
unsafe impl<I: Inject> TableMemory for &Heap<I> {
    fn alloc(&mut self, content: TableContent) -> Result<Pfn, NoTable> {
        if self.inject.fault(FAULT_TABLE) {
            return Err(NoTable);
        }
        let mut state = self.state.lock().expect("heap");
        let index = state.free.pop().unwrap_or_else(|| {
            // SAFETY: the layout is not empty.
            let page = unsafe { alloc(PAGE) };
            state.pages.push(NonNull::new(page).expect("memory"));
            state.pages.len() as u64 - 1
        });
        state.live.insert(index);
        fill(state.pages[index as usize], if content == TableContent::Zero { 0 } else { GARBAGE });
        Ok(Pfn::new(FIRST + index))
    }

    unsafe fn free(&mut self, table: Pfn) {
        let mut state = self.state.lock().expect("heap");
        let index = table.get() - FIRST;
        assert!(state.live.remove(&index), "freed twice: {table:?}");
        fill(state.pages[index as usize], GARBAGE);
        state.free.push(index);
    }

    fn reach(&self, table: Pfn) -> NonNull<u8> {
        self.state.lock().expect("heap").pages[(table.get() - FIRST) as usize]
    }
}

impl<I> Drop for Heap<I> {
    fn drop(&mut self) {
        for page in &self.state.get_mut().expect("heap").pages {
            // SAFETY: allocated with this layout.
            unsafe { dealloc(page.as_ptr(), PAGE) };
        }
    }
}

/// What a CPU does on an access: walks the tables as they are and sets accessed and dirty bits by locked updates.
/// Returns the frame, or `None` for a fault.
pub fn access<F: PageFormat, I: Inject>(heap: &Heap<I>, root: Pfn, at: VirtAddr, write: bool) -> Option<Pfn> {
    let page = at.get() >> PAGE_SHIFT;
    let mut frame = root;
    let mut writable = true;
    for level in (0..F::LEVELS).rev() {
        let index = (page >> (9 * level)) as usize & 511;
        // SAFETY: a live table of the heap; all accesses to it are atomic while it is hooked in.
        let entry = unsafe { heap.reach(frame).cast::<AtomicU64>().add(index).as_ref() };
        let mut seen = entry.load(Ordering::Relaxed);
        loop {
            if seen & 1 == 0 {
                return None;
            }
            if !F::is_leaf(seen, level) {
                writable &= (seen ^ F::table(F::frame(seen))) & F::READ_ONLY_TABLE == 0;
                frame = F::frame(seen);
                break;
            }
            let flags = F::flags(seen);
            if write && !(writable && flags.contains(hugemm_paging::Flags::WRITE)) {
                return None;
            }
            let set = if write { hugemm_paging::Flags::HARDWARE } else { hugemm_paging::Flags::ACCESSED };
            let new = F::change(seen, set, hugemm_paging::Flags::NONE);
            match entry.compare_exchange(seen, new, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => {
                    let inside = page & ((1 << (9 * level)) - 1);
                    return Some(Pfn::new(F::frame(seen).get() + inside));
                }
                Err(now) => seen = now,
            }
        }
    }
    None
}

pub fn extent(base: u64, pages: u64) -> Extent {
    Extent::new(Pfn::new(base), pages).expect("in range")
}

/// Page number to address.
pub fn at(page: u64) -> VirtAddr {
    VirtAddr::new(page << PAGE_SHIFT)
}

pub fn span(first: u64, pages: u64) -> VirtRange {
    VirtRange::new(at(first), pages << PAGE_SHIFT).expect("a span")
}

/// All of the lower half (of what x86-64 has with as many levels).
pub fn lower<F: PageFormat>() -> VirtRange {
    span(0, 1 << (9 * F::LEVELS - 1))
}
