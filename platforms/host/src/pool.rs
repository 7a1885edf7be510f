//! Hugetlb pools, raised for a while and put back.
//!
//! Linux keeps a pool of huge pages for each size, and a file that says how many there should be.
//! [`HugetlbPool::ensure`] raises it by what is missing, checks what the kernel really gave, and returns a [`PoolGuard`] that
//! puts it back.
//!
//! - Only what was added is taken away again, by subtraction from the value at that time: changes that others made
//!   meanwhile stay.
//! - Programs that use this module at the same time take turns (a lock on the pool's file), one step at a time.
//! - Pages still in use when the pool is put back become surplus pages, which the kernel frees when they are released.
//! - Pool pages are taken from the machine's free memory at once, so the machine's reserve is respected
//!   ([`Limits::check_machine`]).

use crate::interrupt::{self, Interrupted};
use crate::limits::{Limits, LimitsError, OverLimit};
use crate::roots::{Human, Roots, number};
use crate::topology::node_ids;
use hugemm_base::PageSize;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// A hugetlb pool could not be raised, read or put back. Each message is one line: the cause, then the way out.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// This kernel or CPU has no pool of this page size.
    #[error("there is no hugetlb pool of {size} pages here ({} is missing); use transparent huge pages instead",
        .directory.display())]
    Unsupported {
        /// The page size.
        size: PageSize,
        /// The directory that would describe the pool.
        directory: PathBuf,
    },
    /// There is no such NUMA node.
    #[error("NUMA node {node} does not exist; the nodes here are {existing:?}")]
    NoSuchNode {
        /// The node asked for.
        node: u32,
        /// The nodes there are.
        existing: Vec<u32>,
    },
    /// The process may not change the pool.
    #[error(
        "the pool of {size} pages has {free} free pages, {wanted} are needed, and this process may not raise it; \
         run `{command}` first, or run as root"
    )]
    NoPermission {
        /// The page size.
        size: PageSize,
        /// Pages that are free and not reserved.
        free: u64,
        /// Pages wanted.
        wanted: u64,
        /// The command that raises the pool.
        command: String,
    },
    /// The missing pages would take more memory than the machine can spare.
    #[error("the pool of {size} pages cannot be raised: {source}")]
    TooLarge {
        /// The page size.
        size: PageSize,
        /// The bound that was met.
        source: OverLimit,
    },
    /// The kernel gave fewer pages than asked for. The pool has been put back.
    #[error("the kernel gave {got} of {wanted} free {size} pages and the pool was put back: {cause}")]
    Short {
        /// The page size.
        size: PageSize,
        /// Free pages that there were at the most.
        got: u64,
        /// Pages wanted.
        wanted: u64,
        /// Cause and remedy.
        cause: &'static str,
    },
    /// Interrupted while raising. The pool has been put back.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
    /// The size of the pool cannot be computed in 64 bits.
    #[error("{pages} pages of {size} are more than any machine holds; ask for less")]
    Overflow {
        /// The page size.
        size: PageSize,
        /// Pages wanted.
        pages: u64,
    },
    /// Free memory cannot be known, so that raising the pool would be a gamble.
    #[error(transparent)]
    Limits(#[from] LimitsError),
    /// A file of the pool cannot be read or written.
    #[error("{} cannot be used: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The pool could not be put back.
    #[error("the pool of {size} pages could not be put back ({source}); run `{command}`")]
    Restore {
        /// The page size.
        size: PageSize,
        /// The command that puts it back.
        command: String,
        /// The system's reason.
        source: io::Error,
    },
}

/// A pool's numbers of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStatus {
    /// All pages of the pool, surplus ones included.
    pub total: u64,
    /// Pages that hold nothing.
    pub free: u64,
    /// Free pages that are promised to mappings. Known for the whole machine only; 0 for one node.
    pub reserved: u64,
    /// Pages that go back to the system when they are released.
    pub surplus: u64,
    /// How many surplus pages the kernel may make by itself. Known for the whole machine only.
    pub overcommit: u64,
}

impl PoolStatus {
    /// Free pages that are promised to nobody.
    pub fn unreserved(&self) -> u64 {
        self.free.saturating_sub(self.reserved)
    }

    /// Pages that stay in the pool when they are released: the number that the kernel's file sets.
    pub fn persistent(&self) -> u64 {
        self.total.saturating_sub(self.surplus)
    }
}

