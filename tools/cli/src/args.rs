//! The command line.

use crate::boot::args::Boot;
use crate::frames::args as frames;
use crate::linux::args::Linux;
use crate::options::{Common, Kind, Warmup};
use crate::run::{RUN_HELP, Run};
use crate::unmeasured_args as unmeasured;
use clap::{Args, Parser, Subcommand};
use hugemm_workloads::options::{cpus, runs};
use hugemm_workloads::size::Size;
use std::path::PathBuf;

/// Memory management by extents: probes this machine, measures, compares.
#[derive(Debug, Parser)]
#[command(name = "hugemm", version, max_term_width = 100)]
#[command(after_help = "Sizes are written as 4KB, 2MB, 64GB (powers of 1024). Bandwidths are in GB/s (10^9 bytes per \
                        second).")]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Do the work of a virtual machine host: pools, machines, guests, failures; by extent, page by page, by this kernel.
    #[command(after_help = RUN_HELP)]
    Run(Run),
    /// Measure this machine's clearing primitives, find the crossovers, choose the policy.
    Probe(Probe),
    /// Measure one workload.
    #[command(subcommand)]
    Bench(Bench),
    /// Replay a Linux page allocation trace (`perf script`, `trace-cmd report`) through hugemm's allocator.
    #[command(after_help = REPLAY_HELP)]
    Replay(Replay),
    /// Do the same work in stock Linux guests on the same virtual machine: one table over kernels and CPUs.
    #[command(after_help = crate::linux::args::help())]
    Linux(Linux),

    /// Run a stock program on memory that is ready before it asks, on stock Linux.
    #[command(after_help = crate::lease::args::LEASE_HELP)]
    Lease(crate::lease::args::Lease),
    /// Have memory ready for leases: the daemon, and commands to it.
    #[command(subcommand)]
    Pool(crate::lease::args::Pool),

    // Commands that measure nothing.
    /// Compare saved results figure by figure, with their noise; fail if something got worse.
    #[command(after_help = unmeasured::COMPARE_HELP)]
    Compare(unmeasured::Compare),
    /// Make one self-contained HTML page with plots from saved results of any commands.
    Report(unmeasured::Report),
    /// Say what of this machine limits the results, and what to do about it.
    Doctor(unmeasured::Doctor),
    /// Print completions for a shell.
    #[command(after_help = unmeasured::COMPLETIONS_HELP)]
    Completions(unmeasured::Completions),
    /// Print the manual page, or write one for each command.
    Man(unmeasured::Man),
    /// Boot the reference kernel under QEMU and run a command in it, on real page tables and real interrupts.
    #[command(after_help = crate::boot::args::help())]
    Boot(Boot),
}

/// The workloads.
#[derive(Debug, Subcommand)]
#[allow(clippy::large_enum_variant, reason = "there is one value of it")]
pub enum Bench {
    /// Every goal that this machine can measure, by the commands that measure it: goal, measured, met or not. A minute or
    /// two.
    #[command(after_help = crate::headline::help())]
    Headline(crate::headline::Headline),
    /// `hugemm probe` and `hugemm bench vm-create` by the names that `perf bench mem` has for their work.
    #[command(subcommand)]
    Mem(Mem),
    /// How much a cache-resident program on one CPU is slowed down while another CPU clears.
    Interference(Interference),
    /// Blocks split into pages and freed: as a range, and page by page.
    Free(frames::Free),
    /// Pairs, bulk and random frees on one to N CPUs.
    Alloc(frames::Alloc),
    /// Mixed sizes for a while, then the huge pages that can still be had.
    Churn(frames::Churn),
    /// The heap beside those that kernels in Rust use, on one to N CPUs.
    Heap(crate::heap::HeapArgs),
    /// A huge page pool grown and shrunk, with and without vmemmap optimization.
    Pool(crate::pool::Pool),
    /// Create a virtual machine: allocate, clear and map its memory, beside this machine's kernel.
    VmCreate(crate::vm_create::VmCreate),
    /// Processes share more memory than there is: ageing and swapping, with and without flushes.
    Age(crate::age::Age),
    /// Unmap and protect pages that other CPUs may have in their TLBs, batched and page by page: time and interrupts.
    Shootdown(crate::paging::shootdown::Shootdown),
    /// Kernel areas taken and freed in the ways of Linux's test_vmalloc, and many freed, batched and page by page.
    Vmalloc(crate::paging::vmalloc::Vmalloc),
    /// Start stock QEMU on memory that it fills, and on leased memory: from exec to a machine that answers.
    Lease(crate::lease::args::BenchLease),
    /// Address space mapped, protected and unmapped by 4 KiB pages: as ranges, and page by page.
    Map(crate::paging::map::Map),
    /// What one CPU takes, and what the lines that CPUs share let 1 to 256 of them do.
    Scale(crate::scale::Scale),
}

