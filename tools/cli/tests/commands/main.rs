//! The command as a user meets it, one file a subject. What needs QEMU is left to `make test-kernel` and `make test-arm`.

mod age;
mod command_line;
mod docs;
mod frames_commands;
mod heap_command;
mod kernel;
mod linux_guests;
mod paging_commands;
mod pool_command;
mod refusals;
mod replay;
mod run_command;
mod saved_results;
mod shootdown;
#[path = "../support/mod.rs"]
mod support;
