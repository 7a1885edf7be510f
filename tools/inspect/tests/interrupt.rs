//! Signals, each test in processes of its own, on a made-up machine whose pool is a file.

use hugemm_base::PageSize;
use hugemm_inspect::memory::{Region, RegionBacking, RegionRequest};
use hugemm_inspect::pool::HugetlbPool;
use hugemm_inspect::{interrupt, roots::Roots};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const ROLE: &str = "HUGEMM_TEST_ROLE";
const MACHINE: &str = "HUGEMM_TEST_MACHINE";
/// What `env` makes of signals that are ignored.
const HEARS: &str = "--default-signal=INT,HUP,TERM";
const POOL: &str = "sys/kernel/mm/hugepages/hugepages-2048kB";

struct Machine(PathBuf);

impl Machine {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("hugemm-interrupt-{name}-{}", std::process::id()));
        std::fs::create_dir_all(dir.join(POOL)).unwrap();
        std::fs::create_dir_all(dir.join("proc")).unwrap();
        std::fs::write(dir.join("proc/meminfo"), "MemTotal: 8388608 kB\nMemAvailable: 8388608 kB\n").unwrap();
        std::fs::write(dir.join(POOL).join("nr_hugepages"), "2\n").unwrap();
        std::os::unix::fs::symlink("nr_hugepages", dir.join(POOL).join("free_hugepages")).unwrap();
        Self(dir)
    }

    fn setting(&self) -> PathBuf {
        self.0.join(POOL).join("nr_hugepages")
    }

    fn pages(&self) -> String {
        std::fs::read_to_string(self.setting()).unwrap().trim().to_owned()
    }

    /// Starts this test program again in the given role and waits until it says that it is ready. It ignores no signal, also
    /// where this one does, which is then in the background of a script.
    fn start(&self, role: &str) -> Child {
        self.start_by(&[], role)
    }

    /// The same by another program.
    fn start_by(&self, program: &[&str], role: &str) -> Child {
        let mut child = Command::new("env")
            .arg(HEARS)
            .args(program)
            .arg(std::env::current_exe().unwrap())
            .args(["child", "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(MACHINE, &self.0)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("ready")), "the child ended early");
        // Keep the other end open: the child may print more.
        std::thread::spawn(move || lines.for_each(drop));
        child
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn send(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

fn stderr(child: &mut Child) -> String {
    let mut text = String::new();
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    text
}

/// The other process. Does nothing when it is run as an ordinary test.
#[test]
fn child() {
    let (Ok(role), Some(machine)) = (std::env::var(ROLE), std::env::var_os(MACHINE)) else { return };
    interrupt::install().unwrap();
    interrupt::install().unwrap();
    let guard = HugetlbPool::at(Roots::below(Path::new(&machine))).ensure(PageSize::Size2M, 9, None).unwrap();
    match role.as_str() {
        "unwinds" => {
            println!("ready");
            while !interrupt::requested() {
                std::thread::sleep(Duration::from_millis(1));
            }
            let err = interrupt::check().unwrap_err();
            drop(guard);
            std::process::exit(128 + err.signal);
        }
        "allocates" => {
            let request = RegionRequest { bytes: 96 << 20, backing: RegionBacking::Small, ..Default::default() };
            let result = Region::allocate_on(&Roots::default(), &request, |done| {
                if done == 0 {
                    println!("ready");
                    while !interrupt::requested() {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
            });
            drop(guard);
            assert!(result.is_err_and(|error| error.is::<interrupt::SignalReceived>()));
            std::process::exit(7);
        }
        "hangs" => {
            println!("ready");
            loop {
                std::thread::sleep(Duration::from_secs(1));
            }
        }
        role => panic!("no role {role}"),
    }
}

#[test]
fn the_first_signal_lets_everything_unwind() {
    let machine = Machine::new("first");
    let mut child = machine.start("unwinds");
    assert_eq!(machine.pages(), "9");
    send(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert_eq!(machine.pages(), "2");
    assert!(stderr(&mut child).contains("SIGTERM: giving back"));
}

#[test]
fn populating_stops_at_a_signal() {
    let machine = Machine::new("populate");
    let mut child = machine.start("allocates");
    send(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(7), "{}", stderr(&mut child));
    assert_eq!(machine.pages(), "2");
}

#[test]
fn the_second_signal_puts_the_pool_back_and_ends_the_process() {
    let machine = Machine::new("second");
    let mut child = machine.start("hangs");
    send(&child, Signal::INT);
    std::thread::sleep(Duration::from_millis(200));
    assert!(child.try_wait().unwrap().is_none(), "one signal must not end it");
    assert_eq!(machine.pages(), "9");
    send(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().signal(), Some(2));
    assert_eq!(machine.pages(), "2");
    assert!(stderr(&mut child).contains("put back the pool of 2MB pages: 7 pages, 14 MiB"));
}

#[test]
fn a_pool_that_cannot_be_put_back_is_told_with_the_command() {
    let machine = Machine::new("command");
    let mut child = machine.start("hangs");
    // Nobody can write to a directory, not even root.
    std::fs::remove_file(machine.setting()).unwrap();
    std::fs::create_dir(machine.setting()).unwrap();
    send(&child, Signal::INT);
    std::thread::sleep(Duration::from_millis(200));
    send(&child, Signal::HUP);
    assert_eq!(child.wait().unwrap().signal(), Some(1));
    let text = stderr(&mut child);
    let command = format!("echo 2 | sudo tee {}", machine.setting().display());
    assert!(text.contains(&command), "{text}");
}

#[test]
fn ignored_signals_stay_ignored() {
    let machine = Machine::new("ignored");
    // As nohup does it.
    let mut child = machine.start_by(&["sh", "-c", "trap '' HUP; exec \"$0\" \"$@\""], "hangs");
    send(&child, Signal::HUP);
    send(&child, Signal::HUP);
    std::thread::sleep(Duration::from_millis(200));
    assert!(child.try_wait().unwrap().is_none());
    assert_eq!(machine.pages(), "9");
    send(&child, Signal::INT);
    std::thread::sleep(Duration::from_millis(200));
    send(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().signal(), Some(2));
    assert_eq!(machine.pages(), "2");
}
