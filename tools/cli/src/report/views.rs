//! Which figures make which plot, where their labels alone do not say it: several metrics in one plot, marks, what a reader should know.
//!
//! A metric that no view takes is plotted by its labels, see `generic`.

use super::plot::Scale;

/// How the rows of one or more metrics become plots.
#[derive(Clone, Debug)]
pub struct View {
    pub title: &'static str,
    /// The metrics, each with its name among the others; empty where there is only one.
    pub metrics: &'static [(&'static str, &'static str)],
    /// The label on the horizontal axis, the axis's title, its scale; without one, bars.
    pub x: Option<(&'static str, &'static str, Scale)>,
    /// Labels that make a group of bars each.
    pub groups: &'static [&'static str],
    /// Labels with a plot for each of their values.
    pub split: &'static [&'static str],
    /// A label and the values that rows may have.
    pub only: Option<(&'static str, &'static [&'static str])>,
    /// Mark where primitives that write past the cache overtake the others; and where the policy of this case switches.
    pub crossover: Option<&'static str>,
    pub note: &'static str,
}

const PLAIN: View =
    View { title: "", metrics: &[], x: None, groups: &[], split: &[], only: None, crossover: None, note: "" };

type X = Option<(&'static str, &'static str, Scale)>;
const REGION: X = Some(("region", "size of the region", Scale::Bytes));
const CHUNK: X = Some(("chunk", "size of the chunk", Scale::Bytes));
const ORDER: X = Some(("order", "order of the block, and its size", Scale::Order));
const CPUS: X = Some(("cpus", "CPUs", Scale::Count));

/// Primitives by size, with the marks of a case.
const fn clearing(
    title: &'static str,
    metrics: &'static [(&'static str, &'static str)],
    x: X,
    case: &'static str,
) -> View {
    View { title, metrics, x, crossover: Some(case), ..PLAIN }
}

const LEFT: &str = "More is better: the same memory is in use on all sides.";

pub const VIEWS: [View; 24] = [
    View {
        title: "Time of each phase",
        metrics: &[("run.time", "")],
        groups: &["phase"],
        note: "The kernel has as much of the run as a process can ask for: its destruction is that of less memory.",
        ..PLAIN
    },
    View {
        title: "CPUs interrupted in each phase",
        metrics: &[("run.interrupts", "")],
        groups: &["phase"],
        note: "A process counts those that it would send, to CPUs that nobody plays; the reference kernel sends them.",
        ..PLAIN
    },
    View {
        title: "Pages stored to swap under pressure, and loaded from it",
        metrics: &[("run.stored", "stored"), ("run.loaded", "loaded")],
        ..PLAIN
    },
    clearing("Cold regions cleared", &[("clear.region_cold", "")], REGION, "cold"),
    clearing(
        "Cold regions cleared and read right after, as a fault does",
        &[("clear.region_cold_touched", "")],
        REGION,
        "cold_touched",
    ),
    clearing("Hot regions cleared", &[("clear.region_hot", "")], REGION, "hot"),
    clearing("Cold memory cleared by chunk, a fence each", &[("clear.chunk", "")], CHUNK, ""),
    clearing("bench mem memset: memory cleared by chunk", &[("bench.mem.memset", "")], CHUNK, ""),
    View {
        title: "What a program loses while another CPU clears",
        metrics: &[("bench.interference.slowdown", "")],
        groups: &["working_set"],
        note: "By size of the program's working set. A fast neighbour disturbs for a shorter time.",
        ..PLAIN
    },
    View {
        title: "Memory populated",
        metrics: &[("bench.mem.mmap", "")],
        groups: &["function"],
        split: &["page"],
        note: "The kernel's faults are real. hugemm's are software faults here, function calls without a trap and without \
               page tables: the sides stand beside each other and are not to be divided by each other.",
        ..PLAIN
    },
    View {
        title: "A virtual machine's memory created",
        metrics: &[("bench.vm_create", "")],
        groups: &["how", "workers"],
        split: &["page"],
        note: "Both sides allocate, clear and enter page tables. hugemm's demand faults are software faults, without a trap: \
               they are not to be divided by the kernel's.",
        ..PLAIN
    },
    View {
        title: "Where the time of a creation goes",
        metrics: &[
            ("bench.vm_create.allocate", "allocating"),
            ("bench.vm_create.clear", "clearing"),
            ("bench.vm_create.map", "page tables"),
        ],
        groups: &["how", "workers"],
        split: &["page"],
        only: Some(("side", &["hugemm-bulk"])),
        ..PLAIN
    },
    View {
        title: "Share of reclaim's time spent in flushing because of ageing",
        metrics: &[("bench.age.ageing_flush_share", "")],
        groups: &["lru"],
        split: &["page"],
        note: "Linux on x86-64 flushes nothing when it ages 4 KiB pages (as noflush); flush is what it does for 2 MiB pages, \
               and on arm64.",
        ..PLAIN
    },
    View {
        title: "Windows of memory touched",
        metrics: &[("bench.age.loops", "")],
        groups: &["lru"],
        split: &["page"],
        note: "More is better: the same processes on the same memory.",
        ..PLAIN
    },
    View {
        title: "Freeing a block of counted pages",
        metrics: &[
            ("bench.free.free_range", "as a range"),
            ("bench.free.free_each", "page by page"),
            ("bench.free.free_whole", "unsplit"),
        ],
        x: ORDER,
        only: Some(("side", &["hugemm, counted"])),
        ..PLAIN
    },
    View {
        title: "Freeing a split block as a range, beside other allocators",
        metrics: &[("bench.free.free_range", "")],
        x: ORDER,
        ..PLAIN
    },
    View {
        title: "Freeing an unsplit block, beside other allocators",
        metrics: &[("bench.free.free_whole", "")],
        x: ORDER,
        ..PLAIN
    },
    View {
        title: "2 MiB extents left after mixed sizes",
        metrics: &[("bench.churn.extents_2m", "")],
        groups: &["when"],
        note: LEFT,
        ..PLAIN
    },
    View {
        title: "1 GiB extents left after mixed sizes",
        metrics: &[("bench.churn.extents_1g", "")],
        groups: &["when"],
        note: LEFT,
        ..PLAIN
    },
    View {
        title: "Growing and shrinking a pool, per page",
        metrics: &[("bench.pool.up_ns", "growing"), ("bench.pool.down_ns", "shrinking")],
        groups: &["n"],
        split: &["page"],
        ..PLAIN
    },
    View {
        title: "What vmemmap optimization costs, on / off",
        metrics: &[("linux.pool.tax_up", "growing"), ("linux.pool.tax_down", "shrinking")],
        x: CPUS,
        note: "1 is free. Stock Linux guests, and hugemm's reference kernel, on the same virtual machine. The ratio is larger where \
               resizing without the optimization takes next to nothing.",
        ..PLAIN
    },
    View {
        title: "hugemm with the optimization beside Linux without: time, as a ratio",
        metrics: &[("linux.pool.on_vs_off", "")],
        x: CPUS,
        note: "Below 1, hugemm is faster although it gives descriptors back and Linux does not.",
        ..PLAIN
    },
    View {
        title: "Growing and shrinking a pool in a guest, per page",
        metrics: &[("linux.pool.up_ns", "growing"), ("linux.pool.down_ns", "shrinking")],
        x: CPUS,
        split: &["kernel"],
        ..PLAIN
    },
    View {
        title: "Interrupts between CPUs of a guest, per resize",
        metrics: &[("linux.pool.up_ipis", "growing"), ("linux.pool.down_ipis", "shrinking")],
        x: CPUS,
        split: &["kernel"],
        ..PLAIN
    },
];
