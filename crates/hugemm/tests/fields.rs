//! Structs with public fields: settings and statistics may get more of them without breaking anybody.

use std::fs;
use std::path::{Path, PathBuf};

/// What will not get more fields: a value that is what its fields are, what an error hands back, or a pair that a callback is given.
const CLOSED: &[&str] = &[
    "AccessError",
    "AgeRun",
    "Best",
    "CarveError",
    "Change",
    "Counters",
    "CpuIdentity",
    "Crossover",
    "DescriptorLeaf",
    "Dropped",
    "Evicted",
    "FaultAccess",
    "Invalidation",
    "Leaf",
    "Mapping",
    "Mbps",
    "Neighbours",
    "Owner",
    "PackedSide",
    "PinError",
    "Place",
    "Profile",
    "RemovedArena",
    "Run",
    "SizeError",
    "Stopped",
    "Window",
];

/// All Rust files below a directory.
fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for path in fs::read_dir(dir).expect("readable").map(|entry| entry.expect("readable").path()) {
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The structs of a file with named fields that are public, and whether others may write them out.
fn open_structs(text: &str) -> impl Iterator<Item = (&str, bool)> {
    text.match_indices("pub struct ").filter_map(|(at, start)| {
        let rest = &text[at + start.len()..];
        let name = rest.split(|c: char| !c.is_alphanumeric()).next()?;
        let body = rest.split_once(" {\n")?;
        let is_this = !body.0.contains([';', '{']);
        let fields = body.1.split_once('}')?.0;
        let attributes = text[..at].rsplit("\n\n").next()?;
        let has_public = fields.lines().any(|line| line.trim_start().starts_with("pub ") && line.contains(':'));
        (is_this && has_public).then(|| (name, !attributes.contains("#[non_exhaustive]")))
    })
}

#[test]
fn settings_and_statistics_may_grow() {
    let mut files = Vec::new();
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for dir in fs::read_dir(crates).expect("readable") {
        sources(&dir.expect("readable").path().join("src"), &mut files);
    }
    let (mut written_out, mut seen) = (Vec::new(), 0);
    for file in files {
        let text = fs::read_to_string(&file).expect("readable");
        for (name, closed) in open_structs(&text) {
            seen += 1;
            if closed {
                written_out.push(name.to_owned());
            }
        }
    }
    written_out.sort_unstable();
    written_out.dedup();
    assert!(seen > 50, "{seen}");
    assert_eq!(written_out, CLOSED, "settings and statistics are #[non_exhaustive], with a constructor");
}
