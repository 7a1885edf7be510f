//! A snapshot's file, whose bytes memory is filled with instead of zeroes: which one it is, who may have its bytes, and how they are
//! read past the page cache into memory that is clear.
//!
//! What the file has no blocks for is not read. A digest of all bytes says that each reading found the same.

use crate::memory_file::{FileError, MemoryFile};
use crate::policy::Asker;
use rustix::fs::{Advice, Mode, OFlags, SeekFrom, Stat, fadvise, fstat, open, seek, stat};
use rustix::io::Errno;
use sha2::{Digest, Sha256};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// A name, and the file whose bytes are leased under it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    /// As it is asked for.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
}

/// Why memory cannot be filled with a file's bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// No such file, no right to read it, a page of it that is broken.
    #[error("{} cannot be read at byte {at}: {cause}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// From where.
        at: u64,
        /// What the system said.
        cause: Errno,
    },
    /// A directory, a device, or nothing in it.
    #[error("{} is no file with bytes in it", .0.display())]
    NoFile(PathBuf),
    /// Somebody writes it.
    #[error("{} was changed, or replaced, while it was read; put a new one in its place by renaming it", .0.display())]
    Changed(PathBuf),
    /// It says that it was not written since the first reading.
    #[error("{} has other bytes than when it was read first, and its times are the same; put a good one in its place", .0.display())]
    Differs(PathBuf),
    /// Its disk, or who serves that.
    #[error("{} does not answer: nothing was read in {} s; it is tried again when it does", path.display(), seconds)]
    Silent {
        /// The file.
        path: PathBuf,
        /// For how long nothing was.
        seconds: u64,
    },
    /// The memory that they are read into.
    #[error(transparent)]
    Memory(#[from] FileError),
}

/// A file as it was written last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Version {
    file: (u64, u64),
    /// Its length.
    pub(crate) bytes: u64,
    written: (i64, i64),
    changed: (i64, i64),
    owner: (u32, u32),
    mode: u32,
}

impl Version {
    pub(crate) fn of(path: &Path) -> Result<Self, TemplateError> {
        Self::from_stat(path, stat(path))
    }

    fn from_stat(path: &Path, stat: Result<Stat, Errno>) -> Result<Self, TemplateError> {
        let stat = stat.map_err(unreadable(path, 0))?;
        if !rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file() || stat.st_size <= 0 {
            return Err(TemplateError::NoFile(path.to_owned()));
        }
        Ok(Version {
            file: (stat.st_dev, stat.st_ino),
            bytes: stat.st_size as u64,
            written: (stat.st_mtime, stat.st_mtime_nsec as i64),
            changed: (stat.st_ctime, stat.st_ctime_nsec as i64),
            owner: (stat.st_uid, stat.st_gid),
            mode: stat.st_mode,
        })
    }

    /// Whether that user may read it where it lies at `path`: the modes of the file and of each directory that it is in say so. Where there
    /// is a list of access besides, only its owner may. Asks the file system: with nothing locked.
    pub(crate) fn is_readable_by(&self, path: &Path, asker: &Asker) -> bool {
        let read = [Mode::RUSR, Mode::RGRP, Mode::ROTH];
        if asker.uid == 0 {
            return true;
        }
        let Ok(path) = std::fs::canonicalize(path) else { return false };
        // What is judged lies there.
        Version::of(&path).is_ok_and(|version| version == *self)
            && allows(&path, self.owner, self.mode, asker, read)
            && path.ancestors().skip(1).all(|directory| {
                stat(directory).is_ok_and(|of| {
                    let search = [Mode::XUSR, Mode::XGRP, Mode::XOTH];
                    allows(directory, (of.st_uid, of.st_gid), of.st_mode, asker, search)
                })
            })
    }
}

