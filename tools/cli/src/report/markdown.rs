//! The same report as Markdown tables, for a pull request or a README.

use super::content::Content;
use super::html::subject;
use super::machine;
use std::path::Path;

/// The whole report; plots are linked if they have been written to a directory.
pub fn text(content: &Content<'_>, plots: Option<&Path>) -> String {
    let mut out = format!("# hugemm: {}\n", escape(&subject(content)));
    for (name, saved) in &content.documents {
        out.push_str(&format!("\n`hugemm {}` ({}): ", saved.command.replace('`', "'"), escape(name)));
        out.push_str(&format!("{}\n", escape(&machine::line(&saved.environment))));
    }
    if !content.goals.is_empty() {
        let several = content.documents.len() > 1;
        let mut heads = vec!["goal", "wanted", "measured", "met"];
        heads.extend(several.then_some("document"));
        let lines = content.goals.iter().map(|goal| {
            let met = if goal.met { "yes" } else { "**no**" };
            let mut line = vec![escape(&goal.name), escape(&goal.wanted), escape(&goal.measured), met.to_owned()];
            line.extend(several.then(|| escape(&goal.source)));
            line
        });
        out.push_str("\n## Goals\n\n");
        out.push_str(&table(&heads.iter().map(|head| (*head).to_owned()).collect::<Vec<_>>(), lines));
    }
    for (title, section) in &content.sections {
        out.push_str(&format!("\n## {}\n", escape(title)));
        for plot in section {
            out.push_str(&format!("\n### {}\n\n{}.", escape(&plot.title), escape(&plot.unit_text())));
            if !plot.note.is_empty() {
                out.push_str(&format!(" {}", escape(plot.note)));
            }
            out.push_str("\n\n");
            if let (Some(dir), true) = (plots, plot.is_drawable()) {
                out.push_str(&format!("![{}]({}/{}.svg)\n\n", escape(&plot.title), dir.display(), plot.id));
            }
            for mark in &plot.marks {
                out.push_str(&format!("- {}\n", escape(&mark.text)));
            }
            if !plot.marks.is_empty() {
                out.push('\n');
            }
            let (heads, lines) = plot.table();
            let heads: Vec<String> = heads.iter().map(|head| escape(head)).collect();
            out.push_str(&table(&heads, lines.iter().map(|line| line.iter().map(|cell| escape(cell)).collect())));
        }
    }
    if !content.singles.is_empty() {
        out.push_str("\n## Single figures\n\n");
        let lines = content.singles.iter().map(|single| vec![escape(&single.name), escape(&single.value)]);
        out.push_str(&table(&["figure".to_owned(), "value".to_owned()], lines));
    }
    out
}

/// Text that Markdown does not take for markup.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\\' | '|' | '*' | '_' | '`' | '[' | ']' | '<' | '>' | '#' => out.extend(['\\', c]),
            '\n' | '\r' => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

fn table(heads: &[String], lines: impl Iterator<Item = Vec<String>>) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let rule: Vec<String> = (0..heads.len()).map(|i| if i == 0 { "---" } else { "---:" }.to_owned()).collect();
    let body: String = lines.map(|cells| line(&cells)).collect();
    format!("{}{}{body}", line(heads), line(&rule))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_in_names_is_no_markup() {
        assert_eq!(escape("a|b_c*<d>"), "a\\|b\\_c\\*\\<d\\>");
        let table = table(&["x".to_owned(), "y".to_owned()], [vec!["1".to_owned(), "2".to_owned()]].into_iter());
        assert_eq!(table, "| x | y |\n| --- | ---: |\n| 1 | 2 |\n");
    }
}
