//! What is lent in the place of a program's files: leased already, or asked for when a file is made, by a thread that may wait for the
//! daemon while the [supervisor](crate::supervisor) answers others.

use crate::client::{ClientError, Connection, Lease};
use crate::memory_file::Page;
use crate::own_file::NotReplaced;
use crate::seccomp::Lengths;
use crate::wire::{Leased, Refused, RefusedKind, Seen, Wish};
use std::collections::BTreeSet;
use std::io::{self, PipeReader, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

/// What takes the place of a program's files.
#[derive(Debug)]
pub struct Lending {
    /// The daemon, until it is gone.
    pub(crate) connection: Option<Arc<Connection>>,
    /// From the first file on that is asked for.
    pub(crate) asker: Option<Asker>,
    /// Leased already, and in no file's place.
    pub(crate) ready: Vec<(Leased, OwnedFd)>,
    pub(crate) lengths: Lengths,
    pub(crate) page: Page,
    node: Option<u32>,
    /// How much may be out at a time.
    budget: u64,
    /// What is, as far as is known: number and length of each lease.
    out: Vec<(u64, u64)>,
    /// How much was asked for and has not come.
    wanted: u64,
    /// One lease for one file, whatever else is made: there may be more files of its length.
    pub(crate) is_one: bool,
}

impl Lending {
    /// Of the files of a lease's length the first is the lease.
    pub fn one(lease: Lease) -> Self {
        let Lease { about, file, connection } = lease;
        let lengths = Lengths { page: about.page.bytes(), bounds: about.bytes..=about.bytes };
        let (page, node, ready) = (about.page, about.node, vec![(about, file)]);
        let connection = Some(Arc::new(connection));
        Lending {
            connection,
            asker: None,
            ready,
            lengths,
            page,
            node,
            budget: 0,
            out: Vec::new(),
            wanted: 0,
            is_one: true,
        }
    }

    /// Every file is leased when it is made, as long as they are no more than `budget` together; none for which a ready one would be cut
    /// to less than an eighth.
    ///
    /// # Errors
    ///
    /// As [`Connection::ask`]; [`ClientError::Refused`]: no file could be lent.
    pub fn up_to(daemon: Connection, budget: u64, page: Option<Page>, node: Option<u32>) -> Result<Self, ClientError> {
        let status = daemon.status()?;
        let page = page.unwrap_or(status.page);
        let shortest = status.wanted.iter().min().copied().unwrap_or(0);
        let least = (shortest / LEAST_PART / page.bytes() * page.bytes()).max(page.bytes());
        if budget < least {
            let message =
                format!("{budget} bytes are less than what is lent of the daemon's shortest file, {least}; lend more");
            return Err(ClientError::Refused(Refused { kind: RefusedKind::Invalid, message }));
        }
        // The longest length that a file has.
        let lengths = Lengths { page: page.bytes(), bounds: least..=i64::MAX as u64 };
        let connection = Some(Arc::new(daemon));
        let (ready, out) = (Vec::new(), Vec::new());
        Ok(Lending { connection, asker: None, ready, lengths, page, node, budget, out, wanted: 0, is_one: false })
    }

    /// A file of that length, if one is leased already; else one is asked for, and comes [later](Self::asked). Whoever has a large file
    /// meanwhile does not wait for the daemon.
    pub(crate) fn take(&mut self, bytes: u64) -> Result<Option<(Leased, OwnedFd)>, NotReplaced> {
        if let Some(index) = self.ready.iter().position(|(about, _)| about.bytes == bytes) {
            return Ok(Some(self.ready.swap_remove(index)));
        }
        let out = self.out.iter().fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes));
        let left = self.budget.saturating_sub(out.saturating_add(self.wanted));
        let missing = bytes.saturating_sub(left);
        if missing > out {
            return Err(too_much(left));
        }
        let Some(connection) = &self.connection else { return Err(no_daemon()) };
        let asker = match &mut self.asker {
            Some(asker) => asker,
            none => none.insert(Asker::of(connection).map_err(|error| NotReplaced::NotLent(error.to_string()))?),
        };
        let wish = Wish { page: Some(self.page), node: self.node, ..Wish::of(bytes) };
        let is_asked = missing > 0 || self.out.len() % MOST_UNASKED == MOST_UNASKED - 1;
        let out = if is_asked { self.out.clone() } else { Vec::new() };
        asker.wishes.send(Question { wish, out, missing }).map_err(|_| no_daemon())?;
        self.wanted += bytes;
        Ok(None)
    }

    /// What has come of the next file of that length that was asked for.
    pub(crate) fn asked(&mut self, bytes: u64) -> Result<(Leased, OwnedFd), NotReplaced> {
        let (back, answer) = self.asker.as_mut().and_then(|asker| asker.answer()).unzip();
        self.wanted -= bytes;
        back.into_iter().flatten().for_each(|lease| self.is_back(lease));
        let error = match answer {
            Some(Ok((about, file))) => {
                self.out.push((about.lease, about.bytes));
                return Ok((about, file));
            }
            Some(Err(ClientError::Refused(refused))) => NotReplaced::NotLent(refused.message),
            Some(Err(error)) => {
                self.connection = None;
                NotReplaced::NotLent(error.to_string())
            }
            None => no_daemon(),
        };
        Err(error)
    }

    /// Nobody has a lease's memory any more.
    fn is_back(&mut self, lease: u64) {
        self.out.retain(|(other, _)| *other != lease);
        self.connection.iter().for_each(|daemon| daemon.give_back(lease));
    }

    /// What nobody has had: one lease is for the next file, others go back to the daemon.
    pub(crate) fn give_back(&mut self, (about, file): (Leased, OwnedFd)) {
        if self.is_one {
            return self.ready.push((about, file));
        }
        drop(file);
        self.is_back(about.lease);
    }

    pub(crate) fn tell(&self, lease: u64, seen: Seen) {
        self.connection.iter().for_each(|connection| connection.tell(lease, seen));
    }

    pub(crate) fn tell_of_ready(&self, seen: Seen) {
        self.ready.iter().for_each(|(about, _)| self.tell(about.lease, seen));
    }
}

