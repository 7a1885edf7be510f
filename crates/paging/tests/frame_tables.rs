//! Tables from the frame allocator, in host memory, with every allocation failing once: [`FrameTables`]' own point, and
//! those of the allocator below it.

#![cfg(not(miri))] // The whole manager, 46 times: hours.

use hugemm_base::inject::{FaultPlan, every_fault};
use hugemm_base::{
    Cpu, CpuCx, CpuId, Dirty, Extent, NodeId, Order, PAGE_BYTES, PageSize, Pfn, Relief, Shortfall, VirtAddr, VirtRange,
    Zeroed,
};
use hugemm_frames::{AllocRequest, ArenaSpec, Frames, FramesConfig, Frozen, Plain};
use hugemm_host::cpu::{CpuPlace, Host};
use hugemm_paging::{EditLock, Editing, Flags, FrameTables, Mapping, PageTable, PagingError, X86_64};
use std::cell::RefCell;

/// A frame.
#[repr(align(4096))]
#[derive(Clone, Copy)]
struct Aligned {
    _bytes: [u8; PAGE_BYTES as usize],
}

/// Frames of the machine: more than the tables of a range across a border of 512 GiB.
const FRAMES: usize = 64;

fn span(first: u64, pages: u64) -> VirtRange {
    VirtRange::new(VirtAddr::new(first * PAGE_BYTES), pages * PAGE_BYTES).expect("a span")
}

/// A machine whose memory is all this byte, in a manager.
fn with_frames(
    plan: &FaultPlan,
    byte: u8,
    test: impl FnOnce(&Frames<'_, Plain<&FaultPlan>>, &mut CpuCx<'_, Host<'_>>) + Send,
) {
    let mut memory = vec![Aligned { _bytes: [byte; PAGE_BYTES as usize] }; FRAMES];
    let len = size_of_val(memory.as_slice());
    // SAFETY: the same memory as bytes.
    let bytes = unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast::<u8>(), len) };
    let host = Host::new(&[CpuPlace { os_cpu: 0, node: NodeId::new(0) }], bytes).expect("a host");
    let arenas = [ArenaSpec::new(host.frames(), NodeId::new(0))];
    let config = FramesConfig::new(&arenas, 1);
    let layout = Frames::<Plain<&FaultPlan>>::required_bytes(&config).expect("valid");
    let mut metadata = vec![Aligned { _bytes: [0; PAGE_BYTES as usize] }; layout.size().div_ceil(PAGE_BYTES as usize)];
    // SAFETY: memory of its own, initialised; one host.
    let frames =
        unsafe { Frames::new(&config, Plain(plan), metadata.as_mut_ptr().cast(), layout.size()) }.expect("fits");
    host.run_on(CpuId::new(0), |cx| {
        // SAFETY: released once, here; the memory is the host's alone.
        unsafe { frames.release(cx, Dirty::assume_owned(host.frames())) };
        test(&frames, cx);
        frames.drain(cx);
        assert_eq!(frames.stats(cx).free, FRAMES as u64, "tables are missing");
    })
    .expect("a CPU");
}

/// Maps a range that needs tables at every level, looks, unmaps it. Everything is as before, wherever memory ends.
fn scenario(plan: &FaultPlan, shared: bool) {
    with_frames(plan, 0xff, |frames, cx| {
        // SAFETY: the host's memory is a direct map.
        let mut tables = unsafe { FrameTables::new(frames, cx) };
        // SAFETY: one allocator; no CPU translates by the table.
        let table = unsafe { PageTable::<X86_64, EditLock>::new(&mut tables, span(0, 1 << 35)) };
        let Ok(table) = table else { return assert_eq!(table.err(), Some(PagingError::NoTable)) };
        let range = span((1 << 27) - 1500, 3000);
        let runs = [Extent::new(Pfn::new(1 << 20), 3000).expect("in range")];
        let how = Mapping { flags: Flags::WRITE, largest: PageSize::Size4K };
        let done = match shared {
            true => table.shared(&mut tables).map(range, runs, how),
            false => table.exclusive(&mut tables).map(range, runs, how),
        };
        let mut seen = 0;
        table.shared(&mut tables).walk(range, Flags::NONE, |run| seen += run.extent.pages()).expect("in bounds");
        assert!(matches!((done, seen), (Ok(()), 3000) | (Err(PagingError::NoTable), 0)), "{done:?}, {seen}");
        let unhooked = table.exclusive(&mut tables).detach(range, Editing::LIVE).expect("in bounds");
        // SAFETY: no CPU translates by the table.
        let detached = unsafe { unhooked.assume_flushed() };
        let harvest = table.exclusive(&mut tables).harvest(detached, Flags::NONE, |_| ()).expect("its own");
        assert_eq!(harvest.pages, seen);
        // SAFETY: as above.
        unsafe { table.retire(&mut tables, |_| ()) };
    });
}

