//! Memory populated in Linux guests and in hugemm's kernel beside them: mapped, and populated by touching each page or by one
//! request, by some workers.

use crate::boot::transcript::of_guest as lines_of;
use crate::document::Row;
use crate::linux::{Cell, NAME};
use crate::results::Results;
use crate::table;
use hugemm_base::PageSize;
use hugemm_workloads::request::{KERNEL_SIZE, PagesFrom, VmCreate};
use hugemm_workloads::size::Size;
use hugemm_workloads::vm_create::RATE;

pub fn report(work: &VmCreate, cells: &[Cell]) -> Results {
    let bytes = Size(work.size.unwrap_or(KERNEL_SIZE));
    let page = work.page.iter().next().unwrap_or(PageSize::Size2M);
    // What Linux's huge pages are: from a pool that has been filled before, or transparent, from free memory.
    let kind = if work.from == PagesFrom::Pool { "hugetlb" } else { "thp" };
    let mut lines = table::new(["kernel", "CPUs", "how", "workers", "GB/s", "± stdev"]);
    let mut rows = Vec::new();
    for cell in cells {
        let Ok(transcript) = &cell.transcript else {
            lines.add_row([&cell.kernel, &cell.cpus.to_string(), "no result"]);
            continue;
        };
        for line in lines_of(transcript) {
            let (how, workers) = (line.label("how"), line.number("workers"));
            let rate = line.samples(&RATE);
            lines.add_row([
                cell.kernel.clone(),
                cell.cpus.to_string(),
                how.clone(),
                workers.to_string(),
                format!("{:.2}", rate.median()),
                format!("{:.1}%", rate.stdev_percent()),
            ]);
            let row = Row::median("linux.mmap", &rate, RATE.unit).label("kernel", cell.kernel.as_str());
            let row = row.label("cpus", cell.cpus).label("how", how).label("workers", workers);
            rows.push(row.label("page_kib", page.bytes() >> 10).label("kind", kind));
        }
    }
    let kind = if page == PageSize::Size4K { "" } else { kind };
    let tables = vec![(format!("{bytes} populated in {page} pages {kind}"), lines)];
    Results { tables, rows, ..Results::default() }
}

/// hugemm against each Linux: a table, and its rows.
pub fn compare(results: &mut Results) {
    let label = |row: &Row, name: &str| row.labels().get(name).cloned().unwrap_or_default();
    let same = |row: &Row, other: &Row| {
        ["cpus", "how", "workers"].into_iter().all(|name| label(row, name) == label(other, name))
    };
    let (ours, theirs): (Vec<&Row>, Vec<&Row>) = results.rows.iter().partition(|row| label(row, "kernel") == NAME);
    let mut lines = table::new(["Linux", "CPUs", "how", "workers", "hugemm / Linux"]);
    let mut ratios = Vec::new();
    for linux in theirs.iter().filter(|row| row.value() > 0.0) {
        let Some(hugemm) = ours.iter().find(|row| same(row, linux)) else { continue };
        let ratio = hugemm.value() / linux.value();
        let text = |name: &str| label(linux, name).to_string().trim_matches('"').to_owned();
        lines.add_row([text("kernel"), text("cpus"), text("how"), text("workers"), format!("{ratio:.2}")]);
        let row = Row::single("linux.mmap.hugemm_vs_linux", ratio, "ratio");
        let labels = ["kernel", "cpus", "how", "workers", "page_kib", "kind"];
        ratios.push(labels.into_iter().fold(row, |row, name| row.label(name, label(linux, name))));
    }
    if !ratios.is_empty() {
        let title = "hugemm against Linux on the same virtual machine, bytes per second";
        results.tables.push((title.to_owned(), lines));
        results.rows.extend(ratios);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::{MET, MISSED};

    fn row(kernel: &str, how: &str, workers: u32, value: f64) -> Row {
        let row = Row::single("linux.mmap", value, "GB/s").label("kernel", kernel).label("cpus", 2);
        row.label("how", how).label("workers", workers)
    }

    fn compared(rows: Vec<Row>) -> Vec<Row> {
        let mut results = Results { rows, ..Results::default() };
        compare(&mut results);
        let goals = results.goals();
        results.rows.into_iter().chain(goals).collect()
    }

    #[test]
    fn the_goal_is_the_worst_of_all() {
        for (second, worst, met) in [(2.0, 2.0, true), (1.5, 1.5, false)] {
            let rows = vec![
                row("6.1", "demand", 1, 2.0),
                row("7.3", "demand", 2, 1.0),
                row(NAME, "demand", 1, 4.0),
                row(NAME, "demand", 2, second),
                row(NAME, "prefault", 2, 0.1),
            ];
            let all = compared(rows);
            let goal = all.last().expect("a goal");
            assert_eq!((goal.metric(), goal.value()), ("vm.create_vs_linux", worst));
            assert_eq!(goal.labels()["verdict"], if met { MET } else { MISSED });
            assert_eq!(all.len(), 5 + 3, "two ways that both have, one goal");
        }
        assert_eq!(compared(vec![row(NAME, "demand", 1, 3.0)]).len(), 1);
    }
}
