//! The same figure on both sides, several documents of a side taken together.

use crate::document::Row;
use crate::goals;
use crate::saved::{Saved, identity, name};
use crate::units::{self, Better};
use serde_json::Value;
use std::collections::HashMap;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figure {
    pub value: f64,
    pub stdev: f64,
    pub runs: usize,
}

impl Figure {
    fn of(row: &Row) -> Self {
        Figure { value: row.value, stdev: row.stdev, runs: row.runs }
    }

    /// Both sets of runs as one: the variance is that within both and that between their values.
    fn with(self, other: Figure) -> Figure {
        let (n, m) = (self.runs as f64, other.runs as f64);
        let value = (n * self.value + m * other.value) / (n + m);
        let square = |f: Figure, n: f64| (n - 1.0).max(0.0) * f.stdev * f.stdev + n * (f.value - value).powi(2);
        let stdev = ((square(self, n) + square(other, m)) / (n + m - 1.0).max(1.0)).sqrt();
        Figure { value, stdev, runs: self.runs + other.runs }
    }
}

#[derive(Clone, Debug)]
pub struct Pair {
    /// Metric and labels for people.
    pub name: String,
    pub metric: String,
    /// The labels that tell it from others of the metric.
    pub labels: Vec<(String, Value)>,
    pub unit: String,
    pub better: Option<Better>,
    /// The side compared with.
    pub a: Figure,
    /// The side that is judged.
    pub b: Figure,
    /// Whether each side met its goal, if the figure has one.
    met: [Option<bool>; 2],
}

impl Pair {
    /// A pair of which only the figures matter.
    #[cfg(test)]
    pub fn for_tests(unit: &str, better: Option<Better>, a: Figure, b: Figure) -> Self {
        let (name, metric, labels) = (String::new(), String::new(), Vec::new());
        Pair { name, metric, labels, unit: unit.to_owned(), better, a, b, met: [None, None] }
    }

    /// A goal that is met on one side only.
    pub fn goal_change(&self) -> Option<&'static str> {
        match self.met {
            [Some(true), Some(false)] => Some("met by A, missed by B"),
            [Some(false), Some(true)] => Some("missed by A, met by B"),
            _ => None,
        }
    }
}

#[derive(Debug, Default)]
pub struct Paired {
    pub pairs: Vec<Pair>,
    /// Names of figures that only A has.
    pub missing: Vec<String>,
    /// Names of figures that only B has.
    pub added: Vec<String>,
}

/// One side's figures in the order in which they first appear, and where each is, by name and unit.
type Side<'a> = (Vec<(&'a Row, Figure)>, HashMap<(String, &'a str), usize>);

fn side(documents: &[Saved]) -> Side<'_> {
    let mut figures: Vec<(&Row, Figure)> = Vec::new();
    let mut places = HashMap::new();
    for row in documents.iter().flat_map(|document| &document.results) {
        let place = *places.entry((name(row), &*row.unit)).or_insert(figures.len());
        match figures.get_mut(place) {
            Some((_, figure)) => *figure = figure.with(Figure::of(row)),
            None => figures.push((row, Figure::of(row))),
        }
    }
    (figures, places)
}

/// Finds the figures that both sides have: same metric, unit and labels.
pub fn pair(a: &[Saved], b: &[Saved]) -> Paired {
    let ((left, left_places), (right, right_places)) = (side(a), side(b));
    let mut paired = Paired::default();
    for (row, figure) in &left {
        let key = (name(row), &*row.unit);
        let Some(place) = right_places.get(&key) else {
            paired.missing.push(key.0);
            continue;
        };
        let (other, other_figure) = right[*place];
        let met = |row: &Row| {
            goals::verdict_of(row).filter(|said| *said != goals::NOT_TOLD_APART).map(|said| said == goals::MET)
        };
        let known: Vec<&str> = identity(row).map(|(name, _)| name).collect();
        let labels = row.labels.iter().filter(|(name, _)| known.contains(&name.as_str()));
        paired.pairs.push(Pair {
            name: key.0,
            metric: row.metric.clone(),
            labels: labels.map(|(name, value)| (name.clone(), value.clone())).collect(),
            unit: row.unit.to_string(),
            better: units::better(row),
            a: *figure,
            b: other_figure,
            met: [met(row), met(other)],
        });
    }
    for (row, _) in &right {
        let key = (name(row), &*row.unit);
        if !left_places.contains_key(&key) {
            paired.added.push(key.0);
        }
    }
    paired
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_documents_of_a_side_are_one_sample() {
        // 1, 2, 3 and 5, 7 together have mean 3.6 and variance 5.8.
        let first = Figure { value: 2.0, stdev: 1.0, runs: 3 };
        let second = Figure { value: 6.0, stdev: 2.0_f64.sqrt(), runs: 2 };
        let both = first.with(second);
        assert_eq!(both.runs, 5);
        assert!((both.value - 3.6).abs() < 1e-12 && (both.stdev - 5.8_f64.sqrt()).abs() < 1e-12, "{both:?}");
        let single = |value| Figure { value, stdev: 0.0, runs: 1 };
        let two = single(4.0).with(single(4.0));
        assert_eq!((two.value, two.stdev, two.runs), (4.0, 0.0, 2));
    }

    #[test]
    fn labels_tell_rows_apart_and_outcomes_do_not() {
        let row = |value: f64, order: u32, met: bool| {
            let said = if met { goals::MET } else { goals::MISSED };
            Row::single("m", value, "ns").label("order", order).label("verdict", said).label("goal", 3.0)
        };
        let document = |rows| Saved {
            schema: crate::document::SCHEMA,
            command: String::new(),
            version: String::new(),
            environment: Value::Null,
            results: rows,
        };
        let a = [document(vec![row(1.0, 0, true), row(2.0, 9, true)])];
        let b = [document(vec![row(5.0, 9, false), row(6.0, 18, true)])];
        let Paired { pairs, missing, added } = pair(&a, &b);
        assert_eq!((missing, added), (vec!["m order=0".to_owned()], vec!["m order=18".to_owned()]));
        assert_eq!((pairs.len(), pairs[0].a.value, pairs[0].b.value), (1, 2.0, 5.0));
        assert_eq!(pairs[0].goal_change(), Some("met by A, missed by B"));
    }
}