/// Whether a mode gives that user its owner's, its group's or everybody's bit.
fn allows(path: &Path, (uid, gid): (u32, u32), mode: u32, asker: &Asker, [owners, groups, others]: [Mode; 3]) -> bool {
    let bit = match asker {
        asker if asker.uid == uid => owners,
        // The group's bits are then the list's mask.
        _ if has_list(path) => return false,
        asker if asker.gid == gid || asker.groups.contains(&gid) => groups,
        _ => others,
    };
    Mode::from_raw_mode(mode).contains(bit)
}

/// Whether a list of access says who may; where that is not known, one may.
fn has_list(path: &Path) -> bool {
    ["system.posix_acl_access", "system.nfs4_acl"]
        .into_iter()
        .any(|name| !matches!(rustix::fs::getxattr(path, name, &mut [0_u8; 0]), Err(Errno::NODATA | Errno::OPNOTSUPP)))
}

fn unreadable(path: &Path, at: u64) -> impl Fn(Errno) -> TemplateError {
    move |cause| TemplateError::Unreadable { path: path.to_owned(), at, cause }
}

/// A file that is being read.
#[derive(Debug)]
pub(crate) struct Source {
    path: PathBuf,
    file: OwnedFd,
    pub(crate) version: Version,
    /// Past the page cache, where the file system can.
    is_direct: bool,
    digest: Sha256,
}

/// What a direct reading begins and ends at.
const BLOCK: u64 = 4096;

/// How much is read at a time, in bytes: whole blocks.
const PART: u64 = 4 << 20;

impl Source {
    pub(crate) fn open(path: &Path) -> Result<Self, TemplateError> {
        // No device is opened: that could do something, or wait.
        Version::of(path)?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
        let opened = |flags| open(path, flags, Mode::empty());
        let (file, is_direct) = match opened(flags | OFlags::DIRECT) {
            Err(Errno::INVAL) => (opened(flags), false),
            file => (file, true),
        };
        let file = file.map_err(unreadable(path, 0))?;
        let version = Version::from_stat(path, fstat(&file))?;
        Ok(Source { path: path.to_owned(), file, version, is_direct, digest: Sha256::new() })
    }

    /// Reads its bytes `from` to `to`, in the order of the file, into memory that is clear; says at each [`PART`] that it goes on.
    pub(crate) fn read(
        &mut self,
        into: &MemoryFile,
        from: u64,
        to: u64,
        goes_on: &dyn Fn(),
    ) -> Result<(), TemplateError> {
        let end = to.min(self.version.bytes);
        into.with_bytes(from, to, |memory| {
            let mut at = from;
            while at < end {
                let data = match seek(&self.file, SeekFrom::Data(at)) {
                    // Nothing but a hole is left.
                    Err(Errno::NXIO) => break,
                    // The file system does not know.
                    Err(Errno::INVAL) => at,
                    other => other.map_err(unreadable(&self.path, at))?,
                };
                let hole = seek(&self.file, SeekFrom::Hole(data)).unwrap_or(end);
                let (first, last) = (data / BLOCK * BLOCK, hole.min(end));
                if first.max(at) < last {
                    self.read_exactly(memory, from, first.max(at), last, goes_on)?;
                }
                at = hole.max(at + 1);
            }
            for part in memory[..end.saturating_sub(from) as usize].chunks(PART as usize) {
                self.digest.update(part);
                goes_on();
            }
            Ok(())
        })?
    }

    fn read_exactly(
        &mut self,
        memory: &mut [u8],
        from: u64,
        first: u64,
        last: u64,
        goes_on: &dyn Fn(),
    ) -> Result<(), TemplateError> {
        let mut at = first;
        while at < last {
            // Whole blocks; the memory has room for the last, for it is whole pages.
            goes_on();
            let to = last.next_multiple_of(BLOCK).min(at.saturating_add(PART));
            let room = &mut memory[(at - from) as usize..(to - from) as usize];
            match rustix::io::retry_on_intr(|| rustix::io::pread(&self.file, &mut *room, at)) {
                Ok(0) => return Err(TemplateError::Changed(self.path.clone())),
                Ok(got) => at += got as u64,
                Err(Errno::INVAL) if self.is_direct => {
                    let flags = rustix::fs::fcntl_getfl(&self.file).map_err(unreadable(&self.path, at))?;
                    rustix::fs::fcntl_setfl(&self.file, flags - OFlags::DIRECT).map_err(unreadable(&self.path, at))?;
                    self.is_direct = false;
                }
                Err(cause) => return Err(unreadable(&self.path, at)(cause)),
            }
        }
        if !self.is_direct {
            let _ = fadvise(&self.file, first, std::num::NonZeroU64::new(last - first), Advice::DontNeed);
        }
        Ok(())
    }

