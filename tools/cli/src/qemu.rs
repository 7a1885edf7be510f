//! A virtual machine under QEMU: finding the program, starting it, reading its serial port, and seeing to it that it ends.

use crate::arch::Arch;
use anyhow::{Context, Result, anyhow, bail};
use clap::ValueEnum;
use hugemm_inspect::environment::Environment;
use hugemm_inspect::interrupt;
use hugemm_inspect::limits::Limits;
use hugemm_workloads::size::Size;
use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// How often a wait looks whether the user wants to stop.
const TICK: Duration = Duration::from_millis(50);

/// What a guest says first, it says within this time, or the accelerator does not work here.
const FIRST_WORD: Duration = Duration::from_secs(15);

/// What QEMU has complained about before its end is read within this time, also on a busy machine.
const LAST_COMPLAINT: Duration = Duration::from_secs(5);

/// How many lines are kept as a guest's last words.
const LAST_WORDS: usize = 40;

/// Memory that QEMU itself needs, about.
const OWN_BYTES: u64 = 256 << 20;

/// What executes a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Accel {
    /// Translation in software: works everywhere, and only ratios and counts mean something.
    Tcg,
    /// The same by one thread, by a clock that an instruction advances by a nanosecond: ratios hold on a busy machine too,
    /// and caches cost nothing.
    Icount,
    /// The processor, through /dev/kvm.
    Kvm,
    /// kvm where it can be had and this machine is no virtual one itself, else tcg.
    Auto,
}

impl Accel {
    /// Any but `auto`. If that comes to tcg on this machine's architecture, a line on standard error says why.
    pub fn decide(self, arch: Arch, environment: &Environment) -> Accel {
        let why = match kvm_usable() {
            _ if self != Accel::Auto => return self,
            // Another architecture is always emulated.
            _ if arch != Arch::NATIVE => return Accel::Tcg,
            // Without nested page tables below, page faults and flushes take a thousand times as long as under emulation.
            Ok(()) if environment.virtualization.hypervisor => {
                "this machine is a virtual one, whose kvm may be slower than emulation; --accel kvm takes it".to_owned()
            }
            Ok(()) => return Accel::Kvm,
            Err(error) => format!("{error:#}"),
        };
        eprintln!("hugemm: tcg executes the guest: {why}");
        Accel::Tcg
    }

    /// As it is asked for.
    pub fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

#[derive(Clone, Debug)]
pub struct Guest {
    pub arch: Arch,
    pub accel: Accel,
    /// CPU model and flags, in QEMU's notation; `host` replaces it under kvm.
    pub cpu_model: String,
    pub cpus: u32,
    pub memory: Size,
    pub kernel: PathBuf,
    pub initrd: Option<PathBuf>,
    pub append: String,
    pub options: Vec<OsString>,
    pub deadline: Duration,
    /// The longest that it may say nothing, once it has said something.
    pub silence: Duration,
}

#[derive(Debug)]
pub struct Ended {
    /// How QEMU ended; `None` if it was made to: the deadline had passed, the guest had been silent for too long, or the
    /// reader had heard enough.
    pub status: Option<ExitStatus>,
    pub timed_out: bool,
    /// The last lines of the serial port.
    pub last_words: VecDeque<String>,
    /// What QEMU complained about.
    pub complaint: String,
}

impl Ended {
    /// Why a guest that said nothing of it ended.
    pub fn why(&self, guest: &Guest) -> String {
        let mut lines = self.last_words.iter().rev().map(|line| line.trim());
        let last = lines.find(|line| !line.is_empty()).unwrap_or("nothing");
        let complaint = self.complaint.lines().next().unwrap_or("").trim();
        let why = match self.status {
            _ if self.timed_out => {
                let (seconds, accel) = (guest.deadline.as_secs(), guest.accel.name());
                format!("the guest had not finished after {seconds} s under {accel}; use a larger --timeout")
            }
            None => {
                let seconds = guest.silence.as_secs();
                format!("the guest hangs: no word for {seconds} s, not even from its watchdog")
            }
            Some(status) if status.success() => "the guest reset by itself".to_owned(),
            Some(status) if complaint.is_empty() => format!("QEMU ended with {status}"),
            Some(status) => return format!("QEMU ended with {status}: {complaint}"),
        };
        format!("{why}; its last words: {last}")
    }
}

/// Whether a guest of this size can be started under this accelerator at all: asked before anything is built for it.
///
/// # Errors
/// The memory is not to be had, QEMU is not installed, or the accelerator cannot be used.
pub fn ready(arch: Arch, accel: Accel, memory: Size) -> Result<()> {
    Limits::read()?
        .check(memory.0.saturating_add(OWN_BYTES))
        .context("the guest does not fit; use a smaller --memory")?;
    if accel == Accel::Kvm {
        if arch != Arch::NATIVE {
            bail!("kvm executes guests of this machine's architecture only; use --accel tcg");
        }
        kvm_usable()?;
    }
    let version = Command::new(arch.qemu().0).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    version.map(|_| ()).map_err(|error| not_started(arch, error))
}

fn not_started(arch: Arch, error: std::io::Error) -> anyhow::Error {
    let (program, [debian, fedora]) = arch.qemu();
    match error.kind() {
        ErrorKind::NotFound => anyhow!(
            "{program} is not installed; install it (Debian: sudo apt-get install {debian}, Fedora: sudo dnf \
             install {fedora})"
        ),
        _ => anyhow!("cannot start {program}: {error}"),
    }
}

impl Guest {
    /// With one CPU, and nothing to boot yet.
    pub fn new(arch: Arch, accel: Accel, cpu_model: &str, memory: Size, seconds: u64) -> Self {
        Guest {
            arch,
            accel,
            cpu_model: cpu_model.to_owned(),
            cpus: 1,
            memory,
            kernel: PathBuf::new(),
            initrd: None,
            append: String::new(),
            options: Vec::new(),
            deadline: Duration::from_secs(seconds),
            silence: Duration::MAX,
        }
    }

