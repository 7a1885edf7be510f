//! Templates: memory that is filled with a file's bytes, as long as the file is what was read.

use super::{Daemon, refused};
use crate::memory_file::MemoryFile;
use crate::policy::Asker;
use crate::status::TemplateMemory;
use crate::template::{Template, TemplateError, Version};
use crate::wire::{Refused, RefusedKind};
use serde_json::json;
use std::sync::{MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// How things stand with a template.
#[derive(Debug)]
pub(super) struct Filled {
    of: Template,
    /// The file as it was looked at last.
    version: Option<Version>,
    pub(super) ready: Option<MemoryFile>,
    /// Of the version.
    digest: Option<String>,
    /// Why nothing is filled, and when that was found.
    why: Option<(String, Instant)>,
}

/// For so long a client waits for a look at a file that another one has begun.
const SOON: Duration = Duration::from_secs(2);

/// The same for one that does not ask for that template alone.
const AT_ONCE: Duration = Duration::from_millis(100);

/// After that long a file that could not be read is tried again.
const AGAIN: Duration = Duration::from_secs(10);

impl Filled {
    pub(super) fn new(of: Template) -> Self {
        Filled { of, version: None, ready: None, digest: None, why: None }
    }

    /// How much is to be filled.
    pub(super) fn missing(&self, page: u64) -> Option<u64> {
        let bytes = self.version?.bytes.checked_next_multiple_of(page)?;
        (self.ready.is_none() && self.why.is_none()).then_some(bytes)
    }

    pub(super) fn about(&self) -> TemplateMemory {
        let why = self.why.as_ref().map(|(why, _)| why.clone());
        let (name, bytes) = (self.of.name.clone(), self.version.map(|version| version.bytes));
        TemplateMemory { name, bytes, ready: self.ready.is_some(), sha256: self.digest.clone(), why }
    }
}

impl Daemon {
    /// Looks whether the file of that template is the one that memory was filled with. To be called now and then; before each lease it is
    /// looked anyway. Waits as long as its disk does. Of a number that no template has, nothing.
    pub fn look_at_template(&self, index: usize) {
        if index < self.looks.len() {
            let _look = self.look(index);
            self.look_at(index);
        }
    }

    fn look(&self, index: usize) -> MutexGuard<'_, ()> {
        self.looks[index].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same for a client that waits so long: `None` if who has the turn waits for a disk that does not answer.
    fn look_soon(&self, index: usize, patience: Duration) -> Option<MutexGuard<'_, ()>> {
        let end = Instant::now() + patience;
        loop {
            match self.looks[index].try_lock() {
                Err(TryLockError::WouldBlock) if Instant::now() < end => std::thread::sleep(Duration::from_millis(1)),
                Err(TryLockError::WouldBlock) => return None,
                Err(TryLockError::Poisoned(turn)) => return Some(turn.into_inner()),
                Ok(turn) => return Some(turn),
            }
        }
    }

    fn look_at(&self, index: usize) {
        // With nothing locked that others want: the file may be far.
        let found = Version::of(&self.config.templates[index].path);
        let mut state = self.state();
        let filled = &mut state.templates[index];
        if found.as_ref().ok() == filled.version.as_ref() && found.is_ok() {
            if filled.why.as_ref().is_some_and(|(_, since)| since.elapsed() > AGAIN) {
                filled.why = None;
                self.changed.notify_all();
            }
            return;
        }
        let is_new = filled.version.is_none();
        filled.version = found.as_ref().ok().copied();
        (filled.digest, filled.why) = (None, found.err().map(|why| (why.to_string(), Instant::now())));
        let (old, why) = (filled.ready.take(), filled.why.as_ref().map(|(why, _)| why.clone()));
        self.changed.notify_all();
        drop(state);
        drop(old);
        if !is_new {
            self.log("template", json!({ "name": self.config.templates[index].name, "replaced": true, "why": why }));
        }
    }

    /// Which template a client means, and how long its memory is.
    ///
    /// # Errors
    ///
    /// [`Refused`]: there is none of that name for that user.
    pub(super) fn template(&self, asker: &Asker, name: &str) -> Result<Asked, Refused> {
        let index = self.config.templates.iter().position(|template| template.name == name);
        let look = index.map(|index| self.look_soon(index, SOON));
        if matches!(look, Some(None)) {
            let message = format!("template `{name}`: its disk does not answer; ask again when it does");
            return Err(refused(RefusedKind::Empty, message));
        }
        let found = index.map(|index| {
            self.look_at(index);
            let filled = &self.state().templates[index];
            (index, filled.version, filled.why.clone())
        });
        let found = found.filter(|(index, version, _)| {
            let path = &self.config.templates[*index].path;
            self.may_command(asker) || version.is_some_and(|version| version.is_readable_by(path, asker))
        });
        let page = self.config.page.bytes();
        match found {
            Some((index, Some(version), _)) => {
                Ok(Asked { index, version, bytes: version.bytes.next_multiple_of(page) })
            }
            Some((_, None, why)) => {
                let why = why.map_or("its file is not there".to_owned(), |(why, _)| why);
                Err(refused(RefusedKind::Empty, format!("template `{name}`: {why}")))
            }
            None => {
                let message =
                    format!("there is no template `{name}` whose file this user may read; serve it with --template");
                Err(refused(RefusedKind::Invalid, message))
            }
        }
    }

    /// Whether that user may read the file of a template, as it was looked at last: not while its disk does not answer.
    pub(super) fn may_read(&self, asker: &Asker, index: usize) -> bool {
        let Some(_look) = self.look_soon(index, AT_ONCE) else { return false };
        let version = self.state().templates[index].version;
        version.is_some_and(|version| version.is_readable_by(&self.config.templates[index].path, asker))
    }

    /// Memory that has the bytes of the file that was asked for, which may have been replaced since.
    pub(super) fn take_filled(&self, asked: &Asked) -> Result<MemoryFile, Refused> {
        let mut state = self.state();
        let filled = &mut state.templates[asked.index];
        let ready = if filled.version == Some(asked.version) { filled.ready.take() } else { None };
        ready.ok_or_else(|| {
            let why = filled.why.as_ref().map_or("it is being filled".to_owned(), |(why, _)| why.clone());
            refused(RefusedKind::Empty, format!("template `{}`: {why}", filled.of.name))
        })
    }

    /// Has memory ready that was taken for that and could not be lent.
    pub(super) fn put_filled_back(&self, asked: &Asked, file: MemoryFile) {
        let mut state = self.state();
        let drained = state.drained;
        let filled = &mut state.templates[asked.index];
        // It may have been filled again, or with another file.
        if !drained && filled.version == Some(asked.version) && filled.ready.is_none() {
            filled.ready = Some(file);
        }
    }

    /// All of a template's bytes are in `file`, or why not.
    pub(crate) fn template_ended(&self, index: usize, result: Result<(MemoryFile, Version, String), TemplateError>) {
        let path = &self.config.templates[index].path;
        let mut state = self.state();
        state.filling = None;
        let drained = state.drained;
        let filled = &mut state.templates[index];
        let result = result.and_then(|(file, version, digest)| {
            if filled.version != Some(version) {
                return Err(TemplateError::Changed(path.clone()));
            }
            match &filled.digest {
                Some(first) if *first != digest => Err(TemplateError::Differs(path.clone())),
                _ => Ok((file, digest)),
            }
        });
        let why = match result {
            Ok((file, digest)) => {
                filled.digest = Some(digest);
                // Never stored with a manager: the next daemon would take it for memory that is clear.
                filled.ready = (!drained).then_some(file);
                None
            }
            Err(why) => Some(why.to_string()),
        };
        filled.why = why.clone().map(|why| (why, Instant::now()));
        let about = filled.about();
        self.changed.notify_all();
        drop(state);
        self.log("template", about);
    }
}

