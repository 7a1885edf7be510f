//! `hugemm bench lease`: how long stock QEMU takes from exec until its machine is there, with memory that it makes itself and
//! with memory that is leased.

use super::args::BenchLease;
use super::filter;
use super::monitor::{Monitor, end_with_this};
use super::pins::{self, Pins};
use super::restore::{self, Snapshot};
use crate::document::Row;
use crate::interference::lines_in;
use crate::machine::{GIB, Machine};
use crate::measure::Repeat;
use crate::options::Kind;
use crate::progress;
use crate::results::{Line, Results};
use crate::sides::{by_turns, pivot};
use crate::stats::Samples;
use anyhow::{Context, Result, anyhow, bail};
use hugemm_base::{CpuId, Never, PageSize};
use hugemm_host::cpu::Host;
use hugemm_inspect::interrupt;
use hugemm_inspect::limits::Limits;
use hugemm_inspect::pool::HugetlbPool;
use hugemm_lease::client::{Connection, Lease};
use hugemm_lease::status::{Counts, Status};
use hugemm_lease::wire::{Answer, Forget, KeepAs, Request, Wish};
use hugemm_workloads::chase::Chase;
use hugemm_workloads::record::Metric;
use hugemm_workloads::size::Size;
use hugemm_workloads::words::Named;
use indicatif::ProgressBar;
use rustix::process::Signal;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

hugemm_workloads::named! {
    /// How QEMU gets its memory, in the order in which the daemon's file is filled least often.
    Way {
        /// Its own, filled when the guest touches it: what nothing that fills can beat.
        Off = "prealloc=off",
        /// Its own, filled by one thread before the machine starts.
        OneThread = "prealloc=on, 1 thread",
        /// The same by several.
        Threads = "prealloc=on, threads",
        /// Leased from a daemon that has nothing ready, as one on a full host: QEMU fills its own.
        Empty = "leased, nothing ready",
        /// Leased; QEMU is told nothing, and replaced its file is. It is told to fill it, as libvirt tells it, and looks at each page.
        Wrapper = "leased, wrapper",
        /// The same by the words of `Off`: what the lease alone costs.
        WrapperOff = "leased, wrapper, prealloc=off",
        /// Leased; QEMU is given a path of a process that holds it. Filled it is already, so `prealloc` is left out.
        Path = "leased, path",
        /// Leased; QEMU inherits the descriptor, and fills nothing either.
        Descriptor = "leased, descriptor",
        /// Kept from the start before.
        Kept = "kept, second start",
    }
}

/// Those that are to take hardly longer than without filling.
const JUDGED: [Way; 4] = [Way::Wrapper, Way::WrapperOff, Way::Path, Way::Descriptor];

/// One start: how long it took, and how many times as long as [`Way::Off`] in the same run.
#[derive(Clone, Copy, Default)]
struct Start {
    ms: f64,
    of_off: f64,
}

const READY: [Metric<Start>; 2] = [
    Metric::new("bench.lease.exec_to_ready", "ms", |it: &Start| it.ms).column("ready, ms"),
    Metric::new("bench.lease.vs_no_prealloc", "ratio", |it: &Start| it.of_off).column("of prealloc=off"),
];
const RESTORED: [Metric<restore::Times>; 2] = [
    Metric::new("bench.lease.restore_to_running", "ms", |it: &restore::Times| ms(it.running))
        .column("guest answers, ms"),
    Metric::new("bench.lease.restore_to_touched", "ms", |it: &restore::Times| ms(it.touched))
        .column("has touched all, ms"),
];

/// A machine that fills its own by several threads, right after the pool was raised: pages that nothing has touched since the kernel
/// found them. In a virtual machine the one below it may have to find them, too.
const FIRST_USE: &str = "prealloc=on, threads, first use";

pub(super) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Under which name memory is kept.
const KEPT: &str = "bench";

/// Most runs of what takes seconds.
const MOST_RESTORED: u32 = 3;

/// What a neighbour uses of the cache that all CPUs share, and for how long it is looked at.
const NEIGHBOUR: u64 = 16 << 20;
const LOOK_NS: u64 = 20_000_000;

pub fn run(args: &BenchLease) -> Result<()> {
    if args.pins { pins::run(args) } else { measure(args) }
}

