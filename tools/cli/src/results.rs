//! What a command came to, wherever it was measured: records line by line, and the tables and rows that are made of them.

use crate::document::Row;
use crate::goals;
use crate::stats::Samples;
use crate::table;
use comfy_table::Table;
use hugemm_workloads::record::Metric;
use hugemm_workloads::size::Size;
use serde_json::{Map, Value};

/// The runs of what has the same labels.
pub struct Line<R> {
    /// What tells it from others, as its rows are labelled.
    pub labels: Map<String, Value>,
    pub runs: Vec<R>,
}

impl<R> Line<R> {
    pub fn new<const N: usize>(labels: [(&str, Value); N]) -> Self {
        Line { labels: labels.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(), runs: Vec::new() }
    }

    pub fn samples(&self, metric: &Metric<R>) -> Samples {
        self.runs.iter().map(metric.of).filter(|value| value.is_finite()).collect()
    }

    /// A label as a table shows it.
    pub fn label(&self, name: &str) -> String {
        match self.labels.get(name) {
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
            None => String::new(),
        }
    }

    /// A label as it stands among others in a table.
    pub fn shown(&self, name: &str) -> String {
        match (name, self.number(name)) {
            ("cpus", 1) => "1 CPU".to_owned(),
            ("cpus", cpus) => format!("{cpus} CPUs"),
            ("interrupts", _) => format!("interrupts {}", self.label(name)),
            ("size" | "working_set" | "chunk" | "region", bytes @ 1..) => Size(bytes).to_string(),
            _ => self.label(name),
        }
    }

    /// What tells it from others, in words.
    pub fn name(&self) -> String {
        self.labels.keys().map(|name| self.label(name)).collect::<Vec<_>>().join(", ")
    }

    /// A label that is a number; 0 if there is none.
    pub fn number(&self, name: &str) -> u64 {
        self.labels.get(name).and_then(Value::as_u64).unwrap_or(0)
    }

    pub fn labelled(&self, row: Row) -> Row {
        self.labels.iter().fold(row, |row, (name, value)| row.label(name, value.clone()))
    }

    /// The median of each metric that it has.
    pub fn rows(&self, metrics: &[Metric<R>]) -> Vec<Row> {
        let each = metrics.iter().map(|metric| (metric, self.samples(metric))).filter(|(_, it)| it.runs() > 0);
        each.map(|(metric, samples)| self.labelled(Row::median(metric.name, &samples, metric.unit))).collect()
    }
}

/// Tables, figures as rows, and what has to be known to read them. The rows decide the goals.
#[derive(Default)]
pub struct Results {
    /// Before everything else: what was done.
    pub intro: String,
    pub tables: Vec<(String, Table)>,
    pub remarks: Vec<String>,
    pub rows: Vec<Row>,
    /// Whether instructions were emulated: only what was counted can be judged then.
    pub emulated: bool,
}

impl Results {
    /// A table of lines, and the rows of their metrics.
    pub fn add<R>(&mut self, title: impl Into<String>, table: Table, lines: &[Line<R>], metrics: &[Metric<R>]) {
        self.tables.push((title.into(), table));
        self.record(lines, metrics);
    }

    /// The rows of lines alone.
    pub fn record<R>(&mut self, lines: &[Line<R>], metrics: &[Metric<R>]) {
        self.rows.extend(lines.iter().flat_map(|line| line.rows(metrics)));
    }

    /// The goals that the rows decide.
    pub fn goals(&self) -> Vec<Row> {
        goals::judge(&self.rows, self.emulated)
    }

    /// Prints all but the rows.
    pub fn print(&self, goals: &[Row]) {
        if self.emulated {
            println!("  note      instructions are emulated: only ratios and counts mean something");
        }
        if !self.intro.is_empty() {
            println!("\n{}", self.intro);
        }
        for (title, lines) in &self.tables {
            table::print(title, lines);
        }
        if !goals.is_empty() {
            table::print("Goals", &goals::table(goals));
        }
        if !self.remarks.is_empty() {
            println!("\n  {}", self.remarks.join("\n  "));
        }
    }
}
