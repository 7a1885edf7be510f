//! Options of `hugemm linux`.

use crate::boot::args::{listed, request};
use crate::options::Common;
use crate::qemu::Accel;
use anyhow::{Result, bail};
use clap::{Args, Command};
use hugemm_base::PageSize;
use hugemm_workloads::options::seconds;
use hugemm_workloads::request::{Age, Optimization, Pool, Request, VmCreate, Vmalloc};
use hugemm_workloads::size::Size;
use hugemm_workloads::vm_create::CreateMethod;
use hugemm_workloads::words::{List, Word};
use std::path::PathBuf;

/// Where kernels come from, and what the figures are worth.
pub fn help() -> String {
    format!(
        "The kernels are any distribution's: nothing is installed. docs/linux-guests.md says how to fetch Debian's by package name.\n\n\
         {}\n'hugemm linux VMLINUZ -- COMMAND --help' has its options, which are those of 'hugemm boot'; of runs, -r before the \
         '--' counts. What stock Linux has no word for (--clear, --flush, --young) is about hugemm's side alone.\n\n\
         With --reference hugemm's pages come from a pool where Linux's do, else from free memory, and Linux's are transparent \
         huge pages then (--from).\n\n\
         Under tcg only ratios and counts mean something, milliseconds do not; under icount they mean instructions, whatever else \
         the machine does. The CPU model leaves out what QEMU emulates slowly and the kernel would use: `rep stosb`, which is \
         several times slower than plain stores, on x86-64, and the algorithm of pointer authentication on arm64.",
        listed(commands())
    )
}

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
    #[arg(long, value_enum, default_value_t = Accel::Tcg)]
    pub accel: Accel,
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

/// Those of the reference kernel's commands that stock Linux can be asked for, with the defaults that it has an answer to.
fn commands() -> impl Iterator<Item = Command> {
    let defaults: [(&str, &[(&str, &str)]); 4] = [
        ("bench pool", &[("flush", "batch")]),
        ("bench vm-create", &[("size", "1GB"), ("how", "demand,prefault"), ("workers", "1,2"), ("clear", "bulk")]),
        ("bench age", &[("seconds", "15"), ("young", "batch"), ("lru", "classic,generations"), ("page", "4KB")]),
        // As much as Linux writes.
        ("bench vmalloc", &[("areas", "1000"), ("write", "64KB")]),
    ];
    let adapt = move |command: Command| {
        let (name, defaults) = *defaults.iter().find(|(name, _)| *name == command.get_name())?;
        let set = |command: Command, (arg, value): &(&'static str, &'static str)| {
            command.mut_arg(*arg, |arg| arg.default_value(*value))
        };
        Some(defaults.iter().fold(command, set).bin_name(format!("hugemm linux VMLINUZ -- {name}")))
    };
    Request::commands().filter_map(adapt)
}

/// Reads the command after `--`, to be run so often after a run that warms up.
///
/// # Errors
/// There is no such command, or stock Linux cannot do it so.
pub fn work(words: &[String], runs: u32) -> Result<Request> {
    fn one<T: Copy + Word>(list: List<T>, option: &str) -> Result<T> {
        let mut values = list.iter();
        match (values.next(), values.next()) {
            (Some(value), None) => Ok(value),
            _ => bail!("the command after '--': {option} {list} are several; give one"),
        }
    }
    let refused = |what: &str| bail!("the command after '--': stock Linux has no {what}; see 'hugemm linux --help'");
    Ok(match request(words, "hugemm linux VMLINUZ", commands())? {
        Request::Pool(pool) if pool.hvo.contains(Optimization::InPlace) => refused("--hvo in-place")?,
        Request::Pool(pool) => {
            let n = one(pool.n.unwrap_or(List::one(2000)), "-n")?;
            one(pool.flush, "--flush")?;
            Request::Pool(Pool { n: Some(List::one(n)), runs, ..pool })
        }
        Request::VmCreate(create) if create.how.contains(CreateMethod::Pin) => refused("--how pin without a device")?,
        Request::VmCreate(create) => {
            one(create.page, "-p")?;
            one(create.clear, "--clear")?;
            Request::VmCreate(VmCreate { runs, ..create })
        }
        Request::Age(age) => {
            one(age.young, "--young")?;
            let page = one(age.page, "-p")?;
            if page != PageSize::Size4K {
                bail!("the command after '--': -p {page} is not for 'bench age' here: the guests share pages of 4KB");
            }
            let [shared, memory, swap] = age.sizes(Age::MEMORY).map(Some);
            // The kernel runs every page size of the list: a warm-up before the runs.
            Request::Age(Age { shared, memory, swap, page: List::new((0..=runs).map(|_| page))?, ..age })
        }
        Request::Vmalloc(areas) => Request::Vmalloc(Vmalloc { runs, ..areas }),
        _ => refused("such command")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Request> {
        work(&line.split(' ').map(str::to_owned).collect::<Vec<_>>(), 3)
    }

    #[test]
    fn what_stock_linux_cannot_do_is_refused() {
        for (line, part) in [
            ("bench free", "no command 'bench free'; it has bench vm-create, bench pool, bench age, bench vmalloc"),
            ("bench pool --hvo on,in-place", "stock Linux has no --hvo in-place"),
            ("bench pool -n 7,8", "-n 7,8 are several"),
            ("bench pool --flush page,batch", "--flush page,batch are several"),
            ("bench vm-create --how pin", "stock Linux has no --how pin"),
            ("bench vm-create -p 2MB,1GB", "-p 2MB,1GB are several"),
            ("bench age --young noflush,batch", "--young noflush,batch are several"),
            ("bench age -p 2MB", "-p 2MB is not for 'bench age' here"),
            ("bench age -p 4KB,2MB", "-p 4KB,2MB are several"),
            ("bench age --swim", "see 'hugemm linux VMLINUZ -- bench age --help'"),
        ] {
            let error = read(line).expect_err(line).to_string();
            assert!(error.contains(part) && error.contains("after '--'") && !error.contains('\n'), "{line}: {error}");
        }
        let lines = ["bench age", "bench age --shared 1500MB", "bench vm-create", "bench vmalloc -n 7"];
        let [age, shared, create, areas] = lines.map(|line| read(line).expect("valid"));
        assert!(matches!(age, Request::Age(age) if age.page.iter().count() == 4 && age.memory == Some(128 << 20)));
        assert!(matches!(shared, Request::Age(age) if age.memory == Some(1000 << 20) && age.swap == Some(500 << 20)));
        assert!(matches!(create, Request::VmCreate(create) if (create.size, create.runs) == (Some(1 << 30), 3)));
        let written = |areas: Vmalloc| (areas.areas, areas.runs, areas.write) == (7, 3, Some(64 << 10));
        assert!(matches!(areas, Request::Vmalloc(areas) if written(areas)), "{areas:?}");
        assert!(work(&["bench".into(), "age".into()], 16).is_err(), "more than a list can have");
    }
}
