//! The `hugemm` command: probes this machine, measures hugemm on it, and compares.
#![allow(unreachable_pub, reason = "in a binary, `pub` says what a module offers to the others")]

// First, because its macros stand for the standard library's in all others.
#[macro_use]
mod output;

mod age;
mod arch;
mod args;
mod boot;
mod clear;
mod cli_text;
mod compare;
mod doctor;
mod document;
mod environment_text;
mod frames;
mod goals;
mod ground;
mod headline;
mod heap;
mod image;
mod interference;
mod kernel_side;
mod lease;
mod linux;
mod machine;
mod measure;
mod noise;
mod options;
mod paging;
mod pool;
mod probe;
mod progress;
mod qemu;
mod replay;
mod report;
mod results;
mod run;
mod saved;
mod scale;
mod sides;
mod stand_in;
mod stats;
mod sweep;
mod table;
mod units;
mod unmeasured_args;
mod usage;
mod vm_create;
mod worker;

use args::{Bench, Command, Mem};
use hugemm_inspect::interrupt;
use std::process::ExitCode;

/// The complaint, and its causes as far as it has not named them itself.
fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if line.is_empty() {
            line = cause;
        } else if !line.contains(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    line
}

fn main() -> ExitCode {
    let cli = match cli_text::parse() {
        Ok(cli) => cli,
        Err(error) => return cli_text::misused(&error),
    };
    if let Command::Lease(args) = &cli.command {
        // It becomes another program, so it catches no signals and has one thread.
        return ended(&cli.command, lease::run(args));
    }
    let result = interrupt::install().and_then(|()| match &cli.command {
        Command::Run(args) => run::run(args),
        Command::Probe(args) | Command::Bench(Bench::Mem(Mem::Memset(args))) => probe::run(args),
        Command::Bench(Bench::Headline(args)) => headline::run(args),
        Command::Bench(Bench::Interference(args)) => interference::run(args),
        Command::Replay(args) => replay::run(args),
        Command::Bench(Bench::Free(args)) => frames::free::run(args),
        Command::Bench(Bench::Alloc(args)) => frames::alloc::run(args),
        Command::Bench(Bench::Churn(args)) => frames::churn::run(args),
        Command::Bench(Bench::Heap(args)) => heap::run(args),
        Command::Bench(Bench::VmCreate(args) | Bench::Mem(Mem::Mmap(args))) => vm_create::run(args),
        Command::Bench(Bench::Age(args)) => age::run(args),
        Command::Linux(args) => linux::run(args),
        Command::Boot(args) => boot::run(args),
        Command::Bench(Bench::Pool(args)) => pool::run(args),
        Command::Bench(Bench::Shootdown(args)) => paging::shootdown::run(args),
        Command::Bench(Bench::Vmalloc(args)) => paging::vmalloc::run(args),
        Command::Bench(Bench::Lease(args)) => lease::bench::run(args),
        Command::Bench(Bench::Map(args)) => paging::map::run(args),
        Command::Bench(Bench::Scale(args)) => scale::run(args),
        // Commands that measure nothing.
        Command::Compare(args) => compare::run(args),
        Command::Report(args) => report::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Completions(args) => cli_text::completions(args),
        Command::Man(args) => cli_text::man(args),
        Command::Lease(args) => lease::run(args),
        Command::Pool(args) => lease::pool::run(args),
    });
    ended(&cli.command, result)
}

fn ended(command: &Command, result: anyhow::Result<()>) -> ExitCode {
    match result.and_then(|()| output::finish()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hugemm: {}", one_line(&error));
            match interrupt::signal() {
                Some(signal) => ExitCode::from(u8::try_from(128 + signal).unwrap_or(1)),
                // 1 is the answer of a comparison, so it cannot also mean that there was none.
                None if matches!(command, Command::Compare(_)) && !error.is::<compare::Regression>() => 2.into(),
                None => error
                    .downcast_ref::<lease::NotStarted>()
                    .map_or(ExitCode::FAILURE, |error| error.exit_code().into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::one_line;
    use anyhow::anyhow;

    #[test]
    fn causes_are_named_once() {
        let named = anyhow!("the disk is full").context("a.json cannot be written: the disk is full; use another");
        assert_eq!(one_line(&named), "a.json cannot be written: the disk is full; use another");
        assert_eq!(one_line(&anyhow!("the disk is full").context("no result")), "no result: the disk is full");
    }
}
