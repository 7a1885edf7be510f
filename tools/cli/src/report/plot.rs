//! What is plotted: the figures of one metric, which their labels tell apart.

use crate::document::Row;
use crate::saved::{identity, plain};
use crate::units::{Better, better};
use hugemm_workloads::size::Size;

/// Labels whose numbers are bytes.
const BYTES: [&str; 5] = ["bytes", "chunk", "region", "size", "working_set"];

/// More lines than this cannot be told apart.
const MOST_LINES: usize = 12;

#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// What it is of, among the others; all that its labels say but the place on the horizontal axis.
    pub series: String,
    /// The place on the horizontal axis, if the plot has one.
    pub x: f64,
    pub y: f64,
    pub stdev: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Plot {
    /// The metric.
    pub title: String,
    /// The unit, and which way is better.
    pub unit: String,
    /// The label on the horizontal axis: a number with three values or more.
    pub x: Option<String>,
    /// hugemm's own first, by place.
    pub figures: Vec<Figure>,
}

/// A label's value for people who do not see the label's name.
fn text(name: &str, value: &serde_json::Value) -> String {
    let words = name.replace('_', " ");
    match (value.as_f64(), value.as_bool()) {
        (Some(bytes), _) if BYTES.contains(&name) && bytes > 0.0 => Size(bytes as u64).rounded(),
        (Some(number), _) => format!("{words} {number}"),
        (_, Some(true)) => words,
        (_, Some(false)) => format!("no {words}"),
        _ => plain(value),
    }
}

impl Plot {
    /// Of rows of one metric, each with its document's name, which is empty where there is only one.
    pub fn of(title: &str, rows: &[(&str, &Row)]) -> Self {
        let rows: Vec<_> = rows.iter().filter(|(_, row)| row.value.is_finite()).collect();
        let values = |name: &str| {
            let mut values: Vec<String> =
                rows.iter().map(|(_, row)| row.labels.get(name).map(plain).unwrap_or_default()).collect();
            values.sort_unstable();
            values.dedup();
            values.len()
        };
        let mut names: Vec<&str> = rows.iter().flat_map(|(_, row)| identity(row)).map(|(name, _)| name).collect();
        names.sort_by_key(|name| (*name != "side", *name));
        names.dedup();
        names.retain(|name| values(name) > 1);
        let number = |row: &Row, name: &str| row.labels.get(name).and_then(serde_json::Value::as_f64);
        let numbers = names.iter().filter(|name| rows.iter().all(|(_, row)| number(row, name).is_some()));
        let x = numbers.copied().filter(|name| values(name) >= 3).max_by_key(|name| values(name));
        let figure = |(source, row): &&(&str, &Row)| {
            let labels = names.iter().filter(|name| Some(**name) != x);
            let labels = labels.filter_map(|name| Some(text(name, row.labels.get(*name)?)));
            let series: Vec<String> =
                std::iter::once((*source).to_owned()).filter(|source| !source.is_empty()).chain(labels).collect();
            let x = x.and_then(|name| number(row, name)).unwrap_or(f64::NAN);
            Figure { series: series.join(", "), x, y: row.value, stdev: row.stdev }
        };
        let mut figures: Vec<Figure> = rows.iter().map(figure).collect();
        let own = |figure: &Figure| figure.series.starts_with("hugemm") || figure.series.starts_with("policy");
        figures.sort_by(|a, b| own(b).cmp(&own(a)).then(a.x.total_cmp(&b.x)));
        let unit = rows.first().map_or(String::new(), |(_, row)| match better(row) {
            Some(Better::Lower) => format!("{}, lower is better", &*row.unit),
            Some(Better::Higher) => format!("{}, higher is better", &*row.unit),
            None => row.unit.to_string(),
        });
        Plot { title: title.to_owned(), unit, x: x.map(str::to_owned), figures }
    }

    /// The lines over numbers, if there are any and they can be told apart.
    pub fn lines(&self) -> Option<Vec<(&str, Vec<&Figure>)>> {
        self.x.as_ref()?;
        let mut lines: Vec<(&str, Vec<&Figure>)> = Vec::new();
        for figure in &self.figures {
            match lines.iter_mut().find(|(name, _)| *name == figure.series) {
                Some((_, points)) => points.push(figure),
                None => lines.push((&figure.series, vec![figure])),
            }
        }
        (lines.len() <= MOST_LINES).then_some(lines)
    }

    /// Where a value lies on the horizontal axis: orders in equal steps, all else by its logarithm.
    pub fn place(&self, x: f64) -> f64 {
        if self.x.as_deref() == Some("order") { x } else { x.max(f64::MIN_POSITIVE).log2() }
    }

    /// A value of the horizontal axis as people write it.
    pub fn place_text(&self, x: f64) -> String {
        if self.x.as_deref().is_some_and(|name| BYTES.contains(&name)) {
            Size(x as u64).rounded()
        } else {
            x.to_string()
        }
    }
}

/// A figure and its deviation.
pub fn with_deviation(value: f64, stdev: f64) -> String {
    if stdev == 0.0 { number(value) } else { format!("{} ±{}", number(value), number(stdev)) }
}

/// A number with three significant digits, all of them if it is whole.
pub fn number(value: f64) -> String {
    match value.abs() {
        _ if value.is_nan() => "–".to_owned(),
        size if size < 1e15 && (size >= 100.0 || value.fract() == 0.0) => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 0.01 => format!("{value:.2}"),
        size if size >= 0.001 => format!("{value:.3}"),
        _ => format!("{value:.1e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_digits_they_bear() {
        for (value, text) in
            [(0.0, "0"), (6.0, "6"), (0.123, "0.12"), (12.34, "12.3"), (1234.5, "1234"), (1e-4, "1.0e-4")]
        {
            assert_eq!(number(value), text);
        }
        assert_eq!((number(4096.0), number(f64::NAN)), ("4096".to_owned(), "–".to_owned()));
    }
}
