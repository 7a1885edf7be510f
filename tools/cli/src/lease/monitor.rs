//! A QEMU, asked by its monitor (QMP).

use crate::qemu::lines_of;
use anyhow::{Context, Result, bail};
use hugemm_inspect::interrupt;
use rustix::process::Signal;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(600);

/// Ended when dropped.
pub(super) struct Monitor {
    child: Child,
    lines: Receiver<String>,
}

impl Monitor {
    /// Starts a machine that has its monitor on standard input and output, and waits until it takes commands. The greeting comes before
    /// the memory; an answer comes from a machine that is there.
    pub(super) fn start(command: &mut Command) -> Result<Self> {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = end_with_this(command, Signal::KILL).spawn()?;
        let lines = lines_of(child.stdout.take());
        let mut monitor = Monitor { child, lines };
        monitor.ask("{\"execute\":\"qmp_capabilities\"}")?;
        Ok(monitor)
    }

    /// What it answers to a command.
    pub(super) fn ask(&mut self, command: &str) -> Result<String> {
        let input = self.child.stdin.as_mut().context("no pipe")?;
        writeln!(input, "{command}").context("QEMU has ended")?;
        let end = Instant::now() + PATIENCE;
        loop {
            interrupt::check()?;
            match self.lines.recv_timeout(Duration::from_millis(50)) {
                Ok(line) if line.contains("\"error\"") => bail!("QEMU does not do `{command}`: {line}"),
                Ok(line) if line.contains("\"return\"") => return Ok(line),
                Err(RecvTimeoutError::Disconnected) => bail!("QEMU ended before it answered"),
                _ if Instant::now() > end => bail!("QEMU has not answered after {} s", PATIENCE.as_secs()),
                _ => {}
            }
        }
    }

    /// Asks until it says so.
    pub(super) fn ask_until(&mut self, command: &str, what: &str) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        while !self.ask(command)?.contains(what) {
            if Instant::now() > end {
                bail!("QEMU is not {what} after {} s", PATIENCE.as_secs());
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

impl Drop for Monitor {
    /// By its own command, or, if that takes long, without asking.
    fn drop(&mut self) {
        let _ = self.child.stdin.take().map(|mut input| input.write_all(b"{\"execute\":\"quit\"}\n"));
        let until = Instant::now() + Duration::from_secs(10);
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() > until || interrupt::requested() {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Has a program end if this thread does, killed or not: nobody else would end it.
pub(super) fn end_with_this(command: &mut Command, signal: Signal) -> &mut Command {
    let parent = rustix::process::getpid();
    let end = move || {
        rustix::process::set_parent_process_death_signal(Some(signal))?;
        // Killed meanwhile, it sends none.
        let is_there = rustix::process::getppid() == Some(parent);
        is_there.then_some(()).ok_or_else(|| std::io::ErrorKind::NotFound.into())
    };
    // SAFETY: between fork and exec it makes two system calls.
    unsafe { command.pre_exec(end) }
}
