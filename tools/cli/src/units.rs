//! What a figure's unit says about it: which way is better, and whether it was counted or measured.
//!
//! The one table that `hugemm compare` judges by and `hugemm report` labels axes with. A unit that is not in it is
//! compared and plotted, and judged by nobody.

use crate::document::Row;
use crate::goals::Bound;
use hugemm_workloads::age::METRICS;
pub use hugemm_workloads::record::Better;

/// Units with a direction of their own.
const UNITS: [(&str, Better); 14] = [
    ("ns", Better::Lower),
    ("ns per block", Better::Lower),
    ("ns per page", Better::Lower),
    ("µs", Better::Lower),
    ("ms", Better::Lower),
    ("s", Better::Lower),
    ("percent", Better::Lower),
    ("%", Better::Lower),
    ("per block", Better::Lower),
    ("per operation", Better::Lower),
    ("per resize", Better::Lower),
    ("GB/s", Better::Higher),
    ("GiB/s", Better::Higher),
    ("bool", Better::Higher),
];

/// Last parts of metric names whose direction does not follow from the unit.
const NAMES: [(&str, Better); 8] = [
    ("failed", Better::Lower),
    ("failures", Better::Lower),
    ("handed_out_twice", Better::Lower),
    ("lost", Better::Lower),
    ("tax_up", Better::Lower),
    ("tax_down", Better::Lower),
    ("speedup", Better::Higher),
    ("saved", Better::Higher),
];

/// Units of things that are counted: two runs of a deterministic program give the same, so any difference means something.
const COUNTED: [&str; 13] = [
    "count",
    "blocks",
    "pages",
    "bytes",
    "allocations",
    "events",
    "bool",
    "flushes",
    "batches",
    "KiB per page",
    "per block",
    "per operation",
    "per resize",
];

/// Which way is better, if that is known: by the row's own goal, else as the workload declares it, else by its name, else by its unit.
pub fn better(row: &Row) -> Option<Better> {
    match Bound::of(row) {
        Some(Bound::AtLeast) => return Some(Better::Higher),
        Some(Bound::AtMost) => return Some(Better::Lower),
        Some(Bound::Beside) | None => {}
    }
    // What a workload declares of its own metrics.
    if let Some(metric) = METRICS.iter().find(|metric| metric.name == row.metric) {
        return metric.better;
    }
    let last = row.metric.rsplit('.').next().unwrap_or_default();
    let named = NAMES.iter().find(|(name, _)| *name == last);
    named.or_else(|| UNITS.iter().find(|(unit, _)| *unit == row.unit)).map(|(_, better)| *better)
}

/// Whether the unit is one of things that are counted.
pub fn is_counted(unit: &str) -> bool {
    COUNTED.contains(&unit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hugemm_workloads::words::Named;

    #[test]
    fn goals_then_names_then_units_decide() {
        let row = |metric: &str, unit| Row::single(metric, 1.0, unit);
        assert_eq!(better(&row("bench.free.free_range", "ns per block")), Some(Better::Lower));
        assert_eq!(better(&row("clear.chunk", "GB/s")), Some(Better::Higher));
        assert_eq!(better(&row("bench.free.speedup", "ratio")), Some(Better::Higher));
        assert_eq!(better(&row("linux.pool.tax_up", "ratio")), Some(Better::Lower));
        assert_eq!(better(&row("bench.churn.failed", "count")), Some(Better::Lower));
        assert_eq!(better(&row("something", "ratio")), None);
        assert_eq!(better(&row("something", "furlongs")), None);
        let goal = row("something", "ratio").label("bound", Bound::AtMost.name());
        assert_eq!(better(&goal), Some(Better::Lower));
    }
}
