//! The tables of goals in Markdown pages: what stands between two marks is made of the goals' rows and of what was measured.
//!
//! ```text
//! <!-- goals -->            all of them
//! <!-- goals: a.b c.d -->   those
//! …
//! <!-- end -->
//! ```

use super::content::Content;
use super::machine;
use crate::goals::{self, ATOMIC, GOALS, Goal, MET};

const END: &str = "<!-- end -->";

/// The page with its figures; `None` if it has no such mark.
pub fn filled(page: &str, content: &Content<'_>) -> Option<String> {
    let (mut out, mut found, mut skips) = (String::with_capacity(page.len()), false, false);
    for line in page.lines() {
        skips &= line.trim() != END;
        if !skips {
            out += &format!("{line}\n");
        }
        if let Some(names) = line.trim().strip_prefix("<!-- goals").and_then(|rest| rest.strip_suffix("-->")) {
            (found, skips) = (true, true);
            out += &block(names.trim_start_matches(':').split_whitespace().collect(), content);
        }
    }
    found.then_some(out)
}

/// By what and where it was measured, and a row for each goal.
fn block(names: Vec<&str>, content: &Content<'_>) -> String {
    let sources = content.documents.iter().map(|(_, saved)| {
        let atomic = saved.results.iter().find(|row| row.metric == ATOMIC);
        let atomic =
            atomic.map_or(String::new(), |row| format!("; an uncontended atomic takes {:.1} ns there", row.value));
        format!("`hugemm {}` on {}{atomic}", machine::command_name(&saved.command), machine::line(&saved.environment))
    });
    let verdicts = content.goals.iter().map(|goal| goal.verdict.as_str());
    let mut out = format!("By {}. {}.\n", sources.collect::<Vec<_>>().join(", "), goals::count(verdicts));
    let mut command = "";
    for goal in GOALS.iter().filter(|goal| names.is_empty() || names.contains(&goal.name)) {
        // All of them by their commands, a few in one table.
        if command.is_empty() || names.is_empty() && command != goal.by {
            let by = if names.is_empty() { format!("\n`hugemm {}`\n", goal.by) } else { String::new() };
            out += &format!("{by}\n| goal | what is compared | wanted | measured | |\n|---|---|---:|---:|---|\n");
            command = goal.by;
        }
        out += &row(goal, content);
    }
    out
}

fn row(goal: &Goal, content: &Content<'_>) -> String {
    let measured = content.goals.iter().find(|measured| measured.name == goal.name);
    let verdict = match measured.map(|measured| measured.verdict.as_str()) {
        None => "",
        Some(MET) => MET,
        Some("beside") => "",
        Some(other) => &format!("**{other}**"),
    };
    let figure = measured.map_or("–", |measured| &measured.measured);
    format!("| `{}` | {} | {} | {figure} | {verdict} |\n", goal.name, goal.says, goal.wanted())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::document::Row;
    use crate::goals::verdict;
    use crate::saved::Saved;
    use serde_json::json;

    #[test]
    fn marks_are_filled_and_nothing_else_changes() {
        let row = |goal: &Goal, value| verdict(Row::single(goal.name, value, "ratio"), goal.bound, goal.wanted);
        let results =
            vec![row(&GOALS[0], 0.99), row(&GOALS[1], 2.0), row(&GOALS[2], 1.5), Row::single(ATOMIC, 8.04, "ns")];
        let saved = Saved {
            schema: 2,
            command: "bench headline --json=h".into(),
            version: String::new(),
            environment: json!({"cpu": {"model": "X"}}),
            results,
        };
        let documents = [("h".to_owned(), saved)];
        let content = Content::of(&documents);
        let page = format!(
            "text\n\n<!-- goals: {} x -->\nBEFORE\n<!-- end -->\n\n| a |\n<!-- goals -->\n<!-- end -->\n",
            GOALS[1].name
        );
        let filled = filled(&page, &content).expect("it has marks");
        let by = "By `hugemm bench headline` on X; an uncontended atomic takes 8.0 ns there. 1 goals are met, 1 missed, 0 not told apart.\n";
        let (few, all) = filled.split_once("| a |").expect("the rest stays");
        assert!(few.starts_with("text\n\n") && few.contains(by) && !few.contains("BEFORE"), "{few}");
        assert!(
            few.contains(&format!("| `{}` | {} | ≥ 2.2 × | 2 | **missed** |\n", GOALS[1].name, GOALS[1].says)),
            "{few}"
        );
        assert_eq!(few.matches("| `").count(), 1);
        assert_eq!(all.matches("\n| `").count(), GOALS.len(), "a row each: {all}");
        assert!(all.contains("| 0.99 | met |") && all.contains("| – | 1.50 |  |") && all.contains("| – |  |"), "{all}");
        assert_eq!(super::filled("| `clear.bulk_vs_rep_stosb` | no mark |\n", &content), None);
    }
}
