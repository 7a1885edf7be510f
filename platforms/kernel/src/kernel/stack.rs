//! Where CPUs' stacks are, and how much of them they have used.

use super::{layout, percpu};
use crate::MAX_CPUS;
use core::ops::Range;
use core::sync::atomic::Ordering;

/// A CPU's stack; empty before it has one. As much below it is never mapped.
pub(crate) fn of(cpu: u32) -> Range<u64> {
    // Relaxed: set before the CPU starts.
    let top = percpu::of(cpu).stack_top.load(Ordering::Relaxed);
    top.saturating_sub(layout::STACK_BYTES)..top
}

/// Which CPU's stack has run over, if an address lies in the hole below one.
pub(crate) fn overflown(address: u64) -> Option<u32> {
    (0..MAX_CPUS).find(|cpu| {
        let bottom = of(*cpu).start;
        (bottom.saturating_sub(layout::STACK_BYTES)..bottom).contains(&address)
    })
}

/// Bytes of the stack that has been used most, of all CPUs that run: up to the lowest word that is not zero, as all were at first.
/// Any context; O(bytes that nobody used).
pub fn deepest() -> u64 {
    (0..percpu::count()).map(used).max().unwrap_or(0)
}

fn used(cpu: u32) -> u64 {
    let Range { start, end } = of(cpu);
    let mut words = (start..end).step_by(size_of::<u64>());
    // SAFETY: mapped words of a stack, whose CPU may be writing to them: any answer will do.
    let lowest = words.find(|at| unsafe { (*at as *const u64).read_volatile() } != 0);
    lowest.map_or(0, |at| end - at)
}
