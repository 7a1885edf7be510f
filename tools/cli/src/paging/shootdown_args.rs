//! Options of `hugemm bench shootdown`.

use crate::args::Common;
use clap::Args;
use hugemm_workloads::options::{cpus, runs, seconds};

/// `hugemm bench shootdown`
#[derive(Debug, Args)]
pub struct Shootdown {
    /// Pages per operation.
    #[arg(short, long, value_delimiter = ',', default_value = "1,8,33,34,512,4096,32768,262144",
          value_parser = clap::value_parser!(u64).range(1..=1 << 18))]
    pub pages: Vec<u64>,
    /// Numbers of CPUs to interrupt for real, each a thread on a CPU of its own [default: 1, 2, 4, … and all].
    #[arg(short, long, value_delimiter = ',', value_parser = cpus())]
    pub cpus: Vec<u32>,
    /// Numbers of CPUs for which interrupts are only counted.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,64", value_parser = cpus())]
    pub counted: Vec<u32>,
    /// Send no real interrupts.
    #[arg(long)]
    pub counted_only: bool,
    /// Runs of each measurement; those that take long get three.
    #[arg(short, long, default_value_t = 15, value_parser = runs())]
    pub runs: u32,
    /// Seconds that the page-at-a-time side of one measurement may take; what would take longer is left out, and said.
    #[arg(long, default_value_t = 10, value_name = "SECONDS", value_parser = seconds())]
    pub limit: u64,
    #[command(flatten)]
    pub common: Common,
}
