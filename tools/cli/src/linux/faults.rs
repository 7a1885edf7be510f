//! Memory populated in Linux guests and in hugemm's kernel beside them: `bench mem mmap` and `bench vm-create`.
//!
//! Both commands are one work: memory mapped, and populated by touching each page or by one request, by some workers.

use crate::boot::lines::Transcript;
use crate::document::Row;
use crate::goals::Goals;
use crate::linux::args::{GuestKind, GuestMmap, GuestVmCreate};
use crate::linux::reference::NAME;
use crate::linux::{Cell, kib, samples};
use crate::results::{self, Line};
use crate::stats::Samples;
use crate::table;
use hugemm_base::PageSize;
use hugemm_workloads::request::{Clearing, Function, PagesFrom, Request, VmCreate};
use hugemm_workloads::size::Size;
use hugemm_workloads::vm_create::{CreateMethod, Created};
use hugemm_workloads::words::{List, Named};
use serde_json::{Value, json};

/// The work.
pub struct Populate {
    size: u64,
    page: PageSize,
    functions: List<Function>,
    workers: List<u32>,
    kind: GuestKind,
}

impl From<&GuestMmap> for Populate {
    fn from(mmap: &GuestMmap) -> Self {
        let (size, functions) = (mmap.size.0, mmap.function);
        Populate { size, page: mmap.page, functions, workers: List::one(1), kind: mmap.kind }
    }
}

impl From<&GuestVmCreate> for Populate {
    fn from(create: &GuestVmCreate) -> Self {
        let function = |how| if how == CreateMethod::Demand { Function::Demand } else { Function::Populate };
        let (size, functions, workers) = (create.size.0, create.how.map(function), create.workers);
        Populate { size, page: create.page, functions, workers, kind: create.kind }
    }
}

impl Populate {
    /// The arguments of the guest's init.
    pub fn words(&self, runs: u32) -> String {
        let Populate { size, functions, workers, .. } = self;
        format!("faults {size} {runs} {} {functions} {workers} {}", kib(self.page), self.kind.name())
    }

    /// The request that is the same work for hugemm's kernel, as it clears by itself.
    pub fn request(&self, runs: u32) -> Request {
        let how = |function| match function {
            Function::Demand => CreateMethod::Demand,
            Function::Populate => CreateMethod::Prefault,
        };
        Request::VmCreate(VmCreate {
            size: Some(self.size),
            page: List::one(self.page),
            how: self.functions.map(how),
            workers: Some(self.workers),
            clear: List::one(Clearing::Bulk),
            from: if self.kind == GuestKind::Hugetlb { PagesFrom::Pool } else { PagesFrom::Frames },
            runs,
        })
    }

    /// The kernel's runs as a Linux guest reports its own.
    pub fn events(&self, transcript: &Transcript) -> Vec<Value> {
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

    /// The table and its rows.
    pub fn report(&self, cells: &[Cell], quiet: bool) -> Vec<Row> {
        let mut lines = table::new(["kernel", "CPUs", "function", "workers", "GB/s", "± stdev"]);
        let mut rows = Vec::new();
        for cell in cells {
            let Ok(events) = &cell.events else {
                lines.add_row([&cell.kernel, &cell.cpus.to_string(), "no result"]);
                continue;
            };
            for (function, workers) in self.ways() {
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
                rows.push(row.label("page_kib", kib(self.page)).label("kind", self.kind.name()));
            }
        }
        if !quiet {
            let pages = Size(kib(self.page) << 10);
            let kind = if self.page == PageSize::Size4K { "" } else { self.kind.name() };
            table::print(&format!("{} populated in {pages} pages {kind}", Size(self.size)), &lines);
        }
        rows
    }

    fn ways(&self) -> impl Iterator<Item = (Function, u32)> {
        self.functions.iter().flat_map(|function| self.workers.iter().map(move |workers| (function, workers)))
    }
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
    fn both_commands_are_one_work() {
        let create = GuestVmCreate {
            size: Size(1 << 30),
            page: PageSize::Size2M,
            how: List::new([CreateMethod::Demand, CreateMethod::Prefault]).expect("short"),
            workers: List::new([1, 4]).expect("short"),
            kind: GuestKind::Thp,
        };
        let work = Populate::from(&create);
        assert_eq!(work.words(3), "faults 1073741824 3 2048 demand,populate 1,4 thp");
        assert_eq!(
            work.request(3).to_string(),
            "bench vm-create size=1073741824 page=2MB how=demand,prefault workers=1,4 clear=bulk from=frames runs=3"
        );
        let mmap = GuestMmap {
            size: Size(4096),
            page: PageSize::Size4K,
            function: List::one(Function::Populate),
            kind: GuestKind::Hugetlb,
        };
        assert_eq!(Populate::from(&mmap).words(1), "faults 4096 1 4 populate 1 hugetlb");
    }
}
