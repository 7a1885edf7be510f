//! What that crate's own tests do, on frames of a manager; and what they do not.

use hugemm_frames::{Carved, Frames};
use hugemm_page_table_multiarch::{Home, HugeFrames};
use hugemm_threads::{Memory, Threads};
use memory_addr::{PhysAddr, VirtAddr};
use page_table_entry::MappingFlags;
use page_table_entry::x86_64::X64PTE;
use page_table_multiarch::{PageSize, PageTable64, PagingError, PagingHandler, PagingMetaData};
use std::collections::BTreeSet;
use std::sync::OnceLock;

type Kernel = (&'static Threads<Memory>, Frames<'static, Carved>);

/// A kernel per test: each test's thread is CPU 0 of its own platform.
macro_rules! kernel {
    ($name:ident, $mib:literal) => {
        struct $name;

        impl $name {
            fn kernel() -> &'static Kernel {
                static KERNEL: OnceLock<Kernel> = OnceLock::new();
                KERNEL.get_or_init(|| {
                    let (threads, ram) = Threads::with_memory($mib << 20);
                    let threads: &'static _ = Box::leak(Box::new(threads));
                    (threads, Frames::carve(&threads.cx(), ram).expect("enough memory"))
                })
            }

            fn available() -> u64 {
                let (threads, frames) = Self::kernel();
                frames.available(&threads.cx())
            }
        }

        // SAFETY: only this test's thread edits tables of it.
        unsafe impl Home for $name {
            type Platform = Threads<Memory>;
            type Env = Carved;

            fn frames() -> Option<&'static Frames<'static, Carved>> {
                Some(&Self::kernel().1)
            }

            fn platform() -> &'static Threads<Memory> {
                Self::kernel().0
            }
        }
    };
}

/// So many levels, as x86-64 and arm64 have four and Sv39 three, without a TLB.
struct Levels<const N: usize>;

impl<const N: usize> PagingMetaData for Levels<N> {
    const LEVELS: usize = N;
    const PA_MAX_BITS: usize = 52;
    const VA_MAX_BITS: usize = 12 + 9 * N;
    type VirtAddr = VirtAddr;

    fn flush_tlb(_: Option<VirtAddr>) {}
}

type Table<H, const N: usize = 4> = PageTable64<Levels<N>, X64PTE, HugeFrames<H>>;

const FLAGS: MappingFlags = MappingFlags::READ.union(MappingFlags::WRITE);

/// A page anywhere in so many bits.
fn random_page(state: &mut u64, bits: usize) -> usize {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state & ((1 << bits) - 1) & !0xfff) as usize
}

fn random_mappings<H: Home, const N: usize>(available: fn() -> u64) {
    let before = available();
    let (mut state, mut pages) = (1234, BTreeSet::new());
    let mut table = Table::<H, N>::try_new().expect("memory");
    for turn in 0..if cfg!(miri) { 64 } else { 2048 } {
        let mut cursor = table.cursor();
        if turn % 4 != 3 {
            let bits = Levels::<N>::VA_MAX_BITS - 1;
            let (page, frame) = (random_page(&mut state, bits), random_page(&mut state, 47));
            if pages.insert((page, frame)) {
                cursor
                    .map(VirtAddr::from_usize(page), PhysAddr::from_usize(frame), PageSize::Size4K, FLAGS)
                    .expect("free");
            }
        } else if let Some((page, frame)) = pages.pop_first() {
            let (was, _, size) = cursor.unmap(VirtAddr::from_usize(page)).expect("mapped");
            assert_eq!((was.as_usize(), size), (frame, PageSize::Size4K));
        }
    }
    for (page, frame) in &pages {
        let (found, ..) = table.query(VirtAddr::from_usize(*page)).expect("mapped");
        assert_eq!(found.as_usize(), *frame);
    }
    assert!(available() < before);
    drop(table);
    assert_eq!(available(), before);
}

/// The test that crate has, for each architecture in turn; there are four levels on all but one, and three there.
#[test]
fn random_mappings_come_and_go_and_no_frame_is_lost() {
    kernel!(Random, 64);
    random_mappings::<Random, 4>(Random::available);
    random_mappings::<Random, 3>(Random::available);
}

#[test]
fn large_pages_are_mapped() {
    kernel!(Large, 4);
    let before = Large::available();
    let mut table = Table::<Large>::try_new().expect("memory");
    for (page, size) in [(1 << 30, PageSize::Size1G), (2 << 20, PageSize::Size2M)] {
        table.cursor().map(VirtAddr::from_usize(page), PhysAddr::from_usize(page), size, FLAGS).expect("free");
        let (found, _, as_large) = table.query(VirtAddr::from_usize(page + 0x1234)).expect("mapped");
        assert_eq!((found.as_usize(), as_large), (page + 0x1234, size));
    }
    drop(table);
    assert_eq!(Large::available(), before);
}

#[test]
fn contiguous_frames_are_aligned_apart_and_come_back() {
    kernel!(Contiguous, 16);
    type H = HugeFrames<Contiguous>;
    let before = Contiguous::available();
    let mut held: Vec<(PhysAddr, usize)> = Vec::new();
    for pages in [1, 2, 3, 7, 64, 100, 512] {
        for align in [4096, 16384, 2 << 20] {
            let start = H::alloc_frames(pages, align).expect("memory");
            assert_eq!(start.as_usize() % align, 0);
            let apart = |(other, size): &(PhysAddr, usize)| {
                start.as_usize() >= other.as_usize() + size * 4096
                    || other.as_usize() >= start.as_usize() + pages * 4096
            };
            assert!(held.iter().all(apart), "{pages} {align}");
            let at = H::phys_to_virt(start).as_usize() as *mut u8;
            // SAFETY: the frames are this test's, and mapped there.
            unsafe { at.write_bytes(pages as u8, pages * 4096) };
            held.push((start, pages));
            if held.len() > 3 {
                let (start, pages) = held.remove(0);
                H::dealloc_frames(start, pages);
            }
        }
    }
    held.into_iter().for_each(|(start, pages)| H::dealloc_frames(start, pages));
    assert_eq!(Contiguous::available(), before);
    for (pages, align) in [(0, 4096), (1, 3 << 12), (usize::MAX, 4096), (1, 1 << 40), (5000, 4096)] {
        assert_eq!(H::alloc_frames(pages, align), None, "{pages} {align}");
    }
    assert_eq!(Contiguous::available(), before);
}

#[test]
fn exhaustion_is_an_error_and_loses_nothing() {
    kernel!(Small, 4);
    let before = Small::available();
    let mut table = Table::<Small>::try_new().expect("memory");
    let mut state = 99;
    let error = std::iter::from_fn(|| {
        let page = VirtAddr::from_usize(random_page(&mut state, 47));
        Some(table.cursor().map(page, PhysAddr::from_usize(0), PageSize::Size4K, FLAGS))
    })
    .find_map(Result::err);
    assert_eq!((error, Small::available()), (Some(PagingError::NoMemory), 0));
    drop(table);
    assert_eq!(Small::available(), before);
}
