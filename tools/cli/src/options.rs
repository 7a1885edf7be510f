//! Options that several commands have.

use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Options of every command that has results.
#[derive(Debug, Args)]
pub struct Common {
    /// Print JSON instead of tables: to standard output, or to FILE (`--json=FILE`) beside the tables.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "-")]
    pub json: Option<PathBuf>,
}

impl Common {
    /// Whether standard output belongs to the JSON document alone.
    pub fn json_only(&self) -> bool {
        self.json.as_ref().is_some_and(|path| path.as_os_str() == "-")
    }
}

/// Runs before the measured ones.
#[derive(Clone, Copy, Debug, Args)]
pub struct Warmup {
    /// Runs before the measured ones, untimed: they touch memory that may be new to the machine below a virtual one.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub warmup: u32,
}

/// What the memory is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// hugetlb pages if the pool has them or may be raised, else transparent huge pages.
    Auto,
    /// Transparent huge pages.
    Thp,
    /// hugetlb pages; the pool is raised if need be and put back afterwards.
    Hugetlb,
}
