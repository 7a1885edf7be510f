//! Processes that share more memory than there is, with zram for swap: the program of hugemm's `bench age`, word for word.
//!
//! Each CPU plays its processes in turn, a window each, as in hugemm's kernel: a token goes round through pipes.

mod process;
mod reclaim_time;

pub use process::{PROCESS, run as run_process};

use crate::interrupts::Interrupts;
use crate::record;
use anyhow::{Context, Result, bail};
use hugemm_reclaim::LruPolicy;
use hugemm_workloads::age::AgeFigures;
use hugemm_workloads::request::Age;
use reclaim_time::Tracing;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mount::{MountFlags, mount};
use serde_json::{Value, json};
use std::ffi::{CStr, c_char, c_int};
use std::fs;
use std::io::{BufRead, BufReader, PipeWriter, Write};
use std::os::fd::AsRawFd;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Where swap goes.
const SWAP: &CStr = c"/dev/zram0";
const ZRAM: &str = "/sys/block/zram0";

/// Turns generations on and off, where the kernel has them.
const GENERATIONS: &str = "/sys/kernel/mm/lru_gen/enabled";

/// Takes memory from everybody without any work of reclaim's.
const BALLAST: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
const BALLAST_KIB: u64 = 2048;

unsafe extern "C" {
    fn swapon(path: *const c_char, flags: c_int) -> c_int;
}

/// Processes share memory of which Linux calls less available; compressed pages may take a part of that. There is a run for each
/// page size of the list, all of 4 KiB: the first warms up.
pub fn run(work: &Age) -> Result<()> {
    let [shared, memory, swap] = work.sizes(Age::MEMORY);
    insert_modules()?;
    swap_to_zram(shared, swap)?;
    let tracing = Tracing::new()?;
    for _ in work.page.iter() {
        for lists in work.lru.iter() {
            let on = if lists == LruPolicy::TwoList { "0" } else { "7" };
            match fs::write(GENERATIONS, on) {
                Err(_) if lists == LruPolicy::TwoList => {}
                result => result.context("this kernel has no generations; use --lru classic")?,
            }
            let time = Duration::from_secs_f64(work.seconds);
            let figures = measure(&tracing, memory, shared, work.procs.into(), time)?;
            record(&figures, &json!({"lru": lists.name()}));
        }
    }
    Ok(())
}

/// Inserts what the initial file system has, in the order of names.
fn insert_modules() -> Result<()> {
    let Ok(found) = fs::read_dir("/modules") else { return Ok(()) };
    let mut files = found.map(|file| Ok(file?.path())).collect::<Result<Vec<_>>>()?;
    files.sort();
    for file in files {
        let module = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        rustix::system::init_module(&module, c"").with_context(|| format!("cannot insert {}", file.display()))?;
    }
    Ok(())
}

fn swap_to_zram(bytes: u64, limit: u64) -> Result<()> {
    fs::create_dir_all("/dev").context("cannot make /dev")?;
    mount("devtmpfs", "/dev", "devtmpfs", MountFlags::empty(), None::<&CStr>).context("cannot mount /dev")?;
    let sizes =
        [("comp_algorithm", "lz4".to_owned()), ("disksize", bytes.to_string()), ("mem_limit", limit.to_string())];
    for (name, value) in sizes {
        fs::write(format!("{ZRAM}/{name}"), &value).with_context(|| format!("zram does not take {name}={value}"))?;
    }
    // Neighbours in compressed swap are no cheaper to read than others.
    fs::write("/proc/sys/vm/page-cluster", "0").context("cannot write page-cluster")?;
    // The first page of swap: its version, its last page, and its mark (Linux, include/linux/swap.h).
    let mut header = vec![0; 4096];
    header[1024..1028].copy_from_slice(&1_u32.to_le_bytes());
    header[1028..1032].copy_from_slice(&u32::try_from(bytes / 4096 - 1)?.to_le_bytes());
    header[4086..].copy_from_slice(b"SWAPSPACE2");
    fs::write(SWAP.to_str()?, header).context("cannot write to zram")?;
    // SAFETY: a string that ends in 0; what the kernel does with it touches no memory of ours.
    if unsafe { swapon(SWAP.as_ptr(), 0) } != 0 {
        bail!("cannot swap to zram: {}", std::io::Error::last_os_error());
    }
    Ok(())
}

struct Player {
    child: Child,
    says: BufReader<ChildStderr>,
}

impl Player {
    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.says.read_line(&mut line).context("cannot read what a process says")?;
        if line.is_empty() {
            bail!("a process ended early ({}): memory ran out", self.child.wait()?);
        }
        Ok(line)
    }
}

