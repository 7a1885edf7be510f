//! `hugemm probe`: this machine's primitives by chunk and region size, hot and cold; the crossovers; the policy.

use crate::args::{Calibration, Probe};
use crate::document::{self, Row};
use crate::machine::{Calibrated, GIB, Machine};
use crate::measure::{Field, Repeat, Subject, bandwidths};
use crate::stats::Samples;
use crate::{goals, profile_file, progress, table};
use anyhow::Result;
use hugemm_base::{Clock, CpuCx, CpuId, Dirty, Never, PageSize, PreemptModel};
use hugemm_clear::{ClearPolicy, ClearRequest, Clearer, Primitive, PrimitiveClass, Profile, Unit, Warmth};
use hugemm_host::cpu::Host;
use hugemm_inspect::interrupt;
use hugemm_workloads::size::Size;

const MIB: u64 = 1 << 20;

/// Chunk sizes of the table in "huge page clearing optimizations".
const CHUNKS: [u64; 7] = [4 << 10, 64 << 10, 2 * MIB, 8 * MIB, 32 * MIB, 128 * MIB, 1024 * MIB];

/// Bytes that one measurement of a region smaller than this repeats it for.
const ENOUGH: u64 = 256 * MIB;

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
    let calibrated = machine.profile(&args.calibration, region.as_mut_slice())?;
    let clearer = Clearer::new(machine.features, ClearPolicy::new(calibrated.profile))?;
    if !machine.quiet() {
        machine.print_environment();
        println!("memory: {}", region.verified());
        print_profile(&calibrated, &args.calibration);
    }

    let host = Host::new(&places, region.as_mut_slice())?;
    let mut subjects: Vec<Subject> =
        machine.features.iter().filter(|p| *p != Primitive::Portable).map(Subject::Primitive).collect();
    subjects.push(Subject::Policy);
    let sizes: Vec<u64> = (1..).map(|i| MIB << i).take_while(|bytes| *bytes <= size).collect();
    let rows = host.run_on(CpuId(0), |cx| {
        // SAFETY: the only owner of the host's frames, made once.
        let memory = unsafe { host.own_frames() };
        measure(cx, &clearer, &subjects, &sizes, memory, args, machine.quiet())
    })??;

    if let Some(path) = &args.save_profile {
        profile_file::save(path, &calibrated.profile)?;
        if !machine.quiet() {
            println!("\nprofile written to {}", path.display());
        }
    }
    machine.report(rows)
}

fn print_profile(calibrated: &Calibrated, calibration: &Calibration) {
    let Profile { cached, bulk, crossover, cached_mbps, bulk_mbps } = calibrated.profile;
    match (calibrated.took, &calibration.profile) {
        (Some(took), _) => println!("\ncalibrated in {} ms", took.as_millis()),
        (None, path) => println!("\nprofile read from {}", path.as_deref().unwrap_or("".as_ref()).display()),
    }
    let named = |best: hugemm_clear::Best| match best.general == best.any {
        true => best.general.to_string(),
        false => format!("{} (without vector registers {})", best.any, best.general),
    };
    println!("  best cached primitive   {}, {:.1} GB/s cold", named(cached), f64::from(cached_mbps.any) / 1e3);
    match bulk {
        Some(bulk) => {
            println!("  best bulk primitive     {}, {:.1} GB/s cold", named(bulk), f64::from(bulk_mbps.any) / 1e3)
        }
        None => println!("  best bulk primitive     none that this CPU has"),
    }
    let from = |bytes| if bytes == u64::MAX { "never".to_owned() } else { format!("from {}", Size(bytes)) };
    println!("  bulk is faster");
    println!("    on cold memory        {}", from(crossover.cold));
    println!("    and read right after  {}", from(crossover.cold_touched));
    println!("    on hot memory         {}", from(crossover.hot));
    println!("    and read right after  {}", from(crossover.hot_touched));
    let policy = ClearPolicy::new(calibrated.profile);
    let unit = |p| Size(policy.unit_bytes(p, PreemptModel::None, false));
    println!("  unit under a cooperative model: {} cached", unit(cached.any));
    if let Some(bulk) = bulk {
        println!("                                  {} bulk", unit(bulk.any));
    }
}

