//! Our tests: what OSTD's own do not ask of an allocator.

use crate::allocators::{FRAMES, free_pages, trim};
use crate::cpus;
use alloc::alloc::{alloc, dealloc};
use alloc::vec::Vec;
use core::alloc::Layout;
use core::sync::atomic::{AtomicUsize, Ordering};
use ostd::cpu::num_cpus;
use ostd::mm::frame::GlobalFrameAllocator;
use ostd::mm::io::util::HasVmReaderWriter;
use ostd::mm::{Frame, FrameAllocOptions, HasPaddr, HasSize, PAGE_SIZE, Paddr, Segment};
use ostd::prelude::ktest;

/// A cheap sequence of numbers.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}

fn trim_all() {
    cpus::on(num_cpus(), |_| trim());
}

/// Runs `work` and asserts that afterwards as many frames are free as before.
fn loses_nothing(work: impl FnOnce()) {
    trim_all();
    let before = free_pages();
    work();
    trim_all();
    assert_eq!(free_pages(), before, "frames are missing, or there are too many");
}

fn raw(pages: usize) -> FrameAllocOptions {
    let mut options = FrameAllocOptions::new();
    options.zeroed(false);
    assert!(pages > 0);
    options
}

/// Marks each page of a segment as this owner's.
fn mark(segment: &Segment<()>, owner: u64) {
    let mut writer = segment.writer();
    for page in 0..writer.avail() / PAGE_SIZE {
        writer.write_val(&(owner + page as u64)).expect("room for it");
        writer.skip(PAGE_SIZE - 8);
    }
}

fn is_marked(segment: &Segment<()>, owner: u64) -> bool {
    let mut reader = segment.reader();
    (0..reader.remain() / PAGE_SIZE).all(|page| {
        let found: u64 = reader.read_val().expect("written");
        reader.skip(PAGE_SIZE - 8);
        found == owner + page as u64
    })
}

#[ktest]
fn blocks_are_aligned_as_asked_for() {
    loses_nothing(|| {
        for pages in [1, 2, 3, 5, 16, 100, 512, 513] {
            for log in 12..=21 {
                let layout = Layout::from_size_align(pages * PAGE_SIZE, 1 << log).unwrap();
                let held: Vec<Paddr> = (0..3).map(|_| FRAMES.alloc(layout).expect("memory")).collect();
                for (index, address) in held.iter().enumerate() {
                    assert_eq!(address % layout.align(), 0, "{layout:?}");
                    let apart = |other: &Paddr| other.abs_diff(*address) >= layout.size();
                    assert!(held[..index].iter().all(apart), "{layout:?}: two overlap");
                }
                for address in held {
                    // In pieces, last first.
                    let half = pages / 2 * PAGE_SIZE;
                    FRAMES.dealloc(address + half, layout.size() - half);
                    (0..pages / 2).rev().for_each(|page| FRAMES.dealloc(address + page * PAGE_SIZE, PAGE_SIZE));
                }
            }
        }
    });
}

#[ktest]
fn what_no_layout_allows_is_refused() {
    loses_nothing(|| {
        for (size, align) in [(0, PAGE_SIZE), (PAGE_SIZE, 1 << 31), (1 << 31, PAGE_SIZE), (1 << 62, 1 << 62)] {
            assert_eq!(FRAMES.alloc(Layout::from_size_align(size, align).unwrap()), None, "{size} {align}");
        }
    });
}

#[ktest]
fn segments_of_2_mib_and_1_gib_come_and_go() {
    loses_nothing(|| {
        for _ in 0..3 {
            let large: Vec<_> = (0..20).map(|_| raw(512).alloc_segment(512).expect("2 MiB")).collect();
            large.iter().enumerate().for_each(|(index, segment)| mark(segment, (index as u64) << 32));
            assert!(large.iter().enumerate().all(|(index, segment)| is_marked(segment, (index as u64) << 32)));
        }
        let huge = raw(1).alloc_segment(1 << 18).expect("1 GiB");
        mark(&huge, 7 << 32);
        assert!(is_marked(&huge, 7 << 32));
    });
}

#[ktest]
fn memory_can_be_used_up_and_comes_back() {
    loses_nothing(|| {
        let whole = largest();
        let free = free_pages() as usize;
        // Room for all, because the list cannot grow any more in the end.
        let mut held: Vec<Segment<()>> = Vec::with_capacity(50_000);
        for pages in [512, 64, 16, 1] {
            while held.len() < held.capacity()
                && let Ok(segment) = raw(pages).alloc_segment(pages)
            {
                held.push(segment);
            }
        }
        let taken = held.iter().map(|segment| segment.size() / PAGE_SIZE).sum::<usize>();
        assert!(taken * 1000 > free * 995, "only {taken} of {free} frames could be had");
        let mut random = Random(3);
        while !held.is_empty() {
            let at = random.below(held.len());
            held.swap_remove(at);
        }
        drop(held);
        assert_eq!(largest(), whole, "the largest extent did not come back");
    });
}

