//! `hugemm bench headline`: every goal that this machine can measure, by the commands that measure it.
//!
//! Each step is this program again, as a process of its own: none finds what another has left of memory, and there is no
//! second way to measure anything. What is kept of a step's document are the rows that have a goal.

pub mod args;

use crate::document::{self, Document, Row};
use crate::goals::Bound;
use crate::headline::args::Headline;
use crate::saved::Saved;
use crate::stats::Samples;
use crate::{environment_text, progress, table};
use anyhow::{Context, Result, bail};
use hugemm_host::environment::Environment;
use hugemm_host::interrupt;
use std::process::{Command, Stdio};

/// A command, and the goals that its document has.
struct Step {
    command: &'static str,
    goals: &'static [&'static str],
}

/// The commands, as short as their figures bear, and the goals of the design in its order.
const STEPS: &[Step] = &[
    Step {
        command: "probe --runs 5",
        goals: &[
            "clear.bulk_vs_best_stream",
            "clear.bulk_vs_rep_stosb",
            "clear.worst_vs_best_hot",
            "clear.worst_vs_best_cold",
            "clear.worst_vs_best_cold_touched",
            "clear.worst_unit_ms",
        ],
    },
    Step {
        command: "bench alloc --pattern pair --orders 0 --threads 1,2 --counted --no-peers",
        goals: &["frames.pair0_1t_ns", "frames.pair0_2t_ns", "frames.counted_pair0_ns"],
    },
    Step {
        command: "bench alloc --pattern bulk --orders 9 --threads 2 --no-peers",
        goals: &["frames.alloc9_2t_ns", "frames.free9_2t_ns"],
    },
    Step {
        command: "bench free --order 9,18 --no-peers",
        goals: &[
            "frames.free512_range_ns",
            "frames.free512_speedup",
            "frames.free512_parts_2t_ratio",
            "frames.free_frozen_1g_ns",
            "frames.metadata_pct",
        ],
    },
    Step {
        command: "bench map --size 64GB --runs 3",
        goals: &[
            "paging.map4k_speedup",
            "paging.unmap4k_speedup",
            "paging.protect4k_speedup",
            "paging.protect4k_live_speedup",
        ],
    },
    Step {
        command: "bench pool --hvo off,on --flush batch",
        goals: &[
            "frames.metadata_pct_pool",
            "pool.extra_ns_up",
            "pool.extra_ns_down",
            "pool.flushes_up",
            "pool.flushes_down",
        ],
    },
    Step {
        command: "bench age --young batch --lru classic --seconds 1",
        goals: &["age.flushes", "age.flush_share_pct", "age.speedup_4k"],
    },
    Step {
        command: "bench vm-create --how demand,prefault --workers 1 --clear bulk",
        goals: &["fault.outside_clear_pct", "vm.create_vs_host_kernel"],
    },
];

/// Goals that no process can measure, and the command that does.
const ELSEWHERE: &[(&str, &str)] =
    &[("pool.on_vs_linux_off", "hugemm linux VMLINUZ --reference -- bench pool -n 2000")];

/// What has to be known to read a figure: goals whose names begin so, and the note.
const NOTES: &[(&str, &str)] = &[(
    "paging.protect4k",
    "whole tables are made read-only, without a look at their leaves; 'hugemm bench map' also shows the same leaf by leaf",
)];

/// The names of all goals, in the order of the design.
pub fn goals() -> impl Iterator<Item = &'static str> {
    STEPS.iter().flat_map(|step| step.goals).copied()
}

/// What a goal came to: a row per pass.
struct Line {
    metric: &'static str,
    command: &'static str,
    rows: Vec<Row>,
}

