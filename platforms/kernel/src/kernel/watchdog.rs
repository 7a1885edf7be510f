//! Nothing hangs: every timer interrupt looks whether anything moves.
//!
//! * If no CPU has noted progress for [`PATIENCE_SECONDS`], the machine is ended with a report.
//! * If the next CPU has had no timer interrupt for as long, it is asked by a non-maskable interrupt where it is.
//! * If no CPU takes timer interrupts at all, nothing inside can tell; the host's deadline ends that.

use super::arch::traps::Frame;
use super::arch::{controller, exit};
use super::{clock, console, fault, percpu};
use core::sync::atomic::{AtomicU64, Ordering};

/// How long nothing may move. Long enough for emulated CPUs that share a few real ones.
pub(super) const PATIENCE_SECONDS: u64 = 15;
/// How often the boot CPU says that it lives.
const ALIVE_NS: u64 = 5_000_000_000;
const PATIENCE_NS: u64 = PATIENCE_SECONDS * 1_000_000_000;

/// What was last seen of something that should move, and when it moved.
struct Seen {
    value: AtomicU64,
    moved: AtomicU64,
}

impl Seen {
    const fn new() -> Self {
        Seen { value: AtomicU64::new(u64::MAX), moved: AtomicU64::new(0) }
    }

    /// Whether it has not moved for too long.
    fn stands_still(&self, value: u64) -> bool {
        let now = clock::now_ns();
        // Relaxed: a race between CPUs only postpones the verdict to a later tick.
        if self.value.swap(value, Ordering::Relaxed) != value {
            self.moved.store(now, Ordering::Relaxed);
            return false;
        }
        now.saturating_sub(self.moved.load(Ordering::Relaxed)) > PATIENCE_NS
    }
}

static BEATS: Seen = Seen::new();
static TICKS: [Seen; crate::MAX_CPUS as usize] = [const { Seen::new() }; crate::MAX_CPUS as usize];

/// When the boot CPU last said that it lives. Its own.
static SAID: AtomicU64 = AtomicU64::new(0);

/// A timer interrupt on the calling CPU.
pub(super) fn tick(frame: &Frame) {
    let own = percpu::own();
    own.ticks.fetch_add(1, Ordering::Relaxed);
    if fault::reporting() {
        exit::halt();
    }
    let cpus = percpu::count();
    let next = (own.id() + 1) % cpus;
    let other = percpu::of(next);
    let ticks = other.ticks.load(Ordering::Relaxed);
    if next != own.id() && TICKS[next as usize].stands_still(ticks) {
        // Asked once; it answers by ending the machine.
        if !other.asked.swap(true, Ordering::AcqRel) {
            controller::ask(next);
        }
        return;
    }
    let beats = (0..cpus).map(|cpu| percpu::of(cpu).beats.load(Ordering::Relaxed)).fold(0, u64::wrapping_add);
    if BEATS.stands_still(beats) {
        fault::hung(frame);
    }
    // The host would take a long silence for a hang; what does hang is found above.
    // By the clock: on a busy host an emulated CPU misses most of its ticks.
    let now = clock::now_ns();
    if own.id() == 0 && now.saturating_sub(SAID.load(Ordering::Relaxed)) >= ALIVE_NS {
        SAID.store(now, Ordering::Relaxed);
        console::print(format_args!("alive"));
    }
}

/// Whether the calling CPU has been asked where it is.
pub(super) fn asked() -> bool {
    percpu::own().asked.load(Ordering::Acquire)
}
