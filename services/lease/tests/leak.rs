//! Why a file is lent once: what an owner that is gone can still see of memory that is cleared in place and lent again.
//!
//! The two scenarios are red on the design that reuses files, which is built here to show it, and green on the daemon: with memory that is
//! clear, cut from a longer file, and with a template's bytes. What programs have by a budget is scanned by the tests that run some.

mod support;

use hugemm_lease::daemon::{Daemon, PoolConfig};
use hugemm_lease::filler::{Manners, fill};
use hugemm_lease::memory_file::{MemoryFile, Page};
use hugemm_lease::policy::Asker;
use hugemm_lease::status::Status;
use hugemm_lease::stock::Shapes;
use hugemm_lease::template::Template;
use hugemm_lease::wire::Wish;
use rustix::mm::{MapFlags, ProtFlags};
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use support::{PAGE, Pool, judged, wait_for};

/// A way to lend memory to one owner after the other.
trait Lender {
    fn lend(&mut self) -> OwnedFd;
    /// What it is to have, before zeroes.
    fn begins(&self) -> Vec<u8> {
        Vec::new()
    }
    /// The present owner's process is gone.
    fn ended(&mut self);
}

/// One file for all: taken back when its owner is gone and the kernel finds nobody else who has opened it, then cleared.
struct Reuse(OwnedFd);

impl Reuse {
    fn new() -> Self {
        let file = MemoryFile::new(Page::Huge2M, PAGE).expect("a file");
        file.fill(0, PAGE).expect("filled");
        // Opened by its path, for the kernel counts only such files when it is asked who has one.
        let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
        Reuse(std::fs::File::options().read(true).write(true).open(path).expect("opened").into())
    }

    fn file_lease(&self, kind: libc::c_int) {
        // SAFETY: asks the kernel about opened files; no memory is involved.
        let answer = unsafe { libc::fcntl(self.0.as_raw_fd(), libc::F_SETLEASE, kind) };
        assert_eq!(answer, 0, "the kernel would know of a second opened file: {}", std::io::Error::last_os_error());
    }
}

impl Lender for Reuse {
    fn lend(&mut self) -> OwnedFd {
        // What arrives in the other process shares the opened file, as what is sent over a socket does.
        self.0.try_clone().expect("a descriptor")
    }

    fn ended(&mut self) {
        self.file_lease(libc::F_WRLCK);
        Mapping::new(&self.0).bytes().fill(0);
        self.file_lease(libc::F_UNLCK);
    }
}

/// The daemon.
struct Fresh<'a> {
    daemon: &'a Daemon,
    kind: Kind,
    lease: Option<u64>,
}

/// What the daemon lends.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Whole,
    Cut,
    Template,
}

impl Lender for Fresh<'_> {
    fn lend(&mut self) -> OwnedFd {
        let ready = |status: Status| match self.kind {
            Kind::Template => status.templates.iter().all(|template| template.ready),
            _ => !status.ready.is_empty(),
        };
        wait_for("ready", || ready(self.daemon.status()));
        let template = matches!(self.kind, Kind::Template).then(|| "leak".to_owned());
        let wish = Wish { template, ..Wish::of(PAGE) };
        let (lease, file) = self.daemon.lease(&Asker::user(0), 1, &wish).expect("a lease");
        self.lease = Some(lease.lease);
        file
    }

    fn begins(&self) -> Vec<u8> {
        if matches!(self.kind, Kind::Template) { snapshot() } else { Vec::new() }
    }

    fn ended(&mut self) {
        self.daemon.end(self.lease.take().expect("a lease"));
    }
}

