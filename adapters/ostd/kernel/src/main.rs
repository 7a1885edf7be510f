//! A small OSTD kernel that runs OSTD's own tests and ours on hugemm's frames and heap, or, with the feature `defaults`, on OSTD's.
//!
//! The command line says what: `test` (`plant=NAME` with a mistake in the allocator), or `bench`.
#![no_std]
#![no_main]

extern crate alloc;

mod allocators;
mod bench;
mod cpus;
mod plant;
mod tests;

use alloc::boxed::Box;
use alloc::string::ToString;
use core::any::Any;
use ostd::early_println;
use ostd::ktest::{KtestError, KtestIter, PanicInfo};
use ostd::power::{ExitCode, poweroff};

/// Runs a test and catches its panic.
type Catch = fn(fn()) -> Result<(), Box<dyn Any + Send>>;

#[ostd::early_cmdline_parser]
const fn quiet(_: &str) -> ostd::boot::EarlyCmdline {
    ostd::boot::EarlyCmdline { log_level: ostd::log::LevelFilter::Error, has_early_console: true }
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo) -> ! {
    let _off = ostd::irq::disable_local();
    let (file, line, col) = info.location().map_or(("", 0, 0), |at| (at.file(), at.line(), at.column()));
    let thrown = PanicInfo {
        message: info.message().to_string(),
        file: file.to_string(),
        line: line as usize,
        col: col as usize,
    };
    // Comes back only if no test catches it.
    ostd::panic::begin_panic(Box::new(thrown.clone()));
    early_println!("panicked outside of a test: {}", thrown);
    poweroff(ExitCode::Failure)
}

#[ostd::ktest::main]
fn main() {
    cpus::start();
    ostd::task::TaskOptions::new(run).data(()).spawn().expect("memory for a task");
}

fn run() {
    let command = &ostd::boot::boot_info().kernel_cmdline;
    let fine = if command.split_whitespace().any(|word| word == "bench") { bench::run() } else { test(command) };
    poweroff(if fine { ExitCode::Success } else { ExitCode::Failure })
}

/// Runs our tests and then, if nothing is planted, OSTD's. Whether all passed.
fn test(command: &str) -> bool {
    let planted = command.split_whitespace().find_map(|word| word.strip_prefix("plant="));
    plant::set(planted);
    let mut all = true;
    for package in ["hugemm-ostd-kernel", "hugemm-ostd", "ostd"] {
        if planted.is_some() && package != "hugemm-ostd-kernel" {
            continue;
        }
        let (mut passed, mut failed) = (0, 0);
        for test in KtestIter::new().filter(|test| test.info().package == package) {
            let info = test.info();
            let Err(error) = test.run(&(ostd::panic::catch_unwind::<(), fn()> as Catch)) else {
                passed += 1;
                continue;
            };
            failed += 1;
            let why = match &error {
                KtestError::Panic(panic) | KtestError::ExpectedPanicNotMatch(_, panic) => panic.to_string(),
                KtestError::ShouldPanicButNoPanic => "did not panic".to_string(),
                KtestError::Unknown => "unknown".to_string(),
            };
            early_println!("failed: {}::{}: {}", info.module_path, info.fn_name, why.trim());
            if planted.is_some() {
                return false;
            }
        }
        early_println!("{}: {} passed, {} failed, {} CPUs", package, passed, failed, ostd::cpu::num_cpus());
        all &= passed > 0 && failed == 0;
    }
    all
}
