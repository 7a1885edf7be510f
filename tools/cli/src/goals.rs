//! The goals: each is one row that says what is wanted of which recorded figures, and which command records them. From these come the
//! verdicts of every command, what `hugemm bench headline` runs, its help, and the tables of docs/goals.md and README.
//!
//! A goal is judged over the spread of its runs: where what is wanted lies within the 95 % confidence interval, it is neither met nor missed.

use crate::document::Row;
use crate::saved::plain;
use crate::stats::{Samples, margin};
use crate::table;
use comfy_table::Table;
use hugemm_base::PageSize;
use hugemm_clear::{Primitive, PrimitiveClass};
use hugemm_workloads::words::Named;

hugemm_workloads::named! {
    /// On which side of its goal a figure is wanted. Stored with the row: a figure that equals its goal does not show it.
    Bound {
        /// The more the better.
        AtLeast = "at least",
        /// The less the better.
        AtMost = "at most",
        /// Nothing is wanted of it: it stands beside a goal that cannot be read without it.
        Beside = "beside",
    }
}

impl Bound {
    pub fn sign(self) -> &'static str {
        match self {
            Bound::AtLeast => "≥",
            Bound::AtMost => "≤",
            Bound::Beside => "–",
        }
    }

    pub fn of(row: &Row) -> Option<Self> {
        Bound::by_name(row.labels.get("bound")?.as_str()?)
    }

    /// What a figure says that is uncertain by `margin`.
    fn verdict(self, value: f64, margin: f64, wanted: f64) -> &'static str {
        let on_its_side = match self {
            Bound::AtLeast => value >= wanted,
            Bound::AtMost => value <= wanted,
            Bound::Beside => return "beside",
        };
        match on_its_side {
            _ if margin > 0.0 && (value - wanted).abs() < margin => NOT_TOLD_APART,
            true => MET,
            false => MISSED,
        }
    }
}

pub const MET: &str = "met";
pub const MISSED: &str = "missed";
pub const NOT_TOLD_APART: &str = "not told apart";

/// The metric of an uncontended atomic, the floor of what drops a reference.
pub const ATOMIC: &str = "machine.atomic";

pub struct Goal {
    pub name: &'static str,
    pub bound: Bound,
    pub wanted: f64,
    unit: &'static str,
    /// The command that records the figures, after `hugemm`.
    pub by: &'static str,
    /// What is compared, and what is charged.
    pub says: &'static str,
    of: fn(Figures<'_>) -> Option<Samples>,
}

impl Goal {
    /// Whether a process on this machine can measure it without more than this program.
    pub fn is_of_headline(&self) -> bool {
        !self.by.starts_with("linux") && !self.by.starts_with("bench lease")
    }

