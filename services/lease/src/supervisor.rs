//! Puts leased memory in the place of the files that a program, and what it starts, make for themselves.
//!
//! The program is started with a [filter](crate::seccomp) that reports the calls which give a file a length. The supervisor looks at the
//! descriptor: a file of the right pages that has no name, no length and no pages yet, and that nobody else can reach, is
//! replaced by a leased one, which has that length already. Every other call is executed as if nobody had asked, or fails, if the
//! memory is required; why a file of the right kind was not replaced, and that none came, is said on standard error.
//!
//! The supervisor is a process of its own, no child of the program, and lives as long as anything has the filter. If it is
//! killed, a call that waits and later calls of such lengths fail with ENOSYS; nothing else changes.

pub use crate::lending::Lending;
use crate::orphan;
pub use crate::own_file::check_proc;
use crate::own_file::{AloneFile, NotReplaced, OwnFile, mapped_as};
use crate::seccomp::{self, Call, CallAnswer, FilterError, Lengths};
use crate::wire::{Leased, Request, Seen};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde::Serialize;
use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Why a program cannot be started on a lease.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// No filter. The program can be started without.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// No file of a program could be looked at. The program can be started without.
    #[error("{0}")]
    NoProc(io::Error),
    /// No process for the supervisor. The program can be started without.
    #[error("cannot start the lease's supervisor: {0}")]
    Supervisor(io::Error),
    /// The supervisor was killed before it had begun. The filter is there: a program would find that its memory cannot be made.
    #[error("the lease's supervisor ended ({0}), and no program can make memory of that length here; start it anew")]
    Gone(io::Error),
}

/// What a supervisor says on its program's standard error of files that are lent or not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Say {
    /// A line when the program ends; of one lease, only if its file was not replaced.
    #[default]
    AtEnd,
    /// A line for each, too.
    Each,
    /// When the program ends, an object for other programs to read.
    Json,
}

/// Starts a supervisor for the calling process: from here on, files that it, or what it becomes by `exec` or starts, gives a length are
/// leased ones. For a process with one thread that is about to `exec`. It may have set `no_new_privs` then, with which setuid programs that
/// this process starts get no rights.
///
/// `require`: a call that asks for such memory, and cannot have a leased file, fails (ENOMEM).
///
/// # Errors
///
/// [`AttachError`]: the lease is over, and nothing has changed but `no_new_privs`, or as [`AttachError::Gone`] says.
pub fn attach(mut lending: Lending, require: bool, say: Say) -> Result<(), AttachError> {
    let attached = start(&mut lending, require, say).and_then(|(ours, supervisor)| {
        let_look(supervisor);
        report_to(ours, &lending.lengths)
    });
    if attached.is_err() {
        // Nobody else says so before this process ends, and a daemon that does not hear it notices that.
        drop(lending.ready);
        lending.connection.iter().for_each(|connection| drop(connection.ask(&Request::End {})));
    }
    attached
}

