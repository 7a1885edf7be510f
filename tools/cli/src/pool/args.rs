//! Options of `hugemm bench pool`.

use crate::args::Common;
use clap::Args;
use hugemm_workloads::options::cpus;
use hugemm_workloads::request;

/// `hugemm bench pool`
#[derive(Debug, Args)]
#[command(mut_arg("hvo", |arg| arg.default_value("off,on,in-place")))]
#[command(mut_arg("runs", |arg| arg.default_value("15")))]
pub struct Pool {
    #[command(flatten)]
    pub resizes: request::Pool,
    /// CPUs of the machine whose interrupts are counted (modelled: each flush interrupts all the others).
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16", value_parser = clap::value_parser!(u32).range(1..=8192))]
    pub cpus: Vec<u32>,
    /// Threads that resize together.
    #[arg(long, value_delimiter = ',', default_value = "1", value_parser = cpus())]
    pub threads: Vec<u32>,
    #[command(flatten)]
    pub common: Common,
}
