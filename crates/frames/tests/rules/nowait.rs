//! Allocating and freeing without waiting, also while somebody else really holds the node's lock.

use crate::support::{Memory, Threads, arena, extent, with_one_arena};
use hugemm_base::Order;
use hugemm_base::inject::{FaultPoint, Inject};
use hugemm_base::lock::{RawLock, SpinLock};
use hugemm_frames::{AllocError, AllocRequest, Env, Frames, FramesConfig};
use std::sync::atomic::{AtomicU32, Ordering};

/// Who gives the lock back next keeps it until the other thread says so.
static STAGE: AtomicU32 = AtomicU32::new(IDLE);
const IDLE: u32 = 0;
const KEEP: u32 = 1;
const KEPT: u32 = 2;

/// A lock whose holder can be made to dawdle.
struct Slow(SpinLock);

// SAFETY: a spin lock; unlocking it later changes nothing.
unsafe impl RawLock for Slow {
    fn new() -> Self {
        Slow(SpinLock::new())
    }

    fn lock(&self) {
        self.0.lock();
    }

    fn try_lock(&self) -> bool {
        self.0.try_lock()
    }

    unsafe fn unlock(&self) {
        if STAGE.compare_exchange(KEEP, KEPT, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            while STAGE.load(Ordering::SeqCst) == KEPT {
                std::thread::yield_now();
            }
        }
        // SAFETY: the caller holds it.
        unsafe { self.0.unlock() }
    }
}

struct Surroundings;

impl Inject for Surroundings {
    fn fault(&self, _point: FaultPoint) -> bool {
        false
    }
}

// SAFETY: the provided arithmetic.
unsafe impl Env for Surroundings {
    type Lock = Slow;
}

#[test]
fn what_cannot_be_freed_at_once_is_freed_by_the_next_who_takes_the_lock() {
    let arenas = [arena(0, 4096, 0)];
    let config = FramesConfig::new(&arenas, 2);
    let mut memory = Memory::new(Frames::<Surroundings>::required_bytes(&config).expect("valid"));
    // SAFETY: one platform; the arenas have no descriptors of their own.
    let frames = unsafe { Frames::in_slice(&config, Surroundings, memory.bytes()) }.expect("large enough");
    let threads: Threads = Threads::default();
    hugemm_threads::run_as(0);
    let cx = threads.cx();
    // SAFETY: released once; nobody owns memory behind the numbers.
    unsafe { frames.release_extent(&cx, extent(0, 4096)) };
    let blocks: Vec<_> = [0, 3, 5, 9].map(|o| hugemm_base::Order::new(o).expect("valid")).into_iter().collect();
    let held: Vec<_> = blocks.iter().map(|o| frames.alloc(&cx, AllocRequest::order(*o)).expect("memory")).collect();
    frames.drain(&cx);
    let pages: u64 = blocks.iter().map(|order| order.pages()).sum();
    assert_eq!(frames.stats(&cx).free, 4096 - pages);
    let _watched = hugemm_threads::Watchdog::new();
    std::thread::scope(|scope| {
        STAGE.store(KEEP, Ordering::SeqCst);
        scope.spawn(|| {
            hugemm_threads::run_as(1);
            let _ = frames.stats(&threads.cx());
        });
        while STAGE.load(Ordering::SeqCst) != KEPT {
            std::thread::yield_now();
        }
        assert_eq!(frames.alloc_nowait(&cx, AllocRequest::default()), Err(AllocError::WouldWait));
        for block in held {
            frames.free_nowait(&cx, block);
        }
        STAGE.store(IDLE, Ordering::SeqCst);
    });
    // The holder had looked at the queue before; whoever comes next empties it.
    let stats = frames.stats(&cx);
    assert_eq!((stats.free, stats.deferred), (4096, 0));
    let all = AllocRequest::order(hugemm_base::Order::new(12).expect("valid"));
    frames.free(&cx, frames.alloc(&cx, all).expect("merged again"));
}

/// Nothing waits: what cannot be freed at once is queued and counted, and freed by whoever has the lock next.
#[test]
fn nothing_is_lost_by_not_waiting() {
    with_one_arena(0, 1024, 1, |frames, _, cx| {
        let block = frames
            .alloc_nowait(&cx, AllocRequest::order(Order::new(3).expect("valid")))
            .expect("nobody holds the lock");
        frames.free_nowait(&cx, block);
        assert_eq!(frames.alloc_nowait(&cx, AllocRequest::order(Order::MAX)), Err(AllocError::OutOfMemory));
        assert_eq!(frames.stats(&cx).free, 1024);
    });
}
