//! Range operations against the same done page by page with the crate's own `Mapper`, on frames of a hugemm manager.
#![cfg(target_arch = "x86_64")]

mod support;

use hugemm_base::PageSize;
use hugemm_frames::Frames;
use hugemm_paging::PagingError;
use hugemm_x86_64::{FrameSource, RangeError, RangeMapper};
use proptest::prelude::*;
use support::{on_machine, page, pages, physical};
use x86_64::VirtAddr;
use x86_64::structures::paging::mapper::{Translate, TranslateResult};
use x86_64::structures::paging::{
    FrameAllocator, FrameDeallocator, Mapper, OffsetPageTable, PageTable, PageTableFlags, PhysFrame, Size1GiB,
    Size2MiB, Size4KiB,
};

/// The window: around a border of 1 GiB.
const BASE: u64 = (1 << 18) * 700 - 1500;
const PAGES: u64 = 3000;

#[derive(Clone, Debug)]
enum Op {
    Map { first: u64, count: u64, frame: u64, flags: u8, largest: PageSize },
    Unmap { first: u64, count: u64 },
    Protect { first: u64, count: u64, flags: u8 },
}

fn op() -> impl Strategy<Value = Op> {
    let range = || (0..PAGES, prop_oneof![1_u64..20, 1_u64..1500]).prop_map(|(f, n)| (f, n.min(PAGES - f)));
    let size = prop_oneof![Just(PageSize::Size4K), Just(PageSize::Size2M)];
    prop_oneof![
        (range(), 0_u64..4096, any::<u8>(), size, any::<bool>()).prop_map(
            |((first, count), frame, flags, largest, like)| {
                // Half of them with frames aligned as the addresses are, so that large leaves fit.
                let frame = if like { (BASE + first) & 511 } else { frame };
                Op::Map { first, count, frame, flags, largest }
            }
        ),
        range().prop_map(|(first, count)| Op::Unmap { first, count }),
        (range(), any::<u8>()).prop_map(|((first, count), flags)| Op::Protect { first, count, flags }),
    ]
}

fn flags(bits: u8) -> PageTableFlags {
    let all = [
        PageTableFlags::WRITABLE,
        PageTableFlags::USER_ACCESSIBLE,
        PageTableFlags::NO_EXECUTE,
        PageTableFlags::GLOBAL,
        PageTableFlags::WRITE_THROUGH,
        PageTableFlags::NO_CACHE,
        PageTableFlags::BIT_54,
        PageTableFlags::ACCESSED,
    ];
    all.into_iter()
        .enumerate()
        .filter(|(bit, _)| bits >> bit & 1 != 0)
        .fold(PageTableFlags::PRESENT, |sum, (_, flag)| sum | flag)
}

/// What that crate says of an address, whatever the leaf's size.
fn look(table: &OffsetPageTable<'_>, number: u64) -> Option<(u64, PageTableFlags)> {
    let address = page(number).start_address();
    match table.translate(address) {
        TranslateResult::Mapped { frame, offset, flags } => {
            Some((frame.start_address().as_u64() + offset, flags.difference(PageTableFlags::HUGE_PAGE)))
        }
        _ => None,
    }
}

fn root<'a>(source: &mut impl FrameAllocator<Size4KiB>, offset: VirtAddr) -> (PhysFrame, &'a mut PageTable) {
    let frame: PhysFrame = source.allocate_frame().expect("a frame");
    let address = offset.as_u64() + frame.start_address().as_u64();
    let table = std::ptr::with_exposed_provenance_mut::<PageTable>(address as usize);
    // SAFETY: the frame is mapped there, and the test's alone.
    let table = unsafe { &mut *table };
    table.zero();
    (frame, table)
}

