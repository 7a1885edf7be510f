//! No CPU ever uses a translation that is gone: all CPUs touch pages of one address space, which come by page faults, and
//! all unmap ranges of it at the same time, or map them by leaves of another size.
//!
//! The oracle is in the pages. Every word of a page is computed from the page's address, and is checked whenever it is
//! read. As soon as a range has been unmapped and flushed, its frames are overwritten with a pattern, which must still be
//! there when it is looked at again; then they are freed and come back under other addresses. So a read through a
//! translation that is gone finds the wrong words, and a write through one breaks the pattern.

use super::{Cx, Done, Failure, Finding, Steps, on_all, vec_of};
use crate::space::{BareSpace, Pages};
use core::cell::RefCell;
use core::ptr;
use hugemm_base::lock::{Lock, SpinLock};
use hugemm_base::random::Random;
use hugemm_base::{CpuCx, Dirty, Extent, PAGE_BYTES, PageSize, VirtAddr, VirtRange};
use hugemm_kernel::memory::frames;
use hugemm_kernel::{layout, percpu, platform::Kernel, tlb};
use hugemm_paging::{PagingError, Run};
use hugemm_workloads::request::Plant;

/// Where the pages are.
const START: u64 = 0x10_0000_0000;
/// Pieces of 2 MiB: the even ones are mapped by one leaf each, the odd ones by 4 KiB leaves.
const PIECES: u64 = 4;
/// Steps of each CPU in a round, at most.
const STEPS: u64 = 400;
/// Words of a page that are read and written in a step.
const TOUCHES: u64 = 32;
/// Turns that a lazy CPU waits, at most.
const LAZY: u64 = 20_000;
/// The word that is written, always to what it is.
const WRITTEN: u64 = 510;
const WORDS: u64 = PAGE_BYTES / 8;
/// Pages of a piece: the most runs that an unmap can find.
const RUNS: usize = 512;

/// Word `index` of the page at `page`.
fn word(page: u64, index: u64) -> u64 {
    (page ^ 0x5bd1_e995).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(index)
}

/// What a frame is overwritten with.
fn pattern(frame: u64) -> u64 {
    !frame.wrapping_mul(0xd6e8_feb8_6659_fd93)
}

/// A word is not what it should be: somebody wrote to a frame after its flush, or read through what was gone. `at` is an address, or a
/// frame's in the direct map. Nothing if it is right.
pub fn stale(at: u64, expected: u64, found: u64, written: bool) -> Result<(), Finding> {
    let what = if written { "was written to after its flush" } else { "was read through what is gone" };
    let cpu = percpu::current();
    let words = format_args!("{at:#x} {what}: {found:#x} instead of {expected:#x}, seen by cpu{cpu}");
    if found == expected { Ok(()) } else { Err(Finding::new("translations", words)) }
}

struct Checked;

impl Pages for Checked {
    fn size(&self, at: VirtAddr) -> Option<PageSize> {
        let piece = at.get().checked_sub(START)? / PageSize::Size2M.bytes();
        (piece < PIECES).then_some(if piece.is_multiple_of(2) { PageSize::Size2M } else { PageSize::Size4K })
    }

    fn fill(&self, at: VirtAddr, bytes: &mut [u8]) {
        for (offset, part) in (0..).step_by(8).zip(bytes.chunks_exact_mut(8)) {
            let page = at.get() + offset / PAGE_BYTES * PAGE_BYTES;
            part.copy_from_slice(&word(page, offset % PAGE_BYTES / 8).to_ne_bytes());
        }
    }
}

struct Round<'a> {
    space: BareSpace<'a>,
    plant: Plant,
    steps: Steps,
}

/// One round on all CPUs, until `until` at the latest.
pub fn round(cx: Cx<'_>, seed: u64, plant: Plant, until: u64) -> Result<(), Failure> {
    let cpus = percpu::count();
    let mut runs = vec_of(RUNS * cpus as usize, Extent::default)?;
    let round = Round { space: BareSpace::new(cx, Some(&Checked))?, plant, steps: Steps::until(until) };
    // Each CPU gets its part of the list.
    let lists: Lock<SpinLock, _> = Lock::new(runs.chunks_exact_mut(RUNS));
    // SAFETY: none: this is the planted bug, which the self-test must find.
    unsafe { tlb::miss_one(plant == Plant::MissedCpu) };
    let done = on_all(cx, |cx, cpu| {
        let Some(list) = lists.lock().next() else { return Ok(()) };
        let list = RefCell::new(List { runs: list, count: 0 });
        let random = &mut Random(seed ^ u64::from(cpu) << 40);
        round.space.with(cx, |cx| round.steps.each(cx, STEPS, |cx, _| stress(cx, &round, &list, random)))
    });
    // SAFETY: none: this is the planted bug, which the self-test must find.
    unsafe { tlb::miss_one(false) };
    done?;
    let space = round.space;
    let flushes = space.flushes();
    debug_assert!(flushes > 0);
    let list = RefCell::new(List { runs: &mut runs[..], count: 0 });
    for piece in 0..PIECES {
        let span = span(START + piece * PageSize::Size2M.bytes(), PageSize::Size2M.bytes());
        space.unmap(cx, span, |run| list.borrow_mut().push(run))?;
        list.borrow_mut().give_back(cx);
    }
    space.free(cx, |_| ());
    Ok(())
}

