//! Goals, what was measured, and whether they were met.

use crate::document::Row;
use crate::stats::Samples;
use crate::table;

/// The label of a row that says in words what has to be known to read it.
pub const NOTE: &str = "note";

/// On which side of its goal a figure is wanted. Stored with the row: a figure that equals its goal does not show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    AtLeast,
    AtMost,
}

impl Bound {
    pub fn name(self) -> &'static str {
        match self {
            Bound::AtLeast => "at least",
            Bound::AtMost => "at most",
        }
    }

    pub fn sign(self) -> &'static str {
        match self {
            Bound::AtLeast => "≥",
            Bound::AtMost => "≤",
        }
    }

    /// Whether a figure is on the right side of its goal.
    pub fn is_met(self, value: f64, goal: f64) -> bool {
        match self {
            Bound::AtLeast => value >= goal,
            Bound::AtMost => value <= goal,
        }
    }

    pub fn of(row: &Row) -> Option<Self> {
        let name = row.labels().get("bound")?.as_str()?;
        [Bound::AtLeast, Bound::AtMost].into_iter().find(|bound| bound.name() == name)
    }
}

#[derive(Debug, Default)]
pub struct Goals(Vec<(Row, String, bool)>);

impl Goals {
    pub fn new() -> Self {
        Self::default()
    }

    fn add(&mut self, row: Row, bound: Bound, goal: f64) {
        let met = bound.is_met(row.value(), goal);
        let row = row.label("goal", goal).label("met", met).label("bound", bound.name());
        self.0.push((row, format!("{} {goal}", bound.sign()), met));
    }

    pub fn at_least(&mut self, metric: &str, samples: &Samples, goal: f64) {
        let row = Row::median(metric, samples, "ratio");
        self.add(row, Bound::AtLeast, goal);
    }

    /// The median over runs is at most `goal`, both in `unit`.
    pub fn at_most(&mut self, metric: &str, samples: &Samples, unit: &'static str, goal: f64) {
        let row = Row::median(metric, samples, unit);
        self.add(row, Bound::AtMost, goal);
    }

    /// The largest of values measured at different sizes (each a median over runs) is at most `goal`.
    pub fn at_most_everywhere(&mut self, metric: &str, by_size: &Samples, goal: f64) {
        let row = Row::single(metric, by_size.max(), "ratio").label("sizes", by_size.runs());
        self.add(row, Bound::AtMost, goal);
    }

    /// What has to be known to read the figure that was added last.
    pub fn note(&mut self, note: &str) {
        if let Some((row, ..)) = self.0.last_mut() {
            *row = row.clone().label(NOTE, note);
        }
    }

    /// Takes out what is no count, and gives its rows back without a verdict: where instructions are emulated, only counts can be
    /// judged.
    pub fn unjudged(&mut self) -> Vec<Row> {
        let (counts, others) =
            std::mem::take(&mut self.0).into_iter().partition(|(row, ..)| ["count", "per batch"].contains(&row.unit()));
        self.0 = counts;
        others.into_iter().map(|(row, ..): (Row, _, _)| row.without(&["goal", "met", "bound"])).collect()
    }

    /// Prints goal, measured, met or not; nothing if no goal was measured.
    pub fn print(&self) {
        if self.0.is_empty() {
            return;
        }
        let mut lines = table::new(["goal", "wanted", "measured", "met"]);
        for (row, wanted, met) in &self.0 {
            let verdict = if *met { "yes" } else { "NO" };
            lines.add_row([row.metric(), wanted, &format!("{:.2}", row.value()), verdict]);
        }
        table::print("Goals", &lines);
        for (row, ..) in &self.0 {
            if let Some(note) = row.labels().get(NOTE).and_then(serde_json::Value::as_str) {
                println!("  {}: {note}", row.metric());
            }
        }
    }

    /// The rows, each with its goal and verdict as labels.
    pub fn into_rows(self) -> impl Iterator<Item = Row> {
        self.0.into_iter().map(|(row, ..)| row)
    }
}
