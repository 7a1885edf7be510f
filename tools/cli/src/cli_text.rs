//! `hugemm completions` and `hugemm man`: both are made from the definition of the command line, so they cannot lag behind;
//! and what is wrong with a command line, on one line.

use crate::args::Cli;
use crate::unmeasured_args::{Completions, Man};
use anyhow::{Context, Result};
use clap::CommandFactory;
use std::io::Write;

/// What clap says of a command line, on one line: the complaint with what it lists, without usage and tips.
pub fn usage_error(error: &clap::Error) -> String {
    let text = error.to_string();
    let mut lines = text.lines();
    let complaint = lines.next().unwrap_or_default().trim_start_matches("error: ");
    let listed: Vec<_> = lines.take_while(|line| !line.is_empty()).map(str::trim).collect();
    format!("{complaint} {}", listed.join(", ")).trim_end().to_owned()
}

/// Prints the completion script.
pub fn completions(args: &Completions) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "hugemm", &mut script);
    std::io::stdout().write_all(&script).context("cannot write the completions")
}

/// Prints the main page, or writes all pages.
pub fn man(args: &Man) -> Result<()> {
    let Some(dir) = &args.dir else {
        let mut page = Vec::new();
        clap_mangen::Man::new(Cli::command()).render(&mut page)?;
        return std::io::stdout().write_all(&page).context("cannot write the page");
    };
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make the directory {}", dir.display()))?;
    clap_mangen::generate_to(Cli::command(), dir)
        .with_context(|| format!("cannot write the pages to {}", dir.display()))?;
    println!("pages written to {0}; read one with: man -l {0}/hugemm.1", dir.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[test]
    fn usage_errors_say_all_on_one_line() {
        let of = |words: &[&str]| usage_error(&Cli::try_parse_from(words).expect_err("a usage error"));
        assert_eq!(of(&["hugemm", "swim"]), "unrecognized subcommand 'swim'");
        let missing = of(&["hugemm", "compare"]);
        assert!(missing.contains("not provided: <A.json>, <B.json>"), "{missing}");
        let values = of(&["hugemm", "completions", "x"]);
        assert!(values.contains("'x' for '<SHELL>' [possible values: bash"), "{values}");
    }
}
