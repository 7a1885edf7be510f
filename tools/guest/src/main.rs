//! Process 1 of a stock Linux guest: does the work that `hugemm linux` asks for, through the interfaces that Linux has for
//! it, and says what it took.
//!
//! It is asked as hugemm's reference kernel is, by a [`Request`] after `--` on the kernel's command line, and answers in the same
//! lines of JSON on the console. Then the machine is powered off. Whoever reads them must expect the kernel's own messages
//! between the lines.
#![allow(unreachable_pub, reason = "in a binary, `pub` says what a module offers to the others")]

mod age;
mod faults;
mod interrupts;
mod pool;
mod vmalloc;

use anyhow::{Context, Result, bail};
use hugemm_workloads::record::Record;
use hugemm_workloads::request::Request;
use rustix::mount::{MountFlags, mount};
use rustix::system::{RebootCommand, reboot};
use serde_json::{Value, json};
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [first, rest @ ..] = words.as_slice()
        && first == age::PROCESS
    {
        if let Err(error) = age::run_process(rest) {
            eprintln!("{}", json!({"failed": format!("{error:#}")}));
        }
        return;
    }
    let line = words.join(" ");
    let result = prepare().and_then(|()| match line.parse() {
        Ok(Request::Age(work)) => age::run(&work),
        Ok(Request::Pool(work)) => pool::run(&work),
        Ok(Request::VmCreate(work)) => faults::run(&work),
        Ok(Request::Vmalloc(work)) => vmalloc::run(&work),
        _ => bail!("this init does not know how to do '{line}'"),
    });
    match result {
        Ok(()) => say(&json!({"kind": "done"})),
        Err(error) => say(&json!({"kind": "failed", "text": format!("{error:#}")})),
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

/// Says a line, an object, as `hugemm_kernel_commands::report` documents it.
fn say(line: &Value) {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // Relaxed: one thread talks.
    let seq = NEXT.fetch_add(1, Ordering::Relaxed);
    // A line feed first: the kernel may have written half a line.
    println!("\n{{\"seq\":{seq},{}", &line.to_string()[1..]);
    let _ = std::io::stdout().flush();
}

/// What a run counted, and what tells it from others.
fn record<R: Record>(record: &R, labels: &Value) {
    let mut line = json!({"kind": "record", "name": R::NAME, "labels": labels});
    record.each(&mut |field, value| line[field] = value.into());
    say(&line);
}
