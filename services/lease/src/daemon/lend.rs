//! Lending: which file becomes whose, cut or grown to the length that is asked for.

use super::templates::Asked;
use super::{Daemon, PoolConfig, REST, State, refused};
use crate::background::memory_from;
use crate::kept::MOST_NAME;
use crate::left::Watch;
use crate::memory_file::{FileError, MemoryFile};
use crate::policy::{Asker, Refusal};
use crate::service;
use crate::stock::{Choice, choose};
use crate::wire::{Leased, Refused, RefusedKind, Wish};
use serde_json::json;
use std::os::fd::OwnedFd;
use std::thread;
use std::time::{Duration, Instant};

/// After a file was taken out and could not grow, none is tried for half as much again for that long, and for so many times what the try
/// took, or until a lease comes back. Whoever asks on and on, for less each time, so keeps a ready file from others for a fifth of the
/// time at most: the tries of one pause take twice as long as its first.
const GROW_AGAIN: Duration = Duration::from_millis(100);
const GROW_AGAIN_TIMES: u32 = 9;

impl State {
    /// By how much no file is to grow at present.
    fn growth(&self) -> u64 {
        self.short.filter(|(_, until)| Instant::now() < *until).map_or(u64::MAX, |(bytes, _)| bytes)
    }
}

/// A lease that is counted and not given yet. Dropped, on whatever way out, it was none.
pub(super) struct Entered<'a> {
    pub(super) daemon: &'a Daemon,
    pub(super) lease: u64,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.daemon.remove(self.lease);
        // What was taken for it may be missing now.
        self.daemon.changed.notify_all();
    }
}

impl Daemon {
    /// Leases memory to the process `pid` of `asker`. May fill what is missing, in the caller's time, and says how much.
    ///
    /// # Errors
    ///
    /// [`Refused`]; nothing was taken then.
    pub fn lease(&self, asker: &Asker, pid: u32, wish: &Wish) -> Result<(Leased, OwnedFd), Refused> {
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
        let (uid, ms) = (asker.uid, asked.elapsed().as_micros() as f64 / 1e3);
        match &result {
            // Without the secret.
            Ok((Leased { lease, bytes, filled_late, resumed, .. }, _)) => self.log(
                "leased",
                json!({
                    "lease": lease, "uid": uid, "pid": pid, "bytes": bytes, "filled_late": filled_late,
                    "keep": wish.keep.as_ref().map(|keep| &keep.name), "resumed": resumed, "ms": ms,
                }),
            ),
            Err(Refused { kind, message }) => {
                self.log(
                    "refused",
                    json!({ "uid": uid, "pid": pid, "bytes": wish.bytes, "kind": kind, "message": message }),
                );
            }
        }
        result
    }

