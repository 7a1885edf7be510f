//! One test per rule, by subject; and random operations, on a small machine and on the model MMU.

mod exhaustion;
mod extremes;
mod hardware;
mod optimizer;
mod pool;
mod scale;
mod support;
mod threads;
mod trust;
