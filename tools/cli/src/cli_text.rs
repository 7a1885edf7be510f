//! `hugemm completions` and `hugemm man`: both are made from the definition of the command line, so they cannot lag behind.

use crate::args::Cli;
use crate::unmeasured_args::{Completions, Man};
use anyhow::{Context, Result};
use clap::CommandFactory;
use std::io::Write;

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
