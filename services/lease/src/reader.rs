//! Reading a template's file by threads of its own: its disk, or whoever serves that, may not answer, and everything else is filled
//! meanwhile.

use crate::background::cpu_time;
use crate::daemon::Daemon;
use crate::memory_file::{FileError, MemoryFile};
use crate::template::{Source, TemplateError, Version};
use rustix::io::Errno;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A template's file.
#[derive(Debug)]
pub(crate) struct Reader {
    path: PathBuf,
    open: Option<Source>,
    /// Who asked last, and may still wait.
    asks: Option<JoinHandle<()>>,
    patience: Duration,
}

const STEP: Duration = Duration::from_millis(20);

/// For how long nothing may be read; a slow disk reads a part of a chunk in that time, for a thread that seldom has a CPU.
const PATIENCE: Duration = Duration::from_secs(30);

impl Reader {
    pub(crate) fn of(path: &Path) -> Self {
        Reader { path: path.to_owned(), open: None, asks: None, patience: PATIENCE }
    }

    /// What `ask` comes to, if it does so in time, or says in time that it goes on. No second thread is made as long as the last one waits.
    fn in_time<T: Send + 'static>(
        &mut self,
        daemon: &Daemon,
        ask: impl FnOnce(&dyn Fn()) -> T + Send + 'static,
    ) -> Result<T, TemplateError> {
        let silent = || TemplateError::Silent { path: self.path.clone(), seconds: self.patience.as_secs() };
        if self.asks.as_ref().is_some_and(|asks| !asks.is_finished()) {
            return Err(silent());
        }
        let (says, hears) = mpsc::channel();
        let asks = thread::Builder::new().name("reader".to_owned()).spawn(move || {
            let answer = ask(&|| drop(says.send(None)));
            drop(says.send(Some(answer)));
        });
        let asks = asks.map_err(|_| FileError::Refused { call: "clone", errno: Errno::AGAIN })?;
        let mut end = Instant::now() + self.patience;
        let answer = loop {
            match hears.recv_timeout(STEP) {
                // Who is told to stop does not wait for a disk.
                Err(RecvTimeoutError::Timeout) if Instant::now() < end && daemon.may_go_on(Duration::ZERO) => {}
                Ok(None) => end = Instant::now() + self.patience,
                answer => break answer.ok().flatten(),
            }
        };
        match answer {
            Some(answer) => {
                // What it has open it has no more.
                let _ = asks.join();
                Ok(answer)
            }
            None => {
                self.asks = Some(asks);
                Err(silent())
            }
        }
    }

    /// Opens it, and says which one it is.
    pub(crate) fn open(&mut self, daemon: &Daemon) -> Result<Version, TemplateError> {
        let path = self.path.clone();
        let source = self.in_time(daemon, move |_| Source::open(&path))??;
        let version = source.version;
        self.open = Some(source);
        Ok(version)
    }

    /// Reads a part of it, at the cost of so much CPU time.
    pub(crate) fn read(
        &mut self,
        daemon: &Daemon,
        into: &MemoryFile,
        from: u64,
        to: u64,
    ) -> Result<Duration, TemplateError> {
        let (Some(mut source), into) = (self.open.take(), into.try_clone()?) else { return Err(self.closed()) };
        let (source, read, cpu) = self.in_time(daemon, move |goes_on| {
            let read = source.read(&into, from, to, goes_on);
            (source, read, cpu_time())
        })?;
        self.open = Some(source);
        read.map(|()| cpu)
    }

    /// Its digest.
    pub(crate) fn end(&mut self, daemon: &Daemon) -> Result<String, TemplateError> {
        let Some(source) = self.open.take() else { return Err(self.closed()) };
        self.in_time(daemon, move |_| source.end())?
    }

    /// Of one that is not open.
    fn closed(&self) -> TemplateError {
        TemplateError::Changed(self.path.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::PoolConfig;
    use crate::memory_file::Page;
    use crate::stock::Shapes;

    /// Much is read at a time, where pages are large; a slow disk is not one that does not answer.
    #[test]
    fn a_file_that_is_read_slowly_is_read() {
        let mut reader = Reader { patience: Duration::from_secs(1), ..Reader::of(Path::new("/nowhere")) };
        let page = Page::Transparent;
        let daemon = &Daemon::new(PoolConfig::new(page, Shapes(Vec::new()), page.bytes(), 0));
        let slow = |goes_on: &dyn Fn()| {
            (0..8).for_each(|_| {
                thread::sleep(Duration::from_millis(200));
                goes_on();
            })
        };
        assert_eq!(reader.in_time(daemon, slow), Ok(()));
    }

    /// A disk that does not answer has one thread that waits for it, however often it is tried; when it answers, it is read again.
    #[test]
    fn a_file_that_does_not_answer_is_left() {
        let path = std::env::temp_dir().join(format!("hugemm-reader-{}", std::process::id()));
        std::fs::write(&path, "snapshot").expect("written");
        let mut reader = Reader { patience: Duration::from_millis(20), ..Reader::of(&path) };
        let page = Page::Transparent;
        let daemon = &Daemon::new(PoolConfig::new(page, Shapes(Vec::new()), page.bytes(), 0));
        let (answers, answered) = mpsc::channel::<()>();
        let silent = |result: Result<(), TemplateError>| {
            assert!(matches!(result, Err(TemplateError::Silent { .. })), "{result:?}");
        };
        silent(reader.in_time(daemon, move |_| answered.recv().map_or((), |()| ())));
        let (asked, asks) = mpsc::channel();
        (0..3).for_each(|_| {
            silent(reader.in_time(daemon, {
                let asked = asked.clone();
                move |_| asked.send(()).expect("heard")
            }))
        });
        reader.patience = PATIENCE;
        daemon.drain(true);
        let begun = Instant::now();
        let mut other = Reader::of(&path);
        let (_never, answers_never) = mpsc::channel::<()>();
        silent(other.in_time(daemon, move |_| answers_never.recv().map_or((), |()| ())));
        assert!(begun.elapsed() < PATIENCE, "who is told to stop waits for no disk");
        daemon.drain(false);
        drop((answers, asked));
        assert!(asks.recv().is_err(), "no second thread");
        while reader.asks.as_ref().is_some_and(|asks| !asks.is_finished()) {
            thread::yield_now();
        }
        let version = reader.open(daemon);
        std::fs::remove_file(&path).expect("removed");
        assert_eq!(version.expect("it answers again").bytes, 8);
    }
}
