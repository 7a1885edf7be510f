//! What this crate's tests share: daemons of small files, and what is asked of them.

use crate::daemon::{Daemon, PoolConfig};
use crate::kept::Kept;
use crate::memory_file::{MemoryFile, Page};
use crate::policy::{Asker, LendingPolicy, Who};
use crate::stock::Shapes;
use crate::wire::{KeepAs, Leased, Refused, Wish};
use std::os::fd::OwnedFd;

pub(crate) const PAGE: Page = Page::Transparent;
pub(crate) const BYTES: u64 = PAGE.bytes();

/// Of a daemon that root may lease from and that is to have files of so many pages.
pub(crate) fn config(files: &[u64]) -> PoolConfig {
    PoolConfig::new(PAGE, Shapes(files.iter().map(|pages| pages * BYTES).collect()), u64::MAX, 0)
}

pub(crate) fn daemon(files: &[u64]) -> Daemon {
    Daemon::new(config(files))
}

/// So many bytes for one user.
pub(crate) fn allows(uid: u32, bytes: u64) -> LendingPolicy {
    LendingPolicy::read(0, &format!("uid {uid} {bytes}"), |text| text.parse().ok()).expect("a line")
}

pub(crate) fn file(pages: u64) -> MemoryFile {
    MemoryFile::new(PAGE, pages * BYTES).expect("a file")
}

/// The name that tests keep memory by.
pub(crate) fn cache(secret: Option<&str>) -> KeepAs {
    KeepAs { name: "cache".to_owned(), secret: secret.map(str::to_owned) }
}

/// A page by that name.
pub(crate) fn cached(secret: Option<&str>) -> Wish {
    Wish { keep: Some(cache(secret)), ..Wish::of(BYTES) }
}

/// What a user has by that name and the secret "secret".
pub(crate) fn kept(file: MemoryFile, uid: u32) -> Kept {
    let whose = (&Asker::user(uid), Who::User(uid));
    Kept::new(file.into_fd(), whose, "cache".to_owned(), "secret".to_owned()).expect("a record")
}

/// What a service manager has of it.
pub(crate) fn stored(kept: &Kept) -> [(String, OwnedFd); 2] {
    kept.both().map(|fd| (kept.name_in_store(), fd.try_clone_to_owned().expect("a descriptor")))
}

/// On a thread that has these capabilities alone, by their numbers' bits.
pub(crate) fn with_capabilities<R: Send>(mask: u32, run: impl FnOnce() -> R + Send) -> R {
    let thread = || {
        let (head, sets) = ([0x2008_0522_u32, 0], [mask, mask, 0, 0, 0, 0]);
        // SAFETY: of this thread alone; both outlive the call (capset(2), version 3).
        assert_eq!(unsafe { libc::syscall(libc::SYS_capset, head.as_ptr(), sets.as_ptr()) }, 0);
        run()
    };
    std::thread::scope(|scope| scope.spawn(thread).join()).unwrap_or_else(|cause| std::panic::resume_unwind(cause))
}

impl Daemon {
    /// A file is ready, whatever pages it has: the daemon asks for those that are missing.
    pub(crate) fn gets(&self, pages: u64) {
        self.fill_ended(Some(file(pages)));
    }

    pub(crate) fn lends(&self, uid: u32, bytes: u64) -> Result<(Leased, OwnedFd), Refused> {
        self.lease(&Asker::user(uid), 7, &Wish::of(bytes))
    }
}

/// Whether this is root, without whom something is skipped.
pub(crate) fn is_root(why: &str) -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("skipped: only root {why}");
    }
    is_root
}
