//! Options of `hugemm bench age`.

use crate::args::Common;
use crate::size::Size;
use clap::{Args, ValueEnum};
use hugemm_base::PageSize;
use hugemm_reclaim::{Ageing, LruPolicy};

/// How accessed bits are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Young {
    /// Page by page, with a flush for each mapping that was young: what Linux does on arm64, and on x86-64 for 2 MiB.
    Flush,
    /// The same without waiting, as arm64 can; counted here, not executed.
    Nosync,
    /// Page by page, no flush: what Linux does on x86-64 for 4 KiB.
    Noflush,
    /// By runs, no flush.
    Batch,
}

impl From<Young> for Ageing {
    fn from(young: Young) -> Self {
        match young {
            Young::Flush => Ageing::Flush,
            Young::Nosync => Ageing::NoSync,
            Young::Noflush => Ageing::NoFlush,
            Young::Batch => Ageing::Batch,
        }
    }
}

/// Which pages are old.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Lists {
    /// An active and an inactive list.
    Classic,
    /// Up to four generations.
    Generations,
}

impl From<Lists> for LruPolicy {
    fn from(lists: Lists) -> Self {
        match lists {
            Lists::Classic => LruPolicy::TwoList,
            Lists::Generations => LruPolicy::Generations,
        }
    }
}

/// Sizes of pages that can be swapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mapped {
    /// 4 KiB.
    #[value(name = "4KB")]
    Size4K,
    /// 2 MiB.
    #[value(name = "2MB")]
    Size2M,
}

impl From<Mapped> for PageSize {
    fn from(mapped: Mapped) -> Self {
        match mapped {
            Mapped::Size4K => PageSize::Size4K,
            Mapped::Size2M => PageSize::Size2M,
        }
    }
}

/// `hugemm bench age`
#[derive(Debug, Args)]
pub struct Age {
    /// Address spaces that share the region.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=14))]
    pub procs: u32,
    /// The region that they share [default: one and a half times the memory].
    #[arg(long)]
    pub shared: Option<Size>,
    /// Memory that there is, compressed pages included [default: two thirds of the shared region, or 128 MiB].
    #[arg(long)]
    pub memory: Option<Size>,
    /// Memory that compressed pages may take [default: half of it].
    #[arg(long)]
    pub swap: Option<Size>,
    /// Seconds for each line of the table.
    #[arg(long, default_value_t = 2.0)]
    pub seconds: f64,
    /// How accessed bits are read.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "flush,nosync,noflush,batch")]
    pub young: Vec<Young>,
    /// Which pages are old.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "classic,generations")]
    pub lru: Vec<Lists>,
    /// Sizes of the pages.
    #[arg(short, long, value_enum, value_delimiter = ',', default_value = "4KB,2MB")]
    pub page: Vec<Mapped>,
    /// CPUs, each a thread on a CPU of its own [default: as many as there are, at most one per process].
    #[arg(short, long, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub cpus: Option<u32>,
    /// Check content and nothing else: the processes also fork, and unmap and map anew, devices have pages pinned, free frames
    /// are poisoned, and no figures are printed.
    #[arg(long)]
    pub check: bool,
    #[command(flatten)]
    pub common: Common,
}
