//! What a report says of the machine and the rows of a document. Documents of other versions have more fields, or fewer.

use super::plot::number;
use crate::document::Row;
use crate::environment_text;
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

/// What is known of the machine; of one that lacks what today's environments have, a line.
pub fn facts(environment: &Value) -> Vec<(String, String)> {
    Environment::deserialize(environment)
        .map_or_else(|_| vec![("machine".to_owned(), line(environment))], |known| environment_text::facts(&known))
}

/// A row as cells: what it is, value, deviation, runs, unit.
pub fn figure_cells(row: &Row) -> Vec<String> {
    vec![name(row), number(row.value), number(row.stdev), row.runs.to_string(), row.unit.to_string()]
}
