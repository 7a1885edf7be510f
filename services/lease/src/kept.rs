//! Memory that outlives its program, and what is written beside it: a service manager holds both, so that a daemon that is started
//! anew knows whose the memory is.
//!
//! Whether anybody has the memory, the kernel says. It is lent as an open file of its own, which is locked (flock(2)): the kernel gives
//! that lock up when the last descriptor and mapping of that open file is gone, whoever had asked for it. What a program has opened by a
//! path (`/proc/PID/fd/N`) is another open file; those the kernel counts, but from Linux 7.0 on not on hugetlbfs. A program that opens it
//! so there, and closes the descriptor that it was given, has memory that is given again.

use crate::left::{Watch, Watches};
use crate::memory_file::{Page, page_of};
use crate::own_file::is_only_one;
use crate::policy::{Asker, Who};
use rustix::fs::{
    FlockOperation, Gid, MemfdFlags, Mode, OFlags, Uid, fchmod, fchown, fcntl_setfl, flock, memfd_create,
};
use rustix::io::Errno;
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};
use serde_json::{Map, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// What memory and record are called where a service manager holds them: this, and the number of the memory's file.
const NAME: &str = "kept-";

/// A record's length: it is written by one call, so that a daemon that is killed leaves the old one or the new one.
const RECORD: usize = 4096;

/// The longest name, of this or of a template.
pub const MOST_NAME: usize = 200;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    uid: u32,
    gid: u32,
    /// By which line of the policy it was leased.
    account: Who,
    name: String,
    secret: String,
    /// The memory's length, which its owner may change.
    bytes: u64,
}

/// What a predecessor left.
#[derive(Debug, Default)]
pub struct Found {
    /// What it kept.
    pub kept: Vec<Kept>,
    /// The names of what it kept by a record that nobody here can read.
    pub unread: Vec<String>,
    /// What is of no use.
    pub rest: Vec<(String, OwnedFd)>,
}

/// Memory that is kept, with its record.
#[derive(Debug)]
pub struct Kept {
    memory: OwnedFd,
    inode: u64,
    page: Page,
    record: Record,
    written: File,
    /// Of who asks the kernel about the memory.
    turn: Mutex<()>,
}

impl Kept {
    /// Writes a record for memory that a user keeps.
    ///
    /// # Errors
    ///
    /// The system's: no descriptor, no memory.
    pub fn new(memory: OwnedFd, whose: (&Asker, Who), name: String, secret: String) -> io::Result<Self> {
        let (Asker { uid, gid, .. }, account) = whose;
        let page = page_of(memory.as_fd()).ok_or(io::ErrorKind::InvalidInput)?;
        let written = File::from(memfd_create(c"hugemm-lease-record", MemfdFlags::CLOEXEC)?);
        let bytes = rustix::fs::fstat(&memory)?.st_size as u64;
        let record = Record { uid: *uid, gid: *gid, account, name, secret, bytes };
        let mut kept = Self::of(memory, page, record, written)?;
        // By a path: the kernel counts only those.
        kept.memory = kept.while_ours(|| kept.open())??;
        kept.write(&serde_json::to_vec(&kept.record)?)?;
        Ok(kept)
    }

    fn of(memory: OwnedFd, page: Page, record: Record, written: File) -> io::Result<Self> {
        let inode = rustix::fs::fstat(&memory)?.st_ino;
        Ok(Kept { memory, inode, page, record, written, turn: Mutex::new(()) })
    }

