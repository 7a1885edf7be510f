//! `hugemm pool`: the daemon, and commands to it.

use super::args::{Ask, ForgetKept, Pool, Serve};
use super::doctor;
use crate::document;
use crate::table;
use anyhow::{Context, Result, bail};
use comfy_table::CellAlignment;
use hugemm_inspect::interrupt;
use hugemm_inspect::limits::Limits;
use hugemm_inspect::pool::HugetlbPool;
use hugemm_inspect::roots::Roots;
use hugemm_lease::client::{ClientError, Connection, default_socket, read_secret};
use hugemm_lease::daemon::{Daemon, PoolConfig};
use hugemm_lease::filler::{self, Manners, fill};
use hugemm_lease::listener::Listener;
use hugemm_lease::memory_file::Page;
use hugemm_lease::metrics;
use hugemm_lease::policy::LendingPolicy;
use hugemm_lease::server::serve as serve_socket;
use hugemm_lease::service;
use hugemm_lease::status::Status;
use hugemm_lease::stock::Shapes;
use hugemm_lease::wire::{Answer, Forget, KeepAs, Request, Seen};
use hugemm_workloads::size::Size;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

pub fn run(args: &Pool) -> Result<()> {
    match args {
        Pool::Serve(args) => serve(args),
        Pool::Status(args) => status(&args.ask, args.wait),
        Pool::Drain(args) => command(args, &Request::Drain {}),
        Pool::Fill(args) => command(args, &Request::Fill {}),
        Pool::Forget(args) => forget(args),
        Pool::Doctor(args) => doctor::run(args),
    }
}

fn forget(args: &ForgetKept) -> Result<()> {
    document::check_writable(args.ask.common.json.as_deref())?;
    let secret = match &args.secret {
        Some(path) => read_secret(path).with_context(|| format!("{} cannot be read", path.display()))?,
        None => None,
    };
    let keep = KeepAs { name: args.name.clone(), secret };
    tell(args.ask.socket.as_deref(), &Request::Forget(Forget { keep, uid: args.user }))?;
    if let Some(path) = args.secret.as_ref().filter(|path| path.exists()) {
        fs::remove_file(path).with_context(|| format!("{} cannot be removed", path.display()))?;
    }
    say_status(&args.ask)
}

/// Does something beside everything else; what does not end by itself ends with the process.
fn in_background(what: impl FnOnce() + Send + 'static) -> Result<thread::JoinHandle<()>> {
    thread::Builder::new().spawn(what).context("no thread can be had; raise the limit (ulimit -u, TasksMax)")
}

/// How often it is looked whether something is different.
const LOOK: Duration = Duration::from_millis(100);