/// Access to the machine's hugetlb pools.
#[derive(Clone, Debug)]
pub struct HugetlbPool {
    roots: Roots,
    step_bytes: u64,
}

impl Default for HugetlbPool {
    fn default() -> Self {
        Self::at(Roots::default())
    }
}

impl HugetlbPool {
    /// The running machine's pools.
    pub fn new() -> Self {
        Self::default()
    }

    /// The pools described below the given roots.
    pub fn at(roots: Roots) -> Self {
        // One step is what an interruption waits for: about a second where memory is cold.
        Self { roots, step_bytes: 1 << 30 }
    }

    /// Raises pools by at most `bytes` in one write to the kernel, 1 GiB unless set; at least one page. Larger steps
    /// are faster by little and cannot be interrupted by other threads.
    pub fn with_step(mut self, bytes: u64) -> Self {
        self.step_bytes = bytes;
        self
    }

    /// The pool's numbers, of the whole machine or of one node. Reads five small files.
    ///
    /// # Errors
    /// [`PoolError::Unsupported`], [`PoolError::NoSuchNode`], [`PoolError::Io`].
    pub fn status(&self, size: PageSize, node: Option<u32>) -> Result<PoolStatus, PoolError> {
        self.files(size, node)?.status()
    }

    /// Makes sure that `pages` pages of `size` are free and promised to nobody, on `node` if given, until the guard is
    /// dropped. Pages that are free already are counted first; only what is missing is added.
    ///
    /// Others may take those pages before the caller maps them: mapping them can still fail, and says so. Takes as long
    /// as the kernel takes to find the pages (and, for 1 GiB pages, to move others out of the way).
    ///
    /// # Errors
    /// Any [`PoolError`] but `Restore`; whatever had been added has been put back by then.
    pub fn ensure(&self, size: PageSize, pages: u64, node: Option<u32>) -> Result<PoolGuard, PoolError> {
        let files = self.files(size, node)?;
        let before = self.usable(&files, size)?;
        let missing = pages.saturating_sub(before);
        let guard = PoolGuard::register(files, size);
        if missing == 0 {
            return Ok(guard);
        }
        let bytes = missing.checked_mul(size.bytes()).ok_or(PoolError::Overflow { size, pages })?;
        let limits = Limits::read_from(&self.roots)?;
        limits.check_machine(bytes).map_err(|source| PoolError::TooLarge { size, source })?;

        let step = (self.step_bytes / size.bytes()).max(1);
        let mut left = missing;
        while left > 0 {
            interrupt::check()?;
            let asked = left.min(step);
            match guard.entry.raise(asked) {
                Ok(given) if given < asked => break,
                Ok(_) => left -= asked,
                Err(refusal) => return Err(refusal.explain(&guard.entry, before, pages)),
            }
        }

        let got = self.usable(&guard.entry.files, size)?;
        if got >= pages {
            return Ok(guard);
        }
        // An interrupted write gives fewer pages, too; say the cause that is true.
        let interrupted = interrupt::check();
        guard.release()?;
        interrupted?;
        Err(PoolError::Short { size, got, wanted: pages, cause: short_cause(size) })
    }

    /// The shell command that adds `pages` pages to a pool as it is now.
    ///
    /// # Errors
    /// As [`status`](Self::status).
    pub fn command_to_add(&self, size: PageSize, pages: u64, node: Option<u32>) -> Result<String, PoolError> {
        let files = self.files(size, node)?;
        Ok(files.command(files.status()?.persistent().saturating_add(pages)))
    }

    /// Free pages of the pool that are promised to nobody. A node's own files do not tell promises, so that the whole
    /// machine's bound those, too.
    fn usable(&self, files: &PoolFiles, size: PageSize) -> Result<u64, PoolError> {
        let own = files.status()?.unreserved();
        if files.node.is_none() {
            return Ok(own);
        }
        Ok(own.min(self.files(size, None)?.status()?.unreserved()))
    }

    fn files(&self, size: PageSize, node: Option<u32>) -> Result<PoolFiles, PoolError> {
        let name = format!("hugepages-{}kB", size.bytes() >> 10);
        let whole = self.roots.sys.join("kernel/mm/hugepages").join(&name);
        if !whole.is_dir() {
            return Err(PoolError::Unsupported { size, directory: whole });
        }
        let directory = match node {
            None => whole,
            Some(node) => {
                let directory = self.roots.sys.join(format!("devices/system/node/node{node}/hugepages")).join(&name);
                if !directory.is_dir() {
                    return Err(PoolError::NoSuchNode { node, existing: node_ids(&self.roots) });
                }
                directory
            }
        };
        Ok(PoolFiles { directory, node })
    }
}

