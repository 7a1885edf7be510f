//! `hugemm bench headline`: every goal that this machine can measure, by the commands that measure it.
//!
//! Each step is this program again, as a process of its own: none finds what another has left of memory, and there is no
//! second way to measure anything. What is kept of a step's document are the rows that have a goal.

use crate::args::Common;
use crate::document::Row;
use crate::goals::{Bound, NOTE};
use crate::machine::Machine;
use crate::results::Results;
use crate::saved::Saved;
use crate::stats::Samples;
use crate::{progress, table};
use anyhow::{Context, Result, bail};
use clap::Args;
use hugemm_inspect::interrupt;
use std::hint::black_box;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// How the goals are chosen and what else there is.
pub fn help() -> String {
    let names: Vec<_> = crate::headline::goals().collect();
    format!("The goals:\n  {}\n\ndocs/goals.md says what each is.", names.join("\n  "))
}

#[derive(Debug, Args)]
pub struct Headline {
    /// Only goals whose names begin like this: `clear`, `frames.free`, … [default: all].
    #[arg(long, value_name = "PREFIX", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Passes over all goals; with several, the median is judged.
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: u32,
    #[command(flatten)]
    pub common: Common,
}

struct Step {
    command: &'static str,
    goals: &'static [&'static str],
}

/// The commands, as short as their figures bear, and the goals in the order of docs/goals.md.
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
        goals: &["frames.pair0_1t_atomics", "frames.pair0_2t_atomics", "frames.counted_pair0_over_floor"],
    },
    Step { command: "bench alloc --pattern pair --orders 6 --threads 1 --no-peers", goals: &["frames.pair6_atomics"] },
    Step {
        command: "bench alloc --pattern bulk,random --orders 0 --threads 1 --held 131072 --runs 9",
        goals: &["frames.free0_bulk_1t_vs_best", "frames.free0_random_1t_vs_best"],
    },
    Step {
        command: "bench alloc --pattern random --orders 0 --threads 2 --held 131072 --no-peers",
        goals: &["frames.free0_random_2t_atomics"],
    },
    Step {
        command: "bench alloc --pattern random --orders 9 --threads 2 --no-peers",
        goals: &["frames.alloc9_random_2t_atomics", "frames.free9_random_2t_atomics"],
    },
    Step { command: "bench churn --seconds 1", goals: &["frames.churn_2m_vs_best"] },
    Step {
        command: "bench alloc --pattern bulk --orders 9 --threads 2 --no-peers",
        goals: &["frames.alloc9_2t_ns", "frames.free9_2t_ns"],
    },
    Step {
        command: "bench free --order 9,18 --no-peers",
        goals: &[
            "frames.free512_range_atomics",
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
            "paging.protect_tables_speedup",
            "paging.protect_rewrite1_speedup",
            "paging.protect_rewrite10_speedup",
            "paging.protect_rewrite100_speedup",
            "paging.first_write_ns",
            "paging.map_scattered_speedup",
            "paging.unmap_scattered_speedup",
            "paging.map_scattered16k_speedup",
            "paging.unmap_scattered16k_speedup",
            "paging.map_scattered64k_speedup",
            "paging.unmap_scattered64k_speedup",
            "paging.map_existing_speedup",
            "paging.unmap_existing_speedup",
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
        goals: &["age.flushes", "age.flush_share_pct", "age.speedup_4k", "age.reclaim_of_ceiling_4k"],
    },
    Step {
        command: "bench vm-create --how demand,prefault --workers 1 --clear bulk --from frames --runs 9",
        goals: &["fault.outside_clear_pct", "vm.create_vs_host_kernel"],
    },
];

/// What no process can measure, and the command that does.
const ELSEWHERE: &[(&str, &str)] = &[
    ("pool.on_vs_linux_off", "hugemm linux VMLINUZ --reference -- bench pool -n 2000"),
    ("age.vs_linux, age.vs_linux_cpu", "hugemm linux VMLINUZ --accel icount --cpus 1 --reference -- bench age"),
    ("frames.pair0_* with interrupts turned off and on", "hugemm boot -- bench alloc"),
];

/// The metric of an uncontended atomic, by which times of different machines can be told apart.
pub const ATOMIC: &str = "machine.atomic";

/// Nanoseconds of a locked add to a line that no other CPU uses.
pub fn atomic() -> Samples {
    const ADDS: u32 = 2_000_000;
    const RUNS: u32 = 7;
    let (mut samples, counter) = (Samples::default(), Box::new(AtomicU64::new(0)));
    // Once: in the loop it would be a store before each add, which has to wait for it.
    let counter = black_box(&*counter);
    // The first only bring the CPU to its speed.
    for turn in 0..2 * RUNS {
        let start = Instant::now();
        for _ in 0..ADDS {
            // Relaxed: the cost is the lock's, whatever is ordered.
            counter.fetch_add(1, Ordering::Relaxed);
        }
        if turn >= RUNS {
            samples.push(start.elapsed().as_nanos() as f64 / f64::from(ADDS));
        }
    }
    samples
}

/// The names of all goals, in the order of docs/goals.md.
pub fn goals() -> impl Iterator<Item = &'static str> {
    STEPS.iter().flat_map(|step| step.goals).copied()
}

