//! The command as a user meets it: what it prints, and what it says when it is called wrongly.

use crate::support::{document, refused, rows};
use serde_json::Value;

#[test]
fn a_command_that_is_refused_leaves_no_file() {
    let path = std::env::temp_dir().join(format!("hugemm-refused-{}.json", std::process::id()));
    refused(&["probe", "-s", "3KB", &format!("--json={}", path.display())], &["not a multiple"]);
    assert!(!path.exists());
}

/// What is printed may have nowhere to go; what is saved is there all the same.
#[cfg(target_os = "linux")]
#[test]
fn output_that_nobody_takes_is_one_line_and_loses_no_file() {
    let path = std::env::temp_dir().join(format!("hugemm-kept-{}.json", std::process::id()));
    let json = format!("--json={}", path.display());
    for args in [
        &["bench", "map", "-s", "2MB", "--no-peers", "-r", "1", &json][..],
        &["pool", "doctor", "--json"],
        &["man"],
        &["completions", "bash"],
    ] {
        let full = std::fs::File::options().write(true).open("/dev/full").expect("Linux has it");
        let (reader, closed) = std::io::pipe().expect("a pipe");
        drop(reader);
        for out in [std::process::Stdio::from(full), std::process::Stdio::from(closed)] {
            let command = std::process::Command::new(env!("CARGO_BIN_EXE_hugemm")).args(args).stdout(out).output();
            let output = command.expect("it starts");
            let err = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success() && err.lines().count() == 1, "{args:?}: {err}");
            assert!(err.contains("os error") && !err.contains("panicked"), "{args:?}: {err}");
        }
    }
    let saved = std::fs::read(&path).expect("saved");
    assert!(serde_json::from_slice::<Value>(&saved).is_ok());
    std::fs::remove_file(path).expect("removed");
}

/// A file's name need not be text.
#[cfg(unix)]
#[test]
fn names_that_are_no_text_are_names() {
    use std::os::unix::ffi::OsStrExt;
    let name = std::ffi::OsStr::from_bytes(b"--json=/nonexistent/\xff.json");
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_hugemm")).args(["pool", "doctor"]).arg(name).output();
    let output = output.expect("it starts");
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && err.lines().count() == 1 && err.contains("cannot write"), "{err}");
    let path = std::env::temp_dir().join(std::ffi::OsStr::from_bytes(b"hugemm-\xff.json"));
    let mut option = std::ffi::OsString::from("--json=");
    option.push(&path);
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_hugemm")).args(["pool", "doctor"]).arg(option).output();
    assert!(output.expect("it starts").status.success());
    std::fs::remove_file(path).expect("it was written");
}

/// Of a document of `probe -s 64MB -r 2`.
fn has_the_promised_form(document: &Value) {
    assert_eq!(document["schema"], 9);
    assert!(document["command"].as_str().is_some_and(|c| c.starts_with("probe -s 64MB")));
    assert!(document["environment"]["regions"][0]["huge_share"].as_f64().is_some_and(|share| share > 0.9));
    let all = rows(document, "clear.chunk");
    assert!(all.len() >= 5 && all.len().is_multiple_of(5));
    for row in all {
        assert!(row["value"].as_f64().is_some_and(|v| v > 0.0) && row["stdev"].is_f64());
        assert_eq!((row["unit"].as_str(), row["runs"].as_u64()), (Some("GB/s"), Some(2)));
        assert!(row["chunk"].as_u64().is_some_and(|chunk| (64_u64 << 20).is_multiple_of(chunk)));
    }
}

#[test]
fn both_sides_of_a_creation_are_measured_and_labelled() {
    let document = document(&["bench", "vm-create", "-s", "64MB", "-r", "2", "-w", "1", "--kind", "thp", "--json"]);
    let all = rows(&document, "bench.vm_create");
    assert_eq!(all.len(), 2 * 4 + 3);
    for row in all {
        assert_eq!(row["software_fault"], row["side"] != "kernel" && row["how"] == "demand");
        assert!(row["value"].as_f64().is_some_and(|v| v > 0.0));
    }
}

#[test]
fn documents_have_the_promised_form_and_a_profile_can_be_embedded() {
    let source = std::env::temp_dir().join(format!("hugemm-profile-{}.rs", std::process::id()));
    let rust = source.to_str().expect("utf-8");
    let probe = document(&["probe", "-s", "64MB", "-r", "2", "--warmup", "0", "--save-profile", rust, "--json"]);
    has_the_promised_form(&probe);
    for goal in ["clear.bulk_vs_best_stream", "clear.worst_vs_best"] {
        let row = rows(&probe, goal);
        assert_eq!(row.len(), 1, "{goal}");
        assert!(row[0]["goal"].is_f64() && row[0]["verdict"].is_string());
    }
    let constant = std::fs::read_to_string(&source).expect("saved");
    assert!(constant.contains("pub const PROFILE: Profile") && constant.contains("hot_touched: "), "{constant}");
    std::fs::remove_file(source).expect("removed");
}
