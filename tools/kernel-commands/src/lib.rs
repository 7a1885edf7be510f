//! What the reference kernel can be asked to do, and how it answers: both sides of `hugemm boot`. The commands themselves are this
//! package's program, which is the kernel's image.
//!
//! | module | rule it owns |
//! |---|---|
//! | [`report`] | results, as JSON lines to the host |
//! | [`patience`] | how long something is waited for on a slow host |
#![cfg_attr(not(test), no_std)]

pub mod patience;
pub mod report;