/// The tables. Returns every figure as a row.
fn measure(
    cx: &mut CpuCx<'_, Host<'_>>,
    clearer: &Clearer,
    subjects: &[Subject],
    sizes: &[u64],
    mut memory: Dirty,
    args: &Probe,
    quiet: bool,
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let total = memory.extent().bytes();
    let chunks: Vec<u64> = CHUNKS.into_iter().filter(|chunk| total.is_multiple_of(*chunk)).collect();
    let mut fields: Vec<Field> = Vec::new();
    fields.extend(chunks.iter().map(|chunk| Field::cold(*chunk, ENOUGH, false)));
    fields.extend(sizes.iter().map(|bytes| Field::cold(*bytes, ENOUGH, false)));
    fields.extend(sizes.iter().map(|bytes| Field::cold(*bytes, ENOUGH, true)));
    fields.extend(sizes.iter().map(|bytes| Field::hot(*bytes, ENOUGH)));
    let repeat = Repeat { runs: args.runs, warmup: args.warmup.warmup };
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
        for (field, each) in fields[range.clone()].iter().zip(&measured[range.clone()]) {
            let mut line = vec![Size(field.size).to_string()];
            for (subject, samples) in subjects.iter().zip(each) {
                line.push(table::gbps(samples.median()));
                rows.push(Row::median(metric, samples, "GB/s").label(key, field.size).label("subject", subject.name()));
            }
            line.push(format!("{:.2}", share(each, best(each))));
            lines.add_row(line);
        }
        if !quiet {
            table::print(title, &lines);
        }
        worst_share(&measured[range])
    };
    let kind = format!("GB/s, median of {} runs", args.runs);
    section(&format!("Chunks, cold, one fence per chunk ({kind})"), "clear.chunk", "chunk", chunks.len(), &mut rows);
    let cold = section(&format!("Regions, cold ({kind})"), "clear.region_cold", "region", sizes.len(), &mut rows);
    let touched = section(
        &format!("Regions, cold, read right after: the fault case ({kind})"),
        "clear.region_cold_touched",
        "region",
        sizes.len(),
        &mut rows,
    );
    let hot = section(&format!("Regions, hot ({kind})"), "clear.region_hot", "region", sizes.len(), &mut rows);

    // The largest cold region stands for bulk; what Linux gets is rep stosb by 2 MiB chunk.
    let largest = &measured[chunks.len() + sizes.len() - 1];
    let chunk_2m = chunks.iter().position(|chunk| *chunk == 2 * MIB).map(|index| &measured[index]);
    let column = |each: &'_ [Samples], wanted: Subject| -> Option<Samples> {
        subjects.iter().position(|subject| *subject == wanted).map(|index| each[index].clone())
    };
    let policy = column(largest, Subject::Policy).unwrap_or_default();
    let best_stream = subjects
        .iter()
        .zip(largest)
        .filter(|(subject, _)| matches!(subject, Subject::Primitive(p) if p.class() == PrimitiveClass::Streaming))
        .map(|(_, samples)| samples)
        .max_by(|a, b| a.median().total_cmp(&b.median()));
    let mut goals = goals::Goals::new();
    if let Some(best) = best_stream {
        goals.at_least("clear.bulk_vs_best_stream", &policy.per_run_ratio(best), 0.97);
    }
    if let Some(stosb) = chunk_2m.and_then(|each| column(each, Subject::Primitive(Primitive::RepStosb))) {
        goals.at_least("clear.bulk_vs_rep_stosb", &policy.per_run_ratio(&stosb), 2.2);
    }
    goals.at_least("clear.worst_vs_best_hot", &hot, 0.95);
    goals.at_least("clear.worst_vs_best_cold", &cold, 0.95);
    goals.at_least("clear.worst_vs_best_cold_touched", &touched, 0.95);
    goals.at_most("clear.worst_unit_ms", &worst_unit, "ms", 4.0);
    if !quiet {
        goals.print();
    }
    rows.extend(goals.into_rows());
    rows.extend(crossovers(&clearer.policy().profile));
    Ok(rows)
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

/// The policy's share of the best primitive's bandwidth at the size where that is least. Size and primitive are chosen by one half of
/// the runs and measured by the other, and the other way round: the least of ten shares of the best of eight figures is low by noise alone.
fn worst_share(sizes: &[Vec<Samples>]) -> Samples {
    let halves = [0, 1].map(|half| -> Vec<Vec<Samples>> {
        let half = |each: &Vec<Samples>| each.iter().map(|samples| samples.halves()[half].clone()).collect();
        sizes.iter().map(half).collect()
    });
    let mut shares = Samples::default();
    for (chosen, measured) in [(&halves[0], &halves[1]), (&halves[1], &halves[0])] {
        let worst = chosen
            .iter()
            .map(|each| best(each))
            .enumerate()
            .min_by(|a, b| share(&chosen[a.0], a.1).total_cmp(&share(&chosen[b.0], b.1)));
        if let Some((size, primitive)) = worst {
            shares.push(share(&measured[size], primitive));
        }
    }
    shares
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
            let policy = ClearPolicy { threshold: Some(threshold), ..*clearer.policy() };
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs of two primitives and the policy.
    fn size(first: [f64; 4], second: [f64; 4], policy: [f64; 4]) -> Vec<Samples> {
        [first, second, policy]
            .map(|runs| {
                runs.into_iter().fold(Samples::default(), |mut samples, run| {
                    samples.push(run);
                    samples
                })
            })
            .into()
    }

    #[test]
    fn a_slow_choice_is_found_where_it_is() {
        let right = size([20.0; 4], [40.0; 4], [40.0; 4]);
        let wrong = size([50.0; 4], [40.0; 4], [40.0; 4]);
        let shares = worst_share(&[right.clone(), wrong, right]);
        assert_eq!((shares.runs(), shares.median(), shares.max()), (2, 0.8, 0.8));
    }

    /// A primitive that two runs favoured has not shown that the policy chose wrongly: the others do not say so.
    #[test]
    fn luck_is_no_slow_choice() {
        let lucky = size([80.0, 40.0, 80.0, 40.0], [40.0; 4], [40.0; 4]);
        assert_eq!(share(&lucky, best(&lucky)), 0.75);
        assert_eq!(worst_share(&[lucky]).median(), 1.0);
    }
}
