//! Pages that a CPU gives back stay in its table of words first: counted, found by everyone who needs them, in the node in the end.

use super::support::{Threads, extent, with_one_arena};
use super::{order, request};
use hugemm_base::{CpuCx, CpuId, Pfn, Zeroed};
use hugemm_frames::{AllocError, Env, Frames, Frozen, NoMigration};
use hugemm_threads::{Random, run_as};

fn shuffled<T>(mut blocks: Vec<T>) -> Vec<T> {
    let mut random = Random(1);
    (1..blocks.len()).rev().for_each(|at| blocks.swap(at, random.below(at as u64 + 1) as usize));
    blocks
}

/// The lowest `count` blocks of an order, or all there are, in random order.
pub(super) fn take(frames: &Frames<'_, impl Env>, cx: &CpuCx<'_, Threads>, log: u32, count: usize) -> Vec<Frozen> {
    shuffled(std::iter::from_fn(|| frames.alloc(cx, request(log)).ok()).take(count).collect())
}

pub(super) fn free(frames: &Frames<'_, impl Env>, cx: &CpuCx<'_, Threads>, blocks: impl IntoIterator<Item = Frozen>) {
    blocks.into_iter().for_each(|block| frames.free(cx, block));
}

/// What is free when all CPUs have given back what they have.
pub(super) fn all_free(frames: &Frames<'_, impl Env>, cx: &CpuCx<'_, Threads>, cpus: u32) -> u64 {
    for cpu in 0..cpus {
        // SAFETY: this thread is all of them.
        unsafe { frames.drain_offline(cx, CpuId::new(cpu)) };
    }
    let stats = frames.stats(cx);
    assert_eq!((stats.cached, stats.isolated, stats.deferred), (0, 0, 0));
    assert_eq!((0..).zip(stats.blocks).map(|(order, count)| count << order).sum::<u64>(), stats.free);
    stats.free
}

/// Who gives back as much as it takes needs no larger cache, though what it gives back lies too high to be taken again.
#[test]
fn a_cache_stays_small_for_who_frees_as_much_elsewhere() {
    with_one_arena(0, 1 << 14, 1, |frames, _, cx| {
        let (low, mut high): (Vec<_>, Vec<_>) =
            take(frames, &cx, 0, 4096).into_iter().partition(|page| page.pfn() < Pfn::new(512));
        assert_eq!(low.len(), 512);
        free(frames, &cx, low);
        frames.drain(&cx);
        let mut held = Vec::new();
        for _ in 0..300 {
            held.push(frames.alloc(&cx, request(0)).expect("memory"));
            free(frames, &cx, high.pop());
            let cached = frames.stats(&cx).cached;
            assert!(cached <= 16, "{cached} pages after {}", held.len());
        }
        assert!(held.iter().all(|page| page.pfn() < Pfn::new(512)), "what is free there is lower");
        free(frames, &cx, held);
        free(frames, &cx, high);
        assert_eq!(all_free(frames, &cx, 1), 1 << 14);
    });
}

/// A lock round for 64 words, not for 64 pages; meanwhile all of it is cached, and can be had.
#[test]
#[cfg_attr(miri, ignore = "takes minutes; what blocks become goes the same ways")]
fn pages_freed_at_random_go_back_by_word() {
    for log in 0..=3 {
        with_one_arena(0, 1 << 16, 1, |frames, _, cx| {
            let blocks = take(frames, &cx, log, 4096 >> log);
            frames.drain(&cx);
            let before = frames.stats(&cx);
            let mut blocks = blocks.into_iter();
            free(frames, &cx, blocks.by_ref().take(3072 >> log));
            let between = frames.stats(&cx);
            assert_eq!(between.available(), before.available() + 3072);
            if log == 0 {
                assert_eq!(between.cached, 3072, "no word is full yet");
            }
            free(frames, &cx, blocks);
            frames.drain(&cx);
            let after = frames.stats(&cx);
            assert_eq!((after.blocks[16], after.cached), (1, 0));
            let rounds = after.lock_rounds - before.lock_rounds;
            assert!(rounds < 24, "order {log}: {rounds} for 64 words");
        });
    }
}