/// Names that `perf bench mem` has.
#[derive(Debug, Subcommand)]
pub enum Mem {
    /// What `hugemm probe` does.
    Memset(Probe),
    /// What `hugemm bench vm-create` does.
    Mmap(crate::vm_create::VmCreate),
}

#[derive(Debug, Args)]
pub struct Probe {
    /// Memory to measure in; also the largest region [default: 1 GiB].
    #[arg(short, long)]
    pub size: Option<Size>,
    /// Kind of huge pages.
    #[arg(long, value_enum, default_value_t = Kind::Thp)]
    pub kind: Kind,
    /// Runs of each measurement.
    #[arg(short, long, visible_short_alias = 'l', visible_alias = "loops", default_value_t = 7, value_parser = runs())]
    pub runs: u32,
    #[command(flatten)]
    pub warmup: Warmup,
    /// Save the chosen profile as a Rust constant, for those who cannot measure at boot.
    #[arg(long, value_name = "FILE.rs")]
    pub save_profile: Option<PathBuf>,
    #[command(flatten)]
    pub common: Common,
}

#[derive(Debug, Args)]
pub struct Interference {
    /// Working sets of the cache-resident program [default: half of L2, and an eighth and a half of L3].
    #[arg(short, long, value_delimiter = ',')]
    pub working_set: Vec<Size>,
    /// Memory that the other CPU clears over and over.
    #[arg(short, long, default_value = "1GB")]
    pub size: Size,
    /// Milliseconds of each measurement.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(10..=60_000))]
    pub millis: u64,
    /// Runs of each measurement.
    #[arg(short, long, default_value_t = 5, value_parser = runs())]
    pub runs: u32,
    #[command(flatten)]
    pub warmup: Warmup,
    #[command(flatten)]
    pub common: Common,
}

/// How to get a trace, and what is measured.
const REPLAY_HELP: &str = "\
Record a trace as root, then print it as text:
  perf record -a -m 8M -e kmem:mm_page_alloc,kmem:mm_page_free,kmem:mm_page_free_batched -- COMMAND
  perf script > trace.txt
or with trace-cmd:
  trace-cmd record -e kmem:mm_page_alloc -e kmem:mm_page_free COMMAND
  trace-cmd report > trace.txt

One thread replays the events in the trace's order, each as the CPU that it happened on. Time per operation is that of \
the allocator alone: the same loop without an allocator is timed too and subtracted. Memory behind the frames is neither \
needed nor touched; only the allocator's own metadata is real.";

#[derive(Debug, Args)]
pub struct Replay {
    /// The trace: text as `perf script` or `trace-cmd report` prints it.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Virtual CPUs, onto which the trace's CPUs are folded [default: one for each CPU in the trace].
    #[arg(short, long, value_parser = cpus())]
    pub cpus: Option<u32>,
    /// Memory that the allocator manages [default: twice the trace's peak, at least 1 GiB]. With less than the peak,
    /// allocations fail and are counted.
    #[arg(short, long)]
    pub size: Option<Size>,
    /// Runs of the whole trace, each with a fresh allocator.
    #[arg(short, long, default_value_t = 7, value_parser = runs())]
    pub runs: u32,
    /// Replay through hugemm alone, not the other libraries too.
    #[arg(long)]
    pub no_peers: bool,
    #[command(flatten)]
    pub common: Common,
}
