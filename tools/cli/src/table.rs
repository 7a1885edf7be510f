//! Tables on the terminal.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

/// A table with these column heads; the first column is left-aligned, the others right.
pub fn new(heads: impl IntoIterator<Item = impl Into<String>>) -> Table {
    let heads: Vec<String> = heads.into_iter().map(Into::into).collect();
    let columns = heads.len();
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled).set_header(heads);
    for index in 1..columns {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

pub fn print(title: &str, table: &Table) {
    println!("\n{title}");
    // Trailing blanks of right-padded cells would only make diffs and copies ugly.
    for line in table.to_string().lines() {
        println!("  {}", line.trim_end());
    }
}
