//! Keeping: memory that its owner leases again, by a name and a secret.

use super::lend::Entered;
use super::{Daemon, KeptEntry, refused};
use crate::kept::Kept;
use crate::left::unknown;
use crate::memory_file::{MemoryFile, node_of};
use crate::policy::{Asker, Who};
use crate::service;
use crate::status::Left;
use crate::wire::{Forget, KeepAs, Leased, Refused, RefusedKind, Wish};
use rustix::io::Errno;
use rustix::rand::GetRandomFlags;
use serde_json::json;
use std::collections::btree_map::Entry;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

impl Daemon {
    /// Takes memory that a predecessor kept. Whether somebody has it, [`Kept`] knows.
    pub fn adopt_kept(&self, kept: Vec<Kept>) {
        let mut state = self.state();
        for memory in kept {
            let entry = KeptEntry { memory: Arc::new(memory), lease: None, watch: None };
            // A predecessor that ended had just lent a name twice.
            if let Some(other) = state.kept.insert(entry.memory.key(), entry) {
                service::let_go_of_kept(&other.memory);
            }
        }
    }

    /// Has it watched who has memory that a user kept with a predecessor, if it is not. Without a watch it counts for as long as it is
    /// kept. May wait for that user.
    fn watch_kept(&self, key: &(u32, String)) -> Result<(), Errno> {
        let unwatched = {
            let state = self.state();
            state.kept.get(key).filter(|kept| kept.watch.is_none()).map(|kept| Arc::clone(&kept.memory))
        };
        let Some(memory) = unwatched else { return Ok(()) };
        let watch = Some(memory.watch(&self.watches)?);
        let mut state = self.state();
        // Another may have the name by now.
        let is_it = |entry: &&mut KeptEntry| Arc::ptr_eq(&entry.memory, &memory);
        let Some(entry) = state.kept.get_mut(key).filter(is_it) else { return Ok(()) };
        let lease = entry.lease;
        entry.watch = watch;
        if let Some(lease) = lease.and_then(|lease| state.leases.get_mut(&lease)) {
            lease.watch = watch;
        }
        Ok(())
    }

    /// Enters a new lease among those that are kept, if its client wants that.
    pub(super) fn keep(
        &self,
        whose: (&Asker, Who),
        mut leased: Leased,
        file: MemoryFile,
        keep: Option<&KeepAs>,
    ) -> Result<(Leased, OwnedFd), Refused> {
        let Some(keep) = keep else { return Ok((leased, file.into_fd())) };
        let uid = whose.0.uid;
        let new = |secret: String| {
            let memory = Kept::new(file.into_fd(), whose, keep.name.clone(), secret)?;
            Ok(memory.lend()?.map(|lent| (memory, lent)))
        };
        let refusal = match secret().map(new) {
            Some(Ok(Some((memory, lent)))) => {
                let mut state = self.state();
                let watch = state.leases.get(&leased.lease).and_then(|lease| lease.watch);
                let has = state.kept.keys().filter(|(user, _)| *user == uid).count();
                match state.kept.entry(memory.key()) {
                    Entry::Vacant(entry) if has < MOST_KEPT => {
                        leased.secret = Some(memory.secret().to_owned());
                        let memory = Arc::new(memory);
                        entry.insert(KeptEntry { memory: Arc::clone(&memory), lease: Some(leased.lease), watch });
                        drop(state);
                        // With nothing locked: the manager may be slow. Who forgets it meanwhile has written that into it.
                        service::store_kept(&memory);
                        return Ok((leased, lent));
                    }
                    Entry::Vacant(_) => format!("this user has {has} names already; forget one (hugemm pool forget)"),
                    Entry::Occupied(_) => "another program has just taken that name".to_owned(),
                }
            }
            Some(Err(error)) => {
                let error: io::Error = error;
                format!("the memory cannot be kept: {error}; lease without --keep")
            }
            Some(Ok(None)) => "somebody else has the memory; lease again".to_owned(),
            None => "there is no random number for kept memory; lease without --keep".to_owned(),
        };
        Err(refused(RefusedKind::Kept, refusal))
    }

