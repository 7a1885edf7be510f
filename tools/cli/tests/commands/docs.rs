//! The documentation says what is so: links lead somewhere, commands and their options exist, and what the checklist names
//! is there.

use crate::support::rows;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the source tree")
}

/// All files of the tree with this extension, except what is built.
fn files(extension: &str) -> Vec<PathBuf> {
    let (mut found, mut dirs) = (Vec::new(), vec![root()]);
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).expect("readable").map(|entry| entry.expect("readable").path()) {
            let hidden = entry.file_name().is_some_and(|name| name == "target" || name.as_encoded_bytes()[0] == b'.');
            match entry.is_dir() {
                true if !hidden => dirs.push(entry),
                false if entry.extension().is_some_and(|found| found == extension) => found.push(entry),
                _ => {}
            }
        }
    }
    found
}

/// What stands between `open` and `close`, wherever they follow each other on one line.
fn between<'a>(text: &'a str, open: &'a str, close: &'a str) -> impl Iterator<Item = &'a str> {
    text.lines().flat_map(move |line| line.split(open).skip(1).filter_map(move |rest| Some(rest.split_once(close)?.0)))
}

/// The anchors of a page: its headings in lower case, with hyphens for spaces and nothing for punctuation.
fn anchors(page: &str) -> BTreeSet<String> {
    let headings = page.lines().filter_map(|line| line.strip_prefix('#'));
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    let slug = |text: &str| text.trim_start_matches('#').trim().to_lowercase().chars().filter(kept).collect::<String>();
    headings.map(|heading| slug(heading).replace(' ', "-")).collect()
}