/// What a goal came to: a row per pass.
struct Line {
    metric: &'static str,
    command: &'static str,
    rows: Vec<Row>,
}

pub fn run(args: &Headline) -> Result<()> {
    let machine = Machine::new(&args.common)?;
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
    let bar = progress::bar(wanted.len() as u64 * u64::from(args.runs), machine.quiet());
    let (mut failed, mut atomics) = (Vec::new(), Samples::default());
    for _ in 0..args.runs {
        for step in &wanted {
            interrupt::check()?;
            // All along, as the goals that count in it have it: at one moment somebody else may have had the machine.
            atomics.push(atomic().median());
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
    let atomic = Row::median(ATOMIC, &atomics, "ns");
    let results: Vec<(&Line, Option<Row>)> = lines.iter().map(|line| (line, judged(&line.rows))).collect();
    let mut shown = shown(&results);
    shown.remarks.push(format!("an uncontended atomic takes {:.1} ns on this machine", atomic.value()));
    shown.remarks.extend(failed.iter().map(|line| format!("failed: {line}")));
    if !machine.quiet() {
        machine.print_environment();
        shown.print();
    }
    let rows: Vec<Row> = results.into_iter().filter_map(|(_, row)| row).collect();
    if rows.is_empty() {
        bail!("nothing could be measured: {}", failed.first().map_or("no command had a goal", String::as_str));
    }
    machine.save(rows.into_iter().chain([atomic]).collect())
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

/// What all passes come to: their median, judged anew by the goal that the rows name. A row that no command has judged
/// by a goal and a bound is not met, whatever it says of itself.
fn judged(rows: &[Row]) -> Option<Row> {
    let first = rows.first()?;
    let samples = rows.iter().map(Row::value).collect();
    let mut row = match rows.len() {
        1 => first.clone(),
        _ => Row::median(first.metric().to_owned(), &samples, first.unit().to_owned()),
    };
    let goal = first.labels().get("goal").and_then(serde_json::Value::as_f64);
    let met = goal.zip(Bound::of(first)).map(|(goal, bound)| bound.is_met(row.value(), goal));
    for (name, value) in first.labels() {
        row = row.label(name, value.clone());
    }
    Some(row.label("met", met == Some(true)))
}

fn shown(results: &[(&Line, Option<Row>)]) -> Results {
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
    let mut remarks = vec![format!("{met} of {measured} are met on this machine")];
    remarks.extend(missing.iter().map(|line| format!("not measured: {line} has no such figure on this machine")));
    for (line, row) in results {
        let note = row.as_ref().and_then(|row| row.labels().get(NOTE)?.as_str());
        remarks.extend(note.map(|note| format!("{}: {note}", line.metric)));
    }
    remarks.extend(ELSEWHERE.iter().map(|(metric, command)| format!("not measured here: {metric}: {command}")));
    Results { tables: vec![("Goals".to_owned(), lines)], remarks, ..Results::default() }
}

/// A figure with so many decimals that it can be told from its goal.
fn exact(value: f64) -> String {
    if value.abs() < 1000.0 { format!("{value:.2}") } else { format!("{value:.0}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::Goals;

    /// What a command says of a figure, as `once` reads it.
    fn row(metric: &str, values: &[f64], goal: f64, at_least: bool) -> Row {
        let samples = values.iter().copied().collect();
        let mut goals = Goals::new();
        match at_least {
            true => goals.at_least(metric, &samples, goal),
            false => goals.at_most(metric, &samples, "count", goal),
        }
        goals.into_rows().next().expect("one")
    }

    fn met(rows: &[Row]) -> bool {
        judged(rows).expect("a row").labels()["met"].as_bool().expect("judged")
    }

    /// Every goal of the headline turns red when its figure is on the wrong side, and only then.
    #[test]
    fn every_goal_can_be_missed() {
        for metric in goals() {
            for (at_least, good, bad) in [(true, 5.0, 4.99), (false, 5.0, 5.01)] {
                assert!(met(&[row(metric, &[good], 5.0, at_least)]), "{metric}");
                assert!(!met(&[row(metric, &[bad], 5.0, at_least)]), "{metric}");
                // Over passes the median counts: one bad pass is forgiven, two of three are not.
                let [good, bad] = [good, bad].map(|value| row(metric, &[value], 5.0, at_least));
                assert!(met(&[good.clone(), bad.clone(), good.clone()]), "{metric}");
                assert!(!met(&[bad.clone(), good, bad]), "{metric}");
            }
        }
    }

    #[test]
    fn every_goal_is_defined_in_the_documentation() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/goals.md");
        let page = std::fs::read_to_string(page).expect("docs/goals.md");
        let missing: Vec<_> = goals().filter(|goal| !page.contains(&format!("| `{goal}` | "))).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }

    /// What a row claims does not count; what it measured does. A count of which none is wanted is missed by one.
    #[test]
    fn a_claim_is_no_verdict() {
        assert!(!met(&[row("age.flushes", &[1.0], 0.0, false).label("met", true)]));
        assert!(met(&[row("age.flushes", &[0.0], 0.0, false)]));
        assert!(!met(&[Row::single("age.flushes", 0.0, "count").label("met", true)]), "nothing was wanted");
        assert!(!met(&[row("paging.map4k_speedup", &[f64::NAN], 10.0, true)]), "no number is no success");
    }
}
