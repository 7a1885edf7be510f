//! Options of the commands that measure page tables.

use crate::frames::args::Measured;
use clap::Args;
use hugemm_workloads::options::runs;
use hugemm_workloads::size::Size;

/// `hugemm bench map`
#[derive(Debug, Args)]
pub struct Map {
    /// Sizes of the range of addresses. Tables take a 512th of the largest.
    #[arg(short, long, value_delimiter = ',', default_value = "2MB,64MB,1GB,8GB,64GB")]
    pub size: Vec<Size>,
    /// How many bytes of the frames are contiguous [default: all]; each 4 KiB by itself is the worst that can happen.
    #[arg(short, long)]
    pub extent: Option<Size>,
    /// Runs of each measurement.
    #[arg(short, long, default_value_t = 25, value_parser = runs())]
    pub runs: u32,
    #[command(flatten)]
    pub measured: Measured,
}
