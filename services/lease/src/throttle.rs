//! How fast filling may go: a cap that holds in every second, less of it while the machine is busy.

use std::time::Duration;

/// The share of the cap that one chunk may be, so that no second sees more than a tenth above the cap.
const CHUNKS_PER_SECOND: u64 = 20;

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
        (self.rate() / CHUNKS_PER_SECOND / page).max(1) * page
    }

    /// Bytes per second at present.
    pub fn rate(&self) -> u64 {
        (self.cap >> self.halvings).max(1)
    }

    /// Whether the machine had better things to do when it was last asked: once per second or so.
    pub fn observe(&mut self, busy: bool) {
        self.halvings = if busy { (self.halvings + 1).min(MOST_HALVINGS) } else { self.halvings.saturating_sub(1) };
    }

    /// How long to wait at the time `now` before the next chunk, of `bytes`, is begun. The chunk is charged by this.
    pub fn begin(&mut self, now: Duration, bytes: u64) -> Duration {
        let start = self.next.max(now);
        self.next = start + Duration::from_secs_f64(bytes as f64 / self.rate() as f64);
        start - now
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

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Chunks as fast as they are allowed, each taking no time, which is the worst case: in no window of a second more than
    /// the cap and a tenth.
    #[test]
    fn no_second_sees_more_than_the_cap_and_a_tenth() {
        for cap in [100 * MIB, 8 << 30, 777_777_777] {
            let mut throttle = Throttle::new(cap);
            let (mut now, mut done) = (Duration::ZERO, Vec::new());
            for step in 0..200 {
                if step == 50 {
                    // A pause does not save anything up.
                    now += Duration::from_secs(5);
                }
                let bytes = throttle.chunk(2 * MIB);
                now += throttle.begin(now, bytes);
                done.push((now, bytes));
            }
            for (at, _) in &done {
                let second = done.iter().filter(|(t, _)| t >= at && *t < *at + Duration::from_secs(1));
                let bytes: u64 = second.map(|(_, bytes)| bytes).sum();
                assert!(bytes as f64 <= 1.1 * cap as f64, "{bytes} in a second at a cap of {cap}");
            }
            let (_, total): (Vec<_>, Vec<u64>) = done.iter().copied().unzip();
            let rate = total.iter().sum::<u64>() as f64 / (now - Duration::from_secs(5)).as_secs_f64();
            assert!(rate > 0.9 * cap as f64, "and it is used: {rate} of {cap}");
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
