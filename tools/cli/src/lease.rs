//! `hugemm lease`: memory that a daemon has ready, for a stock program.

pub mod args;
pub mod bench;
pub mod doctor;
mod filter;
mod gpu;
mod monitor;
mod pins;
pub mod pool;
mod restore;
mod scrub;

use anyhow::{Context, Result, anyhow, bail};
use args::Lease;
use hugemm_lease::client::{Connection, Lease as Leased, default_socket};
use hugemm_lease::supervisor::{AttachError, Lending, Say, attach, check_proc, private_by_arguments};
use hugemm_lease::wire::Wish;
use hugemm_workloads::size::Size;
use rustix::fs::{Access, SealFlags, access};
use rustix::io::{Errno, FdFlags, fcntl_getfd, fcntl_setfd};
use rustix::thread::no_new_privs;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// What becomes the memory's path in a command's arguments.
const LEASE: &str = "@LEASE@";

/// Runs the command. Called in a process with one thread; returns only if nothing was started.
pub fn run(args: &Lease) -> Result<()> {
    if args.command.is_empty() && !args.path && !args.json {
        bail!("nothing to do with the memory; name a command behind --, or ask for --path or --json");
    }
    if args.json && args.budget().is_none() && !args.command.is_empty() {
        bail!("--json is for a path, or for --up-to; leave it out");
    }
    if args.verbose && args.budget().is_none() {
        bail!("--verbose is for --up-to, which may lend many files; leave it out");
    }
    if args.budget().is_some() && is_given(args) {
        bail!("{LEASE} and --fd are for one file; say its SIZE, without --up-to");
    }
    if let Some((size, page)) = args.size.zip(args.page).filter(|(size, page)| !size.0.is_multiple_of(page.bytes())) {
        bail!("{size} is not a whole number of {page} pages; ask for a multiple");
    }
    if let Some(program) = args.command.first() {
        // Before anything is taken for it.
        find(program).map_err(|cause| NotStarted { program: program.clone(), cause })?;
    }
    // What can be missing is looked for before memory is taken that nobody would use.
    let checked = check_paths(args);
    if args.command.is_empty() {
        return checked.and_then(|()| hold(args));
    }
    match checked.and_then(|()| had(args)) {
        Ok(had) => start_on(args, had),
        // A command that is to be given the memory has no other.
        Err(error) if args.require || is_given(args) => Err(error),
        Err(error) => Err(start_without(args, &error)),
    }
}

/// Whether there is the `/proc` that the memory, or the command's own, is found by. A descriptor alone needs none.
fn check_paths(args: &Lease) -> Result<()> {
    if args.command.iter().any(|word| contains(word, LEASE)) {
        // The command's own number, in whatever process namespace `/proc` is of.
        fs::metadata("/proc/self/fd")
            .with_context(|| format!("there is no /proc, so {LEASE} has no path; take --fd"))?;
    } else if args.fd.is_none() {
        check_proc()?;
    }
    Ok(())
}

/// What there is for the command.
enum Had {
    /// Memory, in one file.
    Lease(Leased),
    /// What becomes the files that it makes.
    UpTo(Lending),
}

fn had(args: &Lease) -> Result<Had> {
    match args.budget() {
        Some(budget) => Ok(Had::UpTo(Lending::up_to(daemon(args)?, budget, args.page, args.node)?)),
        None => lease(args).map(Had::Lease),
    }
}

fn daemon(args: &Lease) -> Result<Connection> {
    Ok(Connection::open(&args.socket.clone().unwrap_or_else(default_socket))?)
}

fn lease(args: &Lease) -> Result<Leased> {
    // Of a template its own length.
    let bytes = args.size.map_or(0, |size| size.0);
    let wish = Wish { page: args.page, node: args.node, template: args.template.clone(), ..Wish::of(bytes) };
    let daemon = daemon(args)?;
    let lease = match (&args.keep, &args.secret) {
        (Some(name), Some(secret)) => daemon.lease_kept(wish, name, secret),
        _ => daemon.lease(wish),
    }?;
    if lease.about.resumed
        && rustix::fs::fcntl_get_seals(&lease.file).is_ok_and(|seals| seals.contains(SealFlags::SEAL))
    {
        eprintln!(
            "hugemm lease: what was kept is sealed, and a program that seals it again fails; for QEMU add seal=off"
        );
    }
    if args.scrub && lease.about.resumed {
        let gbps = scrub::scrub(&lease)?;
        eprintln!("hugemm lease: cleared what was kept, at {gbps:.1} GB/s");
    }
    Ok(lease)
}

/// Starts the command.
fn start_on(args: &Lease, had: Had) -> Result<()> {
    if let Some(line) = private_by_arguments(&args.command) {
        eprintln!("hugemm lease: {line}");
    }
    let lease = match had {
        Had::UpTo(lending) => return start_lending(args, lending),
        Had::Lease(lease) => lease,
    };
    if lease.about.filled_late > 0 {
        let late = Size(lease.about.filled_late).rounded();
        eprintln!("hugemm lease: {late} had to be filled just now; announce this size with --shape");
    }
    if is_given(args) {
        let number = inherit(&lease.file, args.fd)?;
        let command: Vec<_> = args.command.iter().map(|word| with_number(word, number)).collect();
        return Err(exec(&command));
    }
    start_lending(args, Lending::one(lease))
}

