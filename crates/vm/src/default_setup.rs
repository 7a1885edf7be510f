//! A setup to start from. On x86-64 and arm64 only: elsewhere an embedder's [`Setup`] names a format of its own.

use crate::pager::NoPager;
use crate::setup::Setup;
use core::marker::PhantomData;
use hugemm_base::platform::Cpu;
use hugemm_base::{PhysMap, TlbHw};
use hugemm_frames::{Carved, Env};
use hugemm_paging::{Counting, EditLock};

/// The format of the architecture that this is compiled for.
#[cfg(target_arch = "aarch64")]
type Native = hugemm_paging::Aarch64;
#[cfg(not(target_arch = "aarch64"))]
type Native = hugemm_paging::X86_64;

/// Platforms of whose architecture [`Native`] is.
#[diagnostic::on_unimplemented(
    message = "hugemm has page tables for x86-64 and arm64 only: `DefaultSetup` is not for this architecture",
    label = "implement `hugemm_vm::Setup` for a type of your own, whose `Format` is a `PageFormat` of this architecture"
)]
pub trait HasTables {}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
impl<P> HasTables for P {}

/// A setup to start from, over a platform `P` whose TLBs are `T` and frames in the surroundings `E`, which are those of
/// [`Frames::carve`](hugemm_frames::Frames::carve) unless something else is said: page tables of this architecture, locks that spin, pages
/// that stay where they are, and nobody who follows. An embedder that wants one
/// of these otherwise writes the [`Setup`] down. What `T` is says the [`TlbShootdown`](hugemm_paging::TlbShootdown); without
/// hardware that walks the tables it is [`Counting`].
#[derive(Debug)]
pub struct DefaultSetup<P, T = Counting, E = Carved>(PhantomData<(P, T, E)>);

impl<P: Cpu + PhysMap + HasTables, T: TlbHw, E: Env> Setup for DefaultSetup<P, T, E> {
    type Platform = P;
    type Env = E;
    type Format = Native;
    type Lock = EditLock;
    type Tlb = T;
    type Pager = NoPager;
    type Notifier = ();
}
