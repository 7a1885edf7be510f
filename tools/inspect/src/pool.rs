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

mod files;
mod survivor;

use crate::interrupt;
use crate::limits::Limits;
use crate::roots::{Human, Roots};
use crate::topology::node_ids;
use anyhow::{Context, Result, anyhow, bail};
use files::PoolFiles;
use hugemm_base::PageSize;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};
use survivor::Survivor;

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
    /// Raised by at most so much in one write to the kernel, one page at least. Larger steps are faster by little and cannot be
    /// interrupted by other threads.
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

    /// The pool's numbers, of the whole machine or of one node. Reads five small files.
    ///
    /// # Errors
    /// There is no such pool, or no such node, or a file cannot be read.
    pub fn status(&self, size: PageSize, node: Option<u32>) -> Result<PoolStatus> {
        self.files(size, node)?.status()
    }

    /// Makes sure that `pages` pages of `size` are free and promised to nobody, on `node` if given, until the guard is
    /// dropped. Pages that are free already are counted first; only what is missing is added.
    ///
    /// Others may take those pages before the caller maps them: mapping them can still fail, and says so. Takes as long
    /// as the kernel takes to find the pages (and, for 1 GiB pages, to move others out of the way).
    ///
    /// # Errors
    /// Why not, and the way out; whatever had been added has been put back by then.
    pub fn ensure(&self, size: PageSize, pages: u64, node: Option<u32>) -> Result<PoolGuard> {
        let files = self.files(size, node)?;
        let before = self.usable(&files, size)?;
        let missing = pages.saturating_sub(before);
        let guard = PoolGuard::register(files, size);
        if missing == 0 {
            return Ok(guard);
        }
        let bytes = missing
            .checked_mul(size.bytes())
            .with_context(|| format!("{pages} pages of {size} are more than any machine holds; ask for less"))?;
        Limits::read_from(&self.roots)?
            .check_machine(bytes)
            .map_err(|why| anyhow!("the pool of {size} pages cannot be raised: {why}"))?;

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
        Err(short(size, got, pages))
    }

    /// The shell command that adds `pages` pages to a pool as it is now.
    ///
    /// # Errors
    /// As [`status`](Self::status).
    pub fn command_to_add(&self, size: PageSize, pages: u64, node: Option<u32>) -> Result<String> {
        let files = self.files(size, node)?;
        Ok(files.command(files.status()?.persistent().saturating_add(pages)))
    }

    /// Free pages of the pool that are promised to nobody. A node's own files do not tell promises, so that the whole
    /// machine's bound those, too.
    fn usable(&self, files: &PoolFiles, size: PageSize) -> Result<u64> {
        let own = files.status()?.unreserved();
        if files.node.is_none() {
            return Ok(own);
        }
        Ok(own.min(self.files(size, None)?.status()?.unreserved()))
    }

    fn files(&self, size: PageSize, node: Option<u32>) -> Result<PoolFiles> {
        let name = format!("hugepages-{}kB", size.bytes() >> 10);
        let whole = self.roots.sys.join("kernel/mm/hugepages").join(&name);
        if !whole.is_dir() {
            bail!(
                "there is no hugetlb pool of {size} pages here ({} is missing); use transparent huge pages instead",
                whole.display()
            );
        }
        let directory = match node {
            None => whole,
            Some(node) => {
                let directory = self.roots.sys.join(format!("devices/system/node/node{node}/hugepages")).join(&name);
                if !directory.is_dir() {
                    bail!("NUMA node {node} does not exist; the nodes here are {:?}", node_ids(&self.roots));
                }
                directory
            }
        };
        Ok(PoolFiles { directory, node })
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
    /// What puts the pool back if this process is killed; from the first addition on. Used under [`TURN`] only.
    survivor: Mutex<Option<Survivor>>,
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

/// The kernel gave fewer pages than asked for.
fn short(size: PageSize, got: u64, wanted: u64) -> anyhow::Error {
    let cause = match size {
        PageSize::Size1G => {
            "free memory has no more aligned runs of that size; reserve them at boot with the kernel parameters \
             hugepagesz=1G hugepages=N, or use 2MB pages"
        }
        _ => {
            "free memory is fragmented or short; stop other programs or run \
             `echo 1 | sudo tee /proc/sys/vm/compact_memory`, then try again"
        }
    };
    anyhow!("the kernel gave {got} of {wanted} free {size} pages and the pool was put back: {cause}")
}

fn unusable(file: &Path, why: &io::Error) -> anyhow::Error {
    anyhow!("{} cannot be used: {why}", file.display())
}

/// The kernel refused to raise a pool.
struct Refusal(io::Error);

impl Refusal {
    fn explain(self, entry: &Entry, free: u64, wanted: u64) -> anyhow::Error {
        let size = entry.size;
        if let Err(interrupted) = interrupt::check() {
            return interrupted.into();
        }
        match self.0.kind() {
            ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
                let target = entry.files.persistent().unwrap_or(free).saturating_add(wanted.saturating_sub(free));
                anyhow!(
                    "the pool of {size} pages has {free} free pages, {wanted} are needed, and this process may not raise it; \
                     run `{}` first, or run as root",
                    entry.files.command(target)
                )
            }
            // What a kernel says that cannot make pages of this size after boot.
            ErrorKind::InvalidInput if size == PageSize::Size1G => short(size, free, wanted),
            _ => unusable(&entry.files.setting(), &self.0),
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
        let added = self.added.load(Ordering::Relaxed);
        if added == 0 {
            self.original.store(before, Ordering::Relaxed);
        }
        let mut survivor = lock(&self.survivor);
        if survivor.is_none() {
            *survivor = Survivor::start(&self.files);
        }
        let mut tell = |added, step| survivor.iter_mut().for_each(|survivor| survivor.tell(added, step, before));
        tell(added, pages);
        let written = self.files.set(target);
        // Even a failed write may have added pages.
        let given = self.files.persistent().unwrap_or(before).saturating_sub(before).min(pages);
        self.added.fetch_add(given, Ordering::Relaxed);
        tell(added + given, 0);
        written.map_err(Refusal)?;
        Ok(given)
    }

    /// Takes away what was added.
    fn restore(&self, _turn: &MutexGuard<'_, ()>) -> Result<()> {
        let added = self.added.load(Ordering::Relaxed);
        if added == 0 {
            return Ok(());
        }
        let _exclusive = self.files.exclusive();
        let now = self.files.persistent();
        let target = now.as_ref().map_or(self.original.load(Ordering::Relaxed), |now| now.saturating_sub(added));
        now.and_then(|_| self.files.set(target)).map_err(|why| {
            let (size, command) = (self.size, self.files.command(target));
            anyhow!("the pool of {size} pages could not be put back ({why}); run `{command}`")
        })?;
        self.added.store(0, Ordering::Relaxed);
        lock(&self.survivor).iter_mut().for_each(|survivor| survivor.tell(0, 0, 0));
        Ok(())
    }
}

/// Keeps a pool raised; puts it back when dropped, or on the second Ctrl-C. If the process is killed, a shell that it has started
/// does it.
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
        let entry = Arc::new(Entry {
            files,
            size,
            added: AtomicU64::new(0),
            original: AtomicU64::new(0),
            survivor: Mutex::default(),
        });
        lock(&ENTRIES).push(Arc::clone(&entry));
        Self { entry }
    }

    /// Puts the pool back now.
    ///
    /// # Errors
    /// If it cannot be; the command that does it is named.
    pub fn release(self) -> Result<()> {
        let result = self.put_back();
        // The error has been told; drop must not try and tell again.
        self.entry.added.store(0, Ordering::Relaxed);
        result
    }

    fn put_back(&self) -> Result<()> {
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
mod tests;
