//! Options of the commands that measure the frame allocator.

use crate::measure::Repeat;
use crate::options::{Common, Warmup};
use clap::Args;
use hugemm_workloads::options::{cpus, named, seconds};
use hugemm_workloads::request;
use hugemm_workloads::size::Size;

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
#[command(mut_arg("order", |arg| arg.default_value("0,3,9,10,18")))]
#[command(mut_arg("runs", |arg| arg.default_value("25")))]
pub struct Free {
    #[command(flatten)]
    pub blocks: request::Free,
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
#[command(mut_arg("millis", |arg| arg.default_value("2")))]
#[command(mut_arg("runs", |arg| arg.default_value("25")))]
pub struct Alloc {
    #[command(flatten)]
    pub pairs: request::Alloc,
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
