//! Processes that share more memory than there is (seed 001's workload): each touches random windows of pages, again and
//! again, and knows what it should find.
//!
//! A page begins with a word for each process, which that process alone writes; word 15 is the page's mark, and after it
//! stand 3.5 KiB that follow from the page's number and compress to a third. So every touch checks the page: what this
//! process wrote last, the mark, and one of the words that follow.

use core::ptr::NonNull;
use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{PAGE_BYTES, VirtAddr};
use hugemm_vm::{Access, Cx, Setup, Space, Vm, VmError};

/// Pages in a window, as in the patch series' program.
pub const WINDOW: u64 = 1024;

/// Processes that have a word in a page.
pub const MOST_PROCESSES: u32 = 14;

/// The word with the page's mark.
const MARK: usize = 15;

/// Words that follow from the page's number.
const FILLED: usize = 448;

/// Reaches a user's memory as the calling task.
pub trait Touch<S: Setup> {
    /// Where the calling CPU finds the word at `at`, until it serves the next shootdown; `None` is a page fault.
    fn reach(&self, cx: &Cx<'_, S>, at: VirtAddr, write: bool) -> Option<NonNull<u8>>;
}

/// What was found that should not be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wrong {
    /// Which page of the region.
    pub page: u64,
    /// Which word of it.
    pub word: usize,
    /// What is there.
    pub found: u64,
    /// What should be.
    pub expected: u64,
}

/// Why a window ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failed {
    /// Content is not what it was.
    Wrong(Wrong),
    /// The fault was refused for another reason than lack of memory.
    Fault(VmError),
}

/// What windows did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// Pages touched.
    pub pages: u64,
    /// Faults on the way.
    pub faults: u64,
    /// Touches for which there was no memory.
    pub refused: u64,
}

/// xorshift64*: only has to be irregular and repeatable.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// Started from any number.
    pub const fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % bound.max(1)
    }
}

/// One process's part in a region.
#[derive(Debug)]
pub struct Process<'a> {
    /// Which word of each page is its own; below [`MOST_PROCESSES`].
    pub number: u32,
    /// Where the region begins in its space.
    pub at: VirtAddr,
    /// What it wrote last into each page of the region; 0 at first.
    pub wrote: &'a mut [u32],
    /// Nobody else has the region, so a page that it never wrote has no mark.
    pub alone: bool,
    /// Its choices.
    pub random: Random,
    /// Counts its stores.
    pub stores: u32,
}

fn filled(page: u64, index: usize) -> u64 {
    // Each word four times: memory of programs compresses to a third or so, too.
    let mixed = (page + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(index as u64 / 4);
    (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

impl Process<'_> {
    /// Touches a random window, a quarter of its pages by stores.
    pub fn window<S: Setup>(
        &mut self,
        cx: &mut Cx<'_, S>,
        vm: &Vm<'_, S>,
        space: &Space<S>,
        touch: &impl Touch<S>,
        touched: &mut Touched,
    ) -> Result<(), Failed> {
        let pages = self.wrote.len() as u64;
        let window = WINDOW.min(pages);
        let first = self.random.below(pages - window + 1);
        for page in first..first + window {
            let write = self.random.below(4) == 0;
            self.touch(cx, vm, space, touch, page, write, touched)?;
        }
        Ok(())
    }

    /// Touches one page, and checks what is in it.
    #[allow(clippy::too_many_arguments, reason = "what a touch is")]
    pub fn touch<S: Setup>(
        &mut self,
        cx: &mut Cx<'_, S>,
        vm: &Vm<'_, S>,
        space: &Space<S>,
        touch: &impl Touch<S>,
        page: u64,
        write: bool,
        touched: &mut Touched,
    ) -> Result<(), Failed> {
        touched.pages += 1;
        let at = VirtAddr::new(self.at.get() + page * PAGE_BYTES);
        loop {
            vm.tlbs().serve(cx);
            let done = match touch.reach(cx, at, write) {
                Some(bytes) => self.look(page, bytes, write)?,
                None => false,
            };
            if done {
                return Ok(());
            }
            // A page that is empty has to be written, whatever the touch was going to be.
            let reached = touch.reach(cx, at, true);
            if let Some(bytes) = reached {
                self.fill(page, bytes);
                return Ok(());
            }
            touched.faults += 1;
            let access = if write || self.expects_nothing(page) { Access::Write } else { Access::Read };
            match vm.fault(cx, space, at, access) {
                Ok(_) => {}
                Err(VmError::NoMemory) => {
                    touched.refused += 1;
                    return Ok(());
                }
                Err(error) => return Err(Failed::Fault(error)),
            }
        }
    }

    fn expects_nothing(&self, page: u64) -> bool {
        self.wrote[page as usize] == 0
    }

    /// Checks a page, and stores into it if `write`; false if it is empty and should be filled.
    fn look(&mut self, page: u64, bytes: NonNull<u8>, write: bool) -> Result<bool, Failed> {
        let wrong = |word, found, expected| Err(Failed::Wrong(Wrong { page, word, found, expected }));
        let mine = self.number as usize;
        let wrote = u64::from(self.wrote[page as usize]);
        let (found, mark) = (word(bytes, mine), word(bytes, MARK));
        if found != wrote {
            return wrong(mine, found, wrote);
        }
        if mark == 0 && wrote == 0 {
            return Ok(false);
        }
        if mark != page + 1 || self.alone && wrote == 0 {
            return wrong(MARK, mark, if self.alone && wrote == 0 { 0 } else { page + 1 });
        }
        let index = self.random.below(FILLED as u64) as usize;
        let (found, expected) = (word(bytes, MARK + 1 + index), filled(page, index));
        if found != expected {
            return wrong(MARK + 1 + index, found, expected);
        }
        if write {
            self.store(page, bytes);
        }
        Ok(true)
    }

    fn store(&mut self, page: u64, bytes: NonNull<u8>) {
        self.stores = self.stores.wrapping_add(1).max(1);
        self.wrote[page as usize] = self.stores;
        set_word(bytes, self.number as usize, u64::from(self.stores));
    }

    /// Fills an empty page. Several processes may do so at once: they store the same.
    fn fill(&mut self, page: u64, bytes: NonNull<u8>) {
        if word(bytes, MARK) == 0 {
            (0..FILLED).for_each(|index| set_word(bytes, MARK + 1 + index, filled(page, index)));
            // Release pairs with the Acquire in `word`: whoever sees the mark sees what follows it.
            set_word(bytes, MARK, page + 1);
        }
        self.store(page, bytes);
    }
}

fn at(bytes: NonNull<u8>, index: usize) -> NonNull<AtomicU64> {
    // SAFETY: one of the first 464 words of a page, which `Touch::reach` found.
    unsafe { bytes.cast::<AtomicU64>().add(index) }
}

fn word(bytes: NonNull<u8>, index: usize) -> u64 {
    // SAFETY: as above; processes access words atomically, and the page is there until the next shootdown is served.
    unsafe { at(bytes, index).as_ref() }.load(Ordering::Acquire)
}

fn set_word(bytes: NonNull<u8>, index: usize, value: u64) {
    // SAFETY: as above.
    unsafe { at(bytes, index).as_ref() }.store(value, Ordering::Release);
}
