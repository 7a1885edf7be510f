//! The thread that fills what is missing, chunk by chunk, no faster than it may.

use crate::background;
use crate::daemon::{Daemon, Missing, PoolConfig};
use crate::memory_file::{FileError, MemoryFile, Page};
use crate::reader::Reader;
use crate::template::TemplateError;
use crate::throttle::{Throttle, machine_is_busy};
use rustix::io::Errno;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// How filling behaves towards the rest of the machine.
#[derive(Clone, Debug, Default)]
pub struct Manners {
    /// Bytes per second; no bound if none is given.
    pub cap: Option<u64>,
    /// On which CPUs; on any if none are named.
    pub cpus: Vec<usize>,
}

/// How long to wait before looking again for pages that were not there; after pages that were there and were not given, longer each time.
const RETRY: Duration = Duration::from_secs(1);
const MOST_DOUBLINGS: u32 = 6;

/// How often the machine is asked whether it is busy.
const LOOK: Duration = Duration::from_secs(1);

/// Fills until the daemon stops.
pub fn fill(daemon: &Daemon, manners: &Manners) {
    if let Err(error) = prepare_thread(daemon.config().node, &manners.cpus) {
        daemon.waits(error);
        return;
    }
    fill_on(&ThisMachine { began: Instant::now() }, daemon, manners);
}

/// Begins a file only where there is room for all of it, and gives up one that cannot be full: what is half filled is of no use to
/// anybody, and keeps its pages from others.
fn fill_on(machine: &impl Machine, daemon: &Daemon, manners: &Manners) {
    // More than any machine does.
    let mut throttle = Throttle::new(manners.cap.unwrap_or(64 << 30));
    let (mut looked, mut failures) = (None, 0);
    let mut readers: Vec<_> = daemon.config().templates.iter().map(|template| Reader::of(&template.path)).collect();
    while let Some(missing) = daemon.wait_for_missing() {
        let (room, all) = (daemon.config().room(), missing.iter().map(|file| file.bytes).sum());
        let Some(Missing { bytes, template }) = missing.into_iter().find(|file| file.bytes <= room) else {
            daemon.waits(no_pages(daemon.config(), all));
            machine.wait(daemon, RETRY);
            continue;
        };
        daemon.begins(bytes);
        let mut filler = Filler { machine, daemon, throttle: &mut throttle, looked: &mut looked };
        let filled = AssertUnwindSafe(|| match template {
            None => {
                let file = filler.file(bytes, all, None).unwrap_or_default();
                let is_full = file.is_some();
                daemon.fill_ended(file);
                is_full
            }
            Some(index) => filler.template(index, bytes, all, &mut readers[index]),
        });
        let is_full = catch_unwind(filled).unwrap_or_else(|_| {
            daemon.fill_ended(None);
            daemon
                .waits("filling panicked, a fault of hugemm: standard error says where; it is tried again".to_owned());
            false
        });
        if is_full {
            failures = 0;
        } else {
            machine.wait(daemon, RETRY * (1 << failures));
            failures = MOST_DOUBLINGS.min(failures + 1);
        }
    }
}

/// What filling finds: time, pages, others. Tests have one on which nobody waits, so that how fast it fills is not a matter of how
/// busy the machine is that they run on.
trait Machine {
    /// The time since some beginning.
    fn now(&self) -> Duration;
    /// Lets so much time go by; false if the daemon has stopped, or is drained, before.
    fn wait(&self, daemon: &Daemon, pause: Duration) -> bool {
        daemon.may_go_on(pause)
    }
    /// Whether others wait for what filling uses.
    fn is_busy(&self) -> bool {
        false
    }
    /// Fills a part of a file.
    fn fill(&self, file: &MemoryFile, from: u64, to: u64) -> Result<(), FileError>;
}

struct ThisMachine {
    began: Instant,
}

impl Machine for ThisMachine {
    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn is_busy(&self) -> bool {
        machine_is_busy()
    }

