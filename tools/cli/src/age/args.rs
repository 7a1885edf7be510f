//! Options of `hugemm bench age`.

use crate::args::Common;
use clap::Args;
use hugemm_workloads::request;

/// `hugemm bench age`
#[derive(Debug, Args)]
#[command(mut_arg("young", |arg| arg.default_value("flush,nosync,noflush,batch")))]
#[command(mut_arg("lru", |arg| arg.default_value("classic,generations")))]
pub struct Age {
    #[command(flatten)]
    pub processes: request::Age,
    /// CPUs that have processes, each a thread on a CPU of its own [default: as many as there are, at most one per process]. The worker that
    /// reclaims has one more if there is one, and otherwise its turns between two windows of the first.
    #[arg(short, long, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub cpus: Option<u32>,
    /// Check content and nothing else: the processes also fork, and unmap and map anew, devices have pages pinned, free frames
    /// are poisoned, and no figures are printed.
    #[arg(long)]
    pub check: bool,
    #[command(flatten)]
    pub common: Common,
}
