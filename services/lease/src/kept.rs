//! Memory that outlives its program, and what is written beside it: a service manager holds both, so that a daemon that is started
//! anew knows whose the memory is.
//!
//! Whether anybody has the memory, the kernel says. It is lent as an open file of its own, which is locked (flock(2)): the kernel gives
//! that lock up when the last descriptor and mapping of that open file is gone, whoever had asked for it. What a program has opened by a
//! path (`/proc/PID/fd/N`) is another open file; those the kernel counts, but from Linux 7.0 on not on hugetlbfs. A program that opens it
//! so there, and closes the descriptor that it was given, has memory that is given again.

use crate::left::while_ours;
use crate::memory_file::{Page, page_of};
use crate::own_file::{is_only_one, open};
use crate::policy::Who;
use rustix::fs::{FlockOperation, MemfdFlags, flock, memfd_create};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};

/// A record's length: it is written by one call, so that a daemon that is killed leaves the old one or the new one.
const RECORD: usize = 4096;

/// The longest name.
pub const MOST_NAME: usize = 200;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    uid: u32,
    /// By which line of the policy it was leased.
    account: Who,
    name: String,
    secret: String,
    /// Of the file that it is about.
    inode: u64,
}

/// Memory that is kept, with its record.
#[derive(Debug)]
pub struct Kept {
    memory: OwnedFd,
    page: Page,
    bytes: u64,
    record: Record,
    written: File,
}

impl Kept {
    /// Writes a record for memory that a user keeps.
    ///
    /// # Errors
    ///
    /// The system's: no descriptor, no memory.
    pub fn new(memory: OwnedFd, (uid, account): (u32, Who), name: String, secret: String) -> io::Result<Self> {
        // By a path: the kernel counts only those.
        let memory = opened_again(&memory)?;
        let stat = rustix::fs::fstat(&memory)?;
        let page = page_of(memory.as_fd()).ok_or(io::ErrorKind::InvalidInput)?;
        let written = File::from(memfd_create(c"hugemm-lease-record", MemfdFlags::CLOEXEC)?);
        let record = Record { uid, account, name, secret, inode: stat.st_ino };
        let kept = Kept { memory, page, bytes: stat.st_size as u64, record, written };
        kept.write(&serde_json::to_vec(&kept.record)?)?;
        Ok(kept)
    }

    /// What a predecessor kept, of all that it left; and the rest.
    pub fn find(left: Vec<OwnedFd>) -> (Vec<Self>, Vec<OwnedFd>) {
        let (mut records, mut files, mut found) = (Vec::new(), Vec::new(), Vec::new());
        for fd in left {
            let file = File::from(fd);
            match Record::read(&file) {
                Some(record) => records.push((record, file)),
                None => files.push(OwnedFd::from(file)),
            }
        }
        for (record, written) in records {
            let stats = || files.iter().map(|file| rustix::fs::fstat(file).ok());
            let index = stats().position(|stat| stat.is_some_and(|stat| stat.st_ino == record.inode));
            let known = index.map(|index| (page_of(files[index].as_fd()), rustix::fs::fstat(&files[index])));
            match (index, known) {
                (Some(index), Some((Some(page), Ok(stat)))) => {
                    let memory = files.swap_remove(index);
                    found.push(Kept { memory, page, bytes: stat.st_size as u64, record, written });
                }
                _ => files.push(written.into()),
            }
        }
        (found, files)
    }

    /// Whose it is, and its name.
    pub fn key(&self) -> (u32, String) {
        (self.record.uid, self.record.name.clone())
    }

    /// By which line of the policy it counts.
    pub fn account(&self) -> Who {
        self.record.account
    }

    /// Its pages.
    pub fn page(&self) -> Page {
        self.page
    }

    /// Its length.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What its user was given.
    pub fn secret(&self) -> &str {
        &self.record.secret
    }

