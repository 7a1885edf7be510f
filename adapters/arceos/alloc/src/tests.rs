//! The whole of an allocator's life. There is one memory, so it is one test.

use crate::platform::ARCEOS;
use crate::{AllocError, GlobalPage, PAGE_SIZE, UsageKind, global_add_memory, global_allocator, global_init};
use core::alloc::{GlobalAlloc, Layout};
use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};

const MIB: usize = 1 << 20;
/// Addresses from here on have physical ones of 4 GiB and more.
const HIGH: usize = 32 * MIB;

/// What the reclaim function gives up: an address of a page, or 0.
static TO_GIVE: AtomicUsize = AtomicUsize::new(0);

fn give(_pages: usize) -> usize {
    match TO_GIVE.swap(0, Ordering::Relaxed) {
        0 => 0,
        page => {
            global_allocator().dealloc_pages(page, 1, UsageKind::PageCache);
            1
        }
    }
}

#[test]
fn memory_is_handed_over_allocated_counted_and_given_back() {
    let (memory, allocator) = (ARCEOS.memory(), global_allocator());
    let phys = |vaddr: usize| ARCEOS.virt_to_phys(vaddr);

    // Without memory.
    assert_eq!(allocator.alloc(Layout::new::<u64>()), Err(AllocError::NotInitialized));
    assert_eq!(allocator.alloc_pages(1, PAGE_SIZE, UsageKind::Global), Err(AllocError::NotInitialized));
    assert_eq!(global_add_memory(memory, MIB), Err(AllocError::NotInitialized));
    assert_eq!((allocator.used_bytes(), allocator.available_pages()), (0, 0));
    assert_eq!(global_init(memory, 2 * PAGE_SIZE), Err(AllocError::InvalidParam), "too little");
    assert_eq!(global_init(memory, 100), Err(AllocError::InvalidParam), "no page");
    assert_eq!(global_init(usize::MAX - 100, 4096), Err(AllocError::InvalidParam), "past the end");

    // Three pieces with holes: the first high, the second low, the third at no page's border; and one that is not worth it.
    assert_eq!(global_init(memory + HIGH, 16 * MIB), Ok(()));
    assert_eq!(global_init(memory + HIGH, 16 * MIB), Err(AllocError::AlreadyInitialized));
    assert_eq!(global_add_memory(memory + 8 * MIB, 4 * MIB), Ok(()));
    assert_eq!(global_add_memory(memory + 10 * MIB, 4 * MIB), Err(AllocError::MemoryOverlap));
    assert_eq!(global_add_memory(memory + HIGH + MIB, MIB), Err(AllocError::MemoryOverlap));
    let before = allocator.available_pages();
    assert_eq!(global_add_memory(memory + 2 * MIB, 3 * PAGE_SIZE), Ok(()), "left alone");
    assert_eq!(allocator.available_pages(), before);
    assert_eq!(global_add_memory(memory + 4 * MIB + 1, MIB), Ok(()));
    let third = allocator.available_pages() - before;
    assert!((200..=255).contains(&third), "{third}");
    assert_eq!(global_add_memory(1 << 30, MIB), Err(AllocError::InvalidParam), "mapped elsewhere");
    let (all, used) = (allocator.available_pages(), allocator.used_bytes());
    assert_eq!(used / PAGE_SIZE, 1, "what the heap has for its CPU");

    // Pages: numbers that are no powers of two, alignments above their size.
    for (pages, align) in
        [(1, 0), (1, PAGE_SIZE), (3, PAGE_SIZE), (5, 64 << 10), (1, MIB), (512, 2 * MIB), (257, PAGE_SIZE)]
    {
        let at = allocator.alloc_pages(pages, align, UsageKind::VirtMem).unwrap();
        assert!(at.is_multiple_of(align.max(PAGE_SIZE)), "{pages} {align}");
        assert!((memory..memory + 64 * MIB).contains(&at));
        assert_eq!(allocator.available_pages(), all - pages, "the rest of the block is free");
        assert_eq!(allocator.usages().get(UsageKind::VirtMem), pages * PAGE_SIZE);
        allocator.dealloc_pages(at, pages, UsageKind::VirtMem);
        assert_eq!((allocator.available_pages(), allocator.usages().get(UsageKind::VirtMem)), (all, 0));
    }
    for (pages, align) in
        [(0, PAGE_SIZE), (1, 3), (1, 100), (1, 2048), (1 << 19, PAGE_SIZE), (usize::MAX, PAGE_SIZE), (1, 1 << 40)]
    {
        assert_eq!(
            allocator.alloc_pages(pages, align, UsageKind::VirtMem),
            Err(AllocError::InvalidParam),
            "{pages} {align}"
        );
        assert_eq!(
            allocator.alloc_dma32_pages(pages, align, UsageKind::Dma),
            Err(AllocError::InvalidParam),
            "{pages} {align}"
        );
    }
    assert_eq!(allocator.alloc_pages(1 << 13, PAGE_SIZE, UsageKind::VirtMem), Err(AllocError::NoMemory));

    // Below 4 GiB, to the last page, and not above.
    let mut low = HashSet::new();
    while let Ok(at) = allocator.alloc_dma32_pages(1, PAGE_SIZE, UsageKind::Dma) {
        assert!(phys(at) < 4 << 30);
        assert!(low.insert(at), "handed out twice");
    }
    assert!(low.len() > 1200, "{}", low.len());
    assert_eq!(allocator.usages().get(UsageKind::Dma), low.len() * PAGE_SIZE);
    let high = allocator.alloc_pages(8, PAGE_SIZE, UsageKind::Global).unwrap();
    assert!(phys(high) >= 4 << 30);
    allocator.dealloc_pages(high, 8, UsageKind::Global);
    low.drain().for_each(|at| allocator.dealloc_pages(at, 1, UsageKind::Dma));

    // What this CPU has cached goes back when it has nothing to do.
    assert!(allocator.cached_pages() > 100, "{}", allocator.cached_pages());
    allocator.serve();
    assert_eq!((allocator.cached_pages(), allocator.available_pages()), (0, all));

    // Particular ones.
    let at = memory + 9 * MIB;
    assert_eq!(allocator.alloc_pages_at(at, 7, PAGE_SIZE, UsageKind::Global), Ok(at));
    assert_eq!(
        allocator.alloc_pages_at(at + 6 * PAGE_SIZE, 2, PAGE_SIZE, UsageKind::Global),
        Err(AllocError::NoMemory)
    );
    assert_eq!(
        allocator.alloc_pages_at(memory + 20 * MIB, 2, PAGE_SIZE, UsageKind::Global),
        Err(AllocError::InvalidParam)
    );
    assert_eq!(allocator.alloc_pages_at(at + 7 * PAGE_SIZE, 1, MIB, UsageKind::Global), Err(AllocError::InvalidParam));
    allocator.dealloc_pages(at, 7, UsageKind::Global);
    assert_eq!(allocator.available_pages(), all);

    // Bytes: aligned, apart, kept when they move, counted.
    let mut taken = Vec::new();
    for (at, size) in [1, 8, 24, 100, 2000, 3584, 4096, 5000, 9000, 70_000, MIB / 2].into_iter().enumerate() {
        for align in [1, 16, 64, 4096, 1 << 16] {
            let layout = Layout::from_size_align(size, align).unwrap();
            let memory = allocator.alloc(layout).unwrap();
            assert!(memory.addr().get().is_multiple_of(align));
            // SAFETY: just allocated.
            unsafe { memory.write_bytes(at as u8 + 1, size) };
            taken.push((memory, layout, at as u8 + 1));
        }
    }
    let bytes = taken.iter().map(|(_, layout, _)| layout.size()).sum::<usize>();
    assert_eq!(allocator.usages().get(UsageKind::RustHeap), bytes);
    assert!(allocator.used_bytes() >= used + bytes);
    for (memory, layout, value) in taken {
        // SAFETY: allocated above, of these layouts; freed once.
        unsafe {
            let more = allocator.realloc(memory.as_ptr(), layout, layout.size() * 2);
            assert!(!more.is_null(), "{layout:?}");
            assert!(core::slice::from_raw_parts(more, layout.size()).iter().all(|byte| *byte == value));
            let doubled = Layout::from_size_align(layout.size() * 2, layout.align()).unwrap();
            let less = allocator.realloc(more, doubled, layout.size() / 2 + 1);
            assert!(core::slice::from_raw_parts(less, layout.size() / 2 + 1).iter().all(|byte| *byte == value));
            GlobalAlloc::dealloc(
                allocator,
                less,
                Layout::from_size_align(layout.size() / 2 + 1, layout.align()).unwrap(),
            );
        }
    }
    assert_eq!(allocator.usages().get(UsageKind::RustHeap), 0);
    assert_eq!(allocator.alloc(Layout::from_size_align(2 << 30, 1).unwrap()), Err(AllocError::InvalidParam));

    // Pages with an owner.
    let free = allocator.available_pages();
    {
        let mut page = GlobalPage::alloc_contiguous(3, PAGE_SIZE).unwrap();
        page.fill(7);
        assert!(page.as_slice().iter().all(|byte| *byte == 7));
        assert_eq!((page.size(), allocator.available_pages()), (3 * PAGE_SIZE, free - 3));
        assert!(GlobalPage::alloc_zero().unwrap().as_slice().iter().all(|byte| *byte == 0));
    }
    assert_eq!(allocator.available_pages(), free);

    // When all is taken, whoever is registered is asked, and again nobody gives anything.
    crate::register_page_reclaim_fn(give);
    let mut pages = Vec::new();
    while let Ok(page) = allocator.alloc_pages(1, PAGE_SIZE, UsageKind::PageCache) {
        pages.push(page);
    }
    assert_eq!(allocator.alloc(Layout::new::<[u8; 8192]>()), Err(AllocError::NoMemory));
    TO_GIVE.store(pages.pop().unwrap(), Ordering::Relaxed);
    pages.push(allocator.alloc_pages(1, PAGE_SIZE, UsageKind::PageCache).expect("given up"));
    assert_eq!(allocator.alloc_pages(1, PAGE_SIZE, UsageKind::PageCache), Err(AllocError::NoMemory));
    assert_eq!(pages.iter().collect::<HashSet<_>>().len(), pages.len());
    pages.iter().for_each(|page| allocator.dealloc_pages(*page, 1, UsageKind::PageCache));
    assert_eq!(allocator.usages().get(UsageKind::PageCache), 0);
}
