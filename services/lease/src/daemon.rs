//! The daemon's state: what is ready, who has what. No socket here, and no thread of its own.
//!
//! | module | rule it owns |
//! |---|---|
//! | `lend` | which file becomes whose, cut or grown to the length that is asked for |
//! | `keep` | memory that its owner leases again, by a name and a secret |
//! | `refill` | what is to be filled, and when filling waits |
//! | `templates` | memory with the bytes of a file |

mod keep;
mod lend;
mod refill;
mod templates;

use crate::kept::Kept;
use crate::left::{Watch, Watches};
use crate::log::Log;
use crate::memory_file::{MemoryFile, Page, node_of};
use crate::policy::{Asker, LendingPolicy, Who};
use crate::service;
use crate::status::{Counts, Filling, KeptMemory, LeaseTimes, Left, Lent, Status};
use crate::stock::Shapes;
use crate::template::Template;
use crate::wire::{Refused, RefusedKind, Seen};
pub(crate) use refill::Missing;
use serde::Serialize;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};
use templates::Filled;

/// How long nothing is filled after a file was lent: its program starts then, and filling beside it has it wait for memory and
/// caches. Then filling has its turn for as long, whoever leases meanwhile: many small leases put it off half of the time at most.
pub(crate) const REST: Duration = Duration::from_millis(100);

/// What a daemon is for.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Of which pages its files are.
    pub page: Page,
    /// From which node all of it comes; from anywhere if none is named.
    pub node: Option<u32>,
    /// What should be ready.
    pub shapes: Shapes,
    /// The most that one lease may have, in bytes: a longer one would be filled while its client waits, at everybody's cost.
    pub size: u64,
    /// Who may have how much, until [`Daemon::set_policy`].
    pub policy: LendingPolicy,
    /// How many bytes of such pages, from such a node, there are for anybody: `None` if that is not known.
    pub free: fn(Page, Option<u32>) -> Option<u64>,
    /// How many of them are left to others.
    pub keep_free: u64,
    /// Files whose bytes are ready in memory, too.
    pub templates: Vec<Template>,
}

impl PoolConfig {
    /// From any node, for root and the user `owner`, with nothing known of what is free.
    pub fn new(page: Page, shapes: Shapes, size: u64, owner: u32) -> Self {
        let policy = LendingPolicy::closed(owner);
        PoolConfig { page, node: None, shapes, size, policy, free: |_, _| None, keep_free: 0, templates: Vec::new() }
    }

    /// How many bytes may be taken.
    pub(crate) fn room(&self) -> u64 {
        (self.free)(self.page, self.node).map_or(u64::MAX, |free| free.saturating_sub(self.keep_free))
    }
}

/// A daemon's state, for its threads to share.
#[derive(Debug)]
pub struct Daemon {
    config: PoolConfig,
    policy: RwLock<LendingPolicy>,
    state: Mutex<State>,
    /// Something of the state is different: what is ready, what it is told to do.
    changed: Condvar,
    watches: Watches,
    /// Where a line is written for each event.
    log: Option<Log>,
    /// Turns to look at the file of each template, which may be far.
    looks: Vec<Mutex<()>>,
}

#[derive(Debug, Default)]
struct State {
    ready: Vec<MemoryFile>,
    templates: Vec<Filled>,
    filling: Option<Filling>,
    /// Since when a chunk is being filled.
    chunk: Option<Instant>,
    waiting: Option<String>,
    drained: bool,
    stopping: bool,
    leases: BTreeMap<u64, Lease>,
    kept: BTreeMap<(u32, String), KeptEntry>,
    /// What was lent, is nobody's now as far as leases say, and may be somebody's still.
    left: Vec<(Watch, Who, Left)>,
    leases_ever: u64,
    /// When filling was put off last, for [`REST`].
    put_off: Option<Instant>,
    /// By how much no file grows, and until when.
    short: Option<(u64, Instant)>,
    counts: Counts,
    times: LeaseTimes,
}

#[derive(Debug)]
struct Lease {
    uid: u32,
    account: Who,
    pid: u32,
    bytes: u64,
    since: Instant,
    /// What its supervisor saw.
    seen: Vec<Seen>,
    /// Under which name the memory is kept.
    keep: Option<String>,
    /// What says whether anybody has the memory.
    watch: Option<Watch>,
}

#[derive(Debug)]
struct KeptEntry {
    memory: Arc<Kept>,
    lease: Option<u64>,
    watch: Option<Watch>,
}

impl KeptEntry {
    /// Whether a lease has it, or a program whose lease is over.
    fn is_in_use(&self) -> bool {
        self.lease.is_some() || self.memory.is_lent()
    }
}

