//! Figures put into the tables of a Markdown page that is written by hand: a row whose first cell names a goal gets its cells
//! under *wanted*, *measured* and *met*, and what stands after the mark says where that was.
//!
//! ```text
//! <!-- measured -->
//! By `hugemm bench headline` on …
//! <!-- end -->
//! ```

use super::content::{Content, Goal};
use super::machine;
use crate::headline::ATOMIC;

const BEGIN: &str = "<!-- measured -->";
const END: &str = "<!-- end -->";

/// The page with its figures; `None` if it has no row of any goal.
pub fn filled(page: &str, content: &Content<'_>) -> Option<String> {
    let mut out = String::with_capacity(page.len());
    let mut columns: Vec<Option<Column>> = Vec::new();
    let (mut found, mut skips) = (false, false);
    for line in page.lines() {
        if line.trim() == END {
            skips = false;
        }
        if skips {
            continue;
        }
        let cells = cells(line);
        match cells.first().and_then(|cell| goal(cell, content)) {
            Some(goal) => {
                found = true;
                let cells = cells.iter().enumerate().map(|(index, cell)| {
                    columns.get(index).copied().flatten().map_or((*cell).to_owned(), |column| column.of(goal))
                });
                out.push_str(&format!("| {} |\n", cells.collect::<Vec<_>>().join(" | ")));
            }
            None => {
                let heads: Vec<_> = cells.iter().map(|cell| Column::named(cell)).collect();
                // A table's head, or the end of a table.
                if heads.contains(&Some(Column::Measured)) || cells.is_empty() {
                    columns = heads;
                }
                out.push_str(line);
                out.push('\n');
            }
        }
        if line.trim() == BEGIN {
            out.push_str(&format!("{}\n", measured(content)));
            skips = true;
        }
    }
    found.then_some(out)
}

/// The cells of a line of a table, which every `|` ends that no backslash stands before; none where it is not one.
fn cells(line: &str) -> Vec<&str> {
    let inner = line.trim().strip_prefix('|').and_then(|line| line.strip_suffix('|'));
    let Some(inner) = inner else { return Vec::new() };
    let (mut cells, mut from) = (Vec::new(), 0);
    for (at, _) in inner.match_indices('|').filter(|(at, _)| !inner[..*at].ends_with('\\')) {
        cells.push(inner[from..at].trim());
        from = at + 1;
    }
    cells.push(inner[from..].trim());
    cells
}

fn goal<'a>(cell: &str, content: &'a Content<'_>) -> Option<&'a Goal> {
    let name = cell.strip_prefix('`')?.strip_suffix('`')?;
    content.goals.iter().find(|goal| goal.name == name)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Column {
    Wanted,
    Measured,
    Met,
}

impl Column {
    fn named(head: &str) -> Option<Self> {
        match head {
            "wanted" => Some(Column::Wanted),
            "measured" => Some(Column::Measured),
            "met" => Some(Column::Met),
            _ => None,
        }
    }

    fn of(self, goal: &Goal) -> String {
        match self {
            Column::Wanted => goal.wanted.clone(),
            Column::Measured => goal.measured.clone(),
            Column::Met if goal.met => "yes".to_owned(),
            Column::Met => "**no**".to_owned(),
        }
    }
}

/// By what and where it was measured, and how much of it is met.
fn measured(content: &Content<'_>) -> String {
    let sources = content.documents.iter().map(|(_, saved)| {
        let atomic = saved.results.iter().find(|row| row.metric() == ATOMIC);
        let atomic =
            atomic.map_or(String::new(), |row| format!("; an uncontended atomic takes {:.1} ns there", row.value()));
        format!("`hugemm {}` on {}{atomic}", machine::command_name(&saved.command), machine::line(&saved.environment))
    });
    let met = content.goals.iter().filter(|goal| goal.met).count();
    format!("By {}. {met} of {} goals are met.", sources.collect::<Vec<_>>().join(", "), content.goals.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::Goals;
    use crate::saved::Saved;
    use crate::stats::Samples;
    use serde_json::json;

    #[test]
    fn rows_of_goals_get_their_figures_and_nothing_else_changes() {
        let mut goals = Goals::new();
        goals.at_least("a.speedup", &Samples::once(12.0), 10.0);
        goals.at_most("b_ns", &Samples::once(7.0), "ns", 6.0);
        let results = goals.into_rows().chain([crate::document::Row::single(ATOMIC, 8.04, "ns")]).collect();
        let environment = json!({"cpu": {"model": "X"}});
        let saved = Saved {
            schema: 2,
            command: "bench headline --json=h".into(),
            version: String::new(),
            environment,
            results,
        };
        let documents = [("h".to_owned(), saved)];
        let content = Content::of(&documents);
        let page = "text\n\n<!-- measured -->\nold\n<!-- end -->\n\n| goal | what | wanted | measured | met |\n|---|---|---|---|---|\n\
                    |`a.speedup`| it \\| that |–||–|\n| `b_ns` | is | – | 1 | yes |\n| `c` | not | – | 3 | yes |\n\n| `a.speedup` | x |\n";
        let filled = filled(page, &content).expect("it has goals");
        assert!(filled.contains("\nBy `hugemm bench headline` on X; an uncontended atomic takes 8.0 ns there. 1 of 2 goals are met.\n<!-- end -->"), "{filled}");
        assert!(!filled.contains("old") && filled.starts_with("text\n\n"), "{filled}");
        assert!(filled.contains("| `a.speedup` | it \\| that | ≥ 10 | 12 | yes |"), "{filled}");
        assert!(filled.contains("| `b_ns` | is | ≤ 6 | 7 ns | **no** |"), "{filled}");
        assert!(filled.contains("| `c` | not | – | 3 | yes |"), "what was not measured stays: {filled}");
        assert!(filled.contains("\n| `a.speedup` | x |\n"), "a table without such columns stays: {filled}");
        assert_eq!(super::filled("no goal here\n", &content), None);
    }
}
