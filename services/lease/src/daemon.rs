//! The daemon's state: what is ready, who has what; taking, lending, ending. No socket here, and no thread of its own.

use crate::kept::{Kept, MOST_NAME, OwnerProcess};
use crate::left::{Watch, Watches};
use crate::log;
use crate::memory_file::{FileError, MemoryFile, Page};
use crate::policy::{Asker, LendingPolicy, Refusal};
use crate::service;
use crate::status::{Counts, Filling, KeptMemory, LeaseTimes, Left, Lent, Status};
use crate::stock::{Choice, Shapes, choose, missing};
use crate::wire::{Forget, KeepAs, Leased, Refused, RefusedKind, Seen, Wish};
use rustix::rand::GetRandomFlags;
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

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
    /// Who may have how much.
    pub policy: LendingPolicy,
}

/// A daemon's state, for its threads to share.
#[derive(Debug)]
pub struct Daemon {
    config: PoolConfig,
    state: Mutex<State>,
    /// Something of the state is different: what is ready, what it is told to do.
    changed: Condvar,
    watches: Watches,
    /// Where a line is written for each event.
    log: Option<File>,
}

#[derive(Debug, Default)]
struct State {
    ready: Vec<MemoryFile>,
    filling: Option<Filling>,
    /// Since when a chunk is being filled.
    chunk: Option<Instant>,
    waiting: Option<String>,
    drained: bool,
    stopping: bool,
    leases: BTreeMap<u64, Lease>,
    kept: BTreeMap<(u32, String), KeptEntry>,
    /// What was lent, is nobody's now as far as leases say, and may be somebody's still.
    left: Vec<(Watch, Left)>,
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
    pid: u32,
    bytes: u64,
    since: Instant,
    /// Under which name the memory is kept.
    keep: Option<String>,
    /// What says whether anybody has the memory.
    watch: Option<Watch>,
}

#[derive(Debug)]
struct KeptEntry {
    memory: Kept,
    lease: Option<u64>,
    watch: Option<Watch>,
}

/// A chunk that takes longer than this is filled by a thread that others keep from running: it takes hundredths of a second, the
/// largest page some tenths.
const STARVES: Duration = Duration::from_secs(2);

/// How long nothing is filled after a file was lent: its program starts then, and filling beside it has it wait for memory and
/// caches. Then filling has its turn for as long, whoever leases meanwhile: many small leases put it off half of the time at most.
pub(crate) const REST: Duration = Duration::from_millis(100);

/// After a file was taken out and could not grow, none is tried for half as much again for that long, and for so many times what the try
/// took, or until a lease comes back. Whoever asks on and on, for less each time, so keeps a ready file from others for a fifth of the
/// time at most: the tries of one pause take twice as long as its first.
const GROW_AGAIN: Duration = Duration::from_millis(100);
const GROW_AGAIN_TIMES: u32 = 9;

impl Lease {
    fn about(&self, lease: u64) -> Lent {
        let seconds = self.since.elapsed().as_secs();
        Lent { lease, uid: self.uid, pid: self.pid, bytes: self.bytes, seconds }
    }
}

impl State {
    /// What a user has: leases, kept memory that no lease has now, and what is left of leases.
    fn has(&self, uid: u32) -> u64 {
        let leased = self.leases.values().filter(|lease| lease.uid == uid).map(|lease| lease.bytes);
        let kept = self.kept.iter().filter(|((owner, _), kept)| *owner == uid && kept.lease.is_none());
        let left = self.left.iter().filter(|(_, left)| left.uid == uid).map(|(_, left)| left.bytes);
        leased.chain(kept.map(|(_, kept)| kept.memory.bytes())).chain(left).sum()
    }

    /// By how much no file is to grow at present.
    fn growth(&self) -> u64 {
        self.short.filter(|(_, until)| Instant::now() < *until).map_or(u64::MAX, |(bytes, _)| bytes)
    }

    fn lengths(&self) -> Vec<u64> {
        self.ready.iter().map(MemoryFile::bytes).collect()
    }

    /// Why nothing is filled though something is missing: what the thread that fills has said, or that it cannot say anything.
    fn waiting(&self) -> Option<String> {
        let starves = || {
            let since = self.chunk.map(|since| since.elapsed()).filter(|since| *since > STARVES)?;
            let seconds = since.as_secs();
            Some(format!("filling gets no idle CPU for {seconds} s; name CPUs that have some with --cpus, or wait"))
        };
        self.waiting.clone().or_else(starves)
    }
}

