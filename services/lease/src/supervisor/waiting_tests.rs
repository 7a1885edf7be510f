//! Calls that wait while the daemon is asked: several at once, some that end and come again, two on one descriptor. The program is threads
//! of this process; a signal that ends a call is an answer that the supervisor has not given.

use super::*;
use crate::client::Connection;
use crate::listener::Listener;
use crate::own_file::tests::turn;
use crate::tests::{BYTES, PAGE, file};
use crate::wire::{self, Answer};
use rustix::fs::{MemfdFlags, fstat, memfd_create};
use rustix::net::accept;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

/// Longer than anything takes here.
const END: Duration = Duration::from_secs(60);

type Sized = Result<(), Errno>;

/// A program's file.
struct Own(OwnedFd);

impl Own {
    fn new() -> Self {
        Own(memfd_create("own", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a file"))
    }

    fn inode(&self) -> u64 {
        fstat(&self.0).expect("open").st_ino
    }

    fn size(&self) -> i64 {
        fstat(&self.0).expect("open").st_size
    }
}

/// A program, the supervisor that is told of its calls, and a daemon that answers as the test says.
struct Parts {
    supervisor: Supervisor<'static>,
    /// What the supervisor has, and nobody when it has ended.
    lending: NonNull<Lending>,
    program: Program,
    daemon: Server,
}

impl Parts {
    /// So many pages may be leased. `None`, and a line, where no call can be reported.
    fn start(name: &str, pages: u64) -> Option<Self> {
        let path = std::env::temp_dir().join(format!("hugemm-waiting-{name}-{}", std::process::id()));
        let listener = Listener::bind(&path, false).expect("a socket");
        let connection = Connection::open(&path).expect("there is room");
        let mut daemon = Server { socket: accept(&listener).expect("a client"), lent: 0, returned: Vec::new() };
        thread::spawn(move || {
            // However slow a test is, its daemon answers others.
            while let Ok(client) = accept(&listener) {
                let _ = wire::receive::<Request>(client.as_fd());
                let _ = wire::send(client.as_fd(), &Answer::Done {}, None);
            }
        });
        set_socket_timeout(&daemon.socket, Timeout::Recv, Some(END)).expect("a timeout");
        let status = crate::tests::daemon(&[]).status();
        wire::send(daemon.socket.as_fd(), &Answer::Status(Box::new(status)), None).expect("there is room");
        let lending = Lending::up_to(connection, pages * BYTES, None, None).expect("an answer");
        assert_eq!(daemon.hears(), Some(Request::Status {}));
        let (program, listener) = Program::start(lending.lengths.clone())?;
        let (require, say, ears, untaken, done) = (false, Say::AtEnd, None, None, Done::default());
        let (watches, waiting) = (Vec::new(), VecDeque::new());
        let lending = NonNull::from(Box::leak(Box::new(lending)));
        // SAFETY: a box, which `serve` takes back when the supervisor is gone.
        let lent = unsafe { &mut *lending.as_ptr() };
        let supervisor = Supervisor { listener, lending: lent, require, say, ears, untaken, done, watches, waiting };
        Some(Parts { supervisor, lending, program, daemon })
    }

    /// A call for so many pages, and that the supervisor hears of it.
    fn call(&mut self, own: &Own, pages: u64) -> (Call, Receiver<Sized>) {
        let (answers, answered) = channel();
        self.program.0.send((own.0.as_raw_fd(), pages * BYTES, answers)).expect("it runs");
        let listener = &self.supervisor.listener;
        let end = Timespec::try_from(END).expect("seconds");
        assert_eq!(poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&end)), Ok(1), "a call is reported");
        let call = seccomp::receive(listener.as_fd()).expect("a listener").expect("nothing ends it");
        self.supervisor.hear(call);
        (call, answered)
    }

    /// Ends a call as a signal does.
    fn interrupt(&self, (call, answered): (Call, Receiver<Sized>)) {
        seccomp::answer(self.supervisor.listener.as_fd(), &call, CallAnswer::NoMemory).expect("it waits");
        assert_eq!(answered.recv_timeout(END), Ok(Err(Errno::NOMEM)));
    }

    /// The supervisor goes on until the program ends, and asks for nothing more; which leases it has given back.
    fn serve(self, meanwhile: impl FnOnce(&mut Server, &Program)) -> Vec<u64> {
        let Parts { mut supervisor, lending, program, mut daemon } = self;
        thread::scope(|scope| {
            let serves = scope.spawn(move || supervisor.serve());
            let program = program;
            meanwhile(&mut daemon, &program);
            drop(program);
            serves.join().expect("no panic").expect("a listener");
        });
        // SAFETY: made of a box; the supervisor is gone.
        drop(unsafe { Box::from_raw(lending.as_ptr()) });
        assert_eq!(daemon.hears(), None);
        daemon.returned
    }
}

/// Has a thread give a file a length, and say what came of it.
struct Program(Sender<(RawFd, u64, Sender<Sized>)>);

