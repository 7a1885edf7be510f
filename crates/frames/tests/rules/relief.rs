//! When memory is short: who is asked, when nobody is, and what whoever frees memory may have.

use super::{order, request};
use hugemm_base::{CpuCx, NodeId, Order, Relief, Shortfall};
use hugemm_frames::{AllocError, Carved, Frames, Frozen, HwPoisoned, Mobility, Placement};
use hugemm_threads::{Memory, Threads};
use std::sync::Mutex;
use std::sync::atomic::Ordering;

type Cx<'a> = CpuCx<'a, Threads<Memory>>;

/// Calls `f`.
struct Hook<F>(F);

impl<F: Fn(&mut Cx<'_>, Shortfall) -> u64> Relief<Threads<Memory>> for Hook<F> {
    fn relieve(&self, cx: &mut Cx<'_>, need: Shortfall) -> u64 {
        (self.0)(cx, need)
    }
}

/// Runs a test in memory of which everything is taken, and looks whether every frame is there at the end.
fn exhausted(test: impl FnOnce(&Threads<Memory>, &Frames<'_, Carved>, &Mutex<Vec<Frozen>>)) {
    let _watched = hugemm_threads::Watchdog::new();
    let (threads, ram) = Threads::with_memory(4 << 20);
    let cx = threads.cx();
    let frames = Frames::carve(&cx, ram).expect("enough memory");
    let free = frames.available(&cx);
    let taken = Mutex::new(core::iter::from_fn(|| frames.alloc(&cx, Order::ZERO).ok()).collect());
    test(&threads, &frames, &taken);
    frames.keep_reserve(&cx, 0);
    taken.into_inner().expect("whole").into_iter().for_each(|block| frames.free(&cx, block));
    assert_eq!(frames.available(&cx) + frames.stats(&cx).refused, free);
}

/// Whoever may sleep gets what the hook has freed, of what was missing; whoever finds memory asks nobody.
#[test]
fn who_may_sleep_gets_what_the_hook_has_freed() {
    exhausted(|threads, frames, taken| {
        let (mut cx, asked) = (threads.cx(), Mutex::new(Vec::new()));
        let hook = Hook(|cx: &mut Cx<'_>, need: Shortfall| {
            asked.lock().expect("whole").push(need);
            let all = core::mem::take(&mut *taken.lock().expect("whole"));
            let freed = all.len() as u64;
            all.into_iter().for_each(|block| frames.free(cx, block));
            freed
        });
        assert_eq!(frames.alloc(&cx, order(3)).err(), Some(AllocError::OutOfMemory));
        for request in [request(3), request(3).movable().from(Placement::Only(NodeId::new(0)))] {
            let block = frames.alloc_or_relieve(&mut cx, &hook, request).expect("what was freed");
            taken.lock().expect("whole").push(block);
        }
        assert_eq!(*asked.lock().expect("whole"), [Shortfall::block(order(3))], "there was enough for the second");
        let rest = core::iter::from_fn(|| frames.alloc(&cx, Order::ZERO).ok());
        taken.lock().expect("whole").extend(rest);
        let block =
            frames.alloc_or_relieve(&mut cx, &hook, request(0).from(Placement::Only(NodeId::new(0)))).expect("freed");
        frames.free(&cx, block);
        let need = Shortfall::block(Order::ZERO).only(Some(NodeId::new(0)));
        assert_eq!(asked.lock().expect("whole").last(), Some(&need));
    });
}

/// A hook that has nothing is asked once, one that says that it has freed something three times; what is wrong with the request
/// itself is no shortage.
#[test]
fn a_hook_that_frees_nothing_ends_in_an_error() {
    exhausted(|threads, frames, _| {
        let (mut cx, asked) = (threads.cx(), Mutex::new(0));
        for (says, times) in [(0, 1), (1, 3)] {
            let hook = Hook(|_: &mut Cx<'_>, _| {
                *asked.lock().expect("whole") += 1;
                says
            });
            assert_eq!(frames.alloc_or_relieve(&mut cx, &hook, Order::ZERO).err(), Some(AllocError::OutOfMemory));
            assert_eq!(core::mem::take(&mut *asked.lock().expect("whole")), times);
            let nowhere = request(0).from(Placement::Only(NodeId::new(9)));
            assert_eq!(frames.alloc_or_relieve(&mut cx, &hook, nowhere).err(), Some(AllocError::NoSuchNode));
            assert_eq!(*asked.lock().expect("whole"), 0);
        }
    });
}

/// What is poisoned while it is in the reserve is not handed out.
#[test]
fn the_reserve_hands_out_no_poison() {
    exhausted(|threads, frames, taken| {
        let mut cx = threads.cx();
        let kept: Vec<_> = taken.lock().expect("whole").drain(..3).collect();
        let bad = kept[1].pfn();
        kept.into_iter().for_each(|page| frames.free(&cx, page));
        assert_eq!(frames.keep_reserve(&cx, 3), 3);
        assert_eq!(frames.hwpoison(&cx, bad), HwPoisoned::InUse);
        let got: Vec<_> = cx.freeing(|cx| core::iter::from_fn(|| frames.alloc(cx, Order::ZERO).ok()).collect());
        assert!(got.len() == 2 && got.iter().all(|page| page.pfn() != bad), "{got:?}, {bad:?}");
        taken.lock().expect("whole").extend(got);
    });
}

