use super::*;
use crate::replay::parse::{Event, line};
use proptest::prelude::*;
use std::collections::HashSet;

const PERF: &str = include_str!("../../tests/data/kmem-perf.txt");
const TRACE_CMD: &str = include_str!("../../tests/data/kmem-trace-cmd.txt");

fn read(bytes: &[u8]) -> Result<Trace> {
    from(bytes, "t.txt", |_| ())
}

fn refusal(bytes: &[u8]) -> String {
    read(bytes).expect_err("refused").to_string()
}

/// What the documentation of the kernel says of batched frees holds in the recordings: each comes after the free that it
/// accompanies, on the same CPU, with nothing between that concerns the frame.
#[test]
fn batched_frees_accompany_frees() {
    for text in [PERF, TRACE_CMD] {
        let frame = |text: &str| text.split(" pfn=").nth(1).map(|rest| rest.split(' ').next().map(str::to_owned));
        let mut freed = HashSet::new();
        let mut batched = 0;
        for text in text.lines() {
            match line(text).expect("readable") {
                Line::Event(cpu, Event::FreeBatched) => {
                    batched += 1;
                    assert!(freed.remove(&(cpu, frame(text))), "{text}");
                }
                Line::Event(cpu, Event::Free { .. }) => drop(freed.insert((cpu, frame(text)))),
                Line::Event(cpu, Event::Alloc { .. }) => drop(freed.remove(&(cpu, frame(text)))),
                _ => {}
            }
        }
        assert!(batched > 90);
    }
}

#[test]
fn refusals_name_the_line_and_the_remedy() {
    let good = "cc 1 [000] 1.0: kmem:mm_page_free: page=0x1 pfn=0x1 order=0\n";
    let cases: [(Vec<u8>, &[&str]); 10] = [
        (b"".to_vec(), &["t.txt is empty", "perf record"]),
        (b"# only a comment\n".to_vec(), &["no event"]),
        (b"PERFILE2\x68\0\0".to_vec(), &["perf.data", "perf script -i t.txt > trace.txt"]),
        (b"\x17\x08\x44tracing6\0".to_vec(), &["trace.dat", "trace-cmd report -i t.txt > trace.txt"]),
        (b"\x1f\x8b\x08\0".to_vec(), &["compressed"]),
        (format!("{good}{good}nonsense\n").into_bytes(), &["line 3", "expected '[CPU]'"]),
        (format!("{good}{}", &good[..40]).into_bytes(), &["line 2", "truncated"]),
        (format!("{good}\0\0\n").into_bytes(), &["line 2", "binary"]),
        (b"cc 1 [000] 1.0: sched:sched_switch: x\n".to_vec(), &["1 of sched:sched_switch"]),
        (
            b"cc 1 [000] 1.0: kmem:mm_page_alloc: pfn=0x1 order=0 migratetype=0 gfp_flags=0\ncc 1 [000] 1.0: \
           kmem:mm_page_free_batched: pfn=0x1 order=0\n"
                .to_vec(),
            &["no mm_page_free", "every page freed"],
        ),
    ];
    for (bytes, says) in cases {
        let error = refusal(&bytes);
        assert!(says.iter().all(|part| error.contains(part)) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn lost_events_are_added_up() {
    let text =
        "CPU:0 [LOST 5 EVENTS]\nCPU:1 [EVENTS DROPPED]\ncc-1 [000] 1.0: mm_page_free: page=0x1 pfn=0x1 order=0\n";
    assert_eq!(read(text.as_bytes()).expect("readable").lost, (2, 5));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever happens to a recording, it is read or refused in one line.
    #[test]
    fn mutated_recordings_never_panic(
        cut in 0_usize..TRACE_CMD.len(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
    ) {
        let mut bytes = TRACE_CMD.as_bytes()[cut..].to_vec();
        for (at, byte) in changes {
            let index = at.index(bytes.len());
            bytes[index] = byte;
        }
        if let Err(error) = read(&bytes) {
            prop_assert!(!error.to_string().contains('\n'));
        }
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
        let _ = read(&bytes);
    }
}
