//! The thread that fills what is missing, chunk by chunk, no faster than it may.

use crate::background;
use crate::daemon::Daemon;
use crate::memory_file::{FileError, MemoryFile, Page};
use crate::throttle::{Throttle, machine_is_busy};
use std::time::{Duration, Instant};

/// How filling behaves towards the rest of the machine.
#[derive(Clone, Debug, Default)]
pub struct Manners {
    /// Bytes per second; no bound if none is given.
    pub cap: Option<u64>,
    /// On which CPUs; on any if none are named.
    pub cpus: Vec<usize>,
    /// Bytes of the kernel's pool that are left alone.
    pub keep_free: u64,
}

/// How long to wait before looking again for pages that were not there.
const RETRY: Duration = Duration::from_secs(1);

/// How often the machine is asked whether it is busy.
const LOOK: Duration = Duration::from_secs(1);

/// Fills until the daemon stops. `free` says how many bytes of the kernel's pool are free and promised to nobody: `None` where
/// there is no pool.
pub fn fill(daemon: &Daemon, manners: &Manners, free: impl Fn() -> Option<u64>) {
    if let Err(error) = prepare_thread(daemon.config().node, &manners.cpus) {
        daemon.waits(error);
        return;
    }
    fill_on(&ThisMachine { began: Instant::now(), free }, daemon, manners);
}

fn fill_on(machine: &impl Machine, daemon: &Daemon, manners: &Manners) {
    // More than any machine does.
    let mut throttle = Throttle::new(manners.cap.unwrap_or(64 << 30));
    while let Some(bytes) = daemon.wait_for_missing() {
        let mut filler = Filler { machine, daemon, manners, throttle: &mut throttle, looked: None };
        let file = filler.file(bytes);
        daemon.fill_ended(file);
    }
}

/// What filling finds: time, pages, others. Tests have one on which nobody waits, so that how fast it fills is not a matter of how
/// busy the machine is that they run on.
trait Machine {
    /// The time since some beginning.
    fn now(&self) -> Duration;
    /// Lets so much time go by; false if the daemon has stopped, or is drained, before.
    fn wait(&self, daemon: &Daemon, pause: Duration) -> bool;
    /// Whether others wait for what filling uses.
    fn is_busy(&self) -> bool;
    /// As [`fill`] says.
    fn free(&self) -> Option<u64>;
    /// Fills a part of a file.
    fn fill(&self, file: &MemoryFile, from: u64, to: u64) -> Result<(), FileError>;
}

struct ThisMachine<F> {
    began: Instant,
    free: F,
}

impl<F: Fn() -> Option<u64>> Machine for ThisMachine<F> {
    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn wait(&self, daemon: &Daemon, pause: Duration) -> bool {
        daemon.may_go_on(pause)
    }

    fn is_busy(&self) -> bool {
        machine_is_busy()
    }

    fn free(&self) -> Option<u64> {
        (self.free)()
    }

    fn fill(&self, file: &MemoryFile, from: u64, to: u64) -> Result<(), FileError> {
        file.fill(from, to)
    }
}

/// Whether a thread of this process may do what `manners` and the node want of one that fills.
///
/// # Errors
///
/// What keeps it from that.
pub fn check(node: Option<u32>, manners: &Manners) -> Result<(), String> {
    let no_thread = || "no thread to fill with; raise the limit (ulimit -u, TasksMax)".to_owned();
    std::thread::scope(|scope| {
        let tried = std::thread::Builder::new().spawn_scoped(scope, || prepare_thread(node, &manners.cpus));
        tried.map_err(|_| no_thread())?.join().unwrap_or_else(|_| Err(no_thread()))
    })
}

fn prepare_thread(node: Option<u32>, cpus: &[usize]) -> Result<(), String> {
    background::idle_priority().map_err(|error| format!("cannot fill at idle priority: {error}"))?;
    if !cpus.is_empty() {
        background::run_on(cpus).map_err(|error| {
            format!("cannot run on the CPUs of --cpus: {error}; those that are there: /sys/devices/system/cpu/online")
        })?;
    }
    if let Some(node) = node {
        background::memory_from(node).map_err(|error| format!("cannot take memory from node {node}: {error}; those that have some: /sys/devices/system/node/has_memory"))?;
    }
    Ok(())
}

struct Filler<'a, M> {
    machine: &'a M,
    daemon: &'a Daemon,
    manners: &'a Manners,
    throttle: &'a mut Throttle,
    looked: Option<Duration>,
}