/// Starts the command with its files replaced as it makes them.
fn start_lending(args: &Lease, lending: Lending) -> Result<()> {
    let say = match (args.json, args.verbose) {
        (true, _) => Say::Json,
        (_, true) => Say::Each,
        _ => Say::AtEnd,
    };
    let before = no_new_privs();
    let attached = attach(lending, args.require, say);
    // For ever, whatever came of it.
    if no_new_privs() != before {
        eprintln!("hugemm lease: without CAP_SYS_ADMIN, setuid helpers of {} will not work", name(&args.command));
    }
    match attached {
        Ok(()) => {}
        Err(error) if args.require || matches!(error, AttachError::Gone(_)) => return Err(error.into()),
        Err(error) => {
            eprintln!("hugemm lease: {error}; {} is started without", name(&args.command));
        }
    }
    Err(exec(&args.command))
}

/// Starts the command although there is no memory for it; returns why that is not possible.
fn start_without(args: &Lease, error: &anyhow::Error) -> anyhow::Error {
    eprintln!("hugemm lease: {error:#}; {} is started without", name(&args.command));
    exec(&args.command)
}

/// Whether the command is given the memory, instead of making what becomes the memory itself.
fn is_given(args: &Lease) -> bool {
    args.fd.is_some() || args.command.iter().any(|word| contains(word, LEASE))
}

/// Makes the descriptor the command's, under the number that it wants if it wants one; returns the number.
fn inherit(file: &OwnedFd, number: Option<i32>) -> Result<i32> {
    let own = file.as_raw_fd();
    let number = number.unwrap_or(own);
    if number == own {
        let flags = fcntl_getfd(file)?;
        fcntl_setfd(file, flags & !FdFlags::CLOEXEC)?;
        return Ok(number);
    }
    // SAFETY: whatever has that number is used by nothing from here to `exec`, and closed once, by the end of the process or there.
    match unsafe { libc::dup2(own, number) } {
        -1 => {
            Err(io::Error::last_os_error()).with_context(|| format!("no descriptor {number}; choose another with --fd"))
        }
        _ => Ok(number),
    }
}

/// Becomes the command; returns why that is not possible.
fn exec(command: &[OsString]) -> anyhow::Error {
    let Some((program, arguments)) = command.split_first() else { return anyhow!("no command") };
    let cause = Command::new(program).args(arguments).exec();
    NotStarted { program: program.clone(), cause }.into()
}

/// The command is not one that can be run.
#[derive(Debug, thiserror::Error)]
#[error("{} cannot be started: {cause}; name a program behind --", .program.display())]
pub struct NotStarted {
    program: OsString,
    cause: io::Error,
}

impl NotStarted {
    /// As a shell says it: 127 for what is not there, 126 for what is no program.
    pub fn exit_code(&self) -> u8 {
        if self.cause.kind() == io::ErrorKind::NotFound { 127 } else { 126 }
    }
}

/// Whether there is a program of that name, as `execvp` looks for it.
fn find(program: &OsStr) -> io::Result<()> {
    let look = |path: &Path| Ok(access(path, Access::EXEC_OK)?);
    let dirs = std::env::var_os("PATH").filter(|_| !program.as_bytes().contains(&b'/'));
    let Some(dirs) = dirs else { return look(Path::new(program)) };
    let mut cause = Errno::NOENT.into();
    for dir in std::env::split_paths(&dirs) {
        match look(&dir.join(program)) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => cause = error,
            Err(_) => {}
        }
    }
    Err(cause)
}

fn name(command: &[OsString]) -> String {
    command.first().map_or(String::new(), |program| program.display().to_string())
}

fn contains(word: &OsStr, what: &str) -> bool {
    word.as_bytes().windows(what.len()).any(|part| part == what.as_bytes())
}

fn with_number(word: &OsStr, fd: i32) -> OsString {
    match word.to_str() {
        Some(text) => text.replace(LEASE, &format!("/proc/self/fd/{fd}")).into(),
        // No argument of this kind is a path of ours.
        None => word.to_owned(),
    }
}

/// Leaves a process that holds the memory, and says where. The process asks for the lease itself, so that it is its owner. It ends
/// if this one does before it has said where: nobody else could end it.
fn hold(args: &Lease) -> Result<()> {
    let (mut read, write) = io::pipe()?;
    let (said_so, mut stay) = io::pipe()?;
    // SAFETY: the process has one thread, so the child may do what any program may.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()).context("no process to hold the memory"),
        0 => {
            drop((read, stay));
            let held = lease(args).and_then(|lease| holder(args, &lease, write, said_so));
            if let Err(error) = held {
                eprintln!("hugemm: {error:#}");
            }
            std::process::exit(1)
        }
        _ => {
            drop((write, said_so));
            let mut said = String::new();
            read.read_to_string(&mut said)?;
            if said.is_empty() {
                // The child has said why.
                std::process::exit(1);
            }
            print!("{said}");
            crate::output::finish()?;
            Ok(stay.write_all(STAY)?)
        }
    }
}

/// What tells the holder that its place is known.
const STAY: &[u8] = b"!";

/// The process that holds a lease: says where it is, and waits for its end. Returns if nobody heard it.
fn holder(args: &Lease, lease: &Leased, mut say: io::PipeWriter, mut said_so: io::PipeReader) -> Result<()> {
    let _ = rustix::process::setsid();
    let path = format!("/proc/{}/fd/{}", std::process::id(), lease.file.as_raw_fd());
    if args.json {
        let about = &lease.about;
        let (pid, page) = (std::process::id(), about.page.to_string());
        let value = serde_json::json!({
            "path": path, "holder": pid, "lease": about.lease, "bytes": about.bytes, "page": page, "node": about.node,
            "filled_late": about.filled_late, "resumed": about.resumed,
        });
        writeln!(say, "{value}")?;
    } else {
        writeln!(say, "{path}")?;
    }
    // Whoever reads what this program prints waits for the end of that, not of the holder.
    let null = fs::File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    drop(say);
    said_so.read_exact(&mut [0; STAY.len()])?;
    loop {
        // Until a signal ends the process.
        std::thread::park();
    }
}
