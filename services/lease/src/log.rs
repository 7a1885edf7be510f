//! What happens, for journals and programs: a line for each event, a JSON object with `time`, in seconds since 1970, `event`, and
//! what there is to know about it.

use serde::Serialize;
use std::fs::File;
use std::io::Write;
use std::time::SystemTime;

#[derive(Serialize)]
struct Line<'a, T> {
    time: f64,
    event: &'a str,
    #[serde(flatten)]
    about: T,
}

/// Writes a line, by one call, so that those of several threads do not mix. What cannot be written is lost, and nothing else.
pub(crate) fn write(mut to: &File, event: &str, about: impl Serialize) {
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    // Milliseconds are what a reader needs.
    let line = Line { time: time.as_millis() as f64 / 1e3, event, about };
    if let Ok(mut line) = serde_json::to_vec(&line) {
        line.push(b'\n');
        let _ = to.write_all(&line);
    }
}
