//! Small objects.

use super::support::with_one_arena;
use hugemm_base::platform::{Cpu, PhysMap, Window};
use hugemm_base::{CpuCx, Extent, VirtAddr};
use hugemm_frames::{AllocError, Env, Frames, Slab};
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

/// Frames with bytes: 4 KiB each, from a vector.
pub(crate) struct Bytes(Vec<Page>);

impl Bytes {
    pub(crate) fn new(frames: usize) -> Self {
        Bytes((0..frames).map(|_| Page(UnsafeCell::new([0; 4096]))).collect())
    }
}

#[repr(C, align(4096))]
struct Page(UnsafeCell<[u8; 4096]>);

// SAFETY: every frame's window is its own page of the vector, which lives as long as the map.
unsafe impl PhysMap for Bytes {
    fn open(&self, extent: Extent, _user: Option<VirtAddr>) -> Option<Window> {
        let page = self.0.get(extent.base().get() as usize)?;
        Some(Window { ptr: page.0.get().cast(), pages: 1 })
    }
}

/// A piece. Each of these tests uses a slab with one manager and one map.
pub(crate) fn alloc_piece<E: Env>(
    slab: &Slab,
    frames: &Frames<'_, E>,
    cx: &CpuCx<'_, impl Cpu>,
    map: &impl PhysMap,
) -> Result<NonNull<u8>, AllocError> {
    // SAFETY: as said.
    unsafe { slab.alloc(frames, cx, map) }
}

/// Where two make a frame the slab's at once, there is one more than is needed; one empty one is kept all the same.
#[test]
fn one_empty_frame_is_kept_however_many_there_have_been() {
    with_one_arena(0, 64, 1, |frames, threads, _| {
        let (cx, map) = (threads.cx(), Bytes::new(64));
        let slab: Slab = Slab::new(4032, 64).expect("fits");
        assert_eq!(slab.per_frame(), 1);
        // SAFETY: each is the slab's, and freed once.
        let free = |object| unsafe { slab.free(frames, &cx, &map, object) };
        let mut held = Some(alloc_piece(&slab, frames, &cx, &map).expect("memory"));
        let (mut points, mut object) = (0, None);
        let interrupt = |cx: &mut hugemm_base::CpuCx<'_, _>| {
            points += 1;
            if points == 2 {
                // It has found no room, and is about to take a frame.
                free(alloc_piece(&slab, frames, cx, &map).expect("memory"));
            }
            if slab.stats(cx).frames == 3 {
                held.take().into_iter().for_each(free);
            }
        };
        threads.interrupted(interrupt, |cx| object = alloc_piece(&slab, frames, cx, &map).ok());
        assert!(held.is_none(), "nobody came between");
        free(object.expect("memory"));
        let stats = slab.stats(&cx);
        assert_eq!((stats.objects, stats.frames), (0, 1));
        // SAFETY: the slab's frames and map.
        unsafe { slab.trim(frames, &cx, &map) };
        frames.drain(&cx);
        assert_eq!((slab.stats(&cx).frames, frames.stats(&cx).free), (0, 64));
    });
}

/// Those that two have taken at once go back, both of them.
#[test]
fn all_empty_frames_are_trimmed() {
    with_one_arena(0, 64, 1, |frames, threads, _| {
        let (cx, map) = (threads.cx(), Bytes::new(64));
        let slab: Slab = Slab::new(4032, 64).expect("fits");
        let (mut points, mut trimmed, mut object) = (0, 0, None);
        let interrupt = |cx: &mut hugemm_base::CpuCx<'_, _>| {
            points += 1;
            // SAFETY: the slab's frames and map; the object once.
            unsafe {
                if points == 2 {
                    // It has found no room, and is about to take a frame.
                    slab.free(frames, cx, &map, alloc_piece(&slab, frames, cx, &map).expect("memory"));
                }
                if slab.stats(cx).frames == 2 {
                    slab.trim(frames, cx, &map);
                    trimmed += 1;
                    assert_eq!(slab.stats(cx).frames, 0);
                }
            }
        };
        threads.interrupted(interrupt, |cx| object = alloc_piece(&slab, frames, cx, &map).ok());
        assert_eq!(trimmed, 1, "there were no two empty frames");
        // SAFETY: as above.
        unsafe {
            slab.free(frames, &cx, &map, object.expect("it takes another frame"));
            slab.trim(frames, &cx, &map);
        }
        assert_eq!(frames.stats(&cx).available(), 64);
    });
}

