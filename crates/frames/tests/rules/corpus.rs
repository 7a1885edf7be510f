//! Replays the fuzz corpus as an ordinary test.

#[test]
#[cfg_attr(miri, ignore = "reads files; the property test runs the same under Miri")]
fn the_fuzz_corpus_agrees_with_the_model() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/frames_ops");
    let mut seen = 0;
    for entry in std::fs::read_dir(directory).expect("the corpus is part of the repository") {
        let path = entry.expect("readable").path();
        crate::support::ops::run(&std::fs::read(&path).expect("readable"));
        seen += 1;
    }
    assert!(seen > 0, "the corpus is empty");
}
