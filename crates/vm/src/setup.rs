//! What a manager of address spaces is built on, in one place.

use crate::notifier::Notifier;
use crate::pager::Pager;
use crate::pool::HugePool;
use core::cell::RefCell;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, PhysMap, Pressure, TlbHw};
use hugemm_frames::Env;
use hugemm_paging::{PageFormat, RawEditLock};

/// The types that an embedder chooses once, for all its address spaces.
pub trait Setup: Sized {
    /// The CPUs, and how frames are reached: a direct map, whose windows stay valid.
    type Platform: Cpu + PhysMap;
    /// Of the frame allocator.
    type Env: Env;
    /// Of the page tables.
    type Format: PageFormat;
    /// How to wait for area lists and page tables. Held while entries are edited and, by copy-on-write, while other CPUs
    /// are flushed: never taken with interrupts off.
    type Lock: RawEditLock;
    /// TLBs.
    type Tlb: TlbHw;
    /// Who takes pages away that nobody uses, and brings them back: reclaim and swap, or [`NoPager`](crate::NoPager).
    type Pager: Pager<Self>;
    /// Who else gives memory back, asked when the pager has none.
    type Pressure: Pressure<Self::Platform>;
    /// Where areas of huge pages may come from.
    type Pool: HugePool<Self::Platform>;
    /// Who follows address spaces.
    type Notifier: Notifier<Self::Platform>;
}

/// A task's context under a setup.
pub type Cx<'p, S> = CpuCx<'p, <S as Setup>::Platform>;

/// The context where a page table's guard and whoever visits it both need it, one after the other.
pub(crate) type Task<'t, 'p, S> = RefCell<&'t mut Cx<'p, S>>;
