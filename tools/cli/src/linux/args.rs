//! Options of `hugemm linux`.

use crate::accel::Choice;
use crate::args::Common;
use clap::{Args, Parser, Subcommand, ValueEnum};
use hugemm_base::PageSize;
use hugemm_reclaim::LruPolicy;
use hugemm_workloads::options::{list, named, one_of, seconds};
use hugemm_workloads::request::{Function, Optimization};
use hugemm_workloads::size::Size;
use hugemm_workloads::vm_create::CreateMethod;
use hugemm_workloads::words::List;
use std::path::PathBuf;

/// Where kernels come from, and what the figures are worth.
pub const LINUX_HELP: &str = "\
The kernels are any distribution's: nothing is installed. docs/linux-guests.md says how to fetch Debian's by package name.

COMMAND is one of
  bench pool -n PAGES [--page 2MB|1GB] [--hvo off,on]
  bench mem mmap -s SIZE [-p 4KB|2MB|1GB] [-f demand,populate] [--kind hugetlb|thp]
  bench vm-create -s SIZE [-p 4KB|2MB|1GB] [--how demand,prefault] [--workers N,…]
                  [--kind hugetlb|thp]
  bench age [--memory SIZE] [--procs N] [--seconds S] [--lru classic,generations]

With --reference hugemm's pages come from a pool where Linux's do (hugetlb), else from free memory.

Under tcg only ratios and counts mean something, milliseconds do not; under icount they mean instructions, whatever else \
the machine does. The CPU model leaves out what QEMU emulates slowly and the kernel would use: `rep stosb`, which is several times \
slower than plain stores, on x86-64, and the algorithm of pointer authentication on arm64.";

/// `hugemm linux`
#[derive(Debug, Args)]
pub struct Linux {
    /// Kernel images, of x86-64 or of arm64.
    #[arg(required = true, value_name = "VMLINUZ")]
    pub kernels: Vec<PathBuf>,
    /// Numbers of virtual CPUs.
    #[arg(long, value_delimiter = ',', default_value = "2", value_parser = clap::value_parser!(u32).range(1..=255))]
    pub cpus: Vec<u32>,
    /// Memory of each guest.
    #[arg(long, default_value = "6GB")]
    pub memory: Size,
    /// What executes the guests.
    #[arg(long, value_enum, default_value_t = Choice::Tcg)]
    pub accel: Choice,
    /// CPU model, in QEMU's notation [default: max,-erms; on arm64 max,pauth-impdef=on].
    #[arg(long)]
    pub cpu_model: Option<String>,
    /// Measured runs in each guest; one more warms up.
    #[arg(short, long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: u32,
    /// Let the kernels clear pages when they are allocated, as some distributions do.
    #[arg(long)]
    pub init_on_alloc: bool,
    /// Add hugemm's reference kernel on the same virtual machines.
    #[arg(long)]
    pub reference: bool,
    /// Seconds that a guest may take.
    #[arg(long, default_value_t = 300, value_parser = seconds())]
    pub timeout: u64,
    /// The guest's init program, instead of building it.
    #[arg(long, value_name = "FILE")]
    pub init: Option<PathBuf>,
    #[command(flatten)]
    pub common: Common,
    /// What the guests do.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// The part of the command line after `--`.
#[derive(Debug, Parser)]
#[command(name = "hugemm linux … --", no_binary_name = true, disable_help_flag = true, disable_version_flag = true)]
pub struct GuestLine {
    #[command(subcommand)]
    pub command: GuestCommand,
}

/// What a Linux guest can do. Its jobs have other parameters than the reference kernel's, which declare hugemm's own ways too:
/// only what stock Linux can be asked for, one size in each, and what its huge pages are.
#[derive(Debug, Subcommand)]
pub enum GuestCommand {
    /// Measure one workload.
    #[command(subcommand)]
    Bench(GuestBench),
}

/// The workloads.
#[derive(Debug, Subcommand)]
pub enum GuestBench {
    /// Grow and shrink the huge page pool.
    Pool(GuestPool),
    /// Memory.
    #[command(subcommand)]
    Mem(GuestMem),
    /// Allocate, clear and map a virtual machine's memory.
    VmCreate(GuestVmCreate),
    /// Processes that share more memory than there is.
    Age(GuestAge),
}

/// The workloads of `bench mem`.
#[derive(Debug, Subcommand)]
pub enum GuestMem {
    /// Populate memory page by page.
    Mmap(GuestMmap),
}

/// `bench pool`
#[derive(Debug, Args)]
pub struct GuestPool {
    /// Huge pages.
    #[arg(short, long, value_parser = clap::value_parser!(u64).range(1..))]
    pub n: u64,
    /// Their size.
    #[arg(short, long, ignore_case = true, default_value = "2MB", value_parser = named::<PageSize>())]
    pub page: PageSize,
    /// Vmemmap optimization.
    #[arg(long, default_value = "off,on", value_parser = list(one_of(|hvo: Optimization| hvo != Optimization::InPlace)))]
    pub hvo: List<Optimization>,
}

/// `bench mem mmap`
#[derive(Debug, Args)]
pub struct GuestMmap {
    /// Memory per run.
    #[arg(short, long)]
    pub size: Size,
    /// Page size.
    #[arg(short, long, ignore_case = true, default_value = "2MB", value_parser = named::<PageSize>())]
    pub page: PageSize,
    /// Who populates.
    #[arg(short, long, default_value = "demand", value_parser = list(named::<Function>()))]
    pub function: List<Function>,
    /// What Linux's huge pages are.
    #[arg(long, value_enum, default_value_t = GuestKind::Hugetlb)]
    pub kind: GuestKind,
}

/// `bench vm-create`
#[derive(Debug, Args)]
pub struct GuestVmCreate {
    /// The virtual machine's memory.
    #[arg(short, long)]
    pub size: Size,
    /// Page size.
    #[arg(short, long, ignore_case = true, default_value = "2MB", value_parser = named::<PageSize>())]
    pub page: PageSize,
    /// How the memory is asked for: Linux cannot pin without a device.
    #[arg(long, default_value = "demand,prefault", value_parser = list(one_of(|how: CreateMethod| how != CreateMethod::Pin)))]
    pub how: List<CreateMethod>,
    /// Numbers of CPUs that fill it.
    #[arg(short, long, default_value = "1,2", value_parser = list(clap::value_parser!(u32).range(1..=255)))]
    pub workers: List<u32>,
    /// What Linux's huge pages are.
    #[arg(long, value_enum, default_value_t = GuestKind::Hugetlb)]
    pub kind: GuestKind,
}

/// `bench age`
#[derive(Debug, Args)]
pub struct GuestAge {
    /// Memory that there is, compressed pages included; half of it at most is theirs. The processes share one and a half times
    /// as much.
    #[arg(long, default_value = "128MB")]
    pub memory: Size,
    /// Processes that share the region.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=14))]
    pub procs: u32,
    /// Seconds of each run.
    #[arg(long, default_value_t = 15, value_parser = seconds())]
    pub seconds: u64,
    /// Which pages are old.
    #[arg(long, default_value = "classic,generations", value_parser = list(named::<LruPolicy>()))]
    pub lru: List<LruPolicy>,
}

/// Linux's kinds of huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GuestKind {
    /// From a pool that has been filled before.
    Hugetlb,
    /// Transparent huge pages, from free memory; 2 MiB only.
    Thp,
}

impl GuestKind {
    /// Its name on the command line and in results.
    pub fn name(self) -> &'static str {
        match self {
            GuestKind::Hugetlb => "hugetlb",
            GuestKind::Thp => "thp",
        }
    }
}
