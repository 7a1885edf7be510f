//! How long memory takes to be pinned, as for a device: by io_uring's registered buffers, which take the same pins and need none, and
//! by a GPU's runtime where there is one.

use super::args::BenchLease;
use super::bench::{Bench, announce, kept_if_interrupted, ms};
use super::gpu::Gpu;
use crate::machine::{GIB, Machine};
use crate::measure::Repeat;
use crate::progress;
use crate::results::{Line, Results};
use crate::sides::pivot;
use anyhow::{Context, Result};
use hugemm_base::PageSize;
use hugemm_inspect::interrupt;
use hugemm_inspect::limits::Limits;
use hugemm_inspect::pool::HugetlbPool;
use hugemm_lease::memory_file::{MemoryFile, Page};
use hugemm_workloads::record::Metric;
use hugemm_workloads::size::Size;
use indicatif::ProgressBar;
use io_uring::IoUring;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

/// Which memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    /// Leased, and not touched yet.
    Leased,
    /// Of these pages, if not small ones, and filled before or not.
    Own(Option<Page>, bool),
}

impl Memory {
    const ALL: [Memory; 7] = [
        Memory::Leased,
        Memory::Own(Some(Page::Huge2M), true),
        Memory::Own(Some(Page::Huge2M), false),
        Memory::Own(Some(Page::Transparent), true),
        Memory::Own(Some(Page::Transparent), false),
        Memory::Own(None, true),
        Memory::Own(None, false),
    ];

    /// Whether its pages are the kernel's pool's.
    fn is_of_pool(self) -> bool {
        matches!(self, Memory::Leased | Memory::Own(Some(Page::Huge2M | Page::Huge1G), _))
    }

    fn name(self) -> String {
        match self {
            Memory::Leased => "2M, leased".to_owned(),
            Memory::Own(page, filled) => {
                let page = page.map_or("4K".to_owned(), |page| page.to_string());
                format!("{page}, {}", if filled { "populated" } else { "fresh" })
            }
        }
    }
}

/// Mapped memory.
struct Region {
    at: *mut c_void,
    bytes: usize,
}

impl Region {
    fn of_file(file: BorrowedFd<'_>, bytes: usize) -> Result<Self> {
        // SAFETY: at an address of the kernel's choice; no memory that exists is touched.
        let at =
            unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0) };
        Ok(Region { at: at?, bytes })
    }

    fn anonymous(bytes: usize, advice: Advice) -> Result<Self> {
        // SAFETY: as above; the advice is about pages that are not there yet.
        unsafe {
            let at =
                mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)?;
            let region = Region { at, bytes };
            madvise(at, bytes, advice)?;
            Ok(region)
        }
    }

    fn populate(&self) -> Result<()> {
        // SAFETY: pages of a mapping that is ours become present; no byte changes.
        Ok(unsafe { madvise(self.at, self.bytes, Advice::LinuxPopulateWrite) }?)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped by the functions above; nobody else has the address.
        let _ = unsafe { munmap(self.at, self.bytes) };
    }
}

/// Who pins it.
enum By {
    /// Registered buffers.
    IoUring,
    Gpu(Gpu),
}

/// How many milliseconds it took to pin so many GiB, and to let go of them.
struct Pin {
    pinned: f64,
    let_go: f64,
    gib: f64,
}

const PINS: [Metric<Pin>; 4] = [
    Metric::new("bench.lease.pin", "ms", |it: &Pin| it.pinned).column("ms"),
    Metric::new("bench.lease.unpin", "ms", |it: &Pin| it.let_go).column("let go, ms"),
    Metric::new("", "ms", |it: &Pin| it.pinned / it.gib).column("ms per GiB"),
    Metric::new("", "ms", |it: &Pin| it.let_go / it.gib).column("let go, ms per GiB"),
];

impl By {
    fn name(&self) -> &str {
        match self {
            By::IoUring => "io_uring",
            By::Gpu(gpu) => gpu.name(),
        }
    }

    fn pin(&self, region: &Region) -> Result<Pin> {
        let pin =
            |pinned, let_go| Pin { pinned: ms(pinned), let_go: ms(let_go), gib: region.bytes as f64 / GIB as f64 };
        match self {
            By::IoUring => {
                const MOST: usize = 1 << 30;
                let part = |at| libc::iovec {
                    iov_base: region.at.wrapping_byte_add(at),
                    iov_len: MOST.min(region.bytes - at),
                };
                let parts: Vec<_> = (0..region.bytes).step_by(MOST).map(part).collect();
                let ring = IoUring::new(2).context("no io_uring: the kernel has none, or kernel.io_uring_disabled")?;
                let from = Instant::now();
                // SAFETY: the memory is mapped until the ring is gone, and no request reads or writes it.
                unsafe { ring.submitter().register_buffers(&parts) }.context("memory cannot be pinned (ulimit -l)")?;
                let (pinned, from) = (from.elapsed(), Instant::now());
                ring.submitter().unregister_buffers()?;
                Ok(pin(pinned, from.elapsed()))
            }
            By::Gpu(gpu) => {
                let from = Instant::now();
                gpu.register(region.at, region.bytes)?;
                let (pinned, from) = (from.elapsed(), Instant::now());
                gpu.let_go(region.at)?;
                Ok(pin(pinned, from.elapsed()))
            }
        }
    }
}