/// Makes the supervisor's process, if it would see anything, and a way from the program to it.
fn start(lending: &mut Lending, require: bool, say: Say) -> Result<(OwnedFd, u32), AttachError> {
    check_proc().map_err(AttachError::NoProc)?;
    let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let started = pair.map_err(io::Error::from).and_then(|(ours, theirs)| {
        // Here they are closed: a supervisor that gets nothing ends when ours is closed, too.
        let mut its = Some((theirs, Ears::of_this_process()?));
        // One that was joined is there for a moment still.
        let mut looks = 0..100;
        while fs::read_dir("/proc/self/task")?.count() != 1 {
            looks.next().ok_or_else(|| io::Error::other("this process has several threads; attach first"))?;
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut life = || {
            let ran = its.take().map(|(theirs, ears)| run(theirs, lending, ears, require, say));
            i32::from(!matches!(ran, Some(Ok(()))))
        };
        // SAFETY: the process has one thread, which makes no other here.
        let supervisor = unsafe { orphan::start(&mut life) }?;
        Ok((ours, supervisor))
    });
    started.map_err(AttachError::Supervisor)
}

/// Who is told what became of the leases: the standard error of the process that becomes the program, as long as that lives and there is
/// something to say, for whoever reads it to the end waits for all that have it open.
struct Ears {
    process: OwnedFd,
    /// None if it has none.
    stderr: Option<OwnedFd>,
}

impl Ears {
    fn of_this_process() -> io::Result<Self> {
        let process = pidfd_open(rustix::process::getpid(), PidfdFlags::empty())?;
        Ok(Ears { process, stderr: fcntl_dupfd_cloexec(rustix::stdio::stderr(), 3).ok() })
    }

    /// A line, if there is room for it.
    fn say(&self, line: &str) {
        self.write(&format!("hugemm lease: {line}\n"));
    }

    /// A reader who stands still keeps no program waiting: nothing is begun without room, which a pipe has for so many bytes at once
    /// (pipe(7)), and what follows is left out unless there is room for it soon.
    fn write(&self, line: &str) {
        let Some(stderr) = &self.stderr else { return };
        let mut patience = Timespec::default();
        for part in line.as_bytes().chunks(libc::PIPE_BUF) {
            let mut room = [PollFd::new(stderr, PollFlags::OUT)];
            if !poll(&mut room, Some(&patience)).is_ok_and(|ready| ready > 0)
                || rustix::io::write(stderr, part).is_err()
            {
                return;
            }
            patience.tv_nsec = SOON.as_nanos() as i64;
        }
    }
}

/// For so long the rest of a line waits for its reader.
const SOON: Duration = Duration::from_millis(100);

/// Says that the supervisor may have this process's descriptors: where Yama restricts that (`kernel.yama.ptrace_scope` 1) it is not a
/// parent's right, for the supervisor is nobody's parent. Kept over `exec`, not by what the program starts (PR_SET_PTRACER(2const)).
fn let_look(supervisor: u32) {
    // SAFETY: a number; a kernel without Yama refuses the call.
    let _ = unsafe { libc::prctl(libc::PR_SET_PTRACER, supervisor as libc::c_ulong) };
}

/// Installs the filter and sends its listener to the supervisor.
fn report_to(supervisor: OwnedFd, lengths: &Lengths) -> Result<(), AttachError> {
    let listener = match seccomp::report_lengths(lengths, true) {
        Err(FilterError::Other(Errno::ACCESS)) => seccomp::report_lengths(lengths, false),
        listener => listener,
    }?;
    // The supervisor gets it, or ends, and with it the filter's power over this process but for calls of those lengths.
    // Nothing is waited for: the filter is there in either case.
    crate::wire::send(supervisor.as_fd(), &(), Some(listener.as_fd())).map_err(AttachError::Gone)
}

/// The supervisor's life.
fn run(from_program: OwnedFd, lending: &mut Lending, ears: Ears, require: bool, say: Say) -> io::Result<()> {
    let keep = [from_program.as_fd(), ears.process.as_fd()].into_iter().chain(ears.stderr.as_ref().map(AsFd::as_fd));
    let leased = lending
        .ready
        .iter()
        .map(|(_, file)| file.as_fd())
        .chain(lending.connection.iter().map(|daemon| daemon.as_fd()));
    keep_only(keep.chain(leased).map(|fd| fd.as_raw_fd()).collect())?;
    // Somebody who opens a file while it is looked at has the kernel send this, and nothing is to be done.
    // SAFETY: no handler.
    unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
    lending.tell_of_ready(Seen::Awaited);
    let Some(((), Some(listener))) = crate::wire::receive::<()>(from_program.as_fd())? else { return Ok(()) };
    drop(from_program);
    seccomp::switch_at_once(listener.as_fd());
    let (ears, untaken, waiting) = (Some(ears), Some(Instant::now() + UNTAKEN), VecDeque::new());
    Supervisor { listener, lending, require, say, ears, untaken, done: Done::default(), watches: Vec::new(), waiting }
        .serve()
}

/// Closes everything else: a program waits for the end of pipes that its starter had open. Standard streams go nowhere.
fn keep_only(mut keep: Vec<i32>) -> io::Result<()> {
    keep.sort_unstable();
    let mut from = 3;
    for end in keep.into_iter().map(Some).chain([None]) {
        let to = end.map_or(u32::MAX, |fd| (fd as u32).wrapping_sub(1));
        if end.is_none_or(|fd| fd as u32 > from) {
            // SAFETY: closes descriptors that no value of this process uses from here on: all that it uses are kept.
            unsafe { libc::syscall(libc::SYS_close_range, from, to, 0) };
        }
        from = end.map_or(u32::MAX, |fd| fd as u32 + 1);
    }
    // Now there is a free number, however few the process may have.
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    drop(null);
    rustix::process::chdir("/")?;
    let name = c"hugemm-lease";
    // SAFETY: a string with its end.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr(), 0, 0, 0) };
    Ok(())
}

/// What was lent and what was not, for the line at the end.
#[derive(Debug, Default, Serialize)]
struct Done {
    lent_bytes: u64,
    lent_files: u64,
    /// The first of them.
    lent: Vec<SizedFile>,
    not_lent_files: u64,
    not_lent: Vec<SizedFile>,
}

/// A file that a program has given a length.
#[derive(Debug, Serialize)]
struct SizedFile {
    bytes: u64,
    program: String,
    thread: u32,
    descriptor: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    why_not: Option<String>,
}

/// More are only counted.
const MOST_SAID: usize = 16;

impl Done {
    fn add(&mut self, file: SizedFile) {
        let (list, files) = match file.why_not {
            None => (&mut self.lent, &mut self.lent_files),
            Some(_) => (&mut self.not_lent, &mut self.not_lent_files),
        };
        *files += 1;
        self.lent_bytes += if file.why_not.is_none() { file.bytes } else { 0 };
        if list.len() < MOST_SAID {
            list.push(file);
        }
    }
}

impl fmt::Display for SizedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SizedFile { bytes, program, thread, descriptor, why_not } = self;
        write!(f, "{bytes} bytes to {program} ({thread}), descriptor {descriptor}")?;
        why_not.iter().try_for_each(|why| write!(f, " ({why})"))
    }
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |f: &mut fmt::Formatter<'_>, what: &str, files: u64, list: &[SizedFile]| {
            write!(f, "{what} {files} file{}", if files == 1 { "" } else { "s" })?;
            let first = |n| if n == 0 { ": " } else { "; " };
            list.iter().enumerate().try_for_each(|(n, file)| write!(f, "{}{file}", first(n)))?;
            match files - list.len() as u64 {
                0 => Ok(()),
                more => write!(f, "; {more} more"),
            }
        };
        list(f, "lent", self.lent_files, &self.lent)?;
        if self.not_lent_files > 0 {
            list(f, ", not lent", self.not_lent_files, &self.not_lent)?;
        }
        Ok(())
    }
}