    /// What is wanted, as tables show it.
    pub fn wanted(&self) -> String {
        match self.bound {
            Bound::Beside => self.bound.sign().to_owned(),
            bound => format!("{} {}{}", bound.sign(), self.wanted, unit(self.unit)),
        }
    }
}

type Of = fn(Figures<'_>) -> Option<Samples>;

const fn at_least(name: &'static str, wanted: f64, by: &'static str, says: &'static str, of: Of) -> Goal {
    Goal { name, bound: Bound::AtLeast, wanted, unit: "ratio", by, says, of }
}

const fn at_most(name: &'static str, wanted: f64, by: &'static str, says: &'static str, of: Of) -> Goal {
    Goal { name, bound: Bound::AtMost, wanted, unit: "ratio", by, says, of }
}

const fn beside(name: &'static str, by: &'static str, says: &'static str, of: Of) -> Goal {
    Goal { name, bound: Bound::Beside, wanted: f64::NAN, unit: "ratio", by, says, of }
}

impl Goal {
    const fn in_unit(self, unit: &'static str) -> Goal {
        Goal { unit, ..self }
    }
}

const PROBE: &str = "probe --runs 4";
const PAIRS: &str = "bench alloc --pattern pair --orders 0,9 --threads 1,2 --counted --no-peers";
const RANDOM: &str = "bench alloc --pattern random --orders 0 --threads 1 --held 131072";
const FREE: &str = "bench free --order 9 --no-peers";
const CHURN: &str = "bench churn --seconds 1";
const MAP: &str = "bench map --size 64GB --runs 3";
const POOL: &str = "bench pool --hvo on --flush batch --runs 5";
const AGE: &str = "bench age --young batch --lru classic --seconds 1";
const CREATE: &str = "bench vm-create --how demand,prefault --workers 1 --clear bulk --from frames";
const HEAP: &str = "bench heap --threads 1,2";
const LEASE: &str = "bench lease";
const LINUX_POOL: &str = "linux VMLINUZ --reference -- bench pool -n 2000";
const LINUX_AGE: &str = "linux VMLINUZ --accel icount --cpus 1 --reference -- bench age";
const LINUX_CREATE: &str = "linux VMLINUZ --reference -- bench vm-create -s 1GB";

/// All of them, in the order in which they are shown.
pub const GOALS: [Goal; 27] = [
    at_least(
        "clear.bulk_vs_best_stream",
        0.97,
        PROBE,
        "1 GiB of cold memory cleared by the policy, with its fence, beside the best streaming loop that this CPU has",
        |f| Some(bulk(f)?.per_run_ratio(best_stream(f)?)),
    ),
    at_least(
        "clear.bulk_vs_rep_stosb",
        2.2,
        PROBE,
        "1 GiB of cold memory cleared by the policy, beside `rep stosb` for each 2 MiB page, as Linux clears up to 6.x",
        |f| bulk_beside_stosb(f, 2 << 20),
    ),
    beside("clear.bulk_vs_rep_stosb_32m", PROBE, "the same beside `rep stosb` by 32 MiB, as Linux 7.0 may", |f| {
        bulk_beside_stosb(f, 32 << 20)
    }),
    beside("clear.bulk_vs_rep_stosb_1g", PROBE, "the same beside one `rep stosb` of all of it", |f| {
        bulk_beside_stosb(f, 1 << 30)
    }),
    at_least(
        "clear.worst_vs_best",
        0.95,
        PROBE,
        "the policy beside the best primitive where it does worst, from 2 MiB on: case and primitive are chosen by half of the runs and \
         measured by the other half",
        worst_choice,
    ),
    at_most(
        "frames.pair0_over_array",
        2.0,
        PAIRS,
        "a frozen page taken and freed by one CPU, beside an array of frame numbers for each CPU: the floor of any cache",
        |f| Some(pair(f, FROZEN, "0", "1")?.per_run_ratio(pair(f, ARRAY, "0", "1")?)),
    ),
    at_most(
        "frames.counted_pair0_over_floor",
        1.3,
        PAIRS,
        "the same with a page that has a reference count, beside that array and two atomics",
        |f| {
            let atomic = f.get(ATOMIC, &[])?.median();
            let floor = pair(f, ARRAY, "0", "1")?.map(|ns| ns + 2.0 * atomic);
            Some(pair(f, COUNTED, "0", "1")?.per_run_ratio(&floor))
        },
    ),
    at_most("frames.pair9_2t_vs_1t", 1.3, PAIRS, "2 MiB taken and freed by two CPUs at once, beside one", |f| {
        Some(pair(f, FROZEN, "9", "2")?.per_run_ratio(pair(f, FROZEN, "9", "1")?))
    }),
    at_most(
        "frames.free0_random_vs_best",
        1.3,
        RANDOM,
        "128 Ki single pages freed in random order, beside the fastest allocator of crates.io",
        |f| {
            let labels = [("pattern", "random"), ("order", "0"), ("cpus", "1")];
            let (own, others): (Vec<&Row>, Vec<&Row>) =
                f.all("bench.alloc.free", &labels).partition(|row| Figures::is(row, "side", FROZEN));
            Some(own.first()?.samples.per_run_ratio(fastest(others.into_iter())?))
        },
    ),
    at_least(
        "frames.free512_speedup",
        12.0,
        FREE,
        "512 counted pages freed in one call, beside one by one, by this allocator",
        |f| f.get("bench.free.speedup", &[("side", COUNTED), ("order", "9")]).cloned(),
    ),
    at_most("frames.free512_over_floor", 1.5, FREE, "the same beside 17 atomics in a row", |f| {
        let floor = 17.0 * f.get(ATOMIC, &[])?.median();
        Some(f.get("bench.free.free_range", &[("side", COUNTED), ("order", "9")])?.map(|ns| ns / floor))
    }),
    at_least(
        "frames.churn_2m_vs_best",
        0.99,
        CHURN,
        "blocks of 2 MiB that can be had after churn, beside the best allocator of crates.io, when that is least",
        |f| {
            let own = f.all("bench.churn.extents_2m", &[("side", "hugemm")]);
            let moments = own.filter_map(|own| {
                let when = own.labels.get("when").map(plain)?;
                let at = [("when", when.as_str())];
                let all = f.all("bench.churn.extents_2m", &at);
                let best =
                    all.filter(|row| !Figures::is(row, "side", "hugemm")).map(|row| row.value).reduce(f64::max)?;
                Some(own.value / best.max(1.0))
            });
            moments.reduce(f64::min).map(Samples::once)
        },
    ),
    at_least(
        "paging.map4k_speedup",
        15.0,
        MAP,
        "one run of frames mapped by 4 KiB, beside a loop over the `x86_64` crate's mapper; both make the tables",
        |f| mapping(f, "map"),
    ),
    at_least(
        "paging.map4k_scattered_speedup",
        3.0,
        MAP,
        "4 KiB pages mapped whose frames adjoin nowhere, beside a loop over the `x86_64` crate's mapper",
        |f| mapping(f, "map_scattered"),
    ),
    at_least(
        "paging.unmap4k_speedup",
        8.0,
        MAP,
        "one run of frames unmapped; both read the entries off and give the tables back",
        |f| mapping(f, "unmap"),
    ),
    at_least(
        "paging.protect4k_live_speedup",
        5.0,
        MAP,
        "made read-only while hardware may be changing the leaves, with the flush that is owed and a store to each leaf, on both sides",
        |f| mapping(f, "protect_live"),
    ),
    at_most(
        "pool.flushes_per_batch",
        2.0,
        POOL,
        "TLB flushes of a pool that grows or shrinks by one call, with vmemmap optimization: the worse of the two",
        |f| {
            let flushes = |way: &str| {
                let of = |what: &str| pool(f, &format!("bench.pool.{what}_{way}"));
                Some(of("flushes")?.per_run_ratio(&of("batches")?))
            };
            let (up, down) = (flushes("up")?, flushes("down")?);
            Some(if up.median() >= down.median() { up } else { down })
        },
    )
    .in_unit("per batch"),
    at_most(
        "pool.metadata_pct",
        0.25,
        POOL,
        "what descriptors of a pool keep of its memory; without vmemmap optimization 1.6",
        |f| f.get("bench.pool.metadata", &[]).cloned(),
    )
    .in_unit("percent"),
    at_most(
        "age.flushes",
        0.0,
        AGE,
        "invalidations and shootdowns while accessed bits are read, by the TLB layer's own count",
        |f| worst(f, "bench.age.flushes_by_ageing", &[("young", "batch")], f64::max),
    )
    .in_unit("count"),
    at_least(
        "age.speedup_4k",
        5.0,
        AGE,
        "pages of eight processes aged per second, beside a reverse-map walk for each mapping; neither flushes. LRU rounds and refaults \
         are charged",
        |f| {
            let rate = |young| f.get("bench.age.rate", &[("young", young)]);
            Some(rate("batch")?.per_run_ratio(rate("noflush")?))
        },
    ),
    at_most(
        "fault.outside_clear_pct",
        2.0,
        CREATE,
        "the part of a 2 MiB fault, without its trap, that is not clearing",
        |f| Some(created(f, "bench.vm_create.clear", "demand", "hugemm-bulk")?.map(|percent| 100.0 - percent)),
    )
    .in_unit("percent"),
    at_least(
        "vm.create_vs_host_kernel",
        2.2,
        CREATE,
        "bandwidth of a prefaulted machine's creation, beside this machine's kernel's (`MADV_POPULATE_WRITE`, transparent huge pages); one \
         CPU each",
        |f| {
            let rate = |side| created(f, "bench.vm_create", "prefault", side);
            Some(rate("hugemm-bulk")?.per_run_ratio(&rate("kernel")?))
        },
    ),
    at_most(
        "heap.worst_vs_best",
        1.2,
        HEAP,
        "the heap beside the fastest of crates.io's, where it does worst, on 1 or 2 CPUs",
        worst_heap,
    ),
    at_most(
        "lease.vs_no_prealloc",
        1.2,
        LEASE,
        "from exec to a machine that answers on leased memory, beside stock QEMU that preallocates nothing: the worst way and size",
        |f| worst(f, "bench.lease.vs_no_prealloc", &[], f64::max),
    ),
    at_most(
        "pool.on_vs_linux_off",
        0.5,
        LINUX_POOL,
        "time per page with the optimization, beside Linux's without, up and down: the worst",
        |f| worst(f, "linux.pool.on_vs_off", &[], f64::max),
    ),
    at_least(
        "age.vs_linux",
        2.0,
        LINUX_AGE,
        "windows per second of processes that share more memory than there is, beside the best Linux guest's with zram",
        |f| worst(f, "linux.age.vs_linux", &[], f64::min),
    ),
    at_least(
        "vm.create_vs_linux",
        2.0,
        LINUX_CREATE,
        "bandwidth at which a machine's memory is populated, beside Linux's: the worst",
        |f| worst(f, "linux.mmap.hugemm_vs_linux", &[], f64::min),
    ),
];

/// Names of sides that goals speak of.
pub const FROZEN: &str = "hugemm, frozen";
pub const COUNTED: &str = "hugemm, counted";
pub const ARRAY: &str = "array of frame numbers";

/// What a command has recorded.
#[derive(Clone, Copy)]
struct Figures<'a>(&'a [Row]);

type Labels<'l> = &'l [(&'l str, &'l str)];

impl<'a> Figures<'a> {
    /// Whether a row has this label; one that is not there is empty.
    fn is(row: &Row, name: &str, value: &str) -> bool {
        row.labels.get(name).map(plain).unwrap_or_default() == value
    }

