//! What Linux guests and hugemm's kernel beside them came to: their runs, and how many times hugemm's figures are Linux's.

use crate::boot::transcript::of_guest as lines_of;
use crate::linux::{Cell, NAME};
use crate::results::{Line, Results};
use crate::sides::pivot;
use hugemm_base::PageSize;
use hugemm_workloads::age::AgeFigures;
use hugemm_workloads::pool::Cycle;
use hugemm_workloads::record::{Metric, Record};
use hugemm_workloads::request::{Age, KERNEL_SIZE, Optimization, PagesFrom, Pool, VmCreate};
use hugemm_workloads::size::Size;
use hugemm_workloads::vm_create::{self, Created};
use hugemm_workloads::vmalloc::{LOOPED, Looped, Test};
use hugemm_workloads::words::Named;
use serde_json::Value;

const POOL: [Metric<Cycle>; 5] = [
    Metric::new("linux.pool.up_ns", "ns per page", |it: &Cycle| it.up.each()).column("up ns/page"),
    Metric::new("linux.pool.down_ns", "ns per page", |it: &Cycle| it.down.each()).column("down ns/page"),
    Metric::new("linux.pool.up_ipis", "per resize", |it: &Cycle| it.up.interrupts as f64).column("up IPIs"),
    Metric::new("linux.pool.down_ipis", "per resize", |it: &Cycle| it.down.interrupts as f64).column("down IPIs"),
    Metric::new("linux.pool.pages", "pages", |it: &Cycle| it.up.report.entered as f64).column("pages"),
];

const RATE: Metric<Created> = Metric { name: "linux.mmap", ..vm_create::RATE };

/// What Linux guests count nothing beside.
const PAIR: Metric<Looped> = Metric { name: "linux.vmalloc.pair", ..LOOPED[0] };

const AGE: [Metric<AgeFigures>; 8] = [
    Metric::new("linux.age.windows", "1/s", AgeFigures::loops).column("windows/s"),
    // None without reclaim: what is not finite is left out.
    Metric::new("linux.age.windows_per_reclaim_second", "1/s", |it: &AgeFigures| {
        it.windows as f64 * 1e9 / it.reclaim_ns as f64
    })
    .column("windows/CPU s"),
    Metric::new("linux.age.out", "1/s", |it: &AgeFigures| it.stolen as f64 / it.seconds).column("out/s"),
    Metric::new("linux.age.in", "1/s", |it: &AgeFigures| it.swap.loads as f64 / it.seconds).column("in/s"),
    Metric::new("linux.age.scanned", "1/s", |it: &AgeFigures| it.lru.scanned as f64 / it.seconds).column("scanned/s"),
    Metric::new("linux.age.ipis", "1/s", |it: &AgeFigures| it.shootdowns.interrupts as f64 / it.seconds)
        .column("IPIs/s"),
    Metric::new("linux.age.refused", "pages", |it: &AgeFigures| it.touched.refused as f64).column("refused"),
    Metric::new("linux.age.reclaim_cpus", "CPUs", |it: &AgeFigures| it.reclaim_ns as f64 / 1e9 / it.seconds)
        .column("reclaim, CPUs"),
];

/// What a ratio of two kernels is called.
const fn ratio(name: &'static str, head: &'static str) -> Metric<f64> {
    Metric::new(name, "ratio", |it| *it).column(head)
}

