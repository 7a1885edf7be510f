//! Options of `hugemm boot`, and the commands of the reference kernel.

use crate::accel::Choice;
use crate::age::args::{Lists, Mapped, Young};
use crate::arch::Arch;
use crate::args::{Common, Function, Page, cpus, order, runs, seconds};
use crate::boot::CPU_MODEL;
use crate::cli_text;
use crate::pool::args::{Flush, HugeSize, Hvo};
use crate::size::Size;
use crate::vm_create::args::{Clearing, How, Source};
use anyhow::{Result, bail};
use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand};
use hugemm_base::{Order, PageSize};
use hugemm_kernel_commands::request::{self, Crash, List, Part, Plant, Request};
use std::path::PathBuf;

/// What can be run.
pub const BOOT_HELP: &str = "\
COMMAND is one of
  run              [-r RUNS]                       the phases of 'hugemm run'
  bench mem memset [-s SIZE] [-k CHUNK,…] [-l LOOPS]
  bench mem mmap   [-s SIZE] [-p 4KB|2MB|1GB] [-f demand,populate] [-l LOOPS]
  bench vm-create  [-s SIZE] [-p 4KB,2MB,1GB] [--how demand,prefault,pin] [--workers N,…]
                   [--clear page,extent,bulk] [--from pool|frames] [-r RUNS]
  bench free       [-n BLOCKS] [-o ORDER,…] [-r RUNS]
  bench alloc      [-o ORDER,…] [--millis MS] [-r RUNS]
  bench pool       [-n PAGES,…] [-p 2MB|1GB] [--hvo off,on,in-place] [--flush batch,page] [-r RUNS]
  bench age        [--procs N] [--shared SIZE] [--memory SIZE] [--swap SIZE] [--seconds S] [-p 4KB,2MB]
                   [--young flush,nosync,noflush,batch] [--lru classic,generations]
  bench shootdown  [--pages PAGES] [--each PAGES] [-r RUNS]
  selftest         [--seconds S] [--resizes N] [--only PART] [--plant BUG]
                   PART: frames, translations, rights, descriptors, convoy, address-spaces, pressure, pools
                   BUG, which it then has to find: free-before-flush, missed-cpu, lazy-cpu,
                   unflushed-protect, lost-dirty, double-free, unflushed-swap

Under tcg only ratios and counts mean something, nanoseconds do not.";

