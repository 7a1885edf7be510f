//! Stock programs on leased memory: what docs/lease.md says of each. One that is not installed is passed over with a line.

use crate::support::hugemm;
use crate::support::lease::{Daemon, with_pool};
use std::os::unix::fs::{PermissionsExt, chown};
use std::process::{Command, Output};

/// A user who owns nothing.
const NOBODY: u32 = 65534;

/// Whether a program is installed; a line if it is not.
fn installed(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        eprintln!("skipped: no {program}");
    }
    found
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Runs a program on a lease of 32 MiB, waits until that has ended, and says what the program said.
#[track_caller]
fn run_leased(daemon: &Daemon, command: &[&str]) -> String {
    let socket = daemon.scratch.path("socket");
    let output = hugemm(&[&["lease", "32MB", "--require", "--socket", &socket, "--"], command].concat());
    assert!(output.status.success(), "{}", text(&output));
    daemon.wait_for("\"leases\":[]");
    text(&output)
}

#[test]
fn fio_takes_a_path() {
    if !installed("fio") {
        return;
    }
    with_pool(32, || {
        let daemon = Daemon::start("programs-fio", 32, &[]);
        let job = ["fio", "--name=leased", "--ioengine=null", "--rw=write", "--bs=16M", "--size=64M"];
        run_leased(&daemon, &[&job[..], &["--mem=mmaphuge:@LEASE@"]].concat());
        daemon.wait_for("\"unused\":0");
        daemon.wait_for("\"hits\":1");
    });
}

/// A mounted file system of huge pages, unmounted when dropped; `None`, and a line, where that is not allowed.
struct Mount(std::path::PathBuf);