    /// Leases kept memory to its owner again; `None` if there is none of that name.
    pub(super) fn resume(
        &self,
        asker: &Asker,
        pid: u32,
        wish: &Wish,
        keep: &KeepAs,
    ) -> Option<Result<(Leased, OwnedFd), Refused>> {
        let key = (asker.uid, keep.name.clone());
        let no = |message: &str| Some(Err(refused(RefusedKind::Kept, message)));
        let (entered, memory) = {
            let mut state = self.state();
            let kept = state.kept.get_mut(&key)?;
            let (memory, node) = (Arc::clone(&kept.memory), node_of(kept.memory.memory()));
            if keep.secret.as_deref() != Some(memory.secret()) {
                return no(
                    "memory is kept under this name, and the secret is not the one that its first lease was given",
                );
            }
            if kept.lease.is_some() {
                return no("the kept memory is in use");
            }
            if memory.bytes() != wish.bytes {
                return no(&format!("the kept memory has {} bytes", memory.bytes()));
            }
            if wish.page.is_some_and(|page| page != memory.page()) || wish.node.is_some() && wish.node != node {
                return no("the kept memory has other pages, or is not from that node alone; ask without --page and \
                     --node, or forget it");
            }
            let (whose, watch) = ((asker.uid, memory.account()), kept.watch);
            let lease = state.enter(whose, pid, wish.bytes, Some(keep.name.clone()), watch);
            if let Some(kept) = state.kept.get_mut(&key) {
                kept.lease = Some(lease);
            }
            (Entered { daemon: self, lease }, memory)
        };
        // With nothing locked: its owner can have this wait. A lease ends with whoever asked for it, and the program may go on: in the
        // background, started by another, before a restart.
        let file = match memory.lend() {
            Ok(Some(file)) => file,
            Ok(None) => return no("the kept memory is in use: a program has it open or mapped"),
            Err(error) => return no(&format!("the kept memory cannot be opened: {error}")),
        };
        if rustix::fs::fstat(&file).map(|stat| stat.st_size as u64) != Ok(wish.bytes) {
            return no("its owner has made the kept memory longer or shorter; forget it");
        }
        // Now that nobody else has it.
        if let Err(why) = self.watch_kept(&key)
            && !self.may_command(asker)
        {
            return no(&unknown(why));
        }
        let lease = entered.lease;
        std::mem::forget(entered);
        let (page, node, secret) = (memory.page(), node_of(memory.memory()), Some(memory.secret().to_owned()));
        Some(Ok((Leased { lease, bytes: wish.bytes, page, node, filled_late: 0, secret, resumed: true }, file)))
    }

    #[cfg(test)]
    pub(crate) fn first_kept(&self) -> Arc<Kept> {
        self.state().kept.values().next().map(|kept| Arc::clone(&kept.memory)).expect("kept")
    }

