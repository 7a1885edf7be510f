//! Processes that share more memory than there is (the workload of "Don't flush TLB after checking PTE young"):
//! each touches random windows of pages, again and again, and knows what it should find.
//!
//! A page begins with a word for each process, which that process alone writes; word 15 is the page's mark, and after it
//! stand 3.5 KiB that follow from the page's number and compress to a third. So every touch checks the page: what this
//! process wrote last, the mark, and one of the words that follow.

mod figures;
mod part;

pub use figures::{AgeFigures, METRICS};
pub use part::{OWN_AT, Part, SHARED_AT, Turn, set_up};

use core::ptr::NonNull;
use hugemm_base::random::Random;
use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{Extent, Never, Order, PAGE_BYTES, PageSize, Pfn, PhysMap, VirtAddr, VirtRange};
use hugemm_paging::Lookup;
use hugemm_reclaim::Watermarks;
use hugemm_vm::{Access, AddressSpace, Backing, Cx, Pinned, Served, Setup, Vm, VmError, VmaKind};
use thiserror::Error;

/// Pages in a window, as in the patch series' program.
pub const WINDOW: u64 = 1024;

/// Processes that have a word in a page.
pub const MOST_PROCESSES: u32 = 14;

/// The word with the page's mark.
const MARK: usize = 15;

/// Words that follow from the page's number.
const FILLED: usize = 448;

/// What a process wrote into a page is not known: the page has its mark, and the process's own word is still 0.
const MARKED: u32 = u32::MAX;

/// Touches of a child.
const CHILD_TOUCHES: u32 = 128;

/// How often a part that was unmapped is tried to be mapped anew.
const TRIES: u32 = 10_000;

/// Reaches a user's memory as the calling task.
pub trait Touch<S: Setup> {
    /// How the words of a page are accessed.
    type Page: Words;

    /// How the calling CPU accesses the page at `at`; `None` is a page fault that the caller serves.
    fn reach(&self, cx: &Cx<'_, S>, at: VirtAddr, write: bool) -> Option<Self::Page>;

    /// Runs `f` with a space loaded on the calling CPU.
    fn with(&self, cx: &mut Cx<'_, S>, vm: &Vm<'_, S>, space: &AddressSpace<S>, f: &mut dyn FnMut(&mut Cx<'_, S>)) {
        space.tlb().switch_in(vm.shootdown(), cx);
        f(cx);
        space.tlb().switch_out(vm.shootdown(), cx);
    }
}

/// The 64-bit words of a page. What is stored to one word is seen no later than what is stored to another after it.
pub trait Words {
    /// A word; `None` if its page is away and there is no memory for it.
    fn word(&self, index: usize) -> Option<u64>;

    /// Stores a word; false if nothing was stored because there is no memory for its page.
    fn set_word(&self, index: usize, value: u64) -> bool;
}

/// A page that stays where it is until the calling CPU serves the next shootdown.
#[derive(Clone, Copy, Debug)]
pub struct InPlace(NonNull<u8>);

impl InPlace {
    /// The page at `page`.
    ///
    /// # Safety
    ///
    /// It is a page of a process, mapped here until the calling CPU serves the next shootdown, before which the value is
    /// given up; everybody accesses its words atomically.
    pub const unsafe fn new(page: NonNull<u8>) -> Self {
        InPlace(page)
    }

    fn at(&self, index: usize) -> &AtomicU64 {
        // SAFETY: one of the first 464 words of a page that `new`'s caller vouches for.
        unsafe { self.0.cast::<AtomicU64>().add(index).as_ref() }
    }
}

impl Words for InPlace {
    fn word(&self, index: usize) -> Option<u64> {
        // Acquire pairs with the Release in `set_word`.
        Some(self.at(index).load(Ordering::Acquire))
    }

    fn set_word(&self, index: usize, value: u64) -> bool {
        // Release pairs with the Acquire in `word`: whoever sees a page's mark sees what was stored before it.
        self.at(index).store(value, Ordering::Release);
        true
    }
}

/// What was found that should not be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongWord {
    /// Who found it.
    pub process: u32,
    /// Which page of the region.
    pub page: u64,
    /// Which word of it.
    pub word: usize,
    /// What is there.
    pub found: u64,
    /// What should be.
    pub expected: u64,
}

/// A pinned page is not where its device has it any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Torn {
    /// Whose.
    pub process: u32,
    /// Which page of the region.
    pub page: u64,
    /// The frame that the device has.
    pub pinned: Pfn,
    /// What the process has there.
    pub mapped: Lookup,
}