/// The lines of all guests, by where each was measured and what `labels` says.
fn of_cells<R: Record>(cells: &[Cell], labels: impl Fn(&Line<R>) -> Vec<(&'static str, Value)>) -> Vec<Line<R>> {
    let of = |cell: &Cell| -> Vec<Line<R>> {
        let label = |line: Line<R>| {
            let place = [("kernel", Value::from(&*cell.kernel)), ("cpus", cell.cpus.into())];
            let labels = place.into_iter().chain(labels(&line)).map(|(name, value)| (name.to_owned(), value));
            Line { labels: labels.collect(), runs: line.runs }
        };
        cell.transcript.iter().flat_map(lines_of).map(label).collect()
    };
    cells.iter().flat_map(of).collect()
}

/// The table and the rows of a metric's figures; a table is left out where there are none.
fn add<R>(results: &mut Results, title: String, down: &[&str], lines: &[Line<R>], metrics: &[Metric<R>]) {
    if !lines.is_empty() {
        results.add(title, pivot(lines, "", down, "", metrics), lines, metrics);
    }
}

/// How many times the second line's figure the first one's is, of all two of which `set` says so: with the second's labels.
fn ratios<R>(lines: &[Line<R>], metric: &Metric<R>, set: impl Fn(&Line<R>, &Line<R>) -> bool) -> Vec<Line<f64>> {
    let value = |line: &Line<R>| Some(line.samples(metric).median()).filter(|value| *value > 0.0);
    let of = |b: &Line<R>| {
        let a = lines.iter().find(|a| set(a, b))?;
        Some(Line { labels: b.labels.clone(), runs: vec![value(a)? / value(b)?] })
    };
    lines.iter().filter_map(of).collect()
}

fn same<R>(a: &Line<R>, b: &Line<R>, labels: &[&str]) -> bool {
    labels.iter().all(|name| a.label(name) == b.label(name))
}

/// Whether a line is hugemm's, and whether the other is not.
fn beside<R>(a: &Line<R>, b: &Line<R>) -> bool {
    (a.label("kernel") == NAME) && (b.label("kernel") != NAME)
}

pub fn pool(pool: &Pool, cells: &[Cell], compares: bool) -> Results {
    let mut results = Results::default();
    let name = |on| if on { Optimization::On } else { Optimization::Off }.name();
    let lines: Vec<Line<Cycle>> =
        of_cells(cells, |line| vec![("hvo", name(line.labels.get("hvo") == Some(&true.into())).into())]);
    let wanted = pool.n.and_then(|n| n.iter().next()).unwrap_or(0);
    let title = format!("Pool of {wanted} {} pages; medians", pool.page);
    add(&mut results, title, &["kernel", "cpus", "hvo"], &lines, &POOL);
    resized(&mut results, &lines, compares);
    results
}

/// What vmemmap optimization costs each kernel; and hugemm with it beside each Linux without.
fn resized(results: &mut Results, lines: &[Line<Cycle>], compares: bool) {
    let is_on = |a: &Line<Cycle>, b: &Line<Cycle>| [a, b].map(|line| line.label("hvo")) == ["on", "off"];
    let taxes = [ratio("linux.pool.tax_up", "up"), ratio("linux.pool.tax_down", "down")];
    for ((metric, tax), direction) in POOL.iter().zip(taxes).zip(["up", "down"]) {
        let taxed = ratios(lines, metric, |a, b| is_on(a, b) && same(a, b, &["kernel", "cpus"]));
        let title = format!("What vmemmap optimization costs, {direction}: time on / off");
        add(results, title, &["kernel", "cpus"], &without(taxed, "hvo"), &[tax]);
        let against = ratios(lines, metric, |a, b| compares && is_on(a, b) && beside(a, b) && same(a, b, &["cpus"]));
        let mut against = without(against, "hvo");
        against.iter_mut().for_each(|line| _ = line.labels.insert("direction".to_owned(), direction.into()));
        let title = format!("hugemm with vmemmap optimization / Linux without, {direction}: time per page");
        add(results, title, &["kernel", "cpus"], &against, &[ratio("linux.pool.on_vs_off", "ratio")]);
    }
}

fn without<R>(mut lines: Vec<Line<R>>, label: &str) -> Vec<Line<R>> {
    lines.iter_mut().for_each(|line| _ = line.labels.remove(label));
    lines
}

pub fn faults(work: &VmCreate, cells: &[Cell], compares: bool) -> Results {
    let mut results = Results::default();
    let page = work.page.iter().next().unwrap_or(PageSize::Size2M);
    // What Linux's huge pages are: from a pool that has been filled before, or transparent, from free memory.
    let kind = if work.from == PagesFrom::Pool { "hugetlb" } else { "thp" };
    let lines: Vec<Line<Created>> = of_cells(cells, |line| {
        let (how, workers) = (line.label("how"), line.number("workers"));
        vec![
            ("how", how.into()),
            ("workers", workers.into()),
            ("page_kib", (page.bytes() >> 10).into()),
            ("kind", kind.into()),
        ]
    });
    let kind = if page == PageSize::Size4K { "" } else { kind };
    let title = format!("{} populated in {page} pages {kind}", Size(work.size.unwrap_or(KERNEL_SIZE)));
    add(&mut results, title, &["kernel", "cpus", "how", "workers"], &lines, &[RATE]);
    if compares {
        populated(&mut results, &lines);
    }
    results
}

fn populated(results: &mut Results, lines: &[Line<Created>]) {
    let against = ratios(lines, &RATE, |a, b| beside(a, b) && same(a, b, &["cpus", "how", "workers"]));
    let title = "hugemm against Linux on the same virtual machine, bytes per second".to_owned();
    let metric = ratio("linux.mmap.hugemm_vs_linux", "hugemm / Linux");
    add(results, title, &["kernel", "cpus", "how", "workers"], &against, &[metric]);
}

pub fn age(work: &Age, cells: &[Cell], compares: bool) -> Results {
    let mut results = Results::default();
    let procs = work.procs;
    let mut lines: Vec<Line<AgeFigures>> =
        of_cells(cells, |line| vec![("lru", line.label("lru").into()), ("procs", procs.into())]);
    // The first run only warms up.
    lines.iter_mut().for_each(|line| _ = line.runs.remove(0));
    let [shared, memory, _] = work.sizes(Age::MEMORY).map(Size);
    let title = format!("{procs} processes share {shared}, {memory} available, half of it at most for swap");
    add(&mut results, title, &["kernel", "cpus", "lru"], &lines, &AGE);
    if compares {
        aged(&mut results, &lines);
    }
    results
}

/// hugemm's best lists against the best Linux guest's, for each number of CPUs.
fn aged(results: &mut Results, lines: &[Line<AgeFigures>]) {
    for (metric, name) in AGE.iter().zip(["linux.age.vs_linux", "linux.age.vs_linux_cpu"]) {
        let value = |line: &Line<AgeFigures>| line.samples(metric).median();
        let best = |of: &Line<AgeFigures>| {
            let rivals =
                lines.iter().filter(|line| same(line, of, &["cpus"]) && !beside(line, of) && !beside(of, line));
            rivals.map(value).fold(0.0, f64::max)
        };
        let mut against = ratios(lines, metric, |a, b| {
            beside(a, b) && same(a, b, &["cpus"]) && value(a) == best(a) && value(b) == best(b)
        });
        against.dedup_by(|a, b| same(a, b, &["cpus"]));
        let title = format!("hugemm's best against Linux's: {}", metric.head);
        add(results, title, &["kernel", "cpus"], &without(against, "procs"), &[ratio(name, "hugemm / Linux")]);
    }
}

pub fn vmalloc(cells: &[Cell], compares: bool) -> Results {
    let mut results = Results::default();
    let lines = of_cells(cells, |line| vec![("test", line.label("test").into())]);
    looped(&mut results, lines, compares);
    results
}

fn looped(results: &mut Results, mut lines: Vec<Line<Looped>>, compares: bool) {
    lines.retain(|line| Test::by_name(&line.label("test")).is_some_and(Test::is_of_linux));
    let title = "Kernel areas taken and freed; medians".to_owned();
    add(results, title, &["test", "kernel", "cpus"], &lines, &[PAIR]);
    let against = ratios(&lines, &PAIR, |a, b| compares && beside(a, b) && same(a, b, &["cpus", "test"]));
    let (title, metric) =
        ("hugemm against Linux: time per area", ratio("linux.vmalloc.hugemm_vs_linux", "hugemm / Linux"));
    add(results, title.to_owned(), &["test", "kernel", "cpus"], &against, &[metric]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::{MET, MISSED};

    fn line<R>(kernel: &str, cpus: u32, labels: &[(&str, &str)], run: R) -> Line<R> {
        let mut line = Line::new([("kernel", kernel.into()), ("cpus", cpus.into())]);
        line.labels.extend(labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).into())));
        Line { runs: vec![run], ..line }
    }

    /// The only goal that these lines decide, its figure and its verdict.
    #[track_caller]
    fn judged<R>(lines: &[Line<R>], compare: impl Fn(&mut Results, &[Line<R>]), goal: &str, value: f64, verdict: &str) {
        let mut results = Results::default();
        compare(&mut results, lines);
        let goals = results.goals();
        let found: Vec<_> = goals.iter().map(|row| (&*row.metric, row.value, &row.labels["verdict"])).collect();
        assert_eq!(found, [(goal, value, &Value::from(verdict))]);
        results.rows.clear();
        compare(&mut results, &lines[..1]);
        assert!(results.goals().is_empty(), "without both there is no goal");
    }

    #[test]
    fn pools_are_judged_by_the_worst() {
        let cycle = |up, down| {
            let mut cycle = Cycle::default();
            (cycle.up.nanos, cycle.down.nanos) = (up, down);
            (cycle.up.report.entered, cycle.down.report.left) = (1, 1);
            cycle
        };
        for (down, worst, verdict) in [(50, 0.5, MET), (200, 1.0, MISSED)] {
            let lines =
                [("6.1", "off", 400, 200), ("6.1", "on", 800, 900), (NAME, "off", 100, 100), (NAME, "on", 200, down)];
            let lines = lines.map(|(kernel, hvo, up, down)| line(kernel, 2, &[("hvo", hvo)], cycle(up, down)));
            judged(&lines, |results, lines| resized(results, lines, true), "pool.on_vs_linux_off", worst, verdict);
        }
    }

    #[test]
    fn populating_is_judged_by_the_worst_that_both_have() {
        let created = |bytes| Created { bytes, nanos: 1, ..Created::default() };
        for (second, worst, verdict) in [(2, 2.0, MET), (1, 1.0, MISSED)] {
            let lines = [
                ("6.1", "demand", "1", 2),
                ("7.3", "demand", "2", 1),
                (NAME, "demand", "1", 4),
                (NAME, "demand", "2", second),
                (NAME, "prefault", "2", 0),
            ];
            let lines = lines.map(|(kernel, how, workers, bytes)| {
                line(kernel, 2, &[("how", how), ("workers", workers)], created(bytes))
            });
            judged(&lines, populated, "vm.create_vs_linux", worst, verdict);
        }
    }

    #[test]
    fn areas_stand_beside_linux_where_it_has_them() {
        let of =
            |kernel, test, nanos| line(kernel, 1, &[("test", test)], Looped { areas: 2, nanos, ..Looped::default() });
        let lines = vec![
            of("6.1", "fix_size_alloc", 80),
            of(NAME, "fix_size_alloc", 20),
            of("6.1", "area_16m", 10),
            of(NAME, "pcpu", 6),
        ];
        let mut results = Results::default();
        looped(&mut results, lines, true);
        let found: Vec<_> = results.rows.iter().map(|row| (&*row.metric, &row.labels["test"], row.value)).collect();
        let [fix, large] = ["fix_size_alloc", "area_16m"].map(Value::from);
        let pair = PAIR.name;
        assert_eq!(
            found,
            [
                (pair, &fix, 40.0),
                (pair, &fix, 10.0),
                (pair, &large, 5.0),
                ("linux.vmalloc.hugemm_vs_linux", &fix, 0.25)
            ]
        );
    }

    #[test]
    fn the_best_of_each_side_age() {
        let windows = |windows| AgeFigures { seconds: 1.0, windows, ..AgeFigures::default() };
        let of = |all: &[(&str, u32, &str, u64)]| -> Vec<Line<AgeFigures>> {
            all.iter().map(|(kernel, cpus, lru, count)| line(kernel, *cpus, &[("lru", lru)], windows(*count))).collect()
        };
        let mut all = vec![
            ("6.1", 1, "classic", 10),
            ("6.1", 1, "generations", 20),
            ("6.12", 1, "classic", 15),
            (NAME, 1, "classic", 60),
            (NAME, 1, "generations", 30),
        ];
        judged(&of(&all), aged, "age.vs_linux", 3.0, MET);
        all.extend([("6.1", 2, "classic", 10), (NAME, 2, "classic", 15)]);
        judged(&of(&all), aged, "age.vs_linux", 1.5, MISSED);
    }
}