impl Mount {
    fn new(name: &str) -> Option<Self> {
        let dir = std::env::temp_dir().join(format!("hugemm-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        let mounted = Command::new("mount").args(["-t", "hugetlbfs", "-o", "pagesize=2M", "none"]).arg(&dir).output();
        let mount = Mount(dir);
        if mounted.is_ok_and(|output| output.status.success()) {
            return Some(mount);
        }
        eprintln!("skipped: nothing can be mounted here");
        None
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).output();
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// A machine whose memory is a file that QEMU makes in a directory of huge pages.
#[test]
fn qemu_makes_its_file_in_a_directory() {
    if !installed("qemu-system-x86_64") {
        return;
    }
    with_pool(32, || {
        let Some(mount) = Mount::new("programs-mount") else { return };
        let daemon = Daemon::start("programs-mount", 32, &[]);
        let memory = format!("memory-backend-file,id=m,size=32M,share=on,prealloc=on,mem-path={}", mount.0.display());
        let machine = ["qemu-system-x86_64", "-M", "q35,memory-backend=m", "-accel", "tcg", "-m", "32M", "-nodefaults"];
        // Its monitor says that it is there, reads a word, and ends it.
        let script = format!("echo quit | {} -display none -S -monitor stdio -object {memory}", machine.join(" "));
        run_leased(&daemon, &["sh", "-c", &script]);
        daemon.wait_for("\"placed\":1");
    });
}

/// Starts a machine, whose monitor says that it is there, reads a word, and ends it.
fn machine(megabytes: u64, objects: &[String], more: &str) -> String {
    let qemu =
        format!("qemu-system-x86_64 -accel tcg -m {megabytes}M -nodefaults -display none -S -monitor stdio {more}");
    format!(
        "echo quit | {qemu} {}",
        objects.iter().map(|object| format!("-object {object}")).collect::<Vec<_>>().join(" ")
    )
}

/// Runs a shell's script on leases of whatever it makes, and says what came of it.
fn run_up_to(daemon: &Daemon, script: &str) -> serde_json::Value {
    let socket = daemon.scratch.path("socket");
    let output = hugemm(&["lease", "--up-to", "1GB", "--json", "--socket", &socket, "--", "sh", "-c", script]);
    assert!(output.status.success(), "{}", text(&output));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    daemon.wait_until_filled();
    let line = said.lines().find_map(|line| serde_json::from_str(line).ok());
    line.unwrap_or_else(|| panic!("{said}"))
}

/// The lengths in MiB of what was lent, and why the rest was not.
fn lent(about: &serde_json::Value) -> (Vec<u64>, String) {
    let lengths =
        about["lent"].as_array().expect("a list").iter().map(|file| file["bytes"].as_u64().unwrap_or(0) >> 20);
    (lengths.collect(), about["not_lent"].to_string())
}

/// A machine with memory of two nodes, in memory and in files of a directory.
#[test]
fn qemu_has_a_lease_for_each_node() {
    if !installed("qemu-system-x86_64") {
        return;
    }
    with_pool(64, || {
        let Some(mount) = Mount::new("programs-nodes") else { return };
        let daemon = Daemon::with_files("programs-nodes", &[12, 20], &[]);
        let in_memory = "memory-backend-memfd,hugetlb=on".to_owned();
        let in_files = format!("memory-backend-file,mem-path={}", mount.0.display());
        for backend in [in_memory, in_files] {
            let node = |id: &str, size| format!("{backend},id={id},size={size}M,share=on,prealloc=on");
            let script = machine(32, &[node("a", 12), node("b", 20)], "-M q35 -numa node,memdev=a -numa node,memdev=b");
            let about = run_up_to(&daemon, &script);
            assert_eq!(lent(&about), (vec![12, 20], "[]".to_owned()), "{about}");
        }
        // Of a private mapping each page is copied: said before it starts.
        let private = "memory-backend-memfd,hugetlb=on,id=m,size=12M,share=off".to_owned();
        let socket = daemon.scratch.path("socket");
        let words = ["lease", "--up-to", "1GB", "--socket", &socket, "--", "qemu-system-x86_64", "-object", &private];
        let output = hugemm(&[&words[..], &["-m", "12M", "-M", "q35,memory-backend=m", "-accel", "none"]].concat());
        assert!(text(&output).contains("maps its memory privately"), "{}", text(&output));
        // Others may open a file by its name.
        let named = format!("memory-backend-file,id=m,size=12M,share=on,mem-path={}/named", mount.0.display());
        let about = run_up_to(&daemon, &machine(12, &[named], "-M q35,memory-backend=m"));
        let (lengths, why) = lent(&about);
        assert!(lengths.is_empty() && why.contains("it has a name"), "{about}");
    });
}

/// A file of Python, by either call.
#[test]
fn python_has_a_lease() {
    if !installed("python3") {
        return;
    }
    with_pool(64, || {
        let daemon = Daemon::with_files("programs-python", &[12, 20], &[]);
        for (call, size) in [("os.ftruncate(f,", 12), ("os.posix_fallocate(f,0,", 20)] {
            let script = format!(
                "import mmap,os\nf=os.memfd_create('a',os.MFD_HUGETLB|os.MFD_HUGE_2MB)\n{call}{size}<<20)\n\
                 m=mmap.mmap(f,{size}<<20)\nassert not any(m[::4096])\nm[0]=7"
            );
            let about = run_up_to(&daemon, &format!("python3 -c \"{script}\""));
            assert_eq!(lent(&about), (vec![size], "[]".to_owned()), "{about}");
        }
    });
}

/// DPDK takes over files that have the names and the length of its own, so that filling them beforehand is enough.
#[test]
fn dpdk_takes_files_that_are_filled() {
    const FILES: usize = 32;
    if Command::new("dpdk-testpmd").arg("--help").output().is_err() {
        eprintln!("skipped: no dpdk-testpmd");
        return;
    }
    with_pool(FILES as u64 + 1, || {
        let Some(mount) = Mount::new("programs-dpdk") else { return };
        let file = |n: usize| mount.0.join(format!("rtemap_{n}"));
        let files = || (0..FILES).map(|n| std::os::unix::fs::MetadataExt::ino(&file(n).metadata().expect("there")));
        for n in 0..FILES {
            let made = Command::new("fallocate").args(["-l", "2M"]).arg(file(n)).status().expect("util-linux");
            assert!(made.success());
        }
        let before: Vec<u64> = files().collect();
        let mut command = Command::new("dpdk-testpmd");
        // Two of its cores, since it wants one to forward on, on one CPU, which any machine has.
        command.args([
            "--no-pci",
            "--lcores=0@0,1@0",
            "-m",
            "64",
            "--huge-unlink=never",
            "--no-telemetry",
            "--huge-dir",
        ]);
        command.arg(&mount.0).args(["--vdev=net_null0", "--file-prefix=rte"]);
        command.args(["--", "--total-num-mbufs=2048", "--no-mlockall"]).stdin(std::process::Stdio::null());
        let output = command.output().expect("it starts");
        let said = text(&output);
        assert!(output.status.success(), "{said}");
        assert_eq!(files().collect::<Vec<_>>(), before, "{said}");
        for n in 0..FILES {
            std::fs::remove_file(file(n)).expect("removed");
        }
        assert!(!std::fs::exists(file(FILES)).expect("looked at"), "it made no others: {said}");
    });
}

/// The heap of ZGC is a file of the lease's length.
#[test]
fn the_heap_of_openjdk_is_placed() {
    if !installed("java") {
        return;
    }
    // It looks whether there is a free page before it asks for more.
    with_pool(64, || {
        let daemon = Daemon::start("programs-java", 32, &[]);
        run_leased(&daemon, &["java", "-XX:+UseZGC", "-XX:+UseLargePages", "-Xms32m", "-Xmx32m", "-version"]);
        daemon.wait_for("\"placed\":1");
        daemon.wait_until_filled();
        let about = run_up_to(&daemon, "java -XX:+UseZGC -XX:+UseLargePages -Xms32m -Xmx32m -version");
        assert_eq!(lent(&about).0, [32], "{about}");
    });
}

/// PostgreSQL's shared memory is anonymous: it takes pages of the pool itself, beside those that are leased.
#[test]
fn postgresql_has_pages_of_its_own() {
    if !["postgres", "setpriv"].into_iter().all(installed) {
        return;
    }
    with_pool(80, || {
        let policy = std::env::temp_dir().join(format!("hugemm-test-postgres-{}", std::process::id()));
        std::fs::write(&policy, format!("uid {NOBODY} 1GB\n")).expect("written");
        let daemon = Daemon::start("programs-postgres", 32, &["--policy", policy.to_str().expect("UTF-8")]);
        std::fs::remove_file(policy).expect("read by now");
        let [command, home, socket] = ["hugemm", "home", "socket"].map(|name| daemon.scratch.path(name));
        std::fs::copy(env!("CARGO_BIN_EXE_hugemm"), &command).expect("copied");
        std::fs::create_dir(&home).expect("a directory");
        chown(&home, Some(NOBODY), Some(NOBODY)).expect("given away");
        let start = "--single -c huge_pages=on -c shared_buffers=16MB -D db postgres </dev/null >/dev/null";
        let script = format!(
            "bin=$(dirname \"$(readlink -f \"$(command -v postgres)\")\"); cd {home} && $bin/initdb -N -D db >/dev/null && \
             {command} lease --up-to 32MB --json --socket {socket} -- $bin/postgres {start}"
        );
        let nobody = NOBODY.to_string();
        let output = Command::new("setpriv")
            .args(["--reuid", &nobody, "--regid", &nobody, "--clear-groups", "sh", "-c", &script])
            .env("HOME", &home)
            .output()
            .expect("it starts");
        assert!(output.status.success(), "{}", text(&output));
        assert!(text(&output).contains("\"lent_files\":0"), "{}", text(&output));
    });
}

/// DPDK in one file for all of its memory, in a mount or in none, makes that longer page by page: nothing is lent.
#[test]
fn dpdk_grows_its_files_page_by_page() {
    if !["dpdk-testpmd", "unshare"].into_iter().all(installed) {
        return;
    }
    with_pool(32, || {
        let daemon = Daemon::start("programs-dpdk", 32, &[]);
        let (command, socket) = (env!("CARGO_BIN_EXE_hugemm"), daemon.scratch.path("socket"));
        for options in ["--huge-dir /mnt", "--in-memory"] {
            let script = format!(
                "mount -t hugetlbfs none /mnt && {command} lease --up-to 32MB --json --socket {socket} -- dpdk-testpmd --no-pci \
                 --no-telemetry -m 24 --single-file-segments {options} -- --total-num-mbufs=2048 </dev/null"
            );
            let said = text(&Command::new("unshare").args(["-m", "sh", "-c", &script]).output().expect("it starts"));
            assert!(said.contains("testpmd:") && said.contains("\"lent_files\":0"), "{options}: {said}");
        }
    });
}

/// A domain of a user's own libvirt that differs from any other in its emulator alone. libvirt starts the emulator to ask
/// what it can do, too.
#[test]
fn libvirt_starts_a_domain() {
    if !["virsh", "qemu-system-x86_64", "unshare", "setpriv"].into_iter().all(installed) {
        return;
    }
    with_pool(32, || {
        let policy = std::env::temp_dir().join(format!("hugemm-test-policy-{}", std::process::id()));
        std::fs::write(&policy, format!("uid {NOBODY} 1GB\n")).expect("written");
        let daemon = Daemon::start("programs-libvirt", 32, &["--policy", policy.to_str().expect("UTF-8")]);
        std::fs::remove_file(policy).expect("read by now");
        let [command, emulator, home, domain] =
            ["hugemm", "emulator", "home", "domain.xml"].map(|name| daemon.scratch.path(name));
        // Where the user can reach it.
        std::fs::copy(env!("CARGO_BIN_EXE_hugemm"), &command).expect("copied");
        let socket = daemon.scratch.path("socket");
        let script =
            format!("#!/bin/sh\nexec {command} lease --up-to 32MB --socket {socket} -- qemu-system-x86_64 \"$@\"\n");
        daemon.scratch.put("emulator", script);
        for program in [&command, &emulator] {
            std::fs::set_permissions(program, std::fs::Permissions::from_mode(0o755)).expect("executable");
        }
        std::fs::create_dir(&home).expect("a directory");
        chown(&home, Some(NOBODY), Some(NOBODY)).expect("given away");
        daemon.scratch.put(
            "domain.xml",
            format!(
                "<domain type='qemu'><name>leased</name><memory unit='MiB'>32</memory><vcpu>1</vcpu>
            <memoryBacking><hugepages><page size='2' unit='M'/></hugepages><source type='memfd'/>
            <access mode='shared'/><allocation mode='immediate'/></memoryBacking>
            <os><type arch='x86_64' machine='q35'>hvm</type></os>
            <devices><emulator>{emulator}</emulator></devices></domain>"
            ),
        );
        // In a process namespace of its own, with which libvirt's daemons end.
        let virsh = "virsh -q -c qemu:///session";
        let script = format!("{virsh} create {domain} && {virsh} domstate leased && {virsh} destroy leased");
        let output = Command::new("unshare")
            .args(["--pid", "--fork", "--kill-child", "--mount-proc"])
            .args(["setpriv", "--reuid", &NOBODY.to_string(), "--regid", &NOBODY.to_string(), "--clear-groups"])
            .args(["sh", "-c", &script])
            .env("HOME", &home)
            .env("XDG_RUNTIME_DIR", &home)
            .env_remove("XDG_CONFIG_HOME")
            .env_remove("XDG_CACHE_HOME")
            .output()
            .expect("unshare starts");
        let said = text(&output);
        if said.contains("unshare failed") {
            eprintln!("skipped: {said}");
            return;
        }
        assert!(output.status.success() && said.contains("running"), "{said}");
        daemon.wait_for("\"placed\":1");
        daemon.wait_for("\"leases\":[]");
        daemon.wait_for("\"private\":0");
    });
}