struct Supervisor<'a> {
    listener: OwnedFd,
    lending: &'a mut Lending,
    require: bool,
    say: Say,
    /// Until there is nothing more to say, or the program has ended.
    ears: Option<Ears>,
    /// When it is said that nothing was lent, if that was not said yet.
    untaken: Option<Instant>,
    done: Done,
    /// How programs map what they were given is looked at for a while.
    watches: Vec<Watch>,
    /// Calls that wait for what was asked for, in that order; nobody waits for one without a file any more.
    waiting: VecDeque<(Call, Option<Found>)>,
}

/// A program's file that is to be replaced.
struct Found {
    file: AloneFile,
    close_on_exec: bool,
}

struct Watch {
    thread: u32,
    lease: u64,
    /// As a mapping has it.
    file: String,
    until: Instant,
}

/// How often, and for how long, a program's mappings are looked at.
const LOOK: Duration = Duration::from_millis(200);
const LOOKS_FOR: Duration = Duration::from_secs(10);

/// A program that has not made its memory after that long may never do so; it may run for months.
const UNTAKEN: Duration = Duration::from_secs(10);

impl Supervisor<'_> {
    fn serve(&mut self) -> io::Result<()> {
        loop {
            let until = self
                .untaken
                .filter(|_| self.ears.is_some() && self.waiting.is_empty())
                .map(|at| at.saturating_duration_since(Instant::now()));
            let pause = if self.watches.is_empty() { until } else { Some(LOOK) };
            let pause = pause.map(Timespec::try_from).transpose().map_err(io::Error::other)?;
            let asker = self.lending.asker.as_ref().filter(|_| !self.waiting.is_empty());
            let asker = asker.map(|asker| PollFd::new(&asker.there, PollFlags::IN));
            let ears = self.ears.as_ref().map(|ears| PollFd::new(&ears.process, PollFlags::IN));
            let (asks, hears) = (usize::from(asker.is_some()), ears.is_some());
            let mut wait = vec![PollFd::new(&self.listener, PollFlags::IN)];
            wait.extend(asker.into_iter().chain(ears));
            match poll(&mut wait, pause.as_ref()) {
                Err(Errno::INTR) => continue,
                other => other?,
            };
            let is_ready = |index: usize| !wait[index].revents().is_empty();
            let (events, came, ended) = (wait[0].revents(), asks > 0 && is_ready(1), hears && is_ready(1 + asks));
            if came && let Some((call, found)) = self.waiting.pop_front() {
                let lent = self.lending.asked(call.length);
                match found {
                    Some(found) => self.give(&call, found, lent),
                    None => lent.into_iter().for_each(|lent| self.lending.give_back(lent)),
                }
            }
            if events.contains(PollFlags::IN) {
                if let Some(call) = seccomp::receive(self.listener.as_fd())? {
                    self.hear(call);
                }
            } else if ended || !events.is_empty() {
                self.say_at_end();
            } else if until.is_some_and(|until| until.is_zero()) {
                self.say_untaken(&format!("the program has run for {} s", UNTAKEN.as_secs()));
            }
            if !events.is_empty() && !events.contains(PollFlags::IN) {
                // Nothing has the filter any more.
                self.lending.tell_of_ready(Seen::Unused);
                return Ok(());
            }
            self.look();
        }
    }

    /// Says, once, that leases are of no use so far.
    fn say_untaken(&mut self, when: &str) {
        if let Some((ears, _)) = self.ears.as_ref().zip(self.untaken.take()) {
            let which = if self.lending.is_one {
                format!(
                    "of {} bytes that it could replace was made; other ways are @LEASE@ and --fd",
                    self.lending.lengths.bounds.start()
                )
            } else {
                let least = self.lending.lengths.bounds.start();
                format!("of {} pages, and of {least} bytes or more, was made", self.lending.page)
            };
            ears.say(&format!("{when}, and nothing took the lease: no file {which}"));
        }
    }

    fn say_at_end(&mut self) {
        match (self.say, self.lending.is_one || self.done.lent_files + self.done.not_lent_files == 0) {
            (Say::Json, _) => {
                let line = serde_json::to_string(&self.done).unwrap_or_default();
                self.ears.iter().for_each(|ears| ears.write(&format!("{line}\n")));
            }
            (_, true) => self.say_untaken("the program has ended"),
            (_, false) => self.ears.iter().for_each(|ears| ears.say(&self.done.to_string())),
        }
        self.ears = None;
    }

    /// Hears of a call, which is answered at once unless the daemon is to be asked.
    fn hear(&mut self, call: Call) {
        let listener = self.listener.as_fd();
        // A signal has ended a call, which comes again, or its thread.
        self.waiting.iter_mut().filter(|(waits, _)| !seccomp::is_valid(listener, waits)).for_each(|(_, it)| *it = None);
        match self.find(&call) {
            Ok(None) => self.answer(&call, CallAnswer::Continue),
            Err(why) => self.judge(&call, Err(why)),
            Ok(Some(found)) => {
                // One that was asked for, and for which nobody waits any more.
                if let Some(entry) = self.waiting.iter_mut().find(|(of, it)| it.is_none() && of.length == call.length) {
                    *entry = (call, Some(found));
                    return;
                }
                match self.lending.take(call.length) {
                    Ok(None) => self.waiting.push_back((call, Some(found))),
                    Ok(Some(lent)) => self.give(&call, found, Ok(lent)),
                    Err(why) => self.judge(&call, Err(why)),
                }
            }
        }
    }

    /// An error means that nobody waits for it any more.
    fn answer(&self, call: &Call, answer: CallAnswer) {
        let _ = seccomp::answer(self.listener.as_fd(), call, answer);
    }

    /// Answers a call, and then says by which lease its descriptor was replaced, or why it was not: a terminal may stand still.
    fn judge(&mut self, call: &Call, placed: Result<u64, NotReplaced>) {
        let answer = match &placed {
            Ok(_) => CallAnswer::Done,
            Err(why) if *why != NotReplaced::Gone && self.require => CallAnswer::NoMemory,
            Err(_) => CallAnswer::Continue,
        };
        // As long as its thread is there.
        let program = name_of(call.thread);
        self.answer(call, answer);
        if let Ok(lease) = placed {
            self.lending.tell(lease, Seen::Placed);
        }
        let (is_one, then) = (self.lending.is_one, if self.require { "it fails" } else { "it has its own" });
        if placed != Err(NotReplaced::Gone) {
            self.untaken = None;
            let why_not = placed.as_ref().err().map(ToString::to_string);
            let (bytes, thread, descriptor) = (call.length, call.thread, call.fd);
            let line = match &why_not {
                None => format!("{program} ({thread}) has {bytes} bytes, lent, as descriptor {descriptor}"),
                Some(why) => format!("{program} ({thread}) asks for {bytes} bytes, and {then}: {why}"),
            };
            // Of one lease one line, and none if all is well.
            if self.say == Say::Each || is_one && why_not.is_some() {
                self.ears.iter().for_each(|ears| ears.say(&line));
            }
            if is_one {
                self.ears = None;
            }
            self.done.add(SizedFile { bytes, program, thread, descriptor, why_not });
        }
    }

    /// The file that a call is about, if it is of the kind that is waited for.
    fn find(&self, call: &Call) -> Result<Option<Found>, NotReplaced> {
        let lending = &self.lending;
        if !lending.lengths.contain(call.length) || lending.is_one && lending.ready.is_empty() {
            return Ok(None);
        }
        if call.thread == 0 {
            return Err(NotReplaced::Refused("its process is in a namespace that cannot be seen", Errno::SRCH));
        }
        let Some(found) = OwnFile::look(&call.thread.to_string(), call.fd, lending.page)? else { return Ok(None) };
        // All that was read is of the process that waits.
        if !seccomp::is_valid(self.listener.as_fd(), call) {
            return Ok(None);
        }
        let same = descriptor_of(call).map_err(|errno| match errno {
            Errno::BADF if !found.is_there() => NotReplaced::Gone,
            _ => NotReplaced::Refused("its descriptor cannot be had (kernel.yama.ptrace_scope, CAP_SYS_PTRACE)", errno),
        })?;
        let close_on_exec = found.close_on_exec;
        let file = found.alone(same, |file| self.put(call, file, close_on_exec))?;
        Ok(Some(Found { file, close_on_exec }))
    }

    fn put(&self, call: &Call, file: BorrowedFd<'_>, close_on_exec: bool) -> Result<(), Errno> {
        seccomp::replace_descriptor(self.listener.as_fd(), call, file, close_on_exec)
    }

    /// Gives a call's program what was lent for its file.
    fn give(&mut self, call: &Call, found: Found, lent: Result<(Leased, OwnedFd), NotReplaced>) {
        let placed = lent.and_then(|lent| self.replace(call, found, lent));
        self.judge(call, placed);
    }

    /// Replaces a call's descriptor, and says by which lease.
    fn replace(&mut self, call: &Call, found: Found, (about, file): (Leased, OwnedFd)) -> Result<u64, NotReplaced> {
        let lease = about.lease;
        let Found { file: own, close_on_exec } = found;
        if let Err(why) = own.replace(file.as_fd(), |file| self.put(call, file, close_on_exec)) {
            // Somebody may have it: it is not for another file.
            match matches!(why, NotReplaced::Shared | NotReplaced::Unknown) && self.lending.is_one {
                true => drop(file),
                false => self.lending.give_back((about, file)),
            }
            return Err(why);
        }
        let file = rustix::fs::fstat(&file).map_or_else(|_| String::new(), |at| mapped_as(&at));
        self.watches.push(Watch { thread: call.thread, lease, file, until: Instant::now() + LOOKS_FOR });
        Ok(lease)
    }

    /// Looks whether programs map their memory privately, and says so once.
    fn look(&mut self) {
        let lending = &self.lending;
        self.watches.retain(|watch| {
            let maps = fs::read(format!("/proc/{}/maps", watch.thread)).unwrap_or_default();
            let private = is_private(&maps, &watch.file);
            if private == Some(true) {
                lending.tell(watch.lease, Seen::PrivateMapping);
            }
            private.is_none() && Instant::now() < watch.until
        });
    }
}

