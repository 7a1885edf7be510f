//! Words to the terminal: `print!`, `println!` and `eprintln!` of this program.
//!
//! The standard library's panic where a reader has gone away or a disk is full, and what was to be saved in a file after that
//! would be lost. These remember the first failure, print no more, and let the work go on; the failure is reported at
//! the end.

use anyhow::{Result, bail};
use std::fmt::Arguments;
use std::io::{Error, Write, stderr, stdout};
use std::sync::OnceLock;

static FAILED: OnceLock<Error> = OnceLock::new();

/// Prints to standard output, unless that has failed before.
pub fn print(words: Arguments<'_>) {
    if FAILED.get().is_none() {
        remember(stdout().write_fmt(words));
    }
}

/// Prints to standard error, where nobody can be told that it failed.
pub fn complain(words: Arguments<'_>) {
    let _ = stderr().write_fmt(words);
}

fn remember(result: std::io::Result<()>) {
    if let Err(error) = result {
        // The first failure is the cause of the others.
        let _ = FAILED.set(error);
    }
}

pub fn finish() -> Result<()> {
    remember(stdout().flush());
    match FAILED.get() {
        None => Ok(()),
        Some(error) => bail!("not everything could be printed: {error}; print elsewhere, or save it with --json=FILE"),
    }
}

macro_rules! print {
    ($($words:tt)*) => { $crate::output::print(format_args!($($words)*)) };
}

macro_rules! println {
    () => { print!("\n") };
    ($format:literal $($words:tt)*) => { print!("{}\n", format_args!($format $($words)*)) };
}

macro_rules! eprintln {
    ($($words:tt)*) => { $crate::output::complain(format_args!("{}\n", format_args!($($words)*))) };
}
