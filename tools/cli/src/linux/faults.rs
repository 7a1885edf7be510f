//! Memory populated in Linux guests and in hugemm's kernel beside them: mapped, and populated by touching each page or by one
//! request, by some workers.

use crate::boot::lines::Transcript;
use crate::document::Row;
use crate::goals::Goals;
use crate::linux::reference::NAME;
use crate::linux::{Cell, kib, samples};
use crate::results::{self, Line};
use crate::stats::Samples;
use crate::table;
use hugemm_base::PageSize;
use hugemm_workloads::request::{Function, KERNEL_SIZE, PagesFrom, VmCreate};
use hugemm_workloads::size::Size;
use hugemm_workloads::vm_create::{CreateMethod, Created};
use hugemm_workloads::words::{List, Named};
use serde_json::{Value, json};

/// As Linux has it.
fn function(how: CreateMethod) -> Function {
    if how == CreateMethod::Demand { Function::Demand } else { Function::Populate }
}

/// What Linux's huge pages are: from a pool that has been filled before, or transparent, from free memory.
fn kind(work: &VmCreate) -> &'static str {
    if work.from == PagesFrom::Pool { "hugetlb" } else { "thp" }
}

fn size(work: &VmCreate) -> (u64, PageSize) {
    (work.size.unwrap_or(KERNEL_SIZE), work.page.iter().next().unwrap_or(PageSize::Size2M))
}

/// Numbers of workers; one where nothing is said.
fn workers(work: &VmCreate) -> List<u32> {
    work.workers.unwrap_or(List::one(1))
}

pub fn words(work: &VmCreate) -> String {
    let ((size, page), functions) = (size(work), work.how.map(function));
    format!("faults {size} {} {} {functions} {} {}", work.runs, kib(page), workers(work), kind(work))
}

/// The kernel's runs as a Linux guest reports its own.
pub fn events(transcript: &Transcript) -> Vec<Value> {
    let of_line = |line: Line<Created>| {
        let function = if line.label("how") == "demand" { "demand" } else { "populate" };
        let event = |(run, it): (usize, &Created)| {
            let workers = line.number("workers");
            json!({"run": run + 1, "function": function, "workers": workers, "bytes": it.bytes, "ns": it.nanos})
        };
        line.runs.iter().enumerate().map(event).collect::<Vec<_>>()
    };
    results::of_guest(transcript).into_iter().flat_map(of_line).collect()
}

pub fn report(work: &VmCreate, cells: &[Cell], quiet: bool) -> Vec<Row> {
    let ((bytes, page), kind) = (size(work), kind(work));
    let mut lines = table::new(["kernel", "CPUs", "function", "workers", "GB/s", "± stdev"]);
    let mut rows = Vec::new();
    for cell in cells {
        let Ok(events) = &cell.events else {
            lines.add_row([&cell.kernel, &cell.cpus.to_string(), "no result"]);
            continue;
        };
        let ways =
            work.how.iter().flat_map(|how| workers(work).iter().map(move |n| (function(how), n)).collect::<Vec<_>>());
        for (function, workers) in ways {
            let mine: Vec<Value> = events.iter().filter(|event| event["workers"] == workers).cloned().collect();
            let gbps = |event: &Value| Some(event["bytes"].as_f64()? / event["ns"].as_f64()?);
            let rate = samples(&mine, "function", function.name(), gbps);
            if rate.runs() == 0 {
                continue;
            }
            lines.add_row([
                cell.kernel.clone(),
                cell.cpus.to_string(),
                function.name().to_owned(),
                workers.to_string(),
                format!("{:.2}", rate.median()),
                format!("{:.1}%", rate.stdev_percent()),
            ]);
            let row = Row::median("linux.mmap", &rate, "GB/s").label("kernel", cell.kernel.as_str());
            let row = row.label("cpus", cell.cpus).label("function", function.name()).label("workers", workers);
            rows.push(row.label("page_kib", kib(page)).label("kind", kind));
        }
    }
    if !quiet {
        let kind = if page == PageSize::Size4K { "" } else { kind };
        table::print(&format!("{} populated in {} pages {kind}", Size(bytes), Size(page.bytes())), &lines);
    }
    rows
}