fn serve(args: &Serve) -> Result<()> {
    let machine = Limits::read()?.total;
    let size = args.size.map_or(0, |size| size.0);
    if size > machine {
        let (size, machine) = (Size(size), Size(machine).rounded());
        bail!("{size} is more than this machine's memory, {machine}; ask for less with --size");
    }
    let names = || args.template.iter().map(|template| &template.name);
    if let Some(name) = names().find(|name| names().filter(|other| other == name).count() > 1) {
        bail!("there are two templates `{name}`; give each a name of its own");
    }
    let manners = Manners {
        cap: args.max_bandwidth.map(|size| size.0),
        cpus: args.cpus.as_ref().map_or(Vec::new(), |cpus| cpus.0.clone()),
    };
    filler::check(args.node, &manners).map_err(anyhow::Error::msg)?;
    let shapes: Vec<_> = args.shape.iter().map(|shape| (shape.0, shape.1)).collect();
    let shapes = match args.size {
        None if shapes.is_empty() => Shapes(Vec::new()),
        _ => Shapes::new(&shapes, size, args.page.bytes())?,
    };
    let owner = rustix::process::geteuid().as_raw();
    // What is written while it is read is read again.
    let mut policy_is_of = args.policy.as_deref().and_then(changed);
    let policy = match &args.policy {
        None => LendingPolicy::closed(owner),
        Some(path) => read_policy(owner, path)?,
    };
    let policy_file = args.policy.clone();
    // A connection for each program, and as many threads; what a shell allows is for programs that wait for a few with `select`.
    let files = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: files.maximum, ..files });
    if let Some(size) = args.page.pool() {
        // Says what the kernel has not, before anybody waits for it.
        HugetlbPool::new().status(size, args.node)?;
    }
    // SAFETY: this process's only call; the numbers are of descriptors that it was started with, so nothing else has them.
    let inherited = unsafe { service::inherited() }.context("what the service manager passes cannot be read")?;
    let path = args.socket.clone().unwrap_or_else(default_socket);
    let listener = match inherited.listener {
        Some(listener) => listener,
        None => listen(&path, args.policy.is_some())?,
    };
    let metrics = args.metrics.as_ref().map(|place| -> Result<_> {
        metrics::bind(place).with_context(|| format!("cannot listen at {place} for --metrics"))
    });
    let metrics = metrics.transpose()?;
    let keep_free = args.keep_free.map_or(0, |size| size.0);
    let (page, node, templates) = (args.page, args.node, args.template.clone());
    let config = PoolConfig { page, node, shapes, size, policy, free, keep_free, templates };
    let log = std::io::stderr().as_fd().try_clone_to_owned().context("no descriptor for the log")?;
    let daemon = Arc::new(Daemon::with_log(config, log.into()));
    daemon.adopt(inherited.files);
    daemon.adopt_kept(inherited.kept);
    for name in inherited.unread {
        let why = "its record is of another version: nobody is given the memory, and the service manager holds it; run the version \
                   that wrote it, or have it let go of (systemctl stop, systemctl clean --what=fdstore)";
        daemon.log("unread", json!({ "kept": name, "why": why }));
    }
    if let Some(metrics) = metrics {
        let daemon = Arc::clone(&daemon);
        // Ends with the process.
        in_background(move || metrics::serve(&daemon, &metrics))?;
    }
    let (stop, told) = std::io::pipe()?;
    let watched = Arc::clone(&daemon);
    // These end with the process, each alone: an owner, or a disk, may not answer.
    for index in 0..daemon.config().templates.len() {
        let looks = Arc::clone(&daemon);
        in_background(move || {
            loop {
                looks.look_at_template(index);
                thread::sleep(LOOK);
            }
        })?;
    }
    if let Some(path) = policy_file {
        let told_again = Arc::clone(&daemon);
        in_background(move || {
            loop {
                thread::sleep(LOOK);
                let before = std::mem::replace(&mut policy_is_of, changed(&path));
                if policy_is_of != before {
                    let read = read_policy(owner, &path).map(|policy| told_again.set_policy(policy));
                    told_again.log("policy", json!({ "error": read.err().map(|error| format!("{error:#}")) }));
                }
            }
        })?;
    }
    let waiter = in_background(move || {
        // The handler sets a flag; the socket's thread waits for a descriptor.
        let mut said = false;
        while !interrupt::requested() {
            thread::sleep(LOOK);
            let (waiting, filling) = watched.waiting();
            if let Some(why) = waiting.as_ref().filter(|_| !said) {
                watched.log("waiting", json!({ "why": why }));
            }
            // Once for each file, however often some of its pages come.
            said = waiting.is_some() || said && filling;
        }
        service::stopping();
        watched.log("stopping", json!({}));
        drop(told);
    })?;
    thread::scope(|scope| {
        scope.spawn(|| fill(&daemon, &manners));
        println!("leases at {}", path.display());
        daemon.log("serving", daemon.status());
        service::ready();
        serve_socket(&daemon, &listener, stop.as_fd())
    })?;
    let _ = waiter.join();
    daemon.flush_log(Duration::from_secs(1));
    Ok(())
}

fn read_policy(owner: u32, path: &Path) -> Result<LendingPolicy> {
    let text = fs::read_to_string(path).with_context(|| format!("{} cannot be read", path.display()))?;
    let size = |text: &str| text.parse::<Size>().ok().map(|size| size.0);
    LendingPolicy::read(owner, &text, size).with_context(|| path.display().to_string())
}

/// Which file it is, and when it was changed last: one that was put in its place may be as old.
fn changed(path: &Path) -> Option<(u64, SystemTime)> {
    fs::metadata(path).and_then(|file| Ok((file.ino(), file.modified()?))).ok()
}