impl Lease {
    /// Whether nobody has its memory any more, though whoever leased it is there. What is kept stays with its name.
    fn is_back(&self, alive: &BTreeSet<Watch>) -> bool {
        self.keep.is_none() && self.watch.is_some_and(|watch| !alive.contains(&watch))
    }

    fn about(&self, lease: u64) -> Lent {
        let seconds = self.since.elapsed().as_secs();
        Lent { lease, uid: self.uid, pid: self.pid, bytes: self.bytes, seconds, seen: self.seen.last().copied() }
    }
}

impl State {
    /// What is out by a line of the policy: leases, kept memory that no lease has now, and what is left of leases.
    fn has(&self, account: Who) -> u64 {
        let leased = self.leases.values().filter(|lease| lease.account == account).map(|lease| lease.bytes);
        let kept = self.kept.values().filter(|kept| kept.memory.account() == account && kept.lease.is_none());
        let left = self.left.iter().filter(|(_, whose, _)| *whose == account).map(|(_, _, left)| left.bytes);
        leased.chain(kept.map(|kept| kept.memory.bytes())).chain(left).fold(0, u64::saturating_add)
    }

    fn lengths(&self) -> Vec<u64> {
        self.ready.iter().map(MemoryFile::bytes).collect()
    }

    fn enter(&mut self, whose: (u32, Who), pid: u32, bytes: u64, keep: Option<String>, watch: Option<Watch>) -> u64 {
        self.leases_ever += 1;
        let (uid, account) = whose;
        let lease = Lease { uid, account, pid, bytes, since: Instant::now(), seen: Vec::new(), keep, watch };
        self.leases.insert(self.leases_ever, lease);
        self.leases_ever
    }

    /// Forgets what is nobody's any more of what was left, and says what is somebody's.
    fn forget_left(&mut self, watches: &Watches) -> Option<BTreeSet<Watch>> {
        let alive = if self.left.is_empty() && self.leases.is_empty() { None } else { watches.alive() };
        alive.inspect(|alive| self.left.retain(|(watch, ..)| alive.contains(watch)))
    }
}

fn refused(kind: RefusedKind, message: impl Into<String>) -> Refused {
    Refused { kind, message: message.into() }
}

impl Daemon {
    /// With nothing ready.
    pub fn new(config: PoolConfig) -> Self {
        let policy = RwLock::new(config.policy.clone());
        let looks = config.templates.iter().map(|_| Mutex::new(())).collect();
        let templates = config.templates.iter().cloned().map(Filled::new).collect();
        let state = Mutex::new(State { templates, ..State::default() });
        Daemon { config, policy, state, changed: Condvar::new(), watches: Watches::default(), log: None, looks }
    }

    /// The same, with a line in `log` for each event.
    pub fn with_log(config: PoolConfig, log: File) -> Self {
        Daemon { log: Some(Log::to(log)), ..Self::new(config) }
    }

    /// Writes a line about an event, as soon as its reader takes it.
    pub fn log(&self, event: &str, about: impl Serialize) {
        if let Some(log) = &self.log {
            log.write(event, about);
        }
    }