fn refused(kind: RefusedKind, message: impl Into<String>) -> Refused {
    Refused { kind, message: message.into() }
}

impl Daemon {
    /// With nothing ready.
    pub fn new(config: PoolConfig) -> Self {
        Daemon { config, state: Mutex::default(), changed: Condvar::new(), watches: Watches::new(), log: None }
    }

    /// The same, with a line in `log` for each event.
    pub fn with_log(config: PoolConfig, log: File) -> Self {
        Daemon { log: Some(log), ..Self::new(config) }
    }

    /// Writes a line about an event. With nothing locked: whoever reads it may be slow.
    pub fn log(&self, event: &str, about: impl Serialize) {
        if let Some(log) = &self.log {
            log::write(log, event, about);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A thread that panicked left counts at worst one event behind.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
            if wanted && file.page() == self.config.page {
                state.ready.push(file);
            } else {
                service::let_go(&file);
            }
        }
    }

    /// Takes memory that a predecessor kept; if its program still runs, with a lease, which is returned.
    pub fn adopt_kept(&self, memory: Kept, running: Option<OwnerProcess>) -> Option<u64> {
        let mut state = self.state();
        let (uid, name) = memory.key();
        let asker = Asker { uid, gid: uid };
        let watch = memory.memory().ok().and_then(|file| self.watches.add(file));
        let lease = running.map(|owner| state.enter(asker, owner.pid(), memory.bytes(), Some(name.clone()), watch));
        state.kept.insert((uid, name), KeptEntry { memory, lease, watch });
        lease
    }

    /// Leases memory to the process `pid` of `asker`. May fill what is missing, in the caller's time, and says how much.
    ///
    /// # Errors
    ///
    /// [`Refused`]; nothing was taken then.
    pub fn lease(&self, asker: Asker, pid: u32, wish: &Wish) -> Result<(Leased, OwnedFd), Refused> {
        let asked = Instant::now();
        let result = self.lease_or_refuse(asker, pid, wish);
        let mut state = self.state();
        if result.is_ok() {
            state.times.add(asked.elapsed());
        }
        match &result {
            Ok((leased, _)) if leased.filled_late > 0 => state.counts.grown += 1,
            Ok(_) => state.counts.hits += 1,
            Err(Refused { kind: RefusedKind::Empty, .. }) => state.counts.misses += 1,
            Err(_) => state.counts.refused += 1,
        }
        drop(state);
        let (uid, bytes, ms) = (asker.uid, wish.bytes, asked.elapsed().as_micros() as f64 / 1e3);
        match &result {
            // Without the secret.
            Ok((Leased { lease, filled_late, resumed, .. }, _)) => self.log(
                "leased",
                json!({
                    "lease": lease, "uid": uid, "pid": pid, "bytes": bytes, "filled_late": filled_late,
                    "keep": wish.keep.as_ref().map(|keep| &keep.name), "resumed": resumed, "ms": ms,
                }),
            ),
            Err(Refused { kind, message }) => {
                self.log(
                    "refused",
                    json!({ "uid": uid, "pid": pid, "bytes": bytes, "kind": kind, "message": message }),
                );
            }
        }
        result
    }

