//! Options of `hugemm bench vm-create`.

use crate::args::{Calibration, Common, Kind};
use clap::Args;
use hugemm_base::PageSize;
use hugemm_workloads::options::{cpus, list, named, runs};
use hugemm_workloads::request::{Clearing, PagesFrom};
use hugemm_workloads::size::Size;
use hugemm_workloads::vm_create::CreateMethod;
use hugemm_workloads::words::List;

/// `hugemm bench vm-create`
#[derive(Debug, Args)]
pub struct VmCreate {
    /// Memory of the virtual machine [default: a quarter of what is available, at most 8 GiB, or 512 MiB by
    /// pages of 4KB, each of which is a fault].
    #[arg(short, long)]
    pub size: Option<Size>,
    /// Page size.
    #[arg(short, long, ignore_case = true, default_value = "2MB", value_parser = named::<PageSize>())]
    pub page: PageSize,
    /// How it is asked for.
    #[arg(long, default_value = "demand,prefault,pin", value_parser = list(named::<CreateMethod>()))]
    pub how: List<CreateMethod>,
    /// Numbers of CPUs that fill it [default: 1 and all].
    #[arg(short, long, value_delimiter = ',', value_parser = cpus())]
    pub workers: Vec<u32>,
    /// How hugemm clears.
    #[arg(long, default_value = "page,extent,bulk", value_parser = list(named::<Clearing>()))]
    pub clear: List<Clearing>,
    /// Where hugemm's huge pages come from.
    #[arg(long, default_value = "pool", value_parser = named::<PagesFrom>())]
    pub from: PagesFrom,
    /// Runs of each, after an untimed one.
    #[arg(short, long, default_value_t = 5, value_parser = runs())]
    pub runs: u32,
    /// Kind of huge pages that the memory is made of.
    #[arg(long, value_enum, default_value_t = Kind::Auto)]
    pub kind: Kind,
    #[command(flatten)]
    pub calibration: Calibration,
    #[command(flatten)]
    pub common: Common,
}
