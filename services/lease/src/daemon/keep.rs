//! Keeping: memory that its owner leases again, by a name and a secret.

use super::{Daemon, KeptEntry, refused};
use crate::kept::Kept;
use crate::memory_file::{MemoryFile, node_of};
use crate::policy::Asker;
use crate::service;
use crate::status::Left;
use crate::wire::{Forget, KeepAs, Leased, Refused, RefusedKind};
use rustix::rand::GetRandomFlags;
use serde_json::json;
use std::collections::btree_map::Entry;
use std::io;
use std::os::fd::OwnedFd;

impl Daemon {
    /// Takes memory that a predecessor kept. Whether somebody has it, [`Kept`] knows.
    pub fn adopt_kept(&self, memory: Kept) {
        // Without a watch it counts for as long as it is kept.
        let watch = self.watches.add_lent(memory.memory()).ok();
        self.state().kept.insert(memory.key(), KeptEntry { memory, lease: None, watch });
    }

    /// Enters a new lease among those that are kept, if its client wants that.
    pub(super) fn keep(
        &self,
        asker: &Asker,
        mut leased: Leased,
        file: MemoryFile,
        keep: Option<&KeepAs>,
    ) -> Result<(Leased, OwnedFd), Refused> {
        let Some(keep) = keep else { return Ok((leased, file.into_fd())) };
        let new = |secret: String| {
            let whose = (asker.uid, self.policy().account(asker));
            let memory = Kept::new(file.into_fd(), whose, keep.name.clone(), secret)?;
            Ok(memory.lend()?.map(|lent| (memory, lent)))
        };
        let refusal = match secret().map(new) {
            Some(Ok(Some((memory, lent)))) => {
                let mut state = self.state();
                let watch = state.leases.get(&leased.lease).and_then(|lease| lease.watch);
                if let Entry::Vacant(entry) = state.kept.entry(memory.key()) {
                    service::store_kept(&memory);
                    leased.secret = Some(memory.secret().to_owned());
                    entry.insert(KeptEntry { memory, lease: Some(leased.lease), watch });
                    return Ok((leased, lent));
                }
                "another program has just taken that name".to_owned()
            }
            Some(Err(error)) => {
                let error: io::Error = error;
                format!("the memory cannot be kept: {error}; lease without --keep")
            }
            None | Some(Ok(None)) => "there is no random number for kept memory; lease without --keep".to_owned(),
        };
        Err(refused(RefusedKind::Kept, refusal))
    }

    /// Leases kept memory to its owner again; `None` if there is none of that name.
    pub(super) fn resume(
        &self,
        asker: &Asker,
        pid: u32,
        (bytes, wanted): (u64, Option<u32>),
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
        let node = node_of(kept.memory.memory());
        if wanted.is_some() && wanted != node {
            return no("the kept memory is not from that node alone; ask without --node, or forget it");
        }
        // Its lease ends with whoever asked for it, and the program may go on: in the background, started by another, before a restart.
        let file = match kept.memory.lend() {
            Ok(Some(file)) => file,
            Ok(None) => return no("the kept memory is in use: a program has it open or mapped"),
            Err(error) => return no(&format!("the kept memory cannot be opened: {error}")),
        };
        let (page, secret) = (kept.memory.page(), kept.memory.secret().to_owned());
        let watch = kept.watch;
        let whose = (asker.uid, kept.memory.account());
        let lease = state.enter(whose, pid, bytes, Some(keep.name.clone()), watch);
        if let Some(kept) = state.kept.get_mut(&key) {
            kept.lease = Some(lease);
        }
        let secret = Some(secret);
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
                if !commands && kept.is_in_use() && forget.keep.secret.as_deref() != Some(kept.memory.secret()) =>
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
    use crate::wire::Wish;
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    use std::fs::File;
    use std::os::fd::{AsFd, AsRawFd};

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
        let kept = Kept::new(file.into_fd(), whose, "cache".to_owned(), "secret".to_owned()).expect("a record");
        let daemon = Daemon::new(PoolConfig::new(page, Shapes(vec![page.bytes()]), page.bytes(), 0));
        let left = || {
            const CHOWN: u32 = 1;
            let (head, sets) = ([0x2008_0522_u32, 0], [CHOWN, CHOWN, 0, 0, 0, 0]);
            // SAFETY: the capabilities of this thread alone; both outlive the call (capset(2), version 3).
            assert_eq!(unsafe { libc::syscall(libc::SYS_capset, head.as_ptr(), sets.as_ptr()) }, 0);
            daemon.adopt_kept(kept);
            let keep = KeepAs { name: "cache".to_owned(), secret: Some("secret".to_owned()) };
            let wish = Wish { keep: Some(keep.clone()), ..Wish::of(page.bytes()) };
            let (leased, _) = daemon.lease(&Asker::user(1000), 7, &wish).expect("nobody has asked for it");
            daemon.end(leased.lease);
            daemon.forget(&Asker::user(1000), &Forget { keep, uid: None }).expect("its own");
            daemon.status().left
        };
        let left = std::thread::scope(|scope| scope.spawn(left).join().expect("no panic"));
        assert_eq!(left, [Left { uid: 1000, bytes: page.bytes() }], "somebody has it open");
        let owner = rustix::fs::fstat(&copy).expect("a file");
        assert_eq!((owner.st_uid, owner.st_gid), (1000, 1000), "and it is whose it was");
    }

