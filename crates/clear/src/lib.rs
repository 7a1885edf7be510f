//! Zeroes huge pages by extent, at the machine's store bandwidth.
//!
//! | module | rule it owns |
//! |---|---|
//! | [`primitive`] | the clearing primitives by name |
//! | [`raw`] | their stores |
//! | [`features`], [`deny`] | which of them this CPU has, and which are known to be slow |
//! | [`profile`] | what is known of the machine |
//! | [`mod@calibrate`] | measuring it |
//! | [`policy`] | which primitive, in which units |
//! | [`folio`] | in which order |
//! | [`clearer`] | the loop over units |
//! | [`parallel`] | one extent on several CPUs |
//!
//! The crate needs only [`hugemm_base`] and, of the platform, [`Cpu`](hugemm_base::platform::Cpu) and
//! [`PhysMap`](hugemm_base::PhysMap). Nothing here allocates.
#![cfg_attr(not(test), no_std)]
#![warn(missing_debug_implementations)]
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod calibrate;
pub mod clearer;
pub mod deny;
pub mod features;
pub mod folio;
pub mod parallel;
pub mod policy;
pub mod primitive;
pub mod profile;
pub mod raw;

pub use calibrate::{CalibrateError, calibrate};
pub use clearer::{Clearer, Content, Observer, StopReason, Stopped, Unit};
pub use features::Features;
pub use parallel::{Lane, Outcome, ParallelClear};
pub use policy::{Policy, Request};
pub use primitive::{Class, Primitive};
pub use profile::{Best, Crossover, Mbps, Profile, ProfileError, Warmth};
