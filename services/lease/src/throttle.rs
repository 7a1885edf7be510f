//! How fast filling may go: a cap that holds in every second, less of it while the machine is busy.

use std::time::Duration;

/// The share of the cap that one chunk may be, so that no second sees more than a tenth above the cap.
const CHUNKS_PER_SECOND: u64 = 20;

/// The most that is done at once, unless a page is larger: about ten milliseconds, after which a daemon that is told to stop does.
const MOST_CHUNK: u64 = 64 << 20;

/// A cap on bytes per second. Time is given in, so that it can be tested without any.
#[derive(Clone, Debug)]
pub struct Throttle {
    cap: u64,
    /// The present rate: the cap, halved for each look that found the machine busy.
    halvings: u32,
    /// Before this nothing may be done.
    next: Duration,
}

/// Most halvings: a sixty-fourth of the cap is slow enough not to be felt and fast enough to end.
const MOST_HALVINGS: u32 = 6;

impl Throttle {
    /// At most `cap` bytes in a second.
    pub fn new(cap: u64) -> Self {
        Throttle { cap: cap.max(1), halvings: 0, next: Duration::ZERO }
    }

    /// How much to do at once: a multiple of `page`, at least one page. Larger than a twentieth of the cap only where the page is.
    pub fn chunk(&self, page: u64) -> u64 {
        ((self.rate() / CHUNKS_PER_SECOND).min(MOST_CHUNK) / page).max(1) * page
    }

    /// Bytes per second at present.
    pub fn rate(&self) -> u64 {
        (self.cap >> self.halvings).max(1)
    }

    /// How often the cap is halved at present.
    pub fn halvings(&self) -> u32 {
        self.halvings
    }

    /// Whether the machine had better things to do when it was last asked: once per second or so.
    pub fn observe(&mut self, busy: bool) {
        self.halvings = if busy { (self.halvings + 1).min(MOST_HALVINGS) } else { self.halvings.saturating_sub(1) };
    }

    /// How long to wait at the time `now` before the next chunk is begun.
    pub fn pause(&self, now: Duration) -> Duration {
        self.next.saturating_sub(now)
    }

    /// A chunk of `bytes` is begun at `now`, which may be later than it was allowed: the time that was lost is not made up for, so
    /// that no two chunks are ever nearer to each other than the rate has them.
    pub fn begin(&mut self, now: Duration, bytes: u64) {
        let span = match self.rate() / bytes.max(1) {
            0 => Duration::from_secs_f64(bytes as f64 / self.rate() as f64),
            // As many whole chunks as fit into a second.
            per_second => Duration::from_nanos(1_000_000_000_u64.div_ceil(per_second)),
        };
        self.next = now + span;
    }
}

/// Whether somebody waits for what filling uses: the kernel's pressure figures, or the load where there are none.
pub fn machine_is_busy() -> bool {
    let stalled = |path: &str| std::fs::read_to_string(path).ok().and_then(|text| some_avg10(&text));
    match (stalled("/proc/pressure/cpu"), stalled("/proc/pressure/memory")) {
        (None, None) => {
            let load = std::fs::read_to_string("/proc/loadavg").ok();
            let load = load.and_then(|text| text.split_whitespace().next()?.parse::<f64>().ok());
            let cpus = std::thread::available_parallelism().map_or(1, |n| n.get());
            load.is_some_and(|load| load > 1.5 * cpus as f64)
        }
        (cpu, memory) => cpu.is_some_and(|share| share > 25.0) || memory.is_some_and(|share| share > 5.0),
    }
}

/// Percent of the last ten seconds in which some task waited.
fn some_avg10(text: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.starts_with("some "))?;
    line.split_whitespace().find_map(|word| word.strip_prefix("avg10="))?.parse().ok()
}

/// The most bytes of the `done`, each with its time, in any second.
#[cfg(test)]
pub(crate) fn most_in_a_second(done: &[(Duration, u64)]) -> u64 {
    let second = |at: Duration| done.iter().filter(move |(t, _)| *t >= at && *t < at + Duration::from_secs(1));
    done.iter().map(|(at, _)| second(*at).map(|(_, bytes)| bytes).sum()).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Chunks as fast as they are allowed by a thread that is kept from running at any point, as one at idle priority is: in no
    /// second more than the cap is begun, nor more than a tenth above it ended.
    #[test]
    fn no_second_sees_more_than_the_cap_and_a_tenth() {
        let mut random = 1_u64;
        // Up to so many milliseconds, now and then.
        let mut late = |most: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (seldom, ms) = (random >> 60 == 0, (random >> 33) % most.max(1));
            Duration::from_millis(if seldom { ms } else { 0 })
        };
        for (cap, page) in [100 * MIB, 8 << 30, 777_777_777, 41 * MIB, 10 * MIB, 2 * MIB]
            .map(|cap| (cap, 2 * MIB))
            .into_iter()
            .chain([(2 << 30, 1 << 30)])
        {
            for most_late in [0, 3000] {
                let mut throttle = Throttle::new(cap);
                let (mut now, mut begun, mut ended) = (Duration::ZERO, Vec::new(), Vec::new());
                for _ in 0..500 {
                    let bytes = throttle.chunk(page);
                    now += throttle.pause(now) + late(most_late);
                    throttle.begin(now, bytes);
                    begun.push((now, bytes));
                    now += late(most_late);
                    ended.push((now, bytes));
                }
                let most = most_in_a_second(&begun);
                assert!(most <= cap, "{most} begun in a second at a cap of {cap}");
                // Where a page is a large part of the cap, it is what a second may have above it.
                let most = most_in_a_second(&ended);
                assert!(most <= (cap + cap / 10).max(cap + page), "{most} in a second at a cap of {cap}");
                let rate = begun.iter().map(|(_, bytes)| *bytes).sum::<u64>() as f64 / now.as_secs_f64();
                assert!(most_late > 0 || rate > 0.9 * cap as f64, "and it is used: {rate} of {cap}");
            }
        }
    }

    #[test]
    fn a_busy_machine_is_given_way_and_an_idle_one_used_again() {
        let mut throttle = Throttle::new(6400 * MIB);
        (0..20).for_each(|_| throttle.observe(true));
        assert_eq!(throttle.rate(), 100 * MIB);
        assert_eq!(throttle.chunk(2 * MIB), 4 * MIB);
        (0..6).for_each(|_| throttle.observe(false));
        assert_eq!(throttle.rate(), 6400 * MIB);
    }

    #[test]
    fn a_page_is_done_whole_however_large_it_is() {
        assert_eq!(Throttle::new(1).chunk(1 << 30), 1 << 30);
    }

    #[test]
    fn pressure_is_read_as_the_kernel_writes_it() {
        let text = "some avg10=31.07 avg60=1.00 avg300=0.00 total=5\nfull avg10=99.00 avg60=0 avg300=0 total=0\n";
        assert_eq!(some_avg10(text), Some(31.07));
        assert_eq!(some_avg10(""), None);
    }
}