fn span(start: u64, bytes: u64) -> VirtRange {
    VirtRange::new(VirtAddr::new(start), bytes).unwrap_or_else(|error| panic!("{error}"))
}

/// Runs that have been unmapped and not yet been freed.
struct List<'a> {
    runs: &'a mut [Extent],
    count: usize,
}

impl List<'_> {
    fn push(&mut self, run: Run) {
        // As many places as a piece has pages.
        self.runs[self.count] = run.extent;
        self.count += 1;
    }

    fn frames(&self) -> impl Iterator<Item = u64> {
        self.runs[..self.count].iter().flat_map(|run| run.base().get()..run.end().get())
    }

    /// Overwrites every frame.
    fn overwrite(&self) {
        for frame in self.frames() {
            let words = layout::direct(frame * PAGE_BYTES).cast::<u64>();
            for index in 0..WORDS as usize {
                // SAFETY: a frame in the direct map that is this list's alone.
                unsafe { words.add(index).write_volatile(pattern(frame)) };
            }
        }
    }

    /// Looks at the word that CPUs write to, and at one more of every frame.
    fn check(&self, random: &mut Random) -> Result<(), Finding> {
        self.frames().try_for_each(|frame| {
            [WRITTEN, random.below(WORDS)].into_iter().try_for_each(|index| {
                let at = layout::direct(frame * PAGE_BYTES).cast::<u64>().wrapping_add(index as usize);
                // SAFETY: as in `overwrite`.
                let found = unsafe { at.read_volatile() };
                stale(at as u64, pattern(frame), found, true)
            })
        })
    }

    fn give_back(&mut self, cx: &mut CpuCx<'static, Kernel>) {
        for run in &self.runs[..self.count] {
            // SAFETY: the harvest handed the frames over, each once.
            frames().free_extent(cx, unsafe { Dirty::assume_owned(*run) });
        }
        self.count = 0;
    }
}

/// One step of a CPU.
fn stress(cx: Cx<'_>, round: &Round<'_>, list: &RefCell<List<'_>>, random: &mut Random) -> Result<(), Failure> {
    if random.below(8) == 0 {
        // Left out of flushes for a while, except of those that free tables.
        match round.plant {
            Plant::LazyCpu => round.space.lazily_for_ever(cx),
            // SAFETY: spinning uses no address.
            _ => unsafe {
                round.space.lazily(cx, || (0..random.below(LAZY)).for_each(|_| core::hint::spin_loop()));
            },
        }
    }
    if random.below(4) != 0 {
        return Ok(touch(random)?);
    }
    // Mostly small ranges of 4 KiB leaves: their flushes leave the rest of a TLB, and what is wrong in it, alone.
    let number = if random.below(4) == 0 { random.below(PIECES) } else { random.below(PIECES) | 1 };
    let piece = START + number * PageSize::Size2M.bytes();
    if round.plant == Plant::None && random.below(4) == 0 {
        let size = if random.below(2) == 0 { PageSize::Size4K } else { PageSize::Size2M };
        match round.space.resize(cx, span(piece, PageSize::Size2M.bytes()), size) {
            // With no memory for a table it is as it was.
            Ok(()) | Err(PagingError::NoTable | PagingError::Busy { .. }) => {}
            Err(error) => panic!("the self-test's own change of size was refused: {error}"),
        }
        Done::Resized.add(1);
        return Ok(());
    }
    // A whole piece of 4 KiB leaves is unhooked with its table.
    let whole = Checked.size(VirtAddr::new(piece)) == Some(PageSize::Size2M) || random.below(8) == 0;
    let pages = if whole { 512 } else { 1 + random.below(32) };
    let first = if whole { 0 } else { random.below(512 - pages) };
    let range = span(piece + first * PAGE_BYTES, pages * PAGE_BYTES);
    let mut early = Ok(());
    let visit = |run| list.borrow_mut().push(run);
    let result = if round.plant == Plant::FreeBeforeFlush {
        round.space.unmap_before_flush(cx, range, PageSize::Size4K, visit, |cx| {
            let mut list = list.borrow_mut();
            list.overwrite();
            // Long enough for somebody to notice.
            early = (0..64).try_for_each(|_| touch(random));
            list.give_back(cx);
        })
    } else {
        round.space.unmap(cx, range, visit)
    };
    match result {
        Ok(_) => {}
        // Somebody else is unmapping there, or a huge leaf stands where none was left for a small range.
        Err(PagingError::Busy { .. } | PagingError::NeedsSplit { .. }) => return Ok(early?),
        Err(error) => panic!("the self-test's own unmap was refused: {error}"),
    }
    Done::Unmaps.add(1);
    let mut list = list.borrow_mut();
    list.overwrite();
    for _ in 0..2 {
        list.check(random)?;
    }
    list.give_back(cx);
    Ok(early?)
}

/// Reads and writes words of pages of the space; pages that are not there come.
fn touch(random: &mut Random) -> Result<(), Finding> {
    (0..TOUCHES).try_for_each(|_| {
        let page = START + random.below(PIECES * 512) * PAGE_BYTES;
        let index = random.below(WORDS);
        let at = |index: u64| ptr::without_provenance_mut::<u64>((page + 8 * index) as usize);
        // SAFETY: the loaded space's pages; the fault handler maps them. Writes are to what is there.
        let found = unsafe {
            at(WRITTEN).write_volatile(word(page, WRITTEN));
            at(index).read_volatile()
        };
        stale(page + 8 * index, word(page, index), found, false)
    })
}