/// A hook that allocates by a call that asks for relief is not asked again, however it comes to that call.
#[test]
fn a_hook_is_not_asked_by_itself() {
    exhausted(|threads, frames, taken| {
        let (mut cx, depth) = (threads.cx(), Mutex::new((0, 0)));
        struct Again<'a, 'm>(&'a Frames<'m, Carved>, &'a Mutex<Vec<Frozen>>, &'a Mutex<(u32, u32)>);
        impl Relief<Threads<Memory>> for Again<'_, '_> {
            fn relieve(&self, cx: &mut Cx<'_>, _: Shortfall) -> u64 {
                let now = {
                    let mut depth = self.2.lock().expect("whole");
                    *depth = (depth.0 + 1, depth.1 + 1);
                    depth.0
                };
                assert_eq!(now, 1, "it was asked by itself");
                assert!(cx.is_freeing());
                assert_eq!(self.0.alloc_or_relieve(cx, self, Order::ZERO).err(), Some(AllocError::OutOfMemory));
                assert!(cx.is_freeing(), "it still is");
                self.2.lock().expect("whole").0 -= 1;
                let block = self.1.lock().expect("whole").pop().expect("there are some");
                self.0.free(cx, block);
                1
            }
        }
        let hook = Again(frames, taken, &depth);
        let block = frames.alloc_or_relieve(&mut cx, &hook, Order::ZERO).expect("what was freed");
        assert!(!cx.is_freeing());
        taken.lock().expect("whole").push(block);
        let block = frames.alloc_or_relieve(&mut cx, &hook, Order::ZERO).expect("the next time it is asked again");
        taken.lock().expect("whole").push(block);
        assert_eq!(*depth.lock().expect("whole"), (0, 2));
    });
}

/// Where nobody may sleep, an interrupt's handler or a pinned task, nobody is asked.
#[test]
fn who_may_not_sleep_asks_nobody() {
    exhausted(|threads, frames, _| {
        let hook = Hook(|_: &mut Cx<'_>, _| panic!("asked"));
        let outer = threads.cx();
        outer.pinned(|_| {
            // As an allocator does that is given no context.
            assert!(frames.alloc_or_relieve(&mut threads.cx(), &hook, Order::ZERO).is_err());
        });
        threads.atomic.store(true, Ordering::Relaxed);
        assert!(frames.alloc_or_relieve(&mut threads.cx(), &hook, Order::ZERO).is_err());
        threads.atomic.store(false, Ordering::Relaxed);
    });
}

/// The reserve is for those who free memory, single unmovable frames of any node, and is filled again before the others get anything.
#[test]
fn the_reserve_is_for_those_who_free() {
    exhausted(|threads, frames, taken| {
        let mut cx = threads.cx();
        assert_eq!(frames.keep_reserve(&cx, 5), 0, "there is nothing to keep");
        let give = |cx: &Cx<'_>, count: usize| {
            taken.lock().expect("whole").drain(..count).for_each(|block| frames.free(cx, block));
        };
        give(&cx, 7);
        assert_eq!((frames.keep_reserve(&cx, 5), frames.available(&cx)), (5, 2));
        assert_eq!((frames.keep_reserve(&cx, 3), frames.available(&cx)), (3, 4), "what is more goes back");
        taken.lock().expect("whole").extend(core::iter::from_fn(|| frames.alloc(&cx, Order::ZERO).ok()));
        assert_eq!(frames.alloc(&cx, Order::ZERO).err(), Some(AllocError::OutOfMemory), "it is not for everybody");
        let hook = Hook(|cx: &mut Cx<'_>, _| {
            for refused in [request(1), request(0).movable(), request(0).from(Placement::Only(NodeId::new(0)))] {
                assert_eq!(frames.alloc(cx, refused).err(), Some(AllocError::OutOfMemory));
            }
            let nowhere = frames.alloc(cx, request(0).from(Placement::Prefer(NodeId::new(9))));
            assert_eq!(nowhere.err(), Some(AllocError::NoSuchNode));
            let mine: Vec<_> = core::iter::from_fn(|| frames.alloc(cx, Order::ZERO).ok()).collect();
            assert_eq!(mine.len(), 3);
            assert!(mine.iter().all(|block| block.mobility() == Mobility::Unmovable && !block.is_zero()));
            taken.lock().expect("whole").extend(mine);
            give(cx, 4);
            4
        });
        let block = frames.alloc_or_relieve(&mut cx, &hook, Order::ZERO).expect("the one of four that is left");
        taken.lock().expect("whole").push(block);
        assert_eq!(frames.available(&cx), 0, "the other three are kept again");
        let more = cx.freeing(|cx| {
            let first = frames.alloc(cx, Order::ZERO).expect("kept");
            // Not by who may take of it: he would for ever.
            frames.fill_reserve(cx);
            let rest = core::iter::from_fn(|| frames.alloc(cx, Order::ZERO).ok());
            core::iter::once(first).chain(rest).collect::<Vec<_>>()
        });
        assert_eq!(more.len(), 3);
        taken.lock().expect("whole").extend(more);
    });
}

/// Whoever fills the reserve looks again when he comes to it: nobody may want it any more.
#[test]
fn a_reserve_that_is_not_wanted_any_more_stays_empty() {
    exhausted(|threads, frames, taken| {
        let cx = threads.cx();
        taken.lock().expect("whole").drain(..20).for_each(|block| frames.free(&cx, block));
        let free = frames.available(&cx);
        let (mut at, mut looks) = (0, 1);
        while at < looks {
            looks = 0;
            let unwanted = |cx: &mut Cx<'_>| {
                if looks == at {
                    frames.keep_reserve(cx, 0);
                }
                looks += 1;
            };
            threads.interrupted(unwanted, |cx| frames.keep_reserve(cx, 3));
            assert!(at >= looks || frames.available(&cx) == free, "one is kept: look {at} of {looks}");
            at += 1;
        }
        assert!(at > 8, "{at} looks");
    });
}