    fn all<'l>(self, metric: &'l str, labels: Labels<'l>) -> impl Iterator<Item = &'a Row> + Clone + use<'a, 'l> {
        let of =
            move |row: &&Row| row.metric == metric && labels.iter().all(|(name, value)| Self::is(row, name, value));
        self.0.iter().filter(of)
    }

    fn get(self, metric: &str, labels: Labels<'_>) -> Option<&'a Samples> {
        let of = |row: &&Row| row.metric == metric && labels.iter().all(|(name, value)| Self::is(row, name, value));
        self.0.iter().find(of).map(|row| &row.samples)
    }
}

fn number(row: &Row, label: &str) -> u64 {
    row.labels.get(label).and_then(serde_json::Value::as_u64).unwrap_or(0)
}

fn fastest<'a>(rows: impl Iterator<Item = &'a Row>) -> Option<&'a Samples> {
    rows.min_by(|a, b| a.value.total_cmp(&b.value)).map(|row| &row.samples)
}

/// The worst of figures that each stand for themselves.
fn worst(f: Figures<'_>, metric: &str, labels: Labels<'_>, worse: fn(f64, f64) -> f64) -> Option<Samples> {
    f.all(metric, labels).map(|row| row.value).reduce(worse).map(Samples::once)
}

/// The largest region that was cleared cold, by the policy or a primitive.
fn largest_cold<'a>(f: Figures<'a>) -> impl Iterator<Item = &'a Row> {
    let all = || f.all("clear.region_cold", &[]);
    let most = all().map(|row| number(row, "region")).max().unwrap_or(0);
    all().filter(move |row| number(row, "region") == most)
}

