//! Operations on a heap against the model that its tests use.
#![no_main]

#[path = "../../crates/heap/tests/support/ops.rs"]
mod ops;

libfuzzer_sys::fuzz_target!(|data: &[u8]| ops::run(data));
