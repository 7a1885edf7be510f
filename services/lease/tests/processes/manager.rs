//! What a service manager holds for the daemon.

use crate::roles::{kept, me, with_bytes};
use crate::served::{Served, new_socket, rest};
use crate::support::{Pool, wait_for};
use hugemm_lease::client::{ClientError, Connection};
use hugemm_lease::listener::Listener;
use hugemm_lease::status::Status;
use hugemm_lease::wire::{Answer, Forget, KeepAs, Request};
use rustix::fs::Mode;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use std::io::{BufRead, BufReader, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// A service manager as far as it is needed here: holds files, and never gets around to letting go of one.
struct Manager {
    socket: UnixDatagram,
    path: PathBuf,
    stored: Vec<(String, OwnedFd)>,
    said: Vec<String>,
}

impl Manager {
    fn new() -> Self {
        let path = std::env::temp_dir().join(format!("hugemm-lease-{}.notify", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let socket = UnixDatagram::bind(&path).expect("a socket");
        socket.set_nonblocking(true).expect("a flag");
        Manager { socket, path, stored: Vec::new(), said: Vec::new() }
    }

    /// Starts a daemon on the listening socket and what is stored.
    fn start(&self, listener: &OwnedFd) -> Child {
        let passed = std::iter::once(listener).chain(self.stored.iter().map(|(_, file)| file));
        // Out of the way of the numbers that they get.
        let passed: Vec<_> = passed.map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 100).expect("a descriptor")).collect();
        let numbers: Vec<_> = passed.iter().map(AsRawFd::as_raw_fd).collect();
        let me = std::env::current_exe().expect("a path");
        let mut command = Command::new("sh");
        command.args(["-c", "LISTEN_PID=$$ exec \"$0\" daemon /nowhere/socket"]).arg(me);
        let names: Vec<_> =
            std::iter::once("socket").chain(self.stored.iter().map(|(name, _)| name.as_str())).collect();
        command.env("NOTIFY_SOCKET", &self.path).env("LISTEN_FDS", numbers.len().to_string());
        command.env("LISTEN_FDNAMES", names.join(":"));
        // SAFETY: system calls between fork and exec, with descriptors that are open until after it.
        unsafe {
            command.pre_exec(move || {
                for (index, number) in numbers.iter().enumerate() {
                    if libc::dup2(*number, 3 + index as i32) < 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        command.spawn().expect("a daemon")
    }

    /// Hears what has been said.
    fn hear(&mut self) {
        let mut bytes = [0; 4096];
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let Ok(got) = rustix::net::recvmsg(&self.socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) else {
                return;
            };
            let text = String::from_utf8_lossy(&bytes[..got.bytes]).into_owned();
            let name = text.lines().find_map(|line| line.strip_prefix("FDNAME=")).unwrap_or_default().to_owned();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = message {
                    assert!(text.contains("FDSTORE=1\n"), "{text}");
                    self.stored.extend(fds.map(|fd| (name.clone(), fd)));
                }
            }
            self.said.push(text);
        }
    }

    fn wait_for(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) {
        wait_for(what, || {
            self.hear();
            is_so(self)
        });
    }

    fn was_told(&self, what: &str, name: &str) -> bool {
        self.said.iter().any(|said| said.contains(what) && said.contains(name))
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// A daemon that is killed and started anew has what it had ready, and lends nothing twice, though the manager still has what it
/// was told to let go of.
pub(crate) fn a_manager_holds_what_is_filled(_: &Pool) {
    let mut manager = Manager::new();
    let socket = new_socket();
    let kind = (AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let listener = rustix::net::socket_with(kind.0, kind.1, kind.2, None).expect("a socket");
    rustix::net::bind(&listener, &SocketAddrUnix::new(&socket).expect("a path")).expect("bound");
    rustix::net::listen(&listener, 8).expect("listening");
    let mut served = Served { child: manager.start(&listener), socket };
    manager.wait_for("ready", |manager| manager.was_told("READY=1", ""));
    manager.wait_for("one is stored", |manager| manager.stored.len() == 1);
    let mut first = served.client("stays").stdin(Stdio::piped()).spawn().expect("a client");
    manager.wait_for("another is stored", |manager| manager.stored.len() == 2);
    let lent = manager.stored[0].0.clone();
    assert!(manager.was_told("FDSTOREREMOVE=1", &lent), "{:?}", manager.said);
    served.child.kill().expect("killed");
    let _ = served.child.wait();
    manager.said.clear();
    served.child = manager.start(&listener);
    let status = served.status().expect("a status");
    assert_eq!((status.ready.len(), status.counts.filled_bytes), (1, 0), "nothing has to be filled again");
    manager.wait_for("what is lent is given up again", |manager| manager.was_told("FDSTOREREMOVE=1", &lent));
    let second = served.said("plain");
    let inode = manager.stored[1].0.strip_prefix("memory-").expect("a name");
    assert_eq!(second, format!("leased {inode}\n"));
    drop(first.stdin.take());
    let output = first.stdout.take();
    assert!(first.wait().expect("ended").success());
    let first = rest(output);
    assert!(first.ends_with(&format!("leased {}\nkept\n", lent.strip_prefix("memory-").expect("a name"))), "{first}");
}

/// Kept memory has its bytes, its owner and its secret after the daemon was killed; while its program runs nobody else gets it; and
/// what is forgotten stays so, though the manager still has it.
pub(crate) fn kept_memory_survives_the_daemon(_: &Pool) {
    let mut manager = Manager::new();
    let socket = new_socket();
    let listener = Listener::bind(&socket, false).expect("a socket");
    let listener = listener.as_fd().try_clone_to_owned().expect("a descriptor");
    let mut served = Served { child: manager.start(&listener), socket };
    let restart = |served: &mut Served, manager: &mut Manager| {
        served.child.kill().expect("killed");
        let _ = served.child.wait();
        served.child = manager.start(&listener);
    };
    manager.wait_for("one is stored", |manager| manager.stored.len() == 1);
    let mut keeper = me(&["keeper", served.socket.to_str().expect("UTF-8")]);
    let mut keeper = keeper.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a client");
    let mut secret = String::new();
    BufReader::new(keeper.stdout.take().expect("piped")).read_line(&mut secret).expect("a secret");
    let secret = secret.trim();
    let of_kept = |manager: &Manager| manager.stored.iter().filter(|(name, _)| name.starts_with("kept-")).count();
    manager.wait_for("kept memory and its record are stored", |manager| of_kept(manager) == 2);
    restart(&mut served, &mut manager);
    let place = served.socket.clone();
    let refusal = |secret: Option<&str>| match kept(&place, secret) {
        Err(ClientError::Refused(refused)) => refused.message,
        other => panic!("{other:?}"),
    };
    assert!(refusal(Some(secret)).contains("in use"), "its program still runs");
    assert!(refusal(None).contains("the secret is not the one"));
    // Its user can make it look like a file that nobody has had; the name says what it is, once the manager has let go of the former one.
    manager.stored.retain(|(name, _)| name.starts_with("kept-"));
    let set = |manager: &Manager, mode| {
        manager.stored.iter().for_each(|(_, file)| rustix::fs::fchmod(file, mode).expect("root's"));
    };
    set(&manager, Mode::empty());
    restart(&mut served, &mut manager);
    wait_for("it has taken what was stored", || served.status().is_some());
    set(&manager, Mode::RUSR | Mode::WUSR);
    assert!(refusal(Some(secret)).contains("in use"), "it is kept, and not ready");
    drop(keeper.stdin.take());
    assert!(keeper.wait().expect("ended").success());
    let is_free = |status: &Status| matches!(&status.kept[..], [kept] if !kept.in_use);
    wait_for("its program is over", || served.status().is_some_and(|status| is_free(&status)));
    restart(&mut served, &mut manager);
    let lease = kept(&served.socket, Some(secret)).expect("leased again");
    assert!(lease.about.resumed);
    with_bytes(&lease.file, |memory| assert!(memory.iter().all(|byte| *byte == 0x5a), "it has its bytes"));
    drop(lease);
    let forget = |secret: &str, uid| {
        let keep = KeepAs { name: "cache".to_owned(), secret: Some(secret.to_owned()) };
        Connection::open(&served.socket)?.ask(&Request::Forget(Forget { keep, uid }))
    };
    assert!(forget(secret, Some(4711)).is_err(), "another's of that name is not there");
    assert!(matches!(forget(secret, None), Ok((Answer::Done {}, _))));
    assert_eq!(served.status().map(|status| status.kept), Some(Vec::new()));
    manager.wait_for("it is let go of", |manager| manager.was_told("FDSTOREREMOVE=1", "FDNAME=kept-"));
    restart(&mut served, &mut manager);
    assert_eq!(served.status().map(|status| status.kept), Some(Vec::new()), "what is forgotten stays so");
}
