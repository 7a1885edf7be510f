//! The embedder's guide's examples (docs/embedding.md), word for word, and what they do when they run.
#![allow(unreachable_pub)]

use hugemm::prelude::*;
use std::alloc::{Layout, alloc_zeroed};

/// Memory of this size that nobody else has, and its numbers.
fn memory(bytes: usize) -> (Extent, *mut u8) {
    let layout = Layout::from_size_align(bytes, 8 << 20).expect("a layout");
    // SAFETY: the layout has a size.
    let base = unsafe { alloc_zeroed(layout) };
    assert!(!base.is_null(), "no memory");
    (Extent::new(Pfn::new(0), bytes as u64 / 4096).expect("in range"), base)
}

mod first_page {
    use hugemm::prelude::*;

    /// `ram` is memory that nobody else uses, mapped at `base` for good.
    pub fn first_page(ram: Extent, base: *mut u8) -> Result<(), Box<dyn core::error::Error>> {
        // SAFETY: nobody else uses `ram`; it stays mapped at `base`.
        let (cx, ram) = unsafe { SingleCpu::start(ram, base) }; // `ram` is owned now
        let frames = Frames::carve(&cx, ram)?; //                  by value: once
        let page = frames.alloc(&cx, PageSize::Size2M)?;
        frames.free(&cx, page);
        Ok(())
    }
}

#[test]
fn a_first_page() {
    let (ram, base) = memory(8 << 20);
    first_page::first_page(ram, base).expect("8 MiB are enough");
}

mod hotplug {
    use core::ptr::NonNull;
    use hugemm::frames::{ArenaSpec, Env, Mobility, NoMigration, RemovedArena, WideCounts};
    use hugemm::prelude::*;

    /// A piece of memory is plugged in. Keep `metadata`, of `Frames::added_bytes`, elsewhere: it outlives the piece.
    pub fn plug<P: Cpu, E: Env>(
        cx: &CpuCx<'_, P>,
        frames: &Frames<'_, E>,
        piece: Dirty,
        metadata: &'static mut [u8],
    ) -> bool {
        let spec = ArenaSpec::new(piece.extent(), NodeId::new(0));
        // SAFETY: both are the caller's, who gives them up.
        unsafe {
            frames.add(cx, &spec, metadata.as_mut_ptr(), metadata.len()).is_ok() && frames.release(cx, piece) != 0
        }
    }

    /// It is to be unplugged. `None` while some of it is in use: a closure in the place of `NoMigration` moves what can be moved.
    /// `frame_of` knows which frame is at an address: `Vm::widen` may have taken a frame for counters of each 2 MiB.
    pub fn unplug<P: Cpu, E: Env>(
        cx: &mut CpuCx<'_, P>,
        frames: &Frames<'_, E>,
        piece: Extent,
        frame_of: impl Fn(NonNull<WideCounts>) -> Pfn,
    ) -> Option<RemovedArena> {
        let all = frames.alloc_contig_range(cx, piece, &mut NoMigration).ok()?;
        // SAFETY: the counters were a frame's, and nobody else has it.
        let page = |wide| unsafe { Frozen::assume_owned(frame_of(wide), Order::ZERO, Mobility::Unmovable) };
        // SAFETY: nobody asks about a frame of it by its number: what scans memory by numbers has been told before.
        let removed = unsafe { frames.remove(cx, all, |wide| frames.free(cx, page(wide))) };
        // Another claim, of a task that compacts, or poison.
        removed.map_err(|(all, _)| frames.free_extent(cx, all)).ok()
    }
}

#[test]
fn memory_comes_and_goes() {
    let (ram, base) = memory(64 << 20);
    // SAFETY: nobody else has the numbers, nor the memory.
    let (mut cx, ram) = unsafe { SingleCpu::start(ram, base) };
    let frames = Frames::carve(&cx, ram).expect("64 MiB are enough");
    let piece = Extent::new(Pfn::new(1 << 20), 4096).expect("in range");
    let spec = hugemm::frames::ArenaSpec::new(piece, NodeId::new(0));
    let layout = Frames::<hugemm::frames::Carved>::added_bytes(&spec).expect("a size");
    // SAFETY: as large as the slice; it is leaked.
    let metadata = unsafe { core::slice::from_raw_parts_mut(alloc_zeroed(layout), layout.size()) };
    // SAFETY: the frames are nobody else's.
    assert!(hotplug::plug(&cx, &frames, unsafe { Dirty::assume_owned(piece) }, metadata));
    let removed = hotplug::unplug(&mut cx, &frames, piece, |_| unreachable!()).expect("nothing of it is used");
    assert_eq!((removed.frames.extent(), removed.memory.len()), (piece, layout.size() - 4096));
}

mod reporting {
    use hugemm::{frames::Env, prelude::*};

    /// Reports free blocks of 8 MiB that are not known to be zero; returns how many. For an idle loop.
    pub fn report<P: Cpu, E: Env>(cx: &CpuCx<'_, P>, frames: &Frames<'_, E>, mut tell: impl FnMut(Extent)) -> usize {
        let mut told = 0;
        // No CPU caches blocks of that size.
        while let Ok(order) = Order::new(11)
            && let Ok(block) = frames.alloc(cx, order)
        {
            let before = told;
            let zeroed = block.into_content().unwrap_or_else(|dirty| {
                let extent = dirty.into_extent();
                tell(extent);
                told += 1;
                // SAFETY: the block's frames, which the hypervisor has made zero.
                unsafe { Zeroed::assume_owned(extent) }
            });
            frames.free_zeroed(cx, zeroed);
            if told == before {
                break; // the rest is known to be zero
            }
        }
        told
    }
}

#[test]
fn free_memory_is_reported_once() {
    let (ram, base) = memory(64 << 20);
    // SAFETY: nobody else has the numbers, nor the memory, which is zero.
    let (cx, ram) = unsafe { SingleCpu::start(ram, base) };
    let frames = Frames::carve(&cx, ram).expect("64 MiB are enough");
    assert_eq!([(); 2].map(|()| reporting::report(&cx, &frames, |_| ())), [6, 0]);
    let used = frames.alloc(&cx, Order::new(11).expect("in range")).expect("some is free");
    frames.free(&cx, used);
    assert_eq!(reporting::report(&cx, &frames, |extent| assert_eq!(extent.pages(), 2048)), 1);
}

#[cfg(feature = "reclaim")]
pub mod worker {
    //! A loop without an end: that it compiles is what is shown here.
    use hugemm::base::lock::RawLock;
    use hugemm::base::{Never, NodeId};
    use hugemm::reclaim::{Level, Reclaim, Steps, Swap, Turn};
    use hugemm::vm::{Cx, Setup, Vm};

    /// Keeps memory free on a node.
    pub fn work<S: Setup, W: Swap<S::Platform>, L: RawLock, O: Steps>(
        reclaim: &Reclaim<'_, '_, S, W, L, O>,
        vm: &Vm<'_, S>,
        cx: &mut Cx<'_, S>,
        node: NodeId,
        sleep: impl Fn(),
    ) {
        loop {
            let level = reclaim.marks().level(vm.frames().node_available(cx, node));
            if reclaim.take_wake(node) || level < Level::Fair {
                while reclaim.balance(vm, cx, node, 4096, &Never).0 == Turn::Unfinished {}
            }
            vm.frames().serve(cx); // nobody else reaches what this CPU has cached
            sleep(); // until woken, and at most a second
        }
    }
}
