use super::*;
use proptest::prelude::*;

const PERF: &str = include_str!("../../tests/data/kmem-perf.txt");
const TRACE_CMD: &str = include_str!("../../tests/data/kmem-trace-cmd.txt");

fn order(order: u32) -> Order {
    Order::new(order).expect("valid")
}

fn alloc(pfn: u64, o: u32, mobility: Mobility, compound: bool) -> Event<'static> {
    Event::Alloc { pfn: Some(pfn), order: order(o), mobility, compound }
}

#[test]
fn every_layout_says_the_same() {
    let fields = "page=0x1200 pfn=0x1200 order=2 migratetype=1 gfp_flags=GFP_HIGHUSER_MOVABLE|__GFP_COMP";
    let expected = Ok(Line::Event(11, alloc(0x1200, 2, Mobility::Movable, true)));
    for head in [
        "              cc  2301 [011]  6012.721314:        kmem:mm_page_alloc: ",
        "              cc  2301 [011]        kmem:mm_page_alloc: ",
        "              cc  2301/2302  [011]  6012.721314:          1 kmem:mm_page_alloc: ",
        "           cc-2301  [011]  6012.721314: mm_page_alloc:        ",
        "           cc-2301  [011] ..... 6012.721314: mm_page_alloc: ",
        "           cc-2301  [011] d..1. 6012.721314: mm_page_alloc: ",
        "           cc-2301  [011] dNh1  6012.721314: kmem:mm_page_alloc: ",
        "           cc-2301  [011] mm_page_alloc: ",
        "           cc-2301  ( 2301) [011] d..1. 6012.721314: mm_page_alloc: ",
        "           cc [011] kmem:mm_page_alloc: ",
        " Web [3] content: x  2301 [011]  6012.721314: kmem:mm_page_alloc: ",
        " a [001] b  2301 [011]  6012.721314: kmem:mm_page_alloc: ",
    ] {
        assert_eq!(line(&format!("{head}{fields}")), expected, "{head}");
    }
}

#[test]
fn values_of_every_kernel() {
    use Mobility::{Movable, Unmovable};
    let cases = [
        ("page=ffffea0000 pfn=4608 order=0 migratetype=0 gfp_flags=GFP_KERNEL", alloc(4608, 0, Unmovable, false)),
        ("page=0x1 pfn=0x1200 order=9 migratetype=1 gfp_flags=GFP_TRANSHUGE|X", alloc(0x1200, 9, Movable, true)),
        ("page=0x1 pfn=0x1200 order=1 migratetype=2 gfp_flags=GFP_KERNEL|GFP_COMP", alloc(0x1200, 1, Unmovable, true)),
        ("page=0x1 pfn=0x1200 order=1 migratetype=5 gfp_flags=0x40cc0", alloc(0x1200, 1, Unmovable, false)),
        ("pfn=18446744073709551615 order=3 migratetype=0 gfp_flags=0", failed(3)),
        ("page=(nil) pfn=-1 order=10 migratetype=0 gfp_flags=X", failed(10)),
        ("page=(nil) pfn=0x0 order=9 migratetype=1 gfp_flags=X", failed_movable(9)),
        ("page=0000000000000000 pfn=0x0 order=9 migratetype=1 gfp_flags=X", failed_movable(9)),
        ("page=0xffffea0000000000 pfn=0x0 order=9 migratetype=1 gfp_flags=X", alloc(0, 9, Movable, false)),
    ];
    for (fields, expected) in cases {
        let text = format!("cc 1 [000] 1.0: kmem:mm_page_alloc: {fields}");
        assert_eq!(line(&text), Ok(Line::Event(0, expected)), "{fields}");
    }
    fn failed(o: u32) -> Event<'static> {
        Event::Alloc { pfn: None, order: order(o), mobility: Unmovable, compound: false }
    }
    fn failed_movable(o: u32) -> Event<'static> {
        Event::Alloc { pfn: None, order: order(o), mobility: Movable, compound: false }
    }
}

#[test]
fn what_is_no_event_is_passed_over() {
    for text in [
        "",
        "   ",
        "# tracer: nop",
        "cpus=2",
        "version = 7",
        "CPU 3 is empty",
        "\tffffffff81234567 __alloc_pages+0x1a2 ([kernel.kallsyms])",
        "=> do_user_addr_fault",
    ] {
        assert_eq!(line(text), Ok(Line::Nothing), "{text}");
    }
    assert_eq!(line("CPU:1 [LOST 17 EVENTS]"), Ok(Line::Lost(Some(17))));
    assert_eq!(line("CPU:1 [17 EVENTS DROPPED]"), Ok(Line::Lost(Some(17))));
    assert_eq!(line("CPU:1 [EVENTS DROPPED]"), Ok(Line::Lost(None)));
    assert_eq!(line("cc 1 [000] 1.0: PERF_RECORD_LOST lost 12"), Ok(Line::Lost(Some(12))));
    let other = |text| match line(text) {
        Ok(Line::Event(_, Event::Other(name))) => name.to_owned(),
        other => panic!("{other:?}"),
    };
    assert_eq!(other("cc 1 [000] 1.0: sched:sched_switch: prev_comm=a [001] ==> b"), "sched:sched_switch");
    assert_eq!(
        other("cc-1 [000] 1.0: mm_page_pcpu_drain: page=0x1 pfn=0x1 order=0 migratetype=1"),
        "mm_page_pcpu_drain"
    );
    assert_eq!(other("cc 1 [000] 1.0:  250000 cpu-clock:pppH:  ffff"), "cpu-clock:pppH");
}