#[ktest]
fn memory_can_be_added_later() {
    let before = free_pages() as usize;
    let added = crate::plant::add_held_back(1);
    let more = free_pages() as usize - before;
    assert!(more <= added && more * 100 >= added * 98, "{more} of {added} pages can be had");
    // Memory that is there already is counted and left alone, whether its end is used or free. OSTD's own would have it twice.
    #[cfg(not(feature = "defaults"))]
    for part in [1, 2] {
        let (free, refused) = (free_pages(), crate::allocators::INNER.refused());
        let again = crate::plant::add_held_back(part) as u64;
        assert_eq!(free_pages(), free, "memory that was added twice can be had twice");
        assert_eq!(crate::allocators::INNER.refused() - refused, again);
    }
}

/// Log of the pages of the largest block that can be had.
pub(crate) fn largest() -> u32 {
    let found = (0..=18).rev().find(|log| {
        let layout = Layout::from_size_align(PAGE_SIZE << log, PAGE_SIZE).expect("a layout");
        FRAMES.alloc(layout).is_some_and(|address| {
            FRAMES.dealloc(address, layout.size());
            true
        })
    });
    found.unwrap_or(0)
}

/// One CPU's work: blocks of all sizes, each page marked with its owner.
fn use_frames(cpu: usize) {
    let mut random = Random(cpu as u64 + 1);
    let mut held: Vec<(Segment<()>, u64)> = Vec::new();
    for turn in 0..4000 {
        if held.len() < 40 && random.below(3) != 0 {
            let pages = [1, 1, 1, 2, 3, 8, 17, 64][random.below(8)];
            let owner = (cpu as u64) << 48 | turn << 24;
            let segment = raw(pages).alloc_segment(pages).expect("memory");
            mark(&segment, owner);
            held.push((segment, owner));
        } else if !held.is_empty() {
            let (segment, owner) = held.swap_remove(random.below(held.len()));
            assert!(is_marked(&segment, owner), "somebody else has written into a block");
        }
    }
}

#[ktest]
fn cpus_share_frames() {
    loses_nothing(|| cpus::on(num_cpus(), use_frames));
}

/// A CPU that idles has nothing cached that others could use: what all of them have freed is soon in the node.
#[cfg(not(feature = "defaults"))]
#[ktest]
fn idle_cpus_give_back_what_they_cached() {
    use crate::allocators::INNER;
    cpus::on(num_cpus(), |_| {
        let held: Vec<_> = (0..2000).map(|_| raw(1).alloc_frame().expect("memory")).collect();
        drop(held);
        assert!(INNER.stats().cached >= 100, "this CPU has kept some");
    });
    INNER.serve();
    let given_back = (0..1 << 20).any(|_| {
        core::hint::spin_loop();
        INNER.stats().cached == 0
    });
    assert!(given_back, "{} frames are still cached", INNER.stats().cached);
}

/// What CPUs pass to each other: an address and a size, or 0.
static PASSED: [AtomicUsize; 64] = [const { AtomicUsize::new(0) }; 64];

fn heap_layout(index: usize) -> Layout {
    let size = [1, 8, 24, 64, 100, 500, 1000, 2000, 4000, 4096, 5000, 9000, 70_000][index % 13];
    let align = if cfg!(feature = "defaults") { 8 } else { [1, 8, 64, 512, 4096, 16384][index / 13 % 6] };
    Layout::from_size_align(size, align).expect("valid")
}

/// Checks and frees what is in a place.
fn free_passed(address: usize, index: usize) {
    let layout = heap_layout(index);
    let memory = address as *mut u8;
    // SAFETY: whoever has taken the address out of its place owns it.
    unsafe {
        assert!((0..layout.size()).step_by(97).all(|at| memory.add(at).read() == index as u8), "{layout:?}");
        dealloc(memory, layout);
    }
}

fn pass_memory(cpu: usize) {
    let mut random = Random(cpu as u64 + 77);
    for _ in 0..6000 {
        let index = random.below(PASSED.len());
        let layout = heap_layout(index);
        // SAFETY: not of size 0; within the allocation.
        let memory = unsafe {
            let memory = alloc(layout);
            assert!(!memory.is_null() && memory.addr().is_multiple_of(layout.align()), "{layout:?}");
            memory.write_bytes(index as u8, layout.size());
            memory
        };
        let former = PASSED[index].swap(memory.expose_provenance(), Ordering::AcqRel);
        if former != 0 {
            free_passed(former, index);
        }
    }
}

#[ktest]
fn cpus_free_each_others_memory() {
    loses_nothing(|| {
        cpus::on(num_cpus(), pass_memory);
        for (index, place) in PASSED.iter().enumerate() {
            let address = place.swap(0, Ordering::AcqRel);
            if address != 0 {
                free_passed(address, index);
            }
        }
    });
}

/// A frame that the heap holds is nobody else's, whoever asks OSTD for it by its number.
#[ktest]
fn the_heaps_frames_are_taken() {
    // SAFETY: the layout has a size; freed below.
    let (layout, memory) = unsafe {
        let layout = Layout::from_size_align(9000, 8).unwrap();
        (layout, alloc(layout))
    };
    let probe = raw(1).alloc_frame().expect("memory");
    let base = probe.reader().cursor().addr() - probe.paddr();
    let address = (memory.addr() - base) / PAGE_SIZE * PAGE_SIZE;
    assert!(Frame::<()>::from_unused(address, ()).is_err());
    // SAFETY: allocated above.
    unsafe { dealloc(memory, layout) };
}