fn run(ops: Vec<Op>) {
    on_machine(32 << 20, |frames: &Frames<'_>, cx, offset| {
        let mut source = FrameSource::new(frames, cx);
        let (by_range, seen) = root(&mut source, offset);
        let (_, by_page) = root(&mut source, offset);
        // SAFETY: the manager's frames are mapped at the offset; no CPU translates by these tables.
        let mut oracle = unsafe { OffsetPageTable::new(by_page, offset) };
        // SAFETY: as above; `seen` is used for looking only.
        let mut mapper = unsafe { RangeMapper::new(by_range, offset, VirtAddr::new(BASE << 12)) }.expect("a half");
        // SAFETY: as above.
        let seen = unsafe { OffsetPageTable::new(seen, offset) };
        for op in ops {
            match op {
                Op::Map { first, count, frame, flags: bits, largest } => {
                    let range = pages(BASE + first, count);
                    let to = PhysFrame::range(physical(frame), physical(frame + count));
                    // SAFETY: nobody accesses these addresses.
                    let done = unsafe { mapper.map_range(range, to, flags(bits), largest, &mut source) };
                    let taken = (first..first + count).find(|i| look(&oracle, BASE + i).is_some());
                    match (done, taken) {
                        (Ok(()), None) => {
                            for i in 0..count {
                                let (page, frame) = (page(BASE + first + i), physical(frame + i));
                                // SAFETY: as above.
                                let flush = unsafe { oracle.map_to(page, frame, flags(bits), &mut source) };
                                flush.expect("free").ignore();
                            }
                        }
                        (Err(RangeError::Paging(PagingError::Overlap { at })), Some(i)) => {
                            assert!(at.get() >> 12 <= BASE + i, "the first one, or the leaf that holds it");
                        }
                        (done, taken) => panic!("{done:?}, {taken:?}"),
                    }
                }
                Op::Unmap { first, count } => {
                    // SAFETY: nobody accesses these addresses.
                    let Ok(flush) = (unsafe { mapper.unmap_range(pages(BASE + first, count)) }) else { continue };
                    // SAFETY: no CPU has ever loaded the tables.
                    let detached = unsafe { flush.unhooked().assume_flushed() };
                    let mut found = 0;
                    mapper.harvest(detached, &mut source, |run| found += run.extent.pages()).expect("its own");
                    for i in 0..count {
                        if let Ok((_, flush)) = oracle.unmap(page(BASE + first + i)) {
                            flush.ignore();
                            found -= 1;
                        }
                    }
                    assert_eq!(found, 0);
                }
                Op::Protect { first, count, flags: bits } => {
                    let bits = flags(bits).union(PageTableFlags::ACCESSED);
                    // SAFETY: nobody accesses these addresses.
                    if unsafe { mapper.update_flags_range(pages(BASE + first, count), bits) }.is_err() {
                        continue;
                    }
                    for i in 0..count {
                        // SAFETY: as above.
                        if let Ok(flush) = unsafe { oracle.update_flags(page(BASE + first + i), bits) } {
                            flush.ignore();
                        }
                    }
                }
            }
            for i in 0..PAGES {
                assert_eq!(look(&seen, BASE + i), look(&oracle, BASE + i), "page {i}");
            }
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn ranges_agree_with_single_pages(ops in prop::collection::vec(op(), 1..20)) {
        run(ops);
    }
}

/// Every size is one block of the manager, aligned, and comes back.
#[test]
fn frames_of_every_size() {
    on_machine(16 << 20, |frames, cx, _| {
        let free = || {
            let stats = frames.stats(cx);
            stats.free + stats.cached
        };
        let before = free();
        let mut source = FrameSource::new(frames, cx);
        let small: PhysFrame<Size4KiB> = source.allocate_frame().expect("4 KiB");
        let large: PhysFrame<Size2MiB> = source.allocate_frame().expect("2 MiB");
        let none: Option<PhysFrame<Size1GiB>> = source.allocate_frame();
        assert!(none.is_none(), "16 MiB have no 1 GiB block");
        assert_eq!(free(), before - 513);
        // SAFETY: nobody uses them.
        unsafe {
            source.deallocate_frame(small);
            source.deallocate_frame(large);
        }
        assert_eq!(free(), before);
    });
}

/// Flags that hugemm needs itself are refused by name instead of being lost.
#[test]
fn flags_without_a_place_are_refused() {
    on_machine(4 << 20, |frames, cx, offset| {
        let mut source = FrameSource::new(frames, cx);
        let (frame, _) = root(&mut source, offset);
        // SAFETY: mapped at the offset; no CPU translates by it.
        let mut mapper = unsafe { RangeMapper::new(frame, offset, VirtAddr::new(0)) }.expect("a half");
        let to = PhysFrame::range(physical(0), physical(1));
        for flag in [PageTableFlags::BIT_9, PageTableFlags::BIT_52] {
            // SAFETY: nobody accesses the address.
            let done = unsafe {
                mapper.map_range(pages(1, 1), to, PageTableFlags::PRESENT | flag, PageSize::Size4K, &mut source)
            };
            assert_eq!(done, Err(RangeError::Flags(flag)));
        }
    });
}

/// What user mode can do at a page, as hardware decides: what all levels allow. `None`: nothing is mapped.
fn rights(table: &PageTable, offset: VirtAddr, number: u64) -> Option<PageTableFlags> {
    let mut table = table;
    let mut allowed = PageTableFlags::WRITABLE | PageTableFlags::USER_ACCESSIBLE;
    let mut denied = PageTableFlags::empty();
    for level in (0..4).rev() {
        let entry = &table[(number >> (9 * level)) as usize % 512];
        if !entry.flags().contains(PageTableFlags::PRESENT) {
            return None;
        }
        allowed &= entry.flags();
        denied |= entry.flags() & PageTableFlags::NO_EXECUTE;
        let address = offset.as_u64() + entry.addr().as_u64();
        // SAFETY: a table of the test's, mapped at the offset; the last one is not followed.
        table = unsafe { &*std::ptr::with_exposed_provenance(address as usize) };
    }
    Some(allowed | denied)
}

/// Under tables that the crate's own `Mapper` made for the kernel, a user's page can be reached by users, as after its own
/// `map_to`; what is to be executed under tables that forbid it is refused.
#[test]
fn tables_that_were_there_let_through_what_is_mapped_below_them() {
    on_machine(32 << 20, |frames: &Frames<'_>, cx, offset| {
        const USERS: PageTableFlags = PageTableFlags::PRESENT.union(PageTableFlags::USER_ACCESSIBLE);
        const NX: PageTableFlags = PageTableFlags::NO_EXECUTE;
        let mut source = FrameSource::new(frames, cx);
        let (by_range, top) = root(&mut source, offset);
        let at = std::ptr::from_mut(top);
        // SAFETY: the manager's frames are mapped at the offset; no CPU translates by these tables.
        let mut kernels = unsafe { OffsetPageTable::new(top, offset) };
        for (number, flags) in [(BASE, PageTableFlags::PRESENT | NX), (BASE + (1 << 27), PageTableFlags::PRESENT)] {
            // SAFETY: nobody accesses these addresses.
            let flush =
                unsafe { kernels.map_to_with_table_flags(page(number), physical(9), flags, flags, &mut source) };
            flush.expect("free").ignore();
        }
        // SAFETY: as above; the crate's table is not used any more.
        let mut mapper = unsafe { RangeMapper::new(by_range, offset, VirtAddr::new(BASE << 12)) }.expect("a half");
        // SAFETY: read between the calls only.
        let rights = |number| rights(unsafe { &*at }, offset, number);
        let mut map = |number, flags| {
            let to = PhysFrame::range(physical(0), physical(3));
            // SAFETY: nobody accesses these addresses.
            unsafe { mapper.map_range(pages(number, 3), to, flags, PageSize::Size4K, &mut source) }
        };
        let other = BASE + (1 << 27);
        assert_eq!(map(other + 1, USERS | NX), Ok(()));
        assert_eq!(rights(other + 2), Some(PageTableFlags::USER_ACCESSIBLE | NX));
        assert_eq!(rights(other), Some(PageTableFlags::empty()), "the kernel's own stays that");
        assert_eq!(map(other + 4, USERS), Ok(()));
        assert_eq!(rights(other + 4), Some(PageTableFlags::USER_ACCESSIBLE));
        let refused = Err(RangeError::NoExecute(VirtAddr::new((BASE + 1) << 12)));
        assert_eq!((map(BASE + 1, USERS), rights(BASE + 1)), (refused, None));
        assert_eq!(map(BASE + 1, PageTableFlags::PRESENT | NX), Ok(()));
        assert_eq!(rights(BASE + 1), Some(NX));
        // SAFETY: as above.
        let mut update = |flags| unsafe { mapper.update_flags_range(pages(BASE + 1, 1), flags) }.map(|_| ());
        assert_eq!(update(USERS), refused);
        assert_eq!(update(USERS | NX), Ok(()));
        assert_eq!((rights(BASE + 1), rights(BASE + 2)), (Some(PageTableFlags::USER_ACCESSIBLE | NX), Some(NX)));
    });
}

/// A bit that means something to hugemm, in a table that somebody else made, is refused by name: one of them says that another CPU is
/// at work below the table, for which whoever meets it waits.
#[test]
fn tables_with_bits_of_hugemms_are_refused() {
    const WITHIN: std::time::Duration = std::time::Duration::from_secs(60);
    for flag in [PageTableFlags::BIT_52, PageTableFlags::BIT_53, PageTableFlags::BIT_57, PageTableFlags::BIT_58] {
        let (send, answers) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            on_machine(16 << 20, |frames: &Frames<'_>, cx, offset| {
                let mut source = FrameSource::new(frames, cx);
                let (by_range, top) = root(&mut source, offset);
                // SAFETY: the manager's frames are mapped at the offset; no CPU translates by these tables.
                let mut theirs = unsafe { OffsetPageTable::new(top, offset) };
                let (leaf, parents) = (PageTableFlags::PRESENT, PageTableFlags::PRESENT | flag);
                // SAFETY: nobody accesses the address.
                let flush =
                    unsafe { theirs.map_to_with_table_flags(page(BASE), physical(9), leaf, parents, &mut source) };
                flush.expect("free").ignore();
                // SAFETY: as above; the crate's table is not used any more.
                let mut mapper =
                    unsafe { RangeMapper::new(by_range, offset, VirtAddr::new(BASE << 12)) }.expect("a half");
                let to = PhysFrame::range(physical(0), physical(1));
                // SAFETY: nobody accesses these addresses.
                let mapped = unsafe { mapper.map_range(pages(BASE + 1, 1), to, leaf, PageSize::Size4K, &mut source) };
                // SAFETY: as above.
                let changed = unsafe { mapper.update_flags_range(pages(BASE, 1), leaf) }.map(|_| ());
                send.send((mapped, changed)).expect("somebody waits");
            });
        });
        let refused = Err(RangeError::Flags(flag));
        assert_eq!(answers.recv_timeout(WITHIN), Ok((refused, refused)), "{flag:?}");
    }
}