    /// What a predecessor kept, of all that it left under their names; and the rest. What an owner can write is memory, and no record.
    pub fn find(left: Vec<(String, OwnedFd)>) -> Found {
        let (mut memories, mut records, mut found) = (BTreeMap::new(), BTreeMap::new(), Found::default());
        for (name, fd) in left {
            let inode = rustix::fs::fstat(&fd).map(|stat| stat.st_ino);
            let other = match name.strip_prefix(NAME).and_then(|of| of.parse().ok()) {
                Some(of) if inode == Ok(of) => memories.insert(of, fd),
                Some(of) => records.insert(of, fd),
                None => Some(fd),
            };
            found.rest.extend(other.map(|fd| (name, fd)));
        }
        for (inode, memory) in memories {
            let written = records.remove(&inode).map(File::from).filter(is_record);
            let Some((page, written)) = page_of(memory.as_fd()).zip(written) else {
                found.rest.push((kept_name(inode), memory));
                continue;
            };
            match Record::read(&written, memory.as_fd()) {
                Ok(Some(record)) => {
                    // A predecessor may have ended while it asked.
                    let _ = flock(&memory, FlockOperation::Unlock);
                    found.kept.extend(Self::of(memory, page, record, written).ok());
                }
                Ok(None) => found.rest.push((kept_name(inode), memory)),
                Err(_) => found.unread.push(kept_name(inode)),
            }
        }
        found.rest.extend(records.into_iter().map(|(of, record)| (kept_name(of), record)));
        found
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
        self.record.bytes
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

    /// Their name with the manager.
    pub(crate) fn name_in_store(&self) -> String {
        kept_name(self.inode)
    }

    /// The memory itself.
    pub(crate) fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// The memory for one program, and what that gives it to. `None`: somebody has it still. May wait for its owner, who can keep the
    /// kernel busy with the file: with nothing locked that others want.
    ///
    /// # Errors
    ///
    /// The system's: no descriptor is left, no /proc.
    pub(crate) fn lend(&self) -> io::Result<Option<OwnedFd>> {
        let _turn = self.has_turn();
        // First: whoever has a descriptor may be opening it by its path, for which it must stay that user's.
        if self.is_locked() {
            return Ok(None);
        }
        let lent = self.while_ours(|| match is_only_one(self.memory.as_fd()) {
            Some(false) => Err(Errno::WOULDBLOCK),
            _ => self.open(),
        })?;
        match lent.and_then(|lent| flock(&lent, FlockOperation::NonBlockingLockExclusive).map(|()| lent)) {
            // Its owner has a lease of the kernel's on it (F_SETLEASE).
            Err(Errno::WOULDBLOCK) => Ok(None),
            lent => Ok(Some(lent?)),
        }
    }

    /// For who asks the kernel about it.
    pub(crate) fn has_turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether somebody has what was lent, as far as the lock says, or is given it just now. Waits for nobody.
    pub(crate) fn is_lent(&self) -> bool {
        let turn = self.turn.try_lock();
        matches!(turn, Err(TryLockError::WouldBlock)) || self.is_locked()
    }

    fn is_locked(&self) -> bool {
        let is_free = flock(&self.memory, FlockOperation::NonBlockingLockExclusive).is_ok();
        let _ = flock(&self.memory, FlockOperation::Unlock);
        !is_free
    }

    /// Has it watched whether anybody has the memory. Its owner cannot open it by a path meanwhile. May wait, as [`lend`](Self::lend).
    pub(crate) fn watch(&self, watches: &Watches) -> Result<Watch, Errno> {
        let _turn = self.has_turn();
        self.while_ours(|| watches.add(&self.memory))?
    }

    /// Another open file of the memory, for as long as this process may open it.
    fn open(&self) -> Result<OwnedFd, Errno> {
        let path = format!("/proc/self/fd/{}", self.memory.as_raw_fd());
        // Not waiting for who has a lease on it.
        let file = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())?;
        fcntl_setfl(&file, OFlags::empty())?;
        Ok(file)
    }

    /// Does something with the memory while it is this process's own. Where it may not be, it may be opened as it is, or not at all.
    fn while_ours<R>(&self, what: impl FnOnce() -> R) -> Result<R, Errno> {
        let stat = rustix::fs::fstat(&self.memory)?;
        // A predecessor may have ended here.
        let gid = if stat.st_uid == self.record.uid { stat.st_gid } else { self.record.gid };
        let (mode, needed) = (Mode::from_raw_mode(stat.st_mode), Mode::RUSR | Mode::WUSR);
        let _ = fchown(&self.memory, Some(geteuid()), None);
        if !mode.contains(needed) {
            // Its owner has taken these rights from itself, and from this process.
            let _ = fchmod(&self.memory, mode | needed);
        }
        let done = what();
        fchown(&self.memory, Some(Uid::from_raw(self.record.uid)), Some(Gid::from_raw(gid)))?;
        Ok(done)
    }
}

