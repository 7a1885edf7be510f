//! `hugemm explain`: clears one extent and prints what was done in which order, and why.

use crate::args::Explain;
use crate::document::Row;
use crate::machine::Machine;
use crate::options::Kind;
use crate::table;
use anyhow::{Result, bail};
use hugemm_base::{CpuId, Never, PAGE_SHIFT, PageSize, PreemptModel, Sweep, with};
use hugemm_clear::{ClearPolicy, ClearRequest, Clearer, Unit, folio};
use hugemm_host::cpu::{BASE_FRAME, Host};
use hugemm_workloads::size::Size;
use hugemm_workloads::words::Named;

pub fn run(args: &Explain) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let bytes = machine.whole_pages(args.size, PageSize::Size4K)?;
    let pages = bytes >> PAGE_SHIFT;
    if let Some(p) = args.primitive.filter(|p| !machine.features.contains(*p)) {
        bail!("this CPU does not have {p}; 'hugemm probe' shows what it has");
    }
    if let Some(touch) = args.touch.filter(|touch| *touch >= pages) {
        bail!("page {touch} is not in an extent of {pages} pages; --touch takes 0 to {}", pages - 1);
    }
    let total = args.total.unwrap_or(args.size);
    if total < args.size {
        bail!("the whole request, {total}, cannot be smaller than its extent; use --total {} or more", args.size);
    }
    // The extent and the calibration's scratch memory are one region; small extents need no pages of their own.
    let scratch = (machine.calibration_bytes() as u64).max(bytes.next_multiple_of(PageSize::Size2M.bytes()));
    let mut region = machine.memory(scratch, PageSize::Size2M, Kind::Thp)?;
    let profile = machine.profile(&args.calibration, region.as_mut_slice())?.profile;
    let policy = with!(
        ClearPolicy::new(profile),
        threshold = args.threshold.map(|size| size.0),
        unit = args.unit.map(|size| size.0),
        force = args.primitive
    );
    let clearer = Clearer::new(machine.features, policy)?;
    let request = with!(ClearRequest::bulk(total.0).with_warmth(args.warmth), touch_soon = args.touch.is_some());

    let host = Host::new(&machine.places(1)?, &mut region.as_mut_slice()[..bytes as usize])?;
    let model = args.preempt;
    host.set_preempt_model(model);
    let mut units: Vec<Unit> = Vec::new();
    host.run_on(CpuId::new(0), |cx| {
        // SAFETY: the only owner of the host's frames, made once.
        let dirty = unsafe { host.own_frames() };
        let clearing = match args.touch {
            Some(page) => folio::begin_around(dirty, page),
            None => dirty.begin(),
        };
        let done = clearer.clear_observed(cx, clearing, &request, &Never, &mut |unit: &Unit| units.push(*unit));
        done.map(|zeroed| zeroed.into_extent()).map_err(|stopped| stopped.reason)
    })??;

    let mut lines = table::new(["unit", "first page", "last page", "size", "primitive", "part"]);
    let mut rows = Vec::new();
    for (index, unit) in units.iter().enumerate() {
        let first = unit.extent.base().get() - BASE_FRAME.get();
        let part = if unit.sweep == Sweep::Near { "around the touch" } else { "rest" };
        lines.add_row([
            (index + 1).to_string(),
            first.to_string(),
            (first + unit.extent.pages() - 1).to_string(),
            Size(unit.extent.bytes()).to_string(),
            unit.primitive.to_string(),
            part.to_owned(),
        ]);
        let row = Row::single("explain.unit", unit.extent.bytes() as f64, "bytes");
        rows.push(row.label("first_page", first).label("primitive", unit.primitive.name()).label("part", part));
    }
    let counters = host.counters_sum();
    for (name, value) in counters.iter().filter(|(_, value)| *value > 0) {
        rows.push(Row::single(format!("explain.{name}"), value as f64, "count"));
    }
    if !machine.quiet() {
        println!("{}", decision(&policy, &request, model));
        table::print("Units, in the order in which they were cleared", &lines);
        let counted: Vec<String> =
            counters.iter().filter(|(_, value)| *value > 0).map(|(name, value)| format!("{name} {value}")).collect();
        println!("\n  counters: {}", counted.join(", "));
    }
    machine.report(rows)
}

/// The policy's reasoning in a sentence.
fn decision(policy: &ClearPolicy, request: &ClearRequest, model: PreemptModel) -> String {
    let size = Size(request.total);
    let best = policy.primitives(request, Sweep::Far);
    let unit = policy.unit_bytes(best.any, model, false);
    let why = if let Some(p) = policy.force {
        format!("{p} was asked for")
    } else if policy.profile.bulk.is_none() {
        "this CPU has no bulk primitive, so everything is cached".to_owned()
    } else {
        let threshold =
            policy.threshold.unwrap_or(policy.profile.crossover.for_case(request.warmth, request.touch_soon));
        let warm = request.warmth.name();
        let touched = if request.touch_soon { ", touched at once" } else { "" };
        let source = if policy.threshold.is_some() { "given" } else { "measured" };
        let (relation, kind) =
            if policy.is_bulk(request) { ("reaches", "past the cache") } else { ("is below", "through the cache") };
        let limit = if threshold == u64::MAX { "infinite".to_owned() } else { Size(threshold).to_string() };
        format!(
            "a request of {size} ({warm}{touched}) {relation} the {source} threshold, {limit}: {kind}, {}",
            best.any
        )
    };
    let units = if model.is_preemptible() {
        format!("preemption model {}: each part is one unit", model.name())
    } else {
        format!("preemption model {}: units of at most {}", model.name(), Size(unit))
    };
    format!("{why}\n{units}")
}
