//! Running the command and looking at what it says.

#![allow(dead_code, reason = "each test program uses its part")]

use serde_json::Value;
use std::process::{Command, Output};

fn hugemm(args: &[&str]) -> Output {
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
