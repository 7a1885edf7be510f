//! `hugemm bench interference`: what clearing on one CPU costs a cache-resident program on another (checklist B13).

use crate::args::{Interference, Kind};
use crate::document::Row;
use crate::machine::Machine;
use crate::size::Size;
use crate::stats::Samples;
use crate::{environment_text, progress, table};
use anyhow::{Result, bail};
use hugemm_base::{Cancel, CancelFlag, Clock, CpuId, Never, PageSize};
use hugemm_clear::{Best, Clearer, Policy, Request};
use hugemm_host::cpu::Host;
use hugemm_host::environment::Environment;
use hugemm_host::interrupt;
use hugemm_workloads::chase::Chase;
use std::sync::Barrier;

/// What the other CPU does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Neighbour {
    Idle,
    Cached,
    Bulk,
}

impl Neighbour {
    const ALL: [Neighbour; 3] = [Neighbour::Idle, Neighbour::Cached, Neighbour::Bulk];

    fn name(self) -> &'static str {
        match self {
            Neighbour::Idle => "idle",
            Neighbour::Cached => "cached",
            Neighbour::Bulk => "bulk",
        }
    }
}

/// Runs the command.
pub fn run(args: &Interference) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    if machine.topology.cpus.len() < 2 {
        bail!("two CPUs are needed, one to clear and one to be disturbed, and this process may use only one");
    }
    let places = machine.places(2)?;
    let size = machine.whole_pages(args.size, PageSize::Size2M)?;
    let sets = working_sets(args, &machine)?;
    let mut environment = Environment::read()?;
    let mut region = machine.memory(size, PageSize::Size2M, Kind::Thp)?;
    environment.note_region("cleared", &region);
    let largest = sets.iter().max().copied().unwrap_or(4096).next_multiple_of(2 << 20);
    let mut set_region = machine.memory(largest, PageSize::Size2M, Kind::Thp)?;
    environment.note_region("chased", &set_region);
    let policy = Policy::new(machine.profile(&args.common, region.as_mut_slice())?.profile);
    let Some(bulk) = policy.profile.bulk else { bail!("this CPU has no bulk primitive to compare with") };
    let cached = policy.profile.cached;
    let host = Host::new(&places, region.as_mut_slice())?;

    let bar = progress::bar(sets.len() as u64 * 3 * u64::from(args.runs), machine.quiet());
    let mut lines = table::new([
        "working set",
        "ns alone",
        "ns, cached",
        "slowed by",
        "ns, bulk",
        "slowed by",
        "GB/s cached",
        "GB/s bulk",
    ]);
    let mut rows = Vec::new();
    for set in sets {
        let lines_of_set = lines_in(&mut set_region.as_mut_slice()[..set as usize]);
        let chase = Chase::new(lines_of_set, 0x9e37_79b9);
        let mut latency: [Samples; 3] = Default::default();
        let mut bandwidth: [Samples; 3] = Default::default();
        for run in 0..args.runs as usize {
            for i in 0..3 {
                interrupt::check()?;
                let index = (i + run) % 3;
                bar.set_message(format!("{} against {}", Size(set), Neighbour::ALL[index].name()));
                let (ns, gbps) = once(&host, &policy, Neighbour::ALL[index], &chase, args.millis, [cached, bulk])?;
                latency[index].push(ns);
                bandwidth[index].push(gbps);
                bar.inc(1);
            }
        }
        let slowed = |index: usize| latency[index].per_run_ratio(&latency[0]).map(|ratio| (ratio - 1.0) * 100.0);
        let percent = |samples: &Samples| format!("{:+.0} %", samples.median());
        lines.add_row([
            Size(set).to_string(),
            format!("{:.1}", latency[0].median()),
            format!("{:.1}", latency[1].median()),
            percent(&slowed(1)),
            format!("{:.1}", latency[2].median()),
            percent(&slowed(2)),
            table::gbps(bandwidth[1].median()),
            table::gbps(bandwidth[2].median()),
        ]);
        for (index, neighbour) in Neighbour::ALL.into_iter().enumerate() {
            let label = |row: Row| row.label("working_set", set).label("neighbour", neighbour.name());
            rows.push(label(Row::median("bench.interference.latency", &latency[index], "ns")));
            if neighbour != Neighbour::Idle {
                rows.push(label(Row::median("bench.interference.slowdown", &slowed(index), "percent")));
                rows.push(label(Row::median("bench.interference.clearing", &bandwidth[index], "GB/s")));
            }
        }
    }
    bar.finish_and_clear();
    if !machine.quiet() {
        environment_text::print(&environment);
        println!(
            "\nOne CPU follows a random cycle through its working set; another clears {} over and over:",
            Size(size)
        );
        println!(
            "cached with {}, in bulk with {}. Median of {} runs of {} ms.",
            cached.any, bulk.any, args.runs, args.millis
        );
        table::print("Latency per step", &lines);
    }
    machine.report(&args.common, environment, rows)
}

