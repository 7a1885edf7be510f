//! Where page-table-generic's tests have their frames from, in place of `std::alloc`: each is one of a manager's, by its frame
//! allocator. A test takes a frame's address for its physical one.

/// `std::alloc`, as far as the tests use it.
pub mod alloc {
    pub use core::alloc::Layout;
    use hugemm_arceos::TableFrames;
    use hugemm_base::{PAGE_BYTES, Ram};
    use hugemm_frames::{Carved, Frames};
    use hugemm_threads::{Memory, Threads};
    use page_table_generic::FrameAllocator;
    use std::sync::OnceLock;

    type Tables = TableFrames<Threads<Memory>, Carved>;

    /// The allocator, and how far an address is from its physical one.
    fn tables() -> &'static (Tables, usize) {
        static TABLES: OnceLock<(Tables, usize)> = OnceLock::new();
        TABLES.get_or_init(|| {
            let (threads, ram): (Threads<Memory>, Ram) = Threads::with_memory(64 << 20);
            let first = ram.extent().start().get() as usize;
            let threads: &'static _ = Box::leak(Box::new(threads));
            let frames: &'static _ = Box::leak(Box::new(Frames::carve(&threads.cx(), ram).expect("64 MiB suffice")));
            // SAFETY: threads are tasks of their platform.
            let tables = unsafe { TableFrames::new(frames, threads) };
            let offset = tables.phys_to_virt(first.into()).expose_provenance().wrapping_sub(first);
            (tables, offset)
        })
    }

    fn pages(layout: Layout) -> usize {
        assert!(layout.size().is_multiple_of(PAGE_BYTES as usize), "tests ask for whole pages");
        layout.size() / PAGE_BYTES as usize
    }

    /// Frames of a manager's.
    ///
    /// # Safety
    ///
    /// None is asked for.
    pub unsafe fn alloc(layout: Layout) -> *mut u8 {
        let (tables, _) = tables();
        let taken = tables.alloc_frames(pages(layout), layout.align());
        taken.map_or(core::ptr::null_mut(), |start| tables.phys_to_virt(start))
    }

    /// Gives them back.
    ///
    /// # Safety
    ///
    /// They came from [`alloc`], and are not used any more.
    pub unsafe fn dealloc(memory: *mut u8, layout: Layout) {
        let (tables, offset) = tables();
        tables.dealloc_frames(
            memory.expose_provenance().wrapping_sub(*offset).into(),
            pages(layout),
            PAGE_BYTES as usize,
        );
    }
}
