//! What a manager of address spaces is built on, in one place.
//!
//! Seven modules need each other, on purpose: a setup names its pager; a pager that is asked for memory is given the manager, since it
//! takes pages away through it; and the manager is made of spaces, areas and objects, which point at each other and are a setup's. A trait
//! in front of the manager would cut this at the pager, with six methods and one implementor.

use crate::notifier::Notifier;
use crate::pager::Pager;
use crate::pool::Pools;
use core::cell::RefCell;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, PhysMap, TlbHw};
use hugemm_frames::Env;
use hugemm_paging::{PageFormat, RawEditLock};

/// The types that an embedder chooses once, for all its address spaces. [`DefaultSetup`](crate::DefaultSetup) has chosen all but the platform.
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
    /// Who takes pages away that nobody uses and brings them back, and is asked when memory runs out: reclaim and swap, or
    /// [`NoPager`](crate::NoPager).
    /// An out-of-memory policy or a balloon is a pager too.
    type Pager: Pager<Self>;
    /// Who follows address spaces.
    type Notifier: Notifier<Self::Platform>;
}

/// A task's context under a setup.
pub type Cx<'p, S> = CpuCx<'p, <S as Setup>::Platform>;

/// Pools lock as the frame allocator does.
pub(crate) type PoolsOf<'m, S> = Pools<'m, <<S as Setup>::Env as Env>::Lock>;

/// The context where a page table's guard and whoever visits it both need it, one after the other.
pub(crate) type Task<'t, 'p, S> = RefCell<&'t mut Cx<'p, S>>;
