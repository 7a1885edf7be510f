//! `hugemm probe`: this machine's primitives by chunk and region size, hot and cold; the crossovers; the policy.

use crate::args::Probe;
use crate::document::{self, Row};
use crate::machine::{GIB, Machine};
use crate::measure::{Field, Repeat, Subject, bandwidths};
use crate::results::Results;
use crate::stats::Samples;
use crate::{progress, table};
use anyhow::{Context, Result};
use hugemm_base::{Clock, CpuCx, CpuId, Dirty, Never, PageSize, PreemptModel, with};
use hugemm_clear::{ClearPolicy, ClearRequest, Clearer, Primitive, Profile, Unit, Warmth};
use hugemm_host::cpu::Host;
use hugemm_inspect::interrupt;
use hugemm_workloads::size::Size;
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// Chunk sizes of the table in "huge page clearing optimizations".
const CHUNKS: [u64; 7] = [4 << 10, 64 << 10, 2 * MIB, 8 * MIB, 32 * MIB, 128 * MIB, 1024 * MIB];

/// Bytes that one measurement of a region smaller than this repeats it for.
const ENOUGH: u64 = 64 * MIB;

/// Regions larger than this are in no cache.
const HOT_MOST: u64 = 256 * MIB;

pub fn run(args: &Probe) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    document::check_writable(args.save_profile.as_deref())?;
    let size = match args.size {
        Some(size) => machine.whole_pages(size, PageSize::Size2M)?,
        None => GIB,
    };
    anyhow::ensure!(size >= 64 * MIB, "{} is too small to tell hot from cold; use 64MB or more", Size(size));
    let places = machine.places(1)?;
    let mut region = machine.memory(size, PageSize::Size2M, args.kind)?;
    machine.note_region("measured", &region);
    let (profile, took) = machine.profile(region.as_mut_slice())?;
    let clearer = Clearer::new(machine.features, ClearPolicy::new(profile))?;
    let intro = format!("memory: {}\n{}", region.verified(), profile_text(&profile, took));

    let host = Host::new(&places, region.as_mut_slice())?;
    let mut subjects: Vec<Subject> =
        machine.features.iter().filter(|p| *p != Primitive::Portable).map(Subject::Primitive).collect();
    subjects.push(Subject::Policy);
    // 2 MiB, four times as much, and so on; the last is all of it.
    let below = (1..).step_by(2).map(|i| MIB << i).take_while(|bytes| *bytes < size);
    let sizes: Vec<u64> = below.chain([size]).collect();
    let mut results = host.run_on(CpuId::new(0), |cx| {
        // SAFETY: the only owner of the host's frames, made once.
        let memory = unsafe { host.own_frames() };
        measure(cx, &clearer, &subjects, &sizes, memory, args, machine.quiet())
    })??;

    if let Some(path) = &args.save_profile {
        let text = constant(&profile);
        std::fs::write(path, text).with_context(|| format!("cannot write the profile to {}", path.display()))?;
        results.remarks.push(format!("profile written to {}", path.display()));
    }
    results.intro = intro;
    machine.show(results)
}

/// The profile as source, to be embedded.
fn constant(profile: &Profile) -> String {
    format!(
        "use hugemm_clear::Primitive::*;\nuse hugemm_clear::{{Best, Crossover, Mbps, Profile}};\n\n\
         /// Measured by `hugemm probe`; {} is never.\npub const PROFILE: Profile = {profile:#?};\n",
        u64::MAX
    )
}

fn profile_text(profile: &Profile, took: Duration) -> String {
    let Profile { cached, bulk, crossover, cached_mbps, bulk_mbps } = *profile;
    let mut lines = vec![format!("calibrated in {} ms", took.as_millis())];
    let named = |best: hugemm_clear::Best| match best.general == best.any {
        true => best.general.to_string(),
        false => format!("{} (without vector registers {})", best.any, best.general),
    };
    lines.push(format!(
        "  best cached primitive   {}, {:.1} GB/s cold",
        named(cached),
        f64::from(cached_mbps.any) / 1e3
    ));
    match bulk {
        Some(bulk) => lines.push(format!(
            "  best bulk primitive     {}, {:.1} GB/s cold",
            named(bulk),
            f64::from(bulk_mbps.any) / 1e3
        )),
        None => lines.push("  best bulk primitive     none that this CPU has".to_owned()),
    }
    let from = |bytes| if bytes == u64::MAX { "never".to_owned() } else { format!("from {}", Size(bytes)) };
    lines.push("  bulk is faster".to_owned());
    lines.push(format!("    on cold memory        {}", from(crossover.cold)));
    lines.push(format!("    and read right after  {}", from(crossover.cold_touched)));
    lines.push(format!("    on hot memory         {}", from(crossover.hot)));
    lines.push(format!("    and read right after  {}", from(crossover.hot_touched)));
    let policy = ClearPolicy::new(*profile);
    let unit = |p| Size(policy.unit_bytes(p, PreemptModel::None, false));
    lines.push(format!("  unit under a cooperative model: {} cached", unit(cached.any)));
    if let Some(bulk) = bulk {
        lines.push(format!("                                  {} bulk", unit(bulk.any)));
    }
    lines.join("\n")
}

