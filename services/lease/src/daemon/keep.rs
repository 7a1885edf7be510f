//! Keeping: memory that its owner leases again, by a name and a secret.

use super::{Daemon, KeptEntry, refused};
use crate::kept::{Kept, OwnerProcess};
use crate::memory_file::MemoryFile;
use crate::policy::Asker;
use crate::service;
use crate::status::Left;
use crate::wire::{Forget, KeepAs, Leased, Refused, RefusedKind};
use rustix::rand::GetRandomFlags;
use serde_json::json;
use std::collections::btree_map::Entry;
use std::os::fd::{AsFd, OwnedFd};

impl Daemon {
    /// Takes memory that a predecessor kept; if its program still runs, with a lease, which is returned.
    pub fn adopt_kept(&self, memory: Kept, running: Option<OwnerProcess>) -> Option<u64> {
        let mut state = self.state();
        let (uid, name) = memory.key();
        let whose = (uid, memory.account());
        // Without a watch it counts for as long as it is kept.
        let watch = memory.memory().ok().and_then(|file| self.watches.add_lent(file).ok());
        let lease = running.map(|owner| state.enter(whose, owner.pid(), memory.bytes(), Some(name.clone()), watch));
        state.kept.insert((uid, name), KeptEntry { memory, lease, watch });
        lease
    }

    /// Enters a new lease among those that are kept, if its client wants that.
    pub(super) fn keep(
        &self,
        asker: &Asker,
        pid: u32,
        mut leased: Leased,
        file: MemoryFile,
        keep: Option<&KeepAs>,
    ) -> Result<(Leased, OwnedFd), Refused> {
        let Some(keep) = keep else { return Ok((leased, file.into_fd())) };
        let new = |secret: String| {
            let memory = file.as_fd().try_clone_to_owned()?;
            Kept::new(
                memory,
                (asker.uid, self.policy().account(asker)),
                keep.name.clone(),
                secret,
                OwnerProcess::of(pid),
            )
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
        Err(refused(RefusedKind::Kept, refusal))
    }

    /// Leases kept memory to its owner again; `None` if there is none of that name.
    pub(super) fn resume(
        &self,
        asker: &Asker,
        pid: u32,
        bytes: u64,
        keep: &KeepAs,
    ) -> Option<Result<(Leased, OwnedFd), Refused>> {
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
        let whose = (asker.uid, kept.memory.account());
        let lease = state.enter(whose, pid, bytes, Some(keep.name.clone()), watch);
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
    pub fn forget(&self, asker: &Asker, forget: &Forget) -> Result<(), Refused> {
        let commands = self.may_command(asker);
        let uid = forget.uid.filter(|_| commands).unwrap_or(asker.uid);
        let mut state = self.state();
        let key = (uid, forget.keep.name.clone());
        match state.kept.get(&key) {
            None => {
                Err(refused(RefusedKind::Kept, format!("nothing is kept as `{}` for user {uid}", forget.keep.name)))
            }
            // Its user may have ended before the secret was written down; what nobody has is nobody's loss but that user's.
            Some(kept)
                if !commands && kept.lease.is_some() && forget.keep.secret.as_deref() != Some(kept.memory.secret()) =>
            {
                let message = "it is in use, and the secret is not the one that the first lease was given";
                Err(refused(RefusedKind::Kept, message))
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

/// 128 random bits, in hexadecimal.
fn secret() -> Option<String> {
    let mut bytes = [0u8; 16];
    let got = rustix::rand::getrandom(&mut bytes, GetRandomFlags::empty()).ok()?;
    (got == bytes.len()).then(|| bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::PoolConfig;
    use crate::memory_file::Page;
    use crate::policy::Who;
    use crate::stock::Shapes;

    /// The packaged unit leaves the daemon no capability but CAP_CHOWN: it may not read what is its users'.
    #[test]
    fn what_a_user_has_is_known_without_the_right_to_read_it() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root has other users");
            return;
        }
        let page = Page::Transparent;
        let file = MemoryFile::new(page, page.bytes()).expect("a file");
        file.make_lent(1000, 1000).expect("root may");
        let copy = file.as_fd().try_clone_to_owned().expect("a descriptor");
        let whose = (1000, Who::User(1000));
        let kept = Kept::new(file.into_fd(), whose, "cache".to_owned(), "secret".to_owned(), None).expect("a record");
        let daemon = Daemon::new(PoolConfig::new(page, Shapes(vec![page.bytes()]), page.bytes(), 0));
        let left = || {
            const CHOWN: u32 = 1;
            let (head, sets) = ([0x2008_0522_u32, 0], [CHOWN, CHOWN, 0, 0, 0, 0]);
            // SAFETY: the capabilities of this thread alone; both outlive the call (capset(2), version 3).
            assert_eq!(unsafe { libc::syscall(libc::SYS_capset, head.as_ptr(), sets.as_ptr()) }, 0);
            daemon.adopt_kept(kept, None);
            let keep = KeepAs { name: "cache".to_owned(), secret: Some("secret".to_owned()) };
            daemon.forget(&Asker::user(1000), &Forget { keep, uid: None }).expect("its own");
            daemon.status().left
        };
        let left = std::thread::scope(|scope| scope.spawn(left).join().expect("no panic"));
        assert_eq!(left, [Left { uid: 1000, bytes: page.bytes() }], "somebody has it open");
        let owner = rustix::fs::fstat(&copy).expect("a file");
        assert_eq!((owner.st_uid, owner.st_gid), (1000, 1000), "and it is whose it was");
    }
}
