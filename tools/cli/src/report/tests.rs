//! Whole reports: well-formed, self-contained, escaped, and with every figure that the documents have.

use super::content::Content;
use super::plot::Plot;
use super::{draw, html};
use crate::document::Row;
use crate::goals::{Bound, verdict};
use crate::saved::Saved;
use crate::stats::Samples;

fn saved(command: &str, results: Vec<Row>) -> (String, Saved) {
    let environment = serde_json::json!({"cpu": {"model": "A <b>CPU</b> & \"more\"", "allowed_cpus": [0, 1]}});
    let (command, version) = (command.to_owned(), "0.1.0".to_owned());
    ("doc".to_owned(), Saved { schema: crate::document::SCHEMA, command, version, environment, results })
}

fn plots<'a>(content: &'a Content<'_>) -> impl Iterator<Item = &'a Plot> {
    content.sections.iter().flat_map(|(_, plots)| plots)
}

fn row(metric: &str, value: f64, unit: &'static str) -> Row {
    Row::single(metric, value, unit)
}

fn regions() -> Vec<Row> {
    let regions =
        [2_u64, 4, 8, 16, 32].into_iter().flat_map(|megabytes| [("rep-stosb", megabytes), ("policy", megabytes)]);
    let region = |(subject, megabytes)| {
        let row = row("clear.region_cold", 25.0, "GB/s").label("region", megabytes << 20);
        row.label("subject", subject)
    };
    regions.map(region).collect()
}

/// Every tag is closed, nothing is fetched, no script runs.
#[track_caller]
fn sound(page: &str) {
    let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
    let document = roxmltree::Document::parse_with_options(page, options).expect("well-formed");
    for node in document.descendants().filter(roxmltree::Node::is_element) {
        assert!(!["script", "link", "img", "iframe", "object"].contains(&node.tag_name().name()), "{node:?}");
        for attribute in node.attributes() {
            assert!(!attribute.name().starts_with("on"), "{attribute:?}");
            match attribute.name() {
                "src" => panic!("{attribute:?}"),
                "href" => assert!(attribute.value().starts_with('#'), "{attribute:?}"),
                _ => {}
            }
        }
    }
    assert!(!page.contains("@import") && !page.contains("url("), "styles that fetch");
}

#[test]
fn metrics_that_nobody_knows_are_plotted_by_their_labels() {
    let mut rows = Vec::new();
    for cpus in [1, 2, 4] {
        for side in ["ours", "theirs"] {
            let value = if side == "ours" { 5.0 } else { f64::from(cpus) * 7.0 };
            rows.push(row("bench.later", value, "ns").label("cpus", cpus).label("side", side).label("same", 7));
        }
    }
    for order in [0, 9] {
        rows.push(row("bench.bars", 3.0, "furlongs").label("side", "a").label("order", order));
        rows.push(row("bench.bars", 4.0, "furlongs").label("side", "b").label("order", order));
    }
    let documents = [saved("bench later --runs 3", rows)];
    let content = Content::of(&documents);
    let plots: Vec<_> = plots(&content).collect();
    assert_eq!((plots.len(), content.sections[0].0.as_str()), (2, "bench later"));
    assert_eq!(plots[0].x.as_deref(), Some("cpus"));
    let names: Vec<_> = plots[0].lines().expect("two").iter().map(|(name, points)| (*name, points.len())).collect();
    assert_eq!(names, [("ours", 3), ("theirs", 3)]);
    assert_eq!((plots[1].x.as_ref(), plots[1].lines()), (None, None));
    assert_eq!(plots[1].figures[3].series, "b, order 9");
    sound(&html::page(&content));
}

/// Whatever a document says is text.
#[test]
fn markup_in_documents_stays_text() {
    let nasty = "<script>alert('1')</script>&\"\u{1}]]>";
    let rows = vec![
        row(nasty, 1.0, "ns").label("side", nasty),
        row(nasty, 2.0, "ns").label("side", "other"),
        row("single<b>", 3.0, "ns"),
    ];
    let documents = [saved(&format!("bench {nasty}"), rows), saved("probe", regions())];
    let content = Content::of(&documents);
    sound(&html::page(&content));
    for svg in plots(&content).filter_map(draw::draw) {
        roxmltree::Document::parse(&svg).expect("well-formed");
    }
}

#[test]
fn goals_are_shown_with_their_bound() {
    let rows = vec![
        verdict(Row::single("clear.x", 0.95, "ratio"), Bound::AtLeast, 0.97),
        verdict(Row::single("frames.y", 5.0, "ratio"), Bound::AtMost, 6.0),
        verdict(Row::median("frames.z", &Samples::from_iter([4.0, 8.0]), "ratio"), Bound::AtMost, 6.0),
    ];
    let documents = [saved("probe", rows)];
    let content = Content::of(&documents);
    let shown: Vec<_> = content.goals.iter().map(|goal| (goal.wanted.as_str(), goal.verdict.as_str())).collect();
    assert_eq!(shown, [("≥ 0.97", "missed"), ("≤ 6", "met"), ("≤ 6", "not told apart")]);
    let page = html::page(&content);
    assert!(page.contains("1 goals are met, 1 missed") && page.contains("✗ missed") && page.contains("✓ met"));
}

/// The same metric from two documents is one plot in which both can be told apart.
#[test]
fn documents_with_the_same_metric_share_a_plot() {
    let of =
        |value| vec![row("bench.free.free_whole", value, "ns per block").label("side", "hugemm").label("order", 9)];
    let mut documents = [saved("bench free", of(1.0)), saved("bench free", of(2.0))];
    documents[0].0 = "before".to_owned();
    documents[1].0 = "after".to_owned();
    let content = Content::of(&documents);
    let plot = plots(&content).next().expect("a plot");
    let names: Vec<_> = plot.figures.iter().map(|figure| figure.series.as_str()).collect();
    assert_eq!(names, ["before", "after"]);
}

#[test]
fn figures_that_are_none_leave_gaps() {
    let rows = [1.0, f64::NAN, 3.0].iter().zip([1, 2, 4]);
    let rows = rows.map(|(value, cpus)| row("m", *value, "ns").label("cpus", cpus)).collect();
    let documents = [saved("bench", rows)];
    let content = Content::of(&documents);
    sound(&html::page(&content));
    assert_eq!(plots(&content).next().expect("a plot").figures.len(), 2);
}
