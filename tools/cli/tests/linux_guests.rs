//! `hugemm linux` when something is wrong. Real kernels are not shipped; what boots here is an image that does nothing.

mod support;

use std::path::PathBuf;
use std::process::Command;
use support::{misused, refused};

/// A file in a directory that is removed when the test ends.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str, content: &[u8]) -> Self {
        let file = std::env::temp_dir().join(format!("hugemm-test-{}-{name}", std::process::id()));
        std::fs::write(&file, content).expect("a scratch file");
        Scratch(file)
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("a path in UTF-8")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A bzImage by its header, whose first instruction jumps to itself.
fn hanging_kernel() -> Vec<u8> {
    let mut image = vec![0; 64 << 10];
    image[0x1f1] = 4; // sectors of set-up code
    image[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    image[0x200..0x202].copy_from_slice(&[0xeb, 0xfe]);
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x20f_u16.to_le_bytes());
    image[0x20e..0x210].copy_from_slice(&0x300_u16.to_le_bytes());
    image[0x211] = 1; // loaded high
    image[0x22c..0x230].copy_from_slice(&0x7fff_ffff_u32.to_le_bytes()); // where the initial file system may end
    image[0x500..0x50b].copy_from_slice(b"0.1-hanging");
    image
}

#[test]
fn files_and_commands_are_checked_before_anything_boots() {
    let kernel = Scratch::new("kernel", &hanging_kernel());
    refused(
        &["linux", "/nonexistent/vmlinuz", "--", "bench", "pool", "-n", "1"],
        &["cannot read /nonexistent/vmlinuz"],
    );
    refused(&["linux", env!("CARGO_BIN_EXE_hugemm"), "--", "bench", "pool", "-n", "1"], &["no bootable x86 kernel"]);
    refused(&["linux", kernel.path(), "--", "bench", "swim"], &["after '--'", "swim", "--help"]);
    refused(&["linux", kernel.path(), "--", "bench", "pool"], &["after '--'", "required", "-n"]);
    refused(&["linux", kernel.path(), "--init", "/nonexistent/init", "--", "bench", "pool", "-n", "1"], &["no file"]);
    let init = Scratch::new("init", b"\x7fELF: a program that nobody gets to");
    let create = ["linux", kernel.path(), "--init", init.path(), "--", "bench", "vm-create", "-s", "2MB"];
    refused(&[&create[..], &["--how", "pin"]].concat(), &["after '--'", "pin"]);
    misused(&["linux", kernel.path()], "required");
    misused(&["linux", kernel.path(), "--cpus", "0", "--", "bench", "pool", "-n", "1"], "0 is not in 1..=255");
}

#[test]
fn a_missing_qemu_is_named_with_the_remedy() {
    let (kernel, init) = (Scratch::new("kernel-2", &hanging_kernel()), Scratch::new("init-2", b"\x7fELF"));
    let args = ["linux", kernel.path(), "--memory", "64MB", "--init", init.path(), "--", "bench", "pool", "-n", "1"];
    let output = Command::new(env!("CARGO_BIN_EXE_hugemm")).args(args).env("PATH", "").output().expect("it starts");
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(err.contains("qemu-system-x86_64 is not installed") && err.contains("apt-get install"), "{err}");
    assert_eq!(err.trim_end().lines().count(), 1, "{err}");
}

#[test]
fn a_guest_that_hangs_is_ended_and_named() {
    if Command::new("qemu-system-x86_64").arg("--version").output().is_err() {
        eprintln!("skipped: qemu-system-x86_64 is not installed");
        return;
    }
    let (kernel, init) = (Scratch::new("kernel-3", &hanging_kernel()), Scratch::new("init-3", b"\x7fELF"));
    let args = ["linux", kernel.path(), "--memory", "64MB", "--timeout", "2", "--init", init.path()];
    let work = ["--", "bench", "pool", "-n", "1"];
    let output = Command::new(env!("CARGO_BIN_EXE_hugemm")).args(args).args(work).output().expect("it starts");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(!output.status.success());
    assert!(out.contains("no result"), "{out}");
    assert!(err.contains("0.1-hanging on 2 CPUs: the guest took longer than 2 s"), "{err}");
    assert!(err.contains("no guest did its work"), "{err}");
}