/// What may be taken: of the kernel's pool, or, of transparent pages, what leaves the machine and the daemon's control group a margin.
fn free(page: Page, node: Option<u32>) -> Option<u64> {
    free_on(&Roots::default(), page, node)
}

fn free_on(roots: &Roots, page: Page, node: Option<u32>) -> Option<u64> {
    match page.pool() {
        Some(size) => Some(HugetlbPool::at(roots.clone()).status(size, node).ok()?.unreserved() * size.bytes()),
        None => Some(Limits::read_from(roots).ok()?.takeable().0),
    }
}

fn listen(path: &Path, open: bool) -> Result<Listener> {
    let no_listener = || format!("cannot listen at {}; choose another place with --socket", path.display());
    // Before anything is made for it.
    std::os::unix::net::SocketAddr::from_pathname(path).with_context(no_listener)?;
    // Only the last: a missing one above it is likelier a slip.
    if let Some(directory) = path.parent().filter(|directory| !directory.exists() && *directory != Path::new("")) {
        fs::create_dir(directory)
            .with_context(|| format!("{} cannot be made; choose another place with --socket", directory.display()))?;
    }
    Listener::bind(path, open).with_context(no_listener)
}

fn connect(socket: Option<&Path>) -> Result<Connection, ClientError> {
    Connection::open(&socket.map_or_else(default_socket, Path::to_owned))
}

fn tell(socket: Option<&Path>, request: &Request) -> Result<()> {
    match connect(socket)?.ask(request)?.0 {
        Answer::Done {} => Ok(()),
        _ => bail!("the daemon answered something else; are daemon and command of one version?"),
    }
}

/// Tells the daemon to do something; with `--json`, how things stand then.
fn command(args: &Ask, request: &Request) -> Result<()> {
    document::check_writable(args.common.json.as_deref())?;
    tell(args.socket.as_deref(), request)?;
    say_status(args)
}

/// With `--json` alone.
fn say_status(args: &Ask) -> Result<()> {
    if args.common.json.is_some() { status(args, None) } else { Ok(()) }
}

fn status(args: &Ask, wait: Option<u64>) -> Result<()> {
    let end = wait.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let status = loop {
        let found = connect(args.socket.as_deref()).and_then(|daemon| daemon.status());
        if found.as_ref().is_ok_and(is_full) || end.is_none_or(|end| Instant::now() >= end) {
            break found?;
        }
        interrupt::check()?;
        thread::sleep(Duration::from_millis(50));
    };
    match &args.common.json {
        Some(path) if path.as_os_str() == "-" => println!("{}", serde_json::to_string(&status)?),
        Some(path) => fs::write(path, serde_json::to_string(&status)?)
            .with_context(|| format!("{} cannot be written", path.display()))?,
        None => print(&status),
    }
    match wait {
        Some(seconds) if !is_full(&status) => {
            bail!("not all is ready after {seconds} s; see what it waits for, or wait longer")
        }
        _ => Ok(()),
    }
}

/// Whether there is a file for each that should be ready.
fn is_full(status: &Status) -> bool {
    status.ready.len() >= status.wanted.len() && status.templates.iter().all(|template| template.ready)
}

