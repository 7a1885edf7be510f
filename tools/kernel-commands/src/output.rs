//! Results and progress as JSON lines: whole lines, numbered, one CPU at a time.

use alloc::string::String;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use hugemm_kernel::{BootInfo, clock, console, memory, percpu};
use hugemm_kernel_commands::report::{self, Fields, Value};
use hugemm_workloads::record::Record;

/// The number of the next line. Written with the console's lock held.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Most fields that a record has, and one for its name.
const MOST_FIELDS: usize = 32;

fn write(kind: &str, fields: Fields<'_>, labels: Option<Fields<'_>>) {
    percpu::beat();
    console::with(|mut out| {
        // Relaxed: the console's lock orders the lines.
        let seq = NEXT.fetch_add(1, Ordering::Relaxed);
        // The port takes everything.
        let _ = report::line(&mut out, seq, kind, fields, labels);
    });
}

/// A line without labels.
pub fn line(kind: &str, fields: Fields<'_>) {
    write(kind, fields, None);
}

/// A figure of no workload, and what tells it from others.
pub fn sample(metric: &str, value: f64, unit: &str, labels: Fields<'_>) {
    write("sample", &[("metric", (&metric).into()), ("value", value.into()), ("unit", (&unit).into())], Some(labels));
}

/// What a run counted, and what tells it from others.
pub fn record<R: Record>(record: &R, labels: Fields<'_>) {
    let name = R::NAME;
    let mut fields = [("name", Value::Text(&name)); MOST_FIELDS];
    let mut count = 1;
    record.each(&mut |field, value| {
        fields[count] = (field, value.into());
        count += 1;
    });
    write("record", &fields[..count], Some(labels));
}

pub fn progress(done: u64, of: u64, what: &str) {
    line("progress", &[("done", done.into()), ("of", of.into()), ("what", (&what).into())]);
}

/// A remark for the user.
pub fn note(text: fmt::Arguments<'_>) {
    line("note", &[("text", (&text).into())]);
}

/// Text whose lines are remarks for the user.
#[derive(Debug, Default)]
pub struct Notes(String);

impl fmt::Write for Notes {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.push_str(text);
        while let Some(end) = self.0.find('\n') {
            note(format_args!("{}", &self.0[..end]));
            self.0.drain(..=end);
        }
        Ok(())
    }
}

pub fn boot(boot: &BootInfo) {
    line(
        "boot",
        &[
            ("cpus", percpu::count().into()),
            ("cpus_present", boot.cpus_present.into()),
            ("memory", memory::managed_bytes().into()),
            ("counter_khz", clock::counter_khz().into()),
            ("interrupt_controller", (&boot.interrupt_controller).into()),
        ],
    );
}
