//! The JSON that every command can print: one document, whose fields are only ever added to.

use crate::stats::Samples;
use anyhow::{Context, Result, bail};
use hugemm_inspect::environment::Environment;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::path::Path;

/// Version of the document's form and of what its figures mean. It goes up when a metric keeps its name and is measured
/// differently: `hugemm compare` refuses to set such documents against each other.
pub const SCHEMA: u32 = 9;

/// What a command measured, where, and how it was called.
#[derive(Debug, Serialize)]
pub struct Document {
    schema: u32,
    /// The command line after the program's name.
    command: String,
    version: &'static str,
    environment: Environment,
    results: Vec<Row>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    pub metric: String,
    /// The figure; not a number where the document has `null`.
    #[serde(deserialize_with = "number")]
    pub value: f64,
    pub unit: Cow<'static, str>,
    /// The sample standard deviation over the runs; 0 for one run.
    #[serde(deserialize_with = "number")]
    pub stdev: f64,
    pub runs: usize,
    /// What else the row says: where the figure belongs, and for a goal what was wanted.
    #[serde(flatten)]
    pub labels: Map<String, Value>,
    /// What was measured, run by run; not saved.
    #[serde(skip)]
    pub samples: Samples,
}

/// A number, or `null`, which is how JSON writes what is no number.
fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

impl Row {
    /// A figure that was measured or counted once.
    pub fn single(metric: impl Into<String>, value: f64, unit: impl Into<Cow<'static, str>>) -> Self {
        let samples = Samples::once(value);
        Row { metric: metric.into(), value, unit: unit.into(), stdev: 0.0, runs: 1, labels: Map::new(), samples }
    }

    /// The mean over runs, as `perf bench` reports.
    pub fn mean(metric: impl Into<String>, samples: &Samples, unit: impl Into<Cow<'static, str>>) -> Self {
        let row = Row::single(metric, samples.mean(), unit);
        Row { stdev: samples.stdev(), runs: samples.runs(), samples: samples.clone(), ..row }
    }

    pub fn median(metric: impl Into<String>, samples: &Samples, unit: impl Into<Cow<'static, str>>) -> Self {
        Row { value: samples.median(), ..Row::mean(metric, samples, unit) }
    }

    pub fn label(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.labels.insert(name.to_owned(), value.into());
        self
    }

    pub fn without(mut self, name: &str) -> Self {
        self.labels.remove(name);
        self
    }
}

impl Document {
    pub fn new(environment: Environment, results: Vec<Row>) -> Self {
        // A file's name need not be text.
        let words = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
        let command = words.collect::<Vec<_>>().join(" ");
        Document { schema: SCHEMA, command, version: env!("CARGO_PKG_VERSION"), environment, results }
    }

    /// Writes the document as indented JSON where `--json` says: to standard output (`-`), to a file, or nowhere.
    pub fn write(&self, to: Option<&Path>) -> Result<()> {
        write(self, to)
    }
}

/// Refuses a file that cannot be written, before anything is measured: minutes of work would be lost at the end.
///
/// Links, pipes and devices are left alone, and a file that was not there is not there afterwards.
pub fn check_writable(to: Option<&Path>) -> Result<()> {
    let Some(path) = to.filter(|path| path.as_os_str() != "-") else { return Ok(()) };
    let kind = std::fs::symlink_metadata(path).map(|meta| meta.file_type());
    if kind.as_ref().is_ok_and(|kind| !kind.is_file() && !kind.is_dir()) {
        return Ok(());
    }
    if let Err(error) = std::fs::OpenOptions::new().append(true).create(true).open(path) {
        bail!("cannot write {}: {error}; name a file in a directory that you may write to", path.display());
    }
    if kind.is_err() {
        std::fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))?;
    }
    Ok(())
}

/// Writes a document, with whatever a command has added to it, as [`Document::write`] does.
pub fn write(document: &impl Serialize, to: Option<&Path>) -> Result<()> {
    let Some(path) = to else { return Ok(()) };
    let json = serde_json::to_string_pretty(document)? + "\n";
    if path.as_os_str() == "-" {
        print!("{json}");
    } else {
        std::fs::write(path, json).with_context(|| format!("cannot write {}", path.display()))?;
        println!("\nJSON written to {}", path.display());
    }
    Ok(())
}
