//! What an allocator is short of, and who is asked to free memory.
//!
//! Whatever may sleep asks: it holds its task's context exclusively, so nothing is pinned, no lock that is taken pinned is held, and no
//! store fence is owed. The very type keeps a hook from being called under a pin:
//!
//! ```compile_fail,E0500
//! # use hugemm_base::{platform::Cpu, CpuCx, Order, Relief, Shortfall};
//! fn rule<P: Cpu>(cx: &mut CpuCx<'_, P>, hook: &impl Relief<P>) {
//!     cx.pinned(|_| cx.relieved_by(hook, Shortfall::block(Order::ZERO))); // error: `cx` is borrowed while the task is pinned
//! }
//! ```
//!
//! and there is no other way to it that keeps the promises:
//!
//! ```
//! # use hugemm_base::{platform::Cpu, CpuCx, Order, Relief, Shortfall};
//! fn rule<P: Cpu>(cx: &mut CpuCx<'_, P>, hook: &impl Relief<P>) -> u64 {
//!     cx.pinned(|_| ());
//!     cx.relieved_by(hook, Shortfall::block(Order::ZERO))
//! }
//! ```

use crate::cpu::CpuCx;
use crate::platform::NodeId;
use crate::size::Order;

/// What an allocator is short of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shortfall {
    /// Smallest block that would help.
    pub order: Order,
    /// How many base pages are missing in all.
    pub pages: u64,
    /// The only node that helps, if one was insisted on.
    pub node: Option<NodeId>,
}

impl Shortfall {
    /// A block of `order`, of any node.
    pub const fn block(order: Order) -> Self {
        Shortfall { order, pages: order.pages(), node: None }
    }

    /// So many single frames, of any node.
    pub const fn frames(pages: u64) -> Self {
        Shortfall { order: Order::ZERO, pages, node: None }
    }

    /// The same of one node only, if one is named.
    #[must_use]
    pub const fn only(self, node: Option<NodeId>) -> Self {
        Shortfall { node, ..self }
    }
}

/// Who frees memory when it is short: reclaim, a balloon, whoever decides which process has to go. One for all that allocates.
///
/// ```
/// use hugemm_base::{Cpu, CpuCx, Relief, Shortfall};
///
/// struct Kernel; // and what it can do without
///
/// impl<P: Cpu> Relief<P> for Kernel {
///     fn relieve(&self, cx: &mut CpuCx<'_, P>, need: Shortfall) -> u64 {
///         // Shrink caches, reclaim, kill somebody: until `need.pages` are free.
///         cx.cond_resched();
///         # let _ = need;
///         0 // nothing could be done
///     }
/// }
/// ```
pub trait Relief<P> {
    /// Frees memory; how many frames became free. 0: asking again is of no use. Called by a task that may sleep and holds no lock,
    /// through [`CpuCx::relieved_by`] only: so it is not asked again by what it calls with this context, and what allocates with it
    /// may have the manager's reserve.
    fn relieve(&self, cx: &mut CpuCx<'_, P>, need: Shortfall) -> u64;
}

/// Errors of operations that may be tried again when there is more memory.
pub trait Shortage {
    /// Whether memory was what was missing. Nothing has changed then.
    fn is_shortage(&self) -> bool;
}
