//! The JSON lines of the reference kernel: read, checked for gaps, and gathered into rows.

use crate::document::Row;
use crate::stats::Samples;
use anyhow::{Context, Result, bail};
use hugemm_kernel::LAST_WORDS;
use hugemm_workloads::record::Record;
use serde::Deserialize;
use serde_json::{Map, Value};

/// A line of the kernel, as `hugemm_kernel_commands::report` documents it.
#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Line {
    /// What the machine is.
    Boot(BootLine),
    /// How far the command is.
    Progress {
        /// Steps done.
        done: u64,
        /// Steps in all.
        of: u64,
        /// What is being done.
        what: String,
    },
    /// One run's value.
    Sample(Sample),
    /// What a run counted.
    Record(Counted),
    /// A remark.
    Note {
        /// The text.
        text: String,
    },
    /// The command failed.
    Failed {
        /// Why.
        text: String,
    },
    /// The command succeeded.
    Done {},
}

/// What the machine is.
#[derive(Clone, Debug, Deserialize)]
pub struct BootLine {
    /// CPUs that run.
    pub cpus: u32,
    /// Bytes that the allocator manages.
    pub memory: u64,
    /// Interrupt controller.
    pub interrupt_controller: String,
}

/// One run's value.
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

/// All that a guest has said.
#[derive(Debug, Default)]
pub struct Transcript {
    next: u64,
    /// What the machine is.
    pub boot: Option<BootLine>,
    /// Results so far.
    rows: Vec<(Sample, Samples)>,
    /// What runs counted, in order.
    counted: Vec<Counted>,
    /// Remarks.
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
            Line::Sample(sample) => self.add(sample),
            Line::Record(counted) => self.counted.push(counted),
            Line::Note { text } => self.notes.push(text),
            Line::Failed { text } => self.result = Some(Err(text)),
            Line::Done {} => self.result = Some(Ok(())),
        }
        Ok(None)
    }

    fn add(&mut self, sample: Sample) {
        let same = |of: &Sample| of.metric == sample.metric && of.unit == sample.unit && of.labels == sample.labels;
        let value = sample.value.unwrap_or(f64::NAN);
        match self.rows.iter_mut().find(|(of, _)| same(of)) {
            Some((_, samples)) => samples.push(value),
            None => {
                let mut samples = Samples::default();
                samples.push(value);
                self.rows.push((sample, samples));
            }
        }
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

    /// Every metric with its labels and its runs.
    pub fn samples(&self) -> impl Iterator<Item = (&str, &Map<String, Value>, &Samples)> {
        self.rows.iter().map(|(sample, samples)| (sample.metric.as_str(), &sample.labels, samples))
    }

    /// The results: medians over runs.
    pub fn rows(&self) -> Vec<Row> {
        let row = |(sample, samples): &(Sample, Samples)| {
            let row = Row::median(sample.metric.clone(), samples, sample.unit.clone());
            sample.labels.iter().fold(row, |row, (name, value)| row.label(name, value.clone()))
        };
        self.rows.iter().map(row).collect()
    }

    /// The results as tables: one for each metric, labels on the left.
    pub fn tables(&self) -> Vec<(String, comfy_table::Table)> {
        let mut tables: Vec<(String, comfy_table::Table)> = Vec::new();
        for (sample, samples) in &self.rows {
            let title = format!("{}, {}: median of {} runs", sample.metric, sample.unit, samples.runs());
            let values = sample.labels.values().map(|value| match value {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            });
            let line: Vec<String> = values
                .chain([format!("{:.2}", samples.median()), format!("±{:.1}%", samples.stdev_percent())])
                .collect();
            match tables.iter_mut().find(|(of, _)| *of == title) {
                Some((_, table)) => _ = table.add_row(line),
                None => {
                    let heads = sample.labels.keys().cloned().chain(["value".to_owned(), "stdev".to_owned()]);
                    let mut table = crate::table::new(heads);
                    table.add_row(line);
                    tables.push((title, table));
                }
            }
        }
        tables
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hugemm_workloads::age::AgeFigures;
    use hugemm_workloads::vm_host::PhaseFigures;

    fn sample(seq: u64, value: f64, order: u32) -> String {
        format!(
            "{{\"seq\":{seq},\"kind\":\"sample\",\"metric\":\"m\",\"value\":{value:?},\"unit\":\"ns\",\
             \"labels\":{{\"order\":{order}}}}}"
        )
    }

    #[test]
    fn samples_of_one_metric_and_labels_become_a_row() {
        let mut transcript = Transcript::default();
        for (seq, (value, order)) in [(1.0, 0), (5.0, 9), (3.0, 0), (2.0, 0)].into_iter().enumerate() {
            transcript.take(&sample(seq as u64, value, order)).expect("valid");
        }
        let rows = transcript.rows();
        assert_eq!(rows.iter().map(Row::value).collect::<Vec<_>>(), [2.0, 5.0]);
        assert_eq!(transcript.tables().len(), 2, "three runs, one run");
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
        transcript.take(&sample(0, 1.0, 0)).expect("valid");
        let error = transcript.take(&sample(2, 1.0, 0)).expect_err("a gap").to_string();
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
