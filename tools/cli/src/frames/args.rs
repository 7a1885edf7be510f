//! Options of the commands that measure the frame allocator.

use crate::measure::Repeat;
use crate::options::{Common, Warmup};
use clap::Args;
use hugemm_base::Order;
use hugemm_workloads::options::{cpus, list, named, order, runs, seconds};
use hugemm_workloads::size::Size;
use hugemm_workloads::words::List;

/// Options of all of them. Runs are many short ones, so that whatever else runs disturbs a few only; sides that take long get
/// three.
#[derive(Debug, Args)]
pub struct Measured {
    #[command(flatten)]
    pub warmup: Warmup,
    /// Measure hugemm alone, not the other libraries beside it.
    #[arg(long)]
    pub no_peers: bool,
    #[command(flatten)]
    pub common: Common,
}

impl Measured {
    /// How often each side is run.
    pub fn repeat(&self, runs: u32) -> Repeat {
        Repeat { of_long: 3, ..Repeat::new(runs, self.warmup.warmup) }
    }
}

#[derive(Debug, Args)]
pub struct Free {
    /// Blocks per run [default: as many as make a million pages, at least 4].
    #[arg(short, long, value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    pub n: Option<u64>,
    /// Orders of the blocks: 0 (4 KiB) to 18 (1 GiB).
    #[arg(short, long, default_value = "0,3,9,10,18", value_parser = list(order))]
    pub order: List<Order>,
    /// Runs of each measurement.
    #[arg(short, long, default_value_t = 25, value_parser = runs())]
    pub runs: u32,
    /// Blocks taken before they are freed [default: 64, or what half the memory holds].
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    pub held: Option<u64>,
    /// Memory to manage. Only the allocators' own data exist; the frames are numbers.
    #[arg(short, long, default_value = "16GB")]
    pub size: Size,
    #[command(flatten)]
    pub measured: Measured,
}

hugemm_workloads::named! {
    /// What `hugemm bench alloc` does with blocks.
    Pattern {
        /// One block, taken and freed at once.
        Pair = "pair",
        /// Many blocks taken, then freed, the last one first.
        Bulk = "bulk",
        /// Many blocks taken, then freed in random order.
        Random = "random",
    }
}

#[derive(Debug, Args)]
pub struct Alloc {
    /// Orders of the blocks: 0 (4 KiB) to 18 (1 GiB).
    #[arg(short, long, default_value = "0,9", value_parser = list(order))]
    pub orders: List<Order>,
    /// Milliseconds of each measurement, about.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub millis: u64,
    /// Runs of each measurement.
    #[arg(short, long, default_value_t = 25, value_parser = runs())]
    pub runs: u32,
    /// Numbers of CPUs [default: 1, 2, 4, … and all].
    #[arg(short, long, value_delimiter = ',', value_parser = cpus())]
    pub threads: Vec<u32>,
    /// What is done with them.
    #[arg(short, long, value_delimiter = ',', default_value = "pair,bulk,random", value_parser = named::<Pattern>())]
    pub pattern: Vec<Pattern>,
    /// Blocks that each CPU takes before it frees them, unless pairs are measured; half of the memory at most.
    #[arg(long, default_value_t = 16_384, value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    pub held: u64,
    /// Measure counted pages and folios too, which are freed by dropping their last reference.
    #[arg(long)]
    pub counted: bool,
    /// Memory to manage. Only the allocators' own data exist; the frames are numbers.
    #[arg(short, long, default_value = "16GB")]
    pub size: Size,
    #[command(flatten)]
    pub measured: Measured,
}

#[derive(Debug, Args)]
pub struct Churn {
    /// Seconds that each allocator is used for.
    #[arg(long, default_value_t = 2, value_parser = seconds())]
    pub seconds: u64,
    /// Percent of the memory in use.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=95))]
    pub fill: u64,
    /// Memory to manage. Only the allocators' own data exist; the frames are numbers.
    #[arg(short, long, default_value = "8GB")]
    pub size: Size,
    /// Seed of the requests.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Measure hugemm alone, not the other libraries beside it.
    #[arg(long)]
    pub no_peers: bool,
    #[command(flatten)]
    pub common: Common,
}
