//! How long a machine takes that was saved, from exec until its guest answers and until that has touched all of its memory: on leased
//! memory that has the snapshot's bytes, and on the snapshot's file, in the page cache and not.
//!
//! Stock QEMU saves it: memory in a `memory-backend-file`, the state of devices in a file (`x-ignore-shared`).

use super::monitor::Monitor;
use anyhow::{Context, Result, bail};
use hugemm_lease::template::Template;
use rustix::fs::{Advice, fadvise};
use rustix::io::{FdFlags, fcntl_setfd};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

hugemm_workloads::named! {
    /// On which memory.
    Memory {
        /// Leased, with the snapshot's bytes.
        Template = "leased, template",
        /// The snapshot's file, mapped privately, in the page cache.
        Cached = "file, page cache",
        /// The same, read from its disk.
        Cold = "file, cold",
    }
}

/// Under which name the daemon has the snapshot.
pub(super) const NAME: &str = "snapshot";

/// A machine that was saved.
pub(super) struct Snapshot {
    qemu: PathBuf,
    dir: PathBuf,
    bytes: u64,
}

// Of a machine with more than this the rest is above 4 GiB (QEMU's `pc`).
const LOW: u64 = 0xc000_0000;
const MOST_LOW: u64 = 0xe000_0000;

/// Where it is told its memory, behind its header of eight words; its table's length and address follow 48 bytes later.
const RUNS: usize = 32;

/// Where the guest is loaded; its page tables and its own bytes are below [`FROM`].
const AT: u64 = 0x10_0000;
const FROM: u64 = 0x40_0000;

#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    ".pushsection .rodata",
    ".balign 16",
    "hugemm_snapshot_guest:",
    ".code32",
    // The Multiboot header, with where the program is loaded.
    ".long 0x1badb002, 0x10000, -(0x1badb002 + 0x10000)",
    ".long {at}, {at}, 0, 0, {at} + (2f - hugemm_snapshot_guest)",
    // From, to: two runs of memory.
    ".quad 0, 0, 0, 0",
    // A global descriptor table: none, and 64-bit code.
    "3: .quad 0, 0x00af9b000000ffff",
    ".word 15",
    ".long {at} + (3b - hugemm_snapshot_guest)",
    // 64 GiB mapped as they are, by pages of 1 GiB; then long mode.
    "2: mov dword ptr [0x200000], 0x201003",
    "mov edi, 0x201000",
    "mov eax, 0x83",
    "xor edx, edx",
    "mov ecx, 64",
    "5: mov [edi], eax",
    "mov [edi + 4], edx",
    "add edi, 8",
    "add eax, 0x40000000",
    "adc edx, 0",
    "loop 5b",
    "mov eax, 0x200000",
    "mov cr3, eax",
    "mov eax, cr4",
    "or eax, 0x20",
    "mov cr4, eax",
    "mov ecx, 0xc0000080",
    "rdmsr",
    "or eax, 0x100",
    "wrmsr",
    "mov eax, cr0",
    "or eax, 0x80000000",
    "mov cr0, eax",
    "lgdt [{table}]",
    // A far jump, which Intel's syntax has no word for here.
    ".byte 0xea",
    ".long {at} + (6f - hugemm_snapshot_guest)",
    ".word 8",
    ".code64",
    // Each page has its own address at its beginning.
    "6: mov ebx, {runs}",
    "mov ecx, 2",
    "7: mov rdi, [rbx]",
    "8: cmp rdi, [rbx + 8]",
    "jae 9f",
    "mov [rdi], rdi",
    "add rdi, 0x1000",
    "jmp 8b",
    "9: add rbx, 16",
    "dec ecx",
    "jnz 7b",
    "mov al, 'R'",
    "mov dx, 0x3f8",
    "out dx, al",
    // For each byte that comes: an answer at once, one when every page was found and written.
    "20: mov dx, 0x3fd",
    "in al, dx",
    "test al, 1",
    "jz 20b",
    "mov dx, 0x3f8",
    "in al, dx",
    "mov al, 'r'",
    "out dx, al",
    "mov ebx, {runs}",
    "mov ecx, 2",
    "mov sil, 't'",
    "21: mov rdi, [rbx]",
    "22: cmp rdi, [rbx + 8]",
    "jae 23f",
    "cmp [rdi], rdi",
    "je 24f",
    "mov sil, 'x'",
    "24: inc qword ptr [rdi + 8]",
    "add rdi, 0x1000",
    "jmp 22b",
    "23: add rbx, 16",
    "dec ecx",
    "jnz 21b",
    "mov al, sil",
    "mov dx, 0x3f8",
    "out dx, al",
    "jmp 20b",
    "hugemm_snapshot_guest_end:",
    ".popsection",
    at = const AT,
    runs = const AT + RUNS as u64,
    table = const AT + RUNS as u64 + 48,
);

/// The guest, for memory of a machine with so much.
#[cfg(target_arch = "x86_64")]
fn guest(bytes: u64) -> Option<Vec<u8>> {
    unsafe extern "C" {
        static hugemm_snapshot_guest: u8;
        static hugemm_snapshot_guest_end: u8;
    }
    let (from, to) = (&raw const hugemm_snapshot_guest, &raw const hugemm_snapshot_guest_end);
    // SAFETY: bytes of this program between two of its own labels, which nothing writes.
    let mut guest = unsafe { std::slice::from_raw_parts(from, to.addr() - from.addr()) }.to_vec();
    let low = if bytes < MOST_LOW { bytes } else { LOW };
    let bounds = [FROM, low, 1 << 32, (1 << 32) + (bytes - low)];
    guest.splice(RUNS..RUNS + 32, bounds.map(u64::to_le_bytes).concat());
    Some(guest)
}

