//! A daemon that is not traced, and its clients.

use crate::roles::{gone, me};
use crate::support::wait_for;
use hugemm_lease::client::Connection;
use hugemm_lease::status::Status;
use hugemm_lease::wire::{Answer, Request};
use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};

/// A daemon that is not traced, ended when dropped.
pub(crate) struct Served {
    pub(crate) child: Child,
    pub(crate) socket: PathBuf,
}

pub(crate) fn new_socket() -> PathBuf {
    let socket = std::env::temp_dir().join(format!("hugemm-lease-{}.socket", std::process::id()));
    let _ = std::fs::remove_file(&socket);
    let _ = std::fs::remove_file(gone(&socket));
    socket
}

impl Served {
    pub(crate) fn start() -> Self {
        Self::start_by(&["env"])
    }

    /// By a command that runs what it is told.
    pub(crate) fn start_by(words: &[&str]) -> Self {
        let socket = new_socket();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).arg(std::env::current_exe().expect("a path")).arg("daemon").arg(&socket);
        let child = command.stderr(Stdio::inherit()).spawn().expect("a daemon");
        let served = Served { child, socket };
        served.wait_until_idle();
        served
    }

    pub(crate) fn status(&self) -> Option<Status> {
        match Connection::open(&self.socket).and_then(|daemon| daemon.ask(&Request::Status {})) {
            Ok((Answer::Status(status), _)) => Some(*status),
            _ => None,
        }
    }

    /// Nothing is lent, and a file is ready.
    pub(crate) fn wait_until_idle(&self) {
        wait_for("nothing is lent", || self.status().is_some_and(|status| status.leases.is_empty()));
        wait_for("a file is ready", || self.status().is_some_and(|status| status.ready.len() == 1));
    }

    /// The client that becomes the program in that role.
    pub(crate) fn client(&self, role: &str) -> Command {
        let mut command = me(&["client", self.socket.to_str().expect("UTF-8"), role]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        command
    }

    /// What the program in that role says.
    pub(crate) fn said(&self, role: &str) -> String {
        let output = self.client(role).stderr(Stdio::inherit()).output().expect("run");
        String::from_utf8(output.stdout).expect("UTF-8")
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// What a process has said that is over.
pub(crate) fn rest(output: Option<ChildStdout>) -> String {
    let mut said = String::new();
    let _ = output.expect("piped").read_to_string(&mut said);
    said
}

/// The client's processes: itself, which becomes the program; a child that only starts the supervisor; the supervisor.
pub(crate) const PROCESSES: usize = 3;
pub(crate) const PROGRAM: usize = 0;
pub(crate) const SUPERVISOR: usize = 2;