/// The name of a thread's program, for people.
fn name_of(thread: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{thread}/comm"));
    name.as_deref().map_or("a program", str::trim).to_owned()
}

/// Another descriptor of the open file that the call's descriptor leads to. Who waits may be any thread of its process; before Linux 6.9
/// only the first, which may have ended, says what that has open.
fn descriptor_of(call: &Call) -> Result<OwnedFd, Errno> {
    let thread = Pid::from_raw(call.thread as i32).ok_or(Errno::SRCH)?;
    match pidfd_open(thread, PidfdFlags::from_bits_retain(libc::PIDFD_THREAD)) {
        Err(Errno::INVAL) => {}
        thread => return pidfd_getfd(thread?, call.fd as i32, PidfdGetfdFlags::empty()),
    }
    let status = fs::read_to_string(format!("/proc/{}/status", call.thread)).unwrap_or_default();
    let leader = status.lines().find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok());
    let leader = leader.and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
    let process = pidfd_open(leader, PidfdFlags::empty())?;
    pidfd_getfd(process, call.fd as i32, PidfdGetfdFlags::empty())
}

/// Whether a file is mapped privately; `None` if it is not mapped. Lines as in proc_pid_maps(5).
fn is_private(maps: &[u8], file: &str) -> Option<bool> {
    maps.split(|&byte| byte == b'\n').find_map(|line| {
        let mut words = line.split(|&byte| byte == b' ').filter(|word| !word.is_empty());
        let rights = words.nth(1)?;
        let at = [words.nth(1)?, words.next()?].join(&b' ');
        (at == file.as_bytes()).then(|| rights.last() == Some(&b'p'))
    })
}

