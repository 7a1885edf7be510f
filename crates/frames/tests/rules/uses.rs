//! Counts by use.

use super::request;
use super::slabs::Bytes;
use super::slabs::alloc_piece;
use super::support::{Threads, with_one_arena};
use hugemm_base::{Cpu, CpuCx, FrameUse, FramesInUse};
use hugemm_frames::Slab;

const MINE: FrameUse = FrameUse::own(0).expect("one of eight");
const YOURS: FrameUse = FrameUse::own(7).expect("one of eight");

/// The sum over the two CPUs that tests here play.
fn in_use(cx: &CpuCx<'_, Threads>) -> FramesInUse {
    let each = [1, 0].map(|cpu| {
        hugemm_threads::run_as(cpu);
        cx.platform().counters().snapshot().frames
    });
    each[0].plus(each[1])
}

#[test]
fn what_one_cpu_takes_another_gives_back() {
    assert_eq!(FrameUse::own(8), None);
    with_one_arena(0, 1024, 2, |frames, threads, _| {
        hugemm_threads::run_as(0);
        let cx = threads.cx();
        let before = in_use(&cx);
        let (a, b) = (frames.alloc_for(&cx, MINE, request(3)), frames.alloc_for(&cx, YOURS, request(0)));
        let untold = frames.alloc(&cx, request(1)).expect("memory");
        assert!(frames.alloc_for(&cx, MINE, request(18)).is_err());
        let now = in_use(&cx).since(before);
        assert_eq!((now.of(MINE), now.of(YOURS), now.all()), (8, 1, 9));
        hugemm_threads::run_as(1);
        frames.free_for(&cx, MINE, a.expect("memory"));
        frames.free_for(&cx, YOURS, b.expect("memory"));
        assert_eq!((in_use(&cx).since(before).of(MINE), in_use(&cx).since(before).of(YOURS)), (0, 0));
        frames.free(&cx, untold);
        assert_eq!(in_use(&cx), before);
    });
}

/// Both uses are wrong then, and say so; the frames are free all the same.
#[test]
fn a_wrong_name_shows() {
    with_one_arena(0, 1024, 2, |frames, threads, _| {
        hugemm_threads::run_as(0);
        let cx = threads.cx();
        let (before, free) = (in_use(&cx), frames.available(&cx));
        let block = frames.alloc_for(&cx, MINE, request(2)).expect("memory");
        frames.free_for(&cx, YOURS, block);
        let now = in_use(&cx).since(before);
        assert_eq!((now.of(MINE), now.of(YOURS), now.all()), (4, -4, 0));
        assert_eq!(frames.available(&cx), free);
    });
}

#[test]
fn slabs_say_what_they_have() {
    with_one_arena(0, 64, 2, |frames, threads, _| {
        hugemm_threads::run_as(0);
        let (cx, map) = (threads.cx(), Bytes::new(64));
        let slab: Slab = Slab::of::<[u64; 100]>().expect("fits");
        let objects: Vec<_> = (0..11).map(|_| alloc_piece(&slab, frames, &cx, &map).expect("memory")).collect();
        assert_eq!(in_use(&cx).of(FrameUse::SLABS), slab.stats(&cx).frames as i64);
        // SAFETY: each came from this slab, with these frames and this map, and is not used any more.
        objects.into_iter().for_each(|object| unsafe { slab.free(frames, &cx, &map, object) });
        // SAFETY: always used with these.
        unsafe { slab.trim(frames, &cx, &map) };
        assert_eq!(in_use(&cx).of(FrameUse::SLABS), 0);
    });
}
