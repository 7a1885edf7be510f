//! The upward call on exhaustion.

use crate::cpu::CpuCx;
use crate::platform::{Cpu, NodeId};
use crate::size::Order;

/// What an allocator is short of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortfall {
    /// Smallest block that would help.
    pub order: Order,
    /// How many base pages are missing in all.
    pub pages: u64,
    /// The only node that helps, if one was insisted on.
    pub node: Option<NodeId>,
    /// Whether the caller may sleep. If not, only what needs no I/O and no sleeping lock may be done.
    pub may_sleep: bool,
}

/// Gives memory back when an allocator runs out: implemented by reclaim, called by allocators, so that the lower crate
/// does not know the upper one.
///
/// Called without any of the allocator's locks held, unpinned, and with the caller's context in hand by `&mut`: it may
/// pass reschedule points where [`Shortfall::may_sleep`] says so, and no debt of this CPU can be open across it.
pub trait Pressure<P: Cpu> {
    /// Tries to make memory free and returns how many base pages became so; 0 means that asking again is pointless.
    fn relieve(&self, cx: &mut CpuCx<'_, P>, need: Shortfall) -> u64;
}

/// Nobody to ask: exhaustion is final.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoPressure;

impl<P: Cpu> Pressure<P> for NoPressure {
    fn relieve(&self, _cx: &mut CpuCx<'_, P>, _need: Shortfall) -> u64 {
        0
    }
}
