//! The hugemm reference kernel. On bare metal this is the kernel; anywhere else it says how to boot it.
#![cfg_attr(target_os = "none", no_std, no_main)]
#![allow(unreachable_pub, reason = "in a binary, `pub` says what a module offers to the others")]

#[cfg(all(target_os = "none", target_arch = "x86_64"))]
mod kernel;

#[cfg(not(target_os = "none"))]
fn main() -> std::process::ExitCode {
    eprintln!("hugemm-kernel: this is a kernel for bare x86-64; boot it with: hugemm boot -- selftest");
    std::process::ExitCode::FAILURE
}
