//! LZ4 in the compressed store: the operation interpreter, also on the fuzz corpus, the round trip, and damaged input.
#![cfg(not(loom))]

#[path = "../../../crates/reclaim/tests/support/mod.rs"]
mod support;

use hugemm_base::Order;
use hugemm_base::inject::NoFaults;
use hugemm_frames::AllocRequest;
use hugemm_lz4::WordsOrLz4;
use hugemm_reclaim::{Compressed, Compressor, Swap};
use proptest::prelude::*;
use std::mem::MaybeUninit;
use std::time::Instant;
use support::{CPUS, Content, Rng, machine, run_as, with_frames};

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..if cfg!(miri) { ProptestConfig::with_cases(2) } else { ProptestConfig::default() } })]

    #[test]
    fn random_operations_agree_with_the_model(data in proptest::collection::vec(any::<u8>(), 0..if cfg!(miri) { 60 } else { 1000 })) {
        support::ops::run(&data, WordsOrLz4);
    }

    #[test]
    fn pages_come_back(random in 0..4097_u16, seed: u32) {
        let mut page = [0; 4096];
        Content { random, seed }.write(&mut page);
        let mut place = MaybeUninit::uninit();
        let scratch = WordsOrLz4.init(&mut place);
        let mut into = [0; WordsOrLz4::WORST];
        match WordsOrLz4.compress(scratch, &page, &mut into) {
            Some(len) => {
                prop_assert!(len < 4096);
                let mut back = [1; 4096];
                WordsOrLz4.decompress(&into[..len], &mut back).expect("what was compressed");
                prop_assert!(back == page);
                // Cut short, it is an error: a block that ends early does not fill a page.
                prop_assert!(WordsOrLz4.decompress(&into[..len - 1], &mut back).is_err());
            }
            None => prop_assert!(random > 3900, "{random} random bytes were not made smaller"),
        }
    }

    #[test]
    fn whatever_is_decompressed_stays_in_its_bounds(data in proptest::collection::vec(any::<u8>(), 0..5000)) {
        let mut guarded = [[0xee; 4096]; 3];
        let _ = WordsOrLz4.decompress(&data, &mut guarded[1]);
        prop_assert!(guarded[0] == [0xee; 4096] && guarded[2] == [0xee; 4096]);
    }
}

/// A changed byte anywhere is an error or a wrong page.
#[test]
fn damaged_blocks_do_not_panic() {
    let mut page = [0; 4096];
    Content { random: 300, seed: 5 }.write(&mut page);
    let (mut place, mut into, mut back) = (MaybeUninit::uninit(), [0; WordsOrLz4::WORST], [0; 4096]);
    let scratch = WordsOrLz4.init(&mut place);
    let len = WordsOrLz4.compress(scratch, &page, &mut into).expect("compresses");
    let mut errors = 0;
    for at in 0..len {
        for flip in [1, 0x10, 0x80, 0xff] {
            into[at] ^= flip;
            errors += u32::from(WordsOrLz4.decompress(&into[..len], &mut back).is_err());
            into[at] ^= flip;
        }
    }
    assert!(errors > 0);
}

/// Prints what a page costs; asserts only that the pages come back.
/// `cargo test --release -p hugemm-lz4 --test store -- --nocapture throughput`
#[test]
#[cfg_attr(miri, ignore = "a measurement")]
fn throughput() {
    let machine = machine(4096, u64::MAX);
    run_as(0);
    with_frames(&machine, NoFaults, |frames| {
        let cx = machine.cx();
        let store: Compressed<'_, '_, _, WordsOrLz4> =
            Compressed::new(frames, &cx, WordsOrLz4, CPUS, 4096).expect("memory for work");
        let alloc = || frames.alloc(&cx, AllocRequest::order(Order::ZERO)).expect("memory");
        println!("  random bytes   stored bytes   store MB/s   load MB/s   frames per 1000 pages");
        for random in [0_u16, 100, 400, 1000, 1500, 2000, 2500, 4096] {
            let mut rng = Rng(1);
            let mut pages: Vec<_> = (0..1000)
                .map(|_| {
                    let mut page = alloc();
                    Content { random, seed: rng.below(1 << 32) as u32 }.write(machine.page(&mut page));
                    page
                })
                .collect();
            let working = Swap::stats(&store, &cx).frames;
            let start = Instant::now();
            let slots: Vec<_> = pages.iter().map(|page| store.store(&cx, page, 0).expect("room")).collect();
            let stored = start.elapsed().as_secs_f64();
            let (mut used, mut data) = (0, 0);
            for class in store.usage(&cx) {
                (used, data) = (used + class.used, data + class.data_bytes);
            }
            let taken = Swap::stats(&store, &cx).frames - working;
            let mut into = pages.pop().expect("a thousand");
            let start = Instant::now();
            for slot in &slots {
                store.load(&cx, slot, &mut into, 0).expect("stored");
            }
            let loaded = start.elapsed().as_secs_f64();
            let rate = |seconds: f64| 4096.0 * 1000.0 / 1e6 / seconds;
            let bytes = u64::checked_div(data, used).unwrap_or(taken * 4096 / 1000);
            println!("  {random:12}   {bytes:12}   {:10.0}   {:9.0}   {taken:21}", rate(stored), rate(loaded));
            slots.into_iter().for_each(|slot| store.free(&cx, slot).expect("held"));
            pages.into_iter().chain([into]).for_each(|page| frames.free(&cx, page));
        }
        store.close(&cx).expect("empty");
    });
}

#[test]
#[cfg_attr(miri, ignore = "reads files; the property test runs the same under Miri")]
fn the_fuzz_corpus_agrees_with_the_model() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/swap_ops");
    let mut seen = 0;
    for entry in std::fs::read_dir(directory).expect("the corpus is part of the repository") {
        let path = entry.expect("readable").path();
        support::ops::run(&std::fs::read(&path).expect("readable"), hugemm_lz4::WordsOrLz4);
        seen += 1;
    }
    assert!(seen > 0, "the corpus is empty");
}
