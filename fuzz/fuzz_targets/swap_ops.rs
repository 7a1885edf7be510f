//! Operations on the compressed store, with LZ4, against the model that the property tests use.
#![no_main]

#[path = "../../crates/reclaim/tests/support/mod.rs"]
mod support;

libfuzzer_sys::fuzz_target!(|data: &[u8]| support::ops::run(data, hugemm_lz4::WordsOrLz4));
