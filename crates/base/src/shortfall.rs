//! What an allocator is short of, as whoever gives memory back is told.

use crate::platform::NodeId;
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
