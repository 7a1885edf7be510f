//! The library of this example as a kernel that boots: `examples/ring0/run.sh`.
#![cfg_attr(target_os = "none", no_std, no_main)]
#![allow(unreachable_pub, reason = "in a binary, `pub` says what a module offers to the others")]

#[cfg(not(all(target_os = "none", target_arch = "x86_64")))]
fn main() -> std::process::ExitCode {
    eprintln!("hugemm-example-ring0: this is a kernel for bare x86-64; boot it with: examples/ring0/run.sh");
    std::process::ExitCode::FAILURE
}

#[cfg(all(target_os = "none", target_arch = "x86_64"))]
mod boot;

#[cfg(all(target_os = "none", target_arch = "x86_64"))]
mod kernel {
    use super::boot::{Serial, exit, largest_ram};
    use core::fmt::Write;
    use core::ptr::with_exposed_provenance;
    use hugemm::prelude::{CpuCx, Frames, PageSize, Ram};
    use hugemm_example_ring0::{OneCpu, map_heap, unmap_heap};
    use x86_64::VirtAddr;
    use x86_64::registers::control::Cr3;
    use x86_64::structures::paging::mapper::{MappedFrame, TranslateResult};
    use x86_64::structures::paging::{OffsetPageTable, PageTable, Translate};

    /// The boot tables map all memory one to one.
    const OFFSET: VirtAddr = VirtAddr::zero();

    /// Where the heap is mapped.
    const HEAP: VirtAddr = VirtAddr::new(0xffff_c000_0000_0000);

    /// What `boot` jumps to, with the physical address of the loader's start info.
    pub extern "C" fn kernel_main(start_info: u64) -> ! {
        let mut serial = Serial::new().expect("a PC has a serial port");
        // SAFETY: `boot` passes on what the loader gave.
        unsafe { run(start_info, &mut serial) }.expect("the serial port takes everything");
        exit(true)
    }

    /// # Safety
    /// `start_info` is the address of a PVH start info block; called once.
    unsafe fn run(start_info: u64, out: &mut Serial) -> core::fmt::Result {
        // One arena is enough for an example; `run.sh` gives a machine whose memory all lies below 4 GiB.
        // SAFETY: the caller's promise.
        let ram = unsafe { largest_ram(start_info) };
        let bytes = ram.bytes();
        // SAFETY: nobody uses this memory, and there is no manager; once.
        let ram = unsafe { Ram::assume_unmanaged(ram) };
        // SAFETY: the boot tables map all memory at `OFFSET`.
        let platform = unsafe { OneCpu::new(OFFSET) };
        // SAFETY: the only context of the only CPU.
        let cx = &unsafe { CpuCx::new(&platform) };
        let frames = Frames::carve(cx, ram).expect("enough memory");
        let before = frames.stats(cx).available();
        let metadata = bytes - before * PageSize::Size4K.bytes();
        writeln!(out, "frames: {} MiB, of which {} KiB describe the rest", bytes >> 20, metadata >> 10)?;

        // SAFETY: `OFFSET` maps all memory, the boot tables leave the upper half alone, and only this CPU runs.
        unsafe { map_heap(&frames, cx, OFFSET, HEAP) }.expect("memory for a heap");
        let TranslateResult::Mapped { frame: MappedFrame::Size2MiB(leaf), .. } = translate(HEAP) else {
            panic!("the heap is not one leaf of 2 MiB: {:?}", translate(HEAP));
        };
        let heap: *mut u64 = HEAP.as_mut_ptr();
        let words = PageSize::Size2M.bytes() as usize / size_of::<u64>();
        for index in 0..words {
            // SAFETY: the heap's words, which have just been mapped and are nobody else's.
            unsafe { heap.add(index).write_volatile(index as u64) };
        }
        let below = with_exposed_provenance::<u64>(leaf.start_address().as_u64() as usize);
        // SAFETY: the same memory, where the boot tables map it.
        let seen = (0..words).all(|index| unsafe { below.add(index).read_volatile() } == index as u64);
        assert!(seen, "what was stored in the heap is not in its frames");
        writeln!(out, "heap: 2 MiB at {:#x}, one leaf, frames from {:#x} on", HEAP, leaf.start_address())?;

        // SAFETY: as above; the heap is not used any more.
        unsafe { unmap_heap(&frames, cx, OFFSET, HEAP) }.expect("it is mapped");
        assert!(matches!(translate(HEAP), TranslateResult::NotMapped), "the heap is still mapped");
        // The two tables between root and leaf stay for the next heap.
        assert_eq!(frames.stats(cx).available(), before - 2, "frames were lost");
        writeln!(out, "ring0: everything is back")
    }

    /// What the CPU's tables say of an address, by the `x86_64` crate.
    fn translate(at: VirtAddr) -> TranslateResult {
        let root = Cr3::read().0.start_address().as_u64() as usize;
        // SAFETY: the root is mapped one to one, and nobody else looks at it now.
        let root = unsafe { &mut *core::ptr::with_exposed_provenance_mut::<PageTable>(root) };
        // SAFETY: all tables are mapped at the offset.
        unsafe { OffsetPageTable::new(root, OFFSET) }.translate(at)
    }

    #[panic_handler]
    fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
        if let Some(mut serial) = Serial::new() {
            // Nothing can be done about a port that takes nothing.
            let _ = writeln!(serial, "ring0: {info}");
        }
        exit(false)
    }
}

#[cfg(all(target_os = "none", target_arch = "x86_64"))]
use kernel::kernel_main;
