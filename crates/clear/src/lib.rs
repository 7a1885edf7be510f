//! Zeroes huge pages by extent, at the machine's store bandwidth.
//!
//! A [`Clearer`] clears what it is given ownership of, and returns it as `Zeroed`, fenced. It decides by the size of the whole
//! request, and by measurement, between stores that go through the cache and stores that pass it:
//!
//! ```
//! use hugemm_base::{Extent, Never, Pfn, SingleCpu};
//! use hugemm_clear::{ClearPolicy, ClearRequest, Clearer, Features, Profile};
//!
//! # let layout = std::alloc::Layout::from_size_align(4 << 20, 2 << 20)?;
//! # let (ram, base) = (Extent::new(Pfn::new(0), 1024)?, unsafe { std::alloc::alloc_zeroed(layout) });
//! // SAFETY: nobody else uses `ram`; it stays mapped at `base`.
//! let (mut cx, ram) = unsafe { SingleCpu::start(ram, base) };
//! let features = Features::detect();
//! let policy = ClearPolicy::new(Profile::uncalibrated(&features, None)); // or `calibrate`
//! let clearer = Clearer::new(features, policy)?;
//! // A part of 64 GiB, so it passes the cache. `Never`: nobody asks it to stop.
//! let zeroed = clearer.clear(&mut cx, ram.into_dirty(), &ClearRequest::bulk(64 << 30), &Never).map_err(|s| s.reason)?;
//! assert_eq!(zeroed.extent().pages(), 1023);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | module | rule it owns |
//! |---|---|
//! | [`primitive`] | the clearing primitives by name |
//! | [`raw`] | their stores |
//! | [`features`], `deny.rs` | which of them this CPU has, and which are known to be slow |
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
#![deny(clippy::missing_errors_doc)]
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod calibrate;
pub mod clearer;
mod deny;
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
pub use policy::{ClearPolicy, ClearRequest};
pub use primitive::{Primitive, PrimitiveClass};
pub use profile::{Best, Crossover, Mbps, Profile, ProfileError, Warmth};
