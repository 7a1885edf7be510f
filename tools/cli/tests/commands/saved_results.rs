//! `hugemm compare`, `report`, `doctor`, `completions` and `man` as a user meets them.

use crate::support::{Scratch, document, hugemm, misused, refused, rows};
use serde_json::{Value, json};
use std::path::Path;

fn words(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn data(name: &str) -> String {
    format!("{}/tests/data/saved/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// A saved document with something changed.
fn changed(scratch: &Scratch, name: &str, change: impl Fn(&mut Value)) -> String {
    let text = std::fs::read_to_string(data("free.json")).expect("a fixture");
    let mut document: Value = serde_json::from_str(&text).expect("JSON");
    change(&mut document);
    scratch.put(name, document.to_string())
}

/// Makes every figure of a unit larger by a factor.
fn scale(document: &mut Value, unit: &str, factor: f64) {
    for row in document["results"].as_array_mut().expect("rows") {
        if row["unit"] == unit {
            row["value"] = json!(row["value"].as_f64().expect("a figure") * factor);
        }
    }
}

#[test]
fn a_document_is_no_worse_than_itself() {
    let file = data("free.json");
    let output = hugemm(&["compare", &file, &file]);
    assert_eq!(output.status.code(), Some(0), "{}", words(&output.stderr));
    let out = words(&output.stdout);
    assert!(out.contains(" 0 worse, 0 better,") && !out.contains("Only in"), "{out}");
}

#[test]
fn a_regression_is_named_and_has_its_exit_code() {
    let scratch = Scratch::new("worse");
    let slow = changed(&scratch, "slow.json", |document| scale(document, "ns per block", 40.0));
    let output = hugemm(&["compare", &data("free.json"), &slow, "--json"]);
    let err = words(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(err.contains("worse by more than 5 % and the noise") && err.trim_end().lines().count() == 1, "{err}");
    let compared: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
    let worse = rows(&compared, "compare.bench.free.free_range");
    assert!(worse.iter().any(|row| row["verdict"] == "worse" && row["value"].as_f64().is_some_and(|v| v > 3800.0)));
    assert_eq!((&compared["schema"], &compared["compare"]["threshold_percent"]), (&json!(9), &json!(5.0)));
    // The other way round it is better, and nothing fails; a threshold above the difference forgives it.
    assert_eq!(hugemm(&["compare", &slow, &data("free.json")]).status.code(), Some(0));
    assert_eq!(hugemm(&["compare", &data("free.json"), &slow, "-t", "5000"]).status.code(), Some(0));
}

/// A goal whose definition has changed is not set against what went by its name before.
#[test]
fn documents_of_two_schemas_are_not_compared() {
    let scratch = Scratch::new("schemas");
    let newer = changed(&scratch, "newer.json", |document| document["schema"] = json!(9));
    let old = data("free.json");
    for sides in [[&old, &newer], [&newer, &old], [&format!("{old},{newer}"), &old]] {
        refused(&["compare", sides[0], sides[1]], &["schema 1", "schema 9", "measured differently", "one version"]);
        assert_eq!(hugemm(&["compare", sides[0], sides[1]]).status.code(), Some(2));
    }
    assert_eq!(hugemm(&["compare", &newer, &newer]).status.code(), Some(0));
    // Nor are they in one report, and goals of old come on no page that defines those of today.
    let (page, html) = (scratch.put("page.md", "| goal |"), scratch.path("out.html"));
    refused(&["report", &old, &newer, "--html", &html], &["schema 1", "schema 9", "measured differently"]);
    refused(&["report", &old, "--fill", &page], &["schema 1", "measured differently", "measure again"]);
    refused(&["report", &newer, "--fill", &page], &["no mark", "goals"]);
    assert_eq!(hugemm(&["report", &old, "--html", &html]).status.code(), Some(0));
}

#[test]
fn what_is_not_on_both_sides_is_named() {
    let scratch = Scratch::new("rows");
    let other = changed(&scratch, "other.json", |document| {
        document["results"][0]["metric"] = json!("bench.free.renamed");
        document["environment"]["cpu"]["model"] = json!("Another CPU");
        let found = document["results"].as_array_mut().expect("rows");
        let locks = found.iter_mut().find(|row| row["metric"] == "bench.free.lock_rounds").expect("a counted row");
        locks["value"] = json!(locks["value"].as_f64().expect("a count") + 0.5);
        locks["stdev"] = json!(0.0);
    });
    let output = hugemm(&["compare", &data("free.json"), &other]);
    let out = words(&output.stdout);
    for part in ["Only in A", "Only in B", "bench.free.renamed", "Another CPU", "environments differ"] {
        assert!(out.contains(part), "{part}: {out}");
    }
    assert!(out.lines().any(|line| line.contains("bench.free.lock_rounds") && line.contains("worse")), "{out}");
}

#[test]
fn several_documents_make_one_side() {
    let scratch = Scratch::new("several");
    let second = changed(&scratch, "second.json", |document| scale(document, "ns per block", 1.01));
    let both = format!("{},{second}", data("free.json"));
    let compared = document(&["compare", &both, &both, "--json"]);
    assert_eq!(compared["compare"]["a"].as_array().map(Vec::len), Some(2));
    let ranges = rows(&compared, "compare.bench.free.free_range");
    assert!(!ranges.is_empty() && ranges.iter().all(|row| row["verdict"] == "same"));
}

/// The line, and exit code 2: 1 would mean that something got worse.
#[test]
fn files_that_are_no_documents_are_refused_in_a_line() {
    let scratch = Scratch::new("foreign");
    let good = data("free.json");
    let cases = [
        (scratch.put("text", "figures: 7"), "is no JSON"),
        (scratch.put("half", "{\"schema\": 1, \"results\": [{\"met"), "is no JSON"),
        (scratch.put("foreign", "{\"name\": \"something\"}"), "no field 'schema'"),
        (scratch.put("later", "{\"schema\": 99, \"results\": []}"), "has schema 99"),
        (scratch.put("rows", "{\"schema\": 1, \"results\": [{\"metric\": 7}]}"), "row 0"),
        (scratch.put("list", "{\"schema\": 1, \"results\": 7}"), "no list 'results'"),
        (scratch.path("missing"), "cannot read"),
        (scratch.path(""), "cannot read"),
    ];
    for (file, part) in &cases {
        refused(&["compare", &good, file], &[part]);
        refused(&["report", file, "--html", &scratch.path("out.html")], &[part]);
        assert_eq!(hugemm(&["compare", file, &good]).status.code(), Some(2), "{part}");
        assert!(!Path::new(&scratch.path("out.html")).exists(), "nothing is written after an error");
    }
    let empty = scratch.put("empty", "{\"schema\": 1, \"results\": []}");
    refused(&["compare", &good, &empty], &["no figure in common"]);
    refused(&["report", &empty], &["no figure", "nothing was written"]);
    refused(&["report", &good, "--html", "/nonexistent/out.html"], &["cannot write /nonexistent/out.html"]);
    misused(&["compare", &good], "required");
    misused(&["compare", &good, &good, &good], "unexpected argument");
    misused(&["compare", &format!("{good},"), &good], "file name is empty");
    misused(&["compare", &good, &good, "-t", "-3"], "no percentage");
    misused(&["compare", &good, &good, "--threshold=x"], "no percentage");
    misused(&["report"], "required");
}

/// Every figure of every document is somewhere on the page, every tag is closed, and nothing is fetched.
#[test]
fn the_page_is_whole_and_needs_nothing_else() {
    let scratch = Scratch::new("page");
    let page = scratch.path("page.html");
    let files = [data("probe.json"), data("free.json"), data("linux.json")];
    let output = hugemm(&["report", &files[0], &files[1], &files[2], "--html", &page]);
    assert!(output.status.success(), "{}", words(&output.stderr));
    let text = std::fs::read_to_string(&page).expect("a page");
    let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
    let tree = roxmltree::Document::parse_with_options(&text, options).expect("every tag is closed");
    let mut rows_on_page = 0;
    for node in tree.descendants().filter(roxmltree::Node::is_element) {
        assert!(!["script", "link", "img", "iframe"].contains(&node.tag_name().name()), "{node:?}");
        assert!(node.attribute("src").is_none() && node.attribute("href").is_none_or(|to| to.starts_with('#')));
        let all = node.ancestors().any(|above| above.attribute("class") == Some("all"));
        rows_on_page += usize::from(all && node.has_tag_name("tr") && node.children().any(|c| c.has_tag_name("td")));
    }
    let saved = files.iter().map(|file| std::fs::read_to_string(file).expect("a fixture"));
    let saved = saved.map(|text| serde_json::from_str::<Value>(&text).expect("JSON"));
    assert_eq!(rows_on_page, saved.map(|one| one["results"].as_array().map_or(0, Vec::len)).sum::<usize>());
    for part in ["Goals: ", "clear.region_cold", "linux.pool.tax_up", "bench.free.free_range"] {
        assert!(text.contains(part), "{part}");
    }
}

#[test]
fn the_doctor_has_a_remedy_for_whatever_is_wrong() {
    let output = hugemm(&["doctor", "--json"]);
    let found: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
    let results = found["results"].as_array().expect("results");
    assert!(results.len() >= 15);
    let mut blocked = false;
    for row in results {
        let state = row["state"].as_str().expect("a state");
        assert_eq!(state == "ok", row["remedy"].is_null(), "{row}");
        assert!(row["found"].as_str().is_some_and(|text| !text.is_empty() && !text.contains('\n')), "{row}");
        blocked |= state == "BLOCKS";
    }
    assert_eq!(output.status.code(), Some(i32::from(blocked)));
}

#[test]
fn completions_and_pages_come_from_the_command_line_itself() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let output = hugemm(&["completions", shell]);
        let script = words(&output.stdout);
        assert!(output.status.success() && script.contains("hugemm") && script.contains("interference"), "{shell}");
    }
    let page = words(&hugemm(&["man"]).stdout);
    assert!(page.contains(".TH hugemm 1") && page.contains("doctor"), "{page}");
    let scratch = Scratch::new("man");
    assert!(hugemm(&["man", &scratch.path("pages")]).status.success());
    for page in ["hugemm.1", "hugemm-compare.1", "hugemm-bench-free.1"] {
        assert!(Path::new(&scratch.path("pages")).join(page).is_file(), "{page}");
    }
}

#[test]
fn every_bench_can_be_repeated_and_warmed_up() {
    for more in [["--runs", "3", "--warmup", "0"], ["-r", "3", "--warmup", "2"]] {
        let document = document(&[&["bench", "map", "-s", "2MB", "--no-peers", "--json"][..], &more].concat());
        assert_eq!(rows(&document, "bench.map.map")[0]["runs"], 3, "{more:?}");
    }
}