impl<M: Machine> Filler<'_, M> {
    /// A full file, or nothing if there is no going on with it.
    fn file(&mut self, bytes: u64) -> Option<MemoryFile> {
        let (machine, daemon) = (self.machine, self.daemon);
        let page = daemon.config().page;
        let file = match MemoryFile::new(page, bytes) {
            Ok(file) => file,
            Err(error) => {
                daemon.waits(no_file(page, error));
                machine.wait(daemon, RETRY);
                return None;
            }
        };
        let mut done = 0;
        while done < bytes {
            if self.looked.is_none_or(|looked| machine.now() - looked >= LOOK) {
                self.throttle.observe(machine.is_busy());
                self.looked = Some(machine.now());
            }
            let pause = self.throttle.pause(machine.now()).max(daemon.rest());
            if !machine.wait(daemon, pause) {
                return None;
            }
            if !daemon.rest().is_zero() {
                // Another lease meanwhile.
                continue;
            }
            let chunk = self.throttle.chunk(page.bytes()).min(bytes - done);
            if let Some(free) = machine.free()
                && free < self.manners.keep_free.saturating_add(chunk)
            {
                daemon.waits(no_pages(page, bytes - done, free, self.manners.keep_free));
                if !machine.wait(daemon, RETRY) {
                    return None;
                }
                continue;
            }
            self.throttle.begin(machine.now(), chunk);
            daemon.fills();
            let (time, cpu) = (machine.now(), background::cpu_time());
            match machine.fill(&file, done, done + chunk) {
                Ok(()) => {
                    done += chunk;
                    daemon.filled(chunk, machine.now() - time, background::cpu_time() - cpu);
                }
                Err(FileError::NoPages) => {
                    daemon.waits(match machine.free() {
                        Some(free) if free >= chunk => not_ours(bytes - done, free),
                        _ => no_pages(page, bytes - done, 0, self.manners.keep_free),
                    });
                    if !machine.wait(daemon, RETRY) {
                        return None;
                    }
                }
                Err(error) => {
                    daemon.waits(error.to_string());
                    machine.wait(daemon, RETRY);
                    return None;
                }
            }
        }
        Some(file)
    }
}

fn no_file(page: Page, error: FileError) -> String {
    match page {
        Page::Huge1G => format!("no file of 1 GiB pages: {error}; boot with hugepagesz=1G hugepages=N"),
        _ => format!("no file of {page} pages: {error}"),
    }
}

/// The kernel has pages, and does not give them to this process.
fn not_ours(missing: u64, free: u64) -> String {
    format!(
        "{missing} bytes missing, and the kernel keeps the {free} that are free in its pool from this daemon: by a limit of its \
         control group (hugetlb.2MB.max, say), or because they are on another node; see: hugemm pool doctor"
    )
}