#[test]
fn slabs_take_and_give_frames_and_never_overlap() {
    with_one_arena(0, 64, 1, |frames, _, cx| {
        let map = Bytes::new(64);
        assert!(Slab::<hugemm_base::lock::SpinLock>::new(4096, 8).is_none());
        assert!(Slab::<hugemm_base::lock::SpinLock>::new(8, 3).is_none());
        for (size, align) in [
            (1, 1),
            (5, 1),
            (24, 8),
            (64, 64),
            (100, 4),
            (1000, 8),
            (2000, 16),
            (4032, 64),
            (24, 128),
            (300, 256),
            (1000, 1024),
        ] {
            let slab: Slab = Slab::new(size, align).expect("fits");
            let mut held: Vec<NonNull<u8>> = Vec::new();
            while let Ok(object) = alloc_piece(&slab, frames, &cx, &map) {
                // While it is free it holds a number of four bytes.
                assert_eq!(object.as_ptr().addr() % align.max(4), 0);
                // SAFETY: the object is `size` bytes of ours.
                unsafe { object.write_bytes(held.len() as u8, size) };
                held.push(object);
                if held.len() == if cfg!(miri) { 9 } else { 3000 } {
                    break;
                }
            }
            let stats = slab.stats(&cx);
            assert_eq!(stats.objects, held.len() as u64);
            assert_eq!(stats.frames, stats.objects.div_ceil(slab.per_frame().into()));
            for (index, object) in held.iter().enumerate() {
                // SAFETY: as above.
                let bytes = unsafe { std::slice::from_raw_parts(object.as_ptr(), size) };
                assert!(bytes.iter().all(|b| *b == index as u8), "objects overlap");
            }
            // In an order that is neither first nor last in, first out.
            while !held.is_empty() {
                let object = held.swap_remove(held.len() * 7 % held.len().max(1) / 2);
                // SAFETY: ours, once.
                unsafe { slab.free(frames, &cx, &map, object) };
            }
            assert_eq!(slab.stats(&cx).frames, 1, "one is kept");
            // SAFETY: the only manager and map.
            unsafe { slab.trim(frames, &cx, &map) };
            assert_eq!(slab.stats(&cx).frames, 0);
            assert_eq!(frames.stats(&cx).available(), 64);
        }
    });
}

/// A CPU takes from frames of its own, and from another's only when there is no memory; what another frees goes back there.
#[test]
fn cpus_have_frames_of_their_own() {
    with_one_arena(0, 64, 2, |frames, threads, _| {
        let map = Bytes::new(64);
        let slab: Slab = Slab::new(1000, 8).expect("fits");
        let frame = |object: &NonNull<u8>| object.as_ptr().addr() >> 12;
        let first = alloc_piece(&slab, frames, &threads.cx(), &map).expect("memory");
        hugemm_threads::run_as(1);
        let mut held = vec![alloc_piece(&slab, frames, &threads.cx(), &map).expect("memory")];
        assert_ne!(frame(&held[0]), frame(&first));
        while let Ok(object) = alloc_piece(&slab, frames, &threads.cx(), &map) {
            held.push(object);
        }
        let shared = held.iter().filter(|object| frame(object) == frame(&first)).count();
        assert_eq!((shared, slab.stats(&threads.cx()).objects), (3, held.len() as u64 + 1));
        for object in held.into_iter().chain([first]) {
            // SAFETY: ours, once.
            unsafe { slab.free(frames, &threads.cx(), &map, object) };
        }
        assert_eq!((slab.stats(&threads.cx()).objects, slab.stats(&threads.cx()).frames), (0, 2), "each keeps one");
        // SAFETY: the only manager and map.
        unsafe { slab.trim(frames, &threads.cx(), &map) };
        hugemm_threads::run_as(0);
        assert_eq!(frames.stats(&threads.cx()).available(), 64);
    });
}

/// Whose first window unwinds.
struct Unwinds(Bytes, AtomicBool);

// SAFETY: as the bytes'.
unsafe impl PhysMap for Unwinds {
    fn open(&self, extent: Extent, user: Option<VirtAddr>) -> Option<Window> {
        assert!(self.1.swap(true, Ordering::Relaxed), "planned");
        self.0.open(extent, user)
    }
}

#[test]
fn a_platform_that_unwinds_costs_a_slab_no_frame() {
    with_one_arena(0, 64, 1, |frames, _, cx| {
        let map = Unwinds(Bytes::new(64), AtomicBool::new(false));
        let slab: Slab = Slab::new(100, 4).expect("fits");
        let ended = catch_unwind(AssertUnwindSafe(|| alloc_piece(&slab, frames, &cx, &map)));
        assert!(ended.is_err());
        let object = alloc_piece(&slab, frames, &cx, &map).expect("memory");
        // SAFETY: ours, once; the only manager and map.
        unsafe {
            slab.free(frames, &cx, &map, object);
            slab.trim(frames, &cx, &map);
        }
        assert_eq!(frames.stats(&cx).available(), 64);
    });
}
