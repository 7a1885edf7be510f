//! Options of `hugemm boot`.

use crate::arch::Arch;
use crate::boot::machine::CPU_MODEL;
use crate::options::Common;
use crate::qemu::Accel;
use crate::usage;
use anyhow::{Result, bail};
use clap::Args;
use clap::error::ErrorKind;
use hugemm_workloads::options::seconds;
use hugemm_workloads::request::Request;
use hugemm_workloads::size::Size;
use std::path::PathBuf;

/// What can be run.
pub fn help() -> String {
    format!(
        "{}\n'hugemm boot -- COMMAND --help' has its options. Under tcg only ratios and counts mean something, nanoseconds do \
         not.",
        listed(Request::commands())
    )
}

/// Commands and what they do, a line each.
pub fn listed(commands: impl Iterator<Item = clap::Command>) -> String {
    let line = |command: clap::Command| {
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        format!("  {:<18}{about}\n", command.get_name())
    };
    format!("COMMAND is one of\n{}", commands.map(line).collect::<String>())
}

#[derive(Debug, Args)]
pub struct Boot {
    /// Virtual CPUs [default: as many as this process may use].
    #[arg(long)]
    pub cpus: Option<u32>,
    /// Memory of the guest.
    #[arg(long, default_value = "1GB")]
    pub memory: Size,
    /// Architecture of the guest [default: this machine's].
    #[arg(long, value_enum, default_value_t = Arch::NATIVE, hide_default_value = true)]
    pub arch: Arch,
    /// CPU model, in QEMU's notation.
    #[arg(long, default_value = CPU_MODEL)]
    pub cpu_model: String,
    /// What executes the guest.
    #[arg(long, value_enum, default_value_t = Accel::Auto)]
    pub accel: Accel,
    /// The kernel image, instead of finding or building it.
    #[arg(long, value_name = "FILE")]
    pub image: Option<PathBuf>,
    /// Seconds that the guest may take.
    #[arg(long, default_value_t = 3600, value_parser = seconds())]
    pub timeout: u64,
    #[command(flatten)]
    pub common: Common,
    /// What the kernel runs.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Reads the command after `--`, one of these; help that is asked for ends the program. `program` is what stands before `--`.
///
/// # Errors
/// There is no such command, or something is wrong with its arguments.
pub fn request(words: &[String], program: &str, commands: impl Iterator<Item = clap::Command>) -> Result<Request> {
    let commands: Vec<clap::Command> = commands.collect();
    match Request::read(words, commands.iter().cloned()) {
        Ok(Some(request)) => Ok(request),
        Ok(None) => {
            let names: Vec<String> = commands.iter().map(|command| command.get_name().to_owned()).collect();
            let names = names.join(", ");
            bail!("after '--': no command '{}'; it has {names}; see '{program} --help'", words.join(" "))
        }
        Err(help) if help.kind() == ErrorKind::DisplayHelp => help.exit(),
        Err(error) => {
            let named: Vec<&str> = words.iter().map(String::as_str).take_while(|word| !word.starts_with('-')).collect();
            let (error, named) = (usage::usage_error(&error), named.join(" "));
            bail!("the command after '--': {error}; see '{program} -- {named} --help'")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(words: &str) -> Result<String> {
        let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
        Ok(request(&words, "hugemm boot", Request::commands())?.to_string())
    }

    #[test]
    fn commands_become_requests() {
        for (words, expected) in [
            ("bench free -n 7 -o 0,9", "bench free n=7 order=0,9 runs=5"),
            (
                "bench mem mmap -p 1gb -s 2GB --how demand -l 2",
                "bench vm-create size=2147483648 page=1GB how=demand workers=- clear=page,extent,bulk from=pool runs=2",
            ),
            ("bench pool -n 7,9 --hvo off,on --flush page", "bench pool n=7,9 page=2MB hvo=off,on flush=page runs=5"),
            (
                "bench vm-create -p 2MB,1GB --how pin -w 4 --clear bulk --from frames",
                "bench vm-create size=- page=2MB,1GB how=pin workers=4 clear=bulk from=frames runs=3",
            ),
            (
                "bench age --memory 64MB --seconds 0.5 -p 4KB --young batch",
                "bench age procs=8 shared=- memory=67108864 swap=- seconds=0.5 young=batch lru=generations page=4KB",
            ),
            ("selftest --only pressure", "selftest seconds=10 resizes=1 only=pressure plant=none"),
            ("crash hang", "crash how=hang"),
        ] {
            assert_eq!(line(words).expect("valid"), expected);
        }
    }

    #[test]
    fn usage_errors_are_one_line() {
        for (words, part) in [
            ("bench churn", "it has run, bench vm-create"),
            ("nonsense", "no command 'nonsense'"),
            ("bench", "no command 'bench'"),
            ("bench free --nonsense", "see 'hugemm boot -- bench free --help'"),
            ("bench free -o 0,19", "there is no order 19"),
            ("bench pool -p 4KB", "[possible values: 2MB, 1GB]"),
            ("bench age --young batch,swim", "'swim' for '--young <YOUNG>' [possible values: noflush"),
            ("bench age --memory 1MB", "give at least 48MB"),
            ("bench age --seconds nan", "'nan' is no time"),
            ("bench vm-create -w 1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8", "measure them in two runs"),
            ("selftest --plant nonsense", "'nonsense' for '--plant <PLANT>' [possible values: none"),
            ("selftest --resizes -1", "-1"),
        ] {
            let error = line(words).expect_err(words).to_string();
            assert!(error.contains(part) && !error.contains('\n'), "{words}: {error}");
        }
    }

    #[test]
    fn each_command_is_in_the_help() {
        let help = help();
        assert!(Request::commands().all(|command| help.contains(&format!("\n  {} ", command.get_name()))), "{help}");
    }
}
