//! The kernel's pool of huge pages, as the tests take from it.

#![allow(dead_code, reason = "each test program uses its part")]

mod judged;
mod watchdog;

use judged::SIZE;
pub(crate) use judged::judged;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// One huge page.
pub(crate) const PAGE: u64 = 2 << 20;

/// The pool, for one test at a time. What is taken from it must be back when this is dropped.
pub(crate) struct Pool {
    _one_at_a_time: File,
    before: u64,
    size: u64,
    /// What it has more for as long.
    more: u64,
}

impl Pool {
    /// `None`, and a line that says why, where the kernel has not that many free pages.
    pub(crate) fn with_free(pages: u64) -> Option<Self> {
        let lock = judged::turn();
        let more = pages.saturating_sub(free());
        // For root; the kernel gives what it finds.
        let _ = resize(|size| size + more);
        let before = free();
        if before < pages {
            let _ = resize(|size| size.saturating_sub(more));
            eprintln!(
                "skipped: {pages} free huge pages are needed, {before} are there; as root: \
                 echo {pages} > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"
            );
            return None;
        }
        Some(Pool { _one_at_a_time: lock, before, size: size().unwrap_or(0), more })
    }

    /// Waits until all but `pages` of what was free is free. Says so, and does not wait, where somebody else changes how many there are, or
    /// has some of them: what is free is everybody's, and what this program and its children have is not.
    #[track_caller]
    pub(crate) fn wait_until_lacks(&self, pages: u64) {
        let patience = Instant::now() + Duration::from_secs(5);
        let is_back = || free() == self.before - pages;
        let is_anothers = || self.is_changed() || Instant::now() > patience && held() == pages * PAGE;
        wait_for("pages are back", || is_back() || is_anothers());
        if !is_back() {
            eprintln!("skipped: whether pages are back, for somebody else changes the pool, or takes from it");
        }
    }

    fn is_changed(&self) -> bool {
        size().ok() != Some(self.size)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _ = resize(|size| size.saturating_sub(self.more));
    }
}

/// What this test, and what it has started, have open or mapped of files of the pool, in bytes. A file that is open nowhere and on its way
/// in a socket is not seen.
fn held() -> u64 {
    let ours = concat!("CARGO_MANIFEST_DIR=", env!("CARGO_MANIFEST_DIR"));
    let is_ours = |process: &Path| {
        let environment = fs::read(process.join("environ")).unwrap_or_default();
        process.ends_with(std::process::id().to_string())
            || environment.split(|&byte| byte == 0).any(|variable| variable == ours.as_bytes())
    };
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten().map(|entry| entry.path());
    let places =
        processes.filter(|process| is_ours(process)).flat_map(|process| ["fd", "map_files"].map(|of| process.join(of)));
    let found = places.flat_map(|place| fs::read_dir(place).into_iter().flatten().flatten().map(|entry| entry.path()));
    let files: BTreeMap<_, _> = found
        .filter_map(|path| {
            // By what a page of it is: a device, or a file of a disk, has other blocks.
            let meta = fs::metadata(path).ok().filter(|meta| meta.is_file() && meta.blksize() == PAGE)?;
            Some(((meta.dev(), meta.ino()), meta.blocks() * 512))
        })
        .collect();
    files.values().sum()
}

fn size() -> std::io::Result<u64> {
    Ok(fs::read_to_string(SIZE)?.trim().parse().unwrap_or(0))
}

fn resize(to: impl Fn(u64) -> u64) -> std::io::Result<()> {
    let size = size()?;
    let to = to(size);
    if to == size { Ok(()) } else { fs::write(SIZE, to.to_string()) }
}

fn free() -> u64 {
    let read = |name: &str| {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}");
        fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(0)
    };
    read("free_hugepages").saturating_sub(read("resv_hugepages"))
}

/// Waits until something is so.
#[track_caller]
pub(crate) fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
