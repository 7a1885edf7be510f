//! The page: one file, no script, nothing fetched.

use super::content::{Content, Goal};
use super::draw::{STYLE, draw};
use super::machine;
use super::plot::{Plot, with_deviation};
use crate::goals;

/// The page's own style, below that of the plots.
const PAGE: &str = "\
*{box-sizing:border-box}body{margin:0 auto;max-width:1120px;padding:1rem;background:var(--paper);color:var(--ink);\
font:16px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}\
h1{font-size:1.6rem;margin:.4rem 0}h2{font-size:1.25rem;margin:2rem 0 .6rem;border-bottom:1px solid var(--grid)}\
h3{font-size:1rem;margin:0 0 .3rem}.soft,dt,summary{color:var(--soft)}\
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,460px),1fr));gap:1rem}\
figure{margin:0;padding:.8rem;border:1px solid var(--grid);border-radius:8px;min-width:0}\
figure svg{display:block;width:100%;height:auto}figcaption{font-weight:600}\
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem}\
th,td{padding:.2rem .6rem;text-align:right;border-bottom:1px solid var(--grid)}\
th:first-child,td:first-child{text-align:left}.met{color:var(--good)}.missed{color:var(--bad);font-weight:700}\
.bar{min-width:6rem}summary{cursor:pointer;font-size:.85rem}code{overflow-wrap:anywhere}\
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem .8rem;font-size:.9rem}dd{margin:0;overflow-wrap:anywhere}\
@media print{body{max-width:none;font-size:11pt}.plots{display:block}figure,tr{break-inside:avoid}\
details::details-content{content-visibility:visible}.all{display:none}table{font-size:7pt}.wide{overflow:visible}}";

/// Text as it may stand in XML, HTML and attribute values.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // XML has no way to write other control characters.
            c if c.is_control() && !matches!(c, '\n' | '\t') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

pub fn page(content: &Content<'_>) -> String {
    let mut commands: Vec<String> =
        content.documents.iter().map(|(_, saved)| machine::command_name(&saved.command)).collect();
    commands.dedup();
    let subject = escape(&commands.join(", "));
    let line = content.documents.first().map_or(String::new(), |(_, saved)| machine::line(&saved.environment));
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <meta name=\"color-scheme\" content=\"light dark\"/>\n<title>hugemm: {subject}</title>\n\
         <style>{STYLE}{PAGE}</style>\n</head>\n<body>\n<h1>hugemm: {subject}</h1>\n<p class=\"soft\">{}</p>\n",
        escape(&line)
    );
    if !content.goals.is_empty() {
        out += &goal_table(&content.goals);
    }
    for (title, plots) in &content.sections {
        let plots: String = plots.iter().map(figure).collect();
        out += &format!("<h2>{}</h2>\n<div class=\"plots\">\n{plots}</div>\n", escape(title));
    }
    out += "<h2>Machine and documents</h2>\n";
    for (name, saved) in &content.documents {
        let said = format!("hugemm {}, version {}", saved.command, saved.version);
        let facts = std::iter::once(("command".to_owned(), said)).chain(machine::facts(&saved.environment));
        let facts: String =
            facts.map(|(what, text)| format!("<dt>{}</dt><dd>{}</dd>\n", escape(&what), escape(&text))).collect();
        let figures = saved.results.iter().map(machine::figure_cells);
        let figures = table(&["figure", "value", "± stdev", "runs", "unit"], figures);
        out += &format!(
            "<h3>{}</h3>\n<dl>\n{facts}</dl>\n<details class=\"all\"><summary>All {} figures</summary>{figures}</details>\n",
            escape(name),
            saved.results.len()
        );
    }
    out + "</body>\n</html>\n"
}

fn goal_table(goals: &[Goal]) -> String {
    let row = |goal: &Goal| {
        let (class, word) = match goal.verdict.as_str() {
            goals::MET => ("met", "✓ met"),
            goals::MISSED => ("missed", "✗ missed"),
            other => ("", other),
        };
        let [name, measured, wanted, source] =
            [&goal.name, &goal.measured, &goal.wanted, &goal.source].map(|text| escape(text));
        format!(
            "<tr><td><code>{name}</code></td><td class=\"{class}\">{word}</td><td>{measured}</td><td>{wanted}</td><td>{source}</td></tr>\n"
        )
    };
    let count = goals::count(goals.iter().map(|goal| goal.verdict.as_str()));
    let heads = ["goal", "verdict", "measured", "wanted", ""];
    format!("<h2>Goals: {count}</h2>\n{}", rows(&heads, goals.iter().map(row)))
}

/// Lines over numbers as a picture, with the figures below; all else as figures with bars, which begin at zero.
fn figure(plot: &Plot) -> String {
    let most = plot.figures.iter().map(|figure| figure.y.abs()).fold(f64::MIN_POSITIVE, f64::max);
    let row = |figure: &super::plot::Figure| {
        let place = plot.x.as_ref().map(|name| format!("{name} {}", plot.place_text(figure.x)));
        let name = std::iter::once(figure.series.clone()).filter(|name| !name.is_empty()).chain(place);
        let name = escape(&name.collect::<Vec<_>>().join(", "));
        let value = with_deviation(figure.y, figure.stdev);
        let width = figure.y.abs() / most * 100.0;
        format!(
            "<tr><td>{name}</td><td>{value}</td><td class=\"bar\"><div style=\"width:{width:.0}%\"></div></td></tr>\n"
        )
    };
    let figures = rows(&["", &escape(&plot.unit), ""], plot.figures.iter().map(row));
    let body = match draw(plot) {
        Some(picture) => format!("{picture}<details><summary>Figures</summary>{figures}</details>"),
        None => figures,
    };
    format!("<figure><figcaption>{}</figcaption>\n{body}</figure>\n", escape(&plot.title))
}

fn table(heads: &[&str], lines: impl Iterator<Item = Vec<String>>) -> String {
    let cells = |line: Vec<String>| line.iter().map(|cell| format!("<td>{}</td>", escape(cell))).collect::<String>();
    rows(heads, lines.map(|line| format!("<tr>{}</tr>\n", cells(line))))
}

fn rows(heads: &[&str], rows: impl Iterator<Item = String>) -> String {
    let heads: String = heads.iter().map(|head| format!("<th>{head}</th>")).collect();
    let rows: String = rows.collect();
    format!("<div class=\"wide\"><table><thead><tr>{heads}</tr></thead><tbody>\n{rows}</tbody></table></div>\n")
}
