//! Which figures make which plot: the one place to add a plot of another metric.
//!
//! A metric that no view takes is plotted by its labels alone, see `generic`.

use super::plot::Scale;

/// How the rows of one or more metrics become plots.
#[derive(Clone, Debug)]
pub struct View {
    /// The heading above it.
    pub section: &'static str,
    /// What is shown.
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
    /// What a reader should know.
    pub note: &'static str,
}

/// A view of one metric with nothing special.
const PLAIN: View = View {
    section: "",
    title: "",
    metrics: &[],
    x: None,
    groups: &[],
    split: &[],
    only: None,
    crossover: None,
    note: "",
};

const REGION: Option<(&str, &str, Scale)> = Some(("region", "size of the region", Scale::Bytes));
const CHUNK: Option<(&str, &str, Scale)> = Some(("chunk", "size of the chunk", Scale::Bytes));
const ORDER: Option<(&str, &str, Scale)> = Some(("order", "order of the block, and its size", Scale::Order));
const CPUS: Option<(&str, &str, Scale)> = Some(("cpus", "CPUs", Scale::Count));

const PAGES: Option<(&str, &str, Scale)> = Some(("pages", "pages", Scale::Count));

const HOST: &str = "A virtual machine host";
const CLEARING: &str = "Clearing";
const POPULATING: &str = "Populating";
const ALLOCATING: &str = "Allocating and freeing";
const MACHINES: &str = "Virtual machines";
const AGEING: &str = "Ageing";
const TABLES: &str = "Page tables and shootdowns";
const POOLS: &str = "Huge page pools";

