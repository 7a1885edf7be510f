//! Tables from the frame allocator, in host memory, with every allocation failing once: [`FrameTables`]' own point, and
//! those of the allocator below it.

#![cfg(not(miri))] // The whole manager, 46 times: hours.

use hugemm_base::inject::{FaultPlan, every_fault};
use hugemm_base::{
    Cpu, CpuCx, CpuId, Dirty, Extent, NodeId, Order, PAGE_BYTES, PageSize, Pfn, VirtAddr, VirtRange, Zeroed,
};
use hugemm_frames::{AllocRequest, ArenaSpec, Frames, FramesConfig, Plain};
use hugemm_host::cpu::{CpuPlace, Host};
use hugemm_paging::{EditLock, Editing, Flags, FrameTables, Mapping, PageTable, PagingError, X86_64};

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
    let host = Host::new(&[CpuPlace { os_cpu: 0, node: NodeId(0) }], bytes).expect("a host");
    let arenas = [ArenaSpec { extent: host.frames(), node: NodeId(0), descriptors: None }];
    let config = FramesConfig::new(&arenas, 1);
    let layout = Frames::<Plain<&FaultPlan>>::required_bytes(&config).expect("valid");
    let mut metadata = vec![Aligned { _bytes: [0; PAGE_BYTES as usize] }; layout.size().div_ceil(PAGE_BYTES as usize)];
    // SAFETY: memory of its own, initialised; one host.
    let frames =
        unsafe { Frames::new(&config, Plain(plan), metadata.as_mut_ptr().cast(), layout.size()) }.expect("fits");
    host.run_on(CpuId(0), |cx| {
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
