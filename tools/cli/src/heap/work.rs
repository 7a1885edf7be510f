//! What the heaps are asked to do, the same for each.

use crate::heap::sides::AnyHeap;
use anyhow::{Result, bail};
use hugemm_base::CpuCx;
use hugemm_base::random::Random;
use hugemm_host::cpu::Host;
use std::alloc::Layout;
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::Instant;

hugemm_workloads::named! {
    /// What each CPU does.
    Work {
        /// 256 pieces of 64 bytes taken, then freed, the last one first.
        Fixed = "fixed",
        /// Of 4096 pieces, 16 bytes to 32 KiB and most of them small, a random one is replaced.
        Mixed = "mixed",
        /// 256 pieces are taken and handed to the next CPU, which frees them.
        HandOver = "hand over",
        /// A tree of 20 000 nodes of two sizes grows, and shrinks to a tenth in random order.
        Tree = "tree",
        /// Strings that grow byte by byte, doubling, to lengths up to 4 KiB, and are dropped: what programs do that allocate much.
        Strings = "strings",
    }
}

/// Pieces that are taken or handed over at once.
const BATCH: usize = 256;
/// Pieces that are live in mixed work.
const LIVE: usize = 4096;
/// Nodes of a tree.
const NODES: usize = 20_000;

/// A piece: where, and how large. An address, because it changes CPUs.
type Piece = (usize, Layout);

fn layout(size: u64) -> Layout {
    Layout::from_size_align(size as usize, 8).unwrap_or(Layout::new::<u64>())
}

/// Takes a piece, and writes to it as its user would.
#[inline]
fn take<S: AnyHeap>(side: &S, cx: &CpuCx<'_, Host<'_>>, layout: Layout) -> Result<Piece> {
    let at = side.alloc(cx, layout);
    if at.is_null() {
        bail!("no memory was left; use a larger --size");
    }
    // SAFETY: just allocated, of 8 bytes at least.
    unsafe { at.cast::<u64>().write(7) };
    Ok((at.expose_provenance(), layout))
}

#[inline]
fn give<S: AnyHeap>(side: &S, cx: &CpuCx<'_, Host<'_>>, (at, layout): Piece) {
    // SAFETY: taken by `take`, given once.
    unsafe { side.free(cx, std::ptr::with_exposed_provenance_mut(at), layout) };
}

/// A size as programs ask for: most are small.
fn mixed(random: &mut Random) -> Layout {
    let most = [64, 64, 128, 128, 256, 512, 2048, 32 << 10][random.below(8) as usize];
    layout(16 + random.below(most - 15))
}

pub struct Shared {
    start: Barrier,
    end: Barrier,
    /// Batches for each CPU.
    boxes: Vec<Mutex<Vec<Vec<Piece>>>>,
}

impl Shared {
    pub fn new(cpus: u32) -> Self {
        let both = || Barrier::new(cpus as usize);
        Shared { start: both(), end: both(), boxes: (0..cpus).map(|_| Mutex::default()).collect() }
    }

