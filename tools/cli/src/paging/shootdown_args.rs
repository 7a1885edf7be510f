//! Options of `hugemm bench shootdown`.

use crate::args::Common;
use clap::Args;
use hugemm_workloads::options::cpus;
use hugemm_workloads::request;

/// `hugemm bench shootdown`
#[derive(Debug, Args)]
#[command(mut_arg("limit", |arg| arg.default_value("10")))]
#[command(mut_arg("runs", |arg| arg.default_value("15")))]
pub struct Shootdown {
    #[command(flatten)]
    pub ranges: request::Shootdown,
    /// Numbers of CPUs to interrupt for real, each a thread on a CPU of its own [default: 1, 2, 4, … and all].
    #[arg(short, long, value_delimiter = ',', value_parser = cpus())]
    pub cpus: Vec<u32>,
    /// Numbers of CPUs for which interrupts are only counted.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,64", value_parser = cpus())]
    pub counted: Vec<u32>,
    /// Send no real interrupts.
    #[arg(long)]
    pub counted_only: bool,
    #[command(flatten)]
    pub common: Common,
}
