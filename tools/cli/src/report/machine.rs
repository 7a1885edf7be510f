//! What a report says of the machine and the rows of a document. The environment is read field by field: documents of
//! other versions have more fields, or fewer.

use super::plot::number;
use crate::doctor::checks;
use crate::document::Row;
use crate::saved::{name, plain};
use hugemm_inspect::environment::Environment;
use hugemm_workloads::size::Size;
use serde::Deserialize;
use serde_json::Value;

/// The name of a command line: its words up to the first option.
pub fn command_name(line: &str) -> String {
    let words = line.split_whitespace().take_while(|word| !word.starts_with('-') && !word.contains(['/', '.']));
    words.collect::<Vec<_>>().join(" ")
}

fn text(environment: &Value, pointer: &str) -> Option<String> {
    environment.pointer(pointer).filter(|value| !value.is_null()).map(plain)
}

fn bytes(environment: &Value, pointer: &str) -> Option<String> {
    environment.pointer(pointer)?.as_u64().map(|bytes| Size(bytes).rounded())
}

pub fn line(environment: &Value) -> String {
    let cpus = environment.pointer("/cpu/allowed_cpus").and_then(Value::as_array).map(Vec::len);
    let parts = [
        text(environment, "/cpu/model"),
        cpus.map(|cpus| format!("{cpus} CPUs")),
        bytes(environment, "/memory/total_bytes"),
        text(environment, "/kernel/release").map(|release| format!("Linux {release}")),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// What is known of the machine, and what makes its figures noisy.
pub fn facts(environment: &Value) -> Vec<(&'static str, String)> {
    let mut facts = vec![("machine", line(environment))];
    let caches = ["l1d", "l2", "l3"].map(|level| {
        bytes(environment, &format!("/caches/{level}_bytes")).map(|size| format!("{} {size}", level.to_uppercase()))
    });
    let pages = [
        text(environment, "/transparent_huge_pages/enabled").map(|mode| format!("transparent huge pages {mode}")),
        text(environment, "/transparent_huge_pages/defrag").map(|mode| format!("defrag {mode}")),
    ];
    let join = |parts: Vec<Option<String>>| parts.into_iter().flatten().collect::<Vec<_>>().join(", ");
    facts.push(("caches", join(caches.into())));
    facts.push(("pages", join(pages.into())));
    facts.push(("preemption", text(environment, "/kernel/preemption").unwrap_or_default()));
    for region in environment.pointer("/regions").and_then(Value::as_array).into_iter().flatten() {
        let (Some(label), Some(size)) = (text(region, "/label"), bytes(region, "/bytes")) else { continue };
        let share = region["huge_share"].as_f64().unwrap_or(0.0) * 100.0;
        facts.push(("memory", format!("{label}: {size}, {:.0} % of it really in huge pages", share.floor())));
    }
    // A document of another version may lack what the warnings need.
    if let Ok(environment) = Environment::deserialize(environment) {
        facts.extend(checks::notes(&environment).map(|note| ("note", note)));
    }
    facts.retain(|(_, text)| !text.is_empty());
    facts
}

/// A row as cells: what it is, value, deviation, runs, unit.
pub fn figure_cells(row: &Row) -> Vec<String> {
    vec![name(row), number(row.value()), number(row.stdev()), row.runs().to_string(), row.unit().to_owned()]
}
