//! Storing is done in turns, each in one pin; a block is asked for between two of them.

use crate::support::{
    CPUS, Content, Machine, Runs, assert_nothing_lost, machine, run_as, take_back, with_frames, with_frames_for,
};
use hugemm_base::inject::NoFaults;
use hugemm_base::{CpuCx, NodeId, Order};
use hugemm_frames::{AllocRequest, Frozen, ROUNDS_PER_PIN};
use hugemm_reclaim::{Compressed, Compressor, Corrupt, PageBytes, Swap, SwapSlot};
use std::cell::{Cell, RefCell};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, Ordering};

type Cx<'p> = CpuCx<'p, Machine>;

/// What memory gives back before there is a block goes in pins of its own.
#[test]
#[cfg_attr(miri, ignore = "gibibytes of descriptors")]
fn a_pin_holds_few_lock_rounds_though_a_block_is_needed() {
    let machine = machine(1 << 20, u64::MAX);
    run_as(0);
    with_frames_for(1, &machine, NoFaults, |frames| {
        let (cx, page) = (machine.cx(), AllocRequest::order(Order::ZERO));
        let store: Compressed<'_, '_, _, Runs> = Compressed::new(frames, &cx, Runs, 1, 1 << 20).expect("memory");
        let pages: Vec<Frozen> = (0..1 << 17).map(|_| frames.alloc(&cx, page).expect("memory")).collect();
        let (scattered, mut kept): (Vec<_>, Vec<_>) = pages.into_iter().partition(|page| page.pfn().get() % 5 == 0);
        scattered.into_iter().for_each(|page| frames.free(&cx, page));
        let cached = frames.stats(&cx).cached;
        assert!(cached > 20_000, "{cached} on their way out");
        let mut victim = frames.alloc(&cx, page).expect("memory");
        // A piece of four frames in a row, of which the CPU has none at hand.
        Content { random: 600, seed: 1 }.write(machine.page(&mut victim));
        let (mut worst, mut last) = (0, None);
        let look = |cx: &mut Cx<'_>| {
            // Its own look is one.
            let now = frames.node_stats(cx, NodeId::new(0)).lock_rounds;
            worst = worst.max(now - last.replace(now).unwrap_or(now - 1) - 1);
        };
        let evicted = machine.interrupted(look, |cx| store.evict(cx, victim).expect("memory"));
        assert!((1..=ROUNDS_PER_PIN + 1).contains(&worst), "{worst} lock rounds in one pin");
        store.free(&cx, evicted.slot).expect("held");
        kept.extend(evicted.freed);
        kept.into_iter().for_each(|page| frames.free(&cx, page));
        store.close(&cx).expect("empty");
        frames.drain(&cx);
        assert_nothing_lost(&machine, frames);
    });
}

/// Compresses as [`Runs`], and counts; every so manieth time to eight times as much.
struct Counting<'a> {
    calls: &'a AtomicU64,
    fickle: u64,
}

impl Compressor for Counting<'_> {
    type Scratch = <Runs as Compressor>::Scratch;

    const WORST: usize = Runs::WORST;

    fn init<'a>(&self, place: &'a mut MaybeUninit<Self::Scratch>) -> &'a mut Self::Scratch {
        Runs.init(place)
    }

    fn compress(&self, scratch: &mut Self::Scratch, from: &PageBytes, into: &mut [u8]) -> Option<usize> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let len = Runs.compress(scratch, from, into)?;
        if !call.is_multiple_of(self.fickle) || len >= 256 {
            return Some(len);
        }
        let small = into[..len].to_vec();
        let parts = small.as_chunks::<2>().0.iter().flat_map(|[count, byte]| {
            let part = move |at: u8| (u8::min(32, count - at), *byte);
            (0..*count).step_by(32).map(part)
        });
        let mut end = 0;
        for (place, (count, byte)) in into.as_chunks_mut::<2>().0.iter_mut().zip(parts) {
            *place = [count, byte];
            end += 2;
        }
        Some(end)
    }

    fn decompress(&self, from: &[u8], into: &mut PageBytes) -> Result<(), Corrupt> {
        Runs.decompress(from, into)
    }
}

/// A page is compressed once, also where it needs a block, unless its CPU stores another one between its turns, which has that CPU's working
/// memory then. Whatever comes in between, and whether or not a page becomes as large again: each comes back as it was, and nothing is lost.
#[test]
fn a_page_that_is_overtaken_is_compressed_again() {
    for (often, fickle) in [(0, u64::MAX), (1, u64::MAX), (3, u64::MAX), (1, 3), (2, 2), (3, 1)] {
        let machine = machine(512, u64::MAX);
        run_as(0);
        with_frames(&machine, NoFaults, |frames| {
            let cx = machine.cx();
            let calls = &AtomicU64::new(1);
            let store =
                Compressed::<_, _>::new(frames, &cx, Counting { calls, fickle }, CPUS, 512).expect("memory for work");
            let contents: Vec<Content> =
                (0..80).map(|seed| Content { random: 1 + seed as u16 * 20 % 700, seed }).collect();
            let page = |content: &Content| {
                let mut page = frames.alloc(&machine.cx(), AllocRequest::order(Order::ZERO)).expect("memory");
                content.write(machine.page(&mut page));
                page
            };
            let other = Content { random: 90, seed: 200 };
            let (copied, slots, points) = (page(&other), RefCell::new(Vec::new()), Cell::new(0_u64));
            let overtake = |cx: &mut Cx<'_>| {
                points.set(points.get() + 1);
                if often != 0 && points.get().is_multiple_of(often) && slots.borrow().len() < 300 {
                    slots.borrow_mut().push((store.store(cx, &copied, 0).expect("room"), other));
                }
            };
            let mut kept: Vec<(SwapSlot, Content)> = Vec::new();
            machine.interrupted(overtake, |cx| {
                for content in &contents {
                    let page = page(content);
                    kept.push((store.store(cx, &page, 0).expect("room"), *content));
                    frames.free(cx, page);
                }
            });
            kept.extend(slots.into_inner());
            let calls = calls.load(Ordering::Relaxed) - 1;
            assert_eq!(calls > kept.len() as u64, often != 0, "{calls} for {} pages", kept.len());
            let mut into = page(&other);
            kept.into_iter().for_each(|kept| take_back(&machine, &store, kept, &mut into));
            [into, copied].into_iter().for_each(|page| frames.free(&cx, page));
            store.close(&cx).expect("empty");
            assert_nothing_lost(&machine, frames);
        });
    }
}
