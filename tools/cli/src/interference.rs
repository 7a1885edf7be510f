//! `hugemm bench interference`: what clearing on one CPU costs a cache-resident program on another.

use crate::args::Interference;
use crate::machine::Machine;
use crate::measure::Repeat;
use crate::options::Kind;
use crate::progress;
use crate::results::{Line, Results};
use crate::sides::{by_turns, sheet};
use anyhow::{Result, bail};
use hugemm_base::{Cancel, CancelFlag, Clock, CpuId, Never, PageSize, PreemptModel, with};
use hugemm_clear::{ClearPolicy, ClearRequest, Clearer, Primitive, PrimitiveClass};
use hugemm_host::cpu::Host;
use hugemm_workloads::chase::Chase;
use hugemm_workloads::record::Metric;
use hugemm_workloads::size::Size;
use std::sync::Barrier;

pub fn run(args: &Interference) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    if machine.topology.cpus.len() < 2 {
        bail!("two CPUs are needed, one to clear and one to be disturbed, and this process may use only one");
    }
    let places = machine.places(2)?;
    let size = machine.whole_pages(args.size, PageSize::Size2M)?;
    let sets = working_sets(args, &machine)?;
    let mut region = machine.memory(size, PageSize::Size2M, Kind::Thp)?;
    machine.note_region("cleared", &region);
    let largest = sets.iter().max().copied().unwrap_or(4096).next_multiple_of(2 << 20);
    let mut set_region = machine.memory(largest, PageSize::Size2M, Kind::Thp)?;
    machine.note_region("chased", &set_region);
    let policy = ClearPolicy::new(machine.profile(region.as_mut_slice())?.0);
    let calibrated = Clearer::new(machine.features, policy)?;
    // Nobody, the best cached primitive, and every streaming one: they differ in speed and in what they disturb.
    let mut neighbours = vec![None, Some(policy.profile.cached.any)];
    neighbours.extend(machine.features.iter().filter(|p| p.class() == PrimitiveClass::Streaming).map(Some));
    let host = Host::new(&places, region.as_mut_slice())?;
    // Under a cooperative model the policy's unit bounds each call of a primitive.
    host.set_preempt_model(PreemptModel::None);

    let repeat = Repeat::new(args.runs, args.warmup.warmup);
    let turns = sets.len() * neighbours.len() * repeat.all();
    let bar = progress::bar(turns as u64, machine.quiet());
    let mut lines = Vec::new();
    for set in sets {
        let chase = Chase::new(lines_in(&mut set_region.as_mut_slice()[..set as usize]), 0x9e37_79b9);
        let line = |neighbour: &Option<Primitive>| {
            Line::new([("working_set", set.into()), ("beside", name(*neighbour).into())])
        };
        let mut measured: Vec<Line<Beside>> = neighbours.iter().map(line).collect();
        by_turns(&mut measured, repeat, &bar, |index| {
            once(&host, &calibrated, neighbours[index], &chase, args.millis)
        })?;
        let alone: Vec<f64> = measured[0].runs.iter().map(|beside| beside.ns).collect();
        for beside in measured.iter_mut().skip(1).flat_map(|line| line.runs.iter_mut().zip(&alone)) {
            beside.0.slowed = beside.0.ns / beside.1 - 1.0;
        }
        lines.extend(measured);
    }
    bar.finish_and_clear();
    let intro = format!(
        "One CPU follows a random cycle through its working set; another clears {} over and over,\nby 2 MiB page. Median of {} runs \
         of {} ms.",
        Size(size),
        args.runs,
        args.millis
    );
    let mut results = Results { intro, ..Results::default() };
    let labels = [("working_set", "working set"), ("beside", "beside")];
    results.add("Interference", sheet(&lines, &labels, &METRICS), &lines, &METRICS);
    machine.show(results)
}

