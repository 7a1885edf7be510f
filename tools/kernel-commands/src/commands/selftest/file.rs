//! A file in memory, which spaces map; and a process that edits one and is paged out: the file has the edits, and the process finds them.

use super::super::swapped::{self, NODE, OurSpaces, SwapVm, Terms};
use super::{Cx, Done, Failure, Finding};
use core::sync::atomic::{AtomicU64, Ordering};
use hugemm_base::{Never, Order, PAGE_BYTES, PageSize, VirtAddr, VirtRange};
use hugemm_frames::AllocRequest;
use hugemm_kernel::memory::frames;
use hugemm_kernel::page_fault::{load, store};
use hugemm_kernel::{layout, percpu, vm};
use hugemm_reclaim::{Ageing, LruPolicy, ShrinkBudget};
use hugemm_vm::{AddressSpace, Backing, PageSource, Setup, SourceError, StoredPages, VmError, VmaKind};
use hugemm_workloads::age::marks;

/// Pages of a file.
pub const PAGES: u64 = 256;
/// Words of a page.
pub const WORDS: u64 = PAGE_BYTES / 8;
/// Where the process maps it.
const AT: u64 = 0x10_0000_0000;
/// Of so many pages one is edited.
const EDITED: u64 = 3;
/// Passes of reclaim, at most: one ages, one has what is dirty written back, one drops it.
const PASSES: u32 = 8;
/// Frames that compressed pages may take: none should, but what working memory each CPU has.
const SWAP: u64 = 1024;

/// A file in memory: a block of frames.
pub struct InMemory(AtomicU64);

/// The only one, while [`with`] runs.
pub static FILE: InMemory = InMemory(AtomicU64::new(0));

/// Runs `f` while [`FILE`] is there, all zero at first.
pub fn with<R>(cx: Cx<'_>, f: impl FnOnce(Cx<'_>) -> Result<R, Failure>) -> Result<R, Failure> {
    let order = Order::largest_within(PAGES).ok_or(VmError::NoMemory)?;
    let block = frames().alloc(cx, AllocRequest::order(order))?;
    FILE.0.store(block.extent().start().get(), Ordering::Relaxed);
    (0..PAGES * WORDS).for_each(|index| FILE.word(index).store(0, Ordering::Relaxed));
    let result = f(cx);
    frames().free(cx, block);
    result
}

impl InMemory {
    /// A word of it.
    pub fn word(&self, index: u64) -> &AtomicU64 {
        // Relaxed: written before anybody else knows of it.
        let block = layout::direct(self.0.load(Ordering::Relaxed)).cast::<u64>();
        // SAFETY: within the block, as long as `with` runs; all of its words are atomic.
        unsafe { AtomicU64::from_ptr(block.wrapping_add((index % (PAGES * WORDS)) as usize)) }
    }
}

impl<S: Setup> PageSource<S> for InMemory {
    fn bytes(&self) -> u64 {
        PAGES * PAGE_BYTES
    }

    fn fill(&self, _: &mut hugemm_vm::Cx<'_, S>, first: u64, pages: &mut [u8]) -> Result<usize, SourceError> {
        for (index, word) in (first * WORDS..).zip(pages.chunks_exact_mut(8)) {
            word.copy_from_slice(&self.word(index).load(Ordering::Relaxed).to_ne_bytes());
        }
        Ok(pages.len())
    }