/// A template that somebody asked for and may have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    index: usize,
    /// Of its file, when he was seen to be allowed to read it.
    version: Version,
    /// Its length, of whole pages of the pool.
    pub(super) bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::PoolConfig;
    use crate::tests::{BYTES, config, file};
    use rustix::io::Errno;

    /// Who asks for a template whose disk does not answer is told so soon, and its connection is free again.
    #[test]
    fn nobody_waits_for_a_disk_that_does_not_answer() {
        let templates = vec![Template { name: "snap".to_owned(), path: "/nowhere/snap".into() }];
        let daemon = Daemon::new(PoolConfig { templates, ..config(&[]) });
        let refusal = || daemon.template(&Asker::user(0), "snap").expect_err("none is there").message;
        let looks = daemon.look(0);
        assert!(refusal().contains("its disk does not answer"));
        drop(looks);
        assert!(refusal().contains("cannot be read"));
    }

    #[test]
    fn a_status_has_no_template_that_its_user_may_not_read() {
        use std::os::unix::fs::PermissionsExt;
        let path = std::env::temp_dir().join(format!("hugemm-templates-status-{}", std::process::id()));
        std::fs::write(&path, "snapshot").expect("written");
        let templates = vec![Template { name: "snap".to_owned(), path: path.clone() }];
        let daemon = Daemon::new(PoolConfig { templates, ..config(&[]) });
        let other = Asker { uid: u32::MAX - 1, gid: u32::MAX - 1, groups: Vec::new() };
        let sees = |mode| {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("its own");
            daemon.look_at_template(0);
            [&other, &Asker::user(0)].map(|asker| daemon.status_for(asker).templates.len())
        };
        assert_eq!([sees(0o600), sees(0o644)], [[0, 1], [1, 1]]);
        let look = daemon.look(0);
        assert_eq!(daemon.status_for(&other).templates.len(), 0, "its disk does not answer");
        drop(look);
        std::fs::remove_file(path).expect("removed");
    }

    /// Whatever was wrong with a reading, its memory is not lent, and why is said.
    #[test]
    fn what_was_read_badly_is_not_lent() {
        let [path, other] = ["good", "other"]
            .map(|name| std::env::temp_dir().join(format!("hugemm-templates-{name}-{}", std::process::id())));
        [&path, &other].iter().for_each(|path| std::fs::write(path, "snapshot").expect("written"));
        let [version, of_other] = [&path, &other].map(|path| Version::of(path).expect("a file"));
        let template = Template { name: "snap".to_owned(), path: path.clone() };
        let daemon = Daemon::new(PoolConfig { templates: vec![template], ..config(&[]) });
        daemon.look_at_template(0);
        let read = |version, digest: &str| daemon.template_ended(0, Ok((file(1), version, digest.to_owned())));
        let asked = Asked { index: 0, version, bytes: BYTES };
        let refusal = || daemon.take_filled(&asked).expect_err("nothing good was read").message;
        daemon.template_ended(0, Err(TemplateError::Unreadable { path: path.clone(), at: 4096, cause: Errno::IO }));
        assert!(refusal().contains("cannot be read at byte 4096: "));
        read(of_other, "first");
        assert!(refusal().contains("was changed, or replaced, while it was read"));
        read(version, "first");
        assert!(daemon.take_filled(&asked).is_ok());
        read(version, "second");
        assert!(refusal().contains("has other bytes than when it was read first"));
        read(version, "first");
        assert!(daemon.take_filled(&Asked { version: of_other, ..asked }).is_err(), "another file was asked for");
        assert!(daemon.take_filled(&asked).is_ok());
        read(version, "first");
        daemon.drain(false);
        assert!(daemon.status().templates[0].ready, "filling it again would take its time");
        daemon.drain(true);
        assert!(!daemon.status().templates[0].ready);
        [path, other].iter().for_each(|path| std::fs::remove_file(path).expect("removed"));
    }
}
