//! `hugemm report FILE… --fill PAGE`: the goals' figures of saved results, in the tables of Markdown pages that are there. What stands
//! between two marks is made of the goals' rows and of what was measured.
//!
//! ```text
//! <!-- goals -->            all of them
//! <!-- goals: a.b c.d -->   those
//! …
//! <!-- end -->
//! ```

use crate::document::{Row, SCHEMA};
use crate::goals::{self, ATOMIC, GOALS, Goal, MET};
use crate::saved::{Saved, plain, same_schema};
use crate::unmeasured_args::Report;
use anyhow::{Context, Result, bail};
use hugemm_workloads::size::Size;
use serde_json::Value;

const END: &str = "<!-- end -->";

pub fn run(args: &Report) -> Result<()> {
    let documents = args.files.iter().map(|file| Saved::read(file)).collect::<Result<Vec<_>>>()?;
    let saved = || args.files.iter().zip(&documents);
    same_schema(saved())?;
    if let Some((file, old)) = saved().find(|(_, saved)| saved.schema != SCHEMA) {
        bail!(
            "{} has schema {}: its goals were measured differently from those that the page defines; measure again",
            file.display(),
            old.schema
        );
    }
    for page in &args.fill {
        let text = std::fs::read_to_string(page).with_context(|| format!("cannot read {}", page.display()))?;
        let Some(filled) = filled(&text, &documents) else {
            bail!("{} has no mark '<!-- goals -->' to fill", page.display());
        };
        std::fs::write(page, filled).with_context(|| format!("cannot write {}", page.display()))?;
        println!("figures put into {}", page.display());
    }
    Ok(())
}

/// The page with its figures; `None` if it has no such mark.
fn filled(page: &str, documents: &[Saved]) -> Option<String> {
    let (mut out, mut found, mut skips) = (String::with_capacity(page.len()), false, false);
    for line in page.lines() {
        skips &= line.trim() != END;
        if !skips {
            out += &format!("{line}\n");
        }
        if let Some(names) = line.trim().strip_prefix("<!-- goals").and_then(|rest| rest.strip_suffix("-->")) {
            (found, skips) = (true, true);
            out += &block(names.trim_start_matches(':').split_whitespace().collect(), documents);
        }
    }
    found.then_some(out)
}

fn figures(documents: &[Saved]) -> impl Iterator<Item = &Row> {
    documents.iter().flat_map(|saved| &saved.results)
}

/// By what and where it was measured, and a row for each goal.
fn block(names: Vec<&str>, documents: &[Saved]) -> String {
    let sources = documents.iter().map(|saved| {
        let atomic = saved.results.iter().find(|row| row.metric() == ATOMIC);
        let atomic =
            atomic.map_or(String::new(), |row| format!("; an uncontended atomic takes {:.1} ns there", row.value()));
        format!("`hugemm {}` on {}{atomic}", command_name(&saved.command), machine(&saved.environment))
    });
    let verdicts: Vec<_> = figures(documents).filter_map(goals::verdict_of).collect();
    let count = goals::count(verdicts.iter().copied());
    let mut out = format!("By {}. {count}.\n", sources.collect::<Vec<_>>().join(", "));
    let mut command = "";
    for goal in GOALS.iter().filter(|goal| names.is_empty() || names.contains(&goal.name)) {
        // All of them by their commands, a few in one table.
        if command.is_empty() || names.is_empty() && command != goal.by {
            let by = if names.is_empty() { format!("\n`hugemm {}`\n", goal.by) } else { String::new() };
            out += &format!("{by}\n| goal | what is compared | wanted | measured | |\n|---|---|---:|---:|---|\n");
            command = goal.by;
        }
        out += &line(goal, documents);
    }
    out
}