    /// Writes that it is no longer kept, for a manager may let go of it later than it was told.
    pub fn forget(&self) {
        // A record that is not to be written is one that is not to be read.
        let _ = self.write(b"");
    }

    fn write(&self, text: &[u8]) -> io::Result<()> {
        let mut record = [b' '; RECORD];
        record.get_mut(..text.len()).ok_or(io::ErrorKind::InvalidInput)?.copy_from_slice(text);
        self.written.write_all_at(&record, 0)
    }

    /// What a manager holds: the memory, and what is written beside it.
    pub(crate) fn both(&self) -> [BorrowedFd<'_>; 2] {
        [self.memory.as_fd(), self.written.as_fd()]
    }

    /// The file's number, which its name with the manager is made of.
    pub(crate) fn inode(&self) -> u64 {
        self.record.inode
    }

    /// The memory itself.
    pub(crate) fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// The memory for one program, and what that gives it to. `None`: somebody has it still. A program that unlocks it (flock(2)) can be
    /// given it twice.
    ///
    /// # Errors
    ///
    /// The system's: no descriptor is left, no /proc.
    pub(crate) fn lend(&self) -> io::Result<Option<OwnedFd>> {
        if self.is_lent() {
            return Ok(None);
        }
        let lent = opened_again(&self.memory)?;
        flock(&lent, FlockOperation::NonBlockingLockExclusive)?;
        Ok(Some(lent))
    }

    /// Whether anybody has it. Not beside a [`lend`](Self::lend).
    pub(crate) fn is_lent(&self) -> bool {
        let is_free = flock(&self.memory, FlockOperation::NonBlockingLockShared).is_ok();
        let _ = flock(&self.memory, FlockOperation::Unlock);
        // Whoever has a descriptor may be opening it by its path, for which it must stay that user's.
        !is_free || while_ours(&self.memory, || is_only_one(self.memory.as_fd())) == Ok(Some(false))
    }
}

/// A file of this process's or of one of its users', opened once more.
fn opened_again(file: &OwnedFd) -> io::Result<OwnedFd> {
    Ok(while_ours(file, || open(&format!("/proc/self/fd/{}", file.as_raw_fd())))??)
}

impl Record {
    /// Only what this user's daemon has written: an owner of memory can make that as long as a record, and write one into it.
    fn read(file: &File) -> Option<Self> {
        let found = file.metadata().ok()?;
        if found.size() != RECORD as u64 || found.uid() != rustix::process::geteuid().as_raw() {
            return None;
        }
        let mut text = [0; RECORD];
        file.read_exact_at(&mut text, 0).ok()?;
        serde_json::from_slice(&text).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_file::MemoryFile;
    use rustix::fs::{Uid, fchown};

    /// An owner of transparent pages can cut its memory to a record's length, and write into it that others' memory is its own.
    #[test]
    fn a_record_that_an_owner_has_written_is_none() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root has other users");
            return;
        }
        let kept = |uid, name: &str| {
            let memory = MemoryFile::new(Page::Transparent, Page::Transparent.bytes()).expect("a file").into_fd();
            Kept::new(memory, (uid, Who::User(uid)), name.to_owned(), name.to_owned()).expect("a record")
        };
        let (owner, forged) = (kept(1000, "owner"), kept(1000, "forged"));
        let text = Record { uid: 2000, inode: owner.inode(), ..forged.record };
        forged.written.write_all_at(&serde_json::to_vec(&text).expect("text"), 0).expect("written");
        let find = || {
            let copies = [forged.written.as_fd(), owner.memory.as_fd(), owner.written.as_fd()];
            let (found, _) = Kept::find(copies.map(|fd| fd.try_clone_to_owned().expect("a descriptor")).into());
            found.iter().map(|kept| kept.record.uid).collect::<Vec<_>>()
        };
        assert_eq!(find(), [2000], "the first that names it");
        fchown(&forged.written, Some(Uid::from_raw(2000)), None).expect("root may");
        assert_eq!(find(), [1000]);
    }
}
