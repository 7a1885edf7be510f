//! Random operations on a heap, and those that fuzzing has found, against what is known to be live.

#[path = "../support/ops.rs"]
mod ops;

use hugemm_threads::Random;

#[test]
fn random_operations_agree_with_the_model() {
    let (seeds, bytes) = if cfg!(miri) { (2, 1000) } else { (60, 8000) };
    for seed in 0..seeds {
        let mut random = Random(seed);
        let mut data: Vec<u8> = (0..bytes).map(|_| random.below(256) as u8).collect();
        // In half of the runs little is freed, so that memory runs out.
        let keeps = seed % 2 == 0;
        data.chunks_exact_mut(4).filter(|op| keeps && (8..11).contains(&(op[0] % 16))).for_each(|op| op[0] = 1);
        ops::run(&data);
    }
}

#[test]
#[cfg_attr(miri, ignore = "reads files")]
fn the_fuzz_corpus_agrees_with_the_model() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/heap_ops");
    let mut seen = 0;
    for entry in std::fs::read_dir(directory).expect("the corpus is part of the repository") {
        ops::run(&std::fs::read(entry.expect("readable").path()).expect("readable"));
        seen += 1;
    }
    assert!(seen > 0, "the corpus is empty");
}
