//! The JSON lines of the reference kernel: read, checked for gaps, and gathered into rows.

use crate::boot::machine::LAST_WORDS;
use crate::document::Row;
use crate::results::{self, Results};
use crate::sides::figure;
use crate::table;
use anyhow::{Context, Result, bail};
use hugemm_workloads::record::Record;
use serde::Deserialize;
use serde_json::{Map, Value};

/// A line of the kernel, as `hugemm_kernel_commands::report` documents it.
#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Line {
    Boot(BootLine),
    Progress { done: u64, of: u64, what: String },
    Sample(Sample),
    Record(Counted),
    Note { text: String },
    Failed { text: String },
    Done {},
}

#[derive(Clone, Debug, Deserialize)]
pub struct BootLine {
    pub cpus: u32,
    /// Bytes that the allocator manages.
    pub memory: u64,
    pub interrupt_controller: String,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Sample {
    metric: String,
    value: Option<f64>,
    unit: String,
    labels: Map<String, Value>,
}

/// What a run counted: a record of the workloads, by its name.
#[derive(Clone, Debug, Deserialize)]
pub struct Counted {
    name: String,
    labels: Map<String, Value>,
    #[serde(flatten)]
    fields: Map<String, Value>,
}

#[derive(Deserialize)]
struct Numbered {
    seq: u64,
    #[serde(flatten)]
    line: Line,
}

#[derive(Debug, Default)]
pub struct Transcript {
    next: u64,
    pub boot: Option<BootLine>,
    /// What was said of single figures.
    pub rows: Vec<Row>,
    /// What runs counted, in order.
    counted: Vec<Counted>,
    pub notes: Vec<String>,
    /// The lines of a report of a panic, a fault or a hang.
    pub report: Vec<String>,
    /// How the command ended: its last line.
    pub result: Option<Result<(), String>>,
}

impl Transcript {
    /// Takes a line of the serial port; returns progress if that is what it says.
    ///
    /// # Errors
    /// A line of the kernel that cannot be read, or that is missing.
    pub fn take(&mut self, text: &str) -> Result<Option<(u64, u64, String)>> {
        if let Some(words) = text.strip_prefix(LAST_WORDS) {
            self.report.push(words.to_owned());
            return Ok(None);
        }
        // The firmware talks too, and the kernel says that it lives; such lines do not begin like this.
        if !text.starts_with("{\"seq\":") {
            return Ok(None);
        }
        let read = serde_json::from_str(text);
        let Numbered { seq, line } = read.with_context(|| format!("the guest's line cannot be read: {text}"))?;
        if seq != self.next {
            bail!("line {} of the guest is missing: the next one is number {seq}", self.next);
        }
        self.next += 1;
        match line {
            Line::Boot(boot) => self.boot = Some(boot),
            Line::Progress { done, of, what } => return Ok(Some((done, of, what))),
            Line::Sample(Sample { metric, value, unit, labels }) => {
                let row = Row::single(metric, value.unwrap_or(f64::NAN), unit);
                self.rows.push(labels.into_iter().fold(row, |row, (name, value)| row.label(&name, value)));
            }
            Line::Record(counted) => self.counted.push(counted),
            Line::Note { text } => self.notes.push(text),
            Line::Failed { text } => self.result = Some(Err(text)),
            Line::Done {} => self.result = Some(Ok(())),
        }
        Ok(None)
    }

    /// Whether nothing has been said yet.
    pub fn is_empty(&self) -> bool {
        self.next == 0
    }

    /// What was said of single figures: a table and its rows.
    pub fn figures(&self) -> Results {
        let mut lines = table::new(["", "count", "of what"]);
        for row in &self.rows {
            let labels = row.labels.values().filter_map(Value::as_str).map(|label| format!(", {label}"));
            lines.add_row([row.metric.clone() + &labels.collect::<String>(), figure(row.value), row.unit.to_string()]);
        }
        let tables = if self.rows.is_empty() { Vec::new() } else { vec![("What was done".to_owned(), lines)] };
        Results { tables, rows: self.rows.clone(), ..Results::default() }
    }