    /// Little at once, and none of it at idle priority: the kernel has a lock meanwhile, of the pool for others who touch huge pages, of
    /// this process's mappings for its other threads; a thread that others keep from running would keep it from them.
    fn fill(&self, file: &MemoryFile, from: u64, to: u64) -> Result<(), FileError> {
        // It costs a look at the mappings, each time, whether transparent pages are huge.
        let step = file.page().bytes() * if file.page() == Page::Transparent { 8 } else { 1 };
        let fill = |at| background::hurried(|| file.fill(at, to.min(at + step)));
        (from..to).step_by(step as usize).try_for_each(fill)
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
    background::idle_priority().map_err(not_idle)?;
    if !cpus.is_empty() {
        background::run_on(cpus).map_err(|error| {
            format!("cannot run on the CPUs of --cpus: {error}; those that are there: /sys/devices/system/cpu/online")
        })?;
    }
    node.map_or(Ok(()), |node| background::memory_from(node).map_err(|error| not_from(node, error)))
}

/// No right is needed for it, so whoever forbids it is no matter of rights.
fn not_idle(error: Errno) -> String {
    let way_out = match error {
        Errno::PERM => "; a seccomp filter forbids sched_setscheduler: allow it in the container's profile",
        _ => "",
    };
    format!("cannot fill at idle priority: {error}{way_out}")
}

fn not_from(node: u32, error: Errno) -> String {
    let way_out = match error {
        Errno::PERM => {
            "a seccomp filter forbids set_mempolicy: allow it in the container's profile (docker run --cap-add SYS_NICE), or \
             serve without --node"
        }
        Errno::NOSYS => "this kernel knows no nodes; serve without --node",
        _ => "those that have some: /sys/devices/system/node/has_memory",
    };
    format!("cannot take memory from node {node}: {error}; {way_out}")
}

struct Filler<'a, M> {
    machine: &'a M,
    daemon: &'a Daemon,
    throttle: &'a mut Throttle,
    /// When the machine was asked last whether it is busy.
    looked: &'a mut Option<Duration>,
}

