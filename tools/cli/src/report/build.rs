//! From rows to plots: by a view, or by the labels alone.

use super::plot::{Mark, Plot, Point, Scale, Series, X};
use super::views::View;
use crate::document::Row;
use crate::saved::{identity, plain};
use crate::units::better;
use hugemm_clear::{Primitive, PrimitiveClass};
use hugemm_workloads::size::Size;
use std::collections::HashMap;

/// A row, and the document that it comes from where several have its metric.
#[derive(Clone, Copy, Debug)]
pub struct Figure<'a> {
    pub row: &'a Row,
    /// The document's name; empty if only one has the metric.
    pub source: &'a str,
}

impl Figure<'_> {
    fn label(&self, name: &str) -> Option<String> {
        match name {
            "" => (!self.source.is_empty()).then(|| self.source.to_owned()),
            _ => self.row.labels().get(name).map(plain),
        }
    }

    fn number(&self, name: &str) -> Option<f64> {
        self.row.labels().get(name)?.as_f64()
    }
}

/// Labels whose numbers are bytes.
const BYTES: [&str; 4] = ["chunk", "region", "size", "working_set"];

/// A label's value for people who do not see the label's name.
fn text(name: &str, figure: &Figure<'_>) -> Option<String> {
    let number = figure.number(name);
    match number {
        Some(bytes) if BYTES.contains(&name) && bytes > 0.0 => Some(Size(bytes as u64).rounded()),
        Some(number) => Some(format!("{} {number}", name.replace('_', " "))),
        None => match figure.label(name)?.as_str() {
            "true" => Some(name.replace('_', " ")),
            "false" => Some(format!("no {}", name.replace('_', " "))),
            value if matches!(value, "on" | "off") || name == "preempt" => Some(format!("{name} {value}")),
            other => Some(other.to_owned()),
        },
    }
}

fn texts(names: &[&str], figure: &Figure<'_>) -> String {
    names.iter().filter_map(|name| text(name, figure)).collect::<Vec<_>>().join(", ")
}

