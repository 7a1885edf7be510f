//! What a command came to, wherever it was measured: records line by line, and the tables, rows and goals that are made of them.

use crate::boot::lines::Transcript;
use crate::document::Row;
use crate::goals::Goals;
use crate::stats::Samples;
use crate::table;
use comfy_table::Table;
use hugemm_workloads::record::{Metric, Record};
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

/// What the reference kernel has counted, in its order.
pub fn of_guest<R: Record>(transcript: &Transcript) -> Vec<Line<R>> {
    let mut lines: Vec<Line<R>> = Vec::new();
    for (record, labels) in transcript.records() {
        match lines.iter_mut().find(|line| line.labels == *labels) {
            Some(line) => line.runs.push(record),
            None => lines.push(Line { labels: labels.clone(), runs: vec![record] }),
        }
    }
    lines
}

/// Tables, figures as rows, goals, and what has to be known to read them.
#[derive(Default)]
pub struct Results {
    /// Before everything else: what was done.
    pub intro: String,
    pub tables: Vec<(String, Table)>,
    pub remarks: Vec<String>,
    pub rows: Vec<Row>,
    /// Goals that they decide.
    pub goals: Goals,
}

impl Results {
    /// Prints all but the rows.
    pub fn print(&self) {
        if !self.intro.is_empty() {
            println!("\n{}", self.intro);
        }
        for (title, lines) in &self.tables {
            table::print(title, lines);
        }
        self.goals.print();
        if !self.remarks.is_empty() {
            println!("\n  {}", self.remarks.join("\n  "));
        }
    }

    /// The rows, the goals' last.
    pub fn into_rows(mut self) -> Vec<Row> {
        self.rows.extend(self.goals.into_rows());
        self.rows
    }
}
