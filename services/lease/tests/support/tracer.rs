#![allow(dead_code, reason = "each test program uses its part")]
//! Runs a program and whatever it starts, and stops each process before each of its system calls.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::process::{ChildStdout, Command};

/// What to do with a thread that is about to make a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    Go,
    /// Its whole process is killed before the call.
    Kill,
    /// The process with this number is killed, and this one goes on.
    KillOther(usize),
    /// It waits until another thread is told to [`Then::Release`] it.
    Hold,
    /// It goes on, and so does the one that is held.
    Release,
}

/// A thread that is about to make a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stop {
    /// Its process, in the order of their start: 0 is the program itself.
    pub(crate) process: usize,
    /// Whether it is that process's first thread.
    pub(crate) is_first: bool,
    /// How many calls its process has begun before.
    pub(crate) number: usize,
    /// The call.
    pub(crate) call: i64,
    /// Its second argument.
    pub(crate) second: u64,
}

/// Runs the command to the end of all its processes; returns what it has written to a pipe.
pub(crate) fn trace(command: &mut Command, stopped: impl FnMut(Stop) -> Then + Send) -> Option<ChildStdout> {
    // A thread of its own is the tracer, which has no other child: it waits for what it has started and for what that starts, and when
    // it ends by a panic the kernel ends all of that.
    std::thread::scope(|scope| scope.spawn(|| trace_here(command, stopped)).join())
        .unwrap_or_else(|cause| std::panic::resume_unwind(cause))
}

fn trace_here(command: &mut Command, mut stopped: impl FnMut(Stop) -> Then) -> Option<ChildStdout> {
    // SAFETY: one system call, between fork and exec.
    unsafe {
        command.pre_exec(|| match libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    let mut child = command.spawn().expect("started");
    let mut tracer = Tracer { processes: vec![(child.id() as i32, 0)], threads: BTreeMap::new(), held: None };
    loop {
        let mut status = 0;
        // Another thread's child never becomes this one's: when its thread ends it goes to the program's first, which outlives this.
        // SAFETY: waits for any child or traced thread of this thread; the status outlives the call.
        let thread = unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL | libc::__WNOTHREAD) };
        if thread < 0 {
            assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::ECHILD));
            break;
        }
        if !libc::WIFSTOPPED(status) {
            tracer.threads.remove(&thread);
            if tracer.threads.is_empty() {
                break;
            }
            continue;
        }
        tracer.stopped(thread, status, &mut stopped);
    }
    // The loop has been told of its end.
    let _ = child.wait();
    child.stdout.take()
}

struct Tracer {
    /// Number of the process, and how many calls it has begun.
    processes: Vec<(i32, usize)>,
    /// The threads that are there, each with the index of its process.
    threads: BTreeMap<i32, usize>,
    held: Option<i32>,
}

impl Tracer {
    fn stopped(&mut self, thread: i32, status: i32, decide: &mut impl FnMut(Stop) -> Then) {
        let index = self.enter(thread);
        let signal = libc::WSTOPSIG(status);
        if signal == libc::SIGTRAP | 0x80 {
            match about_to_call(thread) {
                Some((call, second)) => self.decide(thread, index, call, second, decide),
                None => go_on(thread, 0),
            }
        } else if signal == libc::SIGTRAP {
            // An exec; or a start of another, which is entered now: this one may be killed before that one's first stop.
            if status >> 16 != libc::PTRACE_EVENT_EXEC && status >> 16 != 0 {
                let mut new: libc::c_ulong = 0;
                // SAFETY: the thread is stopped and ours; the place is of that type.
                unsafe { libc::ptrace(libc::PTRACE_GETEVENTMSG, thread, 0, &raw mut new) };
                self.enter(new as i32);
            }
            go_on(thread, 0);
        } else if signal == libc::SIGSTOP {
            // The first stop of all but the first.
            go_on(thread, 0);
        } else {
            go_on(thread, signal);
        }
    }

    /// The index of the thread's process.
    fn enter(&mut self, thread: i32) -> usize {
        if let Some(&index) = self.threads.get(&thread) {
            return index;
        }
        let status = std::fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
        let group = status.lines().find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok()).unwrap_or(thread);
        let index = self.processes.iter().position(|(pid, _)| *pid == group).unwrap_or_else(|| {
            self.processes.push((group, 0));
            self.processes.len() - 1
        });
        self.threads.insert(thread, index);
        let options = libc::PTRACE_O_EXITKILL
            | libc::PTRACE_O_TRACESYSGOOD
            | libc::PTRACE_O_TRACEFORK
            | libc::PTRACE_O_TRACEVFORK
            | libc::PTRACE_O_TRACECLONE
            | libc::PTRACE_O_TRACEEXEC;
        // SAFETY: the thread is stopped and ours; the options are a number.
        unsafe { libc::ptrace(libc::PTRACE_SETOPTIONS, thread, 0, options as usize) };
        index
    }

    fn decide(&mut self, thread: i32, index: usize, call: i64, second: u64, decide: &mut impl FnMut(Stop) -> Then) {
        let (pid, number) = self.processes[index];
        self.processes[index].1 += 1;
        match decide(Stop { process: index, is_first: thread == pid, number, call, second }) {
            Then::Go => go_on(thread, 0),
            Then::Kill => kill(pid),
            Then::KillOther(other) => {
                kill(self.processes[other].0);
                go_on(thread, 0);
            }
            Then::Hold => self.held = Some(thread),
            Then::Release => {
                if let Some(held) = self.held.take() {
                    go_on(held, 0);
                }
                go_on(thread, 0);
            }
        }
    }
}

fn kill(pid: i32) {
    // SAFETY: a process that this tracer has started, or one of it has.
    unsafe { libc::kill(pid, libc::SIGKILL) };
}

fn go_on(thread: i32, signal: i32) {
    // SAFETY: the thread is stopped and ours; if it has been killed meanwhile, that is an error that changes nothing.
    unsafe { libc::ptrace(libc::PTRACE_SYSCALL, thread, 0, signal as usize) };
}

/// The call and its second argument; `None` if it stops after one.
fn about_to_call(thread: i32) -> Option<(i64, u64)> {
    // SAFETY: integers, for which zero is a value.
    let mut info: libc::ptrace_syscall_info = unsafe { std::mem::zeroed() };
    let size = size_of_val(&info);
    // SAFETY: the thread is stopped and ours, and the place has that size.
    let got = unsafe { libc::ptrace(libc::PTRACE_GET_SYSCALL_INFO, thread, size, &raw mut info) };
    if got <= 0 || info.op != libc::PTRACE_SYSCALL_INFO_ENTRY {
        return None;
    }
    // SAFETY: the kernel says that it is an entry, and filled that part.
    let entry = unsafe { info.u.entry };
    Some((entry.nr as i64, entry.args[1]))
}
