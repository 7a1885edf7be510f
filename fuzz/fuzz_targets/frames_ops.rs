//! Operations on a manager of page frames against the model that the property tests use.
#![no_main]

#[path = "../../crates/frames/tests/support/mod.rs"]
mod support;

libfuzzer_sys::fuzz_target!(|data: &[u8]| support::ops::run(data));
