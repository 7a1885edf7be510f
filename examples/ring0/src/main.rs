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
extern crate alloc;

#[cfg(all(target_os = "none", target_arch = "x86_64"))]
mod kernel {
    use super::boot::{FIRST_4_GIB, Serial, exit, ram};
    use alloc::vec::Vec;
    use core::fmt::Write;
    use core::ptr::with_exposed_provenance;
    use hugemm::prelude::{CpuCx, CpuId, DirectMap, Frames, Heap, PageSize, Ram};
    use hugemm_example_ring0::{AreaError, Areas, KernelFrames, KernelHeap, OneCpu};
    use x86_64::VirtAddr;
    use x86_64::registers::control::Cr3;
    use x86_64::structures::paging::mapper::{MappedFrame, TranslateResult};
    use x86_64::structures::paging::{OffsetPageTable, PageTable, PageTableFlags, Translate};

    /// The boot tables map all memory one to one.
    const OFFSET: VirtAddr = VirtAddr::zero();

    /// Where areas are mapped.
    const AREAS: VirtAddr = VirtAddr::new(0xffff_c000_0000_0000);

    // SAFETY: the boot tables map 4 GiB one to one, and memory ends below; there is one task, in ring 0, and one platform.
    static PLATFORM: OneCpu = unsafe { OneCpu::new(DirectMap::new(FIRST_4_GIB, 0)) };

    #[global_allocator]
    static HEAP: KernelHeap = KernelHeap::new();

    /// What `boot` jumps to, with the physical address of the loader's start info.
    pub extern "C" fn kernel_main(start_info: u64) -> ! {
        let mut serial = Serial::new().expect("a PC has a serial port");
        let mut bytes = 0;
        // SAFETY: what the loader gave, once; nobody uses this memory, and there is no manager.
        let ram = unsafe { ram(start_info) }.map(|piece| unsafe {
            bytes += piece.bytes();
            Ram::assume_unmanaged(piece)
        });
        // SAFETY: once, first of all; GS is nobody's.
        let cx = &unsafe { PLATFORM.enter(CpuId::new(0)) }.expect("room for one");
        let frames = Frames::carve_in_place(cx, ram).expect("enough memory");
        let metadata = bytes - frames.stats(cx).available() * PageSize::Size4K.bytes();
        let heap = Heap::new(frames, cx, 1).expect("memory for a heap");
        // SAFETY: once; this task on the only CPU is all that runs.
        unsafe { HEAP.install(heap, &PLATFORM) };
        writeln!(serial, "frames: {} MiB, of which {} KiB describe the rest", bytes >> 20, metadata >> 10)
            .and_then(|()| run(frames, cx, &mut serial))
            .expect("the serial port takes everything");
        exit(true)
    }

    fn run(frames: &KernelFrames<'_>, cx: &CpuCx<'_, OneCpu>, out: &mut Serial) -> core::fmt::Result {
        let before = frames.stats(cx).available();
        // SAFETY: `OFFSET` maps all memory, the boot tables leave the upper half alone, and only this CPU runs.
        let mut areas = unsafe { Areas::new(OFFSET, AREAS) };
        let size = PageSize::Size2M.bytes();
        let mut used: Vec<(VirtAddr, u64)> = Vec::new();
        for blocks in [1, 3, 2] {
            let at = areas.map(frames, cx, blocks).expect("memory for an area");
            use_area(at, blocks * size);
            used.push((at, blocks));
        }
        // SAFETY: nobody stores to it from here on.
        unsafe { areas.seal(used[2].0) }.expect("it is mapped");
        assert!([0, 2].map(|area: usize| is_writable(used[area].0)) == [true, false], "the wrong area is read-only");
        // SAFETY: what is below is done with it.
        unsafe { areas.unmap(frames, cx, used[1].0) }.expect("it is mapped");
        assert!(matches!(translate(used[1].0), TranslateResult::NotMapped), "an area is still mapped");
        used[1] = (areas.map(frames, cx, 2).expect("memory for an area"), 2);
        assert_eq!(used[1].0, AREAS + size, "the hole of three blocks has room for two");
        used.push((areas.map(frames, cx, 2).expect("memory for an area"), 2));
        assert_eq!(used[3].0, AREAS + 6 * size, "and not for two more");
        used.push((areas.map(frames, cx, 1).expect("memory for an area"), 1));
        assert_eq!(used[4].0, AREAS + 3 * size, "one more is what it has room for");
        assert!(matches!(areas.map(frames, cx, 1 << 20), Err(AreaError::Frames(_))), "2 TiB");

        // Every frame behind them, none twice.
        let leaves = used.iter().flat_map(|(at, blocks)| (0..*blocks).map(move |block| leaf(*at + block * size)));
        let mut leaves: Vec<u64> = leaves.collect();
        leaves.sort_unstable();
        leaves.dedup();
        assert_eq!(leaves.len(), 8, "two areas have the same frames");
        let heap = HEAP.get().expect("installed");
        let pages = heap.stats().pages;
        assert!(pages > 0 && heap.stats().failed == 0, "{heap:?}");
        writeln!(
            out,
            "areas: {} with {} leaves of 2 MiB from {AREAS:#x} on; their map is on a heap of {pages} pages",
            used.len(),
            leaves.len()
        )?;

        for (at, _) in used {
            // SAFETY: the areas are not used any more.
            unsafe { areas.unmap(frames, cx, at) }.expect("it is mapped");
            assert!(matches!(translate(at), TranslateResult::NotMapped), "an area is still mapped");
        }
        drop((areas, leaves));
        heap.trim(cx);
        assert_eq!(heap.stats().pages, 0, "memory of the heap was lost");
        // The two tables between root and leaves stay for the next areas.
        assert_eq!(frames.stats(cx).available(), before - 2, "frames were lost");
        writeln!(out, "ring0: everything is back")
    }

    /// Stores words, and looks whether they are in the frames below.
    fn use_area(at: VirtAddr, bytes: u64) {
        let words = PageSize::Size2M.bytes() as usize / size_of::<u64>();
        for block in 0..bytes / PageSize::Size2M.bytes() {
            let at = at + block * PageSize::Size2M.bytes();
            let (mapped, below) = (at.as_mut_ptr::<u64>(), with_exposed_provenance::<u64>(leaf(at) as usize));
            for index in 0..words {
                // SAFETY: the area's words, which have just been mapped and are nobody else's.
                unsafe { mapped.add(index).write_volatile(index as u64 ^ at.as_u64()) };
            }
            // SAFETY: the same memory, where the boot tables map it.
            let same =
                (0..words).all(|index| unsafe { below.add(index).read_volatile() } == index as u64 ^ at.as_u64());
            assert!(same, "what was stored in the area is not in its frames");
        }
    }

    fn is_writable(at: VirtAddr) -> bool {
        matches!(translate(at), TranslateResult::Mapped { flags, .. } if flags.contains(PageTableFlags::WRITABLE))
    }

    /// Where the leaf of 2 MiB that maps an address leads.
    fn leaf(at: VirtAddr) -> u64 {
        let TranslateResult::Mapped { frame: MappedFrame::Size2MiB(leaf), .. } = translate(at) else {
            panic!("no leaf of 2 MiB: {:?}", translate(at));
        };
        leaf.start_address().as_u64()
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