/// What of a program's arguments keeps it from gaining anything, if that can be seen: a line for its user.
pub fn private_by_arguments<A: AsRef<OsStr>>(arguments: &[A]) -> Option<String> {
    arguments.iter().find_map(|argument| {
        let text = argument.as_ref().to_str()?;
        is_private_memory(text).then(|| {
            format!("`{text}` maps its memory privately and would copy every page; take a memory backend with share=on")
        })
    })
}

/// Of QEMU, whose default is shared for a memfd and private for a file. Its objects are written as words or as JSON; its older option has no
/// other way.
fn is_private_memory(argument: &str) -> bool {
    if argument == "-mem-path" {
        return true;
    }
    let json: Option<serde_json::Value> =
        argument.starts_with('{').then(|| serde_json::from_str(argument).ok()).flatten();
    let word = |key: &str| argument.split(',').find_map(|option| option.strip_prefix(key)?.strip_prefix('='));
    let (kind, share) = match &json {
        Some(object) => (object["qom-type"].as_str(), object["share"].as_bool()),
        None => (
            word("qom-type").or_else(|| argument.split(',').next()),
            word("share").map(|share| !matches!(share, "off" | "no" | "false")),
        ),
    };
    match kind {
        Some("memory-backend-file") => share != Some(true),
        Some("memory-backend-memfd") => share == Some(false),
        _ => false,
    }
}

