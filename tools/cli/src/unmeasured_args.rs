//! Options of the commands that measure nothing.

use crate::options::Common;
use clap::{Args, ValueHint};
use clap_complete::Shell;
use std::path::PathBuf;
use std::str::FromStr;

/// How `hugemm compare` judges.
pub const COMPARE_HELP: &str = "\
Figures are the same if metric, labels and unit are. A figure is worse if it differs in the bad direction by more than the \
threshold and by more than the noise: the 99 % interval of Welch's t-test from both sides' deviations and runs. Figures \
measured once are shown and not judged; counts have no noise, so any difference of a count is named.

Exit codes: 0 nothing is worse, 1 something is, 2 the documents cannot be compared.";

/// The documents of one side.
///
/// A type of its own: as a list it would also take what belongs to the other side, when a third file is given by mistake.
#[derive(Clone, Debug)]
pub struct Files(pub Vec<PathBuf>);

impl FromStr for Files {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.split(',').any(str::is_empty) {
            return Err("a file name is empty; separate the names of several files by single commas".to_owned());
        }
        Ok(Files(text.split(',').map(PathBuf::from).collect()))
    }
}

#[derive(Debug, Args)]
pub struct Compare {
    /// What to compare with: a document saved with --json=FILE, or several of the same side, separated by commas.
    #[arg(value_name = "A.json", value_hint = ValueHint::FilePath)]
    pub a: Files,
    /// What is judged.
    #[arg(value_name = "B.json", value_hint = ValueHint::FilePath)]
    pub b: Files,
    /// Percent by which a figure may be worse.
    #[arg(short, long, default_value_t = 5.0, value_parser = percent)]
    pub threshold: f64,
    /// Show figures that are the same, too.
    #[arg(long)]
    pub all: bool,
    #[command(flatten)]
    pub common: Common,
}

#[derive(Debug, Args)]
pub struct Report {
    /// Documents that any command saved with --json=FILE.
    #[arg(value_name = "FILE.json", required = true, value_hint = ValueHint::FilePath)]
    pub files: Vec<PathBuf>,
    /// Write one HTML page that needs nothing else [default without --fill: hugemm-report.html].
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub html: Option<PathBuf>,
    /// Put the goals' figures into the tables of a Markdown page, which has a row for each and columns 'wanted', 'measured'
    /// and 'met'. Can be given several times.
    #[arg(long, value_name = "PAGE.md", value_hint = ValueHint::FilePath)]
    pub fill: Vec<PathBuf>,
}

#[derive(Debug, Args)]
pub struct Doctor {
    #[command(flatten)]
    pub common: Common,
}

/// Where completions go.
pub const COMPLETIONS_HELP: &str = "\
To have completions in each shell that is started from now on:
  bash  hugemm completions bash > ~/.local/share/bash-completion/completions/hugemm
  zsh   hugemm completions zsh > DIR/_hugemm, where DIR is in $fpath
  fish  hugemm completions fish > ~/.config/fish/completions/hugemm.fish";

#[derive(Debug, Args)]
pub struct Completions {
    /// The shell.
    pub shell: Shell,
}

#[derive(Debug, Args)]
pub struct Man {
    /// Write a page for each command into this directory, which is made if it is missing [default: print the main page].
    #[arg(value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
}

/// Reads a percentage that is not negative.
fn percent(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err(format!("'{text}' is no percentage; write a number from 0 on, such as 5 or 2.5")),
    }
}