/// The working sets to measure: the user's, or sizes that live in the second-level and in the last-level cache.
fn working_sets(args: &Interference, machine: &Machine) -> Result<Vec<u64>> {
    if args.working_set.is_empty() {
        let caches = &machine.topology.caches;
        let l2 = caches.l2.as_ref().map_or(512 << 10, |cache| cache.bytes);
        let l3 = caches.l3.as_ref().map_or(8 << 20, |cache| cache.bytes).min(32 << 20);
        return Ok(vec![l2 / 2, l3 / 8, l3 / 2]);
    }
    for set in &args.working_set {
        if set.0 < 4096 || !set.0.is_multiple_of(64) || set.0 > 4 << 30 {
            bail!("a working set of {set} cannot be chased; use a multiple of 64 bytes from 4KB to 4GB");
        }
    }
    Ok(args.working_set.iter().map(|set| set.0).collect())
}

/// A byte slice as cache lines.
fn lines_in(bytes: &mut [u8]) -> &mut [[u64; 8]] {
    // SAFETY: any bytes are valid u64s.
    let (_, lines, _) = unsafe { bytes.align_to_mut::<[u64; 8]>() };
    lines
}

/// One run: ns per step of the chase, and the bandwidth of the clearing beside it in GB/s.
fn once(
    host: &Host<'_>,
    policy: &Policy,
    neighbour: Neighbour,
    chase: &Chase<'_>,
    millis: u64,
    [cached, bulk]: [Best; 2],
) -> Result<(f64, f64)> {
    let force = if neighbour == Neighbour::Cached { cached.any } else { bulk.any };
    let clearer = Clearer::new(hugemm_clear::Features::detect(), Policy { force: Some(force), ..*policy })?;
    let (done, start) = (CancelFlag::new(), Barrier::new(2));
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            host.run_on(CpuId(1), |cx| {
                start.wait();
                // SAFETY: the only owner of the host's frames during this run; runs follow one another.
                let mut memory = unsafe { host.own_frames() };
                let (mut bytes, from) = (0_u64, host.now_ns());
                while neighbour != Neighbour::Idle && !done.requested() {
                    let request = Request::bulk(memory.extent().bytes());
                    bytes += memory.extent().bytes();
                    memory =
                        clearer.clear(cx, memory, &request, &Never).map_err(|stopped| stopped.reason)?.into_dirty();
                }
                let spent = host.now_ns() - from;
                anyhow::Ok(bytes as f64 / spent.max(1) as f64)
            })
        });
        let chased = host.run_on(CpuId(0), |_| {
            // The set must be in the cache before the neighbour comes: once round untimed.
            chase.run(host, millis * 1_000_000 / 10, &Never);
            start.wait();
            let (steps, nanos) = chase.run(host, millis * 1_000_000, &Never);
            done.raise();
            nanos as f64 / steps.max(1) as f64
        });
        let gbps = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))??;
        Ok((chased?, gbps))
    })
}
