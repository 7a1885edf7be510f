//! Kernel areas taken and freed, on kernels that have no `test_vmalloc`: by `init_module` of memory that cannot be read.
//!
//! It takes an area as large as the module (`vmalloc`), zeroes the first 64 KiB of it at most because nothing could be copied there,
//! and frees it (`vfree`). Areas that are held meanwhile are BPF arrays of one page, which have one more for themselves.

use crate::record;
use anyhow::{Context, Result, bail};
use hugemm_base::PAGE_BYTES;
use hugemm_base::random::Random;
use hugemm_workloads::request::Vmalloc;
use hugemm_workloads::vmalloc::{HELD, Looped, Test};
use hugemm_workloads::words::Named;
use rustix::process::{Resource, Rlimit, setrlimit};
use serde_json::json;
use std::ffi::{c_int, c_long};
use std::io::Error;
use std::os::fd::{FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// Numbers of system calls: `init_module` and `bpf`.
#[cfg(target_arch = "x86_64")]
const CALLS: [c_long; 2] = [175, 321];
#[cfg(target_arch = "aarch64")]
const CALLS: [c_long; 2] = [105, 280];

/// An address that no process may read.
const UNREADABLE: usize = 1 << 63;
const EFAULT: i32 = 14;

/// What such an array takes: in pages, without the guard page.
const HELD_PAGES: u64 = 2;

/// More than Linux lets wait for its flush, on few CPUs.
const WAITING: u64 = 128 << 20;

unsafe extern "C" {
    fn syscall(number: c_long, ...) -> c_long;
}

/// Each test that Linux can be asked for; the first run of all warms up.
pub fn run(work: &Vmalloc) -> Result<()> {
    let files = Some(2 * HELD as u64);
    setrlimit(Resource::Nofile, Rlimit { current: files, maximum: files }).context("cannot open many files")?;
    for run in 0..=work.runs {
        for test in Test::ALL.iter().filter(|test| test.is_of_linux()) {
            let looped = measure(*test, work.areas).with_context(|| format!("{} failed", test.name()))?;
            if run > 0 {
                record(&looped, &json!({"test": test.name()}));
            }
        }
    }
    Ok(())
}

fn measure(test: Test, areas: u64) -> Result<Looped> {
    let before = used()?;
    let mut held = match test {
        Test::FullFitAlloc | Test::LongBusyListAlloc => (0..HELD).map(|_| array()).collect::<Result<Vec<_>>>()?,
        _ => Vec::new(),
    };
    if test == Test::FullFitAlloc {
        let mut holes = false;
        held.retain(|_| {
            holes = !holes;
            holes
        });
    }
    settle(before, held.len() as u64)?;
    // Whatever waits has been given back after this.
    (0..WAITING / (16 << 20)).try_for_each(|_| pair(16 << 20))?;
    let mut random = Random(areas);
    let start = Instant::now();
    for done in 0..areas {
        let pages = if test == Test::FullFitAlloc { HELD_PAGES } else { test.shape(done, &mut random).0 };
        pair(pages * PAGE_BYTES)?;
    }
    let nanos = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
    drop(held);
    settle(before, 0)?;
    Ok(Looped { areas, nanos, ..Looped::default() })
}

fn pair(bytes: u64) -> Result<()> {
    // SAFETY: nothing of this process is read or written.
    let said = unsafe { syscall(CALLS[0], UNREADABLE, usize::try_from(bytes)?, c"".as_ptr()) };
    match Error::last_os_error() {
        error if said == -1 && error.raw_os_error() == Some(EFAULT) => Ok(()),
        error => bail!("init_module of {bytes} bytes that cannot be read: {error}"),
    }
}

/// An array of one value of one page, which may be mapped and so is never `kmalloc`'s.
fn array() -> Result<OwnedFd> {
    const MAP_CREATE: c_int = 0;
    const ARRAY: u32 = 2;
    const MMAPABLE: u32 = 1 << 10;
    // Type, bytes of a key and of a value, entries, flags.
    let attributes: [u32; 5] = [ARRAY, 4, PAGE_BYTES as u32, 1, MMAPABLE];
    // SAFETY: the kernel reads the attributes.
    let fd = unsafe { syscall(CALLS[1], MAP_CREATE, attributes.as_ptr(), size_of_val(&attributes)) };
    if fd < 0 {
        return Err(Error::last_os_error()).context("cannot make a BPF array");
    }
    // SAFETY: just opened.
    Ok(unsafe { OwnedFd::from_raw_fd(c_int::try_from(fd)?) })
}

/// Waits until no more is in use than there was, and so many arrays: Linux frees them some time later.
fn settle(before: u64, arrays: u64) -> Result<()> {
    for _ in 0..1000 {
        if used()? <= before + arrays * HELD_PAGES * PAGE_BYTES {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    bail!("what was freed is still in use after 10 s")
}

/// Bytes of all areas.
fn used() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmallocUsed:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    Ok(kib.context("/proc/meminfo does not say what areas use")? << 10)
}
