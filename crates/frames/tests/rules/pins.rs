//! How long a CPU keeps interrupts off, in lock rounds: a handler looks wherever one could come.

use super::request;
use super::support::{Threads, extent, with_one_arena};
use super::words::{Manager, all_free, free, take};
use hugemm_base::{CpuCx, CpuId, Pfn};
use hugemm_frames::Frozen;
use hugemm_threads::run_as;

type Step = fn(&Manager<'_>, &mut CpuCx<'_, Threads>, &mut Vec<Frozen>);

/// The most lock rounds in one pin of `body`. Each look is a round by itself.
fn most_rounds(frames: &Manager<'_>, threads: &Threads, body: impl FnOnce(&mut CpuCx<'_, Threads>)) -> u64 {
    let (mut last, mut most) = (frames.stats(&threads.cx()).lock_rounds, 0);
    let look = |cx: &mut CpuCx<'_, Threads>| {
        let now = frames.stats(cx).lock_rounds;
        most = most.max(now - last - 1);
        last = now;
    };
    threads.interrupted(look, body);
    most
}

/// Who needs what a CPU has gathered by word gives it back in many short pins, not in a long one.
#[test]
#[cfg_attr(miri, ignore = "four gibibytes of descriptors")]
fn a_table_of_words_goes_back_in_many_pins() {
    // Two rounds of words, or one of them and what is taken.
    const TAKES: u64 = 2;
    // Those, and 512 + 128 pages that the cache has beside them.
    const DRAINS: u64 = 2 + (512 + 128) / 64;
    let steps: [(&str, u64, Step); 8] = [
        ("a refill", TAKES, |frames, cx, held| held.extend(frames.alloc(cx, request(0).movable()).ok())),
        ("a block of 32 pages", TAKES, |frames, cx, held| held.extend(frames.alloc(cx, request(5)).ok())),
        ("below", TAKES, |frames, cx, held| held.extend(frames.alloc_below(cx, Pfn::new(1 << 20), request(0)).ok())),
        ("a range", TAKES, |frames, cx, _| {
            let range = frames.alloc_contig_range(cx, extent(1 << 17, 512)).expect("nobody has it");
            frames.free_extent(cx, range);
        }),
        ("a drain", DRAINS, |frames, cx, _| frames.drain(cx)),
        // SAFETY: it runs nothing else.
        ("a drain for another", DRAINS, |frames, cx, _| unsafe { frames.drain_offline(cx, CpuId(0)) }),
        ("a request", DRAINS, |frames, cx, _| frames.serve(cx)),
        ("a request found by a free", DRAINS, |frames, cx, held| free(frames, cx, held.pop())),
    ];
    for (name, bound, step) in steps {
        with_one_arena(0, 1 << 20, 2, |frames, threads| {
            let cx = threads.cx();
            let mut blocks = take(frames, &cx, 0, 1 << 16);
            let mut kept = blocks.split_off(24 << 10);
            free(frames, &cx, blocks);
            assert!(frames.stats(&cx).cached > 23 << 10, "in 1024 words: 16 rounds");
            if name.starts_with("a request") {
                run_as(1);
                // Until there is no more, and the other is asked.
                let large = take(frames, &cx, 18, usize::MAX);
                free(frames, &cx, large);
                run_as(0);
            }
            let rounds = most_rounds(frames, threads, |cx| step(frames, cx, &mut kept));
            assert!(rounds <= bound, "{name}: {rounds} lock rounds in one pin");
            free(frames, &cx, kept);
            assert_eq!(all_free(frames, &cx, 2), 1 << 20);
        });
    }
}

/// A block of an order that is only gathered is taken and freed in a pin each, without a lock round.
#[test]
fn a_pair_takes_two_pins() {
    with_one_arena(0, 1 << 14, 1, |frames, threads| {
        for order in [0, 4, 6, 8] {
            let block = frames.alloc(&threads.cx(), request(order)).expect("memory");
            frames.free(&threads.cx(), block);
            let before = frames.stats(&threads.cx()).lock_rounds;
            // The look is a round, and a visit to the node.
            let block = frames.alloc(&threads.cx(), request(order)).expect("memory");
            frames.free(&threads.cx(), block);
            let mut points = 0;
            threads.interrupted(
                |_| points += 1,
                |cx| {
                    let block = frames.alloc(cx, request(order)).expect("memory");
                    frames.free(cx, block);
                },
            );
            assert_eq!(points, 4, "order {order}: one before and one after each pin");
            let rounds = frames.stats(&threads.cx()).lock_rounds - before;
            assert_eq!(rounds, if order == 0 { 1 } else { 2 }, "order {order}");
        }
    });
}

/// Between two pins a task may come to another CPU, and has that one's words too.
#[test]
#[cfg_attr(miri, ignore = "takes minutes; a pair goes the same ways")]
fn what_another_cpu_has_gathered_is_found_by_a_task_that_comes_there() {
    // Before the first pin, and between two.
    for moved in 0..3 {
        with_one_arena(0, 1 << 16, 2, |frames, threads| {
            let cx = threads.cx();
            let wanted = extent(0, 32);
            run_as(1);
            let (low, rest): (Vec<_>, Vec<_>) =
                take(frames, &cx, 0, 4096).into_iter().partition(|block| wanted.contains(block.pfn()));
            let (high, kept): (Vec<_>, Vec<_>) =
                rest.into_iter().partition(|block| block.pfn().number() >= 64 && block.pfn().number() % 64 >= 32);
            free(frames, &cx, low);
            // On the stack, where they would count as in use, are these by now.
            free(frames, &cx, high);
            run_as(0);
            // This CPU has a round of its own, and so two pins.
            let (own, rest): (Vec<_>, Vec<_>) =
                take(frames, &cx, 0, 4096).into_iter().partition(|block| block.pfn().number() % 64 < 32);
            free(frames, &cx, own);
            let (mut looks, mut taken) = (0, None);
            let move_on = |_: &mut CpuCx<'_, Threads>| {
                if looks == moved {
                    run_as(1);
                }
                looks += 1;
            };
            threads.interrupted(move_on, |cx| taken = frames.alloc_contig_range(cx, wanted).ok());
            let Some(taken) = taken else { panic!("not found where the task moved after {moved} of {looks} looks") };
            frames.free_extent(&cx, taken);
            free(frames, &cx, kept);
            free(frames, &cx, rest);
            assert_eq!(all_free(frames, &cx, 2), 1 << 16);
        });
    }
}
