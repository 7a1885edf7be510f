//! Process 1 of a stock Linux guest: does the work that `hugemm linux` asks for, through the interfaces that Linux has for
//! it, and says what it took.
//!
//! The kernel passes everything after `--` on its command line as arguments. Results are lines of JSON on the console,
//! each an object with an `event`; the last is `done` or `error`. Then the machine is powered off. Whoever reads them
//! must expect the kernel's own messages between the lines.
#![allow(unreachable_pub, reason = "in a binary, `pub` says what a module offers to the others")]

mod age;
mod faults;
mod interrupts;
mod pool;

use anyhow::{Context, Result, bail};
use rustix::mount::{MountFlags, mount};
use rustix::system::{RebootCommand, reboot};
use serde_json::{Value, json};
use std::io::Write;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if let ["age-process", rest @ ..] = words.as_slice() {
        if let Err(error) = age::run_process(rest) {
            eprintln!("{}", json!({"failed": format!("{error:#}")}));
        }
        return;
    }
    let result = prepare().and_then(|()| match words.as_slice() {
        ["age", rest @ ..] => age::run(rest),
        ["pool", rest @ ..] => pool::run(rest),
        ["faults", rest @ ..] => faults::run(rest),
        other => bail!("this init does not know how to do '{}'", other.join(" ")),
    });
    match result {
        Ok(()) => say(json!({"event": "done"})),
        Err(error) => say(json!({"event": "error", "message": format!("{error:#}")})),
    }
    if std::process::id() == 1 {
        rustix::fs::sync();
        // If the machine cannot be powered off, ending is all that is left: the kernel panics, which ends it too.
        let _ = reboot(RebootCommand::PowerOff);
    }
}

/// Makes the kernel's files readable, unless something else has done so.
fn prepare() -> Result<()> {
    if std::process::id() != 1 {
        return Ok(());
    }
    for (kind, at) in [("proc", "/proc"), ("sysfs", "/sys")] {
        std::fs::create_dir_all(at).with_context(|| format!("cannot make {at}"))?;
        mount(kind, at, kind, MountFlags::empty(), None::<&std::ffi::CStr>)
            .with_context(|| format!("cannot mount {at}"))?;
    }
    Ok(())
}

fn say(line: Value) {
    // A line feed first: the kernel may have written half a line.
    println!("\n{line}");
    let _ = std::io::stdout().flush();
}

/// Argument number `index` as a number.
fn number(words: &[&str], index: usize, name: &str) -> Result<u64> {
    let word = words.get(index).with_context(|| format!("the argument {name} is missing"))?;
    word.parse().with_context(|| format!("{name} is '{word}', which is no number"))
}
