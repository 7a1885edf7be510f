//! The compressed store, numbers at the end of their types, and which types may go from thread to thread.
#![cfg(not(loom))]

mod compressed;
mod extremes;
#[path = "../support/mod.rs"]
mod support;
mod threads;
mod turns;
