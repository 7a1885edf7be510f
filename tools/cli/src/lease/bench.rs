//! `hugemm bench lease`: how long stock QEMU takes from exec until its machine is there, with memory that it makes itself and
//! with memory that is leased.

use super::args::BenchLease;
use super::filter;
use super::pins::{self, Pins};
use super::restore::{self, Snapshot};
use super::touch;
use crate::document::Row;
use crate::interference::lines_in;
use crate::machine::Machine;
use crate::measure::Repeat;
use crate::options::Kind;
use crate::results::Results;
use crate::stats::Samples;
use crate::{progress, table};
use anyhow::{Context, Result, bail};
use hugemm_base::{CpuId, Never, PageSize};
use hugemm_host::cpu::Host;
use hugemm_inspect::interrupt;
use hugemm_inspect::pool::HugetlbPool;
use hugemm_lease::client::{Connection, Lease};
use hugemm_lease::status::{Counts, Status};
use hugemm_lease::wire::{Answer, Forget, KeepAs, Request, Wish};
use hugemm_workloads::chase::Chase;
use hugemm_workloads::size::Size;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::Signal;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// How QEMU gets its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Its own, filled when the guest touches it, right after another start of the same: what nothing that fills can beat.
    Off,
    /// The same after a filling, which leaves the caches without QEMU: as no user of it alone has it.
    OffAfterFilling,
    /// Its own, filled by one thread before the machine starts.
    OneThread,
    /// The same by several.
    Threads,
    /// Leased; QEMU is told nothing, and replaced its file is. It is told to fill it, as libvirt tells it, and looks at each page.
    Wrapper,
    /// The same by the words of `Off`: what the lease alone costs.
    WrapperOff,
    /// Leased; QEMU is given a path of a process that holds it. Filled it is already, so `prealloc` is left out.
    Path,
    /// Leased; QEMU inherits the descriptor, and fills nothing either.
    Descriptor,
    /// Kept from the start before.
    Kept,
    /// Leased from a daemon that has nothing ready, as one on a full host: QEMU fills its own.
    Empty,
}

/// In the order in which the daemon's file is filled least often.
const WAYS: [Way; 10] = [
    Way::Off,
    Way::OffAfterFilling,
    Way::OneThread,
    Way::Threads,
    Way::Empty,
    Way::Wrapper,
    Way::WrapperOff,
    Way::Path,
    Way::Descriptor,
    Way::Kept,
];

impl Way {
    /// In the table and the JSON.
    fn name(self) -> &'static str {
        match self {
            Way::Off => "prealloc=off",
            Way::OffAfterFilling => "prealloc=off, after a filling",
            Way::OneThread => "prealloc=on, 1 thread",
            Way::Threads => "prealloc=on, threads",
            Way::Wrapper => "leased, wrapper",
            Way::WrapperOff => "leased, wrapper, prealloc=off",
            Way::Path => "leased, path",
            Way::Descriptor => "leased, descriptor",
            Way::Kept => "kept, second start",
            Way::Empty => "leased, nothing ready",
        }
    }

    /// Whether it is to take hardly longer than without filling.
    fn is_judged(self) -> bool {
        matches!(self, Way::Wrapper | Way::WrapperOff | Way::Path | Way::Descriptor)
    }

    /// Whether its own filling is the most of its start.
    fn is_slow(self) -> bool {
        matches!(self, Way::OneThread | Way::Threads | Way::Empty)
    }
}

/// Most measured runs of what takes many times as long as the rest, and differs little from run to run.
const SLOW_RUNS: usize = 3;

/// A machine that fills its own by several threads, right after the pool was raised: pages that nothing has touched since the kernel
/// found them. In a virtual machine the one below it may have to find them, too.
const FIRST_USE: &str = "prealloc=on, threads, first use";

/// Under which name memory is kept.
const KEPT: &str = "bench";

/// What a neighbour uses of the cache that all CPUs share, and for how long it is looked at.
const NEIGHBOUR: u64 = 16 << 20;
const LOOK_NS: u64 = 20_000_000;

pub fn run(args: &BenchLease) -> Result<()> {
    let measured = if args.pins { pins::run(args) } else { measure(args) };
    // A terminal's signal reaches children, too, and what ends by it may be seen before this process's own comes.
    let end = Instant::now() + Duration::from_millis(500);
    while measured.is_err() && !interrupt::requested() && Instant::now() < end {
        thread::sleep(Duration::from_millis(5));
    }
    measured
}

