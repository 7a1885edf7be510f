//! Options of `hugemm pool` and `hugemm lease`.

use crate::options::{Common, Warmup};
use clap::{Args, Subcommand, ValueHint};
use hugemm_inspect::topology::parse_list;
use hugemm_lease::memory_file::Page;
use hugemm_lease::template::Template;
use hugemm_workloads::options::runs;
use hugemm_workloads::size::Size;
use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;

/// What of it cannot be seen from the options.
pub const LEASE_HELP: &str = "\
hugemm lease --up-to 64G -- qemu-system-x86_64 -object memory-backend-memfd,id=m,size=48G,share=on,hugetlb=on …
  runs a stock program: the files of huge pages that it and what it starts make are leased ones, 64G together at most.
hugemm lease -- PROGRAM
  the same with no limit but what the daemon has, and its policy.
hugemm lease 64G -- PROGRAM
  the same for one file of exactly that length, which is leased before PROGRAM starts.
hugemm lease 64G -- PROGRAM --memory @LEASE@
  for a program that takes a path: @LEASE@ becomes /proc/self/fd/N, in any argument.
hugemm lease 64G --fd 7 -- PROGRAM --memory-fd=7
  for a program that takes a descriptor: it inherits the memory as number 7.
hugemm lease 64G --path
  prints a path that any program of this user can open, /proc/PID/fd/N, and leaves a process that holds it: end that with kill PID.

Memory must be mapped shared. If no daemon answers or nothing is ready, COMMAND is run as without a lease, and a line says so.";

#[derive(Debug, Args)]
pub struct Lease {
    /// How much, in whole pages: one file.
    #[arg(value_name = "SIZE", required_unless_present_any = ["up_to", "template", "command"])]
    pub size: Option<Size>,
    /// Lend whatever files of huge pages COMMAND and what it starts make, so much together at most [default without SIZE: no limit].
    #[arg(long, value_name = "SIZE", requires = "command", conflicts_with_all = ["size", "fd", "path", "keep", "template"])]
    pub up_to: Option<Size>,
    /// Say of each file that it was lent, or why not.
    #[arg(long, conflicts_with = "json")]
    pub verbose: bool,
    /// Of which pages: 2M, 1G or thp [default: whatever the daemon has].
    #[arg(long, value_name = "PAGE", value_parser = page)]
    pub page: Option<Page>,
    /// From which NUMA node [default: wherever the daemon's are].
    #[arg(long, value_name = "N", value_parser = number)]
    pub node: Option<u32>,
    /// With the bytes of a file that the daemon serves as this template, and of its length.
    #[arg(long, value_name = "NAME", conflicts_with = "keep")]
    pub template: Option<String>,
    /// Keep the memory, with its bytes, under this name when the program ends, for this user to lease again.
    #[arg(long, value_name = "NAME", requires_all = ["secret", "size"])]
    pub keep: Option<String>,
    /// The file with the secret of kept memory: made by the first lease, needed by later ones.
    #[arg(long, value_name = "FILE", requires = "keep", value_hint = ValueHint::FilePath)]
    pub secret: Option<PathBuf>,
    /// Clear what was kept before the command gets it, past the caches.
    #[arg(long, requires = "keep")]
    pub scrub: bool,
    /// Fail where nothing can be leased, instead of running COMMAND without; a file that COMMAND cannot have leased cannot be made.
    #[arg(long)]
    pub require: bool,
    /// COMMAND inherits the memory as this descriptor.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(3..=1023), requires = "command")]
    pub fd: Option<i32>,
    /// Print a path, and leave a process that holds the memory.
    #[arg(long, conflicts_with = "command")]
    pub path: bool,
    /// The same, as JSON with the process and the lease; with --up-to, what was lent, as JSON on standard error at the end.
    #[arg(long)]
    pub json: bool,
    /// Where the daemon listens.
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub socket: Option<PathBuf>,
    /// What to run.
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

impl Lease {
    /// How much may be lent of whatever files COMMAND makes; `None`: it is one lease that is asked for.
    pub fn budget(&self) -> Option<u64> {
        let is_one = self.size.is_some() || self.template.is_some();
        self.up_to.map(|size| size.0).or((!is_one).then_some(u64::MAX))
    }
}

#[derive(Debug, Subcommand)]
pub enum Pool {
    /// Fill memory in the background and lease it, until told to stop.
    Serve(Serve),
    /// What is ready, what is lent, what is missing and why.
    Status(AskStatus),
    /// Give the ready memory back to the kernel and fill no more, until `fill`.
    Drain(Ask),
    /// Fill again.
    Fill(Ask),
    /// Keep memory of that name no more, and give it back to the kernel.
    Forget(ForgetKept),
    /// What of this machine limits leases, and what to do about it.
    Doctor(Ask),
}

#[derive(Debug, Args)]
pub struct ForgetKept {
    /// Under which name it is kept.
    pub name: String,
    /// The file with its secret, which is removed; root and the daemon's user need none.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub secret: Option<PathBuf>,
    /// Whose it is, by number; for root and the daemon's user [default: this user].
    #[arg(long, value_name = "UID", value_parser = number)]
    pub user: Option<u32>,
    #[command(flatten)]
    pub ask: Ask,
}

#[derive(Debug, Args)]
pub struct Serve {
    /// How much should be ready.
    #[arg(long, required_unless_present = "template")]
    pub size: Option<Size>,
    /// Have memory with the bytes of FILE ready, too, for whoever may read FILE; may be given again for others.
    #[arg(long, value_name = "NAME=FILE", value_parser = template)]
    pub template: Vec<Template>,
    /// Of which pages: 2M or 1G from the kernel's pools, thp where there is none.
    #[arg(long, default_value = "2M", value_parser = page)]
    pub page: Page,
    /// In files of which sizes [default: four of a quarter each].
    #[arg(long, value_name = "SIZE[xN],…", value_delimiter = ',')]
    pub shape: Vec<Shape>,
    /// From one NUMA node [default: from any].
    #[arg(long, value_name = "N", value_parser = number)]
    pub node: Option<u32>,
    /// Most bytes filled in a second [default: no bound].
    #[arg(long, value_name = "SIZE")]
    pub max_bandwidth: Option<Size>,
    /// CPUs to fill on, such as 0-3,8 [default: any].
    #[arg(long, value_name = "LIST")]
    pub cpus: Option<Cpus>,
    /// Bytes of the kernel's pool to leave alone.
    #[arg(long, value_name = "SIZE")]
    pub keep_free: Option<Size>,
    /// Who may lease how much, a line each: `uid 1000 64G`, `gid 36 512G 0,1` [default: root and this user].
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub policy: Option<PathBuf>,
    /// Where to listen, unless a service manager passes a socket.
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub socket: Option<PathBuf>,
    /// Where OpenMetrics text is fetched: ADDRESS:PORT, or a path with a `/` for a Unix socket.
    #[arg(long, value_name = "PLACE")]
    pub metrics: Option<String>,
}

#[derive(Debug, Args)]
pub struct BenchLease {
    /// Sizes of the machines. Each takes as much of the kernel's pool, which is raised for it.
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', default_values = ["256MB", "1GB", "2GB"])]
    pub sizes: Vec<Size>,
    /// Only how long memory takes to be pinned, by io_uring and by a GPU's runtime; without a QEMU.
    #[arg(long, conflicts_with_all = ["threads", "qemu"])]
    pub pins: bool,
    /// Threads of `prealloc=on` [default: as many as CPUs].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Measured runs.
    #[arg(long, default_value_t = 5, value_parser = runs())]
    pub runs: u32,
    #[command(flatten)]
    pub warmup: Warmup,
    /// The QEMU to start.
    #[arg(long, value_name = "PATH", default_value = "qemu-system-x86_64", value_hint = ValueHint::ExecutablePath)]
    pub qemu: PathBuf,
    #[command(flatten)]
    pub common: Common,
}

/// Commands to a daemon.
#[derive(Debug, Args)]
pub struct Ask {
    /// Where the daemon listens.
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub socket: Option<PathBuf>,
    #[command(flatten)]
    pub common: Common,
}

#[derive(Debug, Args)]
pub struct AskStatus {
    /// Wait until the daemon answers and all is ready, for so many seconds at most; an error if it is not.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub wait: Option<u64>,
    #[command(flatten)]
    pub ask: Ask,
}

/// Of a node or a user.
fn number(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("'{text}' is no number; write one, such as 0"))
}