/// The labels of these figures that still tell some apart when those in `used` are known; the first come first. A label
/// that follows from the others is not among them. The empty name stands for the document.
fn telling<'a>(figures: &[Figure<'a>], used: &[&'a str]) -> Vec<&'a str> {
    let mut names: Vec<&str> = vec![""];
    for figure in figures {
        names.extend(identity(figure.row).map(|(name, _)| name));
    }
    // Sides before everything else: they are what a reader compares.
    let rank = |name: &str| match SIDES.iter().position(|side| *side == name) {
        Some(place) => place,
        None if AMOUNTS.contains(&name) => SIDES.len() + 1,
        None => SIDES.len(),
    };
    names.sort_by_key(|name| (rank(name), *name));
    names.dedup();
    let mut known = used.to_vec();
    for name in names {
        if known.contains(&name) {
            continue;
        }
        let mut seen: HashMap<(&str, Vec<Option<String>>), Option<String>> = HashMap::new();
        let follows = figures.iter().all(|figure| {
            let key = (figure.row.metric(), known.iter().map(|known| figure.label(known)).collect());
            let value = figure.label(name);
            *seen.entry(key).or_insert_with(|| value.clone()) == value
        });
        if !follows {
            known.push(name);
        }
    }
    known.split_off(used.len())
}

/// Labels that name sides, the most telling first.
const SIDES: [&str; 10] =
    ["side", "subject", "function", "primitive", "way", "beside", "kernel", "hvo", "flush", "preempt"];

/// Labels that say how much was done: where another label tells figures apart as well, that one is more telling.
const AMOUNTS: [&str; 4] = ["n", "pages", "size", "runs"];

pub fn by_view(view: &View, all: &[Figure<'_>]) -> Vec<Plot> {
    let metric = |figure: &Figure<'_>| view.metrics.iter().find(|(name, _)| *name == figure.row.metric());
    let figures: Vec<Figure<'_>> = all
        .iter()
        .filter(|figure| metric(figure).is_some())
        .filter(|figure| {
            view.only.is_none_or(|(name, values)| figure.label(name).is_some_and(|value| values.contains(&&*value)))
        })
        .filter(|figure| view.x.is_none_or(|(name, ..)| figure.number(name).is_some()))
        .copied()
        .collect();
    let axis = view.x.map(|(name, title, scale)| (name, title.to_owned(), scale));
    let short = |figure: &Figure<'_>| metric(figure).map_or("", |(_, short)| *short);
    let mut plots = split(view.title, view.note, &figures, axis.as_ref(), view.groups, view.split, &short);
    if let Some(case) = view.crossover {
        for plot in &mut plots {
            plot.marks.extend(overtaking(plot));
            plot.marks.extend(switching(case, all));
        }
    }
    plots
}

/// The plots of a metric of which nothing is known but its labels.
pub fn generic(metric: &str, figures: &[Figure<'_>]) -> Vec<Plot> {
    let telling = telling(figures, &[]);
    let places = |name: &str| {
        let mut values: Vec<f64> = figures.iter().filter_map(|figure| figure.number(name)).collect();
        values.sort_by(f64::total_cmp);
        values.dedup();
        values.len()
    };
    let numbers = telling.iter().filter(|name| figures.iter().all(|figure| figure.number(name).is_some()));
    let x = numbers.copied().filter(|name| places(name) >= 3).max_by_key(|name| places(name));
    let axis = x.map(|name| {
        let scale = match name {
            "order" => Scale::Order,
            _ if BYTES.contains(&name) => Scale::Bytes,
            _ => Scale::Count,
        };
        (name, name.replace('_', " "), scale)
    });
    // The first label names the bars or the lines; the second makes groups, or a plot for each of its values.
    let rest: Vec<&str> = telling.into_iter().filter(|name| Some(*name) != x).collect();
    let others = rest.get(1..).unwrap_or_default();
    let (groups, plots) = if axis.is_some() { (&[][..], others) } else { others.split_at(others.len().min(1)) };
    split(&metric.replace('_', " "), "", figures, axis.as_ref(), groups, plots, &|_| "")
}

/// One plot for each combination of the values of the labels in `by`.
fn split<'a>(
    title: &str,
    note: &'static str,
    figures: &[Figure<'a>],
    axis: Option<&(&'a str, String, Scale)>,
    groups: &[&'a str],
    by: &[&'a str],
    short: &dyn Fn(&Figure<'a>) -> &'static str,
) -> Vec<Plot> {
    let mut parts: Vec<(String, Vec<Figure<'a>>)> = Vec::new();
    for figure in figures {
        let name = texts(by, figure);
        match parts.iter_mut().find(|(other, _)| *other == name) {
            Some((_, part)) => part.push(*figure),
            None => parts.push((name, vec![*figure])),
        }
    }
    let several = parts.len() > 1;
    let build = |(name, figures): (String, Vec<Figure<'a>>)| {
        let title = if several || !name.is_empty() { format!("{title}: {name}") } else { title.to_owned() };
        one(title.trim_end_matches(": "), note, &figures, axis, groups, by, short)
    };
    parts.into_iter().map(build).collect()
}

fn one<'a>(
    title: &str,
    note: &'static str,
    figures: &[Figure<'a>],
    axis: Option<&(&'a str, String, Scale)>,
    groups: &[&'a str],
    by: &[&'a str],
    short: &dyn Fn(&Figure<'a>) -> &'static str,
) -> Plot {
    let used: Vec<&str> = axis.iter().map(|(name, ..)| *name).chain(groups.iter().chain(by).copied()).collect();
    let names = telling(figures, &used);
    let mut places: Vec<String> = Vec::new();
    let mut series: Vec<Series> = Vec::new();
    for figure in figures.iter().filter(|figure| figure.row.value().is_finite()) {
        let x = match axis {
            Some((name, ..)) => figure.number(name).unwrap_or(0.0),
            None => {
                let name = texts(groups, figure);
                let place = places.iter().position(|place| *place == name);
                place.unwrap_or_else(|| {
                    places.push(name);
                    places.len() - 1
                }) as f64
            }
        };
        let point = Point { x, y: figure.row.value(), stdev: figure.row.stdev() };
        let name = [short(figure).to_owned(), texts(&names, figure)];
        let name = name.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(", ");
        match series.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push(point),
            None => series.push(Series { name, points: vec![point] }),
        }
    }
    // hugemm's own first, in the first colour.
    series.sort_by_key(|series| !series.own());
    for series in &mut series {
        series.points.sort_by(|a, b| a.x.total_cmp(&b.x));
    }
    let first = figures.first().map(|figure| figure.row);
    let plot = Plot {
        id: slug(title),
        title: title.to_owned(),
        note,
        x: axis.map_or(X::Groups(places), |(_, title, scale)| X::Numbers(*scale, title.clone())),
        unit: first.map_or(String::new(), |row| row.unit().to_owned()),
        better: first.and_then(better),
        series,
        marks: Vec::new(),
    };
    plot.with_bars_for_few_places()
}

/// Where writing past the cache overtakes the caches: the threshold that loses least over all sizes, as calibration
/// chooses it, of the best of each class. None if it never pays.
fn overtaking(plot: &Plot) -> Option<Mark> {
    let best = |class: PrimitiveClass, x: f64| {
        let of_class = plot.series.iter().filter(|s| Primitive::from_name(&s.name).is_some_and(|p| p.class() == class));
        of_class.filter_map(|series| series.at(x)).map(|point| point.y).reduce(f64::max)
    };
    let places: Vec<(f64, f64, f64)> = plot
        .places()
        .into_iter()
        .filter_map(|x| Some((x, best(PrimitiveClass::Cached, x)?, best(PrimitiveClass::Streaming, x)?)))
        .collect();
    let loss = |from: usize| -> f64 {
        let lost = |(index, (_, cached, bulk)): (usize, &(f64, f64, f64))| {
            let chosen = if index >= from { bulk } else { cached };
            1.0 - chosen / cached.max(*bulk)
        };
        places.iter().enumerate().map(lost).sum()
    };
    let from = (0..=places.len()).min_by(|a, b| loss(*a).total_cmp(&loss(*b)))?;
    let (x, ..) = places.get(from)?;
    if from == 0 {
        return Some(Mark { x: *x, text: "past the cache is faster at every size".to_owned() });
    }
    Some(Mark { x: *x, text: format!("past the cache is faster from {}", Size(*x as u64).rounded()) })
}

/// Where the calibrated policy switches in a case, as `hugemm probe` says it.
fn switching(case: &str, all: &[Figure<'_>]) -> Option<Mark> {
    let row = all
        .iter()
        .find(|figure| figure.row.metric() == "clear.crossover" && figure.label("case").as_deref() == Some(case))?;
    let x = row.row.value();
    Some(Mark { x, text: format!("the policy switches at {}", Size(x as u64).rounded()) })
}

pub fn slug(text: &str) -> String {
    let mut slug = String::new();
    for c in text.chars() {
        match c {
            c if c.is_ascii_alphanumeric() => slug.push(c.to_ascii_lowercase()),
            _ if !slug.is_empty() && !slug.ends_with('-') => slug.push('-'),
            _ => {}
        }
    }
    slug.trim_end_matches('-').to_owned()
}
