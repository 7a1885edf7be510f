//! One of the processes: it plays a window whenever the token comes to it.

use super::now;
use anyhow::{Context, Result, bail};
use hugemm_base::VirtAddr;
use hugemm_base::random::Random;
use hugemm_workloads::age::{InPlace, Process, Touched};
use rustix::mm::{MapFlags, ProtFlags, mlock, mmap};
use rustix::thread::{CpuSet, sched_setaffinity};
use serde_json::json;
use std::fs::File;
use std::io::{Read, Write, stdin, stdout};
use std::ptr::{NonNull, null_mut};
use std::time::Duration;

/// What makes this program such a process.
pub const PROCESS: &str = "age-process";

/// `age-process NUMBER CPU SHARED FILE`: says `ready`; plays a window of the file's pages and hands the token on, until the
/// time that the token says; then says what it did. The token comes by standard input and goes by standard output.
pub fn run(words: &[String]) -> Result<()> {
    let [who, cpu, shared, file] = words else { bail!("four arguments are wanted") };
    let (who, cpu, shared): (u64, u64, u64) = (who.parse()?, cpu.parse()?, shared.parse()?);
    let mut set = CpuSet::new();
    set.set(usize::try_from(cpu)?);
    sched_setaffinity(None, &set).context("cannot stay on one CPU")?;
    let file = File::options().read(true).write(true).open(file).context("cannot open shared memory")?;
    let bytes = usize::try_from(shared)?;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let at = unsafe { mmap(null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0) };
    let at = NonNull::new(at.context("cannot map shared memory")?.cast::<u8>()).context("mapped at address 0")?;
    let mut wrote = vec![0_u32; bytes >> 12];
    // SAFETY: the vector's own memory, for as long as the process lives. What it remembers is no part of the work.
    unsafe { mlock(wrote.as_mut_ptr().cast(), size_of_val(&wrote[..])) }.context("cannot lock memory")?;
    let mut process = Process {
        number: u32::try_from(who)?,
        at: VirtAddr::new(at.as_ptr() as u64),
        wrote: &mut wrote,
        alone: false,
        random: Random(who + 7),
        stores: 0,
    };
    let reach = |page: u64| {
        // SAFETY: a page of the mapping, which stays; everybody accesses its words atomically, and the kernel serves faults.
        unsafe { InPlace::new(at.add((page as usize) << 12)) }
    };
    eprintln!("ready");
    let (mut windows, mut touched, mut failed) = (0, Touched::default(), None);
    let mut token = [0; 8];
    // It ends when the last but one in the ring has ended.
    while failed.is_none() && stdin().read_exact(&mut token).is_ok() {
        let goes_on = now()? < Duration::from_nanos(u64::from_le_bytes(token));
        if goes_on {
            match process.window_elsewhere(reach, &mut touched) {
                Ok(()) => windows += 1,
                Err(why) => failed = Some(why.to_string()),
            }
        }
        // The next one may have ended with the time.
        let _ = stdout().write_all(&token).and_then(|()| stdout().flush());
        if !goes_on {
            break;
        }
    }
    let (pages, refused, end) = (touched.pages, touched.refused, u64::try_from(now()?.as_nanos())?);
    eprintln!("{}", json!({"windows": windows, "pages": pages, "refused": refused, "end": end, "failed": failed}));
    Ok(())
}