    /// Waits until the log is written, for so long at most, before the process ends.
    pub fn flush_log(&self, most: Duration) {
        self.log.iter().for_each(|log| log.flush(most));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A thread that panicked left counts at worst one event behind.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn policy(&self) -> RwLockReadGuard<'_, LendingPolicy> {
        self.policy.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Another policy from now on. What is out stays out, and counts by the line by which it was leased.
    pub fn set_policy(&self, policy: LendingPolicy) {
        *self.policy.write().unwrap_or_else(PoisonError::into_inner) = policy;
    }

    /// What it is for.
    pub fn config(&self) -> &PoolConfig {
        &self.config
    }

    /// Takes files that a predecessor had filled. What this daemon is not to have ready goes back to the kernel.
    pub fn adopt(&self, files: Vec<MemoryFile>) {
        let mut state = self.state();
        for file in files {
            let of_its_length = |lengths: &[u64]| lengths.iter().filter(|&&bytes| bytes == file.bytes()).count();
            let wanted = of_its_length(&self.config.shapes.0) > of_its_length(&state.lengths());
            let is_there = self.config.node == node_of(file.as_fd());
            if wanted && is_there && file.page() == self.config.page {
                state.ready.push(file);
            } else {
                service::let_go(&file);
            }
        }
    }

    /// The owner of a lease is gone. What it had goes back to the kernel with the last descriptor and mapping, unless it is
    /// kept.
    pub fn end(&self, lease: u64) {
        if let Some(ended) = self.remove(lease) {
            // There may be pages to grow by.
            self.state().short = None;
            self.log("ended", ended.about(lease));
        }
    }

    /// Ends leases whose memory is back, and forgets what is of others.
    fn end_returned(&self) {
        let mut state = self.state();
        let Some(alive) = state.forget_left(&self.watches) else { return };
        let is_back = state.leases.iter_mut().filter(|(_, lease)| lease.is_back(&alive));
        // Nothing is left of it.
        let back: Vec<_> = is_back.filter_map(|(&lease, entered)| entered.watch.take().map(|_| lease)).collect();
        drop(state);
        back.into_iter().for_each(|lease| self.end(lease));
    }

    fn remove(&self, lease: u64) -> Option<Lease> {
        let mut state = self.state();
        let ended = state.leases.remove(&lease)?;
        let key = ended.keep.clone().map(|name| (ended.uid, name));
        let kept = key.and_then(|key| state.kept.get_mut(&key)).filter(|kept| kept.lease == Some(lease));
        match (kept, ended.watch) {
            (Some(kept), _) => kept.lease = None,
            (None, Some(watch)) => state.left.push((watch, ended.account, Left { uid: ended.uid, bytes: ended.bytes })),
            (None, None) => {}
        }
        Some(ended)
    }

    /// Counts what the supervisor of a lease saw, once, however often it is said.
    pub fn seen(&self, lease: u64, seen: Seen) {
        let mut state = self.state();
        let Some(entered) = state.leases.get_mut(&lease).filter(|lease| !lease.seen.contains(&seen)) else { return };
        entered.seen.push(seen);
        let count = match seen {
            Seen::Awaited => return,
            Seen::Placed => &mut state.counts.placed,
            Seen::PrivateMapping => &mut state.counts.private,
            Seen::Unused => &mut state.counts.unused,
        };
        *count += 1;
        drop(state);
        self.log("seen", json!({ "lease": lease, "what": seen }));
    }

    /// Whether somebody may give commands, not just lease.
    pub fn may_command(&self, asker: &Asker) -> bool {
        self.policy().is_owner(asker)
    }

    /// Gives all ready memory back to the kernel, and fills nothing (`true`); fills again (`false`).
    pub fn drain(&self, drained: bool) {
        let files = {
            let mut state = self.state();
            state.drained = drained;
            self.changed.notify_all();
            let all = if drained { std::mem::take(&mut state.ready) } else { Vec::new() };
            let templates = state.templates.iter_mut().filter(|_| drained).filter_map(|template| template.ready.take());
            all.into_iter().chain(templates).collect::<Vec<_>>()
        };
        // With nothing locked: it takes a while.
        files.iter().for_each(service::let_go);
        drop(files);
        self.log(if drained { "drained" } else { "filling" }, json!({}));
    }

    /// Ends the waiting of every thread.
    pub fn stop(&self) {
        self.state().stopping = true;
        self.changed.notify_all();
    }

    /// Why nothing is filled though something is missing, and whether a file is on its way.
    pub fn waiting(&self) -> (Option<String>, bool) {
        let state = self.state();
        (state.waiting(), state.filling.is_some())
    }

    /// What may be said to a stranger: nothing.
    ///
    /// # Errors
    ///
    /// [`Refused`]: no line of the policy names whoever asks.
    pub(crate) fn knows(&self, asker: &Asker) -> Result<(), Refused> {
        let known = self.policy().names(asker);
        known.map_err(|why| refused(RefusedKind::LendingPolicy, why.to_string()))
    }

    /// How things stand, as far as it concerns `asker`: whoever may not give commands sees no leases but its own,
    /// and no template that it may not read.
    pub(crate) fn status_for(&self, asker: &Asker) -> Status {
        let mut status = self.status();
        if !self.may_command(asker) {
            status.leases.retain(|lease| lease.uid == asker.uid);
            status.kept.retain(|kept| kept.uid == asker.uid);
            status.left.retain(|left| left.uid == asker.uid);
            let mut index = 0..;
            status.templates.retain(|_| index.next().is_some_and(|index| self.may_read(asker, index)));
        }
        status
    }

    /// How things stand.
    pub fn status(&self) -> Status {
        let mut state = self.state();
        let alive = state.forget_left(&self.watches);
        let is_out = |lease: &Lease| alive.as_ref().is_none_or(|alive| !lease.is_back(alive));
        Status {
            page: self.config.page,
            node: self.config.node,
            wanted: self.config.shapes.0.clone(),
            ready: state.lengths(),
            filling: state.filling,
            waiting: state.waiting(),
            drained: state.drained,
            leases: state.leases.iter().filter(|(_, l)| is_out(l)).map(|(&lease, l)| l.about(lease)).collect(),
            kept: state
                .kept
                .iter()
                .map(|((uid, name), k)| KeptMemory {
                    uid: *uid,
                    name: name.clone(),
                    bytes: k.memory.bytes(),
                    lease: k.lease,
                    in_use: k.is_in_use(),
                })
                .collect(),
            left: state.left.iter().map(|(_, _, left)| *left).collect(),
            templates: state.templates.iter().map(Filled::about).collect(),
            counts: state.counts,
            times: state.times,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{BYTES, PAGE, cached, config, kept};
    use crate::wire::{Forget, KeepAs, Wish};
    use std::os::fd::OwnedFd;

    /// A daemon that is started for another node than its predecessor was says of no memory that it is from there.
    #[test]
    fn memory_from_elsewhere_is_not_lent_as_from_a_node() {
        let on = |node| MemoryFile::on(node, PAGE, BYTES).expect("a file");
        let config = |node| PoolConfig { node, ..config(&[1; 3]) };
        let wish = |node, secret| Wish { node, ..cached(secret) };
        let lease = |daemon: &Daemon, wish| daemon.lease(&Asker::user(0), 7, &wish);
        let (anywhere, there) = (Daemon::new(config(None)), Daemon::new(config(Some(1))));
        [&anywhere, &there].iter().for_each(|daemon| daemon.adopt(vec![on(None), on(Some(1)), on(Some(12))]));
        assert_eq!([&anywhere, &there].map(|daemon| daemon.status().ready.len()), [1, 1]);
        let kept_from = |node: Option<u32>| {
            let daemon = Daemon::new(config(Some(1)));
            let secret = Some("secret");
            daemon.adopt_kept(vec![kept(on(node), 0)]);
            let at_home = lease(&daemon, wish(Some(1), secret));
            assert_eq!(at_home.is_ok(), node == Some(1));
            at_home.or_else(|_| lease(&daemon, wish(None, secret))).map(|(leased, _)| leased.node)
        };
        assert_eq!([None, Some(1), Some(12)].map(|node| kept_from(node).expect("lent")), [None, Some(1), Some(12)]);
        let (leased, _) = lease(&there, wish(Some(1), None)).expect("ready");
        assert_eq!(leased.node, Some(1));
    }

    /// Programs read it: every line is an object, and nobody's secret is in it.
    #[test]
    fn each_event_is_a_line_of_json() {
        let (mut read, write) = std::io::pipe().expect("a pipe");
        let daemon = Daemon::with_log(config(&[1]), OwnedFd::from(write).into());
        let (root, keep) = (&Asker::user(0), KeepAs { name: "a\"b".to_owned(), secret: None });
        let wish = |bytes| Wish { keep: Some(keep.clone()), ..Wish::of(bytes) };
        let lease = |bytes| daemon.lease(root, 7, &wish(bytes));
        assert!(lease(1).is_err() && lease(BYTES).is_err(), "no size; nothing ready");
        daemon.gets(1);
        let (leased, file) = lease(BYTES).expect("leased");
        (0..3).for_each(|_| daemon.seen(leased.lease, Seen::Placed));
        daemon.end(leased.lease);
        daemon.forget(root, &Forget { keep, uid: None }).expect("forgotten");
        daemon.drain(true);
        daemon.drain(false);
        drop((daemon, file));
        let mut text = String::new();
        std::io::Read::read_to_string(&mut read, &mut text).expect("UTF-8");
        assert!(leased.secret.is_some_and(|secret| !text.contains(&secret)), "{text}");
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("an object")).collect();
        let events: Vec<_> = lines.iter().map(|line| line["event"].as_str().unwrap_or_default()).collect();
        let all = ["refused", "refused", "filled", "leased", "seen", "ended", "forgotten", "drained", "filling"];
        assert_eq!(events, all, "{text}");
        assert!(lines.iter().all(|line| line["time"].as_f64() > Some(1e9)), "{text}");
        let of = |n: usize, field: &str| lines[n][field].clone();
        assert_eq!((of(0, "kind"), of(1, "kind")), (json!("invalid"), json!("empty")));
        assert_eq!((of(3, "lease"), of(3, "pid"), of(3, "keep")), (json!(leased.lease), json!(7), json!("a\"b")));
        assert_eq!((of(4, "what"), of(5, "lease")), (json!("placed"), json!(leased.lease)));
    }
}