    fn write_back(&self, _: &mut hugemm_vm::Cx<'_, S>, first: u64, pages: &StoredPages<'_>) -> Result<(), SourceError> {
        for (index, at) in (first * WORDS..).zip((0..pages.bytes()).step_by(8)) {
            let mut word = [0; 8];
            pages.copy_to(at, &mut word);
            self.word(index).store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
        Ok(())
    }
}

/// A process maps the file, edits it, and is paged out.
#[inline(never)]
pub fn paged_out(cx: Cx<'_>) -> Result<(), Failure> {
    // As much memory as there is.
    let (page, most) = (PageSize::Size4K, u64::MAX / 2);
    let (policy, ageing) = (LruPolicy::Generations, Ageing::Batch);
    let terms = Terms {
        page,
        frames: most,
        swap: SWAP,
        marks: marks(PAGES, page),
        policy,
        ageing,
        worker: 0,
        unflushed: false,
    };
    with(cx, |cx| {
        (0..PAGES).for_each(|page| FILE.word(page * WORDS).store(as_it_was(page), Ordering::Relaxed));
        swapped::with(cx, &terms, |cx, vm, _| map(cx, vm))
    })
}

fn map<'a>(cx: Cx<'_>, vm: &SwapVm<'a>) -> Result<(), Failure> {
    let file = vm.open_source(cx, &FILE)?;
    let space = vm.create(cx, vm::lower_half()?)?;
    let span = VirtRange::new(VirtAddr::new(AT), PAGES * PAGE_BYTES).map_err(|_| VmError::NoMemory)?;
    let result = match vm.map(cx, &space, span, VmaKind::private(PageSize::Size4K), Backing::Shared(&file, 0)) {
        Ok(_) => edit(cx, vm, &space, span),
        Err(error) => Err(error.into()),
    };
    vm.destroy(cx, space).map_err(|(error, _)| error)?;
    vm.close(cx, file).map_err(|(error, _)| error)?;
    result
}

/// A page's first word.
fn as_it_was(page: u64) -> u64 {
    0xf11e << 32 | page
}

/// That word in the end.
fn edited(page: u64) -> u64 {
    if page.is_multiple_of(EDITED) { !as_it_was(page) } else { as_it_was(page) }
}

fn edit<'a>(cx: Cx<'_>, vm: &SwapVm<'a>, space: &AddressSpace<OurSpaces<'a>>, span: VirtRange) -> Result<(), Failure> {
    vm::with(cx, vm, space, |_| -> Result<(), Failure> {
        (0..PAGES).try_for_each(|page| {
            percpu::beat();
            expect(page, as_it_was(page))?;
            // SAFETY: the process's own area, in a space that is for this.
            match page.is_multiple_of(EDITED) && !unsafe { store(word(page), edited(page)) } {
                true => Err(VmError::NoMemory.into()),
                false => Ok(()),
            }
        })
    })?;
    let budget = ShrinkBudget::new(u64::MAX, 4 * PAGES);
    let mut left = PAGES;
    for _ in 0..PASSES {
        vm.pager().shrink(vm, cx, NODE, budget, &Never);
        left = vm.usage(cx, space, span)?.present;
        if left == 0 {
            break;
        }
    }
    if left > 0 {
        return Err(found(format_args!("{left} of {PAGES} pages are still there, after {PASSES} passes")));
    }
    for page in 0..PAGES {
        let word = FILE.word(page * WORDS).load(Ordering::Relaxed);
        if word != edited(page) {
            return Err(found(format_args!("page {page} has {word:#x}, not {:#x}, and is paged out", edited(page))));
        }
    }
    Done::PagedOut.add(PAGES);
    vm::with(cx, vm, space, |_| (0..PAGES).try_for_each(|page| expect(page, edited(page))))
}

/// Where the process has a page's first word.
fn word(page: u64) -> VirtAddr {
    VirtAddr::new(AT + page * PAGE_BYTES)
}

/// A word has to be what the process finds.
fn expect(page: u64, expected: u64) -> Result<(), Failure> {
    // SAFETY: a word of the loaded space, which only this process has.
    match unsafe { load(word(page)) } {
        Some(word) if word == expected => Ok(()),
        Some(word) => Err(found(format_args!("a process has {word:#x} in page {page}, not {expected:#x}"))),
        None => Err(VmError::NoMemory.into()),
    }
}

fn found(what: core::fmt::Arguments<'_>) -> Failure {
    Finding::new("a file", what).into()
}