    fn lock(&self, cpu: usize) -> std::sync::MutexGuard<'_, Vec<Vec<Piece>>> {
        self.boxes[cpu % self.boxes.len()].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Does `rounds` of the work on the calling CPU; ns per piece taken and freed. What the heap has put off is done before the
/// clock stops.
pub fn run<S: AnyHeap>(
    side: &S,
    cx: &CpuCx<'_, Host<'_>>,
    work: Work,
    rounds: u64,
    cpu: u32,
    shared: &Shared,
) -> Result<f64> {
    let mut random = Random(u64::from(cpu) + 1);
    let mut held: Vec<Piece> = Vec::with_capacity(NODES);
    shared.start.wait();
    let start = Instant::now();
    let done = match work {
        Work::Fixed => fixed(side, cx, rounds, &mut held),
        Work::Mixed => replace(side, cx, rounds, &mut held, &mut random),
        Work::HandOver => hand_over(side, cx, rounds, cpu as usize, shared),
        Work::Tree => tree(side, cx, rounds, &mut held, &mut random),
        Work::Strings => strings(side, cx, rounds, &mut random),
    };
    // Nobody waits for one that has failed.
    shared.end.wait();
    let batches = std::mem::take(&mut *shared.lock(cpu as usize));
    for batch in batches {
        batch.into_iter().for_each(|piece| give(side, cx, piece));
    }
    side.settle(cx);
    Ok(start.elapsed().as_nanos() as f64 / done? as f64)
}

fn fixed<S: AnyHeap>(side: &S, cx: &CpuCx<'_, Host<'_>>, rounds: u64, held: &mut Vec<Piece>) -> Result<u64> {
    for _ in 0..rounds {
        for _ in 0..BATCH {
            held.push(take(side, cx, layout(64))?);
        }
        held.drain(..).rev().for_each(|piece| give(side, cx, piece));
    }
    Ok(rounds * BATCH as u64)
}

fn replace<S: AnyHeap>(
    side: &S,
    cx: &CpuCx<'_, Host<'_>>,
    rounds: u64,
    held: &mut Vec<Piece>,
    random: &mut Random,
) -> Result<u64> {
    for _ in 0..LIVE {
        held.push(take(side, cx, mixed(random))?);
    }
    for _ in 0..rounds * BATCH as u64 {
        let place = &mut held[random.below(LIVE as u64) as usize];
        give(side, cx, *place);
        *place = take(side, cx, mixed(random))?;
    }
    held.drain(..).for_each(|piece| give(side, cx, piece));
    Ok(rounds * BATCH as u64 + LIVE as u64)
}

fn hand_over<S: AnyHeap>(side: &S, cx: &CpuCx<'_, Host<'_>>, rounds: u64, cpu: usize, shared: &Shared) -> Result<u64> {
    let mut spare: Vec<Vec<Piece>> = Vec::new();
    for _ in 0..rounds {
        let mut batch = spare.pop().unwrap_or_else(|| Vec::with_capacity(BATCH));
        for _ in 0..BATCH {
            batch.push(take(side, cx, layout(128))?);
        }
        shared.lock(cpu + 1).push(batch);
        let got = shared.lock(cpu).pop();
        if let Some(mut batch) = got {
            batch.drain(..).for_each(|piece| give(side, cx, piece));
            spare.push(batch);
        }
    }
    Ok(rounds * BATCH as u64)
}

fn tree<S: AnyHeap>(
    side: &S,
    cx: &CpuCx<'_, Host<'_>>,
    rounds: u64,
    held: &mut Vec<Piece>,
    random: &mut Random,
) -> Result<u64> {
    let mut taken = 0;
    for _ in 0..rounds {
        while held.len() < NODES {
            held.push(take(side, cx, layout(if random.below(4) == 0 { 240 } else { 56 }))?);
            taken += 1;
        }
        while held.len() > NODES / 10 {
            let any = random.below(held.len() as u64) as usize;
            give(side, cx, held.swap_remove(any));
        }
    }
    held.drain(..).for_each(|piece| give(side, cx, piece));
    Ok(taken)
}

fn strings<S: AnyHeap>(side: &S, cx: &CpuCx<'_, Host<'_>>, rounds: u64, random: &mut Random) -> Result<u64> {
    let mut sized = 0;
    for _ in 0..rounds * 64 {
        let (mut piece, length) = (take(side, cx, layout(8))?, 1 + random.below(4096));
        sized += 1;
        while (piece.1.size() as u64) < length {
            let twice = layout(piece.1.size() as u64 * 2);
            let at = std::ptr::with_exposed_provenance_mut(piece.0);
            // SAFETY: the piece is ours, and has the layout that it was last given.
            let at = unsafe { side.resize(cx, at, piece.1, twice.size()) };
            if at.is_null() {
                bail!("no memory was left; use a larger --size");
            }
            (piece, sized) = ((at.expose_provenance(), twice), sized + 1);
        }
        give(side, cx, piece);
    }
    Ok(sized)
}

/// How many blocks of 64 KiB can be had, which are given back: with mixed pieces live, and when they are freed.
pub fn left<S: AnyHeap>(side: &S, cx: &CpuCx<'_, Host<'_>>) -> Result<[u64; 2]> {
    let (mut random, mut live) = (Random(99), Vec::new());
    for _ in 0..4 * LIVE {
        live.push(take(side, cx, mixed(&mut random))?);
    }
    for _ in 0..16 * LIVE {
        let any = random.below(live.len() as u64) as usize;
        give(side, cx, live.swap_remove(any));
        live.push(take(side, cx, mixed(&mut random))?);
    }
    // Three of four go, anywhere.
    for _ in 0..3 * LIVE {
        let any = random.below(live.len() as u64) as usize;
        give(side, cx, live.swap_remove(any));
    }
    let count = || {
        side.settle(cx);
        let blocks: Vec<Piece> = std::iter::from_fn(|| take(side, cx, layout(64 << 10)).ok()).collect();
        let count = blocks.len() as u64;
        blocks.into_iter().for_each(|piece| give(side, cx, piece));
        count
    };
    let some = count();
    live.into_iter().for_each(|piece| give(side, cx, piece));
    Ok([some, count()])
}
