//! The image that `hugemm boot` boots: the reference kernel with commands to run. Anywhere but on bare metal it says so.
#![cfg_attr(target_os = "none", no_std, no_main)]
#![allow(unreachable_pub, reason = "in a binary, `pub` says what a module offers to the others")]

#[cfg(all(target_os = "none", target_arch = "x86_64"))]
mod commands;
#[cfg(all(target_os = "none", target_arch = "x86_64"))]
mod output;
#[cfg(all(target_os = "none", target_arch = "x86_64"))]
mod space;

#[cfg(all(target_os = "none", target_arch = "x86_64"))]
hugemm_kernel::main!(commands::main);

#[cfg(not(target_os = "none"))]
fn main() -> std::process::ExitCode {
    eprintln!("hugemm-kernel-commands: this is a kernel for bare x86-64; boot it with: hugemm boot -- selftest");
    std::process::ExitCode::FAILURE
}
