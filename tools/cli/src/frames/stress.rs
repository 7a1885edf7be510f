//! `hugemm bench stress`: all orders up to 10 from one shared area on several CPUs, with an ownership bitmap beside the
//! allocator. Meanwhile every CPU claims ranges of 2 MiB, which are isolated for as long, frames are poisoned one after
//! the other, and three pieces of 2 MiB that adjoin are plugged in and unplugged. Fails if a frame is ever handed out twice
//! or after it was poisoned, is not taken back, or is lost.

use crate::args::Kind;
use crate::document::Row;
use crate::frames::area::AreaPlan;
use crate::frames::args::Stress;
use crate::machine::Machine;
use crate::results::Results;
use crate::{progress, table};
use anyhow::{Result, bail};
use hugemm_base::lock::Lock;
use hugemm_base::{Clock, CpuId, Extent, Order, PageSize};
use hugemm_inspect::interrupt;
use hugemm_workloads::alloc_free::stress::{self, Ownership, PIECES, Pieces, Plugged, Stressed};
use hugemm_workloads::random::Random;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Steps between looks at the clock, and between claims.
const STEPS: u64 = 8192;

/// One frame of so many is poisoned before the time is over.
const PAGES_PER_POISON: u64 = 512;

/// Places where CPUs hand blocks to each other.
const PLACES: usize = 64;

pub fn run(args: &Stress) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let threads = args.threads.unwrap_or(machine.topology.cpus.len() as u32);
    machine.places(threads as usize)?;
    let plan = AreaPlan::new(&machine, args.size, threads, Order::new(stress::LARGEST)?)?;
    let mut memory = plan.memory(&machine)?;
    let wide = Extent::new(plan.extent.base(), plan.extent.pages() + PIECES as u64 * PageSize::Size2M.pages())?;
    let (_, beyond) = wide.split_at(plan.extent.pages());
    let mut room = machine.memory(PageSize::Size2M.bytes(), PageSize::Size2M, Kind::Thp)?;
    let mut rooms = room.as_mut_slice().chunks_exact_mut((PageSize::Size2M.bytes() / 4) as usize);
    let pieces: Pieces = std::array::from_fn(|piece| {
        let (_, from) = beyond.split_at(piece as u64 * PageSize::Size2M.pages());
        let room = NonNull::from(rooms.next().unwrap_or_default());
        // SAFETY: the frames are numbers beyond the area's, and the memory stays longer than the manager.
        Lock::new(unsafe { Plugged::new(from.split_at(PageSize::Size2M.pages()).0, room) })
    });
    machine.note_region("metadata", &memory);
    let area = plan.area(&machine, &mut memory)?;
    let words: Vec<AtomicU64> = (0..wide.pages() / 64).map(|_| AtomicU64::new(0)).collect();
    let Some(ownership) = Ownership::new(wide, &words) else {
        bail!("{} is no multiple of 256KB; give one that is", args.size)
    };
    let places: Vec<AtomicU64> = (0..area.extent.pages() / PAGES_PER_POISON).map(|_| AtomicU64::new(0)).collect();
    let ownership = ownership.with_poison(&places).with_plugged(beyond.base());
    let claims = AtomicU64::new(0);
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
            let nanos = area.host.now_ns() - from;
            let (seconds, of) = (nanos / 1_000_000_000, u128::from(args.seconds) * 1_000_000_000);
            if seconds >= args.seconds {
                break;
            }
            if cpu == 0 {
                bar.set_position(seconds);
                // The first at once, the last well before the end.
                let due = u128::from(nanos) * 2 * places.len() as u128 / of + 1;
                if (ownership.poisoned() as u128) < due {
                    ownership.poison(cx, &area.frames, &mut random);
                }
            }
            let mut turn = || {
                let more = stress::run(cx, &area.frames, &ownership, &exchange, &mut held, STEPS, &mut random)?;
                sum.taken.iter_mut().zip(more.taken).for_each(|(sum, more)| *sum += more);
                sum.failed += more.failed;
                let claimed = stress::claim(cx, &area.frames, &ownership, &mut random)?;
                claims.fetch_add(claimed.into(), Ordering::Relaxed);
                stress::replug(cx, &area.frames, &ownership, &pieces, &mut random)
            };
            if let Err(broken) = turn() {
                stop.store(true, Ordering::Relaxed);
                return Err(broken);
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
    // A poisoned frame that is in a cache is found when it leaves that.
    area.host.run_on_each((0..threads).map(CpuId), |cx| area.frames.drain(cx))?;
    let (left, refused, unplugged) = area.host.run_on(CpuId(0), |cx| {
        let gone = stress::unplug(cx, &area.frames, &pieces);
        let stats = area.frames.stats(cx);
        gone.map(|times| (stats.available(), stats.refused, times))
    })??;
    let poisoned = ownership.poisoned() as u64;
    if refused != poisoned {
        bail!("{poisoned} frames were poisoned, and {refused} are out of use");
    }
    let sound = area.extent.pages() - poisoned;
    if left != sound {
        bail!("{} frames of {} were lost or invented: free are {left}", sound.abs_diff(left), args.size);
    }
    let hazards = Hazards { poisoned, claims: claims.into_inner(), unplugged };
    report(args, &machine, threads, &sums, hazards)
}

struct Hazards {
    poisoned: u64,
    claims: u64,
    unplugged: u64,
}

fn report(args: &Stress, machine: &Machine, threads: u32, sums: &[Stressed], hazards: Hazards) -> Result<()> {
    let Hazards { poisoned, claims, unplugged } = hazards;
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
    rows.push(Row::single("bench.stress.hwpoisoned", poisoned as f64, "count").label("cpus", threads));
    rows.push(Row::single("bench.stress.claimed", claims as f64, "ranges").label("cpus", threads));
    rows.push(Row::single("bench.stress.unplugged", unplugged as f64, "count").label("cpus", threads));
    rows.push(Row::single("bench.stress.handed_out_twice", 0.0, "count").label("cpus", threads));
    let title = format!("Blocks taken from {} by {threads} CPUs in {} s", args.size, args.seconds);
    let remarks = vec![
        format!(
            "{all} blocks taken, {failed} requests found no memory; {claims} ranges of 2 MiB claimed, {unplugged} unplugged, {poisoned} \
             frames poisoned"
        ),
        "no frame was handed out twice, no poisoned frame was handed out, no frame was lost".to_owned(),
    ];
    let tables = vec![(title, lines)];
    machine.show(Results { tables, remarks, rows, ..Results::default() })
}