/// What there is until now is kept if a signal was what ended the measuring. A terminal's signal reaches children, too, and what ends by
/// it may be seen before this process's own comes.
pub(super) fn kept_if_interrupted(measured: Result<()>) -> Result<Option<anyhow::Error>> {
    let Err(error) = measured else { return Ok(None) };
    let end = Instant::now() + Duration::from_millis(500);
    while !interrupt::requested() {
        if Instant::now() > end {
            return Err(error);
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(Some(error))
}

/// Says how long all sizes take, so many fillings of each, as the first one had it.
pub(super) fn announce(
    machine: &Machine,
    bar: &ProgressBar,
    sizes: &[Size],
    fillings: usize,
    first: &Bench<'_>,
) -> Result<()> {
    let from = Instant::now();
    first.fill()?;
    let (took, most) = (from.elapsed().as_secs_f64(), Limits::read()?.total);
    let all: u64 = sizes.iter().map(|size| size.0).filter(|bytes| *bytes <= most).sum();
    let minutes = took * fillings as f64 * all as f64 / first.bytes as f64 / 60.0;
    if !machine.quiet() {
        let size = Size(first.bytes);
        bar.suspend(|| eprintln!("filling {size} takes {took:.1} s; all takes some {:.0} min", minutes.ceil()));
    }
    Ok(())
}

/// What all sizes came to.
#[derive(Default)]
struct Measured {
    starts: Vec<Line<Start>>,
    restored: Vec<Line<restore::Times>>,
    /// What the daemons that clear have filled, and seconds of CPU time for each GiB of those that copy a template.
    filled: Counts,
    template_cpu: Samples,
    /// How many times as long a neighbour took for a load while the last size was filled.
    slowed: Option<Samples>,
    /// A program that makes no memory, and its CPU time behind the filter, of that without.
    filtered: Option<(&'static str, Samples)>,
}

fn measure(args: &BenchLease) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let threads = args.threads.map_or(machine.topology.cpus.len(), |threads| threads as usize);
    if let Err(error) = Command::new(&args.qemu).arg("--version").output() {
        bail!("{} cannot be run: {error}; name a QEMU with --qemu", args.qemu.display());
    }
    let turns = args.sizes.len() * Way::ALL.len() * Repeat::new(args.runs, args.warmup.warmup).all();
    let bar = progress::bar(turns as u64, machine.quiet());
    let (mut measured, mut pins, mut left_out) = (Measured::default(), Pins::new(), Vec::new());
    let mut ended = Ok(());
    for size in &args.sizes {
        let bytes = machine.whole_pages(*size, PageSize::Size2M)?;
        // The machine's or the daemon's, never both.
        match HugetlbPool::new().ensure(PageSize::Size2M, bytes / PageSize::Size2M.bytes(), None) {
            Ok(_pool) => ended = of_size(args, &machine, bytes, threads, &mut measured, &mut pins, &bar),
            Err(error) => {
                left_out.push(format!("not measured: {size}, which takes as much of the kernel's pool: {error}"));
                ended = interrupt::check().map_err(Into::into);
            }
        }
        if ended.is_err() {
            break;
        }
    }
    bar.finish_and_clear();
    let stopped = kept_if_interrupted(ended)?;
    if measured.starts.is_empty() {
        let too_large =
            || anyhow!("no size fits; name smaller ones with --sizes, or free memory ({})", left_out.join("; "));
        return Err(stopped.unwrap_or_else(too_large));
    }
    let mut results = results_of(args, threads, measured);
    results.remarks.splice(0..0, left_out);
    pins.add_to(&mut results);
    machine.show(results)?;
    stopped.map_or(Ok(()), Err)
}

/// The tables, rows and remarks of what was measured, all of it or not.
fn results_of(args: &BenchLease, threads: usize, measured: Measured) -> Results {
    let Measured { starts, restored, filled, template_cpu, slowed, filtered } = measured;
    let mut results = Results::default();
    let down = ["size", "memory"];
    let title = format!("From exec to a machine that answers, {threads} threads; median of {} runs", args.runs);
    results.add(title, pivot(&starts, "", &down, "", &READY), &starts, &READY[..1]);
    let is_judged = |line: &&Line<Start>| JUDGED.iter().any(|way| line.label("memory") == way.name());
    results.rows.extend(starts.iter().filter(is_judged).flat_map(|line| line.rows(&READY[1..])));
    if filled.filled_bytes > 0 {
        let gib = filled.filled_bytes as f64 / GIB as f64;
        let (cpu, bandwidth) =
            (filled.fill_cpu_ns as f64 / 1e9 / gib, filled.filled_bytes as f64 / filled.fill_ns.max(1) as f64);
        results.rows.push(Row::single("bench.lease.filled", gib, "GiB"));
        results.rows.push(Row::single("bench.lease.fill_cpu_per_gib", cpu, "s"));
        results.rows.push(Row::single("bench.lease.fill_bandwidth", bandwidth, "GB/s"));
        results.remarks.push(format!(
            "filled meanwhile, and moved, not saved: {gib:.1} GiB, {cpu:.2} s of CPU time per GiB, at {bandwidth:.1} GB/s"
        ));
    }
    if let Some(slowed) = &slowed {
        results.rows.push(Row::median("bench.lease.neighbour_slowdown", slowed, "×"));
        results.remarks.push(format!(
            "a neighbour whose {} are in the shared cache took {:.2} ± {:.2} × as long for a load while the last size was filled",
            Size(NEIGHBOUR),
            slowed.median(),
            slowed.stdev()
        ));
    }
    if let Some((program, cost)) = &filtered {
        results.rows.push(Row::median("bench.lease.filter_cpu", cost, "ratio").label("program", *program));
        let (median, stdev) = (cost.median(), cost.stdev());
        results.remarks.push(format!("{program} took {median:.3} ± {stdev:.3} × its CPU time behind the filter"));
    }
    if template_cpu.runs() > 0 {
        results.rows.push(Row::median("bench.lease.template_cpu_per_gib", &template_cpu, "s"));
        let took = template_cpu.median();
        results.remarks.push(format!("a template took the daemon {took:.2} s of CPU time per GiB"));
    }
    if !restored.is_empty() {
        let title = "From exec to a guest that was saved";
        results.add(title, pivot(&restored, "", &down, "", &RESTORED), &restored, &RESTORED);
    }
    results
}

/// How many times about the memory of a size is filled, by whomever.
fn fillings(repeat: Repeat, few: Repeat, pins: &Pins) -> usize {
    // Three ways fill once more, and what restores reads and fills.
    repeat.all() * (Way::ALL.len() + 3 + pins.turns()) + few.all() * 2 * restore::Memory::ALL.len()
}

/// Everything with machines of one size, for which the kernel's pool has room.
fn of_size(
    args: &BenchLease,
    machine: &Machine,
    bytes: u64,
    threads: usize,
    measured: &mut Measured,
    pins: &mut Pins,
    bar: &ProgressBar,
) -> Result<()> {
    let repeat = Repeat::new(args.runs, args.warmup.warmup);
    let line = |memory: &str| [("size", bytes.into()), ("memory", memory.into())];
    bar.set_message(format!("{}, {FIRST_USE}", Size(bytes)));
    let first_use = ms(first_use(args, bytes, threads)?);
    let bench = Bench::start(args, bytes, threads, &["--size", &bytes.to_string(), "--shape", &bytes.to_string()])?;
    let few = Repeat::new(args.runs.min(MOST_RESTORED), args.warmup.warmup.min(1));
    if measured.starts.is_empty() {
        announce(machine, bar, &args.sizes, fillings(repeat, few, pins), &bench)?;
    }
    let mut starts: Vec<Line<Start>> = Way::ALL.iter().map(|way| Line::new(line(way.name()))).collect();
    let turned = by_turns(&mut starts, repeat, bar, |index| {
        Ok(Start { ms: ms(bench.once(Way::ALL[index])?), ..Start::default() })
    });
    starts.push(Line { runs: vec![Start { ms: first_use, ..Start::default() }], ..Line::new(line(FIRST_USE)) });
    let off: Vec<f64> = starts[0].runs.iter().map(|start| start.ms).collect();
    for line in &mut starts {
        line.runs.iter_mut().zip(&off).for_each(|(start, off)| start.of_off = start.ms / off);
        // One that was stopped may have no run to be held against.
        line.runs.iter_mut().skip(off.len()).for_each(|start| start.of_off = f64::NAN);
        if line.label("memory").contains(Way::Threads.name()) {
            line.labels.insert("threads".to_owned(), threads.into());
        }
    }
    measured.starts.extend(starts.into_iter().filter(|line| !line.runs.is_empty()));
    turned?;
    let counts = bench.status()?.counts;
    measured.filled.filled_bytes += counts.filled_bytes;
    measured.filled.fill_ns += counts.fill_ns;
    measured.filled.fill_cpu_ns += counts.fill_cpu_ns;
    if machine.topology.cpus.len() > 1 {
        bar.set_message(format!("{}, a neighbour", Size(bytes)));
        measured.slowed = Some(bench.neighbour(machine)?);
    }
    if measured.filtered.is_none() {
        bar.set_message("a program that makes no memory");
        measured.filtered = Some(filter::cost(&bench.socket(), &bench.dir.dir, args.runs)?);
    }
    pins.measure(bytes, repeat.all(), Some(&bench), bar)?;
    drop(bench);
    bar.set_message(format!("{}, a snapshot", Size(bytes)));
    let dir = Scratch::new("snapshot")?;
    let Some(snapshot) = Snapshot::make(&args.qemu, &dir.dir, bytes)? else { return Ok(()) };
    let template = format!("{}={}", snapshot.template().name, snapshot.template().path.display());
    let bench = Bench::start(args, bytes, threads, &["--template", &template])?;
    let memories = restore::Memory::ALL;
    let mut restored: Vec<_> = memories.iter().map(|memory| Line::new(line(memory.name()))).collect();
    let turned = by_turns(&mut restored, few, bar, |index| {
        bench.wait_until("the template is ready", || {
            let status = bench.status()?;
            Ok(status.leases.is_empty() && status.templates.iter().all(|template| template.ready))
        })?;
        snapshot.restore(memories[index], bench.lease(&["--template", restore::NAME, "--require", "--"])?)
    });
    measured.restored.extend(restored.into_iter().filter(|line| !line.runs.is_empty()));
    turned?;
    let counts = bench.status()?.counts;
    let gib = counts.filled_bytes.max(1) as f64 / GIB as f64;
    measured.template_cpu.push(counts.fill_cpu_ns as f64 / 1e9 / gib);
    Ok(())
}

/// A directory that goes with this command, or, if that is killed, with the next: it is locked as long as it is somebody's.
struct Scratch {
    dir: PathBuf,
    _lock: File,
}

impl Scratch {
    fn new(name: &str) -> Result<Self> {
        let all = std::env::temp_dir();
        for entry in std::fs::read_dir(&all).into_iter().flatten().flatten() {
            let is_one = entry.file_name().as_bytes().starts_with(SCRATCH.as_bytes());
            if is_one && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                let left = File::open(entry.path()).ok().filter(|dir| dir.try_lock().is_ok());
                // Another user's stays.
                left.map(|_lock| std::fs::remove_dir_all(entry.path()));
            }
        }
        let dir = all.join(format!("{SCRATCH}{name}-{}", std::process::id()));
        let made = || {
            loop {
                std::fs::create_dir_all(&dir)?;
                let lock = File::open(&dir)?;
                lock.lock()?;
                let number = |meta: std::fs::Metadata| (meta.dev(), meta.ino());
                // If not, another one has taken it for one that was left.
                if std::fs::metadata(&dir).ok().map(number) == lock.metadata().ok().map(number) {
                    return Ok(lock);
                }
            }
        };
        let lock: std::io::Result<File> = made();
        Ok(Scratch { _lock: lock.with_context(|| format!("{} cannot be made", dir.display()))?, dir })
    }

    /// A daemon's, who makes the directory of it, and locks that for moments.
    fn socket(&self) -> PathBuf {
        self.dir.join("daemon/socket")
    }
}

/// What such directories' names begin with.
const SCRATCH: &str = "hugemm-bench-";

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// A daemon of its own, with one file of the size ready whenever a machine starts.
pub(super) struct Bench<'a> {
    args: &'a BenchLease,
    bytes: u64,
    threads: usize,
    daemon: Child,
    dir: Scratch,
}