    fn lease_or_refuse(&self, asker: Asker, pid: u32, wish: &Wish) -> Result<(Leased, OwnedFd), Refused> {
        let PoolConfig { page, node, policy, .. } = &self.config;
        let invalid = |message: String| Err(refused(RefusedKind::Invalid, message));
        if wish.page.is_some_and(|wanted| wanted != *page) {
            return invalid(format!("this daemon has pages of {page}; ask without --page, or ask another daemon"));
        }
        if wish.bytes == 0 || !wish.bytes.is_multiple_of(page.bytes()) {
            return invalid(format!("{} bytes are not a multiple of the page size, {}", wish.bytes, page.bytes()));
        }
        if wish.bytes > self.config.size {
            let message =
                format!("{} bytes are more than the pool's {}; serve a larger one", wish.bytes, self.config.size);
            return invalid(message);
        }
        if wish.node.is_some() && wish.node != *node {
            return invalid(match node {
                Some(node) => format!("this daemon's memory is on node {node}"),
                None => "this daemon's memory may be on any node; serve one pool per node with --node".to_owned(),
            });
        }
        if wish.keep.as_ref().is_some_and(|keep| keep.name.is_empty() || keep.name.len() > MOST_NAME) {
            return invalid(format!("a name of kept memory has 1 to {MOST_NAME} bytes"));
        }
        if let Some(resumed) = wish.keep.as_ref().and_then(|keep| self.resume(asker, pid, wish.bytes, keep)) {
            return resumed;
        }
        let lease = {
            let mut state = self.state();
            state.forget_returned(&self.watches);
            let allowed = policy.allows(asker, wish.bytes, state.has(asker.uid), *node);
            allowed.map_err(|why: Refusal| refused(RefusedKind::LendingPolicy, why.to_string()))?;
            // Entered before anything is taken, so that two requests at once do not pass the quota together.
            let keep = wish.keep.as_ref().map(|keep| keep.name.clone());
            state.enter(asker, pid, wish.bytes, keep, None)
        };
        match self.take(asker, wish.bytes) {
            Ok((file, filled_late, watch)) => {
                if let Some(entered) = self.state().leases.get_mut(&lease) {
                    entered.watch = watch;
                }
                let leased = Leased {
                    lease,
                    bytes: wish.bytes,
                    page: *page,
                    node: *node,
                    filled_late,
                    secret: None,
                    resumed: false,
                };
                self.keep(asker, pid, leased, file, wish.keep.as_ref())
            }
            Err(why) => {
                self.remove(lease);
                Err(why)
            }
        }
    }

    /// A file of the length, marked as lent, how many bytes of it were filled just now, and what says whether anybody has it.
    fn take(&self, asker: Asker, bytes: u64) -> Result<(MemoryFile, u64, Option<Watch>), Refused> {
        let short = |had, why: &str| {
            let message = format!("{bytes} bytes are not to be had: the longest ready file has {had}, and {why}");
            Err(refused(RefusedKind::Empty, message))
        };
        loop {
            let began = Instant::now();
            let mut file = {
                let mut state = self.state();
                let index = match choose(&state.lengths(), bytes, state.growth()) {
                    Choice::Exact(index) | Choice::Cut(index) | Choice::Grow(index) => index,
                    Choice::Short(had) => return short(had, "it could not grow just now; ask again in a while"),
                    Choice::Empty => {
                        let why = state.waiting().unwrap_or_else(|| "it is being filled".to_owned());
                        return Err(refused(RefusedKind::Empty, format!("nothing is ready: {why}")));
                    }
                };
                state.ready.swap_remove(index)
            };
            service::let_go(&file);
            let had = file.bytes();
            // Whoever fills is told when it is certain that something is missing, and whether a program starts.
            let prepared = prepare(&mut file, had, bytes);
            let watch = || self.watches.add(&file);
            match prepared.and_then(|()| file.make_lent_after(asker.uid, asker.gid, watch)) {
                Ok(watch) => {
                    let late = bytes.saturating_sub(had);
                    let mut state = self.state();
                    state.counts.filled_late_bytes += late;
                    if state.put_off.is_none_or(|since| since.elapsed() >= 2 * REST) {
                        state.put_off = Some(Instant::now());
                    }
                    self.changed.notify_all();
                    return Ok((file, late, watch));
                }
                // It goes back to the kernel, which knows which page of it is broken.
                Err(FileError::HwPoisoned) => {
                    self.state().counts.poisoned += 1;
                    self.changed.notify_all();
                    self.log("poisoned", json!({ "bytes": file.bytes() }));
                }
                Err(why) => {
                    let whole = file.resize(had).is_ok();
                    if whole {
                        service::store(&file);
                    }
                    let mut state = self.state();
                    if bytes > had {
                        let until = Instant::now() + GROW_AGAIN.max(began.elapsed() * GROW_AGAIN_TIMES);
                        // A short try does not end the pause after a long one.
                        let until = state.short.map_or(until, |(_, before)| before.max(until));
                        let less = state.growth().min((bytes - had) / 2);
                        state.short = Some((less, until));
                    }
                    state.ready.extend(whole.then_some(file));
                    self.changed.notify_all();
                    return short(had, &why.to_string());
                }
            }
        }
    }