fn short_cause(size: PageSize) -> &'static str {
    match size {
        PageSize::Size1G => {
            "free memory has no more aligned runs of that size; reserve them at boot with the kernel parameters \
             hugepagesz=1G hugepages=N, or use 2MB pages"
        }
        _ => {
            "free memory is fragmented or short; stop other programs or run \
             `echo 1 | sudo tee /proc/sys/vm/compact_memory`, then try again"
        }
    }
}

/// The files of one pool, of the whole machine or of one node.
#[derive(Debug)]
struct PoolFiles {
    directory: PathBuf,
    node: Option<u32>,
}

impl PoolFiles {
    fn status(&self) -> Result<PoolStatus, PoolError> {
        let need = |name: &str| {
            let path = self.directory.join(name);
            let text = std::fs::read_to_string(&path).map_err(|source| PoolError::Io { path: path.clone(), source })?;
            text.trim().parse().map_err(|_| PoolError::Io { path, source: ErrorKind::InvalidData.into() })
        };
        let may = |name: &str| number(self.directory.join(name)).unwrap_or(0);
        Ok(PoolStatus {
            total: need("nr_hugepages")?,
            free: need("free_hugepages")?,
            reserved: may("resv_hugepages"),
            surplus: may("surplus_hugepages"),
            overcommit: may("nr_overcommit_hugepages"),
        })
    }

    fn setting(&self) -> PathBuf {
        self.directory.join("nr_hugepages")
    }

    /// The number of persistent pages.
    fn persistent(&self) -> io::Result<u64> {
        let total = number(self.setting()).ok_or_else(|| io::Error::from(ErrorKind::InvalidData))?;
        Ok(total.saturating_sub(number(self.directory.join("surplus_hugepages")).unwrap_or(0)))
    }

    fn set(&self, pages: u64) -> io::Result<()> {
        std::fs::write(self.setting(), format!("{pages}\n"))
    }

    fn command(&self, pages: u64) -> String {
        format!("echo {pages} | sudo tee {}", self.setting().display())
    }

    /// Keeps other programs that use this module out until dropped. Gives up after a while, or where the file cannot be
    /// locked: being alone is good manners here, not safety.
    fn exclusive(&self) -> Option<File> {
        let file = File::open(self.setting()).ok()?;
        let start = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Some(file),
                Err(std::fs::TryLockError::WouldBlock) if start.elapsed() < Duration::from_secs(5) => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(_) => return None,
            }
        }
    }
}

/// What this process has added to one pool and must take away again.
#[derive(Debug)]
struct Entry {
    files: PoolFiles,
    size: PageSize,
    /// Pages added. Changed under [`TURN`] only.
    added: AtomicU64,
    /// The setting before the first addition, for the message of last resort.
    original: AtomicU64,
}

/// Every entry that may have pages to give back. Held for moments only.
static ENTRIES: Mutex<Vec<Arc<Entry>>> = Mutex::new(Vec::new());

/// Held while a pool is changed, which can take seconds.
static TURN: Mutex<()> = Mutex::new(());

/// Set when the process is about to end: nothing may be added any more. Read and written under [`TURN`], or written
/// when that cannot be had.
static CLOSED: AtomicBool = AtomicBool::new(false);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Neither mutex guards an invariant that a panic could break half way.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The kernel refused to raise a pool.
struct Refusal(io::Error);

impl Refusal {
    fn explain(self, entry: &Entry, free: u64, wanted: u64) -> PoolError {
        let size = entry.size;
        if let Err(interrupted) = interrupt::check() {
            return interrupted.into();
        }
        match self.0.kind() {
            ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
                let target = entry.files.persistent().unwrap_or(free).saturating_add(wanted.saturating_sub(free));
                PoolError::NoPermission { size, free, wanted, command: entry.files.command(target) }
            }
            // What a kernel says that cannot make pages of this size after boot.
            ErrorKind::InvalidInput if size == PageSize::Size1G => {
                PoolError::Short { size, got: free, wanted, cause: short_cause(size) }
            }
            _ => PoolError::Io { path: entry.files.setting(), source: self.0 },
        }
    }
}

