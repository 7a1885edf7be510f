//! The image that `hugemm boot` boots: the reference kernel with commands to run. Anywhere but on bare metal it says so.
#![cfg_attr(target_os = "none", no_std, no_main)]
#![allow(unreachable_pub, reason = "in a binary, `pub` says what a module offers to the others")]

#[cfg(target_os = "none")]
extern crate alloc;

#[cfg(target_os = "none")]
mod commands;
#[cfg(target_os = "none")]
mod output;
#[cfg(target_os = "none")]
mod space;

#[cfg(target_os = "none")]
hugemm_kernel::main!(commands::main);

#[cfg(not(target_os = "none"))]
fn main() -> std::process::ExitCode {
    eprintln!("hugemm-kernel-commands: this is a kernel for bare metal; boot it with: hugemm boot -- selftest");
    std::process::ExitCode::FAILURE
}
