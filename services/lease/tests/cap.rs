//! The cap on filling, on this machine's pages and in its time. One that is busy fills less than it may, so haste is what the test of
//! `filler` looks for, whose time goes by when it is waited for.

mod support;

use hugemm_lease::daemon::{Daemon, PoolConfig};
use hugemm_lease::filler::{Manners, fill};
use hugemm_lease::memory_file::Page;
use hugemm_lease::stock::Shapes;
use std::time::{Duration, Instant};
use support::{PAGE, Pool, judged};

/// What is filled under a cap: a second and a half of chunks that are a page each.
const CAPPED: u64 = 36 * PAGE;
const CAP: u64 = 24 * PAGE;

/// As this machine fills: in no second more than a tenth above the cap, and in all no less than it has time for.
#[test]
fn the_cap_holds() {
    judged(|| {
        let Some(_pool) = Pool::with_free(CAPPED / PAGE) else { return };
        let shapes = Shapes::new(&[(CAPPED / 2, 2)], CAPPED, PAGE).expect("shapes");
        let daemon = Daemon::new(PoolConfig::new(Page::Huge2M, shapes, CAPPED, rustix::process::geteuid().as_raw()));
        let manners = Manners { cap: Some(CAP), ..Manners::default() };
        // How much was filled at least at a time, and at most at one: a reader that is late must not take that for haste.
        let mut seen: Vec<(Instant, u64, Instant)> = Vec::new();
        let mut gives_way = false;
        std::thread::scope(|scope| {
            scope.spawn(|| fill(&daemon, &manners));
            let end = Instant::now() + Duration::from_secs(60);
            while seen.last().is_none_or(|(_, filled, _)| *filled < CAPPED) && Instant::now() < end {
                let before = Instant::now();
                let status = daemon.status();
                seen.push((before, status.counts.filled_bytes, Instant::now()));
                gives_way |= status.filling.is_some_and(|filling| filling.halvings > 0);
                std::thread::sleep(Duration::from_millis(1));
            }
            daemon.stop();
        });
        // While others wait for a CPU it may be a sixty-fourth of the cap, and less: what they leave.
        let filled = seen.last().map_or(0, |(_, filled, _)| *filled);
        assert!(filled == CAPPED || gives_way && filled > 0, "{filled} of {CAPPED}");
        for (index, (from, before, _)) in seen.iter().enumerate() {
            let second = seen[index..].iter().take_while(|(_, _, to)| *to - *from <= Duration::from_secs(1));
            let most = second.map(|(_, filled, _)| filled - before).max().unwrap_or(0);
            assert!(most * 10 <= CAP * 11, "{most} bytes in a second at a cap of {CAP}");
        }
    });
}
