//! A program that only makes memory and touches it: it has no start of its own that a lease's could hide behind.

use anyhow::{Result, bail};
use hugemm_base::PageSize;
use hugemm_inspect::interrupt;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::process::Signal;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use super::bench::end_with_this;

/// Its name among this program's commands, which no help names.
const NAME: &str = "bench-program";

/// Whether it touches its memory.
const TOUCHED: &str = "touched";
const MAPPED: &str = "mapped";

/// Runs it, if the words say so: before anything else, for what this program does for others is not its.
pub fn program(words: impl IntoIterator<Item = OsString>) -> Option<ExitCode> {
    let mut words = words.into_iter().skip(1);
    words.next().filter(|word| word == NAME)?;
    let bytes = words.next()?.to_str()?.parse().ok()?;
    let said = run(bytes, words.next()? == TOUCHED).and_then(|()| Ok(std::io::stdout().write_all(b"!")?));
    Some(if said.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn run(bytes: usize, touches: bool) -> Result<()> {
    let file = memfd_create(c"program", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)?;
    ftruncate(&file, bytes as u64)?;
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: at an address of the kernel's choice; no memory that exists is touched.
    let at = unsafe { mmap(std::ptr::null_mut(), bytes, rights, MapFlags::SHARED, &file, 0) }?.cast::<u8>();
    for page in (0..bytes).step_by(PageSize::Size2M.bytes() as usize).filter(|_| touches) {
        // SAFETY: of the mapping, which stays; nobody else has the file.
        unsafe { at.add(page).write_volatile(1) };
    }
    Ok(())
}

/// The time from its start, behind `wrapper` if there is one, until its memory is there.
pub(super) fn time(wrapper: Option<Command>, bytes: u64, touches: bool) -> Result<Duration> {
    let own = std::env::current_exe()?;
    let mut command = match wrapper {
        Some(mut wrapper) => {
            wrapper.arg(own);
            wrapper
        }
        None => Command::new(own),
    };
    command.args([NAME, &bytes.to_string(), if touches { TOUCHED } else { MAPPED }]);
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let from = Instant::now();
    let mut child = end_with_this(command, Signal::KILL).spawn()?;
    let said = child.stdout.take().map(|mut out| out.read_exact(&mut [0]));
    let time = from.elapsed();
    let ended = child.wait()?;
    interrupt::check()?;
    match said {
        Some(Ok(())) if ended.success() => Ok(time),
        _ => bail!("a program that maps {bytes} bytes ended ({ended}) before it had them"),
    }
}
