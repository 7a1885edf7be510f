//! Interprets bytes as operations on a compressed store and compares every answer with a simple model. Shared by the
//! property tests, the corpus replay, the fuzz target and the adapters' tests.

use super::{CPUS, Content, Machine, assert_nothing_lost, evict, machine, run_as, take_back, with_frames};
use hugemm_base::Order;
use hugemm_base::inject::FaultPlan;
use hugemm_frames::{AllocRequest, Frozen};
use hugemm_reclaim::{Compressed, Compressor, StoreError, Swap, SwapSlot};

struct Bytes<'a>(std::slice::Iter<'a, u8>);

impl Bytes<'_> {
    fn next(&mut self) -> Option<u64> {
        self.0.next().map(|byte| u64::from(*byte))
    }

    fn pair(&mut self) -> u64 {
        self.next().unwrap_or(0) << 8 | self.next().unwrap_or(0)
    }
}

/// Runs the operations in `data`; panics if an answer differs from the model's.
pub fn run<C: Compressor>(data: &[u8], compressor: C) {
    let mut bytes = Bytes(data.iter());
    let shape = bytes.next().unwrap_or(0);
    // 768 KiB; windows of one page in every other run; from one working area to one per CPU.
    let machine = machine(192, if shape & 1 == 0 { 1 } else { u64::MAX });
    run_as(0);
    // The working memory must be there; after that, every so manieth allocation fails.
    let period = [0, 2, 3, 7][(shape >> 1 & 3) as usize];
    let first = if period == 0 { u64::MAX } else { u64::from(CPUS) + 1 };
    with_frames(&machine, FaultPlan::periodic(first, period), |frames| {
        let cx = machine.cx();
        let limit = 60 + (shape >> 3) * 8;
        let store: Compressed<'_, '_, _, C> =
            Compressed::new(frames, &cx, compressor, CPUS, limit).expect("memory for work");
        let working = Swap::stats(&store, &cx).frames;
        let mut limit = limit;
        // Slot, content, and which page of the model it is a handle on.
        let mut held: Vec<(SwapSlot, Content, u64)> = Vec::new();
        let mut hoard: Vec<Frozen> = Vec::new();
        let (mut next_id, mut stores, mut loads) = (0, 0, 0);
        // A page that is always there to load into.
        let mut window = super::page(&machine, frames);
        while let Some(op) = bytes.next() {
            let pick = bytes.pair() as usize;
            match op % 10 {
                0..=4 => {
                    let Ok(mut page) = frames.alloc(&cx, AllocRequest::order(Order::ZERO)) else { continue };
                    let random = match op / 10 % 4 {
                        0 => 0,
                        1 => pick as u16 % 4097,
                        2 => pick as u16 % 300,
                        _ => 4096,
                    };
                    let content = Content { random, seed: (pick as u32).wrapping_mul(0x0101_0101) };
                    content.write(machine.page(&mut page));
                    let stored = if op % 10 < 3 {
                        let stored = store.store(&cx, &page, 0);
                        content.assert_in(machine.page(&mut page));
                        frames.free(&cx, page);
                        stored
                    } else {
                        evict(&machine, frames, &store, (page, content))
                    };
                    match stored {
                        Ok(slot) => {
                            assert!(slot.bits() < 1 << SwapSlot::BITS);
                            held.push((slot, content, next_id));
                            next_id += 1;
                            stores += 1;
                        }
                        Err(StoreError::Full) => {
                            assert!(random != 0, "a filled page takes no memory");
                            assert!(Swap::stats(&store, &cx).frames + 4 > limit, "full too early");
                        }
                        Err(StoreError::NoMemory | StoreError::Incompressible) => assert!(random != 0),
                        Err(error) => panic!("{error}"),
                    }
                }
                5 if !held.is_empty() => {
                    let at = pick % held.len();
                    let (slot, content, _) = &held[at];
                    Content { random: 4096, seed: op as u32 }.write(machine.page(&mut window));
                    store.load(&cx, slot, &mut window, 0).expect("stored");
                    assert!(!window.is_zero());
                    content.assert_in(machine.page(&mut window));
                    loads += 1;
                }
                6 if !held.is_empty() => {
                    let at = pick % held.len();
                    let (slot, content, id) = &held[at];
                    let again = store.share(&cx, slot).expect("few holders");
                    let (content, id) = (*content, *id);
                    held.push((again, content, id));
                }
                7 if !held.is_empty() => {
                    let (slot, ..) = held.swap_remove(pick % held.len());
                    store.free(&cx, slot).expect("held");
                }
                8 => {
                    // Memory comes and goes.
                    if op / 10 % 2 == 0 {
                        while hoard.len() < pick % 192 {
                            let Ok(block) = frames.alloc(&cx, AllocRequest::order(Order::ZERO)) else { break };
                            hoard.push(block);
                        }
                    } else {
                        hoard.drain(..).for_each(|block| frames.free(&cx, block));
                    }
                }
                9 => {
                    limit = working + pick as u64 % 100;
                    Swap::<Machine>::set_limit(&store, limit);
                }
                _ => {}
            }
            let stats = Swap::stats(&store, &cx);
            let mut ids: Vec<u64> =
                held.iter().filter(|(_, content, _)| content.random != 0).map(|held| held.2).collect();
            ids.sort_unstable();
            ids.dedup();
            let filled = held.iter().filter(|(_, content, _)| content.random == 0).count();
            assert_eq!(stats.pages, (ids.len() + filled) as u64);
            assert_eq!((stats.stores, stats.loads, stats.corrupt, stats.limit), (stores, loads, 0, limit));
            let usage: Vec<_> = store.usage(&cx).collect();
            assert!(usage.iter().all(|class| class.used <= class.pieces));
            assert!(usage.iter().all(|class| class.data_bytes <= class.used * u64::from(class.piece_bytes)));
        }
        // Everything is still there, once and for all holders.
        held.into_iter().for_each(|(slot, content, _)| take_back(&machine, &store, (slot, content), &mut window));
        let stats = Swap::stats(&store, &cx);
        assert_eq!((stats.pages, stats.frames), (0, working));
        hoard.drain(..).for_each(|block| frames.free(&cx, block));
        frames.free(&cx, window);
        store.close(&cx).expect("empty");
        assert_nothing_lost(&machine, frames);
    });
}