    /// Every record of this kind with its labels. A field that this hugemm does not know is left out.
    pub fn records<R: Record>(&self) -> impl Iterator<Item = (R, &Map<String, Value>)> {
        self.counted.iter().filter(|counted| counted.name == R::NAME).map(|counted| {
            let mut record = R::default();
            for (field, value) in &counted.fields {
                record.set(field, value.as_f64().unwrap_or(f64::NAN));
            }
            (record, &counted.labels)
        })
    }
}

/// What the reference kernel has counted, in its order.
pub fn of_guest<R: Record>(transcript: &Transcript) -> Vec<results::Line<R>> {
    let mut lines: Vec<results::Line<R>> = Vec::new();
    for (record, labels) in transcript.records() {
        match lines.iter_mut().find(|line| line.labels == *labels) {
            Some(line) => line.runs.push(record),
            None => lines.push(results::Line { labels: labels.clone(), runs: vec![record] }),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use hugemm_workloads::age::AgeFigures;
    use hugemm_workloads::alloc_free::pairs::Pair;
    use hugemm_workloads::vm_host::PhaseFigures;

    fn sample(seq: u64) -> String {
        format!(
            "{{\"seq\":{seq},\"kind\":\"sample\",\"metric\":\"m\",\"value\":1.0,\"unit\":\"ns\",\"labels\":{{\"order\":9}}}}"
        )
    }

    #[test]
    fn records_with_the_same_labels_are_runs_of_one_line() {
        let mut transcript = Transcript::default();
        for (seq, (nanos, side)) in [(1, "a"), (5, "b"), (3, "a")].into_iter().enumerate() {
            let line = format!(
                "{{\"seq\":{seq},\"kind\":\"record\",\"name\":\"pair\",\"nanos\":{nanos}.0,\
                 \"labels\":{{\"side\":\"{side}\"}}}}"
            );
            transcript.take(&line).expect("valid");
        }
        let lines: Vec<results::Line<Pair>> = of_guest(&transcript);
        let nanos: Vec<Vec<f64>> = lines.iter().map(|line| line.runs.iter().map(|pair| pair.nanos).collect()).collect();
        assert_eq!(nanos, [vec![1.0, 3.0], vec![5.0]]);
    }

    #[test]
    fn records_arrive_with_their_labels() {
        let mut transcript = Transcript::default();
        let line = r#"{"seq":0,"kind":"record","name":"run.phase","nanos":7.0,"saved":-4096.0,"reclaimed.stored":3.0,"new":1.0,"labels":{"side":"page"}}"#;
        transcript.take(line).expect("valid");
        let (figures, labels) = transcript.records::<PhaseFigures>().next().expect("one");
        assert_eq!((figures.nanos, figures.saved, figures.reclaimed.stored), (7, -4096, 3));
        assert_eq!(labels["side"], "page");
        assert_eq!(transcript.records::<AgeFigures>().count(), 0);
    }

    #[test]
    fn a_missing_line_is_noticed() {
        let mut transcript = Transcript::default();
        transcript.take(&sample(0)).expect("valid");
        assert_eq!((transcript.rows[0].value, &transcript.rows[0].labels["order"]), (1.0, &9.into()));
        let error = transcript.take(&sample(2)).expect_err("a gap").to_string();
        assert!(error.contains("line 1"), "{error}");
    }

    #[test]
    fn a_line_that_is_cut_off_is_noticed_and_other_text_is_not() {
        let mut transcript = Transcript::default();
        transcript.take("SeaBIOS").expect("no line of the kernel");
        assert!(transcript.take("{\"seq\":0,\"kind\":\"samp").is_err());
        transcript.take("!! panic on cpu0").expect("a report");
        assert_eq!(transcript.report, ["panic on cpu0"]);
    }

    #[test]
    fn the_end_is_known() {
        let mut transcript = Transcript::default();
        transcript.take("alive").expect("no result");
        transcript.take("{\"seq\":0,\"kind\":\"failed\",\"text\":\"why\"}").expect("valid");
        assert_eq!(transcript.result, Some(Err("why".to_owned())));
    }
}
