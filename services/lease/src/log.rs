//! What happens, for journals and programs: a line for each event, a JSON object with `time`, in seconds since 1970, `event`, and
//! what there is to know about it.

use serde::Serialize;
use serde_json::json;
use std::fs::File;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, SystemTime};

/// Where lines are written, by a thread of its own: whoever reads them may stand, and nobody else waits for that.
#[derive(Debug)]
pub(crate) struct Log {
    lines: SyncSender<(Vec<u8>, Option<SyncSender<()>>)>,
    /// Lines that there was no room for since the last that there was.
    lost: AtomicU64,
}

/// Most lines that wait to be written.
const MOST: usize = 1024;

#[derive(Serialize)]
struct Line<'a, T> {
    time: f64,
    event: &'a str,
    #[serde(flatten)]
    about: T,
}

impl Log {
    /// Without a thread nothing is written.
    pub(crate) fn to(mut to: File) -> Self {
        let (lines, written) = sync_channel::<(Vec<u8>, Option<SyncSender<()>>)>(MOST);
        let write = move || {
            for (line, told) in written {
                // What cannot be written is lost, and nothing else.
                let _ = to.write_all(&line);
                told.into_iter().for_each(|told| _ = told.send(()));
            }
        };
        let _ = thread::Builder::new().name("log".to_owned()).spawn(write);
        Log { lines, lost: AtomicU64::new(0) }
    }

    /// Has a line written, after one that says how many were lost.
    pub(crate) fn write(&self, event: &str, about: impl Serialize) {
        // Counters pair with nothing: a line says what was counted until then.
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if lost > 0 && !self.send("lost", json!({ "lines": lost })) {
            self.lost.fetch_add(lost, Ordering::Relaxed);
        }
        if !self.send(event, about) {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits until all is written, for so long at most.
    pub(crate) fn flush(&self, most: Duration) {
        let (told, hears) = sync_channel(1);
        if self.lines.try_send((Vec::new(), Some(told))).is_ok() {
            let _ = hears.recv_timeout(most);
        }
    }

    fn send(&self, event: &str, about: impl Serialize) -> bool {
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        // Milliseconds are what a reader needs.
        let line = serde_json::to_vec(&Line { time: time.as_millis() as f64 / 1e3, event, about });
        line.is_ok_and(|mut line| {
            line.push(b'\n');
            self.lines.try_send((line, None)).is_ok()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::os::fd::OwnedFd;

    /// A reader that stands keeps nobody waiting; one that goes on is told what it has missed.
    #[test]
    fn nobody_waits_for_the_reader_of_the_log() {
        let (read, write) = std::io::pipe().expect("a pipe");
        let log = Log::to(OwnedFd::from(write).into());
        // More than the pipe and the thread take, by far.
        (0..50_000).for_each(|number| log.write("said", json!({ "number": number })));
        let lines = BufReader::new(read).lines();
        let reader = thread::spawn(|| {
            let lines = lines.map(|line| serde_json::from_str(&line.expect("text")).expect("JSON"));
            lines.collect::<Vec<serde_json::Value>>()
        });
        log.flush(Duration::from_millis(1));
        // Once there is room.
        while log.lost.load(Ordering::Relaxed) > 0 {
            thread::yield_now();
            log.write("said", json!({}));
        }
        drop(log);
        let lines = reader.join().expect("no panic");
        let said = lines.iter().filter(|line| line["event"] == "said").count() as u64;
        let lost: u64 = lines.iter().filter_map(|line| line["lines"].as_u64()).sum();
        assert!(lost > 0 && said + lost >= 50_000, "{said} and {lost}");
    }
}
