//! All CPUs take blocks of all orders up to 10 from one area, half of it each node's, with an ownership bitmap beside the allocator.
//! Meanwhile every CPU claims ranges of 2 MiB, which are isolated for as long, frames are poisoned one after the other, and three pieces
//! of 2 MiB that adjoin, of either node by turns, are plugged in and unplugged. A second; `HUGEMM_SOAK_SECONDS` for longer.

use hugemm_base::lock::Lock;
use hugemm_base::random::Random;
use hugemm_base::{Clock, CpuId, Dirty, Extent, NodeId, PageSize};
use hugemm_frames::{ArenaSpec, Frames, FramesConfig, Plain};
use hugemm_host::cpu::{BASE_FRAME, CpuPlace, Host, allowed_cpus};
use hugemm_workloads::alloc_free::stress::{self, Ownership, PIECES, Pieces, Plugged, Stressed};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Pages of the area: few, so that CPUs meet.
const PAGES: u64 = (64 << 20) >> 12;

/// Steps between looks at the clock, and between claims.
const STEPS: u64 = 8192;

/// One frame of so many is poisoned before the time is over.
const PAGES_PER_POISON: u64 = 512;

/// Places where CPUs hand blocks to each other.
const PLACES: usize = 64;

fn words(count: u64) -> Vec<AtomicU64> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

#[repr(align(4096))]
#[derive(Clone)]
#[allow(dead_code, reason = "room for others")]
struct Page([u8; 4096]);

/// Memory that manager and pieces keep what they know in.
fn room(bytes: usize) -> Vec<Page> {
    vec![Page([0; 4096]); bytes.div_ceil(4096)]
}

#[test]
fn no_frame_has_two_owners() {
    let seconds = std::env::var("HUGEMM_SOAK_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1_u64);
    let os_cpus = allowed_cpus().expect("CPUs");
    let places: Vec<CpuPlace> = os_cpus.iter().map(|cpu| CpuPlace { os_cpu: *cpu, node: NodeId::new(0) }).collect();
    let (host, cpus) = (Host::new(&places, &mut []).expect("a machine without memory"), places.len() as u32);
    let piece_pages = PageSize::Size2M.pages();
    let wide = Extent::new(BASE_FRAME, PAGES + PIECES as u64 * piece_pages).expect("in range");
    let (area, beyond) = wide.split_at(PAGES);
    let mut rooms: [Vec<Page>; PIECES] =
        std::array::from_fn(|_| room(Plugged::bytes::<Plain>(beyond.slice(0, piece_pages))));
    let mut rooms = rooms.iter_mut();
    let pieces: Pieces = std::array::from_fn(|piece| {
        let room = rooms.next().expect("one each");
        let memory = NonNull::slice_from_raw_parts(NonNull::from(&mut **room).cast(), size_of_val(&**room));
        let first = piece as u64 * piece_pages;
        // SAFETY: the frames are numbers beyond the area's, and the memory stays longer than the manager.
        Lock::new(unsafe {
            Plugged::new(beyond.slice(first, first + piece_pages), NodeId::new(piece as u32 % 2), memory)
        })
    });
    let (low, high) = area.split_at(PAGES / 2);
    let arenas = [(low, NodeId::new(0)), (high, NodeId::new(1))];
    let arenas = arenas.map(|(extent, node)| ArenaSpec::new(extent, node));
    let cpu_nodes: Vec<NodeId> = (0..cpus).map(|cpu| NodeId::new(cpu % 2)).collect();
    let config = FramesConfig::new(&arenas, cpus).on_nodes(&cpu_nodes);
    let mut metadata = room(Frames::<Plain>::required_bytes(&config).expect("valid").size());
    // SAFETY: the pages are nothing but bytes.
    let (_, metadata, _) = unsafe { metadata.align_to_mut::<u8>() };
    // SAFETY: there is no memory behind the numbers that anybody could own; all contexts are the host's.
    let frames: Frames<'_, Plain> = unsafe { Frames::in_slice(&config, Plain::default(), metadata) }.expect("room");
    let on_first =
        |f: &mut dyn FnMut(&mut hugemm_base::CpuCx<'_, Host<'_>>)| host.run_on(CpuId::new(0), f).expect("a CPU");
    for part in [low, high] {
        // SAFETY: released once, here.
        on_first(&mut |cx| assert_eq!(unsafe { frames.release(cx, Dirty::assume_owned(part)) }, PAGES / 2));
    }

    let (owners, poison, exchange) = (words(wide.pages() / 64), words(PAGES / PAGES_PER_POISON), words(PLACES as u64));
    let ownership =
        Ownership::new(wide, &owners).expect("whole words").with_poison(&poison).with_plugged(beyond.base());
    let (claims, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    // So many in each hand that all of it is in use at times: a block is 186 pages on average, and half the hand full.
    let hand = (PAGES / 93 / u64::from(cpus)).max(4);
    let taken = host.run_on_each((0..cpus).map(CpuId::new), |cx| {
        let cpu = cx.pinned(|pin| pin.cpu().get());
        let mut random = Random(1 ^ u64::from(cpu) << 32);
        let mut held = vec![0; hand as usize];
        let (from, budget) = (host.now_ns(), seconds * 1_000_000_000);
        let mut sum = Stressed::default();
        // A turn at least, however busy the machine is.
        while !stop.load(Ordering::Relaxed) && (sum == Stressed::default() || host.now_ns() - from < budget) {
            // The first at once, the last well before the end.
            let due = u128::from(host.now_ns() - from) * 2 * poison.len() as u128 / u128::from(budget) + 1;
            if cpu == 0 && (ownership.poisoned() as u128) < due {
                ownership.poison(cx, &frames, &mut random);
            }
            let mut turn = || {
                let more = stress::run(cx, &frames, &ownership, &exchange, &mut held, STEPS, &mut random)?;
                sum.taken.iter_mut().zip(more.taken).for_each(|(sum, more)| *sum += more);
                sum.failed += more.failed;
                let claimed = stress::claim(cx, &frames, &ownership, &mut random)?;
                claims.fetch_add(claimed.into(), Ordering::Relaxed);
                stress::replug(cx, &frames, &ownership, &pieces, &mut random)
            };
            turn().inspect_err(|_| stop.store(true, Ordering::Relaxed))?;
        }
        Ok(sum)
    });
    let taken: Vec<Stressed> =
        taken.expect("CPUs").into_iter().collect::<Result<_, stress::Broken>>().expect("all sound");
    on_first(&mut |cx| stress::finish(cx, &frames, &ownership, &exchange, &mut Random(1)).expect("all sound"));
    // A poisoned frame that is in a cache is found when it leaves that.
    host.run_on_each((0..cpus).map(CpuId::new), |cx| frames.drain(cx)).expect("CPUs");
    on_first(&mut |cx| {
        let unplugged = stress::unplug(cx, &frames, &pieces).expect("nobody's");
        let (stats, poisoned) = (frames.stats(cx), ownership.poisoned() as u64);
        assert_eq!((stats.refused, stats.available()), (poisoned, area.pages() - poisoned), "lost or invented");
        assert!(unplugged > 0 && poisoned > 0 && claims.load(Ordering::Relaxed) > 0, "nothing happened meanwhile");
    });
    assert!((0..8).all(|order| taken.iter().any(|each| each.taken[order] > 0)), "{taken:?}");
}
