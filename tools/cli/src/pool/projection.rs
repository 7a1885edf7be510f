//! What a resize would take on machines that are not here: calculated from counts, the tax measured here, and a flush's
//! cost derived from published figures, which stand beside it.

use crate::document::Row;
use crate::results::Results;
use crate::table;

/// A machine of "Batch hugetlb vmemmap modification operations": seconds that Linux took for `pages` pages of
/// 2 MiB, before and after batching.
struct Published {
    machine: &'static str,
    cpus: &'static str,
    direction: &'static str,
    pages: f64,
    /// Optimization off; on, with flushes per page; off and on in the batched kernel.
    off: f64,
    on_page: f64,
    batched_off: f64,
    batched_on: f64,
}

const PUBLISHED: [Published; 4] = [
    Published {
        machine: "virtual machine on 2 × EPYC 7J13",
        cpus: "252",
        direction: "up",
        pages: 524_288.0,
        off: 2.463,
        on_page: 147.609,
        batched_off: 2.715,
        batched_on: 4.799,
    },
    Published {
        machine: "virtual machine on 2 × EPYC 7J13",
        cpus: "252",
        direction: "down",
        pages: 524_288.0,
        off: 2.931,
        on_page: 149.924,
        batched_off: 3.186,
        batched_on: 5.273,
    },
    Published {
        machine: "8 × E7-8895",
        cpus: "8 sockets",
        direction: "up",
        pages: 500_000.0,
        off: 4.119,
        on_page: 28.973,
        batched_off: 4.719,
        batched_on: 7.267,
    },
    Published {
        machine: "8 × E7-8895",
        cpus: "8 sockets",
        direction: "down",
        pages: 500_000.0,
        off: 4.477,
        on_page: 36.748,
        batched_off: 4.245,
        batched_on: 13.199,
    },
];

/// What was counted and measured here for one direction.
#[derive(Clone, Copy, Debug)]
pub struct Here {
    /// Nanoseconds per page beyond optimization off, without what flushes cost.
    pub extra_ns: f64,
    /// Flushes of one batch.
    pub flushes: f64,
    /// Flushes per page the old way.
    pub old_flushes: f64,
}

/// Seconds that one flush costs on a published machine: what the unbatched kernel took beyond the batched one, per page
/// and flush.
fn flush_cost(one: &Published, old_flushes: f64) -> f64 {
    ((one.on_page - one.off) - (one.batched_on - one.batched_off)) / one.pages / old_flushes
}

/// Adds the table and its rows.
pub fn add(up: Here, down: Here, results: &mut Results) {
    let rows = &mut results.rows;
    let mut lines = table::new([
        "machine",
        "CPUs",
        "",
        "published, per page",
        "calculated",
        "error",
        "published, batched",
        "hugemm, calculated",
        "tax",
    ]);
    for (index, one) in PUBLISHED.iter().enumerate() {
        let (here, other) = (if one.direction == "up" { up } else { down }, &PUBLISHED[index ^ 1]);
        let other_here = if other.direction == "up" { up } else { down };
        // The flush's cost comes from the other direction, so that there is something to compare.
        let flush = flush_cost(other, other_here.old_flushes);
        let linux_tax = one.batched_on - one.batched_off;
        let per_page = one.off + linux_tax + one.pages * here.old_flushes * flush;
        let error = 100.0 * (per_page - one.on_page) / one.on_page;
        let hugemm = one.batched_off + one.pages * here.extra_ns / 1e9 + here.flushes * flush;
        lines.add_row([
            one.machine.to_owned(),
            one.cpus.to_owned(),
            one.direction.to_owned(),
            format!("{:.1} s", one.on_page),
            format!("{per_page:.1} s"),
            format!("{error:+.0} %"),
            format!("{:.2} s ({:.2} ×)", one.batched_on, one.batched_on / one.batched_off),
            format!("{hugemm:.2} s"),
            format!("{:.2} ×", hugemm / one.batched_off),
        ]);
        let name = format!("calculated.pool.{}_s", one.direction);
        let row = |metric: String, value: f64, unit| {
            Row::single(metric, value, unit).label("machine", one.machine).label("calculated", true)
        };
        rows.push(row(name, hugemm, "s").label("flush_us", flush * 1e6).label("published_linux_s", one.batched_on));
        rows.push(row(format!("calculated.pool.{}_page_s", one.direction), per_page, "s").label("error_pct", error));
    }
    let title = "Calculated, not measured: 2 MiB pages on the machines of the published figures";
    results.tables.push((title.to_owned(), lines));
    results.remarks.push(
        "A flush's cost comes from the published figures of the other direction (unbatched minus batched, per page);\n  \
         hugemm's time is Linux's without the optimization, plus the extra time per page measured here, plus its flushes."
            .to_owned(),
    );
}
