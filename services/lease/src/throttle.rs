//! How fast filling may go: a cap that holds in every second, less of it while the machine is busy.

use std::fs;
use std::path::Path;
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

/// Whether somebody waits for what filling uses: the kernel's pressure figures, or the load where there are none. For memory also
/// those of this process's own control group, whose limit may be long before the machine's.
pub fn machine_is_busy() -> bool {
    is_busy(Path::new("/"))
}

/// The same, with `/proc` and `/sys` below `root`.
fn is_busy(root: &Path) -> bool {
    let text = |path: &str| fs::read_to_string(root.join(path)).ok();
    let stalled = |path: &str| some_avg10(&text(path)?);
    // cgroup(7); in a container the root is its own group, on a host it says what /proc/pressure does. Beside groups of version 1
    // systemd mounts those of version 2 at another place.
    let groups = text("proc/self/cgroup").unwrap_or_default();
    let group = groups.lines().find_map(|line| line.strip_prefix("0::"));
    let in_group = group.and_then(|group| {
        let at = |mount| stalled(&format!("sys/fs/cgroup{mount}{group}/memory.pressure"));
        at("").or_else(|| at("/unified"))
    });
    let (cpu, memory) = (stalled("proc/pressure/cpu"), [stalled("proc/pressure/memory"), in_group]);
    if cpu.is_none() && memory == [None; 2] {
        let load = text("proc/loadavg").and_then(|text| text.split_whitespace().next()?.parse::<f64>().ok());
        let cpus = std::thread::available_parallelism().map_or(1, |n| n.get());
        return load.is_some_and(|load| load > 1.5 * cpus as f64);
    }
    cpu.is_some_and(|share| share > 25.0) || memory.into_iter().flatten().any(|share| share > 5.0)
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

    /// On machines of the kinds that there are, others wait for memory or CPUs, or nobody does.
    #[test]
    fn a_machine_is_busy_where_somebody_waits() {
        let root = std::env::temp_dir().join(format!("hugemm-pressure-{}", std::process::id()));
        let put = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().expect("a directory")).expect("made");
            fs::write(path, text).expect("written");
        };
        let some =
            |share: &str| format!("some avg10={share} avg60=0.00 avg300=0.00 total=5\nfull avg10=0.00 avg60=0.00\n");
        assert!(!is_busy(&root), "nothing is known");
        put("proc/loadavg", "1000.00 1.00 1.00 1/1 1\n");
        assert!(is_busy(&root), "a kernel without pressure figures");
        let all = ["proc/pressure/cpu", "proc/pressure/memory"];
        let own = ["sys/fs/cgroup/a/b/memory.pressure", "sys/fs/cgroup/unified/a/b/memory.pressure"];
        all.iter().for_each(|path| put(path, &some("1.00")));
        assert!(!is_busy(&root), "where there are, the load is no matter");
        put("sys/fs/cgroup/memory.pressure", &some("99.00"));
        for group in ["", "1:memory:/a/b\n"] {
            put("proc/self/cgroup", group);
            assert!(!is_busy(&root), "in no group that has figures: {group}");
        }
        put("proc/self/cgroup", "1:memory:/x\n0::/\n");
        assert!(is_busy(&root), "its own group, as a container sees it");
        put("proc/self/cgroup", "9:cpu:/\n0::/a/b\n");
        assert!(!is_busy(&root), "its group has no figures");
        // A group's CPUs are waited for by what fills at idle priority itself.
        put("sys/fs/cgroup/a/b/cpu.pressure", &some("99.00"));
        for (path, least) in all.into_iter().zip(["25.01", "5.01"]).chain(own.map(|path| (path, "5.01"))) {
            put(path, &some(least));
            assert!(is_busy(&root), "{path}");
            put(path, &some("1.00"));
            assert!(!is_busy(&root), "{path}");
            // The other place is looked at only where the first has nothing.
            if own.contains(&path) {
                fs::remove_file(root.join(path)).expect("removed");
            }
        }
        fs::remove_dir_all(root).expect("removed");
    }
}