#[test]
fn what_is_wrong_is_said() {
    let event = |rest: &str| line(&format!("cc 1 [000] 1.0: kmem:{rest}")).expect_err(rest);
    for (rest, says) in [
        ("mm_page_alloc: page=0x1 pfn=0x1", "'order='"),
        ("mm_page_alloc: page=0x1 pfn=0x1 order=", "'order='"),
        ("mm_page_alloc: page=0x1 pfn=0x1 order=x", "number after 'order='"),
        ("mm_page_alloc: page=0x1 pfn=0x1 order=19", "order of 0 to 18, not 19"),
        ("mm_page_alloc: page=0x1 pfn=0x1 order=-1", "order of 0 to 18, not -1"),
        ("mm_page_alloc: page=0x1 order=0", "'pfn='"),
        ("mm_page_alloc: page=0x1 pfn=0xg order=0", "frame number after 'pfn='"),
        ("mm_page_alloc: page=0x1 pfn=0x1 order=1 migratetype=0 gfp_flags=0", "aligned to its order 1"),
        ("mm_page_alloc: page=0x1 pfn=0xffffffffffff0000 order=0", "physical address"),
        ("mm_page_alloc: page=0x1 pfn=0x1 order=0", "'migratetype='"),
        ("mm_page_alloc: page=0x1 pfn=0x1 order=0 migratetype=0", "'gfp_flags='"),
        ("mm_page_free: pfn=-1 order=0", "expected a frame"),
        ("mm_page_free: order=0", "'pfn='"),
        ("mm_page_free_batched: page=0x1", "'pfn='"),
    ] {
        let error = event(rest);
        assert!(error.starts_with("expected") && error.contains(says), "{rest}: {error}");
    }
    assert!(line("cc 1 1.0: kmem:mm_page_free: pfn=0x1 order=0").expect_err("no CPU").contains("'[CPU]'"));
    assert!(line("cc 1 [000] 1.0: kmem:mm_pa").expect_err("cut").contains("name of an event"));
    assert!(line("cc 1 [8192] 1.0: kmem:mm_page_free: pfn=0x1 order=0").expect_err("CPU").contains("below 8192"));
}

#[test]
fn recordings_are_read_completely() {
    for (text, events) in [(PERF, 2120), (TRACE_CMD, 519)] {
        let read = text.lines().filter(|text| matches!(line(text), Ok(Line::Event(..)))).count();
        assert_eq!(read, events);
        assert!(text.lines().all(|text| line(text).is_ok()));
    }
}

fn some_line() -> impl Strategy<Value = String> {
    let lines: Vec<&str> = PERF.lines().step_by(41).chain(TRACE_CMD.lines().skip(1).step_by(23)).collect();
    proptest::sample::select(lines).prop_map(str::to_owned)
}

proptest! {
    #[test]
    fn nothing_panics_on_tokens_in_any_order(words in proptest::collection::vec(proptest::sample::select(vec![
        "[001]", "[", "]", "[99999999999]", "1.0:", ":", "kmem:mm_page_alloc:", "mm_page_free:", "pfn=0x", "pfn=-1", "order=3",
        "order=4294967296", "migratetype=1", "gfp_flags=", "CPU:0", "[LOST", "EVENTS]", "é[000]", "PERF_RECORD_LOST", "lost",
    ]), 0..12), glue in proptest::sample::select(vec![" ", "", "\t", "  "])) {
        let _ = line(&words.join(glue));
    }

    /// Mutated lines are read or refused; a line that is cut anywhere before its last field is never read as the event.
    #[test]
    fn mutated_lines_are_read_or_refused(text in some_line(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = text.clone().into_bytes();
        let index = at.index(bytes.len());
        bytes[index] = byte;
        let _ = line(&String::from_utf8_lossy(&bytes));
        let last = text.rfind(' ').expect("fields");
        let cut = &text[..at.index(last)];
        if let Ok(Line::Event(_, event)) = line(cut) {
            prop_assert!(matches!(event, Event::FreeBatched | Event::Other(_)), "{cut}: {event:?}");
        }
    }
}
