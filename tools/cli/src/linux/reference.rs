//! hugemm's own kernel among the Linux guests: the same machine, the same work, the same table, and the goal between them.

use crate::boot::VirtualMachine;
use crate::boot::lines::Transcript;
use crate::document::Row;
use crate::linux::VirtualCpu;
use crate::linux::args::Linux;
use crate::qemu::Accel;
use crate::results::Results;
use crate::stats::Samples;
use crate::table;
use anyhow::Result;
use hugemm_inspect::interrupt;
use hugemm_workloads::request::Request;
use serde_json::Value;
use std::path::PathBuf;
use std::time::Duration;

/// Its name in the column of kernels.
pub const NAME: &str = "hugemm";

pub struct Reference<'w> {
    image: PathBuf,
    virtual_cpu: VirtualCpu<'w>,
}

impl<'w> Reference<'w> {
    /// Finds or builds the image.
    pub fn new(args: &Linux, virtual_cpu: VirtualCpu<'w>) -> Result<Self> {
        let reference = Reference { image: virtual_cpu.arch.kernel().find(None)?, virtual_cpu };
        args.cpus.iter().try_for_each(|cpus| reference.machine(args, Accel::Tcg, *cpus).check())?;
        Ok(reference)
    }

    fn machine<'a>(&'a self, args: &'a Linux, accel: Accel, cpus: u32) -> VirtualMachine<'a> {
        let (memory, timeout) = (args.memory, Duration::from_secs(args.timeout));
        let VirtualCpu { arch, model } = self.virtual_cpu;
        VirtualMachine { image: &self.image, arch, accel, cpu_model: model, cpus, memory, timeout }
    }

    /// Boots it and lets it do what is asked. The outer error ends the command, the inner one is the cell's.
    pub fn boot(&self, args: &Linux, accel: Accel, cpus: u32, request: &Request) -> Result<Result<Transcript, String>> {
        let done = self.machine(args, accel, cpus).run(request, |_, _, _| {});
        interrupt::check()?;
        Ok(done.map(|done| done.transcript).map_err(|error| format!("{error:#}")))
    }
}

/// hugemm with the optimization on against each Linux with the optimization off: a table, the goal, and their rows.
pub fn compare(results: &mut Results) {
    let rows = &results.rows;
    let label = |row: &Row, name: &str| row.labels().get(name).cloned().unwrap_or_default();
    let mut lines = table::new(["Linux", "CPUs", "up", "down"]);
    let (mut ratios, mut worst) = (Vec::new(), f64::NEG_INFINITY);
    for row in rows.iter().filter(|row| row.metric() == "linux.pool.up_ns" && label(row, "hvo") == "off") {
        let (kernel, cpus) = (label(row, "kernel"), label(row, "cpus"));
        if kernel == NAME {
            continue;
        }
        let ratio = |metric: &str| {
            let value = |kernel: &Value, optimizer: &str| {
                let is = |row: &&Row| {
                    row.metric() == metric
                        && label(row, "kernel") == *kernel
                        && label(row, "cpus") == cpus
                        && label(row, "hvo") == optimizer
                };
                rows.iter().find(is).map(Row::value).filter(|value| *value > 0.0)
            };
            Some(value(&NAME.into(), "on")? / value(&kernel, "off")?)
        };
        let (Some(up), Some(down)) = (ratio("linux.pool.up_ns"), ratio("linux.pool.down_ns")) else { continue };
        worst = worst.max(up).max(down);
        let name = kernel.as_str().unwrap_or_default().to_owned();
        lines.add_row([name, cpus.to_string(), format!("{up:.3}"), format!("{down:.3}")]);
        for (direction, value) in [("up", up), ("down", down)] {
            let row = Row::single("linux.pool.on_vs_off", value, "ratio").label("kernel", kernel.clone());
            ratios.push(row.label("cpus", cpus.clone()).label("direction", direction));
        }
    }
    if !ratios.is_empty() {
        results.goals.at_most("pool.on_vs_linux_off", &Samples::once(worst), "ratio", 0.5);
        let title = "hugemm with vmemmap optimization / Linux without, time per page";
        results.tables.push((title.to_owned(), lines));
        results.rows.extend(ratios);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(kernel: &str, optimizer: &str, direction: &str, value: f64) -> Row {
        let row = Row::single(format!("linux.pool.{direction}_ns"), value, "ns per page").label("kernel", kernel);
        row.label("cpus", 2).label("hvo", optimizer)
    }

    fn compared(rows: Vec<Row>) -> Vec<Row> {
        let mut results = Results { rows, ..Results::default() };
        compare(&mut results);
        results.into_rows()
    }

    fn table_of(down: f64) -> Vec<Row> {
        let mut rows = Vec::new();
        for (kernel, optimizer, up, down) in
            [("6.1", "off", 4.0, 2.0), ("6.1", "on", 8.0, 9.0), (NAME, "off", 1.0, 1.0), (NAME, "on", 2.0, down)]
        {
            rows.extend([row(kernel, optimizer, "up", up), row(kernel, optimizer, "down", down)]);
        }
        compared(rows)
    }

    #[test]
    fn the_goal_is_the_worst_of_all() {
        for (down, worst, met) in [(0.5, 0.5, true), (2.0, 1.0, false)] {
            let rows = table_of(down);
            let goal = rows.last().expect("a goal");
            assert_eq!((goal.metric(), goal.value()), ("pool.on_vs_linux_off", worst));
            assert_eq!(goal.labels()["met"], met);
            assert_eq!(rows.len(), 8 + 3, "one machine, two directions, one goal");
        }
    }

    #[test]
    fn without_both_there_is_no_goal() {
        assert_eq!(compared(vec![row(NAME, "on", "up", 1.0)]).len(), 1);
        assert_eq!(compared(vec![row("6.1", "off", "up", 1.0), row("6.1", "off", "down", 1.0)]).len(), 2);
    }
}
