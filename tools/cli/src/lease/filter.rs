//! What the filter costs a program that uses many files and makes no memory.

use super::monitor::end_with_this;
use crate::stats::Samples;
use anyhow::{Context, Result, bail};
use hugemm_inspect::interrupt;
use rustix::process::Signal;
use std::mem;
use std::path::Path;
use std::process::{Command, Stdio};

/// Such programs: the first that can be had is taken.
const PROGRAMS: [(&str, &str); 2] = [
    ("a compiler", "cc -O1 -c *.c"),
    ("a shell that writes files", "i=0; while [ $i -lt 100000 ]; do echo $i >file; i=$((i + 1)); done"),
];

/// Which one it was, and its CPU time with the filter, of that without. `dir` is for its files.
pub(super) fn cost(socket: &Path, dir: &Path, runs: u32) -> Result<(&'static str, Samples)> {
    for file in 0..4 {
        let mut text: String = ["stdio", "stdlib", "string", "math", "time", "signal", "unistd", "pthread", "sys/mman"]
            .map(|header| format!("#include <{header}.h>\n"))
            .concat();
        text.extend(
            (0..300).map(|n| format!("int f{n}(int a) {{ while (a) a -= printf(\"%d\", a + {n}); return a; }}\n")),
        );
        std::fs::write(dir.join(format!("{file}.c")), text)?;
    }
    let Some((name, script)) = PROGRAMS.into_iter().find(|(_, script)| run(script, dir, None).is_ok()) else {
        bail!("no program of many files: `sh` ends with an error in {}", dir.display());
    };
    let mut ratio = Samples::default();
    for turn in 0..runs {
        let mut times = [0.0; 2];
        // Each is first as often as the other.
        for which in [turn % 2, 1 - turn % 2].map(|which| which as usize) {
            times[which] = run(script, dir, [None, Some(socket)][which])?;
        }
        ratio.push(times[1] / times[0]);
    }
    Ok((name, ratio))
}

/// Seconds of CPU time, with what it starts.
fn run(script: &str, dir: &Path, socket: Option<&Path>) -> Result<f64> {
    interrupt::check()?;
    let mut command = match socket {
        None => Command::new("sh"),
        Some(socket) => {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["lease", "--require", "--socket"]).arg(socket).args(["--", "sh"]);
            command
        }
    };
    let command = command.args(["-c", script]).current_dir(dir);
    let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let before = of_children();
    let ended = end_with_this(command, Signal::KILL).spawn()?.wait()?;
    ended.success().then(|| of_children() - before).with_context(|| format!("`{script}` ended with an error: {ended}"))
}

/// Seconds of CPU time of all that this process has started, and that has ended.
fn of_children() -> f64 {
    // SAFETY: integers, for which zero is a value; the call overwrites them.
    let mut used: libc::rusage = unsafe { mem::zeroed() };
    // SAFETY: it outlives the call.
    unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut used) };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(used.ru_utime) + seconds(used.ru_stime)
}
