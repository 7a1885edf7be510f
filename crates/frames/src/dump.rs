//! What is free, as text for people.

use crate::frames::{Env, Frames};
use crate::stats::{ORDERS, SMALL};
use core::fmt;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, NodeId};

impl<E: Env> Frames<'_, E> {
    /// Writes a table of what is free: for each node a line with a column per order, as `/proc/buddyinfo` has it; how many of those blocks
    /// lie in 2 MiB of one [mobility](crate::Mobility), as `/proc/pagetypeinfo` has it; and the pages that are free in other places.
    ///
    /// ```text
    /// order                    0      1      2 …
    /// node   0                 3      1      0 …
    /// node   0, unmovable      1      1      0 …
    /// node   0, movable        2      0      0 …
    /// node   0, pages: 517 free, 63 cached, 0 deferred, 0 isolated, 0 refused
    /// ```
    ///
    /// Costs and context as [`node_stats`](Frames::node_stats) of each node. Nothing is locked while text is written.
    ///
    /// # Errors
    ///
    /// What `out` says.
    pub fn dump<P: Cpu>(&self, cx: &CpuCx<'_, P>, out: &mut dyn fmt::Write) -> fmt::Result {
        let orders: [u64; ORDERS] = core::array::from_fn(|order| order as u64);
        row(out, format_args!("order              "), &orders)?;
        for node in 0..self.nodes() {
            let stats = self.node_stats(cx, NodeId::new(node));
            let unmovable: [u64; SMALL] =
                core::array::from_fn(|order| stats.blocks[order].saturating_sub(stats.movable[order]));
            row(out, format_args!("node {node:3}           "), &stats.blocks)?;
            row(out, format_args!("node {node:3}, unmovable"), &unmovable)?;
            row(out, format_args!("node {node:3}, movable  "), &stats.movable)?;
            writeln!(
                out,
                "node {node:3}, pages: {} free, {} cached, {} deferred, {} isolated, {} refused",
                stats.free, stats.cached, stats.deferred, stats.isolated, stats.refused
            )?;
        }
        Ok(())
    }
}

fn row(out: &mut dyn fmt::Write, name: fmt::Arguments<'_>, columns: &[u64]) -> fmt::Result {
    write!(out, "{name}")?;
    columns.iter().try_for_each(|column| write!(out, " {column:>6}"))?;
    writeln!(out)
}