/// Runs the command.
pub fn run(args: &Headline) -> Result<()> {
    document::check_writable(args.common.json.as_deref())?;
    let quiet = args.common.json_only();
    let environment = Environment::read()?;
    let mut lines: Vec<Line> = STEPS
        .iter()
        .flat_map(|step| step.goals.iter().map(|metric| Line { metric, command: step.command, rows: Vec::new() }))
        .filter(|line| args.only.is_empty() || args.only.iter().any(|prefix| line.metric.starts_with(prefix.as_str())))
        .collect();
    let wanted: Vec<&Step> =
        STEPS.iter().filter(|step| lines.iter().any(|line| step.goals.contains(&line.metric))).collect();
    if wanted.is_empty() {
        bail!("no goal begins with '{}'; 'hugemm bench headline --help' has them all", args.only.join("' or '"));
    }
    let bar = progress::bar(wanted.len() as u64 * u64::from(args.runs), quiet);
    let mut failed = Vec::new();
    for _ in 0..args.runs {
        for step in &wanted {
            interrupt::check()?;
            bar.set_message(format!("hugemm {}", step.command));
            match once(step.command) {
                Ok(rows) => {
                    for row in rows {
                        let place = lines.iter_mut().find(|line| line.metric == row.metric());
                        place.into_iter().for_each(|line| line.rows.push(row.clone()));
                    }
                }
                Err(error) => {
                    interrupt::check()?;
                    failed.push(format!("hugemm {}: {error:#}", step.command));
                }
            }
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let results: Vec<(&Line, Option<Row>)> = lines.iter().map(|line| (line, judged(&line.rows))).collect();
    if !quiet {
        environment_text::print(&environment);
        print(&results);
        for line in &failed {
            println!("  failed: {line}");
        }
    }
    let rows: Vec<Row> = results.into_iter().filter_map(|(_, row)| row).collect();
    if rows.is_empty() {
        bail!("nothing could be measured: {}", failed.first().map_or("no command had a goal", String::as_str));
    }
    Document::new(environment, rows).write(args.common.json.as_deref())
}

/// Runs one command of this program and returns the rows of its document that have a goal.
fn once(command: &str) -> Result<Vec<Row>> {
    let program = std::env::current_exe().context("this program cannot be found again")?;
    let output = Command::new(program)
        .args(command.split(' '))
        .arg("--json")
        .stdin(Stdio::null())
        .output()
        .context("this program cannot be started again")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.trim().trim_start_matches("hugemm: ");
        bail!("{}", if said.is_empty() { output.status.to_string() } else { said.to_owned() });
    }
    let saved = Saved::from_bytes(&output.stdout)?;
    Ok(saved.results.into_iter().filter(|row| row.labels().contains_key("goal")).collect())
}

/// One pass as it is, or the median of several.
fn judged(rows: &[Row]) -> Option<Row> {
    let first = rows.first()?;
    if rows.len() == 1 {
        return Some(first.clone());
    }
    let mut samples = Samples::default();
    rows.iter().for_each(|row| samples.push(row.value()));
    let mut row = Row::median(first.metric().to_owned(), &samples, first.unit().to_owned());
    let goal = first.labels().get("goal").and_then(serde_json::Value::as_f64);
    let met = goal.zip(Bound::of(first)).map(|(goal, bound)| bound.is_met(row.value(), goal));
    for (name, value) in first.labels() {
        row = row.label(name, value.clone());
    }
    Some(met.map_or(row.clone(), |met| row.label("met", met)))
}

fn print(results: &[(&Line, Option<Row>)]) {
    let mut lines = table::new(["goal", "wanted", "measured", "± stdev", "met"]);
    let mut missing = Vec::new();
    let (mut met, mut measured) = (0, 0);
    for (line, row) in results {
        let Some(row) = row else {
            missing.push(format!("{} (hugemm {})", line.metric, line.command));
            continue;
        };
        let label = |name: &str| row.labels().get(name);
        let goal = label("goal").and_then(serde_json::Value::as_f64).unwrap_or(f64::NAN);
        let yes = label("met").and_then(serde_json::Value::as_bool) == Some(true);
        (met, measured) = (met + u32::from(yes), measured + 1);
        let unit = if row.unit() == "ratio" { "×".to_owned() } else { format!(" {}", row.unit()) };
        lines.add_row([
            row.metric().to_owned(),
            format!("{} {goal}{unit}", Bound::of(row).map_or("", Bound::sign)),
            exact(row.value()),
            if row.runs() > 1 { exact(row.stdev()) } else { String::new() },
            if yes { "yes" } else { "NO" }.to_owned(),
        ]);
    }
    table::print("Goals", &lines);
    println!("\n  {met} of {measured} are met on this machine");
    for line in missing {
        println!("  not measured: {line} has no such figure on this machine");
    }
    for (prefix, note) in NOTES {
        if results.iter().any(|(line, row)| row.is_some() && line.metric.starts_with(prefix)) {
            println!("  {prefix}_*: {note}");
        }
    }
    for (metric, command) in ELSEWHERE {
        println!("  not measured here: {metric}: {command}");
    }
}

/// A figure with so many decimals that it can be told from its goal.
fn exact(value: f64) -> String {
    if value.abs() < 1000.0 { format!("{value:.2}") } else { format!("{value:.0}") }
}