    /// Keeps memory no more.
    ///
    /// # Errors
    ///
    /// [`Refused`]: there is none, or it is another's.
    pub fn forget(&self, asker: &Asker, forget: &Forget) -> Result<(), Refused> {
        let commands = self.may_command(asker);
        let uid = forget.uid.filter(|_| commands).unwrap_or(asker.uid);
        let key = (uid, forget.keep.name.clone());
        // Whoever commands waits for no owner.
        let watched = if commands { Ok(()) } else { self.watch_kept(&key) };
        let mut state = self.state();
        match state.kept.get(&key) {
            None => {
                Err(refused(RefusedKind::Kept, format!("nothing is kept as `{}` for user {uid}", forget.keep.name)))
            }
            // Its user may have ended before the secret was written down; what nobody has is nobody's loss but that user's.
            Some(kept)
                if !commands && kept.is_in_use() && forget.keep.secret.as_deref() != Some(kept.memory.secret()) =>
            {
                let message = "it is in use, and the secret is not the one that the first lease was given";
                Err(refused(RefusedKind::Kept, message))
            }
            // It would count no more.
            Some(kept) if let (Err(why), true) = (watched, kept.is_in_use()) => {
                Err(refused(RefusedKind::Kept, unknown(why)))
            }
            Some(_) => {
                let kept = state.kept.remove(&key);
                // Whoever has it by a lease is said to have it by that.
                let free = kept.as_ref().filter(|kept| kept.lease.is_none());
                let of = |kept: &KeptEntry| Some((kept.watch?, kept.memory.account(), kept.memory.bytes()));
                if let Some((watch, account, bytes)) = free.and_then(of) {
                    state.left.push((watch, account, Left { uid, bytes }));
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
}

/// Most names of one user: a service manager holds two files for each.
const MOST_KEPT: usize = 32;

/// 128 random bits, in hexadecimal.
fn secret() -> Option<String> {
    let mut bytes = [0u8; 16];
    let got = rustix::rand::getrandom(&mut bytes, GetRandomFlags::empty()).ok()?;
    (got == bytes.len()).then(|| bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::left::Watches;
    use crate::own_file::tests::turn;
    use crate::tests::{BYTES, cache, cached, daemon, file, is_root, kept, stored, with_capabilities};
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    use std::fs::File;
    use std::os::fd::{AsFd, AsRawFd};

    /// The packaged unit leaves the daemon no capability but CAP_CHOWN: it may not read what is its users'.
    #[test]
    fn what_a_user_has_is_known_without_the_right_to_read_it() {
        if !is_root("has other users") {
            return;
        }
        let file = file(1);
        file.make_lent(1000, 1000).expect("root may");
        // Which whoever has it may do: it takes that right from itself.
        rustix::fs::fchmod(&file, rustix::fs::Mode::empty()).expect("root may");
        let copy = file.as_fd().try_clone_to_owned().expect("a descriptor");
        let (kept, owner, secret) = (kept(file, 1000), Asker::user(1000), Some("secret"));
        let daemon = daemon(&[1]);
        // CAP_CHOWN.
        let left = with_capabilities(1, || {
            daemon.adopt_kept(vec![kept]);
            let (leased, _) = daemon.lease(&owner, 7, &cached(secret)).expect("nobody has asked for it");
            daemon.end(leased.lease);
            daemon.forget(&owner, &Forget { keep: cache(secret), uid: None }).expect("its own");
            daemon.status().left
        });
        assert_eq!(left, [Left { uid: 1000, bytes: BYTES }], "somebody has it open");
        let owner = rustix::fs::fstat(&copy).expect("a file");
        assert_eq!((owner.st_uid, owner.st_gid), (1000, 1000), "and it is whose it was");
    }

    /// Whoever forgets what it has, and what nobody can watch, would have it for nothing.
    #[test]
    fn what_cannot_be_watched_is_not_forgotten_while_it_is_in_use() {
        let _turn = turn();
        let daemon = Daemon { watches: Watches::broken(), ..daemon(&[1]) };
        let kept = kept(file(1), 1000);
        let lent = kept.lend().expect("it may").expect("nobody has it");
        daemon.adopt_kept(vec![kept]);
        let forget = || daemon.forget(&Asker::user(1000), &Forget { keep: cache(Some("secret")), uid: None });
        assert!(forget().expect_err("it has it").message.contains("how long the memory is in use"));
        drop(lent);
        forget().expect("nobody has it");
    }

    /// Whose memory it is can have the kernel wait with that file, and nobody but itself with the daemon.
    #[test]
    fn nobody_waits_for_an_owner_but_itself() {
        let _turn = turn();
        let daemon = daemon(&[1]);
        daemon.gets(1);
        let root = &Asker::user(0);
        let (leased, file) = daemon.lease(root, 7, &cached(None)).expect("ready");
        let again = cached(leased.secret.as_deref());
        daemon.end(leased.lease);
        drop(file);
        let memory = daemon.first_kept();
        let resumed = std::thread::scope(|scope| {
            let waits = memory.has_turn();
            let resumed = scope.spawn(|| daemon.lease(root, 8, &again));
            while daemon.status().leases.is_empty() {
                std::thread::yield_now();
            }
            assert!(daemon.status().kept[0].in_use, "it is being given");
            let second = daemon.lease(root, 9, &again);
            assert_eq!(second.expect_err("in use").message, "the kept memory is in use");
            drop(waits);
            resumed.join().expect("no panic")
        });
        assert!(resumed.is_ok_and(|(resumed, _)| resumed.resumed));
    }

    /// What a predecessor kept counts as long as it was lent first, whatever its owner makes of it, and after it is forgotten as long as
    /// somebody has it. Of a name that was lent twice when the predecessor ended one is left.
    #[test]
    fn what_was_kept_before_a_restart_counts() {
        let _turn = turn();
        let daemon = daemon(&[1]);
        let root = &Asker::user(0);
        let left = [1, 2].into_iter().flat_map(|_| {
            let kept = kept(file(1), 0);
            rustix::fs::ftruncate(kept.memory(), 1 << 40).expect("its own");
            stored(&kept)
        });
        daemon.adopt_kept(Kept::find(left.collect()).kept);
        assert_eq!(daemon.status().kept.iter().map(|kept| kept.bytes).collect::<Vec<_>>(), [BYTES]);
        let wish = cached(Some("secret"));
        assert!(daemon.lease(root, 7, &wish).expect_err("of another length").message.contains("longer or shorter"));
        let memory = daemon.first_kept();
        rustix::fs::ftruncate(memory.memory(), BYTES).expect("its own");
        drop(memory);
        let (leased, file) = daemon.lease(root, 7, &wish).expect("as it was");
        daemon.forget(root, &Forget { keep: cache(Some("secret")), uid: None }).expect("its own");
        daemon.end(leased.lease);
        assert_eq!(daemon.status().left, [Left { uid: 0, bytes: BYTES }], "somebody has it");
        drop(file);
        assert!(daemon.status().left.is_empty());
    }

    /// A manager holds two files for each name, and has room for so many.
    #[test]
    fn a_user_has_few_names() {
        let daemon = daemon(&[1]);
        let keep = |n: usize| {
            daemon.gets(1);
            let keep = Some(KeepAs { name: n.to_string(), secret: None });
            daemon.lease(&Asker::user(0), 7, &Wish { keep, ..Wish::of(BYTES) })
        };
        assert!((0..MOST_KEPT).all(|n| keep(n).is_ok()));
        let refused = keep(MOST_KEPT).expect_err("too many");
        assert!(refused.message.contains("hugemm pool forget"), "{refused:?}");
        assert_eq!((daemon.status().kept.len(), daemon.status().leases.len()), (MOST_KEPT, MOST_KEPT));
    }

    /// A program may go on when whoever leased for it has ended (it went to the background, it was given the descriptor), and when the
    /// daemon has: as long as it has the memory, or maps it, nobody else is given that.
    #[test]
    fn kept_memory_is_given_to_one_program_at_a_time() {
        let _turn = turn();
        let first = daemon(&[1]);
        first.gets(1);
        let root = &Asker::user(0);
        let (leased, file) = first.lease(root, 7, &cached(None)).expect("ready");
        let again = |daemon: &Daemon| daemon.lease(root, 8, &cached(leased.secret.as_deref()));
        let refused = |daemon: &Daemon| {
            let message = again(daemon).expect_err("somebody has it").message;
            assert!(message.contains("in use"), "{message}");
        };
        refused(&first);
        first.end(leased.lease);
        refused(&first);
        assert!(first.status().kept[0].in_use);
        let given = file.try_clone().expect("a descriptor");
        drop(file);
        refused(&first);
        // As what `@LEASE@` names is opened, and what was inherited closed.
        let by_path = File::options().read(true).write(true).open(format!("/proc/self/fd/{}", given.as_raw_fd()));
        let copy = by_path.expect("its own");
        drop(given);
        refused(&first);
        let left = first.state().kept.values().flat_map(|kept| stored(&kept.memory)).collect();
        drop(first);
        let next = daemon(&[1]);
        next.adopt_kept(Kept::find(left).kept);
        refused(&next);
        let (rights, flags) = (ProtFlags::READ, MapFlags::SHARED);
        // SAFETY: at an address of the kernel's choice; nothing is touched there.
        let mapping = unsafe { mmap(std::ptr::null_mut(), 4096, rights, flags, &copy, 0) }.expect("mapped");
        drop(copy);
        refused(&next);
        // SAFETY: mapped above, and nobody uses it.
        unsafe { munmap(mapping, 4096) }.expect("unmapped");
        let (resumed, file) = again(&next).expect("nobody has it");
        assert!(resumed.resumed && next.status().kept[0].in_use);
        next.end(resumed.lease);
        drop(file);
        assert!(!next.status().kept[0].in_use);
    }
}
