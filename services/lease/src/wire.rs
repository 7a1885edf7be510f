//! What daemon and clients say to each other: one JSON object in each packet of a Unix socket, a descriptor beside the answer
//! that leases.

use crate::memory_file::Page;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Longest packet that is taken of an answer, and of a request, which is quoted where it makes no sense.
const MOST: usize = 1 << 16;
const MOST_ASKED: usize = 1 << 12;

/// Longest packet of an answer. What is longer is announced by one, and sent in as many as it takes.
pub(crate) const PART: usize = 1 << 14;

/// What a client wants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Memory.
    Lease(Wish),
    /// How things stand.
    Status {},
    /// Gives ready memory back to the kernel and stops filling, until [`Request::Fill`].
    Drain {},
    /// Fills again.
    Fill {},
    /// What a lease's supervisor saw; for the log and the counters.
    Seen {
        /// Which lease of this connection's.
        lease: u64,
        /// What.
        seen: Seen,
    },
    /// Ends one of this connection's leases, whose memory nobody has. Nothing is answered.
    Return {
        /// Which.
        lease: u64,
    },
    /// Ends this connection's leases, whose memory the client has let go of, before its process ends.
    End {},
    /// Keeps memory no more: it goes back to the kernel, from a program that has it now when that ends.
    Forget(Forget),
}

/// What is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wish {
    /// How much.
    pub bytes: u64,
    /// Of what; whatever the daemon has, if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page: Option<Page>,
    /// From where; from anywhere, if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<u32>,
    /// Under which name the memory is kept when its program ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<KeepAs>,
    /// With the bytes of which template; of its length, if none is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
}

impl Wish {
    /// So much, of whatever the daemon has.
    pub fn of(bytes: u64) -> Self {
        Wish { bytes, page: None, node: None, keep: None, template: None }
    }
}

/// Memory that outlives its program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeepAs {
    /// Its name, of its user's own.
    pub name: String,
    /// What the first lease under the name was given; without it the name must be new.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
}

/// What is no longer kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Forget {
    /// Its name, and the secret, which root and the daemon's own user need not have.
    pub keep: KeepAs,
    /// Whose it is: the asker's, if nobody is named. For root and the daemon's own user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
}

/// What became of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Seen {
    /// The program is to ask for memory of that length, and has not yet.
    Awaited,
    /// It took the place of the program's own file.
    Placed,
    /// The program maps its memory privately: each page that it writes is copied, and nothing is gained.
    PrivateMapping,
    /// The program ended without having asked for memory of that length.
    Unused,
}

/// What the daemon answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The descriptor is with this packet.
    Leased(Leased),
    /// Not to be had.
    Refused(Refused),
    /// How things stand.
    Status(Box<crate::status::Status>),
    /// Done.
    Done {},
    /// Another answer, too long for a packet: the next ones have its text.
    Long {
        /// How much of it.
        bytes: usize,
    },
}

/// A lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leased {
    /// Its number with this daemon.
    pub lease: u64,
    /// The file's length.
    pub bytes: u64,
    /// Its pages.
    pub page: Page,
    /// Where they are, if the daemon was told to take them from one node.
    pub node: Option<u32>,
    /// How many bytes were filled while the client waited.
    pub filled_late: u64,
    /// For kept memory: what to show when asking for it again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
    /// For kept memory: whether it has its former bytes.
    #[serde(default)]
    pub resumed: bool,
}

/// Why not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// Of which kind.
    pub kind: RefusedKind,
    /// In words, with the way out.
    pub message: String,
}

/// Kinds of refusals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusedKind {
    /// Nothing ready: go on without.
    Empty,
    /// The policy says no.
    LendingPolicy,
    /// Not a size, not a page, not a name.
    Invalid,
    /// Kept memory that is in use, or another's.
    Kept,
}

pub(crate) fn socket(kind: SocketType) -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?)
}

/// An answer as it is sent, with the descriptor beside it.
pub(crate) struct Packet {
    text: Vec<u8>,
    fd: Option<OwnedFd>,
}

impl Packet {
    pub(crate) fn new(answer: &Answer, fd: Option<OwnedFd>) -> io::Result<Self> {
        Ok(Packet { text: serde_json::to_vec(answer)?, fd })
    }

    /// Waits for whoever takes it.
    pub(crate) fn send(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        if self.text.len() > PART {
            send(socket, &Answer::Long { bytes: self.text.len() }, None)?;
        }
        let fds = std::iter::once(self.fd.as_ref().map(AsFd::as_fd)).chain(std::iter::repeat(None));
        self.text.chunks(PART).zip(fds).try_for_each(|(part, fd)| send_packet(socket, part, fd))
    }
}

