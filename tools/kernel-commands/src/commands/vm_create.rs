//! A virtual machine's memory allocated, cleared and mapped, in every way that is asked for.

use super::populate::{self, Fill, Took, calibrated, with_pool};
use super::{Cx, Failure};
use crate::output::{progress, sample};
use hugemm_base::PageSize;
use hugemm_clear::{ClearPolicy, Clearer, Features};
use hugemm_hugetlb::HugePool;
use hugemm_kernel::irq_lock::IrqLock;
use hugemm_kernel::percpu;
use hugemm_vm::Pools;
use hugemm_workloads::request::{Clearing, PagesFrom, VmCreate};
use hugemm_workloads::vm_create::Split;
use hugemm_workloads::words::Named;

/// Runs the command.
#[inline(never)]
pub fn run(cx: Cx<'_>, args: &VmCreate) -> Result<(), Failure> {
    let features = Features::detect();
    let policy = ClearPolicy::new(calibrated(cx, &features)?);
    let cached = ClearPolicy { threshold: Some(u64::MAX), ..policy };
    let page_at_a_time = ClearPolicy { unit: Some(PageSize::Size4K.bytes()), ..cached };
    let ways = [
        (Clearing::Page, Clearer::new(features, page_at_a_time)?),
        (Clearing::Extent, Clearer::new(features, cached)?),
        (Clearing::Bulk, Clearer::new(features, policy)?),
    ];
    for page in args.page.iter() {
        let bytes = args.size.next_multiple_of(page.bytes());
        if args.from == PagesFrom::Pool && page != PageSize::Size4K {
            with_pool(cx, page, bytes / page.bytes(), |cx, pool| all(cx, args, &ways, page, bytes, Some(pool)))?;
        } else {
            all(cx, args, &ways, page, bytes, None)?;
        }
    }
    Ok(())
}

/// Every way, one after the other, in each run.
fn all(
    cx: Cx<'_>,
    args: &VmCreate,
    ways: &[(Clearing, Clearer)],
    page: PageSize,
    bytes: u64,
    pool: Option<&HugePool<'_, IrqLock>>,
) -> Result<(), Failure> {
    let of = u64::from(args.runs) + 1;
    for run in 0..of {
        progress(run, of, "vm-create");
        for how in args.how.iter() {
            for workers in args.workers.iter().filter(|workers| *workers <= percpu::count()) {
                for (clearing, clearer) in ways.iter().filter(|(clearing, _)| args.clear.contains(*clearing)) {
                    let pools = pool.map_or_else(Pools::default, |pool| Pools::default().with(pool));
                    let fill = Fill { bytes, page, how, workers, pooled: pool.is_some() };
                    let took = populate::pass(cx, *clearer, pools, &fill)?;
                    // The first pass is the hypervisor's: it gives memory when it is touched first.
                    if run > 0 {
                        report(&fill, *clearing, &took);
                    }
                }
            }
        }
    }
    Ok(())
}

fn report(fill: &Fill, clearing: Clearing, took: &Took) {
    let (how, clearing) = (fill.how.name(), clearing.name());
    let labels = [
        ("how", (&how).into()),
        ("workers", fill.workers.into()),
        ("clear", (&clearing).into()),
        ("page", (&fill.page).into()),
        ("size", fill.bytes.into()),
        ("pool", fill.pooled.into()),
    ];
    let gbps = fill.bytes as f64 / Split::total(&took.slowest).max(1) as f64;
    sample("bench.vm_create", gbps, "GB/s", &labels);
    let percent = |part: u64| 100.0 * part as f64 / took.all.total().max(1) as f64;
    for (what, part) in [("allocate", took.all.allocate), ("clear", took.all.clear), ("map", took.all.map)] {
        let metric = match what {
            "allocate" => "bench.vm_create.allocate",
            "clear" => "bench.vm_create.clear",
            _ => "bench.vm_create.map",
        };
        sample(metric, percent(part), "percent", &labels);
    }
}
