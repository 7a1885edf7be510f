//! Options of `hugemm bench headline`.

use crate::args::Common;
use clap::Args;

/// How the goals are chosen and what else there is.
pub fn help() -> String {
    let names: Vec<_> = crate::headline::goals().collect();
    format!("The goals:\n  {}\n\ndocs/goals.md says what each is.", names.join("\n  "))
}

/// `hugemm bench headline`
#[derive(Debug, Args)]
pub struct Headline {
    /// Only goals whose names begin like this: `clear`, `frames.free`, … [default: all].
    #[arg(long, value_name = "PREFIX", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Passes over all goals; with several, the median is judged.
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: u32,
    #[command(flatten)]
    pub common: Common,
}