fn bulk(f: Figures<'_>) -> Option<&Samples> {
    largest_cold(f).find(|row| Figures::is(row, "subject", "policy")).map(|row| &row.samples)
}

fn best_stream(f: Figures<'_>) -> Option<&Samples> {
    let streams = |row: &&Row| {
        let name = row.labels.get("subject").map(plain).unwrap_or_default();
        Primitive::from_name(&name).is_some_and(|primitive| primitive.class() == PrimitiveClass::Streaming)
    };
    largest_cold(f).filter(streams).max_by(|a, b| a.value.total_cmp(&b.value)).map(|row| &row.samples)
}

fn bulk_beside_stosb(f: Figures<'_>, chunk: u64) -> Option<Samples> {
    let labels = [("subject", Primitive::RepStosb.name()), ("chunk", &*chunk.to_string())];
    Some(bulk(f)?.per_run_ratio(f.get("clear.chunk", &labels)?))
}

/// The policy's share of the best primitive's bandwidth where that is least. Case and primitive are chosen by one half of the runs and
/// measured by the other, and the other way round: the least of thirty shares of the best of eight figures is low by noise alone.
fn worst_choice(f: Figures<'_>) -> Option<Samples> {
    let mut cases: Vec<(&Samples, Vec<&Samples>)> = Vec::new();
    for metric in ["clear.region_hot", "clear.region_cold", "clear.region_cold_touched"] {
        for policy in f.all(metric, &[("subject", "policy")]) {
            let others = f.0.iter().filter(|row| {
                row.metric == metric
                    && number(row, "region") == number(policy, "region")
                    && !Figures::is(row, "subject", "policy")
            });
            cases.push((&policy.samples, others.map(|row| &row.samples).collect()));
        }
    }
    let mut shares = Samples::default();
    for [chosen, measured] in [[0, 1], [1, 0]] {
        let of = |samples: &Samples, half: usize| samples.halves()[half].clone();
        let median = |samples: &Samples| of(samples, chosen).median();
        let best = |others: &[&'_ Samples]| {
            others.iter().enumerate().max_by(|a, b| median(a.1).total_cmp(&median(b.1))).map(|best| best.0)
        };
        let share = |policy: &Samples, other: &Samples, half| of(policy, half).per_run_ratio(&of(other, half)).median();
        let pairs = cases.iter().filter_map(|(policy, others)| Some((*policy, others[best(others)?])));
        let (policy, other) = pairs.min_by(|a, b| share(a.0, a.1, chosen).total_cmp(&share(b.0, b.1, chosen)))?;
        shares.push(share(policy, other, measured));
    }
    Some(shares)
}

