//! How much of their stacks CPUs have used.

use super::{layout, percpu};

/// Bytes of the stack that has been used most, of all CPUs that run: up to the lowest word that is not zero, as all were at first.
/// Any context; O(bytes that nobody used).
pub fn deepest() -> u64 {
    (0..percpu::count()).map(used).max().unwrap_or(0)
}

fn used(cpu: u32) -> u64 {
    let mut words = (layout::stack_bottom(cpu)..layout::stack_top(cpu)).step_by(size_of::<u64>());
    // SAFETY: mapped words of a stack, whose CPU may be writing to them: any answer will do.
    let lowest = words.find(|at| unsafe { (*at as *const u64).read_volatile() } != 0);
    lowest.map_or(0, |at| layout::stack_top(cpu) - at)
}