/// hugemm against each Linux: a table, the goal that it is ahead of all of them, and their rows.
pub fn compare(rows: &[Row], quiet: bool) -> Vec<Row> {
    let label = |row: &Row, name: &str| row.labels().get(name).cloned().unwrap_or_default();
    let same = |row: &Row, other: &Row| {
        ["cpus", "function", "workers"].into_iter().all(|name| label(row, name) == label(other, name))
    };
    let (ours, theirs): (Vec<&Row>, Vec<&Row>) = rows.iter().partition(|row| label(row, "kernel") == NAME);
    let mut lines = table::new(["Linux", "CPUs", "function", "workers", "hugemm / Linux"]);
    let (mut ratios, mut worst) = (Vec::new(), f64::INFINITY);
    for linux in theirs.iter().filter(|row| row.value() > 0.0) {
        let Some(hugemm) = ours.iter().find(|row| same(row, linux)) else { continue };
        let ratio = hugemm.value() / linux.value();
        worst = worst.min(ratio);
        let text = |name: &str| label(linux, name).to_string().trim_matches('"').to_owned();
        lines.add_row([text("kernel"), text("cpus"), text("function"), text("workers"), format!("{ratio:.2}")]);
        let row = Row::single("linux.mmap.hugemm_vs_linux", ratio, "ratio");
        let labels = ["kernel", "cpus", "function", "workers", "page_kib", "kind"];
        ratios.push(labels.into_iter().fold(row, |row, name| row.label(name, label(linux, name))));
    }
    if ratios.is_empty() {
        return ratios;
    }
    let (mut samples, mut goals) = (Samples::default(), Goals::new());
    samples.push(worst);
    goals.at_least("vm.create_vs_linux", &samples, 2.0);
    if !quiet {
        table::print("hugemm against Linux on the same virtual machine, bytes per second", &lines);
        goals.print();
    }
    ratios.extend(goals.into_rows());
    ratios
}

#[cfg(test)]
mod tests {
    use super::*;
    use hugemm_workloads::request::Request;

    fn row(kernel: &str, function: &str, workers: u32, value: f64) -> Row {
        let row = Row::single("linux.mmap", value, "GB/s").label("kernel", kernel).label("cpus", 2);
        row.label("function", function).label("workers", workers)
    }

    #[test]
    fn the_goal_is_the_worst_of_all() {
        for (second, worst, met) in [(2.0, 2.0, true), (1.5, 1.5, false)] {
            let rows = [
                row("6.1", "demand", 1, 2.0),
                row("7.3", "demand", 2, 1.0),
                row(NAME, "demand", 1, 4.0),
                row(NAME, "demand", 2, second),
                row(NAME, "populate", 2, 0.1),
            ];
            let all = compare(&rows, true);
            let goal = all.last().expect("a goal");
            assert_eq!((goal.metric(), goal.value()), ("vm.create_vs_linux", worst));
            assert_eq!(goal.labels()["met"], met);
            assert_eq!(all.len(), 3, "two ways that both have, one goal");
        }
        assert!(compare(&[row(NAME, "demand", 1, 3.0)], true).is_empty());
    }

    #[test]
    fn the_guest_is_told_all_of_the_work() {
        let line =
            "bench vm-create size=1073741824 page=2MB how=demand,prefault workers=1,4 clear=bulk from=frames runs=3";
        let Ok(Request::VmCreate(work)) = line.parse() else { panic!("{line}") };
        assert_eq!(words(&work), "faults 1073741824 3 2048 demand,populate 1,4 thp");
        let pool = VmCreate { from: PagesFrom::Pool, workers: None, ..work };
        assert_eq!(words(&pool), "faults 1073741824 3 2048 demand,populate 1 hugetlb");
    }
}