fn no_daemon() -> NotReplaced {
    NotReplaced::NotLent("the lease daemon is gone; programs that are started anew have leases".to_owned())
}

fn too_much(left: u64) -> NotReplaced {
    NotReplaced::NotLent(format!("{left} bytes are left to be lent; lend more with --up-to"))
}

/// At every so many leases that are out the daemon is asked which are.
const MOST_UNASKED: usize = 64;

/// What the daemon is asked.
#[derive(Debug)]
struct Question {
    wish: Wish,
    /// Which of them are back, first.
    out: Vec<(u64, u64)>,
    /// How much must be.
    missing: u64,
}

/// Which leases are back, and what was lent.
type Answered = (Vec<u64>, Result<(Leased, OwnedFd), ClientError>);

impl Question {
    fn ask(self, daemon: &Connection) -> Answered {
        let Question { wish, mut out, missing } = self;
        if !out.is_empty() {
            match daemon.status() {
                Ok(status) => {
                    let still: BTreeSet<_> = status.leases.iter().map(|lent| lent.lease).collect();
                    out.retain(|(lease, _)| !still.contains(lease));
                }
                Err(error) => return (Vec::new(), Err(error)),
            }
        }
        let (back, bytes): (Vec<_>, Vec<_>) = out.into_iter().unzip();
        let bytes = bytes.into_iter().fold(0, u64::saturating_add);
        if bytes < missing {
            let message = too_much(wish.bytes - (missing - bytes)).to_string();
            return (back, Err(ClientError::Refused(Refused { kind: RefusedKind::LendingPolicy, message })));
        }
        (back, daemon.another(wish))
    }
}

/// A thread that asks the daemon for leases, one after the other.
#[derive(Debug)]
pub(crate) struct Asker {
    wishes: Sender<Question>,
    answers: Receiver<Answered>,
    /// Has a byte for each answer, and ends with the thread.
    pub(crate) there: PipeReader,
}

