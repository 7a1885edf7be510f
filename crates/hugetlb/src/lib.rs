//! t
#![cfg_attr(not(any(test, loom)), no_std)]
#![allow(missing_docs, dead_code)]
pub mod counts;
mod group;
mod mapping;
mod tail; mod phases; mod pool; mod resize; mod ops;
mod vmemmap;
pub use group::*; pub use pool::*; pub use resize::*; pub use mapping::*; pub use tail::Tail; pub use vmemmap::*;
