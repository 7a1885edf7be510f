//! What comes in between: interrupts that allocate and free wherever they could come, and poison that strikes at the last
//! moment.

use hugemm_base::inject::{FaultPoint, Inject};
use hugemm_base::lock::{RawLock, SpinLock};
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, CpuId, Dirty, Extent, NodeId, Order, Pfn};
use hugemm_frames::{AllocContigError, AllocRequest, ArenaSpec, Env, Frames, FramesConfig, Frozen, HwPoisoned};
use hugemm_threads::{Memory, TestLock, Threads, run_as};
use std::cell::RefCell;

/// Enough for caches of 2 MiB blocks.
const PAGES: u64 = if cfg!(miri) { 8192 } else { 1 << 16 };

fn order(order: u32) -> Order {
    Order::new(order).expect("valid")
}

fn extent(base: u64, pages: u64) -> Extent {
    Extent::new(Pfn::new(base), pages).expect("in range")
}

/// Locks of one's own choice.
struct With<L>(core::marker::PhantomData<L>);

impl<L> Inject for With<L> {
    fn fault(&self, _point: FaultPoint) -> bool {
        false
    }
}

// SAFETY: the provided method.
unsafe impl<L: RawLock + Send + Sync> Env for With<L> {
    type Lock = L;
}

/// A manager on two nodes, all but the last 512 frames of each released.
fn with_manager<L: RawLock + Send + Sync>(test: impl FnOnce(&Frames<'_, With<L>>, &Threads, CpuCx<'_, Threads>)) {
    let arena = |n: u64| ArenaSpec::new(extent(n * PAGES, PAGES), NodeId::new(n as u32));
    let arenas = [arena(0), arena(1)];
    let config = FramesConfig::new(&arenas, 2);
    let memory = Memory::new(Frames::<With<L>>::required_bytes(&config).expect("valid"));
    // SAFETY: zeroed, as large and aligned as asked for, used once, and with one platform.
    let frames = unsafe {
        Frames::new(&config, With(core::marker::PhantomData), memory.ptr(), memory.bytes()).expect("large enough")
    };
    let threads: Threads = Threads::new(());
    run_as(0);
    for n in [0, 1] {
        // SAFETY: once; there is no memory behind the numbers.
        unsafe { frames.release(&threads.cx(), Dirty::assume_owned(extent(n * PAGES, PAGES - 512))) };
    }
    test(&frames, &threads, threads.cx());
}

/// What an interrupt handler may do: all that says "any context".
fn handle<P: Cpu, E: Env>(frames: &Frames<'_, E>, cx: &mut CpuCx<'_, P>, count: &mut u64, kept: &mut Vec<Frozen>) {
    *count += 1;
    match *count % 5 {
        0 => kept.extend(frames.alloc(cx, AllocRequest::order(order((*count % 11) as u32))).ok()),
        1 => kept.extend(frames.alloc_nowait(cx, AllocRequest::order(Order::ZERO)).ok()),
        2 => kept.pop().into_iter().for_each(|block| frames.free(cx, block)),
        3 => kept.pop().into_iter().for_each(|block| frames.free_nowait(cx, block)),
        _ => frames.serve(cx),
    }
    if kept.len() > 8 {
        frames.free(cx, kept.remove(0));
    }
}

/// An interrupt may come wherever no pin holds it off, and it wants memory: nobody waits for himself, and nothing is lost.
#[test]
fn an_interrupt_may_want_memory_anywhere() {
    with_manager::<TestLock>(|frames, threads, _| {
        let before = frames.stats(&threads.cx());
        let (mut count, mut kept) = (0, Vec::new());
        threads.interrupted(
            |cx| handle(frames, cx, &mut count, &mut kept),
            |cx| {
                for round in 0..if cfg!(miri) { 1 } else { 8 } {
                    for log in [0, 3, 5, 9, 10, 0, 9] {
                        let request = AllocRequest::order(order(log));
                        let (one, other) = (frames.alloc(cx, request), frames.alloc_nowait(cx, request.movable()));
                        frames.free_nowait(cx, one.expect("memory"));
                        let folio = frames.count(other.expect("memory")).expect("managed");
                        let again = frames.get(&folio).expect("fits");
                        let _ = frames.put(cx, again);
                        // SAFETY: no LRU lists these frames.
                        let got = unsafe { frames.try_get(folio.pfn()) };
                        let _ = got.map(|f| f.map(|f| frames.put(cx, f)));
                        let _ = frames.put(cx, folio);
                    }
                    // A run with a poisoned page, part of it counted, part frozen.
                    let block = frames.alloc(cx, AllocRequest::order(order(7))).expect("memory");
                    let bad = Pfn::new(block.pfn().get() + 5 + round);
                    let run = frames.split(block, Order::ZERO).expect("managed");
                    assert_eq!(frames.hwpoison(cx, bad), HwPoisoned::InUse);
                    let (mut first, second) = frames.count_run(run).expect("managed").split_at(100);
                    let alone = first.pop().expect("one");
                    let _ = frames.put(cx, alone);
                    assert_eq!(frames.free_range(cx, first).refused, 1);
                    frames.free_range(cx, second);
                    let free = Pfn::new(PAGES + 4000 + round);
                    let _ = frames.hwpoison(cx, free);
                    // Particular frames, with and without the help of who has them.
                    if let Ok(taken) = frames.take_range(cx, extent(PAGES + 5000, 100)) {
                        frames.free_extent(cx, taken);
                    }
                    let taken = frames.alloc_contig_range(
                        cx,
                        extent(PAGES + 1024, 1024),
                        &mut |_: &mut CpuCx<'_, _>, _: Extent| false,
                    );
                    match taken {
                        Ok(taken) => _ = frames.free_extent(cx, taken),
                        Err(error) => assert!(matches!(error, AllocContigError::InUse(_))),
                    }
                    frames.drain(cx);
                    // SAFETY: no thread runs as that CPU.
                    unsafe { frames.drain_offline(cx, CpuId::new(1)) };
                    let _ = frames.node_stats(cx, NodeId::new(1));
                    // SAFETY: the last of each arena, 32 at a time; once.
                    unsafe { frames.release_extent(cx, extent(PAGES - 512 + round * 32, 32)) };
                }
            },
        );
        let cx = threads.cx();
        assert!(count > 100, "{count} interrupts");
        kept.into_iter().for_each(|block| frames.free(&cx, block));
        frames.drain(&cx);
        let after = frames.stats(&cx);
        assert_eq!(after.free + after.refused, frames.managed(), "{before:?} {after:?}");
    });
}