/// `hugemm boot`
#[derive(Debug, Args)]
pub struct Boot {
    /// Virtual CPUs [default: as many as this process may use].
    #[arg(long)]
    pub cpus: Option<u32>,
    /// Memory of the guest.
    #[arg(long, default_value = "1GB")]
    pub memory: Size,
    /// Architecture of the guest [default: this machine's].
    #[arg(long, value_enum, default_value_t = Arch::NATIVE, hide_default_value = true)]
    pub arch: Arch,
    /// CPU model, in QEMU's notation.
    #[arg(long, default_value = CPU_MODEL)]
    pub cpu_model: String,
    /// What executes the guest.
    #[arg(long, value_enum, default_value_t = Choice::Auto)]
    pub accel: Choice,
    /// The kernel image, instead of finding or building it.
    #[arg(long, value_name = "FILE")]
    pub image: Option<PathBuf>,
    /// Seconds that the guest may take.
    #[arg(long, default_value_t = 3600, value_parser = seconds())]
    pub timeout: u64,
    #[command(flatten)]
    pub common: Common,
    /// What the kernel runs.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// The part of the command line after `--`.
#[derive(Debug, Parser)]
#[command(name = "hugemm boot … --", no_binary_name = true, disable_help_flag = true, disable_version_flag = true)]
struct KernelLine {
    #[command(subcommand)]
    command: KernelCommand,
}

#[derive(Debug, Subcommand)]
enum KernelCommand {
    /// The work of a virtual machine host.
    Run {
        #[arg(short, long, default_value_t = 3, value_parser = runs())]
        runs: u32,
    },
    /// Measure one workload.
    #[command(subcommand)]
    Bench(KernelBench),
    /// Every system's stress on the real machine.
    Selftest(Selftest),
    /// A failure on purpose.
    #[command(hide = true)]
    Crash {
        #[arg(value_parser = named::<Crash>)]
        how: Crash,
    },
}

#[derive(Debug, Subcommand)]
enum KernelBench {
    /// Memory clearing.
    #[command(subcommand)]
    Mem(KernelMem),
    /// A virtual machine's memory.
    VmCreate(VmCreate),
    /// Blocks split into pages and freed.
    Free(Free),
    /// Pairs on one to all CPUs.
    Alloc(Alloc),
    /// A huge page pool grown and shrunk.
    Pool(Pool),
    /// Ranges taken away from one to all CPUs.
    Shootdown(Shootdown),
    /// Processes that share more memory than there is.
    Age(Age),
}

#[derive(Debug, Subcommand)]
enum KernelMem {
    /// Clear memory chunk by chunk with each primitive.
    Memset(Memset),
    /// Map memory and populate it.
    Mmap(Mmap),
}

#[derive(Debug, Args)]
struct Memset {
    #[arg(short, long, default_value = "256MB")]
    size: Size,
    #[arg(short = 'k', long, value_delimiter = ',', default_value = "4KB,64KB,2MB,32MB")]
    chunk: Vec<Size>,
    #[arg(short = 'l', long, default_value_t = 3, value_parser = runs())]
    loops: u32,
}

#[derive(Debug, Args)]
struct Mmap {
    #[arg(short, long, default_value = "256MB")]
    size: Size,
    #[arg(short, long, value_enum, default_value_t = Page::Size2M)]
    page: Page,
    #[arg(short, long, value_enum, value_delimiter = ',', default_value = "demand,populate")]
    function: Vec<Function>,
    #[arg(short = 'l', long, default_value_t = 3, value_parser = runs())]
    loops: u32,
}

#[derive(Debug, Args)]
struct VmCreate {
    #[arg(short, long, default_value = "256MB")]
    size: Size,
    #[arg(short, long, value_enum, value_delimiter = ',', default_value = "2MB")]
    page: Vec<Page>,
    #[arg(long, value_enum, value_delimiter = ',', default_value = "demand,prefault,pin")]
    how: Vec<How>,
    /// Numbers of CPUs; more than the guest has are left out.
    #[arg(short, long, value_delimiter = ',', default_value = "1,2", value_parser = cpus())]
    workers: Vec<u32>,
    #[arg(long, value_enum, value_delimiter = ',', default_value = "page,extent,bulk")]
    clear: Vec<Clearing>,
    #[arg(long, value_enum, default_value_t = Source::Pool)]
    from: Source,
    #[arg(short, long, default_value_t = 3, value_parser = runs())]
    runs: u32,
}

#[derive(Debug, Args)]
struct Free {
    #[arg(short, long, value_parser = clap::value_parser!(u64).range(1..))]
    n: Option<u64>,
    #[arg(short, long, value_delimiter = ',', default_value = "0,3,9", value_parser = order)]
    order: Vec<Order>,
    #[arg(short, long, default_value_t = 5, value_parser = runs())]
    runs: u32,
}

#[derive(Debug, Args)]
struct Alloc {
    #[arg(short, long, value_delimiter = ',', default_value = "0,9", value_parser = order)]
    orders: Vec<Order>,
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    millis: u64,
    #[arg(short, long, default_value_t = 5, value_parser = runs())]
    runs: u32,
}

#[derive(Debug, Args)]
struct Pool {
    /// Pages.
    #[arg(short, long, value_delimiter = ',', default_value = "200", value_parser = clap::value_parser!(u64).range(1..=1 << 22))]
    n: Vec<u64>,
    #[arg(short, long, value_enum, default_value_t = HugeSize::Size2M)]
    page: HugeSize,
    #[arg(long, value_enum, value_delimiter = ',', default_value = "off,on")]
    hvo: Vec<Hvo>,
    #[arg(long, value_enum, value_delimiter = ',', default_value = "batch,page")]
    flush: Vec<Flush>,
    #[arg(short, long, default_value_t = 5, value_parser = runs())]
    runs: u32,
}

#[derive(Debug, Args)]
struct Shootdown {
    /// Largest range.
    #[arg(long, default_value_t = 1 << 18, value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    pages: u64,
    /// Largest range that is flushed page by page too.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(0..=1 << 24))]
    each: u64,
    #[arg(short, long, default_value_t = 3, value_parser = runs())]
    runs: u32,
}

#[derive(Debug, Args)]
struct Age {
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=14))]
    procs: u32,
    /// The region that they share [default: one and a half times the memory].
    #[arg(long)]
    shared: Option<Size>,
    /// Memory that they may have, compressed pages included.
    #[arg(long, default_value = "64MB")]
    memory: Size,
    /// Memory that compressed pages may take [default: half of it].
    #[arg(long)]
    swap: Option<Size>,
    /// Seconds for each line of the table.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    #[arg(long, value_enum, value_delimiter = ',', default_value = "flush,batch")]
    young: Vec<Young>,
    #[arg(long, value_enum, value_delimiter = ',', default_value = "generations")]
    lru: Vec<Lists>,
    #[arg(short, long, value_enum, value_delimiter = ',', default_value = "4KB,2MB")]
    page: Vec<Mapped>,
}

