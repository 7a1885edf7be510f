//! Running the command and looking at what it says.

#![allow(dead_code, reason = "each test program uses its part")]

pub(crate) mod lease;
#[path = "../../../../services/lease/tests/support/watchdog.rs"]
mod watchdog;

use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Output};

/// A directory that is removed when the test ends.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("hugemm-test-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        Scratch(dir)
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("UTF-8").to_owned()
    }

    /// Makes a file there; its path.
    pub(crate) fn put(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        std::fs::write(self.0.join(name), content).expect("written");
        self.path(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The command as it is.
pub(crate) fn hugemm(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_hugemm")).args(args).output().expect("the command starts")
}

/// The command fails with exactly one line that contains all of `parts`, and prints nothing else.
#[track_caller]
pub(crate) fn refused(args: &[&str], parts: &[&str]) {
    let output = hugemm(args);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(!output.status.success(), "{args:?} succeeded: {out}");
    assert_eq!(out, "", "{args:?}");
    assert_eq!(err.trim_end().lines().count(), 1, "{args:?}: {err}");
    for part in parts {
        assert!(err.contains(part), "{args:?} does not say '{part}': {err}");
    }
}

/// A command line that makes no sense: one line names the cause and the help that says more, and the exit code is 2.
#[track_caller]
pub(crate) fn misused(args: &[&str], part: &str) {
    let output = hugemm(args);
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {err}");
    assert_eq!(err.trim_end().lines().count(), 1, "{args:?}: {err}");
    assert!(err.contains(part) && err.contains("--help"), "{args:?} does not say '{part}': {err}");
}

/// The JSON document that the command prints.
#[track_caller]
pub(crate) fn document(args: &[&str]) -> Value {
    let output = hugemm(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("standard output is one JSON document")
}

/// The rows of a document with this metric.
pub(crate) fn rows<'a>(document: &'a Value, metric: &str) -> Vec<&'a Value> {
    let results = document["results"].as_array().expect("results");
    results.iter().filter(|row| row["metric"] == metric).collect()
}
