//! Reclaim from address spaces: ageing over the reverse map, swapping in and out, forks, shared objects, unmaps, on the
//! model MMU; and what happens when a flush is forgotten. All of it at once is in `platforms/schedule`.
#![cfg(all(target_os = "linux", not(miri), not(loom)))]

mod ageing;
mod bystander;
mod files;
mod given;
mod given_up;
mod negative;
mod passes;
mod races;
mod rig;
mod rules;
mod scale;
mod shortage;
mod staying;
#[path = "../support/mod.rs"]
mod support;
mod watched;
