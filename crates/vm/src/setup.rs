//! What a manager of address spaces is built on, in one place.
//!
//! Seven modules need each other, on purpose: a setup names its pager; a pager that is asked for memory is given the manager, since it
//! takes pages away through it; and the manager is made of spaces, areas and objects, which point at each other and are a setup's. A trait
//! in front of the manager would cut this at the pager, with six methods and one implementor.

use crate::notifier::Notifier;
use crate::pager::{NoPager, Pager};
use crate::pool::Pools;
use core::cell::RefCell;
use core::marker::PhantomData;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, PhysMap, TlbHw};
use hugemm_frames::{Carved, Env};
use hugemm_paging::{Counting, EditLock, PageFormat, RawEditLock};

/// The types that an embedder chooses once, for all its address spaces. [`DefaultSetup`] has chosen all but the platform.
pub trait Setup: Sized {
    /// The CPUs, and how frames are reached: a direct map, whose windows stay valid.
    type Platform: Cpu + PhysMap;
    /// Of the frame allocator.
    type Env: Env;
    /// Of the page tables.
    type Format: PageFormat;
    /// How to wait for area lists and page tables. Held while entries are edited and, by copy-on-write, while other CPUs
    /// are flushed: never taken with interrupts off.
    type Lock: RawEditLock + Send + Sync;
    /// TLBs.
    type Tlb: TlbHw;
    /// Who takes pages away that nobody uses and brings them back, and is asked when memory runs out: reclaim and swap, or [`NoPager`].
    /// An out-of-memory policy or a balloon is a pager too.
    type Pager: Pager<Self>;
    /// Who follows address spaces.
    type Notifier: Notifier<Self::Platform>;
}

/// The format of the architecture that this is compiled for: x86-64's where there is none.
#[cfg(target_arch = "aarch64")]
type Native = hugemm_paging::Aarch64;
#[cfg(not(target_arch = "aarch64"))]
type Native = hugemm_paging::X86_64;

/// A setup to start from, over a platform `P` whose TLBs are `T` and frames in the surroundings `E`, which are those of
/// [`Frames::carve`](hugemm_frames::Frames::carve) unless something else is said: page tables of this architecture, locks that spin, pages
/// that stay where they are, and nobody who follows. An embedder that wants one
/// of these otherwise writes the [`Setup`] down. What `T` is says the [`TlbShootdown`](hugemm_paging::TlbShootdown); without
/// hardware that walks the tables it is [`Counting`].
#[derive(Debug)]
pub struct DefaultSetup<P, T = Counting, E = Carved>(PhantomData<(P, T, E)>);

impl<P: Cpu + PhysMap, T: TlbHw, E: Env> Setup for DefaultSetup<P, T, E> {
    type Platform = P;
    type Env = E;
    type Format = Native;
    type Lock = EditLock;
    type Tlb = T;
    type Pager = NoPager;
    type Notifier = ();
}

/// A task's context under a setup.
pub type Cx<'p, S> = CpuCx<'p, <S as Setup>::Platform>;

/// Pools lock as the frame allocator does.
pub(crate) type PoolsOf<'m, S> = Pools<'m, <<S as Setup>::Env as Env>::Lock>;

/// The context where a page table's guard and whoever visits it both need it, one after the other.
pub(crate) type Task<'t, 'p, S> = RefCell<&'t mut Cx<'p, S>>;
