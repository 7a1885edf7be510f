//! The page: one file, no script, nothing fetched.

use super::content::{Content, Goal};
use super::draw::{STYLE, draw};
use super::machine;
use super::plot::{Plot, cell};
use crate::goals;
use std::fmt::Write;

/// The page's own style, below that of the plots.
const PAGE: &str = "\
*{box-sizing:border-box}html{-webkit-text-size-adjust:100%}\
body{margin:0 auto;max-width:1120px;padding:1rem;background:var(--paper);color:var(--ink);\
font:16px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}\
h1{font-size:1.6rem;margin:.4rem 0}h2{font-size:1.25rem;margin:2rem 0 .6rem;border-bottom:1px solid var(--grid)}\
h3{font-size:1rem;margin:0 0 .3rem}p{margin:.3rem 0 .8rem}.soft{color:var(--soft)}\
nav{display:flex;flex-wrap:wrap;gap:.2rem 1rem}a{color:var(--s0)}\
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,460px),1fr));gap:1rem}\
figure{margin:0;padding:.8rem;border:1px solid var(--grid);border-radius:8px;min-width:0}\
figure svg{display:block;width:100%;height:auto}figcaption{font-weight:600;margin-bottom:.4rem}\
.note{font-size:.85rem;color:var(--soft)}\
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem}\
th,td{padding:.2rem .6rem;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}\
th:first-child,td:first-child,.words td{text-align:left}.words td{white-space:normal}\
tbody tr:nth-child(odd){background:var(--wash)}.met{color:var(--good)}.missed{color:var(--bad);font-weight:700}\
summary{cursor:pointer;font-size:.85rem;color:var(--soft);padding:.3rem 0}\
code{font:.85em ui-monospace,'SFMono-Regular',Menlo,monospace;overflow-wrap:anywhere}\
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem .8rem;margin:.4rem 0;font-size:.9rem}\
dt{color:var(--soft)}dd{margin:0;min-width:0;overflow-wrap:anywhere}\
@media (max-width:500px){body{padding:.6rem}figure{padding:.5rem}th,td{padding:.2rem .35rem}.goals td:first-child{white-space:normal}.goals .source{display:none}\
}\
@media print{body{max-width:none;padding:0;font-size:11pt}nav{display:none}\
.plots{display:block}figure{display:grid;grid-template-columns:1fr 1fr;gap:0 .8rem;margin-bottom:.5rem}\
figcaption,figure .note{grid-column:1/-1}figure,tr{break-inside:avoid}h2,h3{break-after:avoid}\
details::details-content{content-visibility:visible}details.all{display:none}summary{display:none}\
table{font-size:7pt}.wide{overflow:visible}th,td{padding:.1rem .3rem;white-space:normal}}";

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
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write!(
        out,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <meta name=\"color-scheme\" content=\"light dark\"/>\n<title>hugemm: {}</title>\n\
         <style>{STYLE}{PAGE}</style>\n</head>\n<body>\n",
        escape(&subject(content))
    );
    out.push_str(&format!("<h1>hugemm: {}</h1>\n", escape(&subject(content))));
    if let Some((_, saved)) = content.documents.first() {
        out.push_str(&format!("<p class=\"soft\">{}</p>\n", escape(&machine::line(&saved.environment))));
    }
    contents(&mut out, content);
    if !content.goals.is_empty() {
        goal_table(&mut out, &content.goals);
    }
    for (index, (title, plots)) in content.sections.iter().enumerate() {
        out.push_str(&format!("<h2 id=\"section-{index}\">{}</h2>\n<div class=\"plots\">\n", escape(title)));
        plots.iter().for_each(|plot| figure(&mut out, plot));
        out.push_str("</div>\n");
    }
    if !content.singles.is_empty() {
        out.push_str("<h2 id=\"singles\">Single figures</h2>\n");
        let several = content.documents.len() > 1;
        let lines = content.singles.iter().map(|single| {
            let source = several.then(|| single.source.clone());
            [single.name.clone(), single.value.clone()].into_iter().chain(source).collect()
        });
        let heads = ["figure", "value", "document"].into_iter().take(if several { 3 } else { 2 });
        out.push_str(&table("", &heads.map(str::to_owned).collect::<Vec<_>>(), &lines.collect::<Vec<_>>()));
    }
    documents(&mut out, content);
    out.push_str("</body>\n</html>\n");
    out
}

pub fn subject(content: &Content<'_>) -> String {
    let commands = content.documents.iter().map(|(_, saved)| machine::command_name(&saved.command));
    let mut commands: Vec<String> = commands.collect();
    commands.dedup();
    match commands.len() {
        0..=4 => commands.join(", "),
        more => format!("{} and {} more", commands[..3].join(", "), more - 3),
    }
}

fn contents(out: &mut String, content: &Content<'_>) {
    out.push_str("<nav>");
    if !content.goals.is_empty() {
        out.push_str("<a href=\"#goals\">Goals</a>");
    }
    for (index, (title, _)) in content.sections.iter().enumerate() {
        out.push_str(&format!("<a href=\"#section-{index}\">{}</a>", escape(title)));
    }
    if !content.singles.is_empty() {
        out.push_str("<a href=\"#singles\">Single figures</a>");
    }
    out.push_str("<a href=\"#documents\">Machine and documents</a></nav>\n");
}

