//! Options of `hugemm bench pool`.

use crate::args::{Common, cpus, runs};
use clap::{Args, ValueEnum};
use hugemm_base::PageSize;

/// Page sizes of pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HugeSize {
    /// Huge pages.
    #[value(name = "2MB", alias = "2mb")]
    Size2M,
    /// Gigantic pages.
    #[value(name = "1GB", alias = "1gb")]
    Size1G,
}

impl From<HugeSize> for PageSize {
    fn from(size: HugeSize) -> Self {
        match size {
            HugeSize::Size2M => PageSize::Size2M,
            HugeSize::Size1G => PageSize::Size1G,
        }
    }
}

/// Vmemmap optimization by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Hvo {
    /// Redundant descriptors are given back, whole blocks of them by one store.
    On,
    /// The same, but every block is divided and its entries changed in place.
    InPlace,
    /// They stay.
    Off,
}

/// Flushes by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Flush {
    /// One or two for each page, nothing swapped: the old way.
    Page,
    /// At most two for the batch.
    Batch,
}

/// `hugemm bench pool`
#[derive(Debug, Args)]
pub struct Pool {
    /// Pages [default: 2000 of 2 MiB, 8 of 1 GiB].
    #[arg(short, long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=1 << 22))]
    pub n: Vec<u64>,
    /// Page size.
    #[arg(short, long, value_enum, default_value_t = HugeSize::Size2M)]
    pub page: HugeSize,
    /// Vmemmap optimization.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "off,on,in-place")]
    pub hvo: Vec<Hvo>,
    /// How flushes are shared.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "page,batch")]
    pub flush: Vec<Flush>,
    /// CPUs of the machine whose interrupts are counted (modelled: each flush interrupts all the others).
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16", value_parser = clap::value_parser!(u32).range(1..=8192))]
    pub cpus: Vec<u32>,
    /// Threads that resize together.
    #[arg(long, value_delimiter = ',', default_value = "1", value_parser = cpus())]
    pub threads: Vec<u32>,
    /// Runs of each measurement.
    #[arg(short, long, default_value_t = 15, value_parser = runs())]
    pub runs: u32,
    #[command(flatten)]
    pub common: Common,
}
