//! A process maps a file of the host that is larger than all of its memory, edits it, and is paged out: the file has the edits. What it
//! stores in a private mapping of the file stays its own.
//!
//! `cargo run -p hugemm-example-map-file`
//!
//! A [`PageSource`] of forty lines makes a file of it. Nobody walks the tables here, so the process's loads and stores are
//! [`Vm::read`] and [`Vm::write`], which fault as an access would.

use hugemm::base::{PAGE_BYTES, sync::AtomicU64};
use hugemm::frames::Carved;
use hugemm::prelude::*;
use hugemm::reclaim::{Compressed, Lru, LruPolicy, Reclaim, ShrinkBudget, Watermarks};
use hugemm::vm::{PageSource, SourceError, StoredPages};
use hugemm_lz4::WordsOrLz4;
use hugemm_threads::{CPUS, Memory, Threads};
use std::error::Error;
use std::fs::{File, OpenOptions};
use std::io;
use std::marker::PhantomData;
use std::os::unix::fs::FileExt;

/// Pages of the file, and bytes of memory: a quarter of them.
const PAGES: u64 = 4096;
const MEMORY: u64 = 4 << 20;

/// What is chosen: threads as CPUs, tables that nobody walks, compressed swap.
struct Here<'m>(PhantomData<&'m ()>);

impl<'m> Setup for Here<'m> {
    type Platform = Threads<Memory>;
    type Env = Carved;
    type Format = <DefaultSetup<Threads<Memory>> as Setup>::Format;
    type Lock = EditLock;
    type Tlb = Counting;
    type Pager = Reclaim<'m, 'm, Self, Compressed<'m, 'm, Carved, WordsOrLz4>>;
    type Notifier = ();
}

/// A file of the host.
struct HostFile(File);

/// What the host says, as a number that reaches whoever faulted.
fn failed(error: io::Error) -> SourceError {
    SourceError(error.raw_os_error().unwrap_or(0).unsigned_abs())
}

impl<S: Setup> PageSource<S> for HostFile {
    fn bytes(&self) -> u64 {
        self.0.metadata().map_or(0, |about| about.len())
    }

    fn fill(&self, _: &mut hugemm::vm::Cx<'_, S>, first: u64, pages: &mut [u8]) -> Result<usize, SourceError> {
        let mut done = 0;
        while done < pages.len() {
            match self.0.read_at(&mut pages[done..], first * PAGE_BYTES + done as u64).map_err(failed)? {
                0 => break,
                more => done += more,
            }
        }
        Ok(done)
    }

    fn write_back(
        &self,
        _: &mut hugemm::vm::Cx<'_, S>,
        first: u64,
        pages: &StoredPages<'_>,
    ) -> Result<(), SourceError> {
        // Programs may be storing to them: copied out.
        let mut stored = vec![0; pages.bytes()];
        pages.copy_to(0, &mut stored);
        self.0.write_all_at(&stored, first * PAGE_BYTES).map_err(failed)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::temp_dir().join(format!("hugemm-map-file-{}", std::process::id()));
    let done = edit(&path);
    std::fs::remove_file(&path)?;
    done
}

fn edit(path: &std::path::Path) -> Result<(), Box<dyn Error>> {
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
    for page in 0..PAGES {
        file.write_all_at(format!("page {page:05} as it was").as_bytes(), page * PAGE_BYTES)?;
    }
    file.set_len(PAGES * PAGE_BYTES)?;
    let file = HostFile(file);

    let (threads, ram) = Threads::with_memory(MEMORY);
    let cx = &mut threads.cx();
    let frames = Frames::carve(cx, ram)?;
    let (cpus, inboxes) = ([(); CPUS].map(|()| TlbCpu::default()), [(); CPUS].map(|()| AtomicU64::new(0)));
    // SAFETY: no CPU walks the tables.
    let shootdown = unsafe { TlbShootdown::new(&cpus, &inboxes, Counting) }?;
    let lrus = [Lru::new(&frames, LruPolicy::ALL[0])];
    let store = Compressed::new(&frames, cx, WordsOrLz4, CPUS as u32, 256)?;
    let pager = Reclaim::new(&lrus, &store, Watermarks::for_node(frames.managed()), ());
    let parts = Parts::with_pager(&frames, &shootdown, Clearer::uncalibrated(), pager);
    // SAFETY: the memory is mapped as one; all contexts are this platform's.
    let vm: Vm<'_, Here<'_>> = unsafe { Vm::new(parts) }.ok_or("a lock too large for a slab")?;

    let object = vm.open_source(cx, &file)?;
    let space = vm.create(cx, VirtRange::new(VirtAddr::new(0), 1 << 47)?)?;
    let start = VirtAddr::new(0x1000_0000);
    let mapping = VirtRange::new(start, PAGES * PAGE_BYTES)?;
    vm.map(cx, &space, mapping, VmaKind::private(PageSize::Size4K), Backing::Shared(&object, 0))?;
    let at = |page: u64, into: u64| VirtAddr::new(start.get() + page * PAGE_BYTES + into);
    for page in 0..PAGES {
        let mut found = [0; 10];
        vm.read(cx, &space, at(page, 0), &mut found)?;
        assert_eq!(found, *format!("page {page:05}").as_bytes());
        if page % 3 == 0 {
            vm.write(cx, &space, at(page, 14), b"is edited ")?;
        }
    }
    // The same pages, but for one that is its own from here on.
    let private = VirtRange::new(VirtAddr::new(0x4000_0000), PAGES * PAGE_BYTES)?;
    vm.map(cx, &space, private, VmaKind::private(PageSize::Size4K), Backing::Copied(&object, 0))?;
    vm.write(cx, &space, VirtAddr::new(private.start().get() + 14), b"is mine   ")?;
    for (page, is) in [(0, b"is mine   "), (3, b"is edited "), (PAGES - 1, b"is edited ")] {
        let (mut found, at) = ([0; 10], private.start().get() + page * PAGE_BYTES + 14);
        vm.read(cx, &space, VirtAddr::new(at), &mut found)?;
        assert_eq!(&found, is, "page {page}");
    }
    let there = vm.usage(cx, &space, mapping)?.present;
    println!("{PAGES} pages of a file edited in {} frames of memory; {there} are there", frames.managed());
    // Nobody uses it any more: a pass ages, one has what is dirty written back, one drops it.
    let all = ShrinkBudget::new(u64::MAX, 4 * PAGES);
    let (mut written, mut freed) = (0, 0);
    for _ in 0..8 {
        let pass = vm.pager().shrink(&vm, cx, hugemm::base::NodeId::new(0), all, &Never);
        (written, freed) = (written + pass.written, freed + pass.freed);
    }
    assert_eq!(vm.usage(cx, &space, mapping)?.present, 0, "paged out");
    let own = vm.usage(cx, &space, private)?;
    assert_eq!((own.present, own.swapped), (0, 1), "its own page is in swap, and no other");
    println!("paged out: {written} pages written back, {freed} free");

    let mut edited = 0;
    for page in 0..PAGES {
        let mut found = [0; 24];
        file.0.read_exact_at(&mut found, page * PAGE_BYTES)?;
        assert_eq!(&found[..13], format!("page {page:05} as").as_bytes(), "what nobody has edited");
        edited += u64::from(&found[14..] == b"is edited ");
    }
    assert_eq!(edited, PAGES.div_ceil(3), "the file has the edits");
    println!("the file has all {edited} edits");
    vm.destroy(cx, space).map_err(|(error, _)| error)?;
    vm.close(cx, object).map_err(|(error, _)| error)?;
    Ok(())
}