    /// The digest of all of it, as `sha256sum` says it, if it is the file that it was when it was opened.
    pub(crate) fn end(self) -> Result<String, TemplateError> {
        let same = [Version::from_stat(&self.path, fstat(&self.file)), Version::of(&self.path)];
        if same.iter().any(|version| version.as_ref() != Ok(&self.version)) {
            return Err(TemplateError::Changed(self.path));
        }
        Ok(self.digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_file::Page;
    use std::fs::{self, File};
    use std::os::unix::fs::FileExt;

    const BYTES: u64 = 4 << 20;

    /// The bits of a file's group are a list's mask, where there is a list, and say nothing of its group.
    #[test]
    fn a_list_of_access_is_not_taken_for_a_mode() {
        let (path, _file) = source("list");
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o640)).expect("its mode");
        let (uid, gid) = Version::of(&path).expect("a file").owner;
        let asker = Asker { uid: uid + 1, gid, groups: Vec::new() };
        let may = || Version::of(&path).expect("a file").is_readable_by(&path, &asker);
        let before = may();
        // The format of Linux's posix_acl_xattr.h: its owner rw, user 1234 r, its group nothing, mask r, others nothing.
        let entries = [(1, 6, u32::MAX), (2, 4, 1234), (4, 0, u32::MAX), (0x10, 4, u32::MAX), (0x20, 0, u32::MAX)];
        let entry = |(tag, may, id): (u16, u16, u32)| {
            [&tag.to_le_bytes()[..], &may.to_le_bytes()[..], &id.to_le_bytes()[..]].concat()
        };
        let list = [2_u32.to_le_bytes().to_vec(), entries.map(entry).concat()].concat();
        let set = rustix::fs::setxattr(&path, "system.posix_acl_access", &list, rustix::fs::XattrFlags::empty());
        let after = may();
        fs::remove_file(&path).expect("removed");
        match set {
            Ok(()) => assert_eq!((before, after), (true, false)),
            Err(why) => eprintln!("skipped: no lists of access here: {why}"),
        }
    }