/// What all pins came to.
pub(super) struct Pins {
    by: Vec<By>,
    lines: Vec<Line<Pin>>,
    /// What could not be measured, and why.
    remarks: Vec<String>,
}

impl Pins {
    pub(super) fn new() -> Self {
        let mut pins = Pins { by: vec![By::IoUring], lines: Vec::new(), remarks: Vec::new() };
        match Gpu::find() {
            Ok(Some(gpu)) => pins.by.push(By::Gpu(gpu)),
            Ok(None) => pins.remarks.push("no GPU runtime here (libcuda.so.1)".to_owned()),
            Err(error) => pins.remarks.push(format!("no GPU can be had: {error:#}")),
        }
        pins
    }

    /// How many pins of a size make a run.
    pub(super) fn turns(&self) -> usize {
        Memory::ALL.len() * self.by.len()
    }

    /// Pins `bytes` of each kind of memory, the pool's only with a daemon. What cannot be had is said, and the rest goes on.
    pub(super) fn measure(
        &mut self,
        bytes: u64,
        runs: usize,
        bench: Option<&Bench<'_>>,
        bar: &ProgressBar,
    ) -> Result<()> {
        for memory in Memory::ALL.into_iter().filter(|memory| bench.is_some() || !memory.is_of_pool()) {
            for by in &self.by {
                let (size, name) = (Size(bytes), memory.name());
                bar.set_message(format!("{size}, pins of {name} by {}", by.name()));
                let labels = [("size", bytes.into()), ("memory", name.as_str().into()), ("by", by.name().into())];
                let mut line = Line::new(labels);
                let mut stopped = Ok(());
                for _ in 0..runs {
                    stopped = interrupt::check();
                    if stopped.is_err() {
                        break;
                    }
                    match once(memory, bytes, by, bench) {
                        Ok(pin) => line.runs.push(pin),
                        Err(_) if interrupt::requested() => {}
                        Err(error) => {
                            self.remarks.push(format!("{size}, {name}, not pinned by {}: {error:#}", by.name()));
                            break;
                        }
                    }
                }
                if !line.runs.is_empty() {
                    self.lines.push(line);
                }
                stopped?;
            }
        }
        Ok(())
    }

    /// Its table, rows and remarks, behind others.
    pub(super) fn add_to(self, results: &mut Results) {
        let table = pivot(&self.lines, "", &["size", "memory", "by"], "", &PINS);
        results.add("Pinned", table, &self.lines, &PINS[..2]);
        results.remarks.extend(self.remarks);
    }
}

/// `hugemm bench lease --pins`: nothing else, and without a QEMU.
pub(super) fn run(args: &BenchLease) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let runs = Repeat::new(args.runs, args.warmup.warmup).all();
    let bar = progress::bar(args.sizes.len() as u64, machine.quiet());
    let (mut pins, mut ended) = (Pins::new(), Ok(()));
    for size in &args.sizes {
        let bytes = machine.whole_pages(*size, PageSize::Size2M)?;
        let pool = HugetlbPool::new().ensure(PageSize::Size2M, bytes / PageSize::Size2M.bytes(), None);
        let options = ["--size", &bytes.to_string(), "--shape", &bytes.to_string()];
        let bench = pool.and_then(|pool| Ok((Bench::start(args, bytes, 1, &options)?, pool)));
        let bench = bench.map_err(|error| pins.remarks.push(format!("{size} of the pool, not pinned: {error:#}"))).ok();
        let bench = bench.as_ref().map(|(bench, _)| bench);
        let first = bench.filter(|_| pins.lines.is_empty());
        ended = first.map_or(Ok(()), |bench| announce(&machine, &bar, &args.sizes, runs * pins.turns(), bench));
        ended = ended.and_then(|()| pins.measure(bytes, runs, bench, &bar));
        if ended.is_err() {
            break;
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    let stopped = kept_if_interrupted(ended)?;
    let mut results = Results::default();
    pins.add_to(&mut results);
    machine.show(results)?;
    stopped.map_or(Ok(()), Err)
}

/// Takes `bytes` of such memory, has them pinned, and gives them back.
fn once(memory: Memory, bytes: u64, by: &By, bench: Option<&Bench<'_>>) -> Result<Pin> {
    let len = usize::try_from(bytes)?;
    if memory == Memory::Leased {
        let lease = bench.context("no daemon")?.lend()?;
        let times = by.pin(&Region::of_file(lease.file.as_fd(), len)?);
        lease.end()?;
        return times;
    }
    bench.map_or(Ok(()), Bench::drain)?;
    if !memory.is_of_pool() {
        Limits::read()?.check(bytes)?;
    }
    let (region, filled) = match memory {
        Memory::Own(Some(Page::Transparent), filled) => (Region::anonymous(len, Advice::LinuxHugepage)?, filled),
        Memory::Own(Some(page), filled) => (Region::of_file(MemoryFile::new(page, bytes)?.as_fd(), len)?, filled),
        _ => (Region::anonymous(len, Advice::LinuxNoHugepage)?, memory == Memory::Own(None, true)),
    };
    if filled {
        region.populate()?;
    }
    by.pin(&region)
}
