//! Memory of virtual machines that is filled before it is asked for, on stock Linux, for stock programs.
//!
//! Linux zeroes a huge page when it is first touched, while the program waits. A daemon of this crate has files of huge pages
//! filled beforehand and lends each to one owner, once. The zeroing is moved, not saved.
//!
//! | module | rule it owns |
//! |---|---|
//! | [`memory_file`] | a file of huge pages; that it has been lent is written on itself |
//! | [`kept`] | memory that outlives its program and the daemon; whose it is, written beside it |
//! | [`template`] | a snapshot's file whose bytes memory is filled with |
//! | `reader` | reading it, from a disk that may not answer |
//! | [`stock`] | which file serves a request, what to fill next |
//! | [`throttle`] | how fast filling may go |
//! | [`filler`], [`background`] | the thread that fills, and how it gives way |
//! | [`policy`] | who may have how much |
//! | [`daemon`], [`status`] | taking, lending, keeping, ending; how things stand |
//! | `left` | whether anybody still has what was lent |
//! | [`listener`] | the socket's place, one daemon's alone |
//! | [`wire`], [`server`], [`client`] | what is said through it |
//! | [`service`], [`metrics`], `log` | what a service manager, a scraper and a journal are told |
//! | `own_file` | which file of a program a leased one may take the place of: one that nobody else can reach |
//! | `lending` | what takes the place of a program's files: leased already, or asked for |
//! | `orphan` | a process that is nobody's child |
//! | [`seccomp`], [`supervisor`] | a stock program gets the leased file in the place of its own |
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_debug_implementations)]

pub mod background;
pub mod client;
pub mod daemon;
pub mod filler;
pub mod kept;
mod left;
mod lending;
pub mod listener;
mod log;
pub mod memory_file;
pub mod metrics;
mod orphan;
mod own_file;
pub mod policy;
mod reader;
pub mod seccomp;
pub mod server;
pub mod service;
pub mod status;
pub mod stock;
pub mod supervisor;
pub mod template;
#[cfg(test)]
mod tests;
pub mod throttle;
pub mod wire;