fn no_pages(page: Page, missing: u64, free: u64, keep_free: u64) -> String {
    let Some(pool) = page.pool() else {
        return format!("{missing} bytes missing: no huge page to be had; free memory or compact it");
    };
    let (pages, kib) =
        (missing.saturating_add(keep_free).saturating_sub(free).div_ceil(page.bytes()), pool.bytes() >> 10);
    format!(
        "{missing} bytes missing, {free} free in the kernel's pool; for {pages} pages more: \
         echo $(( $(cat /sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages) + {pages} )) > \
         /sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::{PoolConfig, REST};
    use crate::policy::{Asker, LendingPolicy};
    use crate::stock::Shapes;
    use crate::throttle::most_in_a_second;
    use crate::wire::Wish;
    use std::cell::{Cell, RefCell};

    /// Time goes by when somebody waits for it, and there are as many pages as are wanted. A wait may take longer, as one of a thread at
    /// idle priority does.
    #[derive(Default)]
    struct Paced {
        now: Cell<Duration>,
        late: Duration,
        filled: RefCell<Vec<(Duration, u64)>>,
    }

    impl Machine for Paced {
        fn now(&self) -> Duration {
            self.now.get()
        }

        fn wait(&self, daemon: &Daemon, pause: Duration) -> bool {
            let seldom = self.filled.borrow().len() % 7 == 3;
            self.now.set(self.now.get() + pause + if seldom { self.late } else { Duration::ZERO });
            daemon.may_go_on(Duration::ZERO)
        }

        fn is_busy(&self) -> bool {
            false
        }

        fn free(&self) -> Option<u64> {
            None
        }

        fn fill(&self, _: &MemoryFile, from: u64, to: u64) -> Result<(), FileError> {
            self.filled.borrow_mut().push((self.now.get(), to - from));
            Ok(())
        }
    }

    /// As the daemon's thread fills: in no second more than a tenth above `--max-bandwidth`, and in all no less than it allows.
    #[test]
    fn no_second_sees_more_than_the_cap_and_a_tenth() {
        let page = Page::Transparent;
        // Files of some seconds each, and of a few chunks.
        for (cap, file) in [(24, 60), (50, 7), (1000, 4000), (333, 2)].map(|(cap, pages)| (cap * page.bytes(), pages)) {
            for late in [Duration::ZERO, Duration::from_millis(700)] {
                let files = 200_u64.div_ceil(file).max(2);
                let shapes = Shapes(vec![file * page.bytes(); files as usize]);
                let policy = LendingPolicy::closed(0);
                let daemon = Daemon::new(PoolConfig { page, node: None, shapes, size: u64::MAX, policy });
                let machine = Paced { late, ..Paced::default() };
                let manners = Manners { cap: Some(cap), ..Manners::default() };
                std::thread::scope(|scope| {
                    let daemon = &daemon;
                    scope.spawn(move || {
                        while daemon.status().ready.len() < files as usize {
                            std::thread::yield_now();
                        }
                        daemon.stop();
                    });
                    fill_on(&machine, daemon, &manners);
                });
                let filled = machine.filled.borrow();
                let all: u64 = filled.iter().map(|(_, bytes)| bytes).sum();
                assert_eq!(all, files * file * page.bytes());
                let most = most_in_a_second(&filled);
                assert!(most * 10 <= cap * 11, "{most} bytes in a second at a cap of {cap}");
                let rate = all as f64 / machine.now().as_secs_f64();
                assert!(!late.is_zero() || rate > 0.9 * cap as f64, "and it is used: {rate} of {cap}");
            }
        }
    }

    /// Whoever has too few pages is told what to add; whoever may not have those that are there is not.
    #[test]
    fn why_there_are_no_pages_is_said_as_it_is() {
        struct Full(u64);
        impl Machine for Full {
            fn now(&self) -> Duration {
                Duration::ZERO
            }
            fn wait(&self, daemon: &Daemon, _: Duration) -> bool {
                daemon.waiting().0.is_none()
            }
            fn is_busy(&self) -> bool {
                false
            }
            fn free(&self) -> Option<u64> {
                Some(self.0)
            }
            fn fill(&self, _: &MemoryFile, _: u64, _: u64) -> Result<(), FileError> {
                Err(FileError::NoPages)
            }
        }
        let page = Page::Huge2M;
        let (shapes, policy) = (Shapes(vec![page.bytes()]), LendingPolicy::closed(0));
        for (free, said) in [(page.bytes(), "hugetlb.2MB.max"), (0, "for 1 pages more: echo")] {
            let shapes = shapes.clone();
            let config = PoolConfig { page, node: None, shapes, size: page.bytes(), policy: policy.clone() };
            let daemon = Daemon::new(config);
            let mut filler = Filler {
                machine: &Full(free),
                daemon: &daemon,
                manners: &Manners::default(),
                throttle: &mut Throttle::new(1 << 30),
                looked: None,
            };
            assert!(filler.file(page.bytes()).is_none());
            let why = daemon.waiting().0.expect("it waits");
            assert!(why.contains(said), "{why}");
        }
    }

    #[test]
    fn a_program_starts_before_the_next_file_is_filled() {
        let page = Page::Transparent;
        let (shapes, policy) = (Shapes(vec![page.bytes(); 2]), LendingPolicy::closed(0));
        let daemon = Daemon::new(PoolConfig { page, node: None, shapes, size: 2 * page.bytes(), policy });
        // As if nothing were free; says when it was looked at, and ends the filling.
        let looked = || {
            let at = Cell::new(None);
            let free = || {
                at.set(Some(Instant::now()));
                daemon.drain(true);
                Some(0)
            };
            let mut filler = Filler {
                machine: &ThisMachine { began: Instant::now(), free },
                daemon: &daemon,
                manners: &Manners::default(),
                throttle: &mut Throttle::new(1 << 30),
                looked: None,
            };
            assert!(filler.file(page.bytes()).is_none());
            daemon.drain(false);
            at.get().expect("looked")
        };
        looked();
        assert!(daemon.rest().is_zero(), "nobody has leased");
        daemon.fill_ended(Some(MemoryFile::new(page, page.bytes()).expect("a file")));
        let wish = Wish { bytes: page.bytes(), page: None, node: None, keep: None };
        let leased = Instant::now();
        daemon.lease(&Asker::user(0), 7, &wish).expect("leased");
        assert!(looked() - leased >= REST);
    }
}
