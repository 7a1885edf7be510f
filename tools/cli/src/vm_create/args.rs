//! Options of `hugemm bench vm-create`.

use crate::args::{Calibration, Common, Kind};
use clap::Args;
use hugemm_workloads::request;

/// `hugemm bench vm-create`
#[derive(Debug, Args)]
#[command(mut_arg("runs", |arg| arg.default_value("5")))]
pub struct VmCreate {
    #[command(flatten)]
    pub creations: request::VmCreate,
    /// Kind of huge pages that the memory is made of.
    #[arg(long, value_enum, default_value_t = Kind::Auto)]
    pub kind: Kind,
    #[command(flatten)]
    pub calibration: Calibration,
    #[command(flatten)]
    pub common: Common,
}