/// The tables, and every figure as a row.
fn measure(
    cx: &mut CpuCx<'_, Host<'_>>,
    clearer: &Clearer,
    subjects: &[Subject],
    sizes: &[u64],
    mut memory: Dirty,
    args: &Probe,
    quiet: bool,
) -> Result<Results> {
    let (mut rows, mut tables) = (Vec::new(), Vec::new());
    let total = memory.extent().bytes();
    let chunks: Vec<u64> = CHUNKS.into_iter().filter(|chunk| total.is_multiple_of(*chunk)).collect();
    let mut fields: Vec<Field> = Vec::new();
    fields.extend(chunks.iter().map(|chunk| Field::cold(*chunk, ENOUGH, false)));
    fields.extend(sizes.iter().map(|bytes| Field::cold(*bytes, ENOUGH, false)));
    fields.extend(sizes.iter().map(|bytes| Field::cold(*bytes, ENOUGH, true)));
    let hot: Vec<Field> =
        sizes.iter().filter(|bytes| **bytes <= HOT_MOST).map(|bytes| Field::hot(*bytes, ENOUGH)).collect();
    fields.extend(&hot);
    let repeat = Repeat::new(args.runs, args.warmup.warmup);
    let bar = progress::bar((fields.len() * subjects.len() * repeat.all()) as u64, quiet);
    let mut measured = Vec::new();
    for field in &fields {
        bar.set_message(field.title());
        let each;
        (memory, each) = bandwidths(cx, clearer, subjects, field, memory, repeat, || bar.inc(1))?;
        measured.push(each);
    }
    bar.finish_and_clear();
    let (worst_unit, rest) = worst_unit(cx, clearer, memory, args.runs)?;
    memory = rest;
    drop(memory);

    let mut from = 0;
    let mut section = |title: &str, metric: &str, key: &str, count: usize, rows: &mut Vec<Row>| {
        let range = from..from + count;
        from += count;
        let mut heads = vec![key.to_owned()];
        heads.extend(subjects.iter().map(Subject::name));
        heads.push("policy/best".into());
        let mut lines = table::new(heads);
        for (field, each) in fields[range.clone()].iter().zip(&measured[range]) {
            let mut line = vec![Size(field.size).to_string()];
            for (subject, samples) in subjects.iter().zip(each) {
                line.push(table::gbps(samples.median()));
                rows.push(Row::median(metric, samples, "GB/s").label(key, field.size).label("subject", subject.name()));
            }
            line.push(format!("{:.2}", share(each, best(each))));
            lines.add_row(line);
        }
        tables.push((title.to_owned(), lines));
    };
    let kind = format!("GB/s, median of {} runs", args.runs);
    section(&format!("Chunks, cold, one fence per chunk ({kind})"), "clear.chunk", "chunk", chunks.len(), &mut rows);
    section(&format!("Regions, cold ({kind})"), "clear.region_cold", "region", sizes.len(), &mut rows);
    section(
        &format!("Regions, cold, read right after: the fault case ({kind})"),
        "clear.region_cold_touched",
        "region",
        sizes.len(),
        &mut rows,
    );
    section(&format!("Regions, hot ({kind})"), "clear.region_hot", "region", hot.len(), &mut rows);

    rows.push(Row::median("clear.worst_unit", &worst_unit, "ms"));
    rows.extend(crossovers(&clearer.policy().profile));
    let longest = format!(
        "A cooperative clear takes {:.2} ms at most between two reschedule points, with vector registers or without",
        worst_unit.median()
    );
    Ok(Results { tables, rows, remarks: vec![longest], ..Results::default() })
}

/// From which request size on the policy writes past the cache; a case in which it never does has no row.
fn crossovers(profile: &Profile) -> impl Iterator<Item = Row> + use<> {
    let from = profile.crossover;
    let cases = [
        ("cold", from.cold),
        ("cold_touched", from.cold_touched),
        ("hot", from.hot),
        ("hot_touched", from.hot_touched),
    ];
    let switching = cases.into_iter().filter(|(_, bytes)| *bytes != u64::MAX);
    switching.map(|(case, bytes)| Row::single("clear.crossover", bytes as f64, "bytes").label("case", case))
}

/// Which primitive has the highest bandwidth. The policy is the last subject, and none of them.
fn best(each: &[Samples]) -> usize {
    let medians = each.iter().map(Samples::median).take(each.len().saturating_sub(1));
    medians.enumerate().max_by(|a, b| a.1.total_cmp(&b.1)).map_or(0, |(index, _)| index)
}

/// The policy's bandwidth as a share of a primitive's, run by run; the median.
fn share(each: &[Samples], primitive: usize) -> f64 {
    each.last().map_or(0.0, |policy| policy.per_run_ratio(&each[primitive]).median())
}

/// The longest time in ms between two reschedule points of a cooperative clear of all memory, by run; cached and bulk
/// alternate, each with and without vector registers.
fn worst_unit(
    cx: &mut CpuCx<'_, Host<'_>>,
    clearer: &Clearer,
    mut memory: Dirty,
    runs: u32,
) -> Result<(Samples, Dirty)> {
    let host = cx.platform();
    host.set_preempt_model(PreemptModel::None);
    let mut worst = Samples::default();
    for _ in 0..runs {
        let mut longest = 0;
        for (threshold, vectors) in [(0, true), (u64::MAX, true), (0, false), (u64::MAX, false)] {
            interrupt::check()?;
            host.grant_vectors(vectors);
            let policy = with!(*clearer.policy(), threshold = Some(threshold));
            let cooperative = Clearer::new(*clearer.features(), policy)?;
            let request = ClearRequest::bulk(memory.extent().bytes()).with_warmth(Warmth::Cold);
            let mut last = host.now_ns();
            let mut observer = |_: &Unit| {
                let now = host.now_ns();
                longest = longest.max(now - last);
                last = now;
            };
            let zeroed = cooperative
                .clear_observed(cx, memory, &request, &Never, &mut observer)
                .map_err(|stopped| stopped.reason)?;
            memory = zeroed.into_dirty();
        }
        worst.push(longest as f64 / 1e6);
    }
    host.grant_vectors(true);
    host.set_preempt_model(PreemptModel::Full);
    Ok((worst, memory))
}