    fn lease_or_refuse(&self, asker: &Asker, pid: u32, wish: &Wish) -> Result<(Leased, OwnedFd), Refused> {
        let PoolConfig { page, node, .. } = &self.config;
        let invalid = |message: String| Err(refused(RefusedKind::Invalid, message));
        let is_name = |name: &str| (1..=MOST_NAME).contains(&name.len()) && !name.contains(char::is_control);
        if !wish.keep.iter().map(|keep| &keep.name).chain(&wish.template).all(|name| is_name(name)) {
            return invalid(format!("a name has 1 to {MOST_NAME} bytes, and no control characters"));
        }
        if let Some(resumed) = wish.keep.as_ref().and_then(|keep| self.resume(asker, pid, wish, keep)) {
            return resumed;
        }
        if wish.page.is_some_and(|wanted| wanted != *page) {
            return invalid(format!("this daemon has pages of {page}; ask without --page, or ask another daemon"));
        }
        let template = wish.template.as_ref().map(|name| self.template(asker, name).map(|found| (name, found)));
        let template = match template.transpose()? {
            Some((name, Asked { bytes, .. })) if wish.bytes != 0 && wish.bytes != bytes => {
                return invalid(format!("template `{name}` has {bytes} bytes, not {}; ask without SIZE", wish.bytes));
            }
            Some(_) if wish.keep.is_some() => {
                return invalid("a template's bytes are leased anew each time; ask without --keep".to_owned());
            }
            found => found.map(|(_, found)| found),
        };
        let bytes = template.map_or(wish.bytes, |asked| asked.bytes);
        if bytes == 0 || !bytes.is_multiple_of(page.bytes()) {
            return invalid(format!("{bytes} bytes are not a multiple of the page size, {}", page.bytes()));
        }
        if bytes > self.config.size && template.is_none() {
            return invalid(format!("{bytes} bytes are more than the pool's {}; serve a larger one", self.config.size));
        }
        if wish.node.is_some() && wish.node != *node {
            return invalid(match node {
                Some(node) => format!("this daemon's memory is on node {node}"),
                None => "this daemon's memory may be on any node; serve one pool per node with --node".to_owned(),
            });
        }
        self.end_returned();
        let (entered, account) = {
            let mut state = self.state();
            let policy = self.policy();
            let account = policy.account(asker);
            let allowed = policy.allows(asker, bytes, state.has(account), *node);
            allowed.map_err(|why: Refusal| refused(RefusedKind::LendingPolicy, why.to_string()))?;
            // Entered before anything is taken, so that two requests at once do not pass the quota together.
            let keep = wish.keep.as_ref().map(|keep| keep.name.clone());
            (Entered { daemon: self, lease: state.enter((asker.uid, account), pid, bytes, keep, None) }, account)
        };
        let (file, filled_late, watch) = self.take(asker, bytes, template)?;
        if let Some(entered) = self.state().leases.get_mut(&entered.lease) {
            entered.watch = watch;
        }
        let (lease, page, node) = (entered.lease, *page, *node);
        let leased = Leased { lease, bytes, page, node, filled_late, secret: None, resumed: false };
        let given = self.keep((asker, account), leased, file, wish.keep.as_ref())?;
        std::mem::forget(entered);
        Ok(given)
    }

    /// A file that is ready for that length, if one may be had.
    fn take_ready(&self, bytes: u64) -> Result<MemoryFile, Refused> {
        let mut state = self.state();
        let index = match choose(&state.lengths(), bytes, state.growth()) {
            Choice::Exact(index) | Choice::Cut(index) | Choice::Grow(index) => index,
            Choice::Short(had) => return Err(short(bytes, had, "it could not grow just now; ask again in a while")),
            Choice::Empty => {
                let why = state.waiting().unwrap_or_else(|| "it is being filled".to_owned());
                return Err(refused(RefusedKind::Empty, format!("nothing is ready: {why}")));
            }
        };
        Ok(state.ready.swap_remove(index))
    }

    /// A file of the length, marked as lent, how many bytes of it were filled just now, and what says whether anybody has it.
    fn take(
        &self,
        asker: &Asker,
        bytes: u64,
        template: Option<Asked>,
    ) -> Result<(MemoryFile, u64, Option<Watch>), Refused> {
        loop {
            let began = Instant::now();
            let mut file = template.map_or_else(|| self.take_ready(bytes), |asked| self.take_filled(&asked))?;
            service::let_go(&file);
            let had = file.bytes();
            match self.prepare(asker, &mut file, bytes) {
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
                    if bytes > had {
                        self.grow_later(bytes - had, began.elapsed());
                    }
                    // What was cut off is gone: another file is filled.
                    if file.bytes() >= had && file.resize(had).is_ok() && file.mark_ready(true).is_ok() {
                        match &template {
                            Some(asked) => self.put_filled_back(asked, file),
                            None => _ = self.make_ready(file),
                        }
                    }
                    self.changed.notify_all();
                    return Err(short(bytes, had, &why.to_string()));
                }
            }
        }
    }

    /// Makes a file one of `bytes` that is its owner's and no ready one any more: all there, none broken, and watched, which nobody goes
    /// without but whoever has no bound.
    fn prepare(&self, asker: &Asker, file: &mut MemoryFile, bytes: u64) -> Result<Option<Watch>, FileError> {
        // What can fail without having changed the file comes first. Whoever fills is told when it is certain that something is missing,
        // and whether a program starts.
        file.mark_ready(false)?;
        let watch = self.watches.add(&*file).map_err(FileError::Unwatched);
        let watch = if self.may_command(asker) { watch.ok() } else { Some(watch?) };
        // What is there needs no room, and a program that starts does not wait until the kernel has said what there is.
        let had = file.bytes();
        if bytes > had && bytes - had > self.config.room() {
            return Err(FileError::NoPages);
        }
        resize(file, bytes, self.config.node)?;
        file.give_to(asker.uid, asker.gid)?;
        Ok(watch)
    }

    /// Has no file grow for a while by half as much as could not be had in such a time.
    fn grow_later(&self, growth: u64, took: Duration) {
        let mut state = self.state();
        let until = Instant::now() + GROW_AGAIN.max(took * GROW_AGAIN_TIMES);
        // A short try does not end the pause after a long one.
        let until = state.short.map_or(until, |(_, before)| before.max(until));
        let less = state.growth().min(growth / 2);
        state.short = Some((less, until));
    }
}