    /// Boots it and hands every line of its serial port to `line`, until QEMU ends, `line` breaks, or the deadline passes.
    ///
    /// # Errors
    /// QEMU is missing or refuses to start, the memory is not to be had, the accelerator does not work, the user
    /// interrupts, or `line` fails. QEMU is ended on every way out.
    pub fn run(&self, mut line: impl FnMut(&str) -> Result<ControlFlow<()>>) -> Result<Ended> {
        ready(self.arch, self.accel, self.memory)?;
        let mut running = Running::start(self.arch, self.command())?;
        let first_word = if self.accel == Accel::Kvm { FIRST_WORD } else { Duration::MAX };
        let started = Instant::now();
        let mut last_words = VecDeque::with_capacity(LAST_WORDS);
        let (mut enough, mut timed_out, mut silent) = (false, false, false);
        let mut heard = started;
        loop {
            interrupt::check()?;
            match running.lines.recv_timeout(TICK) {
                Ok(text) => {
                    heard = Instant::now();
                    if last_words.len() == LAST_WORDS {
                        last_words.pop_front();
                    }
                    let flow = line(&text)?;
                    last_words.push_back(text);
                    if flow.is_break() {
                        enough = true;
                        break;
                    }
                }
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    if last_words.is_empty() && started.elapsed() > first_word {
                        let seconds = first_word.as_secs();
                        bail!("the guest said nothing for {seconds} s under kvm; use --accel tcg");
                    }
                    timed_out = started.elapsed() > self.deadline;
                    silent = !last_words.is_empty() && heard.elapsed() > self.silence;
                    if timed_out || silent {
                        break;
                    }
                }
            }
        }
        // The serial port is closed: QEMU is ending.
        let killed = enough || timed_out || silent;
        let status = if killed { None } else { Some(running.child.wait().context("cannot wait for QEMU")?) };
        let complaint = running.end();
        // A signal to all processes of a terminal or a service ends QEMU too; then that is why.
        interrupt::check()?;
        if self.accel == Accel::Kvm && last_words.is_empty() && status.is_some_and(|status| !status.success()) {
            bail!(
                "kvm does not work here ({}); use --accel tcg",
                complaint.lines().next().unwrap_or("no reason given")
            );
        }
        Ok(Ended { status, timed_out, last_words, complaint })
    }

    fn command(&self) -> Command {
        let mut command = Command::new(self.arch.qemu().0);
        let cpu = if self.accel == Accel::Kvm { "host" } else { &self.cpu_model };
        let accel = if self.accel == Accel::Kvm { "kvm" } else { "tcg" };
        command.args(["-machine", self.arch.machine(), "-accel", accel, "-cpu", cpu]);
        if self.accel == Accel::Icount {
            command.args(["-icount", "shift=0,sleep=off"]);
        }
        command.args(["-smp", &self.cpus.to_string(), "-m", &format!("{}M", self.memory.0 >> 20)]);
        command.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-monitor", "none"]);
        command.args(["-serial", "stdio"]).arg("-kernel").arg(&self.kernel);
        if let Some(initrd) = &self.initrd {
            command.arg("-initrd").arg(initrd);
        }
        command.args(["-append", &self.append]).args(&self.options);
        command
    }
}

/// Whether /dev/kvm can be opened; if not, why, and what to do.
pub fn kvm_usable() -> Result<()> {
    match std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => bail!("this machine has no /dev/kvm; use --accel tcg"),
        Err(error) => bail!("/dev/kvm cannot be used ({error}); join the group kvm, or use --accel tcg"),
    }
}

/// QEMU while it runs; ended on drop.
struct Running {
    child: Child,
    lines: Receiver<String>,
    complaints: Receiver<String>,
}

impl Running {
    fn start(arch: Arch, mut command: Command) -> Result<Self> {
        let spawned = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = spawned.map_err(|error| not_started(arch, error))?;
        let (lines, complaints) = (lines_of(child.stdout.take()), lines_of(child.stderr.take()));
        Ok(Running { child, lines, complaints })
    }

    /// Ends QEMU if it still runs, and returns what it complained about. What QEMU has started may live on and keep the other end open, so
    /// nobody waits for that.
    fn end(mut self) -> String {
        self.kill();
        let mut text = String::new();
        while let Ok(line) = self.complaints.recv_timeout(LAST_COMPLAINT) {
            text += &line;
            text.push('\n');
        }
        text
    }

    fn kill(&mut self) {
        // Fails if it has ended, which is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Reads along; the lines end with the stream.
pub fn lines_of(stream: Option<impl Read + Send + 'static>) -> Receiver<String> {
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        for line in stream.into_iter().flat_map(|stream| BufReader::new(stream).split(b'\n')) {
            let Ok(line) = line else { return };
            // What a console writes need not be text.
            let text = String::from_utf8_lossy(&line).trim_end_matches('\r').to_owned();
            if sender.send(text).is_err() {
                return;
            }
        }
    });
    lines
}