/// No more than a sixteenth of a CPU's share stays there, and what its stack has.
#[test]
#[cfg_attr(miri, ignore = "takes minutes; what blocks become goes the same ways")]
fn a_cpu_keeps_a_sixteenth_of_its_share_by_word_at_most() {
    with_one_arena(0, 1 << 16, 1, |frames, _, cx| {
        let blocks = take(frames, &cx, 0, 8192);
        // None of the words becomes full.
        for block in blocks.into_iter().filter(|block| block.pfn().get() % 64 != 63) {
            let looked_at = block.pfn().get() % 64 == 0;
            frames.free(&cx, block);
            let cached = if looked_at { frames.stats(&cx).cached } else { 0 };
            assert!(cached <= 4096 + 512, "{cached}");
        }
    });
}

/// Before a CPU takes anything from its node it gives back what it has in its table, lest it goes to higher memory.
#[test]
#[cfg_attr(miri, ignore = "takes minutes; what blocks become goes the same ways")]
fn first_fit_finds_what_was_freed_by_word() {
    with_one_arena(0, 1 << 16, 1, |frames, _, cx| {
        let mut blocks = take(frames, &cx, 0, 4096);
        let kept = blocks.split_off(3072);
        let lowest = kept.iter().map(Frozen::pfn).min();
        free(frames, &cx, blocks);
        let low = [3, 6, 4].map(|log| frames.alloc(&cx, request(log)).map(|block| block.pfn()));
        assert!(low[0].is_ok_and(|pfn| pfn.get() < 1024), "{low:?}");
        // There is no run of 64; the next 2 MiB are whole.
        assert_eq!(low[1], Ok(Pfn::new(4096)));
        assert!(lowest.is_some_and(|pfn| pfn.get() < 64));
    });
}

/// Particular pages are found there, too, by the CPU that has them.
#[test]
#[cfg_attr(miri, ignore = "takes minutes; what blocks become goes the same ways")]
fn a_range_that_was_freed_by_word_can_be_taken() {
    with_one_arena(0, 1 << 16, 1, |frames, _, cx| {
        let (low, high): (Vec<_>, Vec<_>) = take(frames, &cx, 0, 4096).into_iter().partition(|b| b.pfn().get() < 1024);
        let (range, rest): (Vec<_>, Vec<_>) = low.into_iter().partition(|block| block.pfn().get() % 64 < 32);
        free(frames, &cx, range);
        // On the stack, where they would count as in use, are others by now.
        free(frames, &cx, high);
        let taken = (0..16).filter(|word| frames.take_range(&cx, extent(word * 64, 32)).is_ok()).count();
        assert_eq!(taken, 16);
        free(frames, &cx, rest);
    });
}

/// A CPU for which nothing is left asks the others, and finds what they had the next time.
#[test]
#[cfg_attr(miri, ignore = "takes minutes; what blocks become goes the same ways")]
fn what_a_cpu_has_by_word_is_found_when_nothing_else_is_left() {
    with_one_arena(0, 1 << 14, 2, |frames, _, cx| {
        let blocks = take(frames, &cx, 0, usize::MAX);
        assert_eq!(blocks.len(), 1 << 14);
        let (mut blocks, mut kept): (Vec<_>, Vec<_>) = blocks.into_iter().partition(|block| block.pfn().get() < 1024);
        kept.extend(blocks.split_off(400));
        free(frames, &cx, blocks);
        assert_eq!(frames.stats(&cx).cached, 400, "none of the words is full");
        run_as(1);
        assert_eq!(frames.alloc(&cx, request(0)), Err(AllocError::OutOfMemory));
        run_as(0);
        frames.serve(&cx);
        run_as(1);
        let found = take(frames, &cx, 0, usize::MAX);
        assert_eq!(found.len(), 400);
        free(frames, &cx, found);
        // Its own it finds at once.
        let again = take(frames, &cx, 0, usize::MAX);
        assert_eq!(again.len(), 400);
        free(frames, &cx, again.into_iter().chain(kept));
        run_as(0);
        assert_eq!(all_free(frames, &cx, 2), 1 << 14);
    });
}