impl<'a> Bench<'a> {
    pub(super) fn start(args: &'a BenchLease, bytes: u64, threads: usize, what: &[&str]) -> Result<Self> {
        let dir = Scratch::new("lease")?;
        let mut daemon = Command::new(std::env::current_exe()?);
        daemon.args(["pool", "serve", "--page", "2M"]).args(what).arg("--socket").arg(dir.socket());
        daemon.stdout(Stdio::null()).stderr(Stdio::null());
        let daemon = end_with_this(&mut daemon, Signal::TERM).spawn().context("the lease daemon cannot be started")?;
        let bench = Bench { args, bytes, threads, daemon, dir };
        bench.wait_until("the daemon answers", || Ok(bench.status().is_ok()))?;
        Ok(bench)
    }

    fn socket(&self) -> PathBuf {
        self.dir.socket()
    }

    fn status(&self) -> Result<Status> {
        Ok(Connection::open(&self.socket())?.status()?)
    }

    fn ask(&self, request: &Request) -> Result<Answer> {
        Ok(Connection::open(&self.socket())?.ask(request)?.0)
    }

    /// Has all memory back in the kernel's pool, for a machine that takes its own.
    pub(super) fn drain(&self) -> Result<()> {
        self.ask(&Request::Drain {})?;
        self.wait_until("pages are free", || {
            let status = HugetlbPool::new().status(PageSize::Size2M, None)?;
            Ok(status.unreserved() * PageSize::Size2M.bytes() >= self.bytes)
        })
    }