thread_local! {
    /// What happens on this thread just before it takes a lock, once.
    static STRIKE: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
}

/// A spin lock that something may happen before.
struct Struck(SpinLock);

// SAFETY: a spin lock.
unsafe impl RawLock for Struck {
    fn new() -> Self {
        Struck(SpinLock::new())
    }

    fn lock(&self) {
        if let Some(strike) = STRIKE.take() {
            strike();
        }
        self.0.lock();
    }

    fn try_lock(&self) -> bool {
        if let Some(strike) = STRIKE.take() {
            strike();
        }
        self.0.try_lock()
    }

    unsafe fn unlock(&self) {
        // SAFETY: the caller's promise.
        unsafe { self.0.unlock() }
    }
}

/// A frame that is poisoned after the first look at it and before the lock is held is found by the second look, whatever is
/// freeing it.
#[test]
fn poison_strikes_between_the_look_and_the_lock() {
    type Way = fn(&Frames<'_, With<Struck>>, &CpuCx<'_, Threads>, Frozen);
    let ways: [(&str, u32, Way); 8] = [
        ("a block, without waiting", 3, |frames, cx, block| frames.free_nowait(cx, block)),
        ("a block too large for caches", 10, |frames, cx, block| frames.free(cx, block)),
        ("an extent", 8, |frames, cx, block| {
            let (first, part) = block.into_dirty().split_at(1);
            frames.free_extent(cx, part);
            frames.free_extent(cx, first);
        }),
        ("a run", 7, |frames, cx, block| {
            let run = frames.count_run(frames.split(block, Order::ZERO).expect("managed")).expect("managed");
            // Not a block, so that no cache takes it.
            let (first, rest) = run.split_at(1);
            // SAFETY: a context of this thread's; the one that is borrowed is not used meanwhile.
            let mut own = unsafe { CpuCx::new(cx.platform()) };
            frames.free_range(&mut own, rest);
            frames.free_range(&mut own, first);
        }),
        ("pages in a cache", 0, |frames, cx, block| {
            frames.free(cx, block);
            frames.drain(cx);
        }),
        ("2 MiB in a cache", 9, |frames, cx, block| {
            frames.free(cx, block);
            frames.drain(cx);
        }),
        ("a gathered block", 5, |frames, cx, block| {
            frames.free(cx, block);
            frames.drain(cx);
        }),
        ("claimed and freed", 9, |frames, cx, block| {
            frames.free_extent(cx, block.into_dirty());
            frames.drain(cx);
        }),
    ];
    for (name, log, way) in ways {
        with_manager::<Struck>(|frames, threads, cx| {
            let block = frames.alloc(&cx, AllocRequest::order(order(log))).expect("memory");
            let bad = Pfn::new(block.pfn().get() + (1 << log) - 1);
            let strike: Box<dyn FnOnce() + '_> = Box::new(move || {
                assert_eq!(frames.hwpoison(&threads.cx(), bad), HwPoisoned::InUse, "{name}");
            });
            // SAFETY: only the lifetime is changed; it is called before `frames` ends, or taken away below.
            STRIKE.set(Some(unsafe { core::mem::transmute::<Box<dyn FnOnce() + '_>, Box<dyn FnOnce()>>(strike) }));
            way(frames, &cx, block);
            assert!(STRIKE.take().is_none(), "{name}: no lock was taken");
            frames.drain(&cx);
            assert_eq!(frames.stats(&cx).refused, 1, "{name}");
            let held: Vec<Frozen> = core::iter::from_fn(|| frames.alloc(&cx, AllocRequest::default()).ok()).collect();
            assert!(held.iter().all(|block| block.pfn() != bad), "{name}: handed out");
            assert_eq!(held.len() as u64, frames.managed() - 1, "{name}");
        });
    }
}