fn template(text: &str) -> Result<Template, String> {
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && !path.is_empty() && !name.contains(char::is_control) => {
            Ok(Template { name: name.to_owned(), path: path.into() })
        }
        _ => Err(format!("'{text}' is no template; write one as NAME=FILE")),
    }
}

fn page(text: &str) -> Result<Page, String> {
    match text.to_ascii_lowercase().trim_end_matches('b') {
        "2m" => Ok(Page::Huge2M),
        "1g" => Ok(Page::Huge1G),
        "thp" => Ok(Page::Transparent),
        _ => Err(format!("'{text}' is none of 2M, 1G and thp")),
    }
}

/// Files of one size, and how many.
#[derive(Clone, Copy, Debug)]
pub struct Shape(pub u64, pub u64);

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (size, count) = text.split_once(['×', 'x']).unwrap_or((text, "1"));
        let count = count.parse().map_err(|_| format!("'{count}' is no number of files; write 64G or 64Gx4"))?;
        if count == 0 {
            return Err("no files of a size is not a shape; leave it out".to_owned());
        }
        Ok(Shape(size.parse::<Size>()?.0, count))
    }
}

/// CPUs, as lists are written in /sys: `0-3,8`.
#[derive(Clone, Debug)]
pub struct Cpus(pub Vec<usize>);

impl FromStr for Cpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let cpus = parse_list(text).ok().filter(|cpus| cpus.last().is_some_and(|last| *last < 1 << 16));
        let cpus = cpus.ok_or_else(|| format!("'{text}' is no list of CPUs; write one as 0-3,8"))?;
        Ok(Cpus(cpus.into_iter().map(|cpu| cpu as usize).collect()))
    }
}
