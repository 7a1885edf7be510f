//! `hugemm bench stress`: all orders up to 10 from one shared area on several CPUs, with an ownership bitmap beside the
//! allocator. Fails if a frame is ever handed out twice, is not taken back, or is lost.

use crate::document::Row;
use crate::frames::area::Plan;
use crate::frames::args::Stress;
use crate::machine::Machine;
use crate::{environment_text, progress, table};
use anyhow::{Result, bail};
use hugemm_base::{Clock, CpuId, Order};
use hugemm_host::environment::Environment;
use hugemm_host::interrupt;
use hugemm_workloads::alloc_free::random::Random;
use hugemm_workloads::alloc_free::stress::{self, Ownership, Stressed};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Steps between looks at the clock.
const STEPS: u64 = 65_536;

/// Places where CPUs hand blocks to each other.
const PLACES: usize = 64;

/// Runs the command.
pub fn run(args: &Stress) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let threads = args.threads.unwrap_or(machine.topology.cpus.len() as u32);
    machine.places(threads as usize)?;
    let plan = Plan::new(&machine, args.size, threads, Order::new(stress::LARGEST)?)?;
    let mut environment = Environment::read()?;
    let mut memory = plan.memory(&machine)?;
    environment.note_region("metadata", &memory);
    let area = plan.area(&machine, &mut memory)?;
    let words: Vec<AtomicU64> = (0..area.extent.pages() / 64).map(|_| AtomicU64::new(0)).collect();
    let Some(ownership) = Ownership::new(area.extent, &words) else {
        bail!("{} is no multiple of 256KB; give one that is", args.size)
    };
    let exchange: Vec<AtomicU64> = (0..PLACES).map(|_| AtomicU64::new(0)).collect();
    // So many in each hand that all of it is in use at times: a block is 186 pages on average, and half the hand full.
    let hand = (area.extent.pages() / 93 / u64::from(threads)).max(4);

    let bar = progress::bar(args.seconds, machine.quiet());
    let stop = AtomicBool::new(false);
    let results = area.host.run_on_each((0..threads).map(CpuId), |cx| {
        let cpu = cx.pinned(|pin| pin.cpu().0);
        let mut random = Random::new(args.seed ^ u64::from(cpu) << 32);
        let mut held = vec![0; hand as usize];
        let from = area.host.now_ns();
        let mut sum = Stressed::default();
        while !stop.load(Ordering::Relaxed) && !interrupt::requested() {
            let seconds = (area.host.now_ns() - from) / 1_000_000_000;
            if seconds >= args.seconds {
                break;
            }
            if cpu == 0 {
                bar.set_position(seconds);
            }
            match stress::run(cx, &area.frames, &ownership, &exchange, &mut held, STEPS, &mut random) {
                Ok(more) => {
                    sum.taken.iter_mut().zip(more.taken).for_each(|(sum, more)| *sum += more);
                    sum.failed += more.failed;
                }
                Err(broken) => {
                    stop.store(true, Ordering::Relaxed);
                    return Err(broken);
                }
            }
        }
        Ok(sum)
    })?;
    bar.finish_and_clear();
    let mut sums = Vec::new();
    for result in results {
        sums.push(result?);
    }
    area.host.run_on(CpuId(0), |cx| {
        stress::finish(cx, &area.frames, &ownership, &exchange, &mut Random::new(args.seed))
    })??;
    interrupt::check()?;
    let left = area.host.run_on(CpuId(0), |cx| area.frames.stats(cx).available())?;
    if left != area.extent.pages() {
        bail!("{} frames of {} were lost or invented: free are {left}", area.extent.pages().abs_diff(left), args.size);
    }
    report(args, &machine, environment, threads, &sums)
}

fn report(args: &Stress, machine: &Machine, environment: Environment, threads: u32, sums: &[Stressed]) -> Result<()> {
    let mut rows = Vec::new();
    let mut lines = table::new(["order", "taken"]);
    let mut all = 0;
    for order in 0..=stress::LARGEST as usize {
        let taken: u64 = sums.iter().map(|sum| sum.taken[order]).sum();
        all += taken;
        lines.add_row([order.to_string(), taken.to_string()]);
        rows.push(
            Row::single("bench.stress.taken", taken as f64, "blocks").label("order", order).label("cpus", threads),
        );
    }
    let failed: u64 = sums.iter().map(|sum| sum.failed).sum();
    rows.push(Row::single("bench.stress.failed", failed as f64, "count").label("cpus", threads));
    rows.push(Row::single("bench.stress.handed_out_twice", 0.0, "count").label("cpus", threads));
    if !machine.quiet() {
        environment_text::print(&environment);
        table::print(&format!("Blocks taken from {} by {threads} CPUs in {} s", args.size, args.seconds), &lines);
        println!(
            "\n  {all} blocks, {failed} requests that found nothing; no frame was handed out twice, none was lost"
        );
    }
    machine.report(&args.common, environment, rows)
}