impl Program {
    fn start(lengths: Lengths) -> Option<(Self, OwnedFd)> {
        let ((calls, called), (says, hears)) = (channel::<(RawFd, u64, Sender<Sized>)>(), channel());
        thread::spawn(move || {
            let reported = seccomp::report_lengths(&lengths, true);
            says.send(reported.or_else(|_| seccomp::report_lengths(&lengths, false))).expect("heard");
            for (fd, bytes, answers) in called {
                // What it starts has the filter, too.
                thread::spawn(move || {
                    // SAFETY: the test has it open until it has heard the answer.
                    let file = unsafe { BorrowedFd::borrow_raw(fd) };
                    let _ = answers.send(rustix::fs::ftruncate(file, bytes));
                });
            }
        });
        match hears.recv().expect("it says so") {
            Ok(listener) => Some((Program(calls), listener)),
            Err(why) => {
                eprintln!("skipped: {why}");
                None
            }
        }
    }
}

/// The daemon's end of a connection.
struct Server {
    socket: OwnedFd,
    lent: u64,
    returned: Vec<u64>,
}

impl Server {
    /// What it is asked next.
    fn hears(&mut self) -> Option<Request> {
        loop {
            match wire::receive(self.socket.as_fd()).expect("it is told something in time") {
                Some((Request::Seen { .. }, _)) => {}
                Some((Request::Return { lease }, _)) => self.returned.push(lease),
                other => return other.map(|(request, _)| request),
            }
        }
    }

    /// Lends so many pages, which it is asked for next, and says by which file.
    fn lends(&mut self, pages: u64) -> u64 {
        let bytes = pages * BYTES;
        assert!(matches!(self.hears(), Some(Request::Lease(wish)) if wish.bytes == bytes), "{pages} pages");
        self.lent += 1;
        let (lease, page, node) = (self.lent, PAGE, None);
        let about = Leased { lease, bytes, page, node, filled_late: 0, secret: None, resumed: false };
        let file = file(pages);
        wire::send(self.socket.as_fd(), &Answer::Leased(about), Some(file.as_fd())).expect("sent");
        fstat(&file).expect("open").st_ino
    }
}

/// Whoever waits has what was asked for it, whatever else was asked for meanwhile.
#[test]
fn calls_that_wait_at_once_have_each_its_own() {
    let _turn = turn();
    let Some(mut parts) = Parts::start("at-once", 6) else { return };
    let (first, second) = (Own::new(), Own::new());
    let (calls_first, calls_second) = (parts.call(&first, 2), parts.call(&second, 4));
    let returned = parts.serve(|daemon, _| {
        let lent = [daemon.lends(2), daemon.lends(4)];
        [calls_first, calls_second].iter().for_each(|(_, sized)| assert_eq!(sized.recv_timeout(END), Ok(Ok(()))));
        assert_eq!([first.inode(), second.inode()], lent);
    });
    assert!(returned.is_empty());
}

/// A call that a signal has ended comes again: what was asked for it is paid for once, and is in its turn.
#[test]
fn a_call_that_comes_again_pays_once() {
    let _turn = turn();
    let Some(mut parts) = Parts::start("again", 6) else { return };
    let (first, second) = (Own::new(), Own::new());
    let ended = parts.call(&first, 2);
    let calls_second = parts.call(&second, 4);
    parts.interrupt(ended);
    let calls_again = parts.call(&first, 2);
    let returned = parts.serve(|daemon, _| {
        let lent = [daemon.lends(2), daemon.lends(4)];
        [calls_again, calls_second].iter().for_each(|(_, sized)| assert_eq!(sized.recv_timeout(END), Ok(Ok(()))));
        assert_eq!([first.inode(), second.inode()], lent);
    });
    assert!(returned.is_empty());
}

/// One that comes no more has what was asked for it go back, and others may have as much.
#[test]
fn a_call_that_comes_no_more_costs_nothing() {
    let _turn = turn();
    let Some(mut parts) = Parts::start("no-more", 4) else { return };
    let (first, second, third) = (Own::new(), Own::new(), Own::new());
    let ended = parts.call(&first, 2);
    parts.interrupt(ended);
    let calls_second = parts.call(&second, 1);
    let returned = parts.serve(|daemon, program| {
        daemon.lends(2);
        let lent = daemon.lends(1);
        assert_eq!((calls_second.1.recv_timeout(END), second.inode()), (Ok(Ok(())), lent));
        let (answers, sized) = channel();
        program.0.send((third.0.as_raw_fd(), 3 * BYTES, answers)).expect("it runs");
        let lent = daemon.lends(3);
        assert_eq!((sized.recv_timeout(END), third.inode()), (Ok(Ok(())), lent));
    });
    assert_eq!((returned, first.size()), (vec![1], 0));
}

/// A second call on a descriptor whose first one waits: the file has its own memory, once, and what was asked for goes back.
#[test]
fn two_calls_on_one_descriptor_have_one_memory() {
    let _turn = turn();
    let Some(mut parts) = Parts::start("one", 2) else { return };
    let own = Own::new();
    let before = own.inode();
    let first = parts.call(&own, 2);
    let second = parts.call(&own, 2);
    assert_eq!(second.1.recv_timeout(END), Ok(Ok(())), "it waits for nothing");
    rustix::io::pwrite(&own.0, b"x", 0).expect("its own");
    let returned = parts.serve(|daemon, _| {
        daemon.lends(2);
        assert_eq!(first.1.recv_timeout(END), Ok(Ok(())));
    });
    let mut byte = [0];
    rustix::io::pread(&own.0, &mut byte[..], 0).expect("its own");
    assert_eq!((own.inode(), byte, returned), (before, *b"x", vec![1]));
}
