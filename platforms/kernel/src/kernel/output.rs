//! Results and progress as JSON lines: whole lines, numbered, one CPU at a time.

use super::irq_lock::IrqLock;
use super::serial::Serial;
use super::{apic, clock, memory, percpu};
use core::cell::UnsafeCell;
use core::fmt::{self, Write};
use hugemm_base::lock::RawLock;
use hugemm_kernel::report::{self, Fields};

/// The port and the number of the next line.
struct Output {
    lock: IrqLock,
    next: UnsafeCell<u64>,
}

// SAFETY: `next` is reached under the lock only.
unsafe impl Sync for Output {}

static OUTPUT: Output = Output { lock: IrqLock::new(), next: UnsafeCell::new(0) };

fn write(kind: &str, fields: Fields<'_>, labels: Option<Fields<'_>>) {
    OUTPUT.lock.lock();
    // SAFETY: under the lock; see `Output`.
    let seq = unsafe { &mut *OUTPUT.next.get() };
    // The port takes everything.
    let _ = report::line(&mut Serial, *seq, kind, fields, labels);
    *seq += 1;
    // SAFETY: taken above.
    unsafe { OUTPUT.lock.unlock() };
}

/// A line without labels.
pub fn line(kind: &str, fields: Fields<'_>) {
    percpu::beat();
    write(kind, fields, None);
}

/// The kernel lives. No progress; for the timer interrupt.
pub fn alive() {
    write("alive", &[], None);
}

/// One run's value of a metric, and what tells it from others.
pub fn sample(metric: &str, value: f64, unit: &str, labels: Fields<'_>) {
    percpu::beat();
    write("sample", &[("metric", (&metric).into()), ("value", value.into()), ("unit", (&unit).into())], Some(labels));
}

/// How far a command is.
pub fn progress(done: u64, of: u64, what: &str) {
    line("progress", &[("done", done.into()), ("of", of.into()), ("what", (&what).into())]);
}

/// A remark for the user.
pub fn note(text: fmt::Arguments<'_>) {
    line("note", &[("text", (&text).into())]);
}

/// The first line: what the machine is.
pub fn boot(present: u32) {
    line(
        "boot",
        &[
            ("cpus", percpu::count().into()),
            ("cpus_present", present.into()),
            ("memory", memory::managed_bytes().into()),
            ("tsc_khz", clock::tsc_khz().into()),
            ("apic", (&apic::kind()).into()),
        ],
    );
}

/// Text that is no result, on a line of its own.
pub fn last_words(text: fmt::Arguments<'_>) {
    let _ = writeln!(Serial, "{}{text}", report::LAST_WORDS);
}