    fn wait_until(&self, what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
        let end = Instant::now() + Duration::from_secs(600);
        while !is_so()? {
            interrupt::check()?;
            if Instant::now() > end {
                let why = self.status().ok().and_then(|status| status.waiting);
                bail!("waited ten minutes until {what}: {}", why.unwrap_or_else(|| "no reason is known".into()));
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Has a file ready, and nothing lent.
    fn fill(&self) -> Result<Status> {
        self.ask(&Request::Fill {})?;
        let mut found = None;
        self.wait_until("a file is ready", || {
            let status = self.status()?;
            let ready = !status.ready.is_empty() && status.leases.is_empty();
            found = ready.then_some(status);
            Ok(ready)
        })?;
        found.context("nothing is ready")
    }

    /// How many times as long a program in the shared cache takes for a load while the daemon fills, over and over.
    fn neighbour(&self, machine: &Machine) -> Result<Samples> {
        let mut own = machine.memory(PageSize::Size2M.bytes(), PageSize::Size2M, Kind::Thp)?;
        let mut set = machine.memory(NEIGHBOUR, PageSize::Size2M, Kind::Thp)?;
        let host = Host::new(&machine.places(1)?, own.as_mut_slice())?;
        let chase = Chase::new(lines_in(set.as_mut_slice()), 0x9e37_79b9);
        let step = || {
            let (steps, nanos) = chase.run(&host, LOOK_NS, &Never);
            nanos as f64 / steps.max(1) as f64
        };
        self.drain()?;
        host.run_on(CpuId::new(0), |_| {
            // Once round, so that it is in the cache.
            step();
            let alone: Samples = (0..10).map(|_| step()).collect();
            self.ask(&Request::Fill {})?;
            let mut slowed = Samples::default();
            self.wait_until("a file is ready", || {
                slowed.push(step() / alone.median());
                Ok(!self.status()?.ready.is_empty())
            })?;
            anyhow::Ok(slowed)
        })?
    }

    fn lease(&self, options: &[&str]) -> Result<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["lease", &self.bytes.to_string(), "--page", "2M", "--socket"]).arg(self.socket());
        command.args(options);
        Ok(command)
    }

    /// All of it leased, to this process.
    pub(super) fn lend(&self) -> Result<Lease> {
        self.fill()?;
        Ok(Connection::open(&self.socket())?.lease(Wish::of(self.bytes))?)
    }

    /// One start. A filling leaves the caches without QEMU, and comes long before most starts: so each is right behind one that is not
    /// measured.
    fn once(&self, way: Way) -> Result<Duration> {
        let before = self.fill()?;
        let time = match way {
            Way::Off | Way::OneThread | Way::Threads | Way::Empty => {
                self.drain()?;
                self.start_ordinary()?;
                self.start_machine(way)?
            }
            Way::Wrapper | Way::WrapperOff | Way::Path | Way::Descriptor => {
                self.start_ordinary()?;
                let time = self.start_machine(way)?;
                if matches!(way, Way::Wrapper | Way::WrapperOff) {
                    self.check_placed(before.counts.placed + 1)?;
                }
                time
            }
            Way::Kept => {
                self.start_machine(way)?;
                self.wait_until("the first machine is over", || Ok(self.status()?.leases.is_empty()))?;
                let time = self.start_machine(way)?;
                self.check_placed(before.counts.placed + 2)?;
                self.wait_until("the second machine is over", || Ok(self.status()?.leases.is_empty()))?;
                let keep = KeepAs { name: KEPT.to_owned(), secret: None };
                self.ask(&Request::Forget(Forget { keep, uid: None }))?;
                std::fs::remove_file(self.secret())?;
                time
            }
        };
        Ok(time)
    }

    fn secret(&self) -> PathBuf {
        self.dir.dir.join("secret")
    }

    /// Starts a machine that takes nothing of the kernel's pool.
    fn start_ordinary(&self) -> Result<()> {
        let mut command = Command::new(&self.args.qemu);
        words(&mut command, self.bytes, "memory-backend-memfd,reserve=off");
        until_ready(&mut command, Instant::now()).map(drop).context("no machine starts on ordinary memory")
    }

    /// Starts a machine on whatever there is.
    fn start_machine(&self, way: Way) -> Result<Duration> {
        let (qemu, bytes) = (&self.args.qemu, self.bytes);
        let from = Instant::now();
        let mut holder = None;
        let mut command;
        match way {
            Way::Off | Way::OneThread | Way::Threads => {
                command = Command::new(qemu);
                let prealloc = match way {
                    Way::Off => "prealloc=off".to_owned(),
                    Way::OneThread => filled_by(1),
                    _ => filled_by(self.threads),
                };
                words(&mut command, bytes, &format!("{OWN},{prealloc}"));
            }
            Way::Wrapper | Way::WrapperOff => {
                command = self.lease(&["--require", "--"])?;
                let prealloc = if way == Way::Wrapper { "on" } else { "off" };
                words(command.arg(qemu), bytes, &format!("{OWN},prealloc={prealloc}"));
            }
            Way::Kept => {
                command = self.lease(&["--require", "--keep", KEPT, "--secret"])?;
                command.arg(self.secret()).arg("--").arg(qemu);
                // A file can be sealed once.
                words(&mut command, bytes, &format!("{OWN},prealloc=on,seal=off"));
            }
            Way::Descriptor => {
                command = self.lease(&["--fd", "9", "--"])?;
                words(command.arg(qemu), bytes, "memory-backend-file,mem-path=/proc/self/fd/9");
            }
            Way::Empty => {
                command = self.lease(&["--"])?;
                words(command.arg(qemu), bytes, &format!("{OWN},prealloc=on"));
            }
            Way::Path => {
                let output = self.lease(&["--json"])?.output().context("no path is had")?;
                let about: serde_json::Value =
                    serde_json::from_slice(&output.stdout).context("`hugemm lease --json` says nothing")?;
                let path = about["path"].as_str().context("`hugemm lease --json` names no path")?;
                holder = about["holder"].as_i64();
                command = Command::new(qemu);
                words(&mut command, bytes, &format!("memory-backend-file,mem-path={path}"));
            }
        }
        let time = until_ready(&mut command, from);
        if let Some(pid) = holder.and_then(|pid| rustix::process::Pid::from_raw(pid as i32)) {
            rustix::process::kill_process(pid, Signal::TERM)?;
        }
        time.with_context(|| format!("{} does not start", way.name()))
    }

    /// That so many machines had the leased memory, not their own: the supervisor says so in its own time.
    fn check_placed(&self, wanted: u64) -> Result<()> {
        let end = Instant::now() + Duration::from_secs(10);
        while self.status()?.counts.placed < wanted {
            if Instant::now() > end {
                bail!("QEMU did not get the leased memory; this measures nothing");
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl Drop for Bench<'_> {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

/// What QEMU makes for itself.
const OWN: &str = "memory-backend-memfd,hugetlb=on,hugetlbsize=2M";

fn filled_by(threads: usize) -> String {
    format!("prealloc=on,prealloc-threads={threads}")
}

/// QEMU's words for a machine on this memory.
fn words(command: &mut Command, bytes: u64, backend: &str) {
    let memory = format!("{backend},id=m,size={bytes},share=on");
    let words = ["-M", "q35,memory-backend=m", "-accel", "tcg", "-nodefaults", "-display", "none", "-S"];
    command.args(words).args(["-m", &format!("{}M", bytes >> 20), "-qmp", "stdio", "-object", &memory]);
}

/// One start as [`FIRST_USE`] says.
fn first_use(args: &BenchLease, bytes: u64, threads: usize) -> Result<Duration> {
    let mut command = Command::new(&args.qemu);
    words(&mut command, bytes, &format!("{OWN},{}", filled_by(threads)));
    until_ready(&mut command, Instant::now()).with_context(|| format!("{FIRST_USE} does not start"))
}

/// Starts a machine, and ends it when it answers. The time since `from`.
fn until_ready(command: &mut Command, from: Instant) -> Result<Duration> {
    let mut machine = Monitor::start(command)?;
    machine.ask("{\"execute\":\"query-status\"}")?;
    Ok(from.elapsed())
}