impl Entry {
    /// Adds up to `pages` pages in one write and returns how many the kernel gave.
    fn raise(&self, pages: u64) -> Result<u64, Refusal> {
        let _turn = lock(&TURN);
        if CLOSED.load(Ordering::Relaxed) {
            return Err(Refusal(ErrorKind::Interrupted.into()));
        }
        let _exclusive = self.files.exclusive();
        let before = self.files.persistent().map_err(Refusal)?;
        let target = before.checked_add(pages).ok_or_else(|| Refusal(ErrorKind::InvalidInput.into()))?;
        if self.added.load(Ordering::Relaxed) == 0 {
            self.original.store(before, Ordering::Relaxed);
        }
        let written = self.files.set(target);
        // Even a failed write may have added pages.
        let given = self.files.persistent().unwrap_or(before).saturating_sub(before).min(pages);
        self.added.fetch_add(given, Ordering::Relaxed);
        written.map_err(Refusal)?;
        Ok(given)
    }

    /// Takes away what was added.
    fn restore(&self, _turn: &MutexGuard<'_, ()>) -> Result<(), PoolError> {
        let added = self.added.load(Ordering::Relaxed);
        if added == 0 {
            return Ok(());
        }
        let _exclusive = self.files.exclusive();
        let now = self.files.persistent();
        let target = now.as_ref().map_or(self.original.load(Ordering::Relaxed), |now| now.saturating_sub(added));
        now.and_then(|_| self.files.set(target)).map_err(|source| PoolError::Restore {
            size: self.size,
            command: self.files.command(target),
            source,
        })?;
        self.added.store(0, Ordering::Relaxed);
        Ok(())
    }
}

/// Keeps a pool raised; puts it back when dropped, or on the second Ctrl-C.
///
/// Drop the memory that was mapped from the pool first. If putting it back fails on drop, the command that does it is
/// printed to standard error; [`release`](Self::release) returns that as an error instead.
#[derive(Debug)]
#[must_use = "the pool is put back at once when the guard is dropped"]
pub struct PoolGuard {
    entry: Arc<Entry>,
}

impl PoolGuard {
    fn register(files: PoolFiles, size: PageSize) -> Self {
        let entry = Arc::new(Entry { files, size, added: AtomicU64::new(0), original: AtomicU64::new(0) });
        lock(&ENTRIES).push(Arc::clone(&entry));
        Self { entry }
    }

    /// The size of the pool's pages.
    pub fn page_size(&self) -> PageSize {
        self.entry.size
    }

    /// How many pages were added, beyond those that were free already.
    pub fn added(&self) -> u64 {
        self.entry.added.load(Ordering::Relaxed)
    }

    /// Puts the pool back now.
    ///
    /// # Errors
    /// [`PoolError::Restore`], with the command that does it.
    pub fn release(self) -> Result<(), PoolError> {
        let result = self.put_back();
        // The error has been told; drop must not try and tell again.
        self.entry.added.store(0, Ordering::Relaxed);
        result
    }

    fn put_back(&self) -> Result<(), PoolError> {
        let turn = lock(&TURN);
        self.entry.restore(&turn)
    }
}

impl Drop for PoolGuard {
    fn drop(&mut self) {
        if let Err(error) = self.put_back() {
            eprintln!("{error}");
        }
        lock(&ENTRIES).retain(|entry| !Arc::ptr_eq(entry, &self.entry));
    }
}