fn print(status: &Status) {
    let sum = |sizes: &[u64]| Size(sizes.iter().sum()).rounded();
    let node = status.node.map_or("any node".to_owned(), |node| format!("node {node}"));
    println!("pages of {}, from {node}", status.page);
    println!(
        "  ready    {} of {}, in {} of {} files",
        sum(&status.ready),
        sum(&status.wanted),
        status.ready.len(),
        status.wanted.len()
    );
    if let Some(filling) = status.filling {
        let slow = match filling.halvings {
            0 => String::new(),
            halvings => format!(", {} times slower than it may: the machine is busy", 1 << halvings),
        };
        println!("  filling  {} of {}{slow}", Size(filling.done).rounded(), Size(filling.bytes).rounded());
    }
    if status.drained {
        println!("  drained  fill again with: hugemm pool fill");
    }
    if let Some(why) = &status.waiting {
        println!("  waiting  {why}");
    }
    let counts = &status.counts;
    println!(
        "  leases   {} ready, {} grown, {} without, {} refused; placed {}, mapped privately {}, never used {}",
        counts.hits, counts.grown, counts.misses, counts.refused, counts.placed, counts.private, counts.unused
    );
    let gib = counts.filled_bytes as f64 / (1u64 << 30) as f64;
    println!("  filled   {gib:.1} GiB ahead in {:.1} s of CPU time", counts.fill_cpu_ns as f64 / 1e9);
    if !status.left.is_empty() {
        let left: Vec<u64> = status.left.iter().map(|left| left.bytes).collect();
        println!("  left     {} of leases that are over, which other processes of their users still have", sum(&left));
    }
    for template in &status.templates {
        let bytes = template.bytes.map_or(String::new(), |bytes| Size(bytes).rounded());
        let why = template.why.as_deref().unwrap_or(if template.ready { "ready" } else { "not ready yet" });
        println!("  template {} {bytes}: {why}", template.name);
    }
    for kept in &status.kept {
        let lease = match kept.lease {
            Some(lease) => format!("lease {lease}"),
            None if kept.in_use => "a program whose lease is over has it".to_owned(),
            None => "nobody has it".to_owned(),
        };
        println!("  kept     {} as {} for user {}, {lease}", Size(kept.bytes).rounded(), kept.name, kept.uid);
    }
    if status.leases.is_empty() {
        return;
    }
    let mut lines = table::new(["lease", "user", "process", "size", "seconds", "memory"]);
    for lent in &status.leases {
        let size = Size(lent.bytes).rounded();
        lines.add_row([
            lent.lease.to_string(),
            lent.uid.to_string(),
            lent.pid.to_string(),
            size,
            lent.seconds.to_string(),
            match lent.seen {
                Some(Seen::Awaited) => "not taken yet",
                Some(Seen::Placed) => "placed",
                Some(Seen::PrivateMapping) => "mapped privately",
                Some(Seen::Unused) => "never used",
                None => "given",
            }
            .to_owned(),
        ]);
    }
    if let Some(column) = lines.column_mut(0) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table::print("Lent", &lines);
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Never all that is available, on a host or in a group with a limit: the kernel would end the daemon, or what runs beside it.
    #[test]
    fn transparent_pages_leave_a_margin() {
        let root = std::env::temp_dir().join(format!("hugemm-free-{}", std::process::id()));
        let put = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().expect("a directory")).expect("made");
            fs::write(path, text).expect("written");
        };
        let free = || free_on(&Roots::below(&root), Page::Transparent, None).expect("known") / MIB;
        put("proc/meminfo", "MemTotal: 16384000 kB\nMemAvailable: 8192000 kB\n");
        let host = 8000 - 800;
        assert_eq!(free(), host, "a twentieth of all stays");
        let mount = root.join("sys/fs/cgroup");
        put("proc/self/mountinfo", &format!("29 22 0:26 / {} rw - cgroup2 none rw\n", mount.display()));
        put("sys/fs/cgroup/memory.max", "max\n");
        // A container's own group, as it sees it; one below another; the limit and what is used of it; what is left of that.
        for (group, limited, limit, used, left) in [
            ("/", "memory.max", 1000, 300, 1000 - 300 - 64),
            ("/", "memory.max", 4000, 1000, 4000 - 1000 - 200),
            ("/", "memory.max", 1000, 950, 0),
            ("/", "memory.max", 100_000, 0, host),
            ("/a/b", "a/b/memory.high", 1000, 300, 1000 - 300 - 64),
            ("/a/b", "a/memory.max", 1000, 300, 1000 - 300 - 64),
        ] {
            let limited = format!("sys/fs/cgroup/{limited}");
            let directory = Path::new(&limited).parent().expect("a group").display().to_string();
            put("proc/self/cgroup", &format!("0::{group}\n"));
            put(&limited, &(limit * MIB).to_string());
            // The kernel takes back by itself what files have that nobody uses.
            put(&format!("{directory}/memory.current"), &((used + 7) * MIB).to_string());
            put(&format!("{directory}/memory.stat"), &format!("anon 1\ninactive_file {}\n", 7 * MIB));
            assert_eq!(free(), left, "{limited} of {limit}, {used} used, in {group}");
            put(&limited, "max\n");
        }
        fs::remove_dir_all(root).expect("removed");
    }
}
