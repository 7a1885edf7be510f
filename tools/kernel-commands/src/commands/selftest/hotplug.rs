//! A CPU goes offline and comes back. What it has cached is given back on its behalf, and nobody's flush of the kernel's half waits for
//! it: its interrupts are off, so that one which asked it would stand still, and the watchdog would say where.

use super::descriptors::stamp;
use super::{Cx, Done, Failure, Finding, on_all};
use core::sync::atomic::{AtomicU64, Ordering};
use hugemm_base::random::Random;
use hugemm_base::{Clock, CpuId, Extent, Order, PageSize, Pfn, VirtAddr, VirtRange};
use hugemm_frames::AllocRequest;
use hugemm_kernel::memory::frames;
use hugemm_kernel::tlb::{kernel_half, shootdown};
use hugemm_kernel::{layout, percpu};
use hugemm_paging::{ShootdownBatch, ShootdownPolicy};

/// Times in a round, at most.
const TURNS: u64 = 20;

/// It has not left yet, and is to come back. Between the two: a frame that it has cached, and one more.
const HERE: u64 = 0;
const BACK: u64 = u64::MAX;

/// One round, until `until` at the latest. Nobody leaves where there is but one.
pub fn round(cx: Cx<'_>, seed: u64, until: u64) -> Result<(), Failure> {
    let others = u64::from(percpu::count() - 1);
    let mut random = Random(seed);
    for turn in 0..if others == 0 { 0 } else { TURNS } {
        once(cx, 1 + random.below(others) as u32, turn, &mut random)?;
        Done::Offline.add(1);
        if cx.platform().now_ns() >= until {
            break;
        }
    }
    Ok(())
}

/// That CPU goes offline and comes back.
fn once(cx: Cx<'_>, leaver: u32, turn: u64, random: &mut Random) -> Result<(), Failure> {
    let phase = AtomicU64::new(HERE);
    let seed = random.word();
    on_all(cx, |cx, cpu| match cpu {
        0 => Ok(beside(cx, CpuId::new(leaver), &phase)?),
        cpu if cpu == leaver => {
            leave(cx, &phase);
            Ok(stamp(cx, cpu, turn, &mut Random(seed))?)
        }
        _ => Ok(()),
    })
}

/// The calling CPU is offline, with frames in its cache, until it is told to come back.
fn leave(cx: Cx<'_>, phase: &AtomicU64) {
    let cached = frames().alloc(cx, AllocRequest::order(Order::ZERO)).map(|frame| {
        let pfn = frame.pfn();
        frames().free(cx, frame);
        pfn.get()
    });
    let cx = &*cx;
    cx.pinned(|_| {
        // SAFETY: until it is back it reads `phase` and runs this loop, whose mappings do not change.
        unsafe { kernel_half().offline(cx) };
        // Release and Acquire pair with `beside`: what is in the cache is seen there, and what is left of it here.
        phase.store(1 + cached.unwrap_or(0), Ordering::Release);
        while phase.load(Ordering::Acquire) != BACK {
            core::hint::spin_loop();
        }
        kernel_half().online(shootdown(), cx);
    });
}

/// What the boot CPU does meanwhile.
fn beside(cx: Cx<'_>, leaver: CpuId, phase: &AtomicU64) -> Result<(), Finding> {
    let cached = loop {
        percpu::beat();
        match phase.load(Ordering::Acquire) {
            HERE => core::hint::spin_loop(),
            frame => break Pfn::new(frame - 1),
        }
    };
    // SAFETY: it spins, pinned, until the store below.
    unsafe { frames().drain_offline(cx, leaver) };
    if let Ok(range) = VirtRange::new(VirtAddr::new(layout::DESCRIPTORS), PageSize::Size2M.bytes()) {
        let mut batch = ShootdownBatch::new(kernel_half());
        batch.changed(range, PageSize::Size2M);
        let _receipt = batch.flush(shootdown(), cx, &ShootdownPolicy::BATCHED);
    }
    // 0: there was none to cache.
    let taken = (cached != Pfn::new(0)).then(|| frames().take_range(cx, Extent::block(cached, Order::ZERO)));
    phase.store(BACK, Ordering::Release);
    match taken {
        Some(Err(_)) => Err(Finding::new(
            "hotplug",
            format_args!(
                "frame {:#x}, which cpu{} had cached when it went offline, is not free",
                cached.get(),
                leaver.get()
            ),
        )),
        Some(Ok(frame)) => {
            frames().free_extent(cx, frame);
            Ok(())
        }
        None => Ok(()),
    }
}