fn pair<'a>(f: Figures<'a>, side: &str, order: &str, cpus: &str) -> Option<&'a Samples> {
    f.get("bench.alloc.pair", &[("side", side), ("order", order), ("cpus", cpus)])
}

/// Stated for 64 GiB of addresses and frames that are one run but where the name says otherwise.
fn mapping(f: Figures<'_>, what: &str) -> Option<Samples> {
    let bytes = (64_u64 << 30).to_string();
    f.get(&format!("bench.map.{what}_speedup"), &[("bytes", &bytes), ("extent", "")]).cloned()
}

/// A figure of the largest pool of 2 MiB pages with vmemmap optimization that had its pages.
fn pool(f: Figures<'_>, metric: &str) -> Option<Samples> {
    let of = |row: &&Row| {
        let labels = [("hvo", "true"), ("swap", "true"), ("flush", "batch"), ("short", "")];
        row.metric == metric && labels.into_iter().all(|(name, value)| Figures::is(row, name, value))
    };
    f.0.iter().filter(of).max_by_key(|row| number(row, "n")).map(|row| row.samples.clone())
}

/// Where both sides take 2 MiB pages from free memory and put them on an LRU.
fn created(f: Figures<'_>, metric: &str, how: &str, side: &str) -> Option<Samples> {
    let page = PageSize::Size2M.name();
    let labels = [("from", "frames"), ("page", page), ("how", how), ("workers", "1"), ("side", side)];
    f.get(metric, &labels).cloned()
}

