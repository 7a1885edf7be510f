//! All CPUs take, pass on and free blocks of all orders; a bitmap beside the allocator knows every frame's owner.

use super::{Cx, Done, Failure, Finding, Steps, on_all, vec_of};
use ::alloc::vec::Vec;
use core::ptr::NonNull;
use core::sync::atomic::AtomicU64;
use hugemm_base::lock::{Lock, SpinLock};
use hugemm_base::random::Random;
use hugemm_base::{Extent, NodeId, Order, PageSize, Pfn};
use hugemm_frames::AllocRequest;
use hugemm_kernel::heap::heap;
use hugemm_kernel::memory::{self, KernelEnv, frames};
use hugemm_kernel::{percpu, smp};
use hugemm_workloads::alloc_free::stress::{self, Broken, Ownership, PIECES, Pieces, Plugged};
use hugemm_workloads::request::Plant;

/// Steps of each CPU in a round, at most.
const STEPS: u64 = 5_000;
/// One frame of so many goes bad at most, and no more than [`MOST_BAD`]: large blocks stay possible.
const FRAMES_PER_BAD: u64 = 8192;
const MOST_BAD: u64 = 64;
/// Blocks that a CPU holds at most.
const HELD: usize = 64;
/// Places through which blocks go from one CPU to another.
const EXCHANGE: usize = 16;

/// Memory for what the allocator keeps.
#[repr(align(4096))]
#[allow(dead_code, reason = "room for others")]
struct Page([u8; 4096]);

/// The first frame beyond all there is.
fn beyond() -> Pfn {
    Pfn::new(memory::end().get().next_multiple_of(PageSize::Size2M.pages()))
}

/// Memory that comes and goes in each round: pieces of 2 MiB beyond all there is, of which nothing but numbers is used.
pub fn pieces() -> Result<Pieces, Failure> {
    let [a, b, c] = [0, 1, 2].map(piece);
    Ok([a?, b?, c?])
}

/// Room for the frames that go bad in all rounds.
pub fn bad() -> Result<Vec<AtomicU64>, Failure> {
    let most = (beyond().get() / FRAMES_PER_BAD).clamp(1, MOST_BAD);
    vec_of(most as usize, || AtomicU64::new(0))
}

fn piece(number: u64) -> Result<Lock<SpinLock, Plugged>, Failure> {
    let pages = PageSize::Size2M.pages();
    let extent = Extent::new(Pfn::new(beyond().get() + number * pages), pages).unwrap_or_default();
    // Some of it is the allocator's for good.
    let room = vec_of(Plugged::bytes::<KernelEnv>(extent).div_ceil(size_of::<Page>()), || Page([0; 4096]))?.leak();
    let room = NonNull::slice_from_raw_parts(NonNull::from(&mut *room).cast(), size_of_val(room));
    // SAFETY: no memory is there, so no manager has those frames; the room is never given back.
    Ok(Lock::new(unsafe { Plugged::new(extent, NodeId::new(0), room) }))
}

fn broke(broken: Broken) -> Finding {
    Finding::new("frames", format_args!("{broken}"))
}

/// One round on all CPUs, until `until` at the latest.
pub fn round(
    cx: Cx<'_>,
    seed: u64,
    plant: Plant,
    until: u64,
    pieces: &Pieces,
    bad: &[AtomicU64],
) -> Result<(), Failure> {
    let wide = beyond().get() + PIECES as u64 * PageSize::Size2M.pages();
    let area = Extent::new(Pfn::new(0), wide).unwrap_or_default();
    let words = vec_of((area.pages() / 64) as usize, || AtomicU64::new(0))?;
    let exchange = vec_of(EXCHANGE, || AtomicU64::new(0))?;
    let rounds = Steps::until(until);
    if let Some(ownership) = Ownership::new(area, &words) {
        let ownership = ownership.with_plugged(beyond()).with_poison(bad);
        on_all(cx, |cx, cpu| {
            let mut random = Random(seed ^ u64::from(cpu) << 32);
            let mut own = [0; HELD];
            let steps = 200;
            rounds.each(cx, STEPS / steps, |cx, turn| {
                match plant {
                    _ if cpu != 0 => {}
                    Plant::DoubleFree => free_twice(cx, &ownership),
                    Plant::ForgottenPoison => forget_poison(cx, &ownership),
                    _ if turn == 0 || random.below(8) == 0 => {
                        ownership.poison(cx, frames(), &mut random);
                    }
                    _ => {}
                }
                let done = stress::run(cx, frames(), &ownership, &exchange, &mut own, steps, &mut random).map(|_| ());
                let done = done.and_then(|()| stress::replug(cx, frames(), &ownership, pieces, &mut random));
                Ok(done.map_err(broke)?)
            })?;
            frames().drain(cx);
            Ok(())
        })?;
        stress::finish(cx, frames(), &ownership, &exchange, &mut Random(seed)).map_err(broke)?;
        unowned_pages(cx);
        // Both are counts of all rounds.
        let unplugged = stress::unplug(cx, frames(), pieces).map_err(broke)?;
        for (done, so_far) in [(Done::Unplugged, unplugged), (Done::Poisoned, ownership.poisoned() as u64)] {
            done.add(so_far - done.so_far());
        }
    }
    Ok(())
}

/// Frames that nobody has: free ones, those in all CPUs' caches included, and bad ones that are out for good.
pub fn unowned_pages(cx: Cx<'_>) -> u64 {
    smp::on_cpus(cx, percpu::count(), &|cx, _| {
        heap().into_iter().for_each(|heap| heap.trim(cx));
        frames().drain(cx);
    });
    let stats = frames().stats(cx);
    stats.available() + stats.refused
}

/// The planted bug: a block is given back although it has an owner, who would give it back too. The second time is left to nobody:
/// a block that stands twice in a list makes the list endless, and the self-test would hang where it should say what it found.
fn free_twice(cx: Cx<'_>, ownership: &Ownership<'_>) {
    let Ok(order) = Order::new(3) else { return };
    if let Ok(block) = frames().alloc(cx, AllocRequest::order(order))
        && ownership.take(block.extent(), order).is_ok()
    {
        frames().free(cx, block);
    }
}

/// The planted bug: a frame is known to be bad, and is handed out as before.
fn forget_poison(cx: Cx<'_>, ownership: &Ownership<'_>) {
    if let Ok(page) = frames().alloc(cx, AllocRequest::order(Order::ZERO)) {
        ownership.note_poison(page.pfn());
        frames().free(cx, page);
    }
}