    /// What may be read where a link leads now says nothing of the file that was seen behind it before.
    #[test]
    fn another_file_that_may_be_read_is_not_the_one_that_was_seen() {
        let [(seen, _one), (other, _two)] = ["seen", "other"].map(source);
        let asker = Asker { uid: u32::MAX - 1, gid: u32::MAX - 1, groups: Vec::new() };
        [&seen, &other].iter().for_each(|path| {
            fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).expect("its mode");
        });
        let version = Version::of(&seen).expect("a file");
        let may = [&seen, &other].map(|path| version.is_readable_by(path, &asker));
        [seen, other].iter().for_each(|path| fs::remove_file(path).expect("removed"));
        assert_eq!(may, [true, false]);
    }

    fn source(name: &str) -> (PathBuf, File) {
        let path = std::env::temp_dir().join(format!("hugemm-template-{name}-{}", std::process::id()));
        let file = File::options().create(true).truncate(true).read(true).write(true).open(&path).expect("a file");
        file.set_len(BYTES).expect("a length");
        file.write_all_at(b"snapshot", 3 << 20).expect("written");
        (path, file)
    }

    fn read(source: &mut Source) -> Result<(), TemplateError> {
        let memory = MemoryFile::new(Page::Transparent, BYTES).expect("a file");
        source.read(&memory, 0, BYTES / 2, &|| ())?;
        source.read(&memory, BYTES / 2, BYTES, &|| ())
    }

    /// How many pages of a file the page cache has.
    fn cached(file: &File) -> usize {
        let (rights, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
        let mut pages = [0; (BYTES / BLOCK) as usize];
        // SAFETY: at an address of the kernel's choice; nothing is touched there, and `pages` has a byte for each page.
        let said = unsafe {
            let at = rustix::mm::mmap(std::ptr::null_mut(), BYTES as usize, rights, flags, file, 0).expect("mapped");
            let said = libc::mincore(at, BYTES as usize, pages.as_mut_ptr());
            rustix::mm::munmap(at, BYTES as usize).expect("unmapped");
            said
        };
        assert_eq!(said, 0);
        pages.iter().filter(|page| **page & 1 == 1).count()
    }

    /// What a machine is filled with once takes no room from what is read again and again.
    #[test]
    fn a_template_leaves_the_page_cache_alone() {
        let (path, file) = source("cache");
        file.sync_all().expect("on the disk");
        fadvise(&file, 0, None, Advice::DontNeed).expect("a file");
        if cached(&file) > 0 {
            return eprintln!("skipped: {} is memory", path.display());
        }
        let mut opened = Source::open(&path).expect("opened");
        read(&mut opened).expect("read");
        assert_eq!(cached(&file), 0, "direct: {}", opened.is_direct);
        // As where the file system cannot.
        rustix::fs::fcntl_setfl(&opened.file, OFlags::empty()).expect("its own");
        opened.is_direct = false;
        read(&mut opened).expect("read");
        assert_eq!(cached(&file), 0, "through it, and out");
        fs::remove_file(&path).expect("its own");
    }

    /// However it changes while it is read: it is no good.
    #[test]
    fn a_file_that_changes_while_it_is_read_is_noticed() {
        type Change = fn(&Path, &File);
        let changes: [(&str, Change, bool); 4] = [
            ("stays", |_, _| {}, true),
            ("written", |_, file| file.write_all_at(b"x", 7).expect("written"), false),
            ("cut", |_, file| file.set_len(BYTES / 2 + 1).expect("cut"), false),
            ("replaced", |path, _| fs::rename(source("other").0, path).expect("replaced"), false),
        ];
        for (name, change, is_good) in changes {
            let (path, file) = source(name);
            let mut opened = Source::open(&path).expect("opened");
            // So that its times are others.
            std::thread::sleep(std::time::Duration::from_millis(20));
            change(&path, &file);
            let result = read(&mut opened).and_then(|()| opened.end());
            assert_eq!(result.as_ref().is_ok(), is_good, "{name}: {result:?}");
            if let Err(why) = result {
                assert_eq!(why, TemplateError::Changed(path.clone()), "{name}");
            }
            fs::remove_file(path).expect("removed");
        }
    }

    /// What the file has no blocks for is not read: nothing could be, here.
    #[test]
    fn holes_are_not_read() {
        let (path, file) = source("hole");
        file.set_len(0).and_then(|()| file.set_len(BYTES)).expect("nothing but a hole");
        let mut opened = Source::open(&path).expect("opened");
        opened.file = open(&path, OFlags::WRONLY, Mode::empty()).expect("opened");
        assert_eq!(read(&mut opened), Ok(()));
        fs::remove_file(path).expect("removed");
    }

    /// A page that the disk does not give, as any error of a reading: the line says where.
    #[test]
    fn a_page_that_cannot_be_read_is_named() {
        let (path, _file) = source("broken");
        let mut opened = Source::open(&path).expect("opened");
        // A descriptor that nothing can be read from.
        opened.file = open(&path, OFlags::WRONLY, Mode::empty()).expect("opened");
        let why = read(&mut opened).expect_err("it cannot be read").to_string();
        assert_eq!(why, format!("{} cannot be read at byte {}: {}", path.display(), 3 << 20, Errno::BADF));
        fs::remove_file(path).expect("removed");
    }
}
