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
    let began = Instant::now();
    // More than any machine does.
    let mut throttle = Throttle::new(manners.cap.unwrap_or(64 << 30));
    while let Some(bytes) = daemon.wait_for_missing() {
        let mut filler = Filler { daemon, manners, began, throttle: &mut throttle, looked: None };
        let file = filler.file(bytes, &free);
        daemon.fill_ended(file);
    }
}

/// Whether a thread of this process may do what `manners` and the node want of one that fills.
///
/// # Errors
///
/// What keeps it from that.
pub fn check(node: Option<u32>, manners: &Manners) -> Result<(), String> {
    let tried = std::thread::scope(|scope| scope.spawn(|| prepare_thread(node, &manners.cpus)).join());
    tried.unwrap_or_else(|_| Err("no thread to fill with".to_owned()))
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

struct Filler<'a> {
    daemon: &'a Daemon,
    manners: &'a Manners,
    began: Instant,
    throttle: &'a mut Throttle,
    looked: Option<Instant>,
}

impl Filler<'_> {
    /// A full file, or nothing if there is no going on with it.
    fn file(&mut self, bytes: u64, free: &impl Fn() -> Option<u64>) -> Option<MemoryFile> {
        let page = self.daemon.config().page;
        let file = match MemoryFile::new(page, bytes) {
            Ok(file) => file,
            Err(error) => {
                self.daemon.waits(no_file(page, error));
                self.daemon.may_go_on(RETRY);
                return None;
            }
        };
        let mut done = 0;
        while done < bytes {
            if self.looked.is_none_or(|looked| looked.elapsed() >= LOOK) {
                self.throttle.observe(machine_is_busy());
                self.looked = Some(Instant::now());
            }
            let pause = self.throttle.pause(self.began.elapsed()).max(self.daemon.rest());
            if !self.daemon.may_go_on(pause) {
                return None;
            }
            if !self.daemon.rest().is_zero() {
                // Another lease meanwhile.
                continue;
            }
            let chunk = self.throttle.chunk(page.bytes()).min(bytes - done);
            if let Some(free) = free()
                && free < self.manners.keep_free.saturating_add(chunk)
            {
                self.daemon.waits(no_pages(page, bytes - done, free, self.manners.keep_free));
                if !self.daemon.may_go_on(RETRY) {
                    return None;
                }
                continue;
            }
            self.throttle.begin(self.began.elapsed(), chunk);
            self.daemon.fills();
            let (time, cpu) = (Instant::now(), background::cpu_time());
            match file.fill(done, done + chunk) {
                Ok(()) => {
                    done += chunk;
                    self.daemon.filled(chunk, time.elapsed(), background::cpu_time() - cpu);
                }
                Err(FileError::NoPages) => {
                    self.daemon.waits(no_pages(page, bytes - done, 0, self.manners.keep_free));
                    if !self.daemon.may_go_on(RETRY) {
                        return None;
                    }
                }
                Err(error) => {
                    self.daemon.waits(error.to_string());
                    self.daemon.may_go_on(RETRY);
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
    use crate::wire::Wish;
    use std::cell::Cell;

    #[test]
    fn a_program_starts_before_the_next_file_is_filled() {
        let page = Page::Transparent;
        let (shapes, policy) = (Shapes(vec![page.bytes(); 2]), LendingPolicy::closed(0));
        let daemon = Daemon::new(PoolConfig { page, node: None, shapes, size: 2 * page.bytes(), policy });
        // As if nothing were free; says when it was looked at, and ends the filling.
        let looked = || {
            let at = Cell::new(None);
            let mut filler = Filler {
                daemon: &daemon,
                manners: &Manners::default(),
                began: Instant::now(),
                throttle: &mut Throttle::new(1 << 30),
                looked: None,
            };
            let free = || {
                at.set(Some(Instant::now()));
                daemon.drain(true);
                Some(0)
            };
            assert!(filler.file(page.bytes(), &free).is_none());
            daemon.drain(false);
            at.get().expect("looked")
        };
        looked();
        assert!(daemon.rest().is_zero(), "nobody has leased");
        daemon.fill_ended(Some(MemoryFile::new(page, page.bytes()).expect("a file")));
        let wish = Wish { bytes: page.bytes(), page: None, node: None, keep: None };
        let leased = Instant::now();
        daemon.lease(Asker { uid: 0, gid: 0 }, 7, &wish).expect("leased");
        assert!(looked() - leased >= REST);
    }
}