    /// Enters a new lease among those that are kept, if its client wants that.
    fn keep(
        &self,
        asker: Asker,
        pid: u32,
        mut leased: Leased,
        file: MemoryFile,
        keep: Option<&KeepAs>,
    ) -> Result<(Leased, OwnedFd), Refused> {
        let Some(keep) = keep else { return Ok((leased, file.into_fd())) };
        let new = |secret: String| {
            let memory = file.as_fd().try_clone_to_owned()?;
            Kept::new(memory, asker.uid, keep.name.clone(), secret, OwnerProcess::of(pid))
        };
        let refusal = match secret().map(new) {
            Some(Ok(memory)) => {
                let mut state = self.state();
                let watch = state.leases.get(&leased.lease).and_then(|lease| lease.watch);
                if let Entry::Vacant(entry) = state.kept.entry(memory.key()) {
                    service::store_kept(&memory);
                    leased.secret = Some(memory.secret().to_owned());
                    entry.insert(KeptEntry { memory, lease: Some(leased.lease), watch });
                    return Ok((leased, file.into_fd()));
                }
                "another program has just taken that name"
            }
            _ => "no descriptor or no random number for kept memory; lease without --keep",
        };
        self.remove(leased.lease);
        Err(refused(RefusedKind::Kept, refusal))
    }

    /// Leases kept memory to its owner again; `None` if there is none of that name.
    fn resume(&self, asker: Asker, pid: u32, bytes: u64, keep: &KeepAs) -> Option<Result<(Leased, OwnedFd), Refused>> {
        let mut state = self.state();
        let key = (asker.uid, keep.name.clone());
        let kept = state.kept.get_mut(&key)?;
        let no = |message: &str| Some(Err(refused(RefusedKind::Kept, message)));
        if keep.secret.as_deref() != Some(kept.memory.secret()) {
            return no("memory is kept under this name, and the secret is not the one that its first lease was given");
        }
        if kept.lease.is_some() {
            return no("the kept memory is in use");
        }
        if kept.memory.bytes() != bytes {
            return no(&format!("the kept memory has {} bytes", kept.memory.bytes()));
        }
        let Ok(file) = kept.memory.memory() else { return no("no descriptor is left in the daemon") };
        if let Err(error) = kept.memory.set_owner(OwnerProcess::of(pid)) {
            return no(&format!("it cannot be written who has the memory: {error}"));
        }
        let (page, secret) = (kept.memory.page(), kept.memory.secret().to_owned());
        let watch = kept.watch;
        let lease = state.enter(asker, pid, bytes, Some(keep.name.clone()), watch);
        if let Some(kept) = state.kept.get_mut(&key) {
            kept.lease = Some(lease);
        }
        let (node, secret) = (self.config.node, Some(secret));
        Some(Ok((Leased { lease, bytes, page, node, filled_late: 0, secret, resumed: true }, file)))
    }