#[cfg(test)]
mod waiting_tests;

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever starts a program and reads nothing of what it says has it run all the same. Where there is room for a long line, all of it is
    /// there.
    #[test]
    fn a_reader_who_stands_still_keeps_nobody_waiting() {
        let (mut read, write) = io::pipe().expect("a pipe");
        let process = pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).expect("this process");
        let ears = Ears { process, stderr: Some(write.into()) };
        let line = "x".repeat(100_000);
        let began = Instant::now();
        let (says, hears) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                (0..3).for_each(|_| ears.say(&line));
                says.send(()).expect("heard");
                ears.say(&line);
                drop(ears);
            });
            let in_time = hears.recv_timeout(Duration::from_secs(20));
            let mut text = String::new();
            io::Read::read_to_string(&mut read, &mut text).expect("UTF-8");
            in_time.unwrap_or_else(|_| panic!("it waits for {:?}", began.elapsed()));
        });
        let (mut read, write) = io::pipe().expect("a pipe");
        // SAFETY: a number; nothing is in the pipe yet.
        let room = unsafe { libc::fcntl(write.as_raw_fd(), libc::F_SETPIPE_SZ, 1 << 18) };
        assert!(room > 100_100, "a pipe of {room} bytes");
        let process = pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).expect("this process");
        Ears { process, stderr: Some(write.into()) }.say(&line);
        let mut text = String::new();
        io::Read::read_to_string(&mut read, &mut text).expect("UTF-8");
        assert_eq!(text, format!("hugemm lease: {line}\n"));
    }

    #[test]
    fn mappings_are_read_as_the_kernel_writes_them() {
        let maps =
            b"7f00-7f10 rw-p 00000000 00:20 4711    /y\n7f10-7f20 rw-s 00000000 00:10 4711    /memfd:a b (deleted)\n\
            7f20-7f30 rw-p 00000000 00:10 42  /x\n";
        assert_eq!(is_private(maps, "00:10 4711"), Some(false), "another device has that number, too");
        assert_eq!(is_private(maps, "00:10 42"), Some(true));
        assert_eq!(is_private(maps, "00:10 7"), None);
    }

    #[test]
    fn a_private_backend_is_named_before_it_starts() {
        for (argument, private) in [
            ("memory-backend-memfd,id=m,size=1G", false),
            ("memory-backend-memfd,id=m,size=1G,share=off", true),
            ("memory-backend-file,id=m,size=1G,mem-path=/x", true),
            ("memory-backend-file,id=m,size=1G,mem-path=/x,share=on", false),
            ("virtio-net,share=off", false),
            (r#"{"qom-type":"memory-backend-file","id":"m","size":4096,"mem-path":"/x"}"#, true),
            (r#"{"qom-type":"memory-backend-file","id":"m","size":4096,"mem-path":"/x","share":true}"#, false),
            (r#"{"qom-type":"memory-backend-memfd","id":"m","size":4096,"share":false}"#, true),
            ("{", false),
            ("-mem-path", true),
        ] {
            assert_eq!(private_by_arguments(&["-object", argument]).is_some(), private, "{argument}");
        }
    }
}
