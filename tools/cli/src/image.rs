//! Programs that run in guests: found beside this command, or built from the source tree that it came from.

use anyhow::{Context, Result, bail};
use hugemm_inspect::interrupt;
use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A package of this project that is built for another target.
#[derive(Clone, Copy, Debug)]
pub struct Image {
    /// The package, which is also the name of the program that is built.
    pub package: &'static str,
    /// The program's name where it lies beside this command.
    pub beside: &'static str,
    pub target: &'static str,
}

impl Image {
    /// The program: the file that was `given`; else the one beside this command; else built by cargo, which takes a moment
    /// the first time.
    pub fn find(&self, given: Option<&Path>) -> Result<PathBuf> {
        self.check(given)?;
        if let Some(file) = given {
            return Ok(file.to_owned());
        }
        let beside = std::env::current_exe().ok().map(|exe| exe.with_file_name(self.beside));
        match beside {
            Some(beside) if beside.is_file() && !source_tree().is_some_and(|tree| beside.starts_with(tree)) => {
                Ok(beside)
            }
            _ => self.build(),
        }
    }

    /// Whether the file that was `given`, if one was, can be the program.
    pub fn check(&self, given: Option<&Path>) -> Result<()> {
        let Some(file) = given else { return Ok(()) };
        if !file.is_file() {
            bail!("there is no file {}; leave the option out to have it built", file.display());
        }
        let mut magic = [0; 4];
        let read = File::open(file).and_then(|mut file| file.read_exact(&mut magic));
        if read.is_err() || magic != *b"\x7fELF" {
            bail!("{} is not {}; leave the option out to have it built", file.display(), self.package);
        }
        Ok(())
    }

    fn build(&self) -> Result<PathBuf> {
        let Some(tree) = source_tree() else {
            bail!(
                "{0} is neither beside this command nor can it be built, since the source tree is gone; build it with \
                 'cargo build --release --target {1} -p {0}' and copy it there as {2}",
                self.package,
                self.target,
                self.beside
            );
        };
        if sysroot().is_none() {
            bail!(
                "{} has to be built, and there is no Rust here (rustc); install it from https://rustup.rs",
                self.package
            );
        }
        if !has_target(self.target) {
            bail!("the Rust target {0} is missing; install it with: rustup target add {0}", self.target);
        }
        let output = Command::new("cargo")
            .current_dir(&tree)
            // They would replace what the target's own configuration says.
            .env_remove("RUSTFLAGS")
            .env_remove("CARGO_ENCODED_RUSTFLAGS")
            .args(["build", "--release", "--locked", "--target", self.target, "-p", self.package])
            .args(["--message-format", "json-render-diagnostics"])
            .stderr(Stdio::piped())
            .output()
            .with_context(|| {
                format!("cannot run cargo to build {}; install Rust from https://rustup.rs", self.package)
            })?;
        interrupt::check()?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            let line = text.lines().find(|line| line.starts_with("error")).unwrap_or("no reason given");
            bail!(
                "building {} failed: {line}; run 'cargo build --target {1} -p {0}' to see all",
                self.package,
                self.target
            );
        }
        let messages = String::from_utf8_lossy(&output.stdout).into_owned();
        let built = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let file = built.filter(|message| message["target"]["name"] == self.package);
        let file = file.filter_map(|message| message["executable"].as_str().map(PathBuf::from)).next_back();
        file.with_context(|| format!("cargo built no program for {}", self.package))
    }
}

/// Where this command was built, if that is still there.
fn source_tree() -> Option<PathBuf> {
    let tree = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2)?;
    tree.join("Cargo.lock").is_file().then(|| tree.to_owned())
}

fn has_target(target: &str) -> bool {
    sysroot().is_some_and(|sysroot| sysroot.join("lib/rustlib").join(target).join("lib").is_dir())
}

/// Where the Rust compiler and its libraries are, if there is one.
fn sysroot() -> Option<PathBuf> {
    let output = Command::new("rustc").args(["--print", "sysroot"]).output().ok()?;
    output.status.success().then(|| PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()))
}