impl<M: Machine> Filler<'_, M> {
    /// Fills a file with a template's bytes. False if there is no going on for want of pages, or because the daemon is told something else.
    fn template(&mut self, index: usize, bytes: u64, all: u64, reader: &mut Reader) -> bool {
        let read = reader.open(self.daemon).and_then(|version| {
            let file = self.file(bytes, all, Some(reader))?;
            file.map(|file| Ok((file, version, reader.end(self.daemon)?))).transpose()
        });
        // A disk has said nothing because nobody was to wait for it.
        let stopped = matches!(read, Err(TemplateError::Silent { .. })) && !self.daemon.may_go_on(Duration::ZERO);
        let read = if stopped { Ok(None) } else { read };
        match read.transpose() {
            Some(result) => self.daemon.template_ended(index, result),
            None => {
                self.daemon.fill_ended(None);
                return false;
            }
        }
        true
    }

    /// What others may want at any moment comes before more of a template, which takes as long as its disk does. False if it cannot be had.
    fn clear_first(&mut self, template: u64, done: u64) -> bool {
        // One: whoever leases on and on does not keep a template from ever being full.
        if let Some(bytes) = self.daemon.missing_clear().filter(|bytes| *bytes <= self.daemon.config().room()) {
            self.daemon.begins(bytes);
            let file = self.file(bytes, bytes, None).unwrap_or_default();
            let is_full = file.is_some();
            self.daemon.fill_ended(file);
            self.daemon.goes_on(template, done);
            return is_full;
        }
        true
    }

    /// A full file, or nothing if there is no going on with it. With it, `all` bytes are missing.
    fn file(
        &mut self,
        bytes: u64,
        all: u64,
        mut source: Option<&mut Reader>,
    ) -> Result<Option<MemoryFile>, TemplateError> {
        let (machine, daemon) = (self.machine, self.daemon);
        let config = daemon.config();
        let file = match MemoryFile::on(config.node, config.page, bytes) {
            Ok(file) => file,
            Err(error) => {
                daemon.waits(no_file(config.page, error));
                return Ok(None);
            }
        };
        let (mut done, mut may_have_clear) = (0, true);
        while done < bytes {
            if source.is_some() && may_have_clear {
                may_have_clear = self.clear_first(bytes, done);
            }
            if self.looked.is_none_or(|looked| machine.now() - looked >= LOOK) {
                self.throttle.observe(machine.is_busy());
                *self.looked = Some(machine.now());
            }
            daemon.gives_way(self.throttle.halvings());
            let pause = self.throttle.pause(machine.now()).max(daemon.rest());
            if !machine.wait(daemon, pause) {
                return Ok(None);
            }
            if !daemon.rest().is_zero() {
                // Another lease meanwhile.
                continue;
            }
            let chunk = self.throttle.chunk(config.page.bytes()).min(bytes - done);
            if config.room() < chunk {
                daemon.waits(no_pages(config, all - done));
                return Ok(None);
            }
            self.throttle.begin(machine.now(), chunk);
            daemon.fills();
            let (time, cpu) = (machine.now(), background::cpu_time());
            match machine.fill(&file, done, done + chunk) {
                Ok(()) => {
                    daemon.filled(chunk, machine.now() - time, background::cpu_time() - cpu);
                    if let Some(source) = &mut source {
                        let time = machine.now();
                        let cpu = source.read(daemon, &file, done, done + chunk)?;
                        daemon.filled(0, machine.now() - time, cpu);
                    }
                    done += chunk;
                }
                Err(FileError::NoPages) => {
                    daemon.waits(match (config.free)(config.page, config.node) {
                        Some(free) if free >= chunk => not_ours(all - done, free),
                        _ => no_pages(config, all - done),
                    });
                    return Ok(None);
                }
                Err(error) => {
                    daemon.waits(error.to_string());
                    return Ok(None);
                }
            }
        }
        Ok(Some(file))
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

fn no_pages(config: &PoolConfig, missing: u64) -> String {
    let free = (config.free)(config.page, config.node).unwrap_or(0);
    let Some(pool) = config.page.pool() else {
        return format!(
            "{missing} bytes missing, {free} may be taken without hurting the machine or the daemon's control group: free memory, \
             compact it, or raise the group's limit"
        );
    };
    let pages = missing.saturating_add(config.keep_free).saturating_sub(free).div_ceil(config.page.bytes());
    let kib = pool.bytes() >> 10;
    format!(
        "{missing} bytes missing, {free} free in the kernel's pool; for {pages} pages more: \
         echo $(( $(cat /sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages) + {pages} )) > \
         /sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::REST;
    use crate::tests::{BYTES, config, daemon, file};
    use crate::throttle::most_in_a_second;
    use std::cell::{Cell, RefCell};
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Time goes by when somebody waits for it, and there are as many pages as are wanted. A wait may take longer, as one of a thread at
    /// idle priority does.
    #[derive(Default)]
    struct Paced {
        now: Cell<Duration>,
        late: Duration,
        /// Others wait, until then.
        busy: Duration,
        filled: RefCell<Vec<(Duration, u64)>>,
        /// How many times slower than it may it fills, as the status says.
        slower: RefCell<Vec<(Duration, u32)>>,
    }

    impl Paced {
        /// Fills all that `daemon` is to have.
        fn run(&self, daemon: &Daemon, cap: u64) {
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    while daemon.status().ready.len() < daemon.config().shapes.0.len() {
                        std::thread::yield_now();
                    }
                    daemon.stop();
                });
                fill_on(self, daemon, &Manners { cap: Some(cap), ..Manners::default() });
            });
        }
    }

    impl Machine for Paced {
        fn now(&self) -> Duration {
            self.now.get()
        }

        fn wait(&self, daemon: &Daemon, pause: Duration) -> bool {
            let seldom = self.filled.borrow().len() % 7 == 3;
            self.now.set(self.now.get() + pause + if seldom { self.late } else { Duration::ZERO });
            let halvings = daemon.status().filling.map_or(0, |filling| filling.halvings);
            self.slower.borrow_mut().push((self.now.get(), 1 << halvings));
            daemon.may_go_on(Duration::ZERO)
        }

        fn is_busy(&self) -> bool {
            self.now.get() < self.busy
        }

        fn fill(&self, _: &MemoryFile, from: u64, to: u64) -> Result<(), FileError> {
            self.filled.borrow_mut().push((self.now.get(), to - from));
            Ok(())
        }
    }

    /// As the daemon's thread fills: in no second more than a tenth above `--max-bandwidth`, and in all no less than it allows.
    #[test]
    fn no_second_sees_more_than_the_cap_and_a_tenth() {
        // Files of some seconds each, and of a few chunks.
        for (cap, file) in [(24, 60), (50, 7), (1000, 4000), (333, 2)].map(|(cap, pages)| (cap * BYTES, pages)) {
            for late in [Duration::ZERO, Duration::from_millis(700)] {
                let files = 200_u64.div_ceil(file).max(2);
                let daemon = daemon(&vec![file; files as usize]);
                let machine = Paced { late, ..Paced::default() };
                machine.run(&daemon, cap);
                let filled = machine.filled.borrow();
                let all: u64 = filled.iter().map(|(_, bytes)| bytes).sum();
                assert_eq!(all, files * file * BYTES);
                let most = most_in_a_second(&filled);
                assert!(most * 10 <= cap * 11, "{most} bytes in a second at a cap of {cap}");
                let rate = all as f64 / machine.now().as_secs_f64();
                assert!(!late.is_zero() || rate > 0.9 * cap as f64, "and it is used: {rate} of {cap}");
            }
        }
    }

    /// While others wait the rate is halved every second, whatever the files' length, and doubled again as often; the status says so.
    #[test]
    fn a_busy_machine_is_filled_more_slowly() {
        let (cap, busy) = (64, Duration::from_secs(10));
        for file in [4, 50, 700] {
            let daemon = daemon(&vec![file; 700 / file as usize]);
            let machine = Paced { busy, ..Paced::default() };
            machine.run(&daemon, cap * BYTES);
            let pages = |from: u64, to: u64| {
                let within = |at: Duration| (from..to).contains(&at.as_secs());
                let bytes =
                    machine.filled.borrow().iter().filter(|(at, _)| within(*at)).map(|(_, bytes)| bytes).sum::<u64>();
                bytes / BYTES
            };
            let at_first = pages(0, 1);
            assert!((cap / 4..=cap / 2).contains(&at_first), "{at_first} of {cap} in the first second");
            assert!((1..=4).contains(&pages(7, 10)), "{} of {cap} in three seconds, later", pages(7, 10));
            assert!(pages(20, 21) > cap * 9 / 10, "{} of {cap} in a second when nobody waits", pages(20, 21));
            let slower = |second| {
                let said = machine.slower.borrow();
                said.iter().rev().find(|(at, _)| at.as_secs() == second).map(|(_, times)| *times)
            };
            assert_eq!((slower(0), slower(9), slower(20)), (Some(2), Some(64), Some(1)));
        }
    }

    /// While pages are zeroed nobody is kept from running the thread: this process's other threads answer clients, and wait for its lock
    /// of the mappings.
    #[test]
    fn no_page_is_zeroed_at_idle_priority() {
        // SAFETY: asks for a number.
        let me = || unsafe { libc::syscall(libc::SYS_gettid) } as libc::pid_t;
        // SAFETY: asks about a thread.
        let policy =
            |thread: libc::pid_t| unsafe { libc::syscall(libc::SYS_sched_getscheduler, thread) } as libc::c_int;
        let over = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (tell, told) = std::sync::mpsc::channel();
            scope.spawn(move || {
                background::idle_priority().expect("no right is needed");
                let may = background::hurried(|| policy(0)) == libc::SCHED_OTHER;
                tell.send((me(), may)).expect("heard");
                while !over.load(Ordering::Relaxed) {
                    let file = file(8);
                    // Where the machine has no huge pages for it, it has small ones.
                    let _ = ThisMachine { began: Instant::now() }.fill(&file, 0, file.bytes());
                }
            });
            let (thread, may) = told.recv().expect("it says so");
            let end = Instant::now() + Duration::from_secs(60);
            while may && policy(thread) != libc::SCHED_OTHER && Instant::now() < end {}
            over.store(true, Ordering::Relaxed);
            assert!(!may || Instant::now() < end, "it was idle all the time");
        });
    }

    /// Records when it fills, and then has no pages.
    #[derive(Default)]
    struct Full {
        filled: RefCell<Vec<(Instant, u64)>>,
    }

    impl Machine for Full {
        fn now(&self) -> Duration {
            Duration::ZERO
        }
        fn wait(&self, daemon: &Daemon, pause: Duration) -> bool {
            if daemon.waiting().0.is_some() {
                daemon.stop();
            }
            daemon.may_go_on(pause)
        }
        fn fill(&self, file: &MemoryFile, _: u64, _: u64) -> Result<(), FileError> {
            self.filled.borrow_mut().push((Instant::now(), file.bytes()));
            Err(FileError::NoPages)
        }
    }

    /// What a filler begins that may take three pages at most, and why it waits.
    fn begun(shapes: &[u64], keep_free: u64) -> (Vec<u64>, String) {
        let free = |_, _| Some(3 * BYTES);
        let keep_free = keep_free * BYTES;
        let daemon = Daemon::new(PoolConfig { page: Page::Huge2M, free, keep_free, ..config(shapes) });
        let machine = Full::default();
        fill_on(&machine, &daemon, &Manners::default());
        let begun = machine.filled.into_inner();
        (begun.into_iter().map(|(_, file)| file / BYTES).collect(), daemon.waiting().0.expect("it waits"))
    }

    /// Whoever has too few pages is told what to add for all that is missing; whoever may not have those that are there is not. What
    /// cannot be full is not begun, and keeps nothing from a shorter file or from others.
    #[test]
    fn only_what_can_be_full_is_begun() {
        let (files, why) = begun(&[4, 2], 0);
        assert_eq!(files, [2]);
        assert!(why.contains("hugetlb.2MB.max") && why.starts_with(&format!("{} bytes missing", 12 << 20)), "{why}");
        let (files, why) = begun(&[4, 2], 2);
        assert!(files.is_empty());
        assert!(why.contains("for 5 pages more: echo"), "{why}");
    }

    thread_local! {
        /// What a thread that fills may take without hurting its group.
        static LEFT: Cell<u64> = const { Cell::new(0) };
    }

    /// A group with a limit, in which others take as much as is filled.
    #[derive(Default)]
    struct Shared {
        left: RefCell<Vec<u64>>,
    }

    impl Machine for Shared {
        fn now(&self) -> Duration {
            Duration::ZERO
        }
        fn wait(&self, daemon: &Daemon, _: Duration) -> bool {
            if daemon.waiting().0.is_some() {
                daemon.stop();
            }
            daemon.may_go_on(Duration::ZERO)
        }
        fn fill(&self, _: &MemoryFile, from: u64, to: u64) -> Result<(), FileError> {
            LEFT.set(LEFT.get().saturating_sub(2 * (to - from)));
            self.left.borrow_mut().push(LEFT.get());
            if LEFT.get() > 0 { Ok(()) } else { Err(FileError::NoPages) }
        }
    }

    /// Where there was room for a file when it was begun, and others take it meanwhile, the file goes back before the margin is gone, beyond
    /// which the kernel ends the daemon.
    #[test]
    fn a_file_is_given_up_for_want_of_a_margin() {
        let daemon = Daemon::new(PoolConfig { free: |_, _| Some(LEFT.get()), keep_free: BYTES, ..config(&[4]) });
        LEFT.set(7 * BYTES);
        let machine = Shared::default();
        fill_on(&machine, &daemon, &Manners { cap: Some(20 * BYTES), ..Manners::default() });
        assert_eq!(machine.left.into_inner(), [5 * BYTES, 3 * BYTES, BYTES], "nothing of the margin");
        assert!(daemon.status().ready.is_empty());
        let why = daemon.waiting().0.expect("it waits");
        assert!(why.starts_with(&format!("{BYTES} bytes missing")) && why.contains("raise the group's limit"), "{why}");
    }

    /// Whose memory is leased when a template is filled for the first time.
    struct Leased<'a> {
        daemon: &'a Daemon,
        /// Whether no more clear memory is to be had then.
        fails: bool,
        filled: RefCell<Vec<u64>>,
    }

    impl Machine for Leased<'_> {
        fn now(&self) -> Duration {
            Duration::from_secs(self.filled.borrow().len() as u64)
        }
        fn wait(&self, daemon: &Daemon, _: Duration) -> bool {
            daemon.may_go_on(Duration::ZERO)
        }
        fn fill(&self, file: &MemoryFile, from: u64, _: u64) -> Result<(), FileError> {
            self.filled.borrow_mut().push(file.bytes() / BYTES);
            if file.bytes() > BYTES && from == 0 {
                self.daemon.lends(0, BYTES).expect("it is ready");
            }
            if self.filled.borrow().len() == 5 {
                self.daemon.stop();
            }
            let is_late = file.bytes() == BYTES && self.filled.borrow().len() > 1;
            if self.fails && is_late { Err(FileError::NoPages) } else { Ok(()) }
        }
    }

    /// A template takes as long as its disk does; what others may want at any moment does not wait for that. Where that is not to be had it is
    /// tried once beside a template.
    #[test]
    fn clear_memory_is_filled_beside_a_template() {
        let path = std::env::temp_dir().join(format!("hugemm-filler-{}", std::process::id()));
        let file = std::fs::File::create(&path).expect("a file");
        file.set_len(3 * BYTES).expect("a length");
        let templates = vec![crate::template::Template { name: "snap".to_owned(), path: path.clone() }];
        let config = PoolConfig { templates, ..config(&[1]) };
        let filled = [false, true].map(|fails| {
            let daemon = Daemon::new(config.clone());
            daemon.look_at_template(0);
            let machine = Leased { daemon: &daemon, fails, filled: RefCell::default() };
            fill_on(&machine, &daemon, &Manners { cap: Some(BYTES), ..Manners::default() });
            machine.filled.into_inner()
        });
        std::fs::remove_file(&path).expect("removed");
        assert_eq!(filled, [[1, 3, 1, 3, 3]; 2]);
    }

    /// A machine on which the first try to fill ends in a fault of ours.
    #[derive(Default)]
    struct Faulty {
        tries: Cell<u32>,
    }

    impl Machine for Faulty {
        fn now(&self) -> Duration {
            Duration::ZERO
        }
        fn wait(&self, daemon: &Daemon, pause: Duration) -> bool {
            if pause >= RETRY {
                assert!(daemon.status().filling.is_none(), "nothing is filled just now");
                assert!(daemon.waiting().0.is_some_and(|why| why.contains("a fault of hugemm")), "and it is said why");
            }
            daemon.may_go_on(Duration::ZERO)
        }
        fn fill(&self, _: &MemoryFile, _: u64, _: u64) -> Result<(), FileError> {
            self.tries.set(self.tries.get() + 1);
            assert!(self.tries.get() > 1, "as planted");
            Ok(())
        }
    }

    /// Whatever happens to one file, others are filled.
    #[test]
    fn filling_goes_on_after_a_panic() {
        let daemon = daemon(&[1]);
        std::thread::scope(|scope| {
            let filled = scope.spawn(|| fill_on(&Faulty::default(), &daemon, &Manners::default()));
            let end = Instant::now() + Duration::from_secs(20);
            while daemon.status().ready.is_empty() && !filled.is_finished() && Instant::now() < end {
                std::thread::yield_now();
            }
            daemon.stop();
            filled.join().expect("it goes on");
        });
        assert_eq!(daemon.status().ready, [BYTES]);
    }

    /// The machine's owner is told what forbids it, which is not what is missing.
    #[test]
    fn a_call_that_is_forbidden_has_its_remedy() {
        assert!(not_idle(Errno::PERM).contains("seccomp") && !not_idle(Errno::INVAL).contains("seccomp"));
        assert!(not_from(1, Errno::PERM).contains("SYS_NICE") && !not_from(1, Errno::PERM).contains("has_memory"));
        assert!(not_from(1, Errno::INVAL).contains("has_memory"));
    }

    #[test]
    fn a_program_starts_before_the_next_file_is_filled() {
        let daemon = daemon(&[1; 2]);
        let looked = || {
            let machine = Full::default();
            let mut throttle = Throttle::new(1 << 30);
            let mut filler = Filler { machine: &machine, daemon: &daemon, throttle: &mut throttle, looked: &mut None };
            assert!(matches!(filler.file(BYTES, BYTES, None), Ok(None)));
            daemon.filled(0, Duration::ZERO, Duration::ZERO);
            machine.filled.borrow()[0].0
        };
        looked();
        assert!(daemon.rest().is_zero(), "nobody has leased");
        daemon.gets(1);
        let leased = Instant::now();
        daemon.lends(0, BYTES).expect("leased");
        assert!(looked() - leased >= REST);
    }
}
