//! What a report says, whatever it is written as: goals, the plots of each command, documents.

use super::machine;
use super::plot::{Plot, number, with_deviation};
use crate::document::Row;
use crate::goals::{self, Bound};
use crate::saved::Saved;

#[derive(Clone, Debug, PartialEq)]
pub struct Goal {
    pub name: String,
    /// The document, where there are several.
    pub source: String,
    pub wanted: String,
    pub measured: String,
    pub verdict: String,
}

#[derive(Debug)]
pub struct Content<'a> {
    pub goals: Vec<Goal>,
    /// The commands that measured, and a plot for each metric that has figures to set beside each other.
    pub sections: Vec<(String, Vec<Plot>)>,
    pub documents: Vec<(&'a str, &'a Saved)>,
}

impl<'a> Content<'a> {
    pub fn of(documents: &'a [(String, Saved)]) -> Self {
        let mut goals = Vec::new();
        let mut metrics: Vec<(&str, Vec<(usize, &Row)>)> = Vec::new();
        for (index, (name, saved)) in documents.iter().enumerate() {
            for row in &saved.results {
                match goals::verdict_of(row).zip(Bound::of(row)) {
                    Some((verdict, bound)) => goals.push(Goal {
                        name: row.metric.clone(),
                        source: if documents.len() > 1 { name.clone() } else { String::new() },
                        wanted: wanted(row, bound),
                        measured: measured(row),
                        verdict: verdict.to_owned(),
                    }),
                    None => match metrics.iter_mut().find(|(metric, _)| *metric == row.metric) {
                        Some((_, rows)) => rows.push((index, row)),
                        None => metrics.push((&*row.metric, vec![(index, row)])),
                    },
                }
            }
        }
        let mut sections: Vec<(String, Vec<Plot>)> = Vec::new();
        for (metric, rows) in metrics.into_iter().filter(|(_, rows)| rows.len() > 1) {
            let command = machine::command_name(&documents[rows[0].0].1.command);
            let several = rows.iter().any(|(index, _)| *index != rows[0].0);
            let name = |index: usize| if several { documents[index].0.as_str() } else { "" };
            let rows: Vec<_> = rows.iter().map(|(index, row)| (name(*index), *row)).collect();
            let plot = Plot::of(metric, &rows);
            match sections.iter_mut().find(|(title, _)| *title == command) {
                Some((_, plots)) => plots.push(plot),
                None => sections.push((command, vec![plot])),
            }
        }
        Content { goals, sections, documents: documents.iter().map(|(name, saved)| (name.as_str(), saved)).collect() }
    }
}

fn wanted(row: &Row, bound: Bound) -> String {
    let wanted = row.labels.get("goal").and_then(serde_json::Value::as_f64);
    wanted.map_or("–".to_owned(), |wanted| format!("{} {}", bound.sign(), number(wanted)))
}

fn measured(row: &Row) -> String {
    // A ratio has no unit to print.
    let unit = if row.unit == "ratio" { "" } else { &*row.unit };
    format!("{} {unit}", with_deviation(row.value, row.stdev)).trim_end().to_owned()
}