fn line(goal: &Goal, documents: &[Saved]) -> String {
    let row = figures(documents).find(|row| row.metric() == goal.name);
    let verdict = match row.and_then(goals::verdict_of) {
        Some(MET) => MET,
        None | Some("beside") => "",
        Some(other) => &format!("**{other}**"),
    };
    let figure = row.map_or("–".to_owned(), measured);
    format!("| `{}` | {} | {} | {figure} | {verdict} |\n", goal.name, goal.says, goal.wanted())
}

fn measured(row: &Row) -> String {
    // A ratio has no unit to print.
    let unit = if row.unit() == "ratio" { "" } else { row.unit() };
    let deviation = if row.stdev() == 0.0 { String::new() } else { format!(" ±{}", number(row.stdev())) };
    format!("{}{deviation} {unit}", number(row.value())).trim_end().to_owned()
}

/// A number with three significant digits, all of them if it is whole.
fn number(value: f64) -> String {
    match value.abs() {
        _ if value.is_nan() => "–".to_owned(),
        size if size < 1e15 && (size >= 100.0 || value.fract() == 0.0) => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 0.01 => format!("{value:.2}"),
        size if size >= 0.001 => format!("{value:.3}"),
        _ => format!("{value:.1e}"),
    }
}

/// The name of a command line: its words up to the first option.
fn command_name(line: &str) -> String {
    let words = line.split_whitespace().take_while(|word| !word.starts_with('-') && !word.contains(['/', '.']));
    words.collect::<Vec<_>>().join(" ")
}

/// The machine, as far as a document of any version says.
fn machine(environment: &Value) -> String {
    let text = |pointer| environment.pointer(pointer).filter(|value| !value.is_null()).map(plain);
    let cpus = environment.pointer("/cpu/allowed_cpus").and_then(Value::as_array).map(Vec::len);
    let memory = environment.pointer("/memory/total_bytes").and_then(Value::as_u64);
    let parts = [
        text("/cpu/model"),
        cpus.map(|cpus| format!("{cpus} CPUs")),
        memory.map(|bytes| Size(bytes).rounded()),
        text("/kernel/release").map(|release| format!("Linux {release}")),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::verdict;
    use serde_json::json;

    #[test]
    fn marks_are_filled_and_nothing_else_changes() {
        let row = |goal: &Goal, value| verdict(Row::single(goal.name, value, "ratio"), goal.bound, goal.wanted);
        let results =
            vec![row(&GOALS[0], 0.99), row(&GOALS[1], 2.0), row(&GOALS[2], 1.5), Row::single(ATOMIC, 8.04, "ns")];
        let documents = [Saved {
            schema: 2,
            command: "bench headline --json=h".into(),
            version: String::new(),
            environment: json!({"cpu": {"model": "X"}}),
            results,
        }];
        let page = format!(
            "text\n\n<!-- goals: {} x -->\nBEFORE\n<!-- end -->\n\n| a |\n<!-- goals -->\n<!-- end -->\n",
            GOALS[1].name
        );
        let filled = filled(&page, &documents).expect("it has marks");
        let by = "By `hugemm bench headline` on X; an uncontended atomic takes 8.0 ns there. 1 goals are met, 1 missed, 0 not told apart.\n";
        let (few, all) = filled.split_once("| a |").expect("the rest stays");
        assert!(few.starts_with("text\n\n") && few.contains(by) && !few.contains("BEFORE"), "{few}");
        assert!(
            few.contains(&format!("| `{}` | {} | ≥ 2.2 × | 2 | **missed** |\n", GOALS[1].name, GOALS[1].says)),
            "{few}"
        );
        assert_eq!(few.matches("| `").count(), 1);
        assert_eq!(all.matches("\n| `").count(), GOALS.len(), "a row each: {all}");
        assert!(all.contains("| 0.99 | met |") && all.contains("| – | 1.50 |  |") && all.contains("| – |  |"), "{all}");
        assert_eq!(super::filled("| `clear.bulk_vs_rep_stosb` | no mark |\n", &documents), None);
    }

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
