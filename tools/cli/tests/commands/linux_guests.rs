//! `hugemm linux` when something is wrong. Real kernels are not shipped; what boots here is an image that does nothing.

use crate::support::{Scratch, hugemm, refused};
use std::process::Command;

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
    let scratch = Scratch::new("linux-files");
    let kernel = scratch.put("kernel", hanging_kernel());
    refused(
        &["linux", "/nonexistent/vmlinuz", "--", "bench", "pool", "-n", "1"],
        &["cannot read /nonexistent/vmlinuz"],
    );
    refused(
        &["linux", env!("CARGO_BIN_EXE_hugemm"), "--", "bench", "pool", "-n", "1"],
        &["no bootable x86-64 or arm64 kernel"],
    );
    refused(&["linux", &kernel, "--", "bench", "swim"], &["after '--'", "swim", "--help"]);
    refused(&["linux", &kernel, "--init", "/nonexistent/init", "--", "bench", "pool", "-n", "1"], &["no file"]);
    let init = scratch.put("init", b"\x7fELF: a program that nobody gets to");
    let create = ["linux", &kernel, "--init", &init, "--", "bench", "vm-create", "-s", "2MB"];
    refused(&[&create[..], &["--how", "pin"]].concat(), &["after '--'", "pin"]);
    let age = ["linux", &kernel, "--init", &init, "--", "bench", "age"];
    refused(&age, &["the modules of 0.1-hanging are not beside", "unpack its whole package"]);
}

#[test]
fn a_missing_qemu_is_named_with_the_remedy() {
    let scratch = Scratch::new("linux-no-qemu");
    let (kernel, init) = (scratch.put("kernel", hanging_kernel()), scratch.put("init", b"\x7fELF"));
    let args = ["linux", &kernel, "--memory", "64MB", "--init", &init, "--", "bench", "pool", "-n", "1"];
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
    let scratch = Scratch::new("linux-hangs");
    let (kernel, init) = (scratch.put("kernel", hanging_kernel()), scratch.put("init", b"\x7fELF"));
    let args = ["linux", &kernel, "--memory", "64MB", "--timeout", "2", "--init", &init];
    let work = ["--", "bench", "pool", "-n", "1"];
    let output = hugemm(&[&args[..], &work].concat());
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(!output.status.success());
    assert!(out.contains("no result"), "{out}");
    assert!(err.contains("0.1-hanging on 2 CPUs: the guest had not finished after 2 s"), "{err}");
    assert!(err.contains("no guest did its work"), "{err}");
}
