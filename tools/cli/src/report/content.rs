//! What a report says, whatever it is written as: goals, plots by section, single figures, documents.

use super::build::{Figure, by_view, generic};
use super::machine;
use super::plot::{Plot, number};
use super::views::VIEWS;
use crate::goals::{self, Bound};
use crate::saved::{self, Saved};
use std::collections::{BTreeMap, HashSet};

#[derive(Clone, Debug, PartialEq)]
pub struct Goal {
    pub name: String,
    /// The document, where there are several.
    pub source: String,
    pub wanted: String,
    pub measured: String,
    pub verdict: String,
}

/// A figure that stands alone.
#[derive(Clone, Debug, PartialEq)]
pub struct Single {
    pub name: String,
    /// The document, where there are several.
    pub source: String,
    pub value: String,
}

#[derive(Debug)]
pub struct Content<'a> {
    pub goals: Vec<Goal>,
    /// The commands that measured, and the plots of each.
    pub sections: Vec<(String, Vec<Plot>)>,
    /// Figures without others to stand beside.
    pub singles: Vec<Single>,
    pub documents: Vec<(&'a str, &'a Saved)>,
}

impl<'a> Content<'a> {
    pub fn of(documents: &'a [(String, Saved)]) -> Self {
        let name = |index: usize| if documents.len() > 1 { documents[index].0.as_str() } else { "" };
        let mut sources: BTreeMap<&str, HashSet<usize>> = BTreeMap::new();
        let rows =
            || documents.iter().enumerate().flat_map(|(i, (_, saved))| saved.results.iter().map(move |row| (i, row)));
        for (index, row) in rows() {
            sources.entry(row.metric()).or_default().insert(index);
        }
        let mut goals = Vec::new();
        let mut figures = Vec::new();
        for (index, row) in rows() {
            if let Some(verdict) = goals::verdict_of(row).filter(|_| Bound::of(row).is_some()) {
                let wanted =
                    row.labels().get("goal").and_then(serde_json::Value::as_f64).map_or("–".to_owned(), number);
                let sign = Bound::of(row).map_or("", Bound::sign);
                goals.push(Goal {
                    name: row.metric().to_owned(),
                    source: name(index).to_owned(),
                    wanted: format!("{sign} {wanted}").trim().to_owned(),
                    measured: with_unit(row.value(), row.stdev(), row.unit()),
                    verdict: verdict.to_owned(),
                });
                continue;
            }
            let several = sources.get(row.metric()).is_some_and(|sources| sources.len() > 1);
            figures.push((index, Figure { row, source: if several { name(index) } else { "" } }));
        }
        let all: Vec<Figure<'_>> = figures.iter().map(|(_, figure)| *figure).collect();

        let mut sections: Vec<(String, Vec<Plot>)> = Vec::new();
        let mut add = |document: usize, plots: Vec<Plot>| {
            let command = machine::command_name(&documents[document].1.command);
            match sections.iter_mut().find(|(title, _)| *title == command) {
                Some((_, present)) => present.extend(plots),
                None => sections.push((command, plots)),
            }
        };
        let mut taken = HashSet::new();
        for view in &VIEWS {
            let has = |name: &str| view.metrics.iter().any(|(metric, _)| *metric == name);
            let plots = by_view(view, &all);
            if let (Some((document, _)), false) =
                (figures.iter().find(|(_, figure)| has(figure.row.metric())), plots.is_empty())
            {
                taken.extend(view.metrics.iter().map(|(name, _)| *name));
                add(*document, plots);
            }
        }
        let mut singles = Vec::new();
        let mut seen = HashSet::new();
        for (index, figure) in &figures {
            let metric = figure.row.metric();
            if taken.contains(metric) {
                continue;
            }
            let of_metric: Vec<Figure<'_>> = all.iter().filter(|f| f.row.metric() == metric).copied().collect();
            if of_metric.len() == 1 {
                let row = figure.row;
                singles.push(Single {
                    name: saved::name(row),
                    source: name(*index).to_owned(),
                    value: with_unit(row.value(), row.stdev(), row.unit()),
                });
            } else if seen.insert(metric) {
                add(*index, generic(metric, &of_metric));
            }
        }
        name_apart(&mut sections);
        let documents = documents.iter().map(|(name, saved)| (name.as_str(), saved)).collect();
        Content { goals, sections, singles, documents }
    }
}

fn with_unit(value: f64, stdev: f64, unit: &str) -> String {
    // A ratio and a verdict have no unit to print.
    let unit = if matches!(unit, "ratio" | "bool") { "" } else { unit };
    let figure = if stdev == 0.0 { number(value) } else { format!("{} ±{}", number(value), number(stdev)) };
    format!("{figure} {unit}").trim_end().to_owned()
}

/// Plots of the same title get different names.
fn name_apart(sections: &mut [(String, Vec<Plot>)]) {
    let mut names = HashSet::new();
    for plot in sections.iter_mut().flat_map(|(_, plots)| plots) {
        let base = if plot.id.is_empty() { "plot".to_owned() } else { plot.id.clone() };
        let mut id = base.clone();
        for again in 2.. {
            if names.insert(id.clone()) {
                break;
            }
            id = format!("{base}-{again}");
        }
        plot.id = id;
    }
}
