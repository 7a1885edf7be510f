//! `hugemm doctor`: what of this machine limits the results, each with the remedy.

pub mod checks;
mod facts;

use crate::document::{self, Document, Row};
use crate::lease::doctor as lease;
use crate::table;
use crate::unmeasured_args::Doctor;
use anyhow::{Result, bail};
use checks::{Finding, State};
use comfy_table::CellAlignment;
use facts::Facts;
use hugemm_workloads::words::Named;

pub fn run(args: &Doctor) -> Result<()> {
    document::check_writable(args.common.json.as_deref())?;
    let facts = Facts::read()?;
    let (findings, leases) = (checks::all(&facts), lease::findings(None)?);
    if !args.common.json_only() {
        print("What of this machine limits the results", &findings);
        let count = |state| findings.iter().filter(|f| f.state == state).count();
        println!(
            "\n  {} ok, {} limit, {} block 'make run'",
            count(State::Ok),
            count(State::Limits),
            count(State::Blocks)
        );
        print(lease::TITLE, &leases);
    }
    let rows = findings.iter().chain(&leases).map(row).collect();
    Document::new(facts.environment, rows).write(args.common.json.as_deref())?;
    let blocking: Vec<&str> = findings.iter().filter(|f| f.state == State::Blocks).map(|f| f.name).collect();
    if !blocking.is_empty() {
        bail!("'make run' cannot work here: {}; the remedies stand beside them", blocking.join(", "));
    }
    Ok(())
}

pub fn print(title: &str, findings: &[Finding]) {
    let mut lines = table::new(["", "", "what was found", "remedy"]);
    for index in 1..4 {
        if let Some(column) = lines.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Left);
        }
    }
    for finding in findings {
        lines.add_row([finding.state.name(), finding.name, &finding.fact, finding.remedy.as_deref().unwrap_or("")]);
    }
    table::print(title, &lines);
}

pub fn row(finding: &Finding) -> Row {
    let severity = match finding.state {
        State::Ok => 0.0,
        State::Limits => 1.0,
        State::Blocks => 2.0,
    };
    Row::single(format!("doctor.{}", finding.name.replace(' ', "_")), severity, "severity")
        .label("state", finding.state.name())
        .label("found", finding.fact.as_str())
        .label("remedy", finding.remedy.as_deref())
}
