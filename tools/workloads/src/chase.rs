//! A pointer chase: the latency that a cache-resident program sees.
//!
//! Every line of the working set holds the offset of the next one, in one random cycle, so each load waits for the one
//! before and no prefetcher helps.

use hugemm_base::random::Random;
use hugemm_base::{Cancel, Clock};

/// Bytes of a cache line.
const LINE: usize = 64;

/// A working set with a cycle through all of its lines.
#[derive(Debug)]
pub struct Chase<'m> {
    /// One word per line is used; the rest pads it.
    lines: &'m mut [[u64; LINE / 8]],
}

impl<'m> Chase<'m> {
    /// Lays the cycle through `lines`, in an order that `seed` decides (Sattolo's algorithm). O(lines).
    pub fn new(lines: &'m mut [[u64; LINE / 8]], seed: u64) -> Self {
        for (i, line) in lines.iter_mut().enumerate() {
            line[0] = i as u64;
        }
        let mut random = Random(seed);
        for i in (1..lines.len()).rev() {
            let j = random.below(i as u64) as usize;
            let (low, high) = lines.split_at_mut(i);
            core::mem::swap(&mut low[j][0], &mut high[0][0]);
        }
        Chase { lines }
    }

    /// Follows the cycle for about `nanos` ns, or until cancelled; returns the steps made and the time they took. O(1)
    /// overhead per 4096 steps.
    pub fn run(&self, clock: &impl Clock, nanos: u64, cancel: &impl Cancel) -> (u64, u64) {
        let (mut steps, mut at, start) = (0, 0_u64, clock.now_ns());
        if self.lines.is_empty() {
            return (0, 0);
        }
        loop {
            for _ in 0..4096 {
                at = self.lines.get(at as usize).map_or(0, |line| line[0]);
            }
            at = core::hint::black_box(at);
            steps += 4096;
            let spent = clock.now_ns().saturating_sub(start);
            if spent >= nanos || cancel.requested() {
                return (steps, spent);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cycle_visits_every_line_once() {
        for n in [1, 2, 3, 64, 1000] {
            let mut lines = vec![[0; LINE / 8]; n];
            let chase = Chase::new(&mut lines, 42);
            let (mut at, mut seen) = (0, vec![false; n]);
            for _ in 0..n {
                assert!(!std::mem::replace(&mut seen[at], true));
                at = chase.lines[at][0] as usize;
            }
            assert_eq!(at, 0);
        }
    }
}
