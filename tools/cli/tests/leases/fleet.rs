//! The manifest for clusters: its fields are the API's, and what it starts is a daemon that serves whom its policy names.

use crate::support::lease::with_pool;
use crate::support::{Scratch, hugemm};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

const MANIFEST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../services/lease/kubernetes/hugemm-lease.yaml");

fn text() -> String {
    std::fs::read_to_string(MANIFEST).expect("readable")
}

/// The lines of a list or a text block below a key, without what they are indented by.
fn below(key: &str) -> Vec<String> {
    let text = text();
    let indent = |line: &str| line.len() - line.trim_start().len();
    let mut lines = text.lines().skip_while(|line| line.trim() != key);
    let depth = indent(lines.next().expect("the key"));
    lines.take_while(|line| indent(line) > depth).map(|line| line.trim().trim_start_matches("- ").to_owned()).collect()
}

#[test]
fn the_manifest_is_one_of_the_api() {
    let checked = Command::new("kubernetes-validate").args(["--strict", MANIFEST]).output();
    let Ok(checked) = checked else {
        eprintln!("skipped: no kubernetes-validate (PyPI), which has the API's schemas");
        return;
    };
    let said = String::from_utf8_lossy(&[&checked.stdout[..], &checked.stderr].concat()).into_owned();
    assert_eq!(said.lines().filter(|line| line.contains(" passed for resource ")).count(), 2, "{said}");
    assert!(checked.status.success() && !said.contains("ERROR"), "{said}");
}

/// With less memory, and its directories elsewhere.
#[test]
fn the_manifests_daemon_serves() {
    with_pool(16, || {
        let scratch = Scratch::new("fleet");
        let policy = scratch.put("policy", below("policy: |").join("\n"));
        let here = |word: &String| {
            let places = [("/etc/hugemm/policy", policy.as_str()), ("/run/hugemm/", &scratch.path(""))];
            let sizes = [("64GB", "32MB"), ("16GBx4", "8MBx4"), ("0.0.0.0:9469", &scratch.path("metrics"))];
            places.into_iter().chain(sizes).fold(word.clone(), |word, (from, to)| word.replace(from, to))
        };
        let words: Vec<String> = below("args:").iter().map(here).collect();
        let command = scratch.path("hugemm");
        std::fs::copy(env!("CARGO_BIN_EXE_hugemm"), &command).expect("copied");
        let mut daemon = Command::new(&command).args(&words).stdout(Stdio::null()).spawn().expect("a daemon");
        let socket = scratch.path("lease.socket");
        let probe = hugemm(&["pool", "status", "--wait", "60", "--socket", &socket]);
        let lease = |gid| {
            let words = ["lease", "8MB", "--require", "--socket", &socket, "--", "stat", "-Lc", "%s", "@LEASE@"];
            let mut command = Command::new(&command);
            // SAFETY: asks for a number.
            if unsafe { libc::geteuid() } == 0 {
                command.uid(65533).gid(gid);
            }
            String::from_utf8_lossy(&command.args(words).output().expect("it starts").stdout).into_owned()
        };
        let answers = [36, 37].map(lease);
        daemon.kill().expect("killed");
        daemon.wait().expect("ended");
        assert!(probe.status.success(), "{words:?}: {}", String::from_utf8_lossy(&probe.stderr));
        // SAFETY: as above.
        if unsafe { libc::geteuid() } == 0 {
            assert_eq!(answers, ["8388608\n", ""], "the group of the policy, and another");
        }
    });
}
