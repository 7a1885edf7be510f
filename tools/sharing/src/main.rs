//! `make sharing`: which cache lines two CPUs share when they do the same thing at once, counted on one. See docs/scale.md.
//!
//! | file | the rule it owns |
//! |---|---|
//! | `pairs.rs` | how a pair is traced, as which CPUs |
//! | `pairs/memory.rs`, `pairs/spaces.rs`, `pairs/reclaim.rs` | which operations |
//! | `machine.rs` | what they are traced on |
//! | `trace.rs` | which words an operation touches |
//! | `names.rs` | what a word is called |
//! | `main.rs` | which lines are shared; the golden table |

mod machine;
mod names;
mod pairs;
mod trace;

use anyhow::{Context, Result, bail};
use names::{Types, Words};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use trace::{Uses, Window};

/// Bytes of a cache line.
const LINE: u64 = 64;

/// The table in the tree.
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/golden.txt");

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let (first, rest) = (args.next().unwrap_or_default(), args.next().unwrap_or_default());
    match &first[..] {
        "traced" => pairs::run(&rest, &args.next().unwrap_or_default()),
        "write" => Ok(std::fs::write(GOLDEN, table("")?)?),
        "show" => table(&rest).map(drop),
        "" => compare(&std::fs::read_to_string(GOLDEN).context(GOLDEN)?, &table("")?),
        _ => bail!("hugemm-sharing [write | show PART-OF-A-NAME]"),
    }
}

/// What is shared by all pairs with this in their names.
fn table(only: &str) -> Result<String> {
    std::thread::scope(|scope| {
        let each = pairs::GROUPS.map(|group| scope.spawn(move || rows(group, only)));
        each.into_iter().map(|rows| rows.join().unwrap_or_else(|_| bail!("a tracer panicked"))).collect()
    })
}

/// The rows of a group of pairs.
fn rows(group: &str, only: &str) -> Result<String> {
    let program = std::env::current_exe()?;
    let mut types = Types::of(&std::fs::read(&program)?)?;
    let mut child = Command::new("valgrind")
        .args(["--tool=lackey", "--trace-mem=yes"])
        .args([program.as_path(), Path::new("traced"), Path::new(group), Path::new(only)])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start valgrind; install it with: sudo apt-get install valgrind")?;
    let parts = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (Some(mut answers), Some(said), Some(trace)) = parts else { bail!("no pipes") };
    let (marks, (send, windows)) = (Arc::new(AtomicU64::new(0)), channel());
    let reader = {
        let marks = Arc::clone(&marks);
        std::thread::spawn(move || trace::read(BufReader::with_capacity(1 << 20, trace), &marks, &send))
    };
    let mut table = String::new();
    let mut words = Words::new(&mut types);
    for line in BufReader::new(said).lines() {
        let line = line?;
        match line.split('\t').collect::<Vec<_>>()[..] {
            ["marks", at] => {
                marks.store(at.parse()?, Ordering::Relaxed);
                words.open(child.id())?;
            }
            // What a machine consists of before its windows, and after them.
            ["look", name, at, base, ref roots @ ..] => {
                words.look(name, at.parse()?)?;
                for (root, space) in roots.iter().zip(["space", "other_space"]) {
                    walk(&mut words, base.parse()?, root.parse()?, 4, space);
                }
            }
            ["pair", name, operations, base] => {
                let row = row(&mut words, name, operations.parse()?, base.parse()?, &windows)?;
                table += &row;
                words.forget();
                eprint!("{row}");
            }
            _ => bail!("the traced program said: {line}"),
        }
        answers.write_all(b"\n")?;
    }
    let status = child.wait()?;
    let _ = reader.join();
    if status.success() { Ok(table) } else { bail!("the traced program ended with {status}") }
}

/// Names a space's page tables and pages.
fn walk(words: &mut Words<'_>, base: u64, table: u64, level: u32, space: &str) {
    let first = machine::FIRST << 12;
    let at = |physical: u64| base + physical.wrapping_sub(first);
    words.name(at(table), 4096, &format!("{space}'s page table of level {level}"));
    for index in 0..512 {
        let entry = words.word(at(table) + index * 8).unwrap_or(0);
        let (next, large) = (entry & 0x000f_ffff_ffff_f000, entry & 0x80 != 0);
        if entry & 1 != 0 && (first..first + machine::MEMORY).contains(&next) {
            match level {
                1 => words.name(at(next), 4096, &format!("{space}'s page")),
                2 if large => words.name(at(next & !0x1f_ffff), 2 << 20, &format!("{space}'s page")),
                _ => walk(words, base, next, level - 1, space),
            }
        }
    }
}