/// All views, in the order of the page.
pub const VIEWS: [View; 43] = [
    View {
        section: HOST,
        title: "Time of each phase",
        metrics: &[("run.time", "")],
        groups: &["phase"],
        note: "The kernel has as much of the run as a process can ask for: its destruction is that of less memory.",
        ..PLAIN
    },
    View { section: HOST, title: "The whole run", metrics: &[("run.total", "")], ..PLAIN },
    View {
        section: HOST,
        title: "TLB flushes in each phase",
        metrics: &[("run.flushes", "")],
        groups: &["phase"],
        ..PLAIN
    },
    View {
        section: HOST,
        title: "CPUs interrupted in each phase",
        metrics: &[("run.interrupts", "")],
        groups: &["phase"],
        note: "A process counts those that it would send, to CPUs that nobody plays; the reference kernel sends them.",
        ..PLAIN
    },
    View {
        section: HOST,
        title: "Bandwidth of the parts that fill memory",
        metrics: &[("run.bandwidth", "")],
        groups: &["phase"],
        only: Some(("phase", &["prefault VM", "pin VM", "4 KiB guests", "pressure"])),
        ..PLAIN
    },
    View {
        section: HOST,
        title: "Time per page of the parts that do not touch memory",
        metrics: &[("run.each", "")],
        groups: &["phase"],
        ..PLAIN
    },
    View {
        section: HOST,
        title: "Pages stored to swap under pressure, and loaded from it",
        metrics: &[("run.stored", "stored"), ("run.loaded", "loaded")],
        ..PLAIN
    },
    View { section: HOST, title: "TLB flushes because of ageing", metrics: &[("run.age_flushes", "")], ..PLAIN },
    View {
        section: HOST,
        title: "Descriptor memory given back",
        metrics: &[("run.saved", "")],
        groups: &["phase"],
        ..PLAIN
    },
    View {
        section: CLEARING,
        title: "Cold regions cleared",
        metrics: &[("clear.region_cold", "")],
        x: REGION,
        crossover: Some("cold"),
        ..PLAIN
    },
    View {
        section: CLEARING,
        title: "Cold regions cleared and read right after, as a fault does",
        metrics: &[("clear.region_cold_touched", "")],
        x: REGION,
        crossover: Some("cold_touched"),
        ..PLAIN
    },
    View {
        section: CLEARING,
        title: "Hot regions cleared",
        metrics: &[("clear.region_hot", "")],
        x: REGION,
        crossover: Some("hot"),
        ..PLAIN
    },
    View {
        section: CLEARING,
        title: "Cold memory cleared by chunk, a fence each",
        metrics: &[("clear.chunk", "")],
        x: CHUNK,
        crossover: Some(""),
        ..PLAIN
    },
    View {
        section: CLEARING,
        title: "bench mem memset: memory cleared by chunk",
        metrics: &[("bench.mem.memset", "")],
        x: CHUNK,
        crossover: Some(""),
        ..PLAIN
    },
    View {
        section: CLEARING,
        title: "One large extent on several CPUs",
        metrics: &[("bench.clear.bandwidth", "")],
        x: CPUS,
        ..PLAIN
    },
    View {
        section: CLEARING,
        title: "Longest time between reschedule points",
        metrics: &[("bench.clear.worst_unit", "")],
        x: CPUS,
        ..PLAIN
    },
    View {
        section: CLEARING,
        title: "What a program loses while another CPU clears",
        metrics: &[("bench.interference.slowdown", "")],
        groups: &["working_set"],
        note: "By size of the program's working set. A fast neighbour disturbs for a shorter time.",
        ..PLAIN
    },
    View {
        section: POPULATING,
        title: "Memory populated",
        metrics: &[("bench.mem.mmap", "")],
        groups: &["function"],
        split: &["page"],
        note: "The kernel's faults are real. hugemm's are software faults here, function calls without a trap and without \
               page tables: the sides stand beside each other and are not to be divided by each other.",
        ..PLAIN
    },
    View {
        section: POPULATING,
        title: "Memory populated by stock Linux guests",
        metrics: &[("linux.mmap", "")],
        x: CPUS,
        split: &["page_kib"],
        ..PLAIN
    },
    View {
        section: MACHINES,
        title: "A virtual machine's memory created",
        metrics: &[("bench.vm_create", "")],
        groups: &["how", "workers"],
        split: &["page"],
        note: "Both sides allocate, clear and enter page tables. hugemm's demand faults are software faults, without a trap: \
               they are not to be divided by the kernel's.",
        ..PLAIN
    },
    View {
        section: MACHINES,
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
        section: AGEING,
        title: "Share of reclaim's time spent in flushing because of ageing",
        metrics: &[("bench.age.ageing_flush_share", "")],
        groups: &["lru"],
        split: &["page"],
        note: "Linux on x86-64 flushes nothing when it ages 4 KiB pages (as noflush); flush is what it does for 2 MiB pages, \
               and on arm64.",
        ..PLAIN
    },
    View {
        section: AGEING,
        title: "Flushes caused by ageing",
        metrics: &[("bench.age.flushes_by_ageing", "")],
        groups: &["lru"],
        split: &["page"],
        ..PLAIN
    },
    View {
        section: AGEING,
        title: "Windows of memory touched",
        metrics: &[("bench.age.loops", "")],
        groups: &["lru"],
        split: &["page"],
        note: "More is better: the same processes on the same memory.",
        ..PLAIN
    },
    View {
        section: ALLOCATING,
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
        section: ALLOCATING,
        title: "Freeing a split block as a range, beside other allocators",
        metrics: &[("bench.free.free_range", "")],
        x: ORDER,
        ..PLAIN
    },
    View {
        section: ALLOCATING,
        title: "Freeing an unsplit block, beside other allocators",
        metrics: &[("bench.free.free_whole", "")],
        x: ORDER,
        ..PLAIN
    },
    View {
        section: ALLOCATING,
        title: "A block taken and freed at once",
        metrics: &[("bench.alloc.pair", "")],
        x: CPUS,
        split: &["order"],
        ..PLAIN
    },
    View {
        section: ALLOCATING,
        title: "Many blocks taken",
        metrics: &[("bench.alloc.alloc", "")],
        x: CPUS,
        split: &["pattern", "order"],
        ..PLAIN
    },
    View {
        section: ALLOCATING,
        title: "Many blocks freed",
        metrics: &[("bench.alloc.free", "")],
        x: CPUS,
        split: &["pattern", "order"],
        ..PLAIN
    },
    View {
        section: ALLOCATING,
        title: "2 MiB extents left after mixed sizes",
        metrics: &[("bench.churn.extents_2m", "")],
        groups: &["when"],
        note: "More is better: the same memory is in use on all sides.",
        ..PLAIN
    },
    View {
        section: ALLOCATING,
        title: "1 GiB extents left after mixed sizes",
        metrics: &[("bench.churn.extents_1g", "")],
        groups: &["when"],
        note: "More is better: the same memory is in use on all sides.",
        ..PLAIN
    },
    View {
        section: TABLES,
        title: "Time of one operation",
        metrics: &[("bench.shootdown.time", "")],
        x: PAGES,
        split: &["operation", "cpus"],
        ..PLAIN
    },
    View {
        section: TABLES,
        title: "TLB flushes of one operation",
        metrics: &[("bench.shootdown.flushes", "")],
        x: PAGES,
        split: &["operation", "policy"],
        ..PLAIN
    },
    View {
        section: TABLES,
        title: "CPUs interrupted by one operation",
        metrics: &[("bench.shootdown.ipis", "")],
        x: PAGES,
        split: &["operation", "policy"],
        ..PLAIN
    },
    View {
        section: POOLS,
        title: "Growing and shrinking a pool, per page",
        metrics: &[("bench.pool.up_ns", "growing"), ("bench.pool.down_ns", "shrinking")],
        groups: &["n"],
        split: &["page"],
        ..PLAIN
    },
    View {
        section: POOLS,
        title: "TLB flushes of one resize",
        metrics: &[("bench.pool.flushes_up", "growing"), ("bench.pool.flushes_down", "shrinking")],
        groups: &["n"],
        split: &["page"],
        ..PLAIN
    },
    View {
        section: POOLS,
        title: "CPUs interrupted by one resize",
        metrics: &[("bench.pool.ipis_up", "growing"), ("bench.pool.ipis_down", "shrinking")],
        x: CPUS,
        split: &["n", "page"],
        ..PLAIN
    },
    View {
        section: POOLS,
        title: "Descriptor memory given back, per page",
        metrics: &[("bench.pool.saved_kib", "")],
        groups: &["n"],
        split: &["page"],
        ..PLAIN
    },
    View {
        section: POOLS,
        title: "What vmemmap optimization costs, on / off",
        metrics: &[("linux.pool.tax_up", "growing"), ("linux.pool.tax_down", "shrinking")],
        x: CPUS,
        note: "1 is free. Stock Linux guests, and hugemm's reference kernel, on the same virtual machine. The ratio is larger where \
               resizing without the optimization takes next to nothing.",
        ..PLAIN
    },
    View {
        section: POOLS,
        title: "hugemm with the optimization beside Linux without: time, as a ratio",
        metrics: &[("linux.pool.on_vs_off", "")],
        x: CPUS,
        note: "Below 1, hugemm is faster although it gives descriptors back and Linux does not.",
        ..PLAIN
    },
    View {
        section: POOLS,
        title: "Growing and shrinking a pool in a guest, per page",
        metrics: &[("linux.pool.up_ns", "growing"), ("linux.pool.down_ns", "shrinking")],
        x: CPUS,
        split: &["kernel"],
        ..PLAIN
    },
    View {
        section: POOLS,
        title: "Interrupts between CPUs of a guest, per resize",
        metrics: &[("linux.pool.up_ipis", "growing"), ("linux.pool.down_ipis", "shrinking")],
        x: CPUS,
        split: &["kernel"],
        ..PLAIN
    },
];