#[cfg(not(target_arch = "x86_64"))]
fn guest(_: u64) -> Option<Vec<u8>> {
    None
}

/// A machine with a guest that answers.
struct Machine {
    monitor: Monitor,
    serial: UnixStream,
}

const PATIENCE: Duration = Duration::from_secs(120);

impl Machine {
    /// Starts `command`, which ends with QEMU's name, with words for this memory.
    fn start(mut command: Command, snapshot: &Snapshot, memory: &str, more: &[&str]) -> Result<Self> {
        let (serial, theirs) = UnixStream::pair()?;
        serial.set_read_timeout(Some(PATIENCE))?;
        let theirs = OwnedFd::from(theirs);
        // Inherited, too, by whatever else is started meanwhile: nothing is.
        fcntl_setfd(&theirs, FdFlags::empty())?;
        let (size, bytes) = (format!("{}M", snapshot.bytes >> 20), snapshot.bytes);
        let memory = format!("memory-backend-file,id=m,size={bytes},{memory}");
        let port = format!("socket,id=s,fd={}", theirs.as_raw_fd());
        command.args(["-M", "pc,memory-backend=m", "-accel", "tcg", "-cpu", "max", "-m", &size]);
        command.args(["-nodefaults", "-display", "none"]);
        command.args(["-qmp", "stdio", "-chardev", &port, "-serial", "chardev:s", "-object", &memory, "-kernel"]);
        command.arg(snapshot.dir.join("guest")).args(more);
        let mut monitor = Monitor::start(&mut command)?;
        drop(theirs);
        monitor.ask(
            "{\"execute\":\"migrate-set-capabilities\",\"arguments\":{\"capabilities\":[{\"capability\":\"x-ignore-shared\",\"state\":true}]}}",
        )?;
        Ok(Machine { monitor, serial })
    }

    fn hears(&mut self, what: u8) -> Result<()> {
        let mut byte = [0];
        self.serial.read_exact(&mut byte).context("the guest says nothing")?;
        if byte[0] != what {
            bail!("the guest has other memory than was saved ({})", byte[0].escape_ascii());
        }
        Ok(())
    }
}

/// From exec until the guest answers, and until it has touched all its memory.
pub(super) struct Times {
    pub(super) running: Duration,
    pub(super) touched: Duration,
}

impl Snapshot {
    /// Saves a machine whose guest has written every page. `None`: not for this processor's machines.
    pub(super) fn make(qemu: &Path, dir: &Path, bytes: u64) -> Result<Option<Self>> {
        let Some(guest) = guest(bytes) else { return Ok(None) };
        let snapshot = Snapshot { qemu: qemu.to_owned(), dir: dir.join("snapshot"), bytes };
        std::fs::create_dir_all(&snapshot.dir)?;
        std::fs::write(snapshot.dir.join("guest"), guest)?;
        let memory = format!("share=on,mem-path={}", snapshot.ram().display());
        let mut machine = Machine::start(Command::new(qemu), &snapshot, &memory, &[])?;
        machine.hears(b'R')?;
        machine.monitor.ask("{\"execute\":\"stop\"}")?;
        machine.monitor.ask(&snapshot.migrate("migrate", "cat >"))?;
        machine.monitor.ask_until("{\"execute\":\"query-migrate\"}", "\"completed\"")?;
        drop(machine);
        // On its disk, so that it can leave the page cache.
        File::open(snapshot.ram())?.sync_all()?;
        Ok(Some(snapshot))
    }

    fn ram(&self) -> PathBuf {
        self.dir.join("ram")
    }

    fn migrate(&self, verb: &str, by: &str) -> String {
        let state = self.dir.join("state");
        format!("{{\"execute\":\"{verb}\",\"arguments\":{{\"uri\":\"exec:{by} {}\"}}}}", state.display())
    }

    pub(super) fn template(&self) -> Template {
        Template { name: NAME.to_owned(), path: self.ram() }
    }

    /// Starts it again; `lease` is what a leased one is started by.
    pub(super) fn restore(&self, memory: Memory, lease: Command) -> Result<Times> {
        let file = File::open(self.ram())?;
        match memory {
            Memory::Template | Memory::Cold => fadvise(&file, 0, None, Advice::DontNeed)?,
            Memory::Cached => drop(std::io::copy(&mut &file, &mut std::io::sink())?),
        }
        let (mut command, words) = match memory {
            Memory::Template => (lease, "share=on,mem-path=@LEASE@".to_owned()),
            _ => (Command::new("env"), format!("share=off,mem-path={}", self.ram().display())),
        };
        command.arg(&self.qemu);
        let from = Instant::now();
        let mut machine = Machine::start(command, self, &words, &["-incoming", "defer"])?;
        machine.monitor.ask(&self.migrate("migrate-incoming", "cat"))?;
        machine.monitor.ask_until("{\"execute\":\"query-status\"}", "\"paused\"")?;
        machine.monitor.ask("{\"execute\":\"cont\"}")?;
        machine.serial.write_all(b"!")?;
        machine.hears(b'r')?;
        let running = from.elapsed();
        machine.hears(b't')?;
        Ok(Times { running, touched: from.elapsed() })
    }
}
