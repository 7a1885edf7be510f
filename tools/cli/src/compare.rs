//! `hugemm compare A B`: the figures of saved documents side by side, and whether any got worse.

mod environments;
mod judge;
mod sides;

use crate::document::{Document, Row};
use crate::saved::{Saved, same_schema};
use crate::sides::figure;
use crate::table;
use crate::unmeasured_args::Compare;
use anyhow::{Context, Result, bail};
use hugemm_inspect::environment::Environment;
use hugemm_workloads::words::Named;
use judge::{Judgement, Verdict};
use serde_json::json;
use sides::{Pair, Paired, pair};
use std::path::PathBuf;

/// Some figures got worse. The command's exit code is 1 for this, and 2 when nothing could be compared.
#[derive(Debug, thiserror::Error)]
#[error("{worse} of {of} figures are worse by more than {threshold} % and the noise")]
pub struct Regression {
    worse: usize,
    of: usize,
    threshold: f64,
}

pub fn run(args: &Compare) -> Result<()> {
    let (a, b) = (read(&args.a.0)?, read(&args.b.0)?);
    let quiet = args.common.json_only();
    same_schema(args.a.0.iter().chain(&args.b.0).zip(a.iter().chain(&b)))?;
    let Paired { pairs, missing, added } = pair(&a, &b);
    if pairs.is_empty() {
        bail!(
            "{} and {} have no figure in common (same metric and labels); compare documents of the same command and \
             options",
            names(&args.a.0),
            names(&args.b.0)
        );
    }
    let judged: Vec<(Pair, Judgement)> = pairs
        .into_iter()
        .map(|pair| {
            let judgement = judge::judge(&pair, args.threshold);
            (pair, judgement)
        })
        .collect();
    let differences = environments::differences(&a, &b);
    if !quiet {
        print(args, &judged, &missing, &added, &differences);
    }
    if args.common.json.is_some() {
        let mut document = serde_json::to_value(Document::new(Environment::read()?, rows(&judged)))?;
        // What belongs to the comparison as a whole; fields are only ever added.
        document["compare"] = json!({
            "a": side(&args.a.0, &a),
            "b": side(&args.b.0, &b),
            "threshold_percent": args.threshold,
            "environment": differences.iter().map(|d| json!({"what": d.what, "a": d.a, "b": d.b})).collect::<Vec<_>>(),
            "missing": missing,
            "added": added,
        });
        crate::document::write(&document, args.common.json.as_deref())?;
    }
    let worse = judged.iter().filter(|(_, judgement)| judgement.verdict == Verdict::Worse).count();
    if worse > 0 {
        return Err(Regression { worse, of: judged.len(), threshold: args.threshold }.into());
    }
    Ok(())
}

fn read(files: &[PathBuf]) -> Result<Vec<Saved>> {
    files.iter().map(|file| Saved::read(file)).collect::<Result<_>>().context("nothing was compared")
}

fn names(files: &[PathBuf]) -> String {
    files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn side(files: &[PathBuf], saved: &[Saved]) -> serde_json::Value {
    let documents = files.iter().zip(saved);
    documents.map(|(file, saved)| json!({"file": file, "command": saved.command, "version": saved.version})).collect()
}

fn print(
    args: &Compare,
    judged: &[(Pair, Judgement)],
    missing: &[String],
    added: &[String],
    differences: &[environments::Difference],
) {
    println!("A  {}\nB  {}", names(&args.a.0), names(&args.b.0));
    if !differences.is_empty() {
        let mut lines = table::new(["", "A", "B"]);
        for difference in differences {
            lines.add_row([difference.what, &difference.a, &difference.b]);
        }
        table::print("These environments differ, so differences below may be theirs", &lines);
    }
    let mut lines = table::new(["figure", "unit", "A", "B", "difference", "± noise", "verdict"]);
    for (pair, judgement) in judged.iter().filter(|(_, j)| args.all || j.verdict != Verdict::Same) {
        lines.add_row([
            pair.name.clone(),
            pair.unit.clone(),
            figure(pair.a.value),
            figure(pair.b.value),
            percent(judgement.percent),
            judgement.noise.map_or("–".to_owned(), |noise| format!("{noise:.1} %")),
            judgement.verdict.name().to_owned(),
        ]);
    }
    if !lines.is_empty() {
        table::print("Figures, B against A; noise is the half-width of the difference's 99 % interval", &lines);
    }
    for (title, names) in [("Only in A", missing), ("Only in B", added)] {
        if !names.is_empty() {
            println!("\n{title}");
            names.iter().for_each(|name| println!("  {name}"));
        }
    }
    let count = |verdict| judged.iter().filter(|(_, j)| j.verdict == verdict).count();
    println!(
        "\n{} figures: {}",
        judged.len(),
        Verdict::ALL.iter().map(|v| format!("{} {}", count(*v), v.name())).collect::<Vec<_>>().join(", ")
    );
    for (pair, verdict) in judged.iter().filter_map(|(pair, _)| Some((pair, pair.goal_change()?))) {
        println!("  goal {}: {verdict}", pair.name);
    }
}

fn percent(value: Option<f64>) -> String {
    value.map_or("from 0".to_owned(), |value| format!("{value:+.1} %"))
}

/// One row for each figure: the difference in percent, with both sides as labels.
fn rows(judged: &[(Pair, Judgement)]) -> Vec<Row> {
    judged
        .iter()
        .map(|(pair, judgement)| {
            let value = judgement.percent.unwrap_or(f64::NAN);
            let mut row = Row::single(format!("compare.{}", pair.metric), value, "percent");
            for (name, value) in &pair.labels {
                row = row.label(name, value.clone());
            }
            row.label("a", pair.a.value)
                .label("b", pair.b.value)
                .label("of_unit", pair.unit.as_str())
                .label("noise_percent", judgement.noise)
                .label("verdict", judgement.verdict.name())
        })
        .collect()
}
