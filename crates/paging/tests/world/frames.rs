//! Frames for tables and pages, whose owners the oracle is told.

use hugemm_base::{Extent, PAGE_BYTES, Pfn};
use hugemm_host::mmu::Mmu;
use hugemm_paging::{NoTable, TableContent, TableMemory};
use std::collections::BTreeSet;
use std::ptr::NonNull;
use std::sync::Mutex;

/// Frames of the machine.
const FRAMES: usize = 2048;

/// A frame.
#[repr(align(4096))]
#[derive(Clone, Copy)]
pub struct Aligned {
    _bytes: [u8; 4096],
}

/// Lends a machine's memory. It is leaked: the model's parts refer to each other.
pub fn with_memory<R>(f: impl FnOnce(&'static mut [Aligned]) -> R) -> R {
    f(Box::leak(vec![Aligned { _bytes: [0; 4096] }; FRAMES].into_boxed_slice()))
}

pub(super) fn bytes(memory: &'static mut [Aligned]) -> &'static mut [u8] {
    let len = size_of_val(memory);
    // SAFETY: the same memory as bytes.
    unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast(), len) }
}

/// Free frames, last in, first out, so that they are soon reused.
pub struct Pool {
    mmu: &'static Mmu<'static, 'static>,
    free: Mutex<Vec<Pfn>>,
}

impl Pool {
    pub(super) fn new(mmu: &'static Mmu<'static, 'static>) -> Self {
        let all = mmu.host().frames();
        mmu.freed(all);
        let free = (all.base().get()..all.end().get()).rev().map(Pfn::new).collect();
        Pool { mmu, free: Mutex::new(free) }
    }

    pub(super) fn peek(&self) -> Option<Pfn> {
        self.free.lock().expect("pool").last().copied()
    }

    /// A frame of any content.
    pub(super) fn take(&self) -> Option<Extent> {
        let frame = Extent::new(self.free.lock().expect("pool").pop()?, 1).ok()?;
        self.mmu.allocated(frame);
        Some(frame)
    }

    /// Aligned frames enough for a folded group.
    pub(super) fn take_group(&self) -> Option<Extent> {
        let mut free = self.free.lock().expect("pool");
        let known: BTreeSet<u64> = free.iter().map(|frame| frame.get()).collect();
        let whole =
            |first: &&u64| first.is_multiple_of(16) && (**first..**first + 16).all(|frame| known.contains(&frame));
        let group = Extent::new(Pfn::new(*known.iter().find(whole)?), 16).ok()?;
        free.retain(|frame| !(group.base().get()..group.end().get()).contains(&frame.get()));
        self.mmu.allocated(group);
        Some(group)
    }

    pub(super) fn give(&self, extent: Extent) {
        self.mmu.freed(extent);
        self.free.lock().expect("pool").extend((extent.base().get()..extent.end().get()).map(Pfn::new));
    }

    pub(super) fn address(&self, frame: Pfn) -> NonNull<u8> {
        self.mmu.host().address(frame).expect("memory")
    }
}

// SAFETY: frames are given out once at a time, and stay mapped for ever.
unsafe impl TableMemory for &Pool {
    fn alloc(&mut self, content: TableContent) -> Result<Pfn, NoTable> {
        let frame = self.take().ok_or(NoTable)?.base();
        if content == TableContent::Zero {
            // SAFETY: a frame of our own.
            unsafe { self.address(frame).write_bytes(0, PAGE_BYTES as usize) };
        }
        Ok(frame)
    }

    unsafe fn free(&mut self, table: Pfn) {
        self.give(Extent::new(table, 1).expect("a frame"));
    }

    fn reach(&self, table: Pfn) -> NonNull<u8> {
        self.address(table)
    }
}
