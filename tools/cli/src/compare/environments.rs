//! What of two environments differs, of all that figures depend on.

use crate::saved::{Saved, plain};
use serde_json::Value;
use std::collections::BTreeSet;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    pub what: &'static str,
    /// In A's documents; several values are joined.
    pub a: String,
    pub b: String,
}

/// What figures depend on, by its place in the environment block.
const FIELDS: [(&str, &str); 20] = [
    ("CPU", "/cpu/model"),
    ("microcode", "/cpu/microcode"),
    ("usable CPUs", "/cpu/allowed_cpus"),
    ("cores", "/cpu/cores"),
    ("L2 bytes", "/caches/l2_bytes"),
    ("L3 bytes", "/caches/l3_bytes"),
    ("memory bytes", "/memory/total_bytes"),
    ("kernel", "/kernel/release"),
    ("kernel build", "/kernel/version"),
    ("kernel command line", "/kernel/command_line"),
    ("preemption", "/kernel/preemption"),
    ("transparent huge pages", "/transparent_huge_pages/enabled"),
    ("their 2 MiB size", "/transparent_huge_pages/enabled_2m"),
    ("their defrag", "/transparent_huge_pages/defrag"),
    ("vmemmap optimization", "/hugetlb_optimize_vmemmap"),
    ("governor", "/frequency/governor"),
    ("boost", "/frequency/boost"),
    ("virtual machine", "/virtualization/hypervisor"),
    ("machine", "/virtualization/product"),
    ("CPU quota", "/cpu_quota_cpus"),
];

/// Everything that differs, also the version of hugemm and the command line.
pub fn differences(a: &[Saved], b: &[Saved]) -> Vec<Difference> {
    let mut found = Vec::new();
    let mut look = |what, of: &dyn Fn(&Saved) -> Option<String>| {
        let values = |side: &[Saved]| side.iter().filter_map(of).collect::<BTreeSet<_>>();
        let (a, b) = (values(a), values(b));
        if a != b {
            let words = |set: BTreeSet<String>| match set.len() {
                0 => "unknown".to_owned(),
                _ => set.into_iter().collect::<Vec<_>>().join(" | "),
            };
            found.push(Difference { what, a: words(a), b: words(b) });
        }
    };
    look("hugemm", &|saved| Some(saved.version.clone()));
    look("command", &|saved| Some(command(&saved.command)));
    for (what, pointer) in FIELDS {
        look(what, &|saved| saved.environment.pointer(pointer).filter(|v| !v.is_null()).map(plain));
    }
    look("least share in huge pages", &|saved| least_share(&saved.environment));
    if let Some((gone, come)) = features(a, b) {
        found.push(Difference { what: "CPU features of one side only", a: gone, b: come });
    }
    found
}

/// A command line without where its JSON went, which changes nothing.
fn command(line: &str) -> String {
    line.split_whitespace().filter(|word| !word.starts_with("--json")).collect::<Vec<_>>().join(" ")
}

fn features(a: &[Saved], b: &[Saved]) -> Option<(String, String)> {
    let set = |side: &[Saved]| -> BTreeSet<String> {
        let lists = side.iter().filter_map(|saved| saved.environment.pointer("/cpu/features")?.as_array());
        lists.flatten().map(plain).collect()
    };
    let (a, b) = (set(a), set(b));
    let only = |one: &BTreeSet<String>, other| {
        let words: Vec<&str> = one.difference(other).map(String::as_str).collect();
        if words.is_empty() { "none".to_owned() } else { words.join(" ") }
    };
    (a != b).then(|| (only(&a, &b), only(&b, &a)))
}

/// The smallest share of a measured region that was in huge pages, in whole percent.
fn least_share(environment: &Value) -> Option<String> {
    let regions = environment.get("regions")?.as_array()?.iter();
    let least = regions.filter_map(|region| region["huge_share"].as_f64()).reduce(f64::min)?;
    Some(format!("{:.0} %", (least * 100.0).floor()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn saved(environment: Value, command: &str) -> Saved {
        Saved { schema: 1, command: command.to_owned(), version: "1".to_owned(), environment, results: Vec::new() }
    }

    #[test]
    fn what_differs_is_named_with_both_values() {
        let cpu = |features: Value| json!({"cpu": {"model": "X", "features": features}, "kernel": {"release": "6.1"}});
        let a = [saved(cpu(json!(["avx2", "erms"])), "probe --json=a.json")];
        let b = [saved(cpu(json!(["avx2", "clzero"])), "probe --json=b.json")];
        let found = differences(&a, &b);
        let expected =
            Difference { what: "CPU features of one side only", a: "erms".to_owned(), b: "clzero".to_owned() };
        assert_eq!(found, [expected]);
        let c = [saved(json!({"kernel": {"release": "6.12"}}), "probe -r 3")];
        let found = differences(&a, &c);
        assert_eq!(found[0], Difference { what: "command", a: "probe".to_owned(), b: "probe -r 3".to_owned() });
        assert!(found.contains(&Difference { what: "CPU", a: "X".to_owned(), b: "unknown".to_owned() }), "{found:?}");
        assert!(found.contains(&Difference { what: "kernel", a: "6.1".to_owned(), b: "6.12".to_owned() }));
        assert!(differences(&a, &a).is_empty());
    }
}
