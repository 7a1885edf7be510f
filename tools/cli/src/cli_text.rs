//! `hugemm completions` and `hugemm man`: both are made from the definition of the command line, so they cannot lag behind;
//! and what is wrong with a command line, on one line.

use crate::args::{self, Cli};
use crate::lease::args::Lease;
use crate::unmeasured_args::{Completions, Man};
use crate::usage::usage_error;
use anyhow::{Context, Result, anyhow};
use clap::error::ErrorKind;
use clap::{Args, Command, CommandFactory, FromArgMatches};
use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

/// The command line of this program.
///
/// # Errors
/// What clap says; help that was asked for is an error, too.
pub fn parse() -> Result<Cli, clap::Error> {
    if let Some(lease) = lease_alone(std::env::args_os()) {
        return Ok(Cli { command: args::Command::Lease(lease) });
    }
    let mut command = numbers_may_be_negative(Cli::command());
    let matches = command.try_get_matches_from_mut(std::env::args_os())?;
    Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
}

/// `hugemm lease`, whose program waits meanwhile: without a look at the other commands' options, of which there are hundreds. What
/// it cannot make sense of is for [`parse`] to explain.
fn lease_alone(words: impl Iterator<Item = OsString>) -> Option<Lease> {
    let words = words.skip(1);
    let mut words = words.peekable();
    words.peek().filter(|word| *word == "lease")?;
    let command = numbers_may_be_negative(Lease::augment_args(Command::new("lease")));
    Lease::from_arg_matches(&command.try_get_matches_from(words).ok()?).ok()
}

/// Values such as -1 reach the options' own parsers, which say what they want, instead of being taken for options.
fn numbers_may_be_negative(command: Command) -> Command {
    let command = command.mut_args(|arg| {
        let takes_value = arg.get_action().takes_values() && !arg.is_positional();
        if takes_value { arg.allow_negative_numbers(true) } else { arg }
    });
    command.mut_subcommands(numbers_may_be_negative)
}

/// Ends the program for a command line that cannot be carried out: prints the help that was asked for, or one line that
/// says what is wrong and which help says more.
pub fn misused(error: &clap::Error) -> ExitCode {
    use ErrorKind::{DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand, DisplayVersion};
    if matches!(error.kind(), DisplayHelp | DisplayHelpOnMissingArgumentOrSubcommand | DisplayVersion) {
        error.exit();
    }
    let named = named_command(std::env::args_os().skip(1));
    // The commonest slip: `hugemm lease 1GB qemu …`.
    let tip = if named == "hugemm lease" && error.kind() == ErrorKind::UnknownArgument {
        "; the command stands behind --, options before it"
    } else {
        ""
    };
    eprintln!("hugemm: {}{tip}; see '{named} --help'", usage_error(error));
    ExitCode::from(2)
}

/// The command and subcommands that a command line begins with.
fn named_command(words: impl Iterator<Item = OsString>) -> String {
    let mut name = "hugemm".to_owned();
    let mut command = &Cli::command();
    for word in words {
        let Some(inner) = command.find_subcommand(&word) else { break };
        name = format!("{name} {}", inner.get_name());
        command = inner;
    }
    name
}

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
    std::fs::create_dir_all(dir).map_err(|error| {
        anyhow!("cannot make the directory {}: {error}; name one where you may write", dir.display())
    })?;
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
        let tip = of(&["hugemm", "run", "--siz", "3GB"]);
        assert_eq!(tip, "unexpected argument '--siz' found; a similar argument exists: '--size'");
        assert_eq!(of(&["hugemm", "lease", "--size", "1G"]), "unexpected argument '--size' found");
    }

    /// A lease's own parser says what that of all commands does, and leaves to it what is wrong.
    #[test]
    fn a_lease_is_made_sense_of_alone() {
        let words = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
        let alone =
            |line: &str| lease_alone(words(line).into_iter()).map(|lease| format!("{:?}", args::Command::Lease(lease)));
        for line in [
            "hugemm lease 1GB -- qemu -m 1G --help",
            "hugemm lease 2MB --page thp --node 1 --require --socket /s -- a",
            "hugemm lease 4GB --keep k --secret s --scrub --fd 7 -- a @LEASE@",
            "hugemm lease 4GB --json",
        ] {
            let all = Cli::try_parse_from(words(line)).expect("makes sense").command;
            assert_eq!(alone(line), Some(format!("{all:?}")), "{line}");
        }
        for line in
            ["hugemm lease", "hugemm lease 1GB --frob", "hugemm lease --help", "hugemm lease 1GB --node -1 -- a"]
        {
            assert_eq!(alone(line), None, "{line}");
        }
        assert_eq!(alone("hugemm pool status"), None);
    }

    #[test]
    fn the_command_is_named_as_far_as_it_is_one() {
        let of = |line: &str| named_command(line.split(' ').map(OsString::from));
        assert_eq!(of("bench mem mmap -s 0"), "hugemm bench mem mmap");
        assert_eq!(of("bench swim"), "hugemm bench");
        assert_eq!(of("--frob run"), "hugemm");
    }
}
