//! `hugemm bench headline`: every goal that this machine can measure, by the commands that measure it.
//!
//! Each step is this program again, as a process of its own: none finds what another has left of memory, and there is no
//! second way to measure anything. What is kept of a step's document are the rows that have a goal.

use crate::document::Row;
use crate::goals::{self, ATOMIC, Bound, GOALS, Goal};
use crate::machine::Machine;
use crate::options::Common;
use crate::progress;
use crate::results::Results;
use crate::saved::Saved;
use crate::stats::Samples;
use anyhow::{Context, Result, bail};
use clap::Args;
use hugemm_inspect::interrupt;
use std::hint::black_box;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The goals by their commands.
pub fn help() -> String {
    let mut text = "The goals, and the commands that measure them:".to_owned();
    for (index, goal) in GOALS.iter().enumerate() {
        if index == 0 || GOALS[index - 1].by != goal.by {
            text += &format!("\n  hugemm {}", goal.by);
        }
        text += &format!("\n    {} {}", goal.name, goal.wanted());
    }
    text + "\n\ndocs/goals.md says what each compares."
}

#[derive(Debug, Args)]
pub struct Headline {
    /// Only goals whose names begin like this: `clear`, `frames.free`, … [default: all].
    #[arg(long, value_name = "PREFIX", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Passes over all goals; with several, their median is judged over their spread.
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: u32,
    #[command(flatten)]
    pub common: Common,
}

/// What takes longer is announced when the first pass is over.
const SOON: Duration = Duration::from_secs(300);

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

pub fn run(args: &Headline) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let wanted = |goal: &Goal| args.only.is_empty() || args.only.iter().any(|prefix| goal.name.starts_with(&**prefix));
    let mut lines: Vec<(&Goal, Vec<Row>)> =
        GOALS.iter().filter(|goal| goal.is_of_headline() && wanted(goal)).map(|goal| (goal, Vec::new())).collect();
    let mut commands: Vec<&str> = Vec::new();
    for (goal, _) in &lines {
        if !commands.contains(&goal.by) {
            commands.push(goal.by);
        }
    }
    if commands.is_empty() {
        bail!("no goal begins with '{}'; 'hugemm bench headline --help' has them all", args.only.join("' or '"));
    }
    let bar = progress::bar(commands.len() as u64 * u64::from(args.runs), machine.quiet());
    let (mut failed, mut atomics, start) = (Vec::new(), Samples::default(), Instant::now());
    for pass in 0..args.runs {
        let all = start.elapsed() * args.runs;
        if pass == 1 && all > SOON && !machine.quiet() {
            eprintln!(
                "a pass takes {} s; all {} take {} min",
                start.elapsed().as_secs(),
                args.runs,
                all.as_secs() / 60 + 1
            );
        }
        for command in &commands {
            interrupt::check()?;
            // All along, as the goals that count in it have it: at one moment somebody else may have had the machine.
            atomics.push(atomic().median());
            bar.set_message(format!("hugemm {command}"));
            match once(command) {
                Ok(rows) => {
                    for row in rows {
                        let place = lines.iter_mut().find(|(goal, _)| goal.name == row.metric && goal.by == *command);
                        place.into_iter().for_each(|(_, rows)| rows.push(row.clone()));
                    }
                }
                Err(error) => {
                    interrupt::check()?;
                    failed.push(format!("failed: hugemm {command}: {error:#}"));
                }
            }
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let atomic = Row::median(ATOMIC, &atomics, "ns");
    let rows: Vec<Row> = lines.iter().filter_map(|(goal, rows)| judged(goal, rows)).collect();
    if !machine.quiet() {
        machine.print_environment();
        let mut remarks = vec![
            goals::count(rows.iter().filter_map(goals::verdict_of)),
            format!("an uncontended atomic takes {:.1} ns on this machine", atomic.value),
        ];
        let missing = lines.iter().filter(|(_, rows)| rows.is_empty());
        remarks.extend(missing.map(|(goal, _)| format!("{} has no such figure here: hugemm {}", goal.name, goal.by)));
        remarks.extend(failed.iter().cloned());
        let elsewhere = GOALS.iter().filter(|goal| !goal.is_of_headline());
        remarks.extend(elsewhere.map(|goal| format!("not measured here: {}: hugemm {}", goal.name, goal.by)));
        let tables = vec![("Goals".to_owned(), goals::table(&rows))];
        Results { tables, remarks, ..Results::default() }.print(&[]);
    }
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
    Ok(saved.results.into_iter().filter(|row| Bound::of(row).is_some()).collect())
}

/// What all passes come to, judged anew: what a row says of itself is no verdict.
fn judged(goal: &Goal, rows: &[Row]) -> Option<Row> {
    let row = match rows {
        [] => return None,
        [row] => row.clone(),
        [first, ..] => {
            let samples = rows.iter().map(|row| row.value).collect();
            Row::median(first.metric.clone(), &samples, first.unit.clone())
        }
    };
    Some(goals::verdict(row, goal.bound, goal.wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(name: &str, rows: &[Row]) -> String {
        let goal = GOALS.iter().find(|goal| goal.name == name).expect("a goal");
        goals::verdict_of(&judged(goal, rows).expect("a row")).expect("judged").to_owned()
    }

    /// What a row claims does not count; what it measured does. A count of which none is wanted is missed by one.
    #[test]
    fn a_claim_is_no_verdict() {
        let row = |value| Row::single("age.flushes", value, "count");
        assert_eq!(said("age.flushes", &[row(1.0).label("verdict", goals::MET)]), goals::MISSED);
        assert_eq!(said("age.flushes", &[row(0.0)]), goals::MET);
        // Over passes the median counts, unless they spread beyond what is wanted.
        assert_eq!(said("age.flushes", &[row(0.0), row(1.0), row(0.0)]), goals::NOT_TOLD_APART);
    }

    /// The page says of each goal what its row says.
    #[test]
    fn every_goal_is_defined_in_the_documentation() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/goals.md");
        let page = std::fs::read_to_string(page).expect("docs/goals.md");
        for goal in &GOALS {
            let row = format!("| `{}` | {} | {} | ", goal.name, goal.says, goal.wanted());
            assert!(page.contains(&row), "not in docs/goals.md, which 'hugemm report --fill' fills: {row}");
        }
    }
}