/// A CPU that has nothing to do gives back all that it has, though nobody has asked: nobody wakes it.
#[test]
#[cfg_attr(miri, ignore = "takes minutes; what blocks become goes the same ways")]
fn an_idle_cpu_keeps_nothing() {
    with_one_arena(0, 1 << 16, 2, |frames, _, cx| {
        let mut blocks = take(frames, &cx, 0, 4096);
        let kept = blocks.split_off(2048);
        free(frames, &cx, blocks);
        let cached = frames.stats(&cx).cached;
        assert!(cached > 1024, "{cached}");
        let before = frames.stats(&cx).free;
        frames.serve(&cx);
        let after = frames.stats(&cx);
        assert!(after.cached == 0 && after.free > before + 1024, "{after:?}");
        // All that is left is another's, too, without a request.
        run_as(1);
        let found = take(frames, &cx, 0, after.free as usize);
        assert_eq!(found.len() as u64, after.free);
        free(frames, &cx, found.into_iter().chain(kept));
        run_as(0);
        assert_eq!(all_free(frames, &cx, 2), 1 << 16);
    });
}

/// A claim asks for it.
#[test]
#[cfg_attr(miri, ignore = "takes minutes; what blocks become goes the same ways")]
fn claims_find_what_a_cpu_has_by_word() {
    with_one_arena(0, 1 << 14, 2, |frames, _, mut cx| {
        let claimed = extent(1024, 512);
        let (inside, rest): (Vec<_>, Vec<_>) =
            take(frames, &cx, 0, usize::MAX).into_iter().partition(|block| claimed.contains(block.pfn()));
        // A half of each word by each CPU: no word is full in either table.
        let (mine, others): (Vec<_>, Vec<_>) = inside.into_iter().partition(|block| block.pfn().get() % 2 == 0);
        free(frames, &cx, mine);
        run_as(1);
        free(frames, &cx, others);
        assert_eq!(frames.stats(&cx).cached, 512);
        run_as(0);
        assert!(frames.alloc_contig_range(&mut cx, claimed, &mut NoMigration).is_err(), "CPU 1 has not answered");
        run_as(1);
        frames.serve(&cx);
        run_as(0);
        let taken = frames.alloc_contig_range(&mut cx, claimed, &mut NoMigration).expect("all there");
        frames.free_extent(&cx, taken);
        free(frames, &cx, rest);
        assert_eq!(all_free(frames, &cx, 2), 1 << 14);
    });
}

/// Zero pages do not mix with the others of their word.
#[test]
#[cfg_attr(miri, ignore = "takes minutes; what blocks become goes the same ways")]
fn pages_freed_as_zero_stay_known() {
    with_one_arena(0, 1 << 14, 1, |frames, _, cx| {
        // Not all of any 2 MiB, which would be dirty as a whole.
        for block in take(frames, &cx, 0, 4096).into_iter().filter(|block| block.pfn().get() % 512 != 511) {
            if block.pfn().get() % 2 == 0 {
                // SAFETY: ours; there is no memory behind the numbers.
                frames.free_zeroed(&cx, unsafe { Zeroed::assume_owned(block.into_dirty().into_extent()) });
            } else {
                frames.free(&cx, block);
            }
        }
        frames.drain(&cx);
        let zero = |_: usize| frames.alloc(&cx, request(0).prefer_zeroed()).is_ok_and(|block| block.is_zero());
        let found = (0..2048).filter(|at| zero(*at)).count();
        assert_eq!((found, zero(0)), (2048, false));
        assert!(frames.alloc(&cx, request(0)).is_ok_and(|block| block.order() == order(0) && !block.is_zero()));
    });
}