/// A frame that is known to be zero becomes a table as it is.
#[test]
fn zero_memory_is_not_cleared() {
    with_frames(&FaultPlan::nth(u64::MAX), 0, |frames, cx| {
        let block = frames.alloc(cx, AllocRequest::order(Order::new(5).expect("32 pages"))).expect("memory");
        // SAFETY: all of the memory is zero, and this is the block's owner.
        frames.free_zeroed(cx, unsafe { Zeroed::assume_owned(block.into_dirty().into_extent()) });
        let skipped = cx.platform().counters().clears_skipped.get();
        // SAFETY: the host's memory is a direct map.
        let mut tables = unsafe { FrameTables::new(frames, cx) };
        // SAFETY: one allocator; no CPU translates by the table.
        let table = unsafe { PageTable::<X86_64, EditLock>::new(&mut tables, span(0, 1 << 35)) }.expect("memory");
        // SAFETY: as above.
        unsafe { table.retire(&mut tables, |_| ()) };
        assert_eq!(cx.platform().counters().clears_skipped.get(), skipped + 1, "the root");
    });
}

#[test]
fn tables_come_from_the_allocator_and_go_back_wherever_memory_ends() {
    for shared in [false, true] {
        let runs = every_fault(|plan| scenario(plan, shared));
        // A root, and 2 + 2 + 6 tables below it, each with its own point and the allocator's; and the run without a fault.
        assert_eq!(runs, 2 * 11 + 1);
    }
}

fn tables<'a, 'p, 'm, 'h, 'f>(
    frames: &'a Frames<'m, Plain<&'f FaultPlan>>,
    cx: &'a CpuCx<'p, Host<'h>>,
) -> FrameTables<'a, 'p, 'm, Host<'h>, Plain<&'f FaultPlan>> {
    // SAFETY: the host's memory is a direct map.
    unsafe { FrameTables::new(frames, cx) }
}

/// Tables that cannot be had ask who frees memory, and the whole mapping is tried again.
#[test]
fn relief_serves_tables() {
    struct Hoard<'a, 'm, 'f>(&'a Frames<'m, Plain<&'f FaultPlan>>, RefCell<Vec<Frozen>>);
    impl<'h> Relief<Host<'h>> for Hoard<'_, '_, '_> {
        fn relieve(&self, cx: &mut CpuCx<'_, Host<'h>>, _: Shortfall) -> u64 {
            self.1.borrow_mut().pop().map_or(0, |block| {
                self.0.free(cx, block);
                1
            })
        }
    }
    with_frames(&FaultPlan::nth(u64::MAX), 0xff, |frames, cx| {
        // SAFETY: no CPU translates by them.
        let table =
            unsafe { PageTable::<X86_64, EditLock>::new(&mut tables(frames, cx), span(0, 1 << 35)) }.expect("memory");
        let hook = Hoard(frames, RefCell::default());
        while let Ok(block) = frames.alloc(cx, Order::ZERO) {
            hook.1.borrow_mut().push(block);
        }
        let how = Mapping { flags: Flags::WRITE, largest: PageSize::Size4K };
        let page = [Extent::new(Pfn::new(7), 1).expect("a page")];
        let map = |cx: &mut CpuCx<'_, Host<'_>>| table.shared(tables(frames, cx)).map(span(5, 1), page, how);
        assert_eq!(map(cx), Err(PagingError::NoTable));
        assert_eq!(
            frames.or_relieve(cx, &hook, Shortfall::frames(1), map),
            Ok(()),
            "three tables, one frame each time"
        );
        let at = table.shared(tables(frames, cx)).translate(VirtAddr::new(5 * PAGE_BYTES));
        assert_eq!(at.map(Pfn::containing), Some(Pfn::new(7)));
        hook.1.take().into_iter().for_each(|block| frames.free(cx, block));
        // SAFETY: nobody walks it.
        unsafe { table.retire(&mut tables(frames, cx), |_| ()) };
    });
}
