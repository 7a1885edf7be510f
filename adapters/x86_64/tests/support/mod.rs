//! A machine with memory for tables, and shorthands.
#![allow(unreachable_pub)]

use hugemm_base::{CpuCx, CpuId, Dirty, NodeId};
use hugemm_frames::{ArenaSpec, Frames, FramesConfig, Plain};
use hugemm_host::cpu::{BASE_FRAME, CpuPlace, Host};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use x86_64::structures::paging::page::PageRange;
use x86_64::structures::paging::{Page, PhysFrame, Size4KiB};
use x86_64::{PhysAddr, VirtAddr};

/// Page-aligned memory.
pub struct Memory(*mut u8, Layout);

impl Memory {
    pub fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, 4096).expect("a layout");
        // SAFETY: never empty.
        let start = unsafe { alloc_zeroed(layout) };
        assert!(!start.is_null());
        Memory(start, layout)
    }

    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: allocated zeroed with this size, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.0, self.1.size()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.0, self.1) };
    }
}

/// Runs `test` with a manager of `memory`'s frames, and the offset at which they are mapped.
pub fn on_machine<R>(bytes: usize, test: impl FnOnce(&Frames<'_>, &mut CpuCx<'_, Host<'_>>, VirtAddr) -> R) -> R {
    let mut memory = Memory::new(bytes);
    let start = memory.bytes().as_mut_ptr().expose_provenance() as u64;
    let host = Host::new(&[CpuPlace { os_cpu: any_cpu(), node: NodeId::new(0) }], memory.bytes()).expect("a machine");
    let extent = host.frames();
    let arenas = [ArenaSpec::new(extent, NodeId::new(0))];
    let config = FramesConfig::new(&arenas, 1);
    let mut metadata = Memory::new(Frames::<Plain>::required_bytes(&config).expect("valid").size());
    let size = metadata.bytes().len();
    // SAFETY: zeroed memory that is used for nothing else, and one platform.
    let frames = unsafe { Frames::new(&config, Plain::default(), metadata.bytes().as_mut_ptr(), size) }.expect("room");
    let offset = VirtAddr::new(start - BASE_FRAME.start().get());
    let on_cpu = |cx: &mut CpuCx<'_, Host<'_>>| {
        // SAFETY: released once.
        unsafe { frames.release(cx, Dirty::assume_owned(extent)) };
        test(&frames, cx, offset)
    };
    host.run_on(CpuId::new(0), on_cpu).expect("the CPU")
}

/// A CPU that this process may use.
fn any_cpu() -> u32 {
    hugemm_host::cpu::allowed_cpus().map_or(0, |cpus| cpus[0])
}

pub fn page(number: u64) -> Page<Size4KiB> {
    Page::containing_address(VirtAddr::new(number << 12))
}

pub fn pages(first: u64, count: u64) -> PageRange<Size4KiB> {
    Page::range(page(first), page(first + count))
}

pub fn physical(number: u64) -> PhysFrame<Size4KiB> {
    PhysFrame::containing_address(PhysAddr::new(number << 12))
}