fn measure(tracing: &Tracing, memory: u64, shared: u64, procs: u64, time: Duration) -> Result<AgeFigures> {
    let cpus = std::thread::available_parallelism()?.get() as u64;
    // Not closed in the processes, which open it anew.
    let region = memfd_create("shared", MemfdFlags::CLOEXEC).context("cannot make shared memory")?;
    rustix::fs::ftruncate(&region, shared).context("cannot make shared memory")?;
    let mut players = Vec::new();
    let mut tokens = Vec::new();
    for cpu in 0..cpus.min(procs) {
        tokens.push(ring(&region, shared, cpu, (cpu..procs).step_by(cpus as usize), &mut players)?);
    }
    for player in &mut players {
        let line = player.line()?;
        if line.trim() != "ready" {
            bail!("a process did not start: {}", line.trim());
        }
    }
    let left = available()?.saturating_sub(memory >> 10);
    fs::write(BALLAST, (left / BALLAST_KIB).to_string()).context("cannot hold memory back")?;
    let (before, interrupts) = (counts()?, Interrupts::read()?);
    tracing.start()?;
    let begin = now()?;
    let until = begin + time;
    for mut token in tokens {
        token.write_all(&u64::try_from(until.as_nanos())?.to_le_bytes()).context("cannot start a process")?;
    }
    let mut total = [0; 3];
    let mut end = begin;
    for mut player in players {
        let report: Value = serde_json::from_str(&player.line()?).context("a process does not say what it did")?;
        if let Some(why) = report["failed"].as_str() {
            bail!("{why}");
        }
        for (sum, name) in total.iter_mut().zip(["windows", "pages", "refused"]) {
            *sum += report[name].as_u64().with_context(|| format!("a process does not say its {name}"))?;
        }
        end = end.max(Duration::from_nanos(report["end"].as_u64().context("a process does not say when it ended")?));
        player.child.wait()?;
    }
    let reclaim_ns = tracing.stop()?;
    let (after, interrupts) = (counts()?, Interrupts::read()?.since(interrupts));
    fs::write(BALLAST, "0").context("cannot give memory back")?;
    let mut figures = AgeFigures { seconds: (end - begin).as_secs_f64(), reclaim_ns, ..AgeFigures::default() };
    [figures.windows, figures.touched.pages, figures.touched.refused] = total;
    [figures.stolen, figures.swap.loads, figures.lru.scanned] = [0, 1, 2].map(|index| after[index] - before[index]);
    figures.shootdowns.interrupts = interrupts.tlb;
    Ok(figures)
}

/// Starts the processes of one CPU; a token that is written to what is returned goes round among them.
fn ring(
    region: &impl AsRawFd,
    shared: u64,
    cpu: u64,
    numbers: impl Iterator<Item = u64>,
    players: &mut Vec<Player>,
) -> Result<PipeWriter> {
    let (mut from, first) = std::io::pipe()?;
    let mut numbers = numbers.peekable();
    while let Some(number) = numbers.next() {
        let (next, to) = match numbers.peek() {
            Some(_) => std::io::pipe().map(|(next, to)| (Some(next), to))?,
            None => (None, first.try_clone()?),
        };
        let region = format!("/proc/{}/fd/{}", std::process::id(), region.as_raw_fd());
        let mut child = Command::new("/proc/self/exe")
            .args([PROCESS, &number.to_string(), &cpu.to_string(), &shared.to_string(), &region])
            .stdin(from)
            .stdout(to)
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start a process")?;
        let says = BufReader::new(child.stderr.take().context("a process has no error output")?);
        players.push(Player { child, says });
        let Some(next) = next else { break };
        from = next;
    }
    Ok(first)
}

/// What Linux calls available, in KiB.
fn available() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    sum(&text, &["MemAvailable:"]).context("/proc/meminfo does not say what is available")
}

/// Pages out, pages in, and pages scanned.
fn counts() -> Result<[u64; 3]> {
    let text = fs::read_to_string("/proc/vmstat").context("cannot read /proc/vmstat")?;
    let of = |names: &[&str]| sum(&text, names).with_context(|| format!("/proc/vmstat has no {names:?}"));
    Ok([of(&["pswpout"])?, of(&["pswpin"])?, of(&["pgscan_kswapd", "pgscan_direct"])?])
}

/// The sum of the lines of these names.
fn sum(text: &str, names: &[&str]) -> Option<u64> {
    let value = |name: &&str| {
        let mut words = text.lines().map(str::split_whitespace).find(|words| words.clone().next() == Some(*name))?;
        words.nth(1)?.parse::<u64>().ok()
    };
    names.iter().map(value).sum()
}

/// The time by a clock that all processes have.
fn now() -> Result<Duration> {
    SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is wrong")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_found_by_their_whole_names() {
        let text = "pgscan_kswapd_x 9\npgscan_kswapd 5\npgscan_direct 7\npgscan_direct_throttle 1\n";
        assert_eq!(sum(text, &["pgscan_kswapd", "pgscan_direct"]), Some(12));
        assert_eq!(sum(text, &["pswpin"]), None);
    }
}
