//! A file in memory, whose reads and writes let others run.

#![allow(unreachable_pub, reason = "one test's modules")]

use hugemm_vm::{Cx, PageSource, Setup, SourceError, StoredPages};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

#[derive(Default)]
struct Content {
    bytes: Vec<u8>,
    /// Pages that are just becoming a hole: what is written back there is what they were.
    hole: Range<u64>,
}

pub struct File(Mutex<Content>);

impl File {
    /// So many pages of zeroes, for ever.
    pub fn new(pages: u64) -> &'static File {
        Box::leak(Box::new(File(Mutex::new(Content { bytes: vec![0; (pages << 12) as usize], ..Content::default() }))))
    }

    fn content(&self) -> MutexGuard<'_, Content> {
        self.0.lock().expect("one thread")
    }

    pub fn word(&self, at: u64) -> u64 {
        u64::from_le_bytes(self.content().bytes[at as usize..][..8].try_into().expect("eight"))
    }

    /// It has so many bytes from here on.
    pub fn resize(&self, bytes: u64) {
        self.content().bytes.resize(bytes as usize, 0);
    }

    /// Makes a hole, until `done`, which tells the object.
    pub fn punch<R>(&self, pages: Range<u64>, done: impl FnOnce() -> R) -> R {
        {
            let mut content = self.content();
            content.bytes[(pages.start << 12) as usize..(pages.end << 12) as usize].fill(0);
            content.hole = pages;
        }
        let done = done();
        self.content().hole = 0..0;
        done
    }
}

impl<S: Setup> PageSource<S> for File {
    fn bytes(&self) -> u64 {
        self.content().bytes.len() as u64
    }

    fn fill(&self, cx: &mut Cx<'_, S>, first: u64, pages: &mut [u8]) -> Result<usize, SourceError> {
        cx.cond_resched();
        // It may have become shorter.
        let filled = {
            let content = self.content();
            let rest = content.bytes.get((first << 12) as usize..).unwrap_or_default();
            let filled = rest.len().min(pages.len());
            pages[..filled].copy_from_slice(&rest[..filled]);
            filled
        };
        cx.cond_resched();
        Ok(filled)
    }

    fn write_back(&self, cx: &mut Cx<'_, S>, first: u64, pages: &StoredPages<'_>) -> Result<(), SourceError> {
        // A part at a time, of what it was before.
        let mut stored = vec![0; pages.bytes()];
        pages.copy_to(0, &mut stored);
        for (page, bytes) in (first..).zip(stored.chunks(1 << 12)) {
            cx.cond_resched();
            let mut content = self.content();
            let goes = content.hole.contains(&page);
            if let Some(to) = content.bytes.get_mut((page << 12) as usize..).filter(|_| !goes) {
                let kept = to.len().min(bytes.len());
                to[..kept].copy_from_slice(&bytes[..kept]);
            }
        }
        Ok(())
    }
}
