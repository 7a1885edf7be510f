//! What looks at the machine's pool of huge pages, or changes it: a program of its own, since commands that others run may do so too.

mod budget;
mod fleet;
mod interrupt;
mod lease;
mod lease_signals;
mod leased;
mod leased_programs;
mod managed;
mod pins;
#[path = "../support/mod.rs"]
mod support;
mod templates;
