//! Random operations on a heap of little memory, and those that fuzzing has found, beside the model: see `ops`.

#[path = "../support/ops.rs"]
pub(super) mod ops;

use hugemm_threads::{Choices, Random};

#[test]
fn random_operations_agree_with_the_model() {
    let (seeds, steps) = if cfg!(miri) { (2, 60) } else { (60, 500) };
    let mut all = [0; 3];
    for seed in 0..seeds {
        let seen = ops::play(Choices::Random(Random(seed)), steps);
        all.iter_mut().zip(seen).for_each(|(all, seen)| *all += seen);
    }
    assert!(cfg!(miri) || all.iter().all(|seen| *seen > 0), "{all:?}");
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