/// Why a window ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Failed {
    /// Content is not what it was.
    #[error(
        "process {} found {:#x} in word {} of page {} and not {:#x}: reclaim has lost data, which is a bug",
        .0.process, .0.found, .0.word, .0.page, .0.expected
    )]
    Wrong(WrongWord),
    /// A device and its process no longer have the same page.
    #[error(
        "page {} of process {} is pinned in frame {} and mapped as {:?}: reclaim has torn it from its device, which is a bug",
        .0.page, .0.process, .0.pinned, .0.mapped
    )]
    Torn(Torn),
    /// A fault or a request was refused for another reason than lack of memory.
    #[error("a process was refused a page, a fork or a mapping: {0}")]
    Fault(#[from] VmError),
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

impl Touched {
    /// The sum.
    pub fn plus(self, more: Touched) -> Touched {
        Touched {
            pages: self.pages + more.pages,
            faults: self.faults + more.faults,
            refused: self.refused + more.refused,
        }
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

/// Marks for a run on so many base pages: the usual ones, and for large pages, of which none goes that might not come back, a few of them.
pub fn marks(pages: u64, page: PageSize) -> Watermarks {
    let usual = Watermarks::for_node(pages);
    let apart = page.pages();
    let [min, low, high] = [7, 8, 10].map(|times| times * apart);
    Watermarks::new(min, low, high).filter(|_| page != PageSize::Size4K && high < pages / 2).unwrap_or(usual)
}

/// What came of looking at a page.
enum Look {
    /// It is right, and was written to if it should be.
    Right,
    /// It is empty, and should be filled.
    Empty,
    /// There was no memory for it.
    Refused,
}

/// A word of a frame as a device reads it, past all page tables; `None` if it cannot be reached.
fn by_device<S: Setup>(cx: &Cx<'_, S>, frame: Pfn, word: usize) -> Option<u64> {
    let map = cx.platform();
    let window = map.open(Extent::block(frame, Order::ZERO), None)?;
    // SAFETY: one of the first 16 words of an open window; everybody accesses a process's words atomically. Acquire: as in
    // `InPlace::word`.
    let found = unsafe { (*window.ptr.cast::<AtomicU64>().add(word)).load(Ordering::Acquire) };
    // SAFETY: opened above, and not used again.
    unsafe { map.close(window) };
    Some(found)
}

fn filled(page: u64, index: usize) -> u64 {
    // Each word four times: memory of programs compresses to a third or so, too.
    let mixed = (page + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(index as u64 / 4);
    (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

impl Process<'_> {
    /// Touches a random window, a quarter of its pages by stores, and after each page one of the window's first `hot` ones
    /// anew: a translation that is used all the time is what an eviction without a flush leaves behind.
    pub fn window<S: Setup>(
        &mut self,
        cx: &mut Cx<'_, S>,
        vm: &Vm<'_, S>,
        space: &AddressSpace<S>,
        touch: &impl Touch<S>,
        hot: u64,
        touched: &mut Touched,
    ) -> Result<(), Failed> {
        self.each_of_window(hot, |process, page, write| process.touch(cx, vm, space, touch, page, write, touched))
    }

    /// The same window without `hot` pages, where another kernel serves the faults: `reach` gives the words of a page.
    pub fn window_elsewhere<W: Words>(
        &mut self,
        reach: impl Fn(u64) -> W,
        touched: &mut Touched,
    ) -> Result<(), Failed> {
        self.each_of_window(0, |process, page, write| {
            let words = reach(page);
            touched.pages += 1;
            let done = match process.look(page, &words, write)? {
                Look::Right => true,
                Look::Empty => process.fill(page, &words),
                Look::Refused => false,
            };
            touched.refused += u64::from(!done);
            Ok(())
        })
    }

    fn each_of_window(
        &mut self,
        hot: u64,
        mut touch: impl FnMut(&mut Self, u64, bool) -> Result<(), Failed>,
    ) -> Result<(), Failed> {
        let pages = self.wrote.len() as u64;
        let window = WINDOW.min(pages);
        let first = self.random.below(pages - window + 1);
        for page in first..first + window {
            let write = self.random.below(4) == 0;
            touch(self, page, write)?;
            if hot > 0 {
                let again = first + self.random.below(hot.min(window));
                touch(self, again, !write)?;
            }
        }
        Ok(())
    }

    /// Touches so many random pages and reads all that follows from their numbers, from end to end.
    pub fn read_whole<S: Setup>(
        &mut self,
        cx: &mut Cx<'_, S>,
        vm: &Vm<'_, S>,
        space: &AddressSpace<S>,
        touch: &impl Touch<S>,
        pages: u64,
        touched: &mut Touched,
    ) -> Result<(), Failed> {
        for _ in 0..pages {
            let page = self.random.below(self.wrote.len() as u64);
            self.touch(cx, vm, space, touch, page, false, touched)?;
            // Where nobody serves the fault, and where there is no memory, the page may be gone again.
            let Some(words) = touch.reach(cx, VirtAddr::new(self.at.get() + page * PAGE_BYTES), false) else {
                continue;
            };
            if words.word(MARK).is_none_or(|mark| mark == 0) {
                continue;
            }
            for index in 0..FILLED {
                let Some(found) = words.word(MARK + 1 + index) else { break };
                let (process, word, expected) = (self.number, MARK + 1 + index, filled(page, index));
                if found != expected {
                    return Err(Failed::Wrong(WrongWord { process, page, word, found, expected }));
                }
            }
        }
        Ok(())
    }

    /// Touches one page, and checks what is in it.
    #[allow(clippy::too_many_arguments, reason = "what a touch is")]
    pub fn touch<S: Setup>(
        &mut self,
        cx: &mut Cx<'_, S>,
        vm: &Vm<'_, S>,
        space: &AddressSpace<S>,
        touch: &impl Touch<S>,
        page: u64,
        write: bool,
        touched: &mut Touched,
    ) -> Result<(), Failed> {
        touched.pages += 1;
        let at = VirtAddr::new(self.at.get() + page * PAGE_BYTES);
        loop {
            vm.shootdown().handle_ipi(cx);
            let looked = touch.reach(cx, at, write).map(|words| self.look(page, &words, write)).transpose()?;
            match looked {
                Some(Look::Right) => return Ok(()),
                Some(Look::Refused) => {
                    touched.refused += 1;
                    return Ok(());
                }
                Some(Look::Empty) | None => {}
            }
            // A page that is empty has to be written, whatever the touch was going to be.
            if let Some(words) = touch.reach(cx, at, true) {
                touched.refused += u64::from(!self.fill(page, &words));
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

    /// Checks a page, and stores into it if `write`.
    fn look(&mut self, page: u64, words: &impl Words, write: bool) -> Result<Look, Failed> {
        let process = self.number;
        let wrong = |word, found, expected| Err(Failed::Wrong(WrongWord { process, page, word, found, expected }));
        let mine = self.number as usize;
        let wrote = self.wrote[page as usize];
        let (Some(found), Some(mark)) = (words.word(mine), words.word(MARK)) else { return Ok(Look::Refused) };
        let expected = if wrote == MARKED { 0 } else { u64::from(wrote) };
        if found != expected {
            return wrong(mine, found, expected);
        }
        if mark == 0 && wrote == 0 {
            return Ok(Look::Empty);
        }
        if mark != page + 1 || self.alone && wrote == 0 {
            return wrong(MARK, mark, if self.alone && wrote == 0 { 0 } else { page + 1 });
        }
        let index = self.random.below(FILLED as u64) as usize;
        let Some(found) = words.word(MARK + 1 + index) else { return Ok(Look::Refused) };
        let expected = filled(page, index);
        if found != expected {
            return wrong(MARK + 1 + index, found, expected);
        }
        Ok(if !write || self.store(page, words) { Look::Right } else { Look::Refused })
    }

    fn store(&mut self, page: u64, words: &impl Words) -> bool {
        self.stores = self.stores.wrapping_add(1).max(1);
        let stored = words.set_word(self.number as usize, u64::from(self.stores));
        if stored {
            self.wrote[page as usize] = self.stores;
        }
        stored
    }

    /// Fills an empty page, as far as there is memory; false if that was not to its end. Several processes may do so at
    /// once: they store the same.
    fn fill(&mut self, page: u64, words: &impl Words) -> bool {
        let Some(mark) = words.word(MARK) else { return false };
        if mark == 0 {
            let full = (0..FILLED).all(|index| words.set_word(MARK + 1 + index, filled(page, index)));
            // Last: whoever sees the mark sees what follows it.
            if !full || !words.set_word(MARK, page + 1) {
                return false;
            }
            if self.wrote[page as usize] == 0 {
                self.wrote[page as usize] = MARKED;
            }
        }
        self.store(page, words)
    }

    /// Pins a random page of the region, of the size of its pages, as if for a device; `None` if there is no memory for it.
    // Not on the stack of who calls: faults come deeper.
    #[inline(never)]
    pub fn pin<'v, S: Setup>(
        &mut self,
        cx: &mut Cx<'_, S>,
        vm: &'v Vm<'_, S>,
        space: &AddressSpace<S>,
        page: PageSize,
        touched: &mut Touched,
    ) -> Result<Option<Pinned<'v>>, Failed> {
        let first = self.random.below(self.wrote.len() as u64 / page.pages()) * page.pages();
        let at = VirtAddr::new(self.at.get() + first * PAGE_BYTES);
        let span = VirtRange::new(at, page.bytes()).map_err(|_| VmError::OutOfBounds { at })?;
        let mut pinned = None;
        match vm.pin(cx, space, span, Access::Write, None, &Never, |page| pinned = Some(page)) {
            Ok(_) => {}
            Err(error) if error.cause == VmError::NoMemory => touched.refused += 1,
            Err(error) => return Err(error.cause.into()),
        }
        Ok(pinned)
    }

    /// Looks that a pinned page is where its device has it, and that the device finds there what the process stored last. False
    /// if the process has unmapped it, or has never stored there: then it is the device's alone.
    // Not on the stack of who calls: faults come deeper.
    #[inline(never)]
    pub fn look_at_pinned<S: Setup>(
        &self,
        cx: &mut Cx<'_, S>,
        vm: &Vm<'_, S>,
        space: &AddressSpace<S>,
        pinned: &Pinned<'_>,
    ) -> Result<bool, Failed> {
        let (extent, first) = (pinned.extent(), (pinned.at().get() - self.at.get()) / PAGE_BYTES);
        let mut shared = false;
        for index in 0..extent.pages() {
            let (page, frame) = (first + index, Pfn::new(extent.base().get() + index));
            let wrote = self.wrote[page as usize];
            if wrote == 0 {
                continue;
            }
            shared = true;
            let at = VirtAddr::new(self.at.get() + page * PAGE_BYTES);
            // Reclaim may have been at the page when it was pinned: then it puts it back, and a fault says when. Had the page
            // gone, the fault would bring another frame.
            let mapped = loop {
                let found = vm.lookup(cx, space, at);
                if matches!(found, Lookup::Mapped(_)) || vm.fault(cx, space, at, Access::Read) != Ok(Served::Meanwhile)
                {
                    break found;
                }
                cx.cond_resched();
            };
            if !matches!(mapped, Lookup::Mapped(leaf) if leaf.frame == extent.base()) {
                return Err(Failed::Torn(Torn { process: self.number, page, pinned: frame, mapped }));
            }
            let (word, expected) = (self.number as usize, if wrote == MARKED { 0 } else { u64::from(wrote) });
            match by_device::<S>(cx, frame, word) {
                Some(found) if found != expected => {
                    return Err(Failed::Wrong(WrongWord { process: self.number, page, word, found, expected }));
                }
                _ => {}
            }
        }
        Ok(shared)
    }

    /// For a process that is alone in its region, of which `wrote` knows every page: a child has the region as it is, and
    /// what it stores is not seen by its parent. Then a part of the region is unmapped and mapped anew: it is empty.
    /// `spare` is as long as `wrote`; `page` is the size of the region's pages.
    #[allow(clippy::too_many_arguments, reason = "what a fork is")]
    pub fn fork_and_unmap<S: Setup>(
        &mut self,
        cx: &mut Cx<'_, S>,
        vm: &Vm<'_, S>,
        space: &AddressSpace<S>,
        touch: &impl Touch<S>,
        page: PageSize,
        spare: &mut [u32],
        touched: &mut Touched,
    ) -> Result<(), Failed> {
        let pages = self.wrote.len() as u64;
        match vm.fork(cx, space) {
            Ok(child) => {
                spare.copy_from_slice(self.wrote);
                let random = Random(self.random.below(u64::MAX));
                let (number, at, stores) = (self.number, self.at, self.stores);
                let mut process = Process { number, at, wrote: spare, alone: true, random, stores };
                let mut result = Ok(());
                touch.with(cx, vm, &child, &mut |cx| {
                    result = (0..CHILD_TOUCHES).try_for_each(|turn| {
                        let page = process.random.below(pages);
                        process.touch(cx, vm, &child, touch, page, turn % 4 == 0, touched)
                    });
                });
                vm.destroy(cx, child).map_err(|(error, _)| error)?;
                result?;
            }
            Err(VmError::NoMemory) => touched.refused += 1,
            Err(error) => return Err(error.into()),
        }
        let size = page.pages();
        let first = self.random.below(pages / size) * size;
        let some = (1 + self.random.below(4)) * size;
        let end = (first + some.max(64 / size * size)).min(pages);
        let at = VirtAddr::new(self.at.get() + first * PAGE_BYTES);
        let span = VirtRange::new(at, (end - first) * PAGE_BYTES).map_err(|_| VmError::OutOfBounds { at })?;
        match vm.unmap(cx, space, span) {
            Ok(_) => {}
            // It had to be cut; nothing has changed.
            Err(VmError::NoMemory) => {
                touched.refused += 1;
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        }
        self.wrote[first as usize..end as usize].fill(0);
        if map_anew(cx, vm, space, span, page)? {
            return Ok(());
        }
        // Others were faster. All that the process has is enough, and giving it back takes no memory.
        touched.refused += 1;
        let whole = VirtRange::new(self.at, pages * PAGE_BYTES).map_err(|_| VmError::OutOfBounds { at: self.at })?;
        vm.unmap(cx, space, whole)?;
        self.wrote.fill(0);
        if map_anew(cx, vm, space, whole, page)? { Ok(()) } else { Err(VmError::NoMemory.into()) }
    }
}

/// Maps what was just unmapped; false if there is no memory even for two small objects.
fn map_anew<S: Setup>(
    cx: &mut Cx<'_, S>,
    vm: &Vm<'_, S>,
    space: &AddressSpace<S>,
    span: VirtRange,
    page: PageSize,
) -> Result<bool, Failed> {
    for _ in 0..TRIES {
        match vm.map(cx, space, span, VmaKind::private(page), Backing::Private) {
            Ok(_) => return Ok(true),
            Err(VmError::NoMemory) => {}
            Err(error) => return Err(error.into()),
        }
        vm.shootdown().handle_ipi(cx);
        cx.cond_resched();
    }
    Ok(false)
}