fn goal_table(out: &mut String, all: &[Goal]) {
    let count = goals::count(all.iter().map(|goal| goal.verdict.as_str()));
    out.push_str(&format!("<h2 id=\"goals\">Goals: {count}</h2>\n<div class=\"wide\"><table class=\"goals\">\n"));
    let several = all.iter().any(|goal| !goal.source.is_empty());
    let more = if several { "<th class=\"source\">document</th>" } else { "" };
    out.push_str("<thead><tr><th>goal</th><th>verdict</th><th>measured</th><th>wanted</th>");
    out.push_str(&format!("{more}</tr></thead>\n<tbody>\n"));
    for goal in all {
        let (class, word) = match goal.verdict.as_str() {
            goals::MET => ("met", "✓ met"),
            goals::MISSED => ("missed", "✗ missed"),
            other => ("", other),
        };
        let more = if several { format!("<td class=\"source\">{}</td>", escape(&goal.source)) } else { String::new() };
        out.push_str(&format!(
            "<tr><td><code>{}</code></td><td class=\"{class}\">{word}</td><td>{}</td><td>{}</td>{more}</tr>\n",
            breakable(&goal.name),
            escape(&goal.measured),
            escape(&goal.wanted)
        ));
    }
    out.push_str("</tbody></table></div>\n");
}

/// A metric's name that a narrow page may break where its words end.
fn breakable(name: &str) -> String {
    escape(name).replace('.', ".<wbr/>").replace('_', "_<wbr/>")
}

fn figure(out: &mut String, plot: &Plot) {
    out.push_str(&format!("<figure id=\"{}\"><figcaption>{}</figcaption>\n", escape(&plot.id), escape(&plot.title)));
    let picture = plot.is_drawable().then(|| draw(plot)).flatten();
    out.push_str(picture.as_deref().unwrap_or_default());
    if !plot.note.is_empty() {
        out.push_str(&format!("<p class=\"note\">{}</p>\n", escape(plot.note)));
    }
    let (heads, lines) = plot.table();
    match picture {
        Some(_) => {
            let table = table("", &heads, &lines);
            out.push_str(&format!("<details><summary>Figures in {}</summary>{table}</details>\n", escape(&plot.unit)));
        }
        None => {
            let table = if plot.is_drawable() { bars(plot, &heads) } else { table("", &heads, &lines) };
            out.push_str(&format!("<p class=\"note\">{}</p>{table}", escape(&plot.unit_text())));
        }
    }
    out.push_str("</figure>\n");
}

/// A table whose cells have bars: from zero, as long as their figures.
fn bars(plot: &Plot, heads: &[String]) -> String {
    let most = plot.points().map(|point| point.y.abs()).fold(f64::MIN_POSITIVE, f64::max);
    let mut body = String::new();
    for series in &plot.series {
        body += &format!("<tr><td>{}</td>", escape(&series.name));
        for place in plot.places() {
            let bar = |y: f64| format!("<div class=\"bar\" style=\"width:{:.0}%\"></div>", y.abs() / most * 100.0);
            let shown = series.at(place).map(|point| format!("{}{}", escape(&cell(point)), bar(point.y)));
            body += &format!("<td>{}</td>", shown.unwrap_or_default());
        }
        body += "</tr>\n";
    }
    let heads: String = heads.iter().map(|head| format!("<th>{}</th>", escape(head))).collect();
    format!("<div class=\"wide\"><table><thead><tr>{heads}</tr></thead><tbody>\n{body}</tbody></table></div>\n")
}

fn table(class: &str, heads: &[String], lines: &[Vec<String>]) -> String {
    let cells = |tag: &str, cells: &[String]| -> String {
        cells.iter().map(|cell| format!("<{tag}>{}</{tag}>", escape(cell))).collect()
    };
    let body: String = lines.iter().map(|line| format!("<tr>{}</tr>\n", cells("td", line))).collect();
    format!(
        "<div class=\"wide\"><table class=\"{class}\"><thead><tr>{}</tr></thead><tbody>\n{body}</tbody></table></div>\n",
        cells("th", heads)
    )
}

fn documents(out: &mut String, content: &Content<'_>) {
    out.push_str("<h2 id=\"documents\">Machine and documents</h2>\n");
    for (name, saved) in &content.documents {
        out.push_str(&format!("<h3>{}</h3>\n<dl>\n", escape(name)));
        out.push_str(&format!(
            "<dt>command</dt><dd><code>hugemm {}</code>, version {}</dd>\n",
            escape(&saved.command),
            escape(&saved.version)
        ));
        for (what, text) in machine::facts(&saved.environment) {
            out.push_str(&format!("<dt>{what}</dt><dd>{}</dd>\n", escape(&text)));
        }
        out.push_str("</dl>\n");
        let lines: Vec<Vec<String>> = saved.results.iter().map(machine::figure_cells).collect();
        let heads = ["figure", "value", "± stdev", "runs", "unit"].map(str::to_owned);
        out.push_str(&format!("<details class=\"all\"><summary>All {} figures</summary>", lines.len()));
        out.push_str(&table("", &heads, &lines));
        out.push_str("</details>\n");
    }
}