    /// A program may go on when whoever leased for it has ended (it went to the background, it was given the descriptor), and when the
    /// daemon has: as long as it has the memory, or maps it, nobody else is given that.
    #[test]
    fn kept_memory_is_given_to_one_program_at_a_time() {
        let page = Page::Transparent;
        let daemon = || Daemon::new(PoolConfig::new(page, Shapes(vec![page.bytes()]), page.bytes(), 0));
        let first = daemon();
        let keep = |secret| Wish { keep: Some(KeepAs { name: "cache".to_owned(), secret }), ..Wish::of(page.bytes()) };
        first.fill_ended(Some(MemoryFile::new(page, page.bytes()).expect("a file")));
        let root = &Asker::user(0);
        let (leased, file) = first.lease(root, 7, &keep(None)).expect("ready");
        let again = |daemon: &Daemon| daemon.lease(root, 8, &keep(leased.secret.clone()));
        let refused = |daemon: &Daemon| {
            let message = again(daemon).expect_err("somebody has it").message;
            assert!(message.contains("in use") && daemon.status().kept[0].in_use, "{message}");
        };
        refused(&first);
        first.end(leased.lease);
        refused(&first);
        let given = file.try_clone().expect("a descriptor");
        drop(file);
        refused(&first);
        // As what `@LEASE@` names is opened, and what was inherited closed.
        let by_path = File::options().read(true).write(true).open(format!("/proc/self/fd/{}", given.as_raw_fd()));
        let copy = by_path.expect("its own");
        drop(given);
        refused(&first);
        let left = {
            let state = first.state();
            state.kept.values().flat_map(|kept| kept.memory.both().map(|fd| fd.try_clone_to_owned())).collect()
        };
        let left: io::Result<_> = left;
        drop(first);
        let next = daemon();
        Kept::find(left.expect("descriptors")).0.into_iter().for_each(|kept| next.adopt_kept(kept));
        refused(&next);
        let (rights, flags) = (ProtFlags::READ, MapFlags::SHARED);
        // SAFETY: at an address of the kernel's choice; nothing is touched there.
        let mapping = unsafe { mmap(std::ptr::null_mut(), 4096, rights, flags, &copy, 0) }.expect("mapped");
        drop(copy);
        refused(&next);
        // SAFETY: mapped above, and nobody uses it.
        unsafe { munmap(mapping, 4096) }.expect("unmapped");
        assert!(!next.status().kept[0].in_use);
        let (resumed, file) = again(&next).expect("nobody has it");
        assert!(resumed.resumed && next.status().kept[0].in_use);
        drop(file);
        refused(&next);
    }
}