/// The last resort before the process ends: puts every pool back, waiting at most `patience` for a change that is under
/// way, and returns what to tell the user. Nothing can be added afterwards.
pub(crate) fn restore_all_at_once(patience: Duration) -> Vec<String> {
    let start = Instant::now();
    let turn = loop {
        match TURN.try_lock() {
            Ok(turn) => break Some(turn),
            Err(TryLockError::Poisoned(turn)) => break Some(turn.into_inner()),
            Err(TryLockError::WouldBlock) if start.elapsed() < patience => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(TryLockError::WouldBlock) => break None,
        }
    };
    CLOSED.store(true, Ordering::Relaxed);
    let entries = lock(&ENTRIES).clone();
    let mut lines = Vec::new();
    for entry in entries {
        let (size, added) = (entry.size, entry.added.load(Ordering::Relaxed));
        match &turn {
            Some(turn) => match entry.restore(turn) {
                Ok(()) if added > 0 => lines.push(format!(
                    "put back the pool of {size} pages: {added} pages, {}",
                    Human(added.saturating_mul(size.bytes()))
                )),
                Ok(()) => {}
                Err(error) => lines.push(error.to_string()),
            },
            None => lines.push(format!(
                "the kernel is still changing the pool of {size} pages; to put it back, run `{}`",
                entry.files.command(entry.original.load(Ordering::Relaxed))
            )),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roots::testing::FakeMachine;

    const DIR: &str = "sys/kernel/mm/hugepages/hugepages-2048kB";

    /// A machine whose pool of 2 MiB pages has `nr` pages, all free. With `obeys`, free pages follow the setting, as on
    /// a machine that always has memory: the file is the same one.
    fn machine(nr: u64, obeys: bool) -> FakeMachine {
        let m = FakeMachine::new();
        m.file("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
            .file(&format!("{DIR}/nr_hugepages"), &format!("{nr}\n"))
            .file(&format!("{DIR}/resv_hugepages"), "0\n")
            .file(&format!("{DIR}/surplus_hugepages"), "0\n");
        if obeys {
            let link = m.path().join(DIR).join("free_hugepages");
            std::os::unix::fs::symlink("nr_hugepages", link).unwrap();
        } else {
            m.file(&format!("{DIR}/free_hugepages"), &format!("{nr}\n"));
        }
        m
    }

    fn setting(m: &FakeMachine) -> String {
        m.read(&format!("{DIR}/nr_hugepages"))
    }

    fn pool(m: &FakeMachine) -> HugetlbPool {
        HugetlbPool::at(m.roots())
    }

    #[test]
    fn only_what_is_missing_is_added_and_put_back_on_drop() {
        let m = machine(3, true);
        let guard = pool(&m).with_step(4 << 20).ensure(PageSize::Size2M, 10, None).unwrap();
        assert_eq!((guard.added(), setting(&m).as_str()), (7, "10"));
        drop(guard);
        assert_eq!(setting(&m), "3");
    }

    #[test]
    fn enough_free_pages_change_nothing() {
        let m = machine(5, false);
        let guard = pool(&m).ensure(PageSize::Size2M, 5, None).unwrap();
        assert_eq!(guard.added(), 0);
        m.file(&format!("{DIR}/nr_hugepages"), "1");
        guard.release().unwrap();
        assert_eq!(setting(&m), "1");
    }

    #[test]
    fn changes_by_others_meanwhile_stay() {
        let m = machine(2, true);
        let guard = pool(&m).ensure(PageSize::Size2M, 6, None).unwrap();
        m.file(&format!("{DIR}/nr_hugepages"), "16\n");
        drop(guard);
        assert_eq!(setting(&m), "12");

        let guard = pool(&m).ensure(PageSize::Size2M, 20, None).unwrap();
        m.file(&format!("{DIR}/nr_hugepages"), "3\n");
        drop(guard);
        assert_eq!(setting(&m), "0");
    }

    #[test]
    fn two_guards_put_back_in_any_order() {
        let m = machine(0, true);
        let a = pool(&m).ensure(PageSize::Size2M, 4, None).unwrap();
        let b = pool(&m).ensure(PageSize::Size2M, 6, None).unwrap();
        assert_eq!((a.added(), b.added()), (4, 2));
        drop(a);
        assert_eq!(setting(&m), "2");
        drop(b);
        assert_eq!(setting(&m), "0");
    }

    #[test]
    fn a_short_pool_is_put_back_and_says_why() {
        let m = machine(1, false);
        let err = pool(&m).ensure(PageSize::Size2M, 9, None).unwrap_err();
        assert!(matches!(err, PoolError::Short { got: 1, wanted: 9, .. }), "{err}");
        assert!(err.to_string().contains("compact_memory"), "{err}");
        assert_eq!(setting(&m), "1");
    }

    #[test]
    fn reserved_and_surplus_pages_are_not_ours() {
        let m = machine(4, true);
        m.file(&format!("{DIR}/resv_hugepages"), "3\n").file(&format!("{DIR}/surplus_hugepages"), "1\n");
        let status = pool(&m).status(PageSize::Size2M, None).unwrap();
        assert_eq!((status.unreserved(), status.persistent()), (1, 3));
        // 1 of 3 wanted is there. The write of 3 + 2 persistent pages turns the surplus page into one of them on a real
        // kernel; this machine just follows the file, which reads 5, one of them surplus.
        let err = pool(&m).ensure(PageSize::Size2M, 3, None).unwrap_err();
        assert!(matches!(err, PoolError::Short { got: 2, wanted: 3, .. }), "{err}");
        assert_eq!(pool(&m).status(PageSize::Size2M, None).unwrap().total, 3);
    }

    #[test]
    fn without_permission_the_command_is_named() {
        let m = machine(2, true);
        let path = m.path().join(DIR).join("nr_hugepages");
        let refusal = Refusal(ErrorKind::PermissionDenied.into());
        let guard = PoolGuard::register(PoolFiles { directory: m.path().join(DIR), node: None }, PageSize::Size2M);
        let text = refusal.explain(&guard.entry, 2, 1000).to_string();
        assert!(text.contains(&format!("`echo 1000 | sudo tee {}`", path.display())), "{text}");
        assert!(text.contains("2 free pages, 1000 are needed"), "{text}");

        if !rustix::process::geteuid().is_root() {
            let mut perms = std::fs::metadata(&path).unwrap().permissions();
            perms.set_readonly(true);
            std::fs::set_permissions(&path, perms).unwrap();
            let err = pool(&m).ensure(PageSize::Size2M, 8, None).unwrap_err();
            assert!(matches!(err, PoolError::NoPermission { .. }), "{err}");
        }
    }

    #[test]
    fn a_refused_write_is_an_error_and_changes_nothing() {
        let m = machine(0, false);
        // A directory in place of the setting: it can be opened for reading, not written, by root either.
        let path = m.path().join(DIR).join("nr_hugepages");
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        let err = pool(&m).ensure(PageSize::Size2M, 1, None).unwrap_err();
        assert!(matches!(&err, PoolError::Io { path: p, .. } if *p == path), "{err}");
    }

    #[test]
    fn more_than_the_machine_can_spare_is_refused() {
        let m = machine(0, true);
        let err = pool(&m).ensure(PageSize::Size2M, 4096, None).unwrap_err();
        assert!(matches!(err, PoolError::TooLarge { source: OverLimit::Machine { .. }, .. }), "{err}");
        let err = pool(&m).ensure(PageSize::Size2M, u64::MAX / 2, None).unwrap_err();
        assert!(matches!(err, PoolError::Overflow { .. }), "{err}");
        assert_eq!(setting(&m), "0");
    }

    #[test]
    fn sizes_and_nodes_that_do_not_exist_are_named() {
        let m = machine(0, true);
        m.file("sys/devices/system/node/online", "0-1\n");
        let err = pool(&m).ensure(PageSize::Size1G, 1, None).unwrap_err();
        assert!(err.to_string().contains("no hugetlb pool of 1GB pages"), "{err}");
        assert!(matches!(pool(&m).status(PageSize::Size4K, None), Err(PoolError::Unsupported { .. })));
        let err = pool(&m).ensure(PageSize::Size2M, 1, Some(7)).unwrap_err();
        assert!(matches!(&err, PoolError::NoSuchNode { node: 7, existing } if existing[..] == [0, 1]), "{err}");
    }

    #[test]
    fn a_nodes_pool_is_raised_by_its_own_file() {
        let m = machine(50, false);
        let dir = "sys/devices/system/node/node1/hugepages/hugepages-2048kB";
        m.file(&format!("{dir}/nr_hugepages"), "0\n").file(&format!("{dir}/surplus_hugepages"), "0\n");
        std::os::unix::fs::symlink("nr_hugepages", m.path().join(dir).join("free_hugepages")).unwrap();
        let guard = pool(&m).ensure(PageSize::Size2M, 5, Some(1)).unwrap();
        assert_eq!(m.read(&format!("{dir}/nr_hugepages")), "5");
        assert_eq!(setting(&m), "50");
        drop(guard);
        assert_eq!(m.read(&format!("{dir}/nr_hugepages")), "0");
    }

    #[test]
    fn the_running_machine_raises_or_says_why_not() {
        let pool = HugetlbPool::new();
        let Ok(before) = pool.status(PageSize::Size2M, None) else { return };
        match pool.ensure(PageSize::Size2M, before.unreserved() + 4, None) {
            Ok(guard) => {
                assert!(guard.added() >= 4);
                guard.release().unwrap();
            }
            Err(PoolError::NoPermission { command, .. }) => assert!(command.contains("sudo tee"), "{command}"),
            Err(PoolError::Short { .. } | PoolError::TooLarge { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }
}
