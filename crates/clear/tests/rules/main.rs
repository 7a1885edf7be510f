//! What clearing promises, by subject.
#![cfg(not(loom))]

#[cfg(not(miri))]
mod calibration;
#[cfg(not(miri))]
mod checks;
mod engine;
mod fences;
mod order;
#[cfg(not(miri))]
mod parallel;
mod primitives;
mod support;
mod threads;
