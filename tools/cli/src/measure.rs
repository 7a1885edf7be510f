//! How often something is measured, and in which order.

#[derive(Clone, Copy, Debug)]
pub struct Repeat {
    pub runs: u32,
    /// Untimed runs before them.
    pub warmup: u32,
    /// Runs of what takes long, at most.
    pub of_long: u32,
}

impl Repeat {
    pub fn new(runs: u32, warmup: u32) -> Self {
        Repeat { runs, warmup, of_long: u32::MAX }
    }

    /// All runs, for a loop or a progress bar.
    pub fn all(self) -> usize {
        self.runs as usize + self.warmup as usize
    }

    pub fn is_measured(self, run: usize) -> bool {
        run >= self.warmup as usize
    }

    /// Each side in each run, and whether that counts: in an order that changes from run to run, so that drift hits all alike.
    pub fn turns(self, sides: usize) -> impl Iterator<Item = (usize, bool)> {
        let run = move |run| (0..sides).map(move |side| ((side + run) % sides, self.is_measured(run)));
        (0..self.all()).flat_map(run)
    }
}