/// A line that two windows touch.
#[derive(Default)]
struct Line {
    uses: [BTreeMap<u64, Uses>; 2],
}

impl Line {
    fn writes(&self, cpu: usize) -> u64 {
        self.uses[cpu].values().map(|uses| uses.writes).max().unwrap_or(0)
    }
}

/// What a pair of operations shares.
fn row(words: &mut Words<'_>, name: &str, operations: u64, base: u64, windows: &Receiver<Window>) -> Result<String> {
    let mut lines: BTreeMap<u64, Line> = BTreeMap::new();
    let mut names = BTreeMap::new();
    for cpu in 0..2 {
        for (word, uses) in windows.recv().context("the trace ended")? {
            let name = words.of_word(word)?;
            let name = name.or_else(|| (base..base + machine::MEMORY).contains(&word).then(|| "a frame".into()));
            if let Some(name) = name {
                names.insert(word, name);
                lines.entry(word / LINE).or_default().uses[cpu].insert(word, uses);
            }
        }
    }
    let (mut both, mut one) = (BTreeMap::new(), BTreeMap::new());
    for line in lines.values() {
        let [a, b] = [line.writes(0), line.writes(1)];
        if line.uses.iter().any(BTreeMap::is_empty) || a + b == 0 {
            continue;
        }
        let written = |(_, uses): &(&u64, &Uses)| uses.writes > 0;
        let named = |cpu: usize| line.uses[cpu].iter().filter(written).filter_map(|(word, _)| names.get(word));
        let mut what: BTreeSet<&str> = [0, 1].into_iter().flat_map(named).map(|name| whole(name)).collect();
        if a == 0 || b == 0 {
            let reader = usize::from(a != 0);
            what.extend(line.uses[reader].keys().filter_map(|word| names.get(word)).map(|name| whole(name)));
        }
        let mut what = what.into_iter().collect::<Vec<_>>().join(", ");
        if operations > 1 {
            write!(what, "; {} writes", (a + b).div_ceil(2))?;
        }
        *if a > 0 && b > 0 { &mut both } else { &mut one }.entry(what).or_insert(0_u64) += 1;
    }
    let per = if operations > 1 { format!(" in {operations} operations each") } else { String::new() };
    let sum = |of: &BTreeMap<String, u64>| of.values().sum::<u64>();
    let mut row = format!(
        "{name}{per}: {} lines touched, {} both write, {} one writes and the other reads\n",
        lines.len(),
        sum(&both),
        sum(&one)
    );
    for (sign, of) in [("both write", both), ("one writes", one)] {
        for (what, count) in of {
            let times = if count > 1 { format!("{count} × ") } else { String::new() };
            writeln!(row, "    {sign}  {times}{what}")?;
        }
    }
    Ok(row)
}

/// A word's name without its number among the words of an array.
fn whole(name: &str) -> &str {
    match name.rsplit_once('[') {
        Some((array, number)) if number.ends_with(']') => array,
        _ => name,
    }
}

/// An error, with the lines of the table that differ, unless none does.
fn compare(golden: &str, now: &str) -> Result<()> {
    let pairs = |table: &str| -> BTreeMap<String, BTreeSet<String>> {
        let mut pairs: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        let mut name = String::new();
        for line in table.lines() {
            if !line.starts_with(' ') {
                name = line.split_once(':').map_or(line, |(name, _)| name).to_owned();
            }
            pairs.entry(name.clone()).or_default().insert(line.to_owned());
        }
        pairs
    };
    let (golden, now) = (pairs(golden), pairs(now));
    let mut wrong = String::new();
    for name in golden.keys().chain(now.keys()).collect::<BTreeSet<_>>() {
        let none = BTreeSet::new();
        let (old, new) = (golden.get(name).unwrap_or(&none), now.get(name).unwrap_or(&none));
        if old != new {
            writeln!(wrong, "{name}")?;
            old.difference(new).try_for_each(|line| writeln!(wrong, "  - {}", line.trim()))?;
            new.difference(old).try_for_each(|line| writeln!(wrong, "  + {}", line.trim()))?;
        }
    }
    if wrong.is_empty() {
        println!("sharing: {} pairs, as in the table", now.len());
        return Ok(());
    }
    eprint!("{wrong}");
    bail!("shared lines differ from {GOLDEN}; if that is meant: make sharing SHARING=write")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_line_is_an_error() {
        let golden = "a: 3 lines touched\n    both write  space.areas\nb: 1 lines touched\n";
        compare(golden, golden).expect("the same");
        compare(golden, &golden.replace("areas", "table")).expect_err("another line");
        compare(golden, "b: 1 lines touched\n").expect_err("a pair is missing");
    }
}