fn with_daemon<R>(kind: Kind, use_it: impl FnOnce(Fresh<'_>) -> R) -> R {
    let path = std::env::temp_dir().join(format!("hugemm-leak-{}", std::process::id()));
    std::fs::write(&path, snapshot()).expect("written");
    let (shapes, templates) = match kind {
        Kind::Whole => (vec![PAGE], vec![]),
        Kind::Cut => (vec![2 * PAGE], vec![]),
        Kind::Template => (vec![], vec![Template { name: "leak".to_owned(), path: path.clone() }]),
    };
    let config = PoolConfig::new(Page::Huge2M, Shapes(shapes), u64::MAX, 0);
    let daemon = Daemon::new(PoolConfig { templates, ..config });
    (0..daemon.config().templates.len()).for_each(|index| daemon.look_at_template(index));
    let result = std::thread::scope(|scope| {
        scope.spawn(|| fill(&daemon, &Manners::default()));
        let result = use_it(Fresh { daemon: &daemon, kind, lease: None });
        daemon.stop();
        result
    });
    std::fs::remove_file(path).expect("removed");
    result
}

/// A template's bytes: of less than a page.
fn snapshot() -> Vec<u8> {
    (0..PAGE - 5000).map(|at| if at % 3 == 0 { at as u8 } else { 0 }).collect()
}

struct Mapping(*mut u8);

impl Mapping {
    fn new(file: &OwnedFd) -> Self {
        let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: at an address of the kernel's choice; the file has that length.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), PAGE as usize, rights, flags, file, 0) };
        Mapping(at.expect("mapped").cast())
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: mapped by `new`, writable, for as long as `self`; the tests look at one mapping of a file at a time.
        unsafe { std::slice::from_raw_parts_mut(self.0, PAGE as usize) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`; no reference outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.0.cast(), PAGE as usize) };
    }
}

const FIRST: [u8; 16] = *b"what is the 1st'";
const SECRET: [u8; 16] = *b"the 2nd's secret";

/// The second owner: finds nothing of the first, and writes its secret.
fn second_owner(file: &OwnedFd, begins: &[u8]) {
    let mut memory = Mapping::new(file);
    let (first, rest) = memory.bytes().split_at(begins.len());
    assert!(first == begins && rest.iter().all(|byte| *byte == 0), "what is lent has no byte of anybody");
    memory.bytes()[..16].copy_from_slice(&SECRET);
}

/// The first owner leaves a page of its memory in a pipe, which holds the page itself and no file. What comes out of the pipe
/// when the second owner has written.
fn page_in_a_pipe(lender: &mut impl Lender) -> [u8; 16] {
    let file = lender.lend();
    let (mut read, write) = std::io::pipe().expect("a pipe");
    {
        let mut memory = Mapping::new(&file);
        memory.bytes()[..16].copy_from_slice(&FIRST);
        let part = libc::iovec { iov_base: memory.0.cast(), iov_len: 16 };
        // SAFETY: the part is of the mapping, which the kernel only reads.
        let moved = unsafe { libc::vmsplice(write.as_fd().as_raw_fd(), &raw const part, 1, 0) };
        assert_eq!(moved, 16);
    }
    drop(file);
    lender.ended();
    let second = lender.lend();
    second_owner(&second, &lender.begins());
    let mut bytes = [0; 16];
    read.read_exact(&mut bytes).expect("what the pipe holds");
    bytes
}

/// The first owner has a second descriptor of the same opened file, in a process that nobody watches. What it reads there when
/// the second owner has written.
fn duplicated_descriptor(lender: &mut impl Lender) -> [u8; 16] {
    let file = lender.lend();
    Mapping::new(&file).bytes()[..16].copy_from_slice(&FIRST);
    let duplicate = file.try_clone().expect("a duplicate");
    drop(file);
    lender.ended();
    let second = lender.lend();
    second_owner(&second, &lender.begins());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&Mapping::new(&duplicate).bytes()[..16]);
    bytes
}

/// The former owner's, which it still holds, the present one's, and a file of two that is filled meanwhile.
const PAGES: u64 = 5;

const KINDS: [Kind; 3] = [Kind::Whole, Kind::Cut, Kind::Template];

#[test]
fn a_page_parked_in_a_pipe_shows_the_next_owners_bytes_only_if_files_are_reused() {
    judged(|| {
        let Some(pool) = Pool::with_free(PAGES) else { return };
        assert_eq!(page_in_a_pipe(&mut Reuse::new()), SECRET, "the naive design leaks");
        for kind in KINDS {
            assert_eq!(with_daemon(kind, |mut daemon| page_in_a_pipe(&mut daemon)), FIRST, "{kind:?}");
        }
        pool.wait_until_lacks(0);
    });
}

#[test]
fn a_duplicated_descriptor_shows_the_next_owners_bytes_only_if_files_are_reused() {
    judged(|| {
        let Some(pool) = Pool::with_free(PAGES) else { return };
        assert_eq!(duplicated_descriptor(&mut Reuse::new()), SECRET, "the naive design leaks");
        for kind in KINDS {
            assert_eq!(with_daemon(kind, |mut daemon| duplicated_descriptor(&mut daemon)), FIRST, "{kind:?}");
        }
        pool.wait_until_lacks(0);
    });
}
