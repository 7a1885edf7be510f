//! Options of `hugemm bench vm-create`.

use crate::args::{Calibration, Common, Kind, Page, cpus, runs};
use crate::size::Size;
use clap::{Args, ValueEnum};
use hugemm_workloads::vm_create;

/// How the memory is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum How {
    /// A fault for each page, as a guest causes them: software faults on hugemm's side.
    Demand,
    /// One request for all of it.
    Prefault,
    /// One request for all of it, and every page pinned, as for a device.
    Pin,
}

impl From<How> for vm_create::CreateMethod {
    fn from(how: How) -> Self {
        match how {
            How::Demand => vm_create::CreateMethod::Demand,
            How::Prefault => vm_create::CreateMethod::Prefault,
            How::Pin => vm_create::CreateMethod::Pin,
        }
    }
}

/// How hugemm clears: values of the same policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Clearing {
    /// 4 KiB at a time, cached, with a reschedule point each: the old way.
    Page,
    /// Whole extents, cached.
    Extent,
    /// What the calibrated policy makes of the size of the whole request.
    Bulk,
}

/// Where hugemm's huge pages come from; pages of 4 KiB come from free memory always.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Source {
    /// A pool that has been filled before, and has promised all of them.
    Pool,
    /// Free memory.
    Frames,
}

/// `hugemm bench vm-create`
#[derive(Debug, Args)]
pub struct VmCreate {
    /// Memory of the virtual machine [default: a quarter of what is available, at most 8 GiB, or 512 MiB by
    /// pages of 4KB, each of which is a fault].
    #[arg(short, long)]
    pub size: Option<Size>,
    /// Page size.
    #[arg(short, long, value_enum, default_value_t = Page::Size2M)]
    pub page: Page,
    /// How it is asked for.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "demand,prefault,pin")]
    pub how: Vec<How>,
    /// Numbers of CPUs that fill it [default: 1 and all].
    #[arg(short, long, value_delimiter = ',', value_parser = cpus())]
    pub workers: Vec<u32>,
    /// How hugemm clears.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "page,extent,bulk")]
    pub clear: Vec<Clearing>,
    /// Where hugemm's huge pages come from.
    #[arg(long, value_enum, default_value_t = Source::Pool)]
    pub from: Source,
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