/// What the file of that number and its record are called in a manager's store.
fn kept_name(inode: u64) -> String {
    format!("{NAME}{inode}")
}

/// Only what this user's daemon has written: an owner of memory can make that as long as a record, and write one into it.
fn is_record(file: &File) -> bool {
    file.metadata().is_ok_and(|found| found.size() == RECORD as u64 && found.uid() == geteuid().as_raw())
}

impl Record {
    /// None of what is kept no more. What was not written down at first, the memory's file says.
    fn read(file: &File, memory: BorrowedFd<'_>) -> io::Result<Option<Self>> {
        let mut text = [0; RECORD];
        file.read_exact_at(&mut text, 0)?;
        if text.trim_ascii().is_empty() {
            return Ok(None);
        }
        let (mut record, stat) = (serde_json::from_slice::<Map<_, _>>(&text)?, rustix::fs::fstat(memory)?);
        let account = json!({ "User": record.get("uid") });
        for (name, value) in
            [("gid", stat.st_gid.into()), ("account", account), ("bytes", (stat.st_size as u64).into())]
        {
            record.entry(name).or_insert(value);
        }
        Ok(Some(serde_json::from_value(record.into())?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{BYTES, file, is_root, kept, stored};

    /// An owner of transparent pages can cut its memory to a record's length, and write into it that others' memory is its own.
    #[test]
    fn a_record_that_an_owner_has_written_is_none() {
        if !is_root("has other users") {
            return;
        }
        let (owner, forger) = (kept(file(1), 1000), kept(file(1), 2000));
        let forged = serde_json::to_vec(&Record { uid: 2000, ..owner.record.clone() }).expect("text");
        rustix::fs::ftruncate(&forger.memory, RECORD as u64).expect("its own");
        let mut text = [b' '; RECORD];
        text[..forged.len()].copy_from_slice(&forged);
        rustix::io::pwrite(&forger.memory, &text, 0).expect("written");
        // As if the daemon had ended while it asked about it.
        fchown(&forger.memory, Some(geteuid()), None).expect("root may");
        let find = |order: [&Kept; 2]| {
            let found = Kept::find(order.into_iter().flat_map(stored).rev().collect());
            assert!(found.rest.is_empty() && found.unread.is_empty());
            found.kept.iter().map(|kept| (kept.record.uid, kept.inode)).collect::<Vec<_>>()
        };
        let mut both = [(1000, owner.inode), (2000, forger.inode)];
        both.sort_by_key(|(_, inode)| *inode);
        assert_eq!([find([&owner, &forger]), find([&forger, &owner])], [both, both]);
    }

    /// A daemon that is upgraded has what the former one kept, whatever that wrote down; what it cannot read stays where it is, and it
    /// knows which that is.
    #[test]
    fn a_record_of_another_version_loses_nothing() {
        let uid = geteuid().as_raw();
        let found = |text: &str| {
            let kept = kept(file(1), uid);
            kept.write(text.as_bytes()).expect("written");
            let name = kept.name_in_store();
            let Found { kept, unread, rest } = Kept::find(stored(&kept).into());
            let kept: Vec<_> = kept.into_iter().map(|kept| kept.record).collect();
            (kept, unread == [name], rest.len())
        };
        let first = format!(r#"{{"uid":{uid},"name":"cache","secret":"secret","inode":7,"owner":null}}"#);
        let (gid, account) = (Asker::user(uid).gid, Who::User(uid));
        let record = Record { uid, gid, account, name: "cache".to_owned(), secret: "secret".to_owned(), bytes: BYTES };
        assert_eq!(found(&first), (vec![record], false, 0));
        assert_eq!(found(r#"{"owners":[7]}"#), (vec![], true, 0), "of a later version");
        assert_eq!(found(""), (vec![], false, 1), "forgotten");
    }
}
