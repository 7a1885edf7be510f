//! A file in memory, whose reads and writes let others run.

#![allow(unreachable_pub, reason = "one test's modules")]

use hugemm_vm::{Cx, PageSource, Setup, SourceError, StoredPages};
use std::sync::Mutex;

pub struct File(Mutex<Vec<u8>>);

impl File {
    /// So many pages of zeroes, for ever.
    pub fn new(pages: u64) -> &'static File {
        Box::leak(Box::new(File(Mutex::new(vec![0; (pages << 12) as usize]))))
    }

    pub fn word(&self, at: u64) -> u64 {
        let bytes = self.0.lock().expect("one thread");
        u64::from_le_bytes(bytes[at as usize..][..8].try_into().expect("eight"))
    }
}

impl<S: Setup> PageSource<S> for File {
    fn bytes(&self) -> u64 {
        self.0.lock().expect("one thread").len() as u64
    }

    fn fill(&self, cx: &mut Cx<'_, S>, first: u64, pages: &mut [u8]) -> Result<usize, SourceError> {
        cx.cond_resched();
        pages.copy_from_slice(&self.0.lock().expect("one thread")[(first << 12) as usize..][..pages.len()]);
        cx.cond_resched();
        Ok(pages.len())
    }

    fn write_back(&self, cx: &mut Cx<'_, S>, first: u64, pages: &StoredPages<'_>) -> Result<(), SourceError> {
        // A part at a time, of what it was before.
        let mut stored = vec![0; pages.bytes()];
        pages.copy_to(0, &mut stored);
        for (part, bytes) in stored.chunks(1 << 12).enumerate() {
            cx.cond_resched();
            let at = (first as usize + part) << 12;
            self.0.lock().expect("one thread")[at..][..bytes.len()].copy_from_slice(bytes);
        }
        Ok(())
    }
}
