//! What descriptors are used for, and that those of tails are not.

use super::request;
use super::support::{Memory, Threads, arena, extent, release, with_one_arena};
use hugemm_base::inject::NoFaults;
use hugemm_base::{Dirty, ExtentChain, Order, Pfn, with};
use hugemm_frames::{Descriptor, FramesConfig, Frozen, Put};
use std::ptr::NonNull;

/// Descriptors of tails may be anything, and are never written: here they do not even exist for all but the first
/// frame of each 2 MiB while it is allocated as one block.
#[test]
fn tails_are_dont_care() {
    let pages = 2048_usize;
    let mut descriptors: Vec<Descriptor> = (0..pages).map(|_| Descriptor::default()).collect();
    let spec = with!(arena(0, pages as u64, 0), descriptors = NonNull::new(descriptors.as_mut_ptr()));
    let arenas = [spec];
    let config = FramesConfig::new(&arenas, 1);
    let memory = Memory::for_config(&config);
    let frames = memory.manager(&config, NoFaults);
    release(&frames, extent(0, pages as u64));
    let threads: Threads = Threads::default();
    hugemm_threads::run_as(0);
    let cx = threads.cx();
    let garbage = 0xdead_beef_dead_beef;
    let held: Vec<Frozen> = (0..4).map(|_| frames.alloc(&cx, request(9)).expect("memory")).collect();
    for block in &held {
        for tail in block.extent().base().get() + 1..block.extent().end().get() {
            for word in 0..8 {
                // SAFETY: of a block in hand; that it is no head is what this is about.
                unsafe { frames.descriptor_at(Pfn::new(tail)) }.expect("managed").store(word, garbage);
            }
        }
    }
    // Freed, merged, allocated as one, freed in part: all without a look at a tail.
    for block in held {
        frames.free(&cx, block);
    }
    frames.drain(&cx);
    let whole = frames.alloc(&cx, request(11)).expect("merged");
    let counted = frames.count(whole).expect("fresh");
    assert_eq!(frames.put(&cx, counted), Ok(Put::Last));
    for tail in (0..pages as u64).filter(|tail| tail % 512 != 0) {
        assert_eq!(frames.descriptor(Pfn::new(tail)).expect("managed").load(3), garbage, "tail {tail} was written");
    }
    // Nor does a split write any: what the heads that it makes say is their owner's business, as after an allocation.
    let run = frames.split(frames.alloc(&cx, request(9)).expect("memory"), Order::ZERO).expect("managed");
    for frame in run.extent().base().get() + 1..run.extent().end().get() {
        assert_eq!(frames.descriptor(Pfn::new(frame)).expect("managed").load(3), garbage, "page {frame} was written");
    }
    frames.free_extent(&cx, run.into_dirty());
}

#[test]
fn chains_of_extents_live_in_descriptors() {
    with_one_arena(0, 2048, 1, |frames, _, cx| {
        let mut chain = ExtentChain::new();
        for _ in 0..100 {
            let block = frames.alloc(&cx, request(2)).expect("memory");
            // SAFETY: just allocated; the only chain.
            unsafe { chain.push(frames, block.into_dirty().into_extent()) };
        }
        assert_eq!(chain.pages(), 400);
        while let Some(extent) = chain.pop(frames) {
            // SAFETY: on the chain, hence owned.
            frames.free_extent(&cx, unsafe { Dirty::assume_owned(extent) });
        }
        assert_eq!(frames.stats(&cx).available(), 2048);
    });
}
