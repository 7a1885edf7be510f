//! What the vocabulary promises, by subject.
#![cfg(not(loom))]

mod cpu;
mod extremes;
mod platform;
