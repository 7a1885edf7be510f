//! A file that a program has made for itself, and whose place a leased one may take.

use crate::memory_file::{Page, page_of};
use rustix::fs::{Mode, OFlags};
use std::fs;
use std::os::fd::{AsFd, OwnedFd};

/// What a descriptor of a process is.
pub(crate) struct OwnFile {
    /// The file, opened once more.
    pub(crate) file: OwnedFd,
    /// Where it was found, and which it is.
    path: String,
    identity: (u64, u64),
    page: Page,
    /// No name, no length, no pages: nobody else can have it, and nothing is in it.
    is_fresh: bool,
    is_writable: bool,
    pub(crate) close_on_exec: bool,
}

impl OwnFile {
    /// Looks at a descriptor of `process`, a number or `self`. `None`: it is no file of huge pages.
    pub(crate) fn look(process: &str, fd: u32) -> Option<Self> {
        let path = format!("/proc/{process}/fd/{fd}");
        let file = rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty()).ok()?;
        let page = page_of(file.as_fd())?;
        let stat = rustix::fs::fstat(&file).ok()?;
        let is_fresh = stat.st_nlink == 0 && stat.st_size == 0 && stat.st_blocks == 0;
        let info = fs::read_to_string(format!("/proc/{process}/fdinfo/{fd}")).ok()?;
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
        let flags = i32::from_str_radix(flags.trim(), 8).ok()?;
        let is_writable = flags & libc::O_ACCMODE != libc::O_RDONLY;
        let close_on_exec = flags & libc::O_CLOEXEC != 0;
        Some(OwnFile { file, path, identity: (stat.st_dev, stat.st_ino), page, is_fresh, is_writable, close_on_exec })
    }

    /// Whether a leased file of such pages may take its place.
    pub(crate) fn is_replaceable(&self, page: Page) -> bool {
        self.page == page && self.is_fresh && self.is_writable
    }

    /// Whether the process's descriptor is this file yet.
    pub(crate) fn is_still_there(&self) -> bool {
        rustix::fs::stat(&self.path).is_ok_and(|stat| (stat.st_dev, stat.st_ino) == self.identity)
    }
}