#[derive(Debug, Args)]
struct Selftest {
    #[arg(short, long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    seconds: u32,
    /// Resizes of huge page pools, at least, however long they take: with allocations that fail, and a look at every
    /// descriptor after each.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    resizes: u64,
    /// One part of it, with all the time to itself.
    #[arg(long, default_value = "all", value_parser = named::<Part>)]
    only: Part,
    #[arg(long, default_value = "none", value_parser = named::<Plant>)]
    plant: Plant,
}

/// Reads one of the names that the kernel knows.
fn named<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| "no such name".to_owned())
}

/// Reads the kernel's command.
pub fn request(command: &[String]) -> Result<Request> {
    let line = match KernelLine::try_parse_from(command) {
        Ok(line) => line.command,
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::InvalidSubcommand
                    | ErrorKind::MissingSubcommand
                    | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
            ) =>
        {
            bail!(
                "the reference kernel has no command '{}'; it has run, bench mem memset, bench mem mmap, bench vm-create, \
                 bench free, bench alloc, bench pool, bench shootdown, bench age and selftest",
                command.join(" ")
            )
        }
        Err(error) => {
            bail!("the command after '--': {}; see 'hugemm boot --help'", cli_text::usage_error(&error));
        }
    };
    let orders = |orders: &[Order]| List::new(orders.iter().map(|order| u64::from(order.get())));
    Ok(match line {
        KernelCommand::Bench(KernelBench::Mem(KernelMem::Memset(args))) => Request::Memset(request::Memset {
            size: args.size.0,
            chunk: List::new(args.chunk.iter().map(|size| size.0))?,
            runs: args.loops,
        }),
        KernelCommand::Bench(KernelBench::Mem(KernelMem::Mmap(args))) => Request::Mmap(request::Mmap {
            size: args.size.0,
            order: PageSize::from(args.page).order().get(),
            demand: args.function.contains(&Function::Demand),
            populate: args.function.contains(&Function::Populate),
            runs: args.loops,
        }),
        KernelCommand::Bench(KernelBench::VmCreate(args)) => Request::VmCreate(request::VmCreate {
            size: args.size.0,
            order: List::new(args.page.iter().map(|page| PageSize::from(*page).order().get().into()))?,
            demand: args.how.contains(&How::Demand),
            prefault: args.how.contains(&How::Prefault),
            pin: args.how.contains(&How::Pin),
            workers: List::new(args.workers.iter().map(|workers| u64::from(*workers)))?,
            page: args.clear.contains(&Clearing::Page),
            extent: args.clear.contains(&Clearing::Extent),
            bulk: args.clear.contains(&Clearing::Bulk),
            pooled: args.from == Source::Pool,
            runs: args.runs,
        }),
        KernelCommand::Bench(KernelBench::Free(args)) => {
            Request::Free(request::Free { n: args.n.unwrap_or(0), order: orders(&args.order)?, runs: args.runs })
        }
        KernelCommand::Bench(KernelBench::Alloc(args)) => {
            Request::Alloc(request::Alloc { order: orders(&args.orders)?, millis: args.millis, runs: args.runs })
        }
        KernelCommand::Bench(KernelBench::Pool(args)) => {
            let (on, flush) = (args.hvo.contains(&Hvo::On), |flush| args.flush.contains(&flush));
            Request::Pool(request::Pool {
                n: List::new(args.n.iter().copied())?,
                order: PageSize::from(args.page).order().get(),
                off: args.hvo.contains(&Hvo::Off),
                on: on && flush(Flush::Batch),
                in_place: args.hvo.contains(&Hvo::InPlace),
                per_page: on && flush(Flush::Page),
                runs: args.runs,
            })
        }
        KernelCommand::Bench(KernelBench::Shootdown(args)) => {
            Request::Shootdown(request::Shootdown { pages: args.pages, each: args.each, runs: args.runs })
        }
        KernelCommand::Bench(KernelBench::Age(args)) => {
            let (young, lru) = (|way| args.young.contains(&way), |lists| args.lru.contains(&lists));
            if args.memory.0 < 32 << 20 {
                bail!("bench age --memory {} is too little; give at least 32MB", args.memory);
            }
            if !(args.seconds.is_finite() && args.seconds > 0.0) {
                bail!("bench age --seconds {} is no time; give a number above 0", args.seconds);
            }
            Request::Age(request::Age {
                page: List::new(args.page.iter().map(|page| PageSize::from(*page).order().get().into()))?,
                procs: args.procs,
                shared: args.shared.map_or(args.memory.0 / 2 * 3, |size| size.0),
                memory: args.memory.0,
                swap: args.swap.map_or(args.memory.0 / 2, |size| size.0),
                millis: (args.seconds * 1e3).max(1.0) as u64,
                classic: lru(Lists::Classic),
                generations: lru(Lists::Generations),
                flush: young(Young::Flush),
                nosync: young(Young::Nosync),
                noflush: young(Young::Noflush),
                batch: young(Young::Batch),
            })
        }
        KernelCommand::Run { runs } => Request::Run(request::Run { runs }),
        KernelCommand::Selftest(args) => {
            let Selftest { seconds, resizes, only, plant } = args;
            Request::Selftest(request::Selftest { seconds, resizes, only, plant })
        }
        KernelCommand::Crash { how } => Request::CrashTest(request::CrashTest { how }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(words: &str) -> Result<String> {
        let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
        Ok(request(&words)?.to_string())
    }

    #[test]
    fn commands_become_requests() {
        assert_eq!(line("bench free -n 7 -o 0,9").expect("valid"), "free n=7 order=0,9 runs=5");
        assert_eq!(
            line("bench mem mmap -p 1GB -s 2GB").expect("valid"),
            "mmap size=2147483648 order=18 demand=true populate=true runs=3"
        );
        assert_eq!(
            line("bench pool -n 7,9 --hvo off,on --flush page").expect("valid"),
            "pool n=7,9 order=9 off=true on=false in_place=false per_page=true runs=5"
        );
        assert_eq!(
            line("bench vm-create -p 2MB,1GB --how pin -w 4 --clear bulk --from frames").expect("valid"),
            "vm-create size=268435456 order=9,18 demand=false prefault=false pin=true workers=4 page=false extent=false \
             bulk=true pooled=false runs=3"
        );
        assert_eq!(
            line("bench age --memory 64MB --seconds 0.5 -p 4KB --young batch").expect("valid"),
            "age page=0 procs=8 shared=100663296 memory=67108864 swap=33554432 millis=500 classic=false \
             generations=true flush=false nosync=false noflush=false batch=true"
        );
        assert_eq!(
            line("selftest --only pressure").expect("valid"),
            "selftest seconds=10 resizes=1 only=pressure plant=none"
        );
        assert_eq!(
            line("selftest --seconds 3 --plant missed-cpu").expect("valid"),
            "selftest seconds=3 resizes=1 only=all plant=missed-cpu"
        );
    }

    #[test]
    fn usage_errors_are_one_line() {
        for (words, part) in [
            ("bench churn", "it has run, bench mem memset"),
            ("nonsense", "no command 'nonsense'"),
            ("bench", "no command 'bench'"),
            ("bench free --nonsense", "--nonsense"),
            ("bench free -o 19", "19"),
            ("selftest --plant nonsense", "no such name"),
            ("selftest --only nonsense", "no such name"),
        ] {
            let error = line(words).expect_err(words).to_string();
            assert!(error.contains(part) && !error.contains('\n'), "{words}: {error}");
        }
    }
}
