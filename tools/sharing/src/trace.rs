//! Lackey's trace, read as it comes: which words were read and written between two marks.

use std::collections::HashMap;
use std::io::BufRead;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;

/// Bytes of a word.
pub(crate) const WORD: u64 = 8;

/// How often a word was read and written.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Uses {
    pub(crate) reads: u64,
    pub(crate) writes: u64,
}

/// What one CPU did in one operation, by the addresses of words.
pub(crate) type Window = HashMap<u64, Uses>;

/// Reads the trace to its end and sends each window. A window begins with a store to the byte that `marks` says, and ends with one to
/// the byte behind it. Other lines are messages, and are passed on.
pub(crate) fn read(trace: impl BufRead, marks: &AtomicU64, windows: &Sender<Window>) {
    let mut window: Option<Window> = None;
    for line in trace.split(b'\n') {
        let Ok(line) = line else { return };
        let Some((what, address, size)) = parse(&line) else {
            if !line.starts_with(b"I ") && !line.starts_with(b"==") {
                eprintln!("{}", String::from_utf8_lossy(&line));
            }
            continue;
        };
        let mark = marks.load(Ordering::Relaxed);
        if mark != 0 && what != b'L' && address == mark {
            window = Some(Window::new());
        } else if mark != 0 && what != b'L' && address == mark + 1 {
            if windows.send(window.take().unwrap_or_default()).is_err() {
                return;
            }
        } else if let Some(window) = &mut window {
            for word in address / WORD..=(address + size - 1) / WORD {
                let uses = window.entry(word * WORD).or_default();
                uses.reads += u64::from(what != b'S');
                uses.writes += u64::from(what != b'L');
            }
        }
    }
}

/// A load (` L`), a store (` S`) or both (` M`), with its address and size.
fn parse(line: &[u8]) -> Option<(u8, u64, u64)> {
    let [b' ', what @ (b'L' | b'S' | b'M'), b' ', rest @ ..] = line else { return None };
    let (address, size) = std::str::from_utf8(rest).ok()?.split_once(',')?;
    Some((*what, u64::from_str_radix(address, 16).ok()?, size.parse().ok().filter(|size| *size > 0)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_window_has_the_words_between_two_marks_and_no_others() {
        let trace = "I  400,3\n S 0ff,1\n S 20,8\n S 100,1\n L 10,8\n M 1c,8\nI  404,2\n S 101,1\n L 30,8\n";
        let (send, windows) = channel();
        read(trace.as_bytes(), &AtomicU64::new(0x100), &send);
        drop(send);
        let windows: Vec<Window> = windows.iter().collect();
        let [window] = &windows[..] else { panic!("one window: {windows:?}") };
        let mut found: Vec<_> = window.iter().map(|(word, uses)| (*word, uses.reads, uses.writes)).collect();
        found.sort_unstable();
        assert_eq!(found, [(0x10, 1, 0), (0x18, 1, 1), (0x20, 1, 1)]);
    }
}