fn worst_heap(f: Figures<'_>) -> Option<Samples> {
    let own = f.all("bench.heap.pair", &[("side", "hugemm")]);
    let ratios = own.filter_map(|own| {
        let [work, cpus] = ["work", "cpus"].map(|name| own.labels.get(name).map(plain).unwrap_or_default());
        let labels = [("work", &*work), ("cpus", &*cpus)];
        // malloc is for scale: no kernel has it.
        let own_or_malloc = |row: &Row| ["hugemm", "malloc (libc)"].iter().any(|side| Figures::is(row, "side", side));
        let others = f.all("bench.heap.pair", &labels).filter(|row| !own_or_malloc(row));
        Some(own.samples.per_run_ratio(fastest(others)?))
    });
    ratios.max_by(|a, b| a.median().total_cmp(&b.median()))
}

/// The goals that these figures decide, each with its verdict. Where instructions are emulated, counts alone can be judged.
pub fn judge(rows: &[Row], emulated: bool) -> Vec<Row> {
    let judged = |goal: &Goal| {
        let samples = (goal.of)(Figures(rows)).filter(|samples| samples.runs() > 0)?;
        Some(verdict(Row::median(goal.name, &samples, goal.unit), goal.bound, goal.wanted))
    };
    let decided = |goal: &&Goal| !emulated || ["count", "per batch"].contains(&goal.unit);
    GOALS.iter().filter(decided).filter_map(judged).collect()
}

/// The row with what is wanted of it, and what it says.
pub fn verdict(row: Row, bound: Bound, wanted: f64) -> Row {
    let said = bound.verdict(row.value, margin(row.stdev, row.runs), wanted);
    let row = if bound == Bound::Beside { row } else { row.label("goal", wanted) };
    row.label("bound", bound.name()).label("verdict", said)
}

/// What a row of a goal says; documents of old have `met` alone.
pub fn verdict_of(row: &Row) -> Option<&str> {
    let old = || row.labels.get("met")?.as_bool().map(|met| if met { MET } else { MISSED });
    row.labels.get("verdict").and_then(serde_json::Value::as_str).or_else(old)
}

/// Goal, wanted, measured, verdict.
pub fn table(rows: &[Row]) -> Table {
    let mut lines = table::new(["goal", "wanted", "measured", "± stdev", "verdict"]);
    for row in rows {
        let bound = Bound::of(row).unwrap_or(Bound::Beside);
        let wanted = row.labels.get("goal").and_then(serde_json::Value::as_f64);
        lines.add_row([
            row.metric.clone(),
            wanted.map_or("–".to_owned(), |wanted| format!("{} {wanted}{}", bound.sign(), unit(&row.unit))),
            exact(row.value),
            if row.runs > 1 { exact(row.stdev) } else { String::new() },
            verdict_of(row).unwrap_or_default().to_owned(),
        ]);
    }
    lines
}

fn unit(unit: &str) -> String {
    if unit == "ratio" { " ×".to_owned() } else { format!(" {unit}") }
}

/// A figure with so many decimals that it can be told from its goal.
fn exact(value: f64) -> String {
    if value.abs() < 1000.0 { format!("{value:.2}") } else { format!("{value:.0}") }
}