impl Asker {
    fn of(connection: &Arc<Connection>) -> io::Result<Self> {
        let ((wishes, wished), (says, answers), (there, mut tell)) = (channel::<Question>(), channel(), io::pipe()?);
        let connection = Arc::clone(connection);
        thread::Builder::new().name("asker".to_owned()).spawn(move || {
            for question in wished {
                let answer = question.ask(&connection);
                // What comes later would be the answer to something else.
                let is_over = answer.1.as_ref().is_err_and(|error| !matches!(error, ClientError::Refused(_)));
                // Whoever would hear it ends with this process.
                let _ = says.send(answer).map(|()| tell.write_all(&[0]));
                if is_over {
                    break;
                }
            }
        })?;
        Ok(Asker { wishes, answers, there })
    }

    fn answer(&mut self) -> Option<Answered> {
        self.there.read_exact(&mut [0]).ok()?;
        self.answers.try_recv().ok()
    }
}

/// Of the daemon's shortest file so much is lent at least: the rest is given back to the kernel, and was filled for nothing.
const LEAST_PART: u64 = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{BYTES, PAGE, daemon, file};
    use crate::wire::Request;
    use std::os::fd::AsFd;

    /// A program that starts machine after machine, each of which gives its memory back, may go on for ever.
    #[test]
    fn what_is_given_back_is_lent_again() {
        let daemon = Arc::new(daemon(&[1]));
        let path = std::env::temp_dir().join(format!("hugemm-lending-{}", std::process::id()));
        let listener = crate::listener::Listener::bind(&path, false).expect("a socket");
        let (stops, stop) = io::pipe().expect("a pipe");
        thread::scope(|scope| {
            let serves = scope.spawn(|| crate::server::serve(&daemon, &listener, stops.as_fd()));
            let connection = Connection::open(&path).expect("there is room");
            let mut lending = Lending::up_to(connection, 2 * BYTES, None, None).expect("more than the least");
            let mut lend = || {
                daemon.gets(1);
                match lending.take(BYTES) {
                    Ok(None) => lending.asked(BYTES),
                    other => other.map(|lent| lent.expect("asked for")),
                }
            };
            let mut out = vec![lend().expect("the first"), lend().expect("the second")];
            assert_eq!(lend().err(), Some(too_much(0)));
            for _ in 0..2 * MOST_UNASKED {
                drop(out.pop());
                out.push(lend().expect("one is back"));
            }
            assert_eq!(lend().err(), Some(too_much(0)));
            drop(out);
            assert!(lend().is_ok() && lend().is_ok());
            drop(stop);
            serves.join().expect("no panic").expect("served");
        });
    }

    /// An answer that is none to what was asked is the last: the next would be one to something else, and a file of another length.
    #[test]
    fn nothing_is_asked_after_a_wrong_answer() {
        let path = std::env::temp_dir().join(format!("hugemm-asker-{}", std::process::id()));
        let listener = crate::listener::Listener::bind(&path, false).expect("a socket");
        let connection = Arc::new(Connection::open(&path).expect("there is room"));
        let served = rustix::net::accept(&listener).expect("a client");
        let mut asker = Asker::of(&connection).expect("a thread");
        drop(connection);
        let question = |pages| Question { wish: Wish::of(pages * BYTES), out: Vec::new(), missing: 0 };
        [2, 4].into_iter().for_each(|pages| asker.wishes.send(question(pages)).expect("it hears"));
        let hear = || crate::wire::receive::<Request>(served.as_fd()).expect("open").map(|(request, _)| request);
        assert_eq!(hear(), Some(Request::Lease(Wish::of(2 * BYTES))));
        let (lease, bytes, page) = (1, BYTES, PAGE);
        let about = Leased { lease, bytes, page, node: None, filled_late: 0, secret: None, resumed: false };
        crate::wire::send(served.as_fd(), &crate::wire::Answer::Leased(about), Some(file(1).as_fd())).expect("sent");
        assert!(asker.answer().is_some_and(|(_, answer)| answer.is_err()), "of another length");
        assert!(asker.answer().is_none() && hear().is_none(), "it asks no more");
    }
}
