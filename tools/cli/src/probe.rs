//! `hugemm probe`: this machine's primitives by chunk and region size, hot and cold; the crossovers; the policy.

use crate::args::Probe;
use crate::document::{self, Row};
use crate::machine::{GIB, Machine};
use crate::measure::Repeat;
use crate::progress;
use crate::results::{Line, Results};
use crate::sides::{by_turns, pivot};
use crate::stats::Samples;
use crate::sweep::{self, Field, Subject};
use anyhow::{Context, Result};
use hugemm_base::{Clock, CpuCx, CpuId, Dirty, Never, PageSize, PreemptModel, with};
use hugemm_clear::{ClearPolicy, ClearRequest, Clearer, Primitive, Profile, Unit, Warmth};
use hugemm_host::cpu::Host;
use hugemm_inspect::interrupt;
use hugemm_workloads::record::Metric;
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
    let mut subjects: Vec<Subject> = machine.features.iter().filter(|p| *p != Primitive::Portable).map(Some).collect();
    subjects.push(None);
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

/// A table: its title, what the regions are called, and what is saved.
type Table = (&'static str, &'static str, Metric<f64>);

const fn table(title: &'static str, key: &'static str, metric: &'static str) -> Table {
    (title, key, Metric::new(metric, "GB/s", |it| *it))
}

const TABLES: [Table; 4] = [
    table("Chunks, cold, one fence per chunk", "chunk", "clear.chunk"),
    table("Regions, cold", "region", "clear.region_cold"),
    table("Regions, cold, read right after: the fault case", "region", "clear.region_cold_touched"),
    table("Regions, hot", "region", "clear.region_hot"),
];

/// The tables, and every figure as a row.
fn measure(
    cx: &mut CpuCx<'_, Host<'_>>,
    clearer: &Clearer,
    subjects: &[Subject],
    sizes: &[u64],
    memory: Dirty,
    args: &Probe,
    quiet: bool,
) -> Result<Results> {
    let total = memory.extent().bytes();
    let chunks = CHUNKS.into_iter().filter(|chunk| total.is_multiple_of(*chunk));
    let cold = |touch| sizes.iter().map(|bytes| Field::cold(*bytes, ENOUGH, touch)).collect();
    let hot = sizes.iter().filter(|bytes| **bytes <= HOT_MOST).map(|bytes| Field::hot(*bytes, ENOUGH));
    let fields: [Vec<Field>; 4] =
        [chunks.map(|chunk| Field::cold(chunk, ENOUGH, false)).collect(), cold(false), cold(true), hot.collect()];
    let repeat = Repeat::new(args.runs, args.warmup.warmup);
    let turns = fields.iter().map(Vec::len).sum::<usize>() * subjects.len() * repeat.all();
    let bar = progress::bar(turns as u64, quiet);
    let (mut results, mut memory) = (Results::default(), Some(memory));
    for ((title, key, metric), fields) in TABLES.into_iter().zip(fields) {
        let mut lines: Vec<Line<f64>> = Vec::new();
        for field in fields {
            let line =
                |subject: &Subject| Line::new([(key, field.size.into()), ("subject", sweep::name(*subject).into())]);
            let (mut of_field, mut cursor): (Vec<_>, _) = (subjects.iter().map(line).collect(), 0);
            by_turns(&mut of_field, repeat, &bar, |index| {
                let all = memory.take().context("the memory is gone")?;
                let (all, gbps) = sweep::run(cx, clearer, subjects[index], &field, all, &mut cursor)?;
                memory = Some(all);
                Ok(gbps)
            })?;
            lines.extend(of_field);
        }
        let title = format!("{title} (GB/s, median of {} runs)", args.runs);
        results.add(title, pivot(&lines, key, &[key], "subject", &[metric]), &lines, &[metric]);
    }
    bar.finish_and_clear();
    let worst_unit = worst_unit(cx, clearer, memory.context("the memory is gone")?, args.runs)?;
    results.rows.push(Row::median("clear.worst_unit", &worst_unit, "ms"));
    results.rows.extend(crossovers(&clearer.policy().profile));
    results.remarks.push(format!(
        "A cooperative clear takes {:.2} ms at most between two reschedule points, with vector registers or without",
        worst_unit.median()
    ));
    Ok(results)
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

/// The longest time in ms between two reschedule points of a cooperative clear of all memory, by run; cached and bulk
/// alternate, each with and without vector registers.
fn worst_unit(cx: &mut CpuCx<'_, Host<'_>>, clearer: &Clearer, mut memory: Dirty, runs: u32) -> Result<Samples> {
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
    Ok(worst)
}
