//! Documents that earlier commands saved: reading them, and telling a foreign file in one line.

use crate::document::{Row, SCHEMA};
use anyhow::{Result, anyhow, bail};
use serde::Deserialize;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Labels that say how a figure came out, not which figure it is: they do not take part in telling rows apart.
const OUTCOMES: [&str; 7] = ["goal", "met", "verdict", "bound", "events_known", "operations", "turns"];

/// Documents larger than this are none of ours: the largest has a few thousand rows.
const MOST_BYTES: u64 = 64 << 20;

/// A saved document.
///
/// The environment stays a JSON value: documents of other versions have fields that this one does not know, or lack some.
#[derive(Clone, Debug, Deserialize)]
pub struct Saved {
    /// By which [schema](SCHEMA) its figures are to be read.
    pub schema: u32,
    #[serde(default)]
    pub command: String,
    #[serde(default)]
    pub version: String,
    #[serde(default)]
    pub environment: Value,
    pub results: Vec<Row>,
}

impl Saved {
    /// Reads a file.
    ///
    /// # Errors
    /// One line each: the file cannot be read, is no JSON, no document of hugemm, or one of another schema.
    pub fn read(path: &Path) -> Result<Self> {
        let file = path.display();
        let unread = |error| anyhow!("cannot read {file}: {error}; name a document that was saved with --json=FILE");
        let bytes = std::fs::metadata(path).map_err(unread)?.len();
        if bytes > MOST_BYTES {
            bail!("{file} has {} MB and is no document of hugemm; those come from a command with --json", bytes >> 20);
        }
        let text = std::fs::read(path).map_err(unread)?;
        let value: Value = serde_json::from_slice(&text).map_err(|error| {
            anyhow::anyhow!("{file} is no JSON ({error}); save one with: hugemm COMMAND --json=FILE")
        })?;
        Self::of(value).map_err(|why| anyhow::anyhow!("{file} {why}"))
    }

    /// Reads what a command of this program printed.
    pub fn from_bytes(text: &[u8]) -> Result<Self> {
        let value: Value =
            serde_json::from_slice(text).map_err(|error| anyhow::anyhow!("no JSON came out ({error})"))?;
        Self::of(value).map_err(|why| anyhow::anyhow!("what came out {why}"))
    }

    fn of(value: Value) -> Result<Self, String> {
        const REMEDY: &str = "save one with: hugemm COMMAND --json=FILE";
        let Some(schema) = value.get("schema") else {
            return Err(format!("is no document of hugemm: it has no field 'schema'; {REMEDY}"));
        };
        if !schema.as_u64().is_some_and(|schema| (1..=u64::from(SCHEMA)).contains(&schema)) {
            return Err(format!(
                "has schema {schema}, and this version of hugemm reads 1 to {SCHEMA}; use the version that wrote it"
            ));
        }
        let Some(results) = value.get("results").and_then(Value::as_array) else {
            return Err(format!("is no document of hugemm: it has no list 'results'; {REMEDY}"));
        };
        for (index, row) in results.iter().enumerate() {
            if let Err(error) = Row::deserialize(row) {
                return Err(format!("is damaged: row {index} of 'results': {error}; {REMEDY}"));
            }
        }
        Self::deserialize(value).map_err(|error| format!("is damaged: {error}; {REMEDY}"))
    }
}

/// Refuses documents whose figures of one name were measured differently.
///
/// # Errors
/// One line that names two of them.
pub fn same_schema<'a>(mut documents: impl Iterator<Item = (&'a PathBuf, &'a Saved)>) -> Result<()> {
    let Some((first, a)) = documents.next() else { return Ok(()) };
    if let Some((other, b)) = documents.find(|(_, saved)| saved.schema != a.schema) {
        bail!(
            "{} has schema {} and {} schema {}: figures of the same name are measured differently; measure both with one \
             version of hugemm",
            first.display(),
            a.schema,
            other.display(),
            b.schema
        );
    }
    Ok(())
}

/// The labels that tell a row from others of its metric, in their order, as `name=value`.
pub fn identity(row: &Row) -> impl Iterator<Item = (&str, String)> {
    row.labels
        .iter()
        .filter(|(name, _)| !OUTCOMES.contains(&name.as_str()))
        .map(|(name, value)| (name.as_str(), plain(value)))
}

/// A figure's name for people: its metric, and the labels that tell it from others.
pub fn name(row: &Row) -> String {
    identity(row).fold(row.metric.clone(), |name, (label, value)| format!("{name} {label}={value}"))
}

/// A label's value without quotation marks.
pub fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_no_document_is_named() {
        for (value, part) in [
            (json!([1, 2]), "no field 'schema'"),
            (json!({"schema": 10, "results": []}), "schema 10"),
            (json!({"schema": "1", "results": []}), "schema \"1\""),
            (json!({"schema": 1}), "no list 'results'"),
            (json!({"schema": 1, "results": [{"metric": "a"}]}), "row 0"),
            (
                json!({"schema": 1, "results": [{"metric": "a", "value": "x", "unit": "ns", "stdev": 0, "runs": 1}]}),
                "row 0",
            ),
        ] {
            let why = Saved::of(value).expect_err(part);
            assert!(why.contains(part) && !why.contains('\n'), "{why}");
        }
    }

    #[test]
    fn unknown_fields_and_missing_numbers_are_read() {
        let row =
            json!({"metric": "m", "value": null, "unit": "ns", "stdev": 0.0, "runs": 1, "side": "a", "met": true});
        let saved = Saved::of(json!({"schema": 1, "results": [row], "later": {}})).expect("a document");
        assert!(saved.results[0].value.is_nan());
        assert_eq!(identity(&saved.results[0]).collect::<Vec<_>>(), [("side", "a".to_owned())]);
    }
}