fn short(bytes: u64, had: u64, why: &str) -> Refused {
    let message = match had >= bytes {
        true => format!("{bytes} bytes are ready, and cannot be lent: {why}"),
        false => format!("{bytes} bytes are not to be had: the longest ready file has {had}, and {why}"),
    };
    refused(RefusedKind::Empty, message)
}

/// Makes a full file one of `bytes`, all there and none broken.
fn resize(file: &mut MemoryFile, bytes: u64, node: Option<u32>) -> Result<(), FileError> {
    let had = file.bytes();
    if bytes != had {
        file.resize(bytes)?;
    }
    if bytes > had {
        fill_in_parallel(file, had, bytes, node)?;
    }
    file.check()
}

/// Fills a part by all CPUs, for somebody waits. What no thread can be had for is filled by this one.
fn fill_in_parallel(file: &MemoryFile, from: u64, to: u64, node: Option<u32>) -> Result<(), FileError> {
    let page = file.page().bytes();
    let pages = (to - from) / page;
    let threads = thread::available_parallelism().map_or(1, |n| n.get() as u64).min(pages).max(1);
    let fill = |from, to| {
        if let Some(node) = node {
            memory_from(node).map_err(|errno| FileError::Refused { call: "set_mempolicy", errno })?;
        }
        file.populate(from, to)
    };
    thread::scope(|scope| {
        let parts: Vec<_> = (0..threads)
            .map(|n| (from + pages * n / threads * page, from + pages * (n + 1) / threads * page))
            .map(|(from, to)| {
                let part = thread::Builder::new().spawn_scoped(scope, move || fill(from, to));
                part.map_err(|_| (from, to))
            })
            .collect();
        parts.into_iter().try_for_each(|part| match part {
            Ok(thread) => thread.join().unwrap_or(Err(FileError::NoPages)),
            Err((from, to)) => fill(from, to),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::background::may_make_no_thread;
    use crate::left::Watches;
    use crate::memory_file::Page;
    use crate::policy::{LendingPolicy, Who};
    use crate::tests::{BYTES, allows, config, daemon, is_root, with_capabilities};
    use crate::wire::KeepAs;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// What the kernel has is many reads, for which a program that starts would wait.
    #[test]
    fn a_file_that_is_long_enough_is_lent_without_a_look_at_the_kernels_pool() {
        let daemon = Daemon::new(PoolConfig { free: |_, _| panic!("looked"), ..config(&[1]) });
        daemon.gets(1);
        daemon.lends(0, BYTES).expect("it is ready");
    }

    /// It would be in the refusal, and in the log.
    #[test]
    fn no_long_name_is_said_again() {
        let daemon = daemon(&[]);
        let refusal = |wish| daemon.lease(&Asker::user(0), 7, &wish).expect_err("no such name").message.len();
        let (name, wish) = ("x".repeat(MOST_NAME + 1), Wish::of(1));
        assert!(refusal(Wish { template: Some(name.clone()), ..wish.clone() }) < 100);
        assert!(refusal(Wish { keep: Some(KeepAs { name, secret: None }), ..wish }) < 100);
    }

    /// Who asks again and again for more than can be had does not keep what is ready from others.
    #[test]
    fn a_file_that_cannot_grow_stays_ready() {
        let daemon = daemon(&[1]);
        daemon.gets(1);
        let refusal = |bytes| daemon.lends(0, bytes).expect_err("too long").message;
        // The kernel refuses at once.
        let long = 1 << 63;
        assert!(refusal(long).contains("ftruncate"), "tried");
        assert!(refusal(long).contains("just now") && refusal(long + BYTES).contains("just now"), "not again");
        assert!(refusal(long - BYTES).contains("just now"), "nor for a page less");
        assert_eq!(daemon.state().growth(), (long - BYTES) / 2, "much less may be had");
        daemon.state().short = Some((BYTES, Instant::now()));
        assert!(refusal(long).contains("ftruncate"), "tried again, later");
        // As after a try that took long, of more than twice as much.
        let until = Instant::now() + Duration::from_secs(60);
        daemon.state().short = Some((long, until));
        assert!(refusal(long).contains("ftruncate"), "less than that");
        assert_eq!(daemon.state().short.map(|(_, until)| until), Some(until), "a short try ends no long pause");
        let (leased, file) = daemon.lends(0, BYTES).expect("nobody else waits");
        drop(file);
        assert!(daemon.state().growth() < long);
        daemon.end(leased.lease);
        assert_eq!(daemon.state().growth(), u64::MAX, "its memory is there again");
    }

    /// What cannot be lent stays ready if it is as long as it was, and is gone if not: a file that was cut has a hole where its end was.
    #[test]
    fn what_cannot_be_lent_is_full_or_not_ready() {
        if !is_root("may give files to others, and can give that up") {
            return;
        }
        let config = PoolConfig { policy: allows(61_010, 1_000_000_000), ..config(&[2]) };
        let refusal = |daemon: &Daemon, bytes| daemon.lends(61_010, bytes).expect_err("as planted").message;
        let is_as_it_was = |daemon: &Daemon| {
            let state = daemon.state();
            let found = rustix::fs::fstat(&state.ready[0]).expect("a file");
            assert_eq!((state.ready[0].bytes(), found.st_size as u64), (2 * BYTES, 2 * BYTES));
            assert_eq!((found.st_mode & 0o777, found.st_uid), (0, 0), "the next daemon may adopt it");
        };
        let daemon = Daemon::new(config.clone());
        daemon.gets(2);
        for (pages, ready) in [(2, vec![2 * BYTES]), (1, vec![])] {
            let message = with_capabilities(0, || refusal(&daemon, pages * BYTES));
            assert!(message.contains("CAP_CHOWN"), "{message}");
            assert_eq!(daemon.status().ready, ready);
            (pages == 2).then(|| is_as_it_was(&daemon));
        }
        // Where nothing can be watched nothing is cut.
        let daemon = Daemon { watches: Watches::broken(), ..Daemon::new(config) };
        daemon.gets(2);
        for pages in [2, 1] {
            assert!(refusal(&daemon, pages * BYTES).contains("inotify"));
            is_as_it_was(&daemon);
        }
        // What is drained meanwhile is not ready again.
        daemon.state().drained = true;
        assert!(refusal(&daemon, BYTES).contains("inotify"));
        assert!(daemon.status().ready.is_empty());
    }

    /// The daemon's threads have a limit (TasksMax, RLIMIT_NPROC), which others may use up.
    #[test]
    fn a_file_grows_where_no_thread_can_be_had() {
        if !is_root("can be another user, whom alone the limit holds for") {
            return;
        }
        let daemon = Daemon::new(PoolConfig { policy: LendingPolicy::closed(61_009), ..config(&[1]) });
        let alone = || {
            may_make_no_thread(61_009);
            daemon.gets(1);
            daemon.lends(61_009, 2 * BYTES).map(|(leased, _)| leased.filled_late)
        };
        let leased = std::thread::scope(|scope| scope.spawn(alone).join().expect("no panic"));
        match &leased {
            Ok(late) => assert_eq!(*late, BYTES),
            // This machine has no huge pages for files; whatever it is, nothing is lent.
            Err(refused) => assert!(refused.message.contains("huge pages"), "{refused:?}"),
        }
        assert_eq!(daemon.status().leases.len(), usize::from(leased.is_ok()));
    }

    /// A daemon that is told another policy knows what is out.
    #[test]
    fn another_policy_does_not_forget_what_is_out() {
        let daemon = daemon(&[1]);
        let policy = |pages: u64| allows(61_008, pages * BYTES);
        let lease = || {
            daemon.gets(1);
            daemon.lends(61_008, BYTES)
        };
        if !is_root("gives files away") {
            return;
        }
        assert_eq!(lease().expect_err("not named").kind, RefusedKind::LendingPolicy);
        daemon.set_policy(policy(1));
        let _out = lease().expect("as much as is allowed");
        daemon.set_policy(policy(1));
        assert!(lease().expect_err("it has that").message.contains("leased already"));
        daemon.set_policy(policy(2));
        lease().expect("one more");
    }

    /// Whoever leases again and again has no more than what it has not given back, whether it says so or not.
    #[test]
    fn what_nobody_has_any_more_does_not_count() {
        if !is_root("gives files away") {
            return;
        }
        let daemon = Daemon::new(PoolConfig { policy: allows(61_006, 2 * BYTES), ..config(&[1]) });
        let lease = || {
            daemon.gets(1);
            daemon.lends(61_006, BYTES)
        };
        let leases = || daemon.status().leases.iter().map(|lent| lent.lease).collect::<Vec<_>>();
        let (first, file) = lease().expect("the first");
        for _ in 0..4 {
            let (leased, back) = lease().expect("one of two");
            assert_eq!(leases(), [first.lease, leased.lease]);
            drop(back);
            assert_eq!(leases(), [first.lease]);
        }
        let _second = lease().expect("one of two");
        assert_eq!(daemon.state().leases.len(), 2);
        assert!(lease().expect_err("it has two").message.contains("leased already"));
        drop(file);
        lease().expect("one is back");
    }

    /// What is being given counts already: two requests at once do not pass the quota together.
    #[test]
    fn two_at_once_do_not_pass_the_quota() {
        static CALLS: AtomicU32 = AtomicU32::new(0);
        static GATE: Barrier = Barrier::new(2);
        if !is_root("gives files away") {
            return;
        }
        // Asked when a file that was taken is to grow: the first who does so stays there.
        let free = |_: Page, _| {
            if CALLS.fetch_add(1, Ordering::Relaxed) == 0 {
                GATE.wait();
                GATE.wait();
            }
            Some(u64::MAX)
        };
        let daemon = Daemon::new(PoolConfig { free, policy: allows(61_007, 2 * BYTES), ..config(&[1; 2]) });
        (0..2).for_each(|_| daemon.gets(1));
        let lease = || daemon.lends(61_007, 2 * BYTES);
        let (first, second) = std::thread::scope(|scope| {
            let first = scope.spawn(lease);
            GATE.wait();
            let second = lease();
            GATE.wait();
            (first.join().expect("no panic"), second)
        });
        assert!(second.expect_err("no more than one").message.contains("leased already"));
        // Not every machine has huge pages for files.
        assert!(first.is_ok() || first.is_err_and(|refused| refused.message.contains("not to be had")));
    }

    /// Whatever happens to the thread that leases, nothing is lent to it.
    #[test]
    fn a_lease_that_is_not_given_is_not_counted() {
        let daemon = daemon(&[1]);
        let panics = || {
            let _entered =
                Entered { daemon: &daemon, lease: daemon.state().enter((0, Who::User(0)), 7, 1, None, None) };
            panic!("as planted");
        };
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
        assert!(daemon.status().leases.is_empty());
    }

    /// What is filled while somebody waits is not taken from what is left to others.
    #[test]
    fn a_file_that_grows_leaves_what_is_to_be_left() {
        let free = |_, _| Some(3 * BYTES);
        let daemon = Daemon::new(PoolConfig { free, keep_free: 2 * BYTES, ..config(&[1]) });
        daemon.gets(1);
        let refused = daemon.lends(0, 3 * BYTES).expect_err("one page may be had");
        assert!(refused.message.contains("no free huge page"), "{refused:?}");
        assert_eq!(daemon.status().ready, [BYTES], "and nothing was tried");
    }

    /// What is filled while somebody waits comes from where the answer says.
    #[test]
    fn a_file_grows_on_its_own_node() {
        // Which no machine has.
        let daemon = Daemon::new(PoolConfig { node: Some(1023), ..config(&[1]) });
        daemon.gets(1);
        let refused = daemon.lends(0, 3 * BYTES).expect_err("no such node");
        assert!(refused.message.contains("set_mempolicy"), "{refused:?}");
    }
}
