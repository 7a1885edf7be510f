use super::*;
use proptest::prelude::*;

const PERF: &str = include_str!("../../tests/data/kmem-perf.txt");
const TRACE_CMD: &str = include_str!("../../tests/data/kmem-trace-cmd.txt");

fn read(bytes: &[u8]) -> Result<(Plan, u64)> {
    from(bytes, "t.txt", |_| {})
}

fn alloc(cpu: u32, pfn: Option<u64>, order: u32, mobility: Mobility) -> Result<Line, String> {
    Ok(Line::Alloc { cpu, pfn, order: Order::new(order).expect("valid"), mobility })
}

#[test]
fn every_layout_says_the_same() {
    let fields = "page=0x1200 pfn=0x1200 order=2 migratetype=1 gfp_flags=GFP_HIGHUSER_MOVABLE|__GFP_COMP";
    for head in [
        "              cc  2301 [011]  6012.721314:        kmem:mm_page_alloc: ",
        "              cc  2301 [011]        kmem:mm_page_alloc: ",
        "              cc  2301/2302  [011]  6012.721314:          1 kmem:mm_page_alloc: ",
        "           cc-2301  [011]  6012.721314: mm_page_alloc:        ",
        "           cc-2301  [011] d..1. 6012.721314: mm_page_alloc: ",
        "           cc-2301  [011] mm_page_alloc: ",
        "           cc-2301  ( 2301) [011] d..1. 6012.721314: mm_page_alloc: ",
        " Web [3] content: x  2301 [011]  6012.721314: kmem:mm_page_alloc: ",
        " a [001] b  2301 [011]  6012.721314: kmem:mm_page_alloc: ",
    ] {
        let expected = alloc(11, Some(0x1200), 2, Mobility::Movable);
        assert_eq!(line(&format!("{head}{fields}")), expected, "{head}");
    }
}

#[test]
fn values_of_every_kernel() {
    use Mobility::{Movable, Unmovable};
    for (fields, expected) in [
        ("page=ffffea0000 pfn=4608 order=0 migratetype=0 gfp_flags=GFP_KERNEL", alloc(0, Some(4608), 0, Unmovable)),
        ("page=0x1 pfn=0x1200 order=9 migratetype=1 gfp_flags=GFP_TRANSHUGE|X", alloc(0, Some(0x1200), 9, Movable)),
        ("page=0x1 pfn=0x1200 order=1 migratetype=5 gfp_flags=0x40cc0", alloc(0, Some(0x1200), 1, Unmovable)),
        ("pfn=18446744073709551615 order=3 migratetype=0 gfp_flags=0", alloc(0, None, 3, Unmovable)),
        ("page=(nil) pfn=-1 order=10 migratetype=0 gfp_flags=X", alloc(0, None, 10, Unmovable)),
        ("page=(nil) pfn=0x0 order=9 migratetype=1 gfp_flags=X", alloc(0, None, 9, Movable)),
    ] {
        assert_eq!(line(&format!("cc 1 [000] 1.0: kmem:mm_page_alloc: {fields}")), expected, "{fields}");
    }
}

#[test]
fn what_is_no_event_is_passed_over_and_what_was_lost_is_counted() {
    for text in [
        "",
        "# tracer: nop",
        "cpus=2",
        "CPU 3 is empty",
        "\tffffffff81234567 __alloc_pages+0x1a2 ([kernel.kallsyms])",
        "cc 1 [000] 1.0: sched:sched_switch: prev_comm=a [001] ==> b",
        "cc 1 [000] 1.0: kmem:mm_page_free_batched: page=0x1 pfn=0x1 order=0",
        "cc-1 [000] 1.0: mm_page_alloc_zone_locked: page=0x1 pfn=0x1 order=0 migratetype=1",
    ] {
        assert_eq!(line(text), Ok(Line::Nothing), "{text}");
    }
    for text in ["CPU:1 [LOST 17 EVENTS]", "CPU:1 [17 EVENTS DROPPED]", "cc 1 [000] 1.0: PERF_RECORD_LOST lost 12"] {
        assert_eq!(line(text), Ok(Line::Lost), "{text}");
    }
}

/// Each on the same CPU, at most 64 lines before: what is freed as part of a list is freed once.
#[test]
fn batched_frees_accompany_frees() {
    for trace in [PERF, TRACE_CMD] {
        let of = |text: &'static str, name| {
            let (head, fields) = text.split_once(name)?;
            let cpu = head.split_whitespace().rev().find(|word| word.starts_with('['))?;
            Some((cpu, field(fields, "pfn").ok()?))
        };
        let lines: Vec<&str> = trace.lines().collect();
        for (index, batched) in lines.iter().enumerate().filter_map(|(i, text)| Some((i, of(text, "free_batched:")?))) {
            let before = lines[index.saturating_sub(64)..index].iter();
            assert!(before.filter_map(|text| of(text, "mm_page_free:")).any(|free| free == batched), "line {index}");
        }
    }
}

#[test]
fn what_is_wrong_is_named_with_its_line() {
    let good = "cc 1 [000] 1.0: kmem:mm_page_free: page=0x1 pfn=0x1 order=0\n";
    let free = |fields: &str| format!("{good}cc 1 [000] 1.0: mm_page_free: {fields}\n");
    for (text, says) in [
        (String::new(), &["t.txt has no mm_page_alloc", "perf script"][..]),
        ("cc 1 [000] 1.0: sched:sched_switch: x\n".to_owned(), &["has no mm_page_alloc"]),
        ("PERFILE2\x68\0\0".to_owned(), &["line 1", "binary", "perf script"]),
        (free("order=0"), &["line 2", "expected 'pfn='"]),
        (free("pfn=x order=0"), &["expected a frame number", "'x'"]),
        (free("pfn=0x1 order=1"), &["aligned to its order 1", "0x1"]),
        (free("pfn=0xffffffffffff0 order=0"), &["below"]),
        (free("pfn=0x1 order=19"), &["order of 0 to 18", "19"]),
        (free("pfn=-1 order=0"), &["expected a frame, which"]),
        ("cc 1 [9999] 1.0: mm_page_free: pfn=0x1 order=0\n".to_owned(), &["a CPU below 8192"]),
        ("cc 1 1.0: mm_page_free: pfn=0x1 order=0\n".to_owned(), &["a CPU below 8192"]),
    ] {
        let error = read(text.as_bytes()).expect_err("no trace").to_string();
        assert!(says.iter().all(|part| error.contains(part)) && !error.contains('\n'), "{text}: {error}");
    }
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