fn measure(args: &BenchLease) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let threads = args.threads.map_or(machine.topology.cpus.len(), |threads| threads as usize);
    if let Err(error) = Command::new(&args.qemu).arg("--version").output() {
        bail!("{} cannot be run: {error}; name a QEMU with --qemu", args.qemu.display());
    }
    let repeat = Repeat::new(args.runs, args.warmup.warmup);
    let bar = progress::bar((args.sizes.len() * WAYS.len() * repeat.all()) as u64, machine.quiet());
    let mut lines = table::new(["size", "memory", "ms", "± stdev", "of prealloc=off"]);
    let (mut rows, mut filled) = (Vec::new(), Counts::default());
    let (mut slowed, mut filtered) = (None, None);
    let mut restores = table::new(["size", "memory", "guest answers, ms", "has touched all, ms"]);
    let mut pins = Pins::new();
    let mut template_cpu = Samples::default();
    let mut programs = table::new(["size", "memory", "mapped, ms", "touched, ms"]);
    let mut left_out = Vec::new();
    for size in &args.sizes {
        let bytes = machine.whole_pages(*size, PageSize::Size2M)?;
        // The machine's or the daemon's, never both.
        let _pool = match HugetlbPool::new().ensure(PageSize::Size2M, bytes / PageSize::Size2M.bytes(), None) {
            Ok(guard) => guard,
            Err(error) => {
                left_out.push(format!("not measured: {size}, which takes as much of the kernel's pool: {error}"));
                continue;
            }
        };
        bar.set_message(format!("{size}, {FIRST_USE}"));
        let first_use = first_use(args, bytes, threads)?;
        let bench = Bench::start(args, bytes, threads, &["--size", &bytes.to_string(), "--shape", &bytes.to_string()])?;
        let mut times = vec![Samples::default(); WAYS.len()];
        for run in 0..repeat.all() {
            for i in 0..WAYS.len() {
                interrupt::check()?;
                let index = (i + run) % WAYS.len();
                bar.set_message(format!("{size}, {}", WAYS[index].name()));
                bar.inc(1);
                if WAYS[index].is_slow() && times[index].runs() == SLOW_RUNS {
                    continue;
                }
                let time = bench.once(WAYS[index])?;
                if repeat.is_measured(run) {
                    times[index].push(time.as_secs_f64() * 1e3);
                }
            }
        }
        for (index, (way, times_of)) in WAYS.iter().zip(&times).enumerate() {
            let ratio = times_of.per_run_ratio(&times[0]);
            if way.is_judged() {
                let row = Row::median("bench.lease.vs_no_prealloc", &ratio, "ratio").label("size", bytes);
                rows.push(row.label("memory", way.name()));
            }
            lines.add_row([
                if index == 0 { size.to_string() } else { String::new() },
                way.name().to_owned(),
                format!("{:.1}", times_of.median()),
                format!("{:.1}%", times_of.stdev_percent()),
                format!("{:.2} ×", ratio.median()),
            ]);
            let row = Row::median("bench.lease.exec_to_ready", times_of, "ms");
            let row = row.label("size", bytes).label("memory", way.name());
            rows.push(if *way == Way::Threads { row.label("threads", threads) } else { row });
        }
        let first = Samples::once(first_use.as_secs_f64() * 1e3);
        let ratio = first.median() / times[0].median();
        let cells = ["", FIRST_USE, &format!("{:.1}", first.median()), "one run", &format!("{ratio:.2} ×")];
        lines.add_row(cells);
        let row = Row::median("bench.lease.exec_to_ready", &first, "ms").label("size", bytes);
        rows.push(row.label("memory", FIRST_USE).label("threads", threads));
        let counts = bench.status()?.counts;
        filled.filled_bytes += counts.filled_bytes;
        filled.fill_ns += counts.fill_ns;
        filled.fill_cpu_ns += counts.fill_cpu_ns;
        for (leased, memory) in [(false, "its own"), (true, Way::Wrapper.name())] {
            bar.set_message(format!("{size}, a program that maps {memory}"));
            let mut times = [Samples::default(), Samples::default()];
            for run in 0..repeat.all() {
                for (touches, times) in [false, true].into_iter().zip(&mut times) {
                    let time = bench.program(leased, touches)?;
                    if repeat.is_measured(run) {
                        times.push(time.as_secs_f64() * 1e3);
                    }
                }
            }
            let [mapped, touched] = times.each_ref().map(|times| format!("{:.1}", times.median()));
            programs.add_row([size.to_string(), memory.to_owned(), mapped, touched]);
            for (what, times) in ["mapped", "touched"].into_iter().zip(&times) {
                let row = Row::median("bench.lease.program", times, "ms").label("size", bytes);
                rows.push(row.label("memory", memory).label("until", what));
            }
        }
        if machine.topology.cpus.len() > 1 {
            bar.set_message(format!("{size}, a neighbour"));
            slowed = Some(bench.neighbour(&machine)?);
        }
        if filtered.is_none() {
            bar.set_message("a program that makes no memory");
            filtered = Some(filter::cost(&bench.socket(), &bench.dir.dir, args.runs)?);
        }
        pins.measure(bytes, repeat.all(), Some(&bench), &bar)?;
        drop(bench);
        bar.set_message(format!("{size}, a snapshot"));
        let dir = Scratch::new("snapshot")?;
        let Some(snapshot) = Snapshot::make(&args.qemu, &dir.dir, bytes)? else { continue };
        let template = format!("{}={}", snapshot.template().name, snapshot.template().path.display());
        let bench = Bench::start(args, bytes, threads, &["--template", &template])?;
        for memory in restore::Memory::ALL {
            let (mut running, mut touched) = (Samples::default(), Samples::default());
            for run in 0..repeat.all().min(SLOW_RUNS + 1) {
                interrupt::check()?;
                bar.set_message(format!("{size}, restored on {}", memory.name()));
                bench.wait_until("the template is ready", || {
                    let status = bench.status()?;
                    Ok(status.leases.is_empty() && status.templates.iter().all(|template| template.ready))
                })?;
                let times =
                    snapshot.restore(memory, bench.lease(&["--template", restore::NAME, "--require", "--"])?)?;
                if run > 0 || repeat.all() == 1 {
                    running.push(times.running.as_secs_f64() * 1e3);
                    touched.push(times.touched.as_secs_f64() * 1e3);
                }
            }
            let cells = [&running, &touched].map(|times| format!("{:.0}", times.median()));
            let [answers, all] = cells;
            restores.add_row([size.to_string(), memory.name().to_owned(), answers, all]);
            for (metric, times) in
                [("bench.lease.restore_to_running", running), ("bench.lease.restore_to_touched", touched)]
            {
                rows.push(Row::median(metric, &times, "ms").label("size", bytes).label("memory", memory.name()));
            }
        }
        let counts = bench.status()?.counts;
        template_cpu.push(counts.fill_cpu_ns as f64 / 1e9 / (counts.filled_bytes.max(1) as f64 / (1u64 << 30) as f64));
    }
    bar.finish_and_clear();
    if filled.filled_bytes == 0 {
        bail!("no size fits; name smaller ones with --sizes, or free memory ({})", left_out.join("; "));
    }
    let gib = filled.filled_bytes as f64 / (1u64 << 30) as f64;
    let (cpu, bandwidth) =
        (filled.fill_cpu_ns as f64 / 1e9 / gib, filled.filled_bytes as f64 / filled.fill_ns.max(1) as f64);
    rows.push(Row::single("bench.lease.filled", gib, "GiB"));
    rows.push(Row::single("bench.lease.fill_cpu_per_gib", cpu, "s"));
    rows.push(Row::single("bench.lease.fill_bandwidth", bandwidth, "GB/s"));
    let title = format!("From exec to a machine that answers, {threads} threads; median of {} runs", args.runs);
    let mut remarks = left_out;
    remarks.push(format!(
        "filled meanwhile, and moved, not saved: {gib:.1} GiB, {cpu:.2} s of CPU time per GiB, at {bandwidth:.1} GB/s"
    ));
    if let Some(slowed) = &slowed {
        rows.push(Row::median("bench.lease.neighbour_slowdown", slowed, "×"));
        remarks.push(format!(
            "a neighbour whose {} are in the shared cache took {:.2} ± {:.2} × as long for a load while the last size was filled",
            Size(NEIGHBOUR),
            slowed.median(),
            slowed.stdev()
        ));
    }
    if let Some((program, cost)) = &filtered {
        rows.push(Row::median("bench.lease.filter_cpu", cost, "ratio").label("program", *program));
        let (median, stdev) = (cost.median(), cost.stdev());
        remarks.push(format!("{program} took {median:.3} ± {stdev:.3} × its CPU time behind the filter"));
    }
    let mut results = Results::default();
    results.tables.push((title, lines));
    results.tables.push(("From exec of a program that does nothing else".to_owned(), programs));
    pins.add_to(&mut results);
    if template_cpu.runs() > 0 {
        rows.push(Row::median("bench.lease.template_cpu_per_gib", &template_cpu, "s"));
        remarks.push(format!("a template took the daemon {:.2} s of CPU time per GiB", template_cpu.median()));
        results.tables.push(("From exec to a guest that was saved".to_owned(), restores));
    }
    results.rows.splice(0..0, rows);
    results.remarks.splice(0..0, remarks);
    machine.show(results)
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
        match self.ask(&Request::Status {})? {
            Answer::Status(status) => Ok(*status),
            _ => bail!("the lease daemon answered something else"),
        }
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
        host.run_on(CpuId(0), |_| {
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

    /// How long a program takes that only maps memory, or touches it, too.
    fn program(&self, leased: bool, touches: bool) -> Result<Duration> {
        let placed = self.fill()?.counts.placed;
        if !leased {
            self.drain()?;
            return touch::time(None, self.bytes, touches);
        }
        let time = touch::time(Some(self.lease(&["--require", "--"])?), self.bytes, touches)?;
        self.check_placed(placed + 1)?;
        Ok(time)
    }

    /// One start. A filling leaves the caches without QEMU: it comes right before each start but two. `prealloc=off`, which the goals
    /// are held to, is started once more before it is measured, as whoever has no daemon has it; and what is kept has its first start.
    fn once(&self, way: Way) -> Result<Duration> {
        let before = self.fill()?;
        let time = match way {
            Way::Off => {
                self.drain()?;
                self.start_machine(way)?;
                self.start_machine(way)?
            }
            Way::OffAfterFilling | Way::OneThread | Way::Threads | Way::Empty => {
                self.drain()?;
                self.start_machine(way)?
            }
            Way::Wrapper | Way::WrapperOff | Way::Path | Way::Descriptor => {
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

    /// Starts a machine on whatever there is.
    fn start_machine(&self, way: Way) -> Result<Duration> {
        let (qemu, bytes) = (&self.args.qemu, self.bytes);
        let from = Instant::now();
        let mut holder = None;
        let mut command;
        match way {
            Way::Off | Way::OffAfterFilling | Way::OneThread | Way::Threads => {
                command = Command::new(qemu);
                let prealloc = match way {
                    Way::Off | Way::OffAfterFilling => "prealloc=off".to_owned(),
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

/// Has a program end if this thread does, killed or not: nobody else would end it.
pub(super) fn end_with_this(command: &mut Command, signal: Signal) -> &mut Command {
    let parent = rustix::process::getpid();
    let end = move || {
        rustix::process::set_parent_process_death_signal(Some(signal))?;
        // Killed meanwhile, it sends none.
        let is_there = rustix::process::getppid() == Some(parent);
        is_there.then_some(()).ok_or_else(|| std::io::ErrorKind::NotFound.into())
    };
    // SAFETY: between fork and exec it makes two system calls.
    unsafe { command.pre_exec(end) }
}

/// The lines of a pipe, waited for until a time, or until this command is interrupted.
pub(super) struct Lines {
    pipe: OwnedFd,
    text: Vec<u8>,
    patience: Duration,
}

impl Lines {
    pub(super) fn new(pipe: OwnedFd, patience: Duration) -> Self {
        Lines { pipe, text: Vec::new(), patience }
    }

    pub(super) fn next(&mut self) -> Result<String> {
        let until = Instant::now() + self.patience;
        loop {
            if let Some(end) = self.text.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.text.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line).into_owned());
            }
            interrupt::check()?;
            if Instant::now() > until {
                bail!("QEMU has not answered after {} s", self.patience.as_secs());
            }
            let moment = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
            match poll(&mut [PollFd::new(&self.pipe, PollFlags::IN)], Some(&moment)) {
                Ok(0) | Err(Errno::INTR) => continue,
                other => other?,
            };
            let mut part = [0; 4096];
            let got = rustix::io::retry_on_intr(|| rustix::io::read(&self.pipe, &mut part))?;
            if got == 0 {
                bail!("QEMU ended before it answered");
            }
            self.text.extend(&part[..got]);
        }
    }
}

/// Ends a machine: by its own command, or, if that takes long, without asking.
pub(super) fn end(child: &mut Child) {
    let _ = child.stdin.take().map(|mut input| input.write_all(b"{\"execute\":\"quit\"}\n"));
    let until = Instant::now() + Duration::from_secs(10);
    while matches!(child.try_wait(), Ok(None)) {
        if Instant::now() > until || interrupt::requested() {
            let _ = child.kill();
            let _ = child.wait();
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// How long a machine may take.
const PATIENCE: Duration = Duration::from_secs(600);

/// Starts a machine, and ends it when it answers. The time since `from`.
fn until_ready(command: &mut Command, from: Instant) -> Result<Duration> {
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = end_with_this(command, Signal::KILL).spawn()?;
    let answered = ask(&mut child).map(|()| from.elapsed());
    // Whatever it answered; dropping its input is not enough for a machine that did not.
    if answered.is_err() {
        let _ = child.kill();
    }
    end(&mut child);
    answered
}

/// The greeting comes before the memory; an answer comes from a machine that is there.
fn ask(child: &mut Child) -> Result<()> {
    let (Some(input), Some(output)) = (child.stdin.as_mut(), child.stdout.take()) else { bail!("no pipes") };
    input.write_all(b"{\"execute\":\"qmp_capabilities\"}\n{\"execute\":\"query-status\"}\n")?;
    let mut lines = Lines::new(output.into(), PATIENCE);
    while !lines.next()?.contains("\"running\"") {}
    Ok(())
}