/// Sends one packet.
///
/// # Errors
///
/// The system's.
pub fn send(socket: BorrowedFd<'_>, what: &impl Serialize, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    send_packet(socket, &serde_json::to_vec(what)?, fd)
}

fn send_packet(socket: BorrowedFd<'_>, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fd.map(|fd| [fd]);
    if let Some(fds) = &fds {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
    })?;
    Ok(())
}

/// Receives one packet, with the descriptor that came with it. `None`: the other side is gone.
///
/// # Errors
///
/// The system's; `InvalidData` for what is no such packet.
pub fn receive<T: DeserializeOwned>(socket: BorrowedFd<'_>) -> io::Result<Option<(T, Option<OwnedFd>)>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let Some((bytes, fd)) = receive_packet(socket, RecvAncillaryBuffer::new(&mut space), MOST)? else {
        return Ok(None);
    };
    Ok(Some((serde_json::from_slice(&bytes)?, fd)))
}

/// Receives a request, and no descriptor: whoever closes a file waits for what serves its file system, which may be its sender's. What
/// comes without room for it the kernel drops, and nobody waits (`scm_destroy` of net/core/scm.c).
pub(crate) fn receive_request(socket: BorrowedFd<'_>) -> io::Result<Option<Request>> {
    let packet = receive_packet(socket, RecvAncillaryBuffer::new(&mut []), MOST_ASKED)?;
    Ok(packet.map(|(bytes, _)| serde_json::from_slice(&bytes)).transpose()?)
}

/// Receives an answer, however long, as [`receive`] does.
///
/// # Errors
///
/// As [`receive`].
pub fn receive_answer(socket: BorrowedFd<'_>) -> io::Result<Option<(Answer, Option<OwnedFd>)>> {
    let (bytes, fd) = match receive(socket)? {
        Some((Answer::Long { bytes }, fd)) => (bytes, fd),
        other => return Ok(other),
    };
    let mut text = Vec::new();
    while text.len() < bytes {
        match receive_packet(socket, RecvAncillaryBuffer::new(&mut []), MOST)? {
            Some((part, _)) => text.extend(part),
            None => return Ok(None),
        }
    }
    Ok(Some((serde_json::from_slice(&text)?, fd)))
}

fn receive_packet(
    socket: BorrowedFd<'_>,
    mut control: RecvAncillaryBuffer<'_>,
    most: usize,
) -> io::Result<Option<(Vec<u8>, Option<OwnedFd>)>> {
    // As long as what comes: 64 KiB of zeros would be sixteen pages, which a program that starts waits for.
    let length =
        rustix::io::retry_on_intr(|| rustix::net::recv(socket, &mut [0_u8; 0], RecvFlags::PEEK | RecvFlags::TRUNC))?.1;
    let mut bytes = vec![0; length.min(most)];
    // A wait that has an end is cut short where the process is stopped and goes on (signal(7)).
    let got = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut fd = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = message {
            fd = fds.next();
        }
    }
    if got.bytes == 0 {
        return Ok(None);
    }
    let invalid = |what| Err(io::Error::new(ErrorKind::InvalidData, what));
    if got.flags.contains(ReturnFlags::TRUNC) {
        return invalid("a packet longer than any that is sent");
    }
    if got.flags.contains(ReturnFlags::CTRUNC) {
        return invalid(
            "a descriptor came that is not taken: with no request; else none is free (ulimit -n), SELinux or AppArmor forbids it, or \
             there is more than one",
        );
    }
    bytes.truncate(got.bytes);
    Ok(Some((bytes, fd)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::socketpair;
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    use std::os::unix::thread::JoinHandleExt;
    use std::time::Duration;

    /// As where a client is stopped while it waits, and goes on.
    #[test]
    fn a_wait_is_not_cut_short_by_a_signal() {
        extern "C" fn nothing(_: libc::c_int) {}
        // SAFETY: a handler that does nothing, for a signal that nothing else here uses.
        unsafe { libc::signal(libc::SIGUSR2, nothing as *const () as libc::sighandler_t) };
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (ours, theirs) = pair.expect("a pair");
        // The kernel begins a wait that has an end not anew.
        set_socket_timeout(&theirs, Timeout::Recv, Some(Duration::from_secs(60))).expect("a timeout");
        let waits = std::thread::spawn(move || receive::<u32>(theirs.as_fd()).map(|packet| packet.map(|(n, _)| n)));
        for _ in 0..50 {
            // SAFETY: the thread is there, for nobody has joined it.
            unsafe { libc::pthread_kill(waits.as_pthread_t(), libc::SIGUSR2) };
            std::thread::sleep(Duration::from_millis(2));
        }
        send(ours.as_fd(), &7_u32, None).expect("sent");
        assert_eq!(waits.join().expect("no panic").expect("received"), Some(7));
    }
}
