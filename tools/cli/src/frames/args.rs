//! Options of the commands that measure the frame allocator.

use crate::args::{Common, Warmup};
use crate::measure::Repeat;
use clap::{Args, ValueEnum};
use hugemm_base::Order;
use hugemm_workloads::options::{cpus, order, runs, seconds};
use hugemm_workloads::size::Size;

/// Options of all of them.
#[derive(Debug, Args)]
pub struct Measured {
    /// Runs of each measurement: many short ones, so that whatever else runs disturbs a few only. Sides that take long
    /// get three.
    #[arg(short, long, default_value_t = 25, value_parser = runs())]
    pub runs: u32,
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
    pub fn repeat(&self) -> Repeat {
        Repeat { runs: self.runs, warmup: self.warmup.warmup }
    }
}

/// `hugemm bench free`
#[derive(Debug, Args)]
pub struct Free {
    /// Blocks per run [default: as many as make a million pages, at least 4].
    #[arg(short, long, value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    pub n: Option<u64>,
    /// Orders of the blocks: 0 (4 KiB) to 18 (1 GiB).
    #[arg(short, long, value_delimiter = ',', default_value = "0,3,9,10,18", value_parser = order)]
    pub order: Vec<Order>,
    /// Blocks taken before they are freed [default: 64, or what half the memory holds].
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    pub held: Option<u64>,
    /// Memory to manage. Only the allocators' own data exist; the frames are numbers.
    #[arg(short, long, default_value = "16GB")]
    pub size: Size,
    #[command(flatten)]
    pub measured: Measured,
}

/// What `hugemm bench alloc` does with blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Pattern {
    /// One block, taken and freed at once.
    Pair,
    /// Many blocks taken, then freed, the last one first.
    Bulk,
    /// Many blocks taken, then freed, the first one first.
    Fifo,
    /// Many blocks taken, then freed in random order.
    Random,
}

/// `hugemm bench alloc`
#[derive(Debug, Args)]
pub struct Alloc {
    /// Numbers of CPUs [default: 1, 2, 4, … and all].
    #[arg(short, long, value_delimiter = ',', value_parser = cpus())]
    pub threads: Vec<u32>,
    /// Orders of the blocks.
    #[arg(short, long, value_delimiter = ',', default_value = "0,9", value_parser = order)]
    pub orders: Vec<Order>,
    /// What is done with them.
    #[arg(short, long, value_enum, value_delimiter = ',', default_value = "pair,bulk,random")]
    pub pattern: Vec<Pattern>,
    /// Blocks that each CPU takes before it frees them, unless pairs are measured; half of the memory at most.
    #[arg(long, default_value_t = 16_384, value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    pub held: u64,
    /// Measure counted pages and folios too, which are freed by dropping their last reference.
    #[arg(long)]
    pub counted: bool,
    /// Milliseconds of each measurement, about.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub millis: u64,
    /// Memory to manage. Only the allocators' own data exist; the frames are numbers.
    #[arg(short, long, default_value = "16GB")]
    pub size: Size,
    #[command(flatten)]
    pub measured: Measured,
}

/// `hugemm bench churn`
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

/// `hugemm bench stress`
#[derive(Debug, Args)]
pub struct Stress {
    /// Seconds.
    #[arg(long, default_value_t = 10, value_parser = seconds())]
    pub seconds: u64,
    /// CPUs [default: all].
    #[arg(short, long, value_parser = cpus())]
    pub threads: Option<u32>,
    /// Memory that they share; small, so that they meet. Only the allocator's own data exist.
    #[arg(short, long, default_value = "64MB")]
    pub size: Size,
    /// Seed of the requests.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    #[command(flatten)]
    pub common: Common,
}