#[test]
fn links_lead_somewhere() {
    let mut broken = Vec::new();
    for page in files("md") {
        let text = fs::read_to_string(&page).expect("readable");
        for link in between(&text, "](", ")").filter(|link| !link.contains("://")) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { page.clone() } else { page.with_file_name(file) };
            let found = target.exists()
                && (anchor.is_empty() || anchors(&fs::read_to_string(&target).expect("readable")).contains(anchor));
            if !found {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

/// What a crate's own table of files, or a page, says about files is so: each is named, and what is named is there.
#[test]
fn every_crate_says_which_file_has_which_rule() {
    let mut wrong = Vec::new();
    for crate_root in files("rs").into_iter().filter(|path| path.ends_with("src/lib.rs")) {
        let sources = crate_root.parent().expect("a directory").to_path_buf();
        if !sources.starts_with(root().join("crates")) || sources.ends_with("hugemm/src") {
            continue;
        }
        let text = fs::read_to_string(&crate_root).expect("readable");
        let table: String = text.lines().filter(|line| line.starts_with("//! |")).collect::<Vec<_>>().join("\n");
        for entry in fs::read_dir(&sources).expect("readable").map(|entry| entry.expect("readable").path()) {
            let stem = entry.file_stem().expect("a name").to_string_lossy().into_owned();
            let named =
                [format!("`{stem}.rs`"), format!("[`{stem}`]"), format!("[`mod@{stem}`]"), format!("(mod@{stem})")];
            if !["lib", "tests"].contains(&stem.as_str()) && !named.iter().any(|name| table.contains(name)) {
                wrong.push(format!("{} is not in the table of {}", entry.display(), crate_root.display()));
            }
        }
        let named = between(&table, "`", "`").filter(|name| name.ends_with(".rs"));
        wrong.extend(named.filter(|name| !sources.join(name).exists()).map(|name| format!("no {name} in {sources:?}")));
    }
    let page = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("readable");
    let words = page.split(|c: char| c.is_whitespace() || "`;,()".contains(c)).filter(|word| word.ends_with(".rs"));
    let sources = files("rs");
    let missing = words.filter(|word| !sources.iter().any(|path| path.ends_with(word)));
    wrong.extend(missing.map(|word| format!("ARCHITECTURE.md: no {word}")));
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Comments cite manuals, papers and series by their titles, never a row or a paragraph of what is not in the tree.
#[test]
fn comments_cite_what_a_reader_can_open() {
    let private =
        ["checklist ", "Checklist ", "design §", "design rule", "design invariant", "seed 00", "Row A", "Row B"];
    let mut wrong = Vec::new();
    for path in files("rs").into_iter().filter(|path| !path.ends_with("commands/docs.rs")) {
        let text = fs::read_to_string(&path).expect("readable");
        for (number, line) in text.lines().enumerate().filter(|(_, line)| line.trim_start().starts_with("//")) {
            if private.iter().any(|word| line.contains(word)) {
                wrong.push(format!("{}:{}: {}", path.display(), number + 1, line.trim()));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The names that a source declares: of items, variants and fields.
fn declared(source: &str) -> BTreeSet<&str> {
    let before = ["struct ", "enum ", "trait ", "type ", "fn ", "const ", "mod ", "    ", "pub "];
    let names = before.into_iter().flat_map(|before| source.split(before).skip(1));
    names.map(|rest| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default()).collect()
}

/// Every type and function of the glossary's third column is one.
#[test]
fn the_glossary_names_what_is_there() {
    let sources: String = files("rs").iter().map(|path| fs::read_to_string(path).expect("readable")).collect();
    let declared = declared(&sources);
    let page = fs::read_to_string(root().join("docs/glossary.md")).expect("readable");
    let (mut names, mut wrong) = (0, Vec::new());
    for row in page.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').collect();
        for name in spans(cells.get(2).copied().unwrap_or_default()).iter().filter(|name| !name.contains('-')) {
            names += 1;
            let name = name.rsplit("::").next().unwrap_or_default();
            if !declared.contains(name) {
                wrong.push(name.to_owned());
            }
        }
    }
    assert!(names > 40, "{names} names are found");
    assert!(wrong.is_empty(), "not there: {wrong:?}");
}

/// What each floor costs in lines is said within a fifth of what `scripts/lines.sh` counts.
#[test]
fn floors_cost_what_the_page_says() {
    let page = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("readable");
    let counted = Command::new(root().join("scripts/lines.sh")).output().expect("it starts").stdout;
    let counted = String::from_utf8_lossy(&counted).into_owned();
    let mut floors = 0;
    for cells in page.lines().map(|line| line.split('|').map(str::trim).collect::<Vec<_>>()) {
        let Some(floor) = cells.get(1).and_then(|cell| cell.strip_prefix('`')?.strip_suffix("/`")) else { continue };
        floors += 1;
        let said: usize = cells[3].replace(' ', "").parse().expect("a number of lines");
        let row = counted.lines().find_map(|line| line.strip_prefix(&format!("{floor}/ "))).expect("a row");
        let lines: usize = row.split_whitespace().next().expect("a column").parse().expect("a number of lines");
        assert!(lines.abs_diff(said) * 5 <= said, "{floor} has {lines} lines");
    }
    assert_eq!(floors, 5);
}

/// A target that `cargo test` passes over has nothing to run.
#[test]
fn what_is_not_tested_has_no_tests() {
    let (mut found, mut wrong, sources) = (0, Vec::new(), files("rs"));
    let has_examples = |source: &str| {
        let fences = source.lines().filter_map(|line| line.trim().strip_prefix("//")?.get(1..)?.strip_prefix(" ```"));
        fences.step_by(2).any(|language| language != "text")
    };
    for manifest in files("toml").into_iter().filter(|path| path.ends_with("Cargo.toml")) {
        let (text, own) = (fs::read_to_string(&manifest).expect("readable"), manifest.with_file_name("src"));
        for section in text.split("\n[").filter(|section| section.contains("test = false")) {
            found += 1;
            let (no_unit, no_doc) = (section.contains("\ntest = false"), section.contains("doctest = false"));
            for path in sources.iter().filter(|path| path.starts_with(&own)) {
                let (source, is_main) = (fs::read_to_string(path).expect("readable"), path.ends_with("src/main.rs"));
                let has_unit = no_unit && source.contains("#[test]") && (section.starts_with("lib]") || is_main);
                if has_unit || no_doc && has_examples(&source) {
                    wrong.push(format!("{}, which {} leaves out", path.display(), manifest.display()));
                }
            }
        }
    }
    assert!(found > 5 && wrong.is_empty(), "of {found} targets these have tests: {wrong:#?}");
}

/// Rust that a page shows can be pasted, and stands so in a source that is compiled and run: no page has an example of its own.
#[test]
fn examples_of_pages_stand_in_sources() {
    let lines = |text: &str| text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("\n");
    let sources: Vec<String> =
        files("rs").iter().map(|path| lines(&fs::read_to_string(path).expect("readable"))).collect();
    let (mut blocks, mut wrong) = (0, Vec::new());
    for page in files("md") {
        let text = fs::read_to_string(&page).expect("readable");
        for block in text.split("```rust\n").skip(1).filter_map(|rest| Some(rest.split_once("```")?.0)) {
            blocks += 1;
            if !sources.iter().any(|source| source.contains(&lines(block))) {
                wrong.push(format!("{}: {block}", page.display()));
            }
        }
    }
    assert!(blocks >= 2, "{blocks} examples are found");
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// What stands in backticks.
fn spans(text: &str) -> Vec<String> {
    let prose: String = text.split("```").step_by(2).collect();
    prose.replace('\n', " ").split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// The commands that a page shows: in backticks, and on lines of code blocks.
fn commands(text: &str) -> Vec<String> {
    let code = text.split("```").skip(1).step_by(2).flat_map(str::lines);
    let code = code.map(|line| line.split(['#', '>', '|']).next().unwrap_or_default());
    let lines = code.flat_map(|line| line.split("&&")).map(|command| command.trim().to_owned());
    spans(text).into_iter().chain(lines).filter_map(|c| Some(c.strip_prefix("hugemm ")?.to_owned())).collect()
}

/// What `--help` of a command says; `None` if there is no such command.
fn help(words: &[&str]) -> Option<String> {
    let output = Command::new(env!("CARGO_BIN_EXE_hugemm")).args(words).arg("--help").output().expect("it starts");
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn commands_exist_and_have_the_options_that_are_shown() {
    let mut known: BTreeMap<Vec<String>, String> = BTreeMap::new();
    let mut wrong = Vec::new();
    for page in files("md").into_iter().filter(|page| !page.ends_with("CHANGELOG.md")) {
        let text = fs::read_to_string(&page).expect("readable");
        for command in commands(&text) {
            // What follows ' -- ' is for a guest, and is checked by the tests that boot one.
            let own = command.split(" -- ").next().unwrap_or_default();
            let words: Vec<&str> = own.split_whitespace().collect();
            let plain =
                |word: &&str| word.chars().all(|c| c.is_ascii_lowercase() || c == '-') && !word.starts_with('-');
            let depth = match words.first() {
                Some(&"bench") if words.get(1) == Some(&"mem") => 3,
                Some(&"bench" | &"pool") => 2,
                _ => 1,
            };
            let path: Vec<&str> = words.iter().take(depth).copied().filter(plain).collect();
            let key: Vec<String> = path.iter().map(|word| (*word).to_owned()).collect();
            let Some(help) = known.get(&key).cloned().or_else(|| help(&path)) else {
                wrong.push(format!("{}: hugemm {command}", page.display()));
                continue;
            };
            for option in words.iter().filter(|word| word.starts_with('-') && word.len() > 1) {
                let option = option.split(['=', '[']).next().unwrap_or_default();
                // A name ends where something else than a name's letters begins.
                let named =
                    |at: usize| !help[at + option.len()..].starts_with(|c: char| c.is_alphanumeric() || c == '-');
                if !help.match_indices(option).any(|(at, _)| named(at)) {
                    wrong.push(format!("{}: no {option} in: hugemm {command}", page.display()));
                }
            }
            known.insert(key, help);
        }
    }
    assert!(known.len() > 15, "commands are not found any more: {:?}", known.keys());
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_checklist_names_what_is_there() {
    let names = |path: &Path| -> BTreeSet<String> {
        let source = fs::read_to_string(path).expect("readable");
        let after = ["fn ", "mod ", "#["].into_iter().flat_map(|before| source.split(before).skip(1));
        after
            .filter_map(|rest| Some(rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()?.to_owned()))
            .collect()
    };
    let sources: Vec<_> = files("rs").into_iter().map(|path| (names(&path), path)).collect();
    let text = fs::read_to_string(root().join("docs/checklist.md")).expect("readable");
    let (mut wrong, mut files, mut tests) = (Vec::new(), 0, 0);
    for span in spans(&text) {
        // `package: path.rs: name`, of which the first and the last may be missing; or a name alone.
        let parts: Vec<&str> = span.split(": ").collect();
        let file = parts.iter().find(|part| part.ends_with(".rs"));
        let name = parts.last().filter(|name| {
            name.contains('_') && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
        });
        let in_file = |path: &Path| file.is_none_or(|file| path.ends_with(file));
        if file.is_some() {
            files += 1;
            if !sources.iter().any(|(_, path)| in_file(path)) {
                wrong.push(format!("no file: {span}"));
                continue;
            }
        }
        if let Some(name) = name {
            tests += 1;
            if !sources.iter().any(|(names, path)| in_file(path) && names.contains(*name)) {
                wrong.push(format!("no such name: {span}"));
            }
        }
    }
    assert!(files > 25 && tests > 120, "{files} files and {tests} tests are found");
    assert!(wrong.is_empty(), "{wrong:#?}");
    let rows: Vec<(&str, &str)> = text.lines().filter_map(|line| line.strip_prefix("- **")?.split_once("**")).collect();
    for (row, answer) in &rows {
        assert!(answer.contains('`') || answer.contains("not here"), "a row without an answer: {row}");
    }
    for (letter, last) in [('A', 28), ('B', 16), ('C', 20), ('D', 20), ('E', 32), ('X', 6)] {
        for number in 1..=last {
            let row = format!("{letter}{number}");
            assert!(rows.iter().any(|(name, _)| name.split([',', ' ']).any(|one| one == row)), "no row {row}");
        }
    }
}

/// A saved run.
fn saved(name: &str) -> Value {
    let text = fs::read_to_string(root().join("docs/results").join(name)).expect("readable");
    serde_json::from_str(&text).expect("a document")
}

/// As the tables have it: three digits, or all of a whole number.
fn figure(value: f64) -> String {
    match value {
        ..9.95 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// The tables of kernel areas are those of the saved runs, by whose commands they were made.
#[test]
fn figures_of_kernel_areas_are_of_saved_runs() {
    let page = fs::read_to_string(root().join("docs/kva.md")).expect("readable");
    let runs = ["vmalloc", "vmalloc-x86-64", "vmalloc-arm64"].map(|name| saved(&format!("{name}.json")));
    let value = |run: &Value, metric: &str, labels: &[(&str, &Value)]| {
        let is = |row: &&&Value| labels.iter().all(|(name, value)| row[*name] == **value);
        let rows = rows(run, metric);
        rows.iter().find(is).and_then(|row| row["value"].as_f64()).expect("a figure")
    };
    let mut lines = Vec::new();
    for row in rows(&runs[1], "bench.vmalloc.pair") {
        let test = &row["test"];
        let of = |run: &Value, metric: &str| value(run, metric, &[("test", test)]);
        let [host, here, arm] = [0, 1, 2].map(|run| of(&runs[run], "bench.vmalloc.pair"));
        let (flushes, rounds) = (of(&runs[1], "bench.vmalloc.flushes"), of(&runs[1], "bench.vmalloc.lock_rounds"));
        let name = match test.as_str() {
            Some("area_512k") => "512 KiB".to_owned(),
            Some("area_16m") => "16 MiB".to_owned(),
            name => format!("`{}`", name.expect("a name")),
        };
        lines.push(format!("|{name}|{host:.0}|{here:.0}|{arm:.0}|{flushes:.2}|{rounds:.2}|"));
    }
    for (name, bytes) in [("512 KiB", 512_u64 << 10), ("2 MiB", 2 << 20), ("16 MiB", 16 << 20)] {
        let sides = ["batched", "page by page, one flush", "page by page"].map(Value::from);
        let bytes = Value::from(bytes);
        let rates = runs.each_ref().map(|run| {
            let of = |side| value(run, "bench.vmalloc.freed", &[("bytes", &bytes), ("side", side)]) / 1000.0;
            sides.each_ref().map(of)
        });
        let [host, here, arm] = rates.map(|rates| rates.map(figure).join("; "));
        let times = rates[0][0] / rates[0][1].max(rates[0][2]);
        let labels: [(&str, &Value); 2] = [("bytes", &bytes), ("side", &sides[0])];
        let flushes = value(&runs[1], "bench.vmalloc.free_flushes", &labels);
        lines.push(format!("|{name}|{host}|{} ×|{here}|{arm}|{}|", figure(times), figure(flushes)));
    }
    // Where it was saved, and the other architecture, the page need not say.
    let command = |run: &Value| {
        let command = run["command"].as_str().unwrap_or_default().replace("--arch arm64 ", "");
        let words: Vec<&str> = command.split(' ').filter(|word| !word.starts_with("--json")).collect();
        format!("`hugemm {}`", words.join(" "))
    };
    lines.extend(runs.iter().map(command));
    lines.retain(|line| !page.contains(line));
    assert!(lines.is_empty(), "docs/kva.md has not:\n{}", lines.join("\n"));
}