    /// Keeps memory no more.
    ///
    /// # Errors
    ///
    /// [`Refused`]: there is none, or it is another's.
    pub fn forget(&self, asker: Asker, forget: &Forget) -> Result<(), Refused> {
        let commands = self.may_command(asker);
        let uid = forget.uid.filter(|_| commands).unwrap_or(asker.uid);
        let mut state = self.state();
        let key = (uid, forget.keep.name.clone());
        match state.kept.get(&key) {
            None => {
                Err(refused(RefusedKind::Kept, format!("nothing is kept as `{}` for user {uid}", forget.keep.name)))
            }
            Some(kept) if !commands && forget.keep.secret.as_deref() != Some(kept.memory.secret()) => {
                Err(refused(RefusedKind::Kept, "the secret is not the one that the first lease was given"))
            }
            Some(_) => {
                let kept = state.kept.remove(&key);
                // Whoever has it by a lease is said to have it by that.
                let free = kept.as_ref().filter(|kept| kept.lease.is_none());
                if let Some((watch, bytes)) = free.and_then(|kept| Some((kept.watch?, kept.memory.bytes()))) {
                    state.left.push((watch, Left { uid, bytes }));
                }
                drop(state);
                // With nothing locked: it takes a while.
                kept.iter().for_each(|kept| service::let_go_of_kept(&kept.memory));
                drop(kept);
                self.log("forgotten", json!({ "uid": uid, "name": forget.keep.name }));
                Ok(())
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

    fn remove(&self, lease: u64) -> Option<Lease> {
        let mut state = self.state();
        let ended = state.leases.remove(&lease)?;
        let key = ended.keep.clone().map(|name| (ended.uid, name));
        let kept = key.and_then(|key| state.kept.get_mut(&key)).filter(|kept| kept.lease == Some(lease));
        match (kept, ended.watch) {
            (Some(kept), _) => kept.lease = None,
            (None, Some(watch)) => state.left.push((watch, Left { uid: ended.uid, bytes: ended.bytes })),
            (None, None) => {}
        }
        Some(ended)
    }

    /// Counts what the supervisor of a lease saw.
    pub fn seen(&self, lease: Option<u64>, seen: Seen) {
        let mut state = self.state();
        let count = match seen {
            Seen::Placed => &mut state.counts.placed,
            Seen::PrivateMapping => &mut state.counts.private,
            Seen::Unused => &mut state.counts.unused,
        };
        *count += 1;
        drop(state);
        self.log("seen", json!({ "lease": lease, "what": seen }));
    }

    /// Whether somebody may give commands, not just lease.
    pub fn may_command(&self, asker: Asker) -> bool {
        self.config.policy.is_owner(asker)
    }

    /// Gives all ready memory back to the kernel, and fills nothing (`true`); fills again (`false`).
    pub fn drain(&self, drained: bool) {
        let files = {
            let mut state = self.state();
            state.drained = drained;
            self.changed.notify_all();
            if drained { std::mem::take(&mut state.ready) } else { Vec::new() }
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
    pub(crate) fn knows(&self, asker: Asker) -> Result<(), Refused> {
        let known = self.config.policy.names(asker);
        known.map_err(|why| refused(RefusedKind::LendingPolicy, why.to_string()))
    }

    /// How things stand, as far as it concerns `asker`: whoever may not give commands sees no leases but its own.
    pub(crate) fn status_for(&self, asker: Asker) -> Status {
        let mut status = self.status();
        if !self.may_command(asker) {
            status.leases.retain(|lease| lease.uid == asker.uid);
            status.kept.retain(|kept| kept.uid == asker.uid);
            status.left.retain(|left| left.uid == asker.uid);
        }
        status
    }

    /// How things stand.
    pub fn status(&self) -> Status {
        let mut state = self.state();
        state.forget_returned(&self.watches);
        Status {
            page: self.config.page,
            node: self.config.node,
            wanted: self.config.shapes.0.clone(),
            ready: state.lengths(),
            filling: state.filling,
            waiting: state.waiting(),
            drained: state.drained,
            leases: state.leases.iter().map(|(&lease, l)| l.about(lease)).collect(),
            kept: state
                .kept
                .iter()
                .map(|((uid, name), k)| KeptMemory {
                    uid: *uid,
                    name: name.clone(),
                    bytes: k.memory.bytes(),
                    lease: k.lease,
                })
                .collect(),
            left: state.left.iter().map(|(_, left)| *left).collect(),
            counts: state.counts,
            times: state.times,
        }
    }

    // What follows is for the thread that fills.

    /// Waits until something is missing, and says how long it is to be. `None`: the daemon stops.
    pub(crate) fn wait_for_missing(&self) -> Option<u64> {
        let mut state = self.state();
        loop {
            if state.stopping {
                return None;
            }
            if !state.drained
                && let Some(bytes) = missing(&self.config.shapes.0, &state.lengths())
            {
                state.filling = Some(Filling { bytes, done: 0 });
                return Some(bytes);
            }
            state.waiting = None;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits for `pause`; false if there is nothing to go on with: the daemon stops, or is drained.
    pub(crate) fn may_go_on(&self, pause: Duration) -> bool {
        let state = self.state();
        let idle = |state: &mut State| !state.stopping && !state.drained;
        let waited = self.changed.wait_timeout_while(state, pause, idle);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !state.stopping && !state.drained
    }

    /// How much is left of the time after a lease in which nothing is filled.
    pub(crate) fn rest(&self) -> Duration {
        self.state().put_off.map_or(Duration::ZERO, |since| REST.saturating_sub(since.elapsed()))
    }

    /// A chunk is being filled from now on.
    pub(crate) fn fills(&self) {
        self.state().chunk = Some(Instant::now());
    }

    /// A chunk has been filled, in `time`, with so much CPU time.
    pub(crate) fn filled(&self, bytes: u64, time: Duration, cpu: Duration) {
        let mut state = self.state();
        (state.waiting, state.chunk) = (None, None);
        if let Some(filling) = &mut state.filling {
            filling.done += bytes;
        }
        state.counts.filled_bytes += bytes;
        state.counts.fill_ns += time.as_nanos() as u64;
        state.counts.fill_cpu_ns += cpu.as_nanos() as u64;
    }

    /// Why it does not go on at present.
    pub(crate) fn waits(&self, why: String) {
        let mut state = self.state();
        (state.waiting, state.chunk) = (Some(why), None);
    }

    /// A file is full, or was given up.
    pub(crate) fn fill_ended(&self, file: Option<MemoryFile>) {
        if let Some(file) = &file {
            // Before anybody can have it: the manager is told to let go of it after it was told to hold it.
            service::store(file);
        }
        let mut state = self.state();
        state.filling = None;
        let Some(file) = file else { return };
        if state.drained {
            drop(state);
            // In the meantime: back to the kernel.
            service::let_go(&file);
            return;
        }
        let bytes = file.bytes();
        state.ready.push(file);
        self.changed.notify_all();
        drop(state);
        self.log("filled", json!({ "bytes": bytes }));
    }
}

impl State {
    fn enter(&mut self, asker: Asker, pid: u32, bytes: u64, keep: Option<String>, watch: Option<Watch>) -> u64 {
        self.leases_ever += 1;
        let lease = Lease { uid: asker.uid, pid, bytes, since: Instant::now(), keep, watch };
        self.leases.insert(self.leases_ever, lease);
        self.leases_ever
    }

    /// Forgets what is nobody's any more of what was left.
    fn forget_returned(&mut self, watches: &Watches) {
        if !self.left.is_empty() {
            let alive = watches.alive();
            self.left.retain(|(watch, _)| alive.contains(watch));
        }
    }
}

/// Makes a file of `had` filled bytes one of `bytes`, all there and none broken.
fn prepare(file: &mut MemoryFile, had: u64, bytes: u64) -> Result<(), FileError> {
    if bytes != had {
        file.resize(bytes)?;
    }
    if bytes > had {
        fill_in_parallel(file, had, bytes)?;
    }
    file.check()
}

/// Fills a part by all CPUs, for somebody waits.
fn fill_in_parallel(file: &MemoryFile, from: u64, to: u64) -> Result<(), FileError> {
    let page = file.page().bytes();
    let pages = (to - from) / page;
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64).min(pages).max(1);
    std::thread::scope(|scope| {
        let parts: Vec<_> = (0..threads)
            .map(|n| (from + pages * n / threads * page, from + pages * (n + 1) / threads * page))
            .map(|(from, to)| scope.spawn(move || file.populate(from, to)))
            .collect();
        parts.into_iter().try_for_each(|part| part.join().unwrap_or(Err(FileError::NoPages)))
    })
}

/// 128 random bits, in hexadecimal.
fn secret() -> Option<String> {
    let mut bytes = [0u8; 16];
    let got = rustix::rand::getrandom(&mut bytes, GetRandomFlags::empty()).ok()?;
    (got == bytes.len()).then(|| bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Programs read it: every line is an object, and nobody's secret is in it.
    #[test]
    fn each_event_is_a_line_of_json() {
        let (mut read, write) = std::io::pipe().expect("a pipe");
        let page = Page::Transparent;
        let (shapes, policy) = (Shapes(vec![page.bytes()]), LendingPolicy::closed(0));
        let config = PoolConfig { page, node: None, shapes, size: page.bytes(), policy };
        let daemon = Daemon::with_log(config, OwnedFd::from(write).into());
        let (root, keep) = (Asker { uid: 0, gid: 0 }, KeepAs { name: "a\n\"b".to_owned(), secret: None });
        let wish = |bytes| Wish { bytes, page: None, node: None, keep: Some(keep.clone()) };
        let lease = |bytes| daemon.lease(root, 7, &wish(bytes));
        assert!(lease(1).is_err() && lease(page.bytes()).is_err(), "no size; nothing ready");
        // Whatever pages it has: the daemon asks for those that are missing.
        daemon.fill_ended(Some(MemoryFile::new(page, page.bytes()).expect("a file")));
        let (leased, file) = lease(page.bytes()).expect("leased");
        daemon.seen(Some(leased.lease), Seen::Placed);
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
        assert_eq!((of(3, "lease"), of(3, "pid"), of(3, "keep")), (json!(leased.lease), json!(7), json!("a\n\"b")));
        assert_eq!((of(4, "what"), of(5, "lease")), (json!("placed"), json!(leased.lease)));
    }

    /// Who asks for what is not to be had does not keep the daemon from filling, and who leases again and again keeps it at most
    /// half of the time.
    #[test]
    fn filling_is_not_put_off_for_ever() {
        let page = Page::Transparent;
        let (shapes, policy) = (Shapes(vec![page.bytes(); 2]), LendingPolicy::closed(0));
        let daemon = Daemon::new(PoolConfig { page, node: None, shapes, size: u64::MAX, policy });
        let lease = |bytes| {
            let wish = Wish { bytes, page: None, node: None, keep: None };
            daemon.lease(Asker { uid: 0, gid: 0 }, 7, &wish)
        };
        let fill = || daemon.fill_ended(Some(MemoryFile::new(page, page.bytes()).expect("a file")));
        fill();
        // Longer than any file: the kernel refuses at once.
        assert_eq!(lease(1 << 63).expect_err("too long").kind, RefusedKind::Empty);
        assert_eq!((daemon.rest(), daemon.status().ready), (Duration::ZERO, vec![page.bytes()]));
        let leased_again = |after: Duration| {
            daemon.state().put_off = Instant::now().checked_sub(after);
            fill();
            lease(page.bytes()).expect("leased");
            daemon.rest() > Duration::ZERO
        };
        assert!(!leased_again(REST), "filling has its turn first");
        assert!(leased_again(2 * REST));
    }

    /// Who asks again and again for more than can be had does not keep what is ready from others.
    #[test]
    fn a_file_that_cannot_grow_stays_ready() {
        let page = Page::Transparent;
        let (shapes, policy) = (Shapes(vec![page.bytes()]), LendingPolicy::closed(0));
        let daemon = Daemon::new(PoolConfig { page, node: None, shapes, size: u64::MAX, policy });
        let file = MemoryFile::new(page, page.bytes()).expect("a file");
        let lease = |bytes| {
            let wish = Wish { bytes, page: None, node: None, keep: None };
            daemon.lease(Asker { uid: 0, gid: 0 }, 7, &wish)
        };
        daemon.fill_ended(Some(file));
        let refusal = |bytes| lease(bytes).expect_err("too long").message;
        // The kernel refuses at once.
        let long = 1 << 63;
        assert!(refusal(long).contains("ftruncate"), "tried");
        assert!(refusal(long).contains("just now") && refusal(long + page.bytes()).contains("just now"), "not again");
        assert!(refusal(long - page.bytes()).contains("just now"), "nor for a page less");
        assert_eq!(daemon.state().growth(), (long - page.bytes()) / 2, "much less may be had");
        daemon.state().short = Some((page.bytes(), Instant::now()));
        assert!(refusal(long).contains("ftruncate"), "tried again, later");
        // As after a try that took long, of more than twice as much.
        let until = Instant::now() + Duration::from_secs(60);
        daemon.state().short = Some((long, until));
        assert!(refusal(long).contains("ftruncate"), "less than that");
        assert_eq!(daemon.state().short.map(|(_, until)| until), Some(until), "a short try ends no long pause");
        let (leased, file) = lease(page.bytes()).expect("nobody else waits");
        drop(file);
        assert!(daemon.state().growth() < long);
        daemon.end(leased.lease);
        assert_eq!(daemon.state().growth(), u64::MAX, "its memory is there again");
    }

    /// A thread at idle priority that gets no CPU says nothing; its daemon does.
    #[test]
    fn filling_that_gets_no_cpu_is_seen() {
        let shapes = Shapes(vec![Page::Huge2M.bytes()]);
        let policy = LendingPolicy::closed(0);
        let daemon =
            Daemon::new(PoolConfig { page: Page::Huge2M, node: None, shapes, size: Page::Huge2M.bytes(), policy });
        assert_eq!(daemon.wait_for_missing(), Some(Page::Huge2M.bytes()));
        daemon.fills();
        assert_eq!(daemon.waiting(), (None, true));
        daemon.state().chunk = Instant::now().checked_sub(STARVES + Duration::from_secs(1));
        assert!(daemon.waiting().0.is_some_and(|why| why.contains("no idle CPU for 3 s")));
        assert_eq!(daemon.status().waiting, daemon.waiting().0);
        daemon.filled(Page::Huge2M.bytes(), Duration::ZERO, Duration::ZERO);
        assert_eq!(daemon.waiting(), (None, true));
    }
}