/// How many are met, missed and not told apart, in words.
pub fn count<'a>(verdicts: impl Iterator<Item = &'a str> + Clone) -> String {
    let of = |wanted: &str| verdicts.clone().filter(|verdict| *verdict == wanted).count();
    format!("{} goals are met, {} missed, {} not told apart", of(MET), of(MISSED), of(NOT_TOLD_APART))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(bound: Bound, values: &[f64], wanted: f64) -> String {
        let row = Row::median("g", &values.iter().copied().collect(), "ratio");
        verdict_of(&verdict(row, bound, wanted)).expect("judged").to_owned()
    }

    /// Every goal turns red when its figure is on the wrong side, and only then.
    #[test]
    fn every_goal_can_be_missed() {
        for goal in &GOALS {
            let beyond = 0.01;
            let (good, bad) = match goal.bound {
                Bound::AtLeast => (goal.wanted, goal.wanted - beyond),
                Bound::AtMost => (goal.wanted, goal.wanted + beyond),
                Bound::Beside => continue,
            };
            assert_eq!(
                [good, bad].map(|value| said(goal.bound, &[value], goal.wanted)),
                [MET, MISSED],
                "{}",
                goal.name
            );
            assert_eq!(said(goal.bound, &[f64::NAN], goal.wanted), MISSED, "no number is no success");
        }
    }

    /// 4, 5 and 6 have a mean that is uncertain by 4.30 / √3 = 2.48.
    #[test]
    fn what_the_spread_covers_is_not_told_apart() {
        assert_eq!(said(Bound::AtLeast, &[4.0, 5.0, 6.0], 3.0), NOT_TOLD_APART);
        assert_eq!(said(Bound::AtLeast, &[4.0, 5.0, 6.0], 7.4), NOT_TOLD_APART);
        assert_eq!(said(Bound::AtLeast, &[4.0, 5.0, 6.0], 2.5), MET);
        assert_eq!(said(Bound::AtMost, &[4.0, 5.0, 6.0], 2.5), MISSED);
        assert_eq!(said(Bound::AtMost, &[2.0, 2.0], 2.0), MET, "counts have no spread");
    }

    #[test]
    fn names_are_told_apart_and_steps_stand_together() {
        let mut commands: Vec<&str> = Vec::new();
        for (index, goal) in GOALS.iter().enumerate() {
            assert!(GOALS[..index].iter().all(|other| other.name != goal.name), "{}", goal.name);
            if !commands.contains(&goal.by) {
                commands.push(goal.by);
            }
        }
        assert!(commands.len() > 10);
    }

    fn row(metric: &str, values: &[f64], labels: &[(&str, &str)]) -> Row {
        let row = Row::median(metric.to_owned(), &values.iter().copied().collect(), "GB/s");
        labels.iter().fold(row, |row, (name, value)| row.label(name, *value))
    }

    /// Runs of two primitives and of the policy on regions of a size.
    fn region(size: u64, first: [f64; 4], second: [f64; 4], policy: [f64; 4]) -> [Row; 3] {
        let of = |(subject, runs): (&str, [f64; 4])| {
            row("clear.region_hot", &runs, &[("subject", subject)]).label("region", size)
        };
        [("a", first), ("b", second), ("policy", policy)].map(of)
    }

    #[test]
    fn a_slow_choice_is_found_where_it_is() {
        let right = |size| region(size, [20.0; 4], [40.0; 4], [40.0; 4]);
        let rows = [right(1), region(2, [50.0; 4], [40.0; 4], [40.0; 4]), right(3)].concat();
        let shares = worst_choice(Figures(&rows)).expect("a choice");
        assert_eq!((shares.runs(), shares.median(), shares.stdev()), (2, 0.8, 0.0));
    }

    /// A primitive that two runs favoured has not shown that the policy chose wrongly: the others do not say so.
    #[test]
    fn luck_is_no_slow_choice() {
        let rows = region(1, [80.0, 40.0, 80.0, 40.0], [40.0; 4], [40.0; 4]);
        assert_eq!(worst_choice(Figures(&rows)).expect("a choice").median(), 1.0);
    }

    #[test]
    fn a_goal_is_made_of_what_was_recorded() {
        let pair = |side, value| row("bench.alloc.pair", &[value], &[("side", side), ("order", "0"), ("cpus", "1")]);
        let rows = [pair(FROZEN, 4.0), pair(ARRAY, 2.0), pair(COUNTED, 9.0), row(ATOMIC, &[2.0], &[])];
        let judged = judge(&rows, false);
        let values: Vec<_> = judged.iter().map(|row| (&*row.metric, row.value, verdict_of(row))).collect();
        let wanted =
            [("frames.pair0_over_array", 2.0, Some(MET)), ("frames.counted_pair0_over_floor", 1.5, Some(MISSED))];
        assert_eq!(values, wanted);
        assert!(judge(&rows, true).is_empty(), "under emulation");
        assert_eq!(judge(&rows[..1], false).len(), 0, "without the floor");
    }
}
