//! The JSON that every command can print: one document, whose fields are only ever added to.

use crate::stats::Samples;
use anyhow::{Context, Result};
use hugemm_host::environment::Environment;
use serde::Serialize;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::path::Path;

/// Version of the document's form.
pub const SCHEMA: u32 = 1;

/// What a command measured, where, and how it was called.
#[derive(Debug, Serialize)]
pub struct Document {
    schema: u32,
    /// The command line after the program's name.
    command: String,
    /// Version of hugemm.
    version: &'static str,
    environment: Environment,
    results: Vec<Row>,
}

/// One measured figure.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    metric: String,
    value: f64,
    unit: Cow<'static, str>,
    stdev: f64,
    runs: usize,
    #[serde(flatten)]
    labels: Map<String, Value>,
}

impl Row {
    /// A figure that was measured or counted once.
    pub fn single(metric: impl Into<String>, value: f64, unit: impl Into<Cow<'static, str>>) -> Self {
        Row { metric: metric.into(), value, unit: unit.into(), stdev: 0.0, runs: 1, labels: Map::new() }
    }

    /// The mean over runs, as `perf bench` reports.
    pub fn mean(metric: impl Into<String>, samples: &Samples, unit: impl Into<Cow<'static, str>>) -> Self {
        Row { stdev: samples.stdev(), runs: samples.runs(), ..Row::single(metric, samples.mean(), unit) }
    }

    /// The median over runs.
    pub fn median(metric: impl Into<String>, samples: &Samples, unit: impl Into<Cow<'static, str>>) -> Self {
        Row { value: samples.median(), ..Row::mean(metric, samples, unit) }
    }

    /// The same with a label.
    pub fn label(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.labels.insert(name.to_owned(), value.into());
        self
    }

    /// The figure's name.
    pub fn metric(&self) -> &str {
        &self.metric
    }

    /// The figure.
    pub fn value(&self) -> f64 {
        self.value
    }
}

impl Document {
    /// A document of the command now running.
    pub fn new(environment: Environment, results: Vec<Row>) -> Self {
        let command = std::env::args().skip(1).collect::<Vec<_>>().join(" ");
        Document { schema: SCHEMA, command, version: env!("CARGO_PKG_VERSION"), environment, results }
    }

    /// Writes the document as indented JSON where `--json` says: to standard output (`-`), to a file, or nowhere.
    pub fn write(&self, to: Option<&Path>) -> Result<()> {
        let Some(path) = to else { return Ok(()) };
        let json = serde_json::to_string_pretty(self)? + "\n";
        if path.as_os_str() == "-" {
            print!("{json}");
        } else {
            std::fs::write(path, json).with_context(|| format!("cannot write {}", path.display()))?;
            println!("\nJSON written to {}", path.display());
        }
        Ok(())
    }
}