/// Nanoseconds per step of the chase, GB/s of the clearing beside it, and what part of its time a step takes more; no number where
/// nobody clears.
struct Beside {
    ns: f64,
    gbps: f64,
    slowed: f64,
}

const METRICS: [Metric<Beside>; 4] = [
    Metric::new("bench.interference.latency", "ns", |it: &Beside| it.ns).column("ns per step"),
    Metric::new("bench.interference.slowdown", "percent", |it: &Beside| it.slowed * 100.0).column("slowed by"),
    Metric::new("bench.interference.clearing", "GB/s", |it: &Beside| it.gbps).column("clears at, GB/s"),
    // A fast neighbour disturbs for a shorter time: what a program loses for each GB that is cleared.
    Metric::new("bench.interference.lost_per_gb", "ms", |it: &Beside| it.slowed / it.gbps * 1e3)
        .column("lost per GB cleared, ms"),
];

fn name(neighbour: Option<Primitive>) -> &'static str {
    neighbour.map_or("nobody", Primitive::name)
}

/// The working sets to measure: the user's, or sizes that live in the second-level and in the last-level cache.
fn working_sets(args: &Interference, machine: &Machine) -> Result<Vec<u64>> {
    if args.working_set.is_empty() {
        let caches = &machine.topology.caches;
        let l2 = caches.l2_bytes.unwrap_or(512 << 10);
        let l3 = caches.l3_bytes.unwrap_or(8 << 20).min(32 << 20);
        return Ok(vec![l2 / 2, l3 / 8, l3 / 2]);
    }
    for set in &args.working_set {
        if set.0 < 4096 || !set.0.is_multiple_of(64) || set.0 > 4 << 30 {
            bail!("a working set of {set} cannot be chased; use a multiple of 64 bytes from 4KB to 4GB");
        }
    }
    Ok(args.working_set.iter().map(|set| set.0).collect())
}

pub fn lines_in(bytes: &mut [u8]) -> &mut [[u64; 8]] {
    // SAFETY: any bytes are valid u64s.
    let (_, lines, _) = unsafe { bytes.align_to_mut::<[u64; 8]>() };
    lines
}

fn once(
    host: &Host<'_>,
    calibrated: &Clearer,
    neighbour: Option<Primitive>,
    chase: &Chase<'_>,
    millis: u64,
) -> Result<Beside> {
    // By huge page, as faults do. (Some CPUs write past the cache by themselves when one string store is larger than
    // the cache.)
    let by_page = with!(*calibrated.policy(), force = neighbour, unit = Some(PageSize::Size2M.bytes()));
    let clearer = Clearer::new(*calibrated.features(), by_page)?;
    let (done, start) = (CancelFlag::new(), Barrier::new(2));
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            host.run_on(CpuId::new(1), |cx| {
                start.wait();
                // SAFETY: the only owner of the host's frames during this run; runs follow one another.
                let mut memory = unsafe { host.own_frames() };
                let (mut bytes, from) = (0_u64, host.now_ns());
                while neighbour.is_some() && !done.requested() {
                    let request = ClearRequest::bulk(memory.extent().bytes());
                    bytes += memory.extent().bytes();
                    memory =
                        clearer.clear(cx, memory, &request, &Never).map_err(|stopped| stopped.reason)?.into_dirty();
                }
                let spent = host.now_ns() - from;
                anyhow::Ok(bytes as f64 / spent.max(1) as f64)
            })
        });
        let chased = host.run_on(CpuId::new(0), |_| {
            // The set must be in the cache before the neighbour comes: once round untimed.
            chase.run(host, millis * 1_000_000 / 10, &Never);
            start.wait();
            let (steps, nanos) = chase.run(host, millis * 1_000_000, &Never);
            done.raise();
            nanos as f64 / steps.max(1) as f64
        });
        let gbps = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))??;
        Ok(Beside { ns: chased?, gbps: if neighbour.is_some() { gbps } else { f64::NAN }, slowed: f64::NAN })
    })
}
