//! Reading and writing a space's memory from outside of it: what copying from and to a process, a virtual machine's queues and a
//! debugger need. As the process itself would access it, by its areas' rights, and what is missing is faulted in. A page that a fork
//! shares is copied before it is written.
//!
//! A stretch of up to 2 MiB is copied under one look at areas and page table, run by run through the direct map. Both are
//! locked, shared: nothing of it goes away, or moves, meanwhile, and no reference is taken. At what is not mapped as it has to be the
//! copy stops, a fault is served with nothing locked, and it goes on. Programs may store to the same memory at the same time: it is
//! accessed by relaxed atomics, of 8 bytes where addresses allow.

use crate::address_space::AddressSpace;
use crate::error::VmError;
use crate::fault::Access;
use crate::protection::Protection;
use crate::setup::{Cx, Setup};
use crate::vm::Vm;
use crate::vma::pages;
use crate::zeroes::LENT;
use core::cell::RefCell;
use core::fmt;
use core::ptr;
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use hugemm_base::{Extent, PAGE_BYTES, PAGE_SHIFT, PhysMap, VirtAddr};
use hugemm_paging::{Change, Flags, PageFormat, ShootdownBatch};

/// Bytes that are copied between two reschedule points, under one lock round: at 5 GB/s, 0.4 ms.
const PART: u64 = 2 << 20;

/// A copy that ended early. What comes before is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessError {
    /// Bytes that were copied.
    pub done: u64,
    /// The address of the first that was not.
    pub at: VirtAddr,
    /// Why.
    pub cause: VmError,
}

impl fmt::Display for AccessError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes up to {}, then: {}", self.done, self.at, self.cause)
    }
}

impl core::error::Error for AccessError {}

/// What a request does with the memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Verb {
    Read,
    Write,
    /// A write that leaves alone what is zero because nobody has touched it.
    Zero,
}

impl Verb {
    /// As what the process would access it.
    const fn access(self) -> Access {
        match self {
            Verb::Read => Access::Read,
            Verb::Write | Verb::Zero => Access::Write,
        }
    }
}

/// What is done with some bytes of the space's memory: where the direct map has them, how many, and where in the request they begin.
type Each<'e> = &'e mut dyn FnMut(*mut u8, usize, usize);

impl<S: Setup> Vm<'_, S> {
    /// Copies what is at `at` to `into`. Any address and length. What is missing is faulted in as by a load of the process.
    ///
    /// One lock round of the area list and one of the page table per 2 MiB that are mapped, whatever the number of pages; no flush, and
    /// one on arm64 where clean pages are written. Interrupts are on, nothing locked; passes reschedule points; may sleep. Whether user
    /// mode may reach an area is not asked: areas without [`USER`](crate::Protection::USER) are as good as others.
    ///
    /// # Errors
    ///
    /// How far it came and why not further: [`NoArea`](VmError::NoArea), [`HwPoisoned`](VmError::HwPoisoned), or
    /// what a [fault](Vm::fault) there may meet; [`OutOfBounds`](VmError::OutOfBounds) if the addresses end before.
    pub fn read(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        at: VirtAddr,
        into: &mut [u8],
    ) -> Result<(), AccessError> {
        let (bytes, to) = (into.len(), into.as_mut_ptr());
        self.access(cx, space, at, bytes, Verb::Read, &mut |from, count, place| {
            // SAFETY: `place` and `count` are of `bytes`; the window has as many.
            unsafe { load(from, to.add(place), count) }
        })
    }

    /// Copies `from` to `at`. As [`read`](Vm::read), as stores of the process: its areas allow them, and pages that were written are
    /// known as written.
    ///
    /// # Errors
    ///
    /// As [`read`](Vm::read); [`Denied`](VmError::Denied).
    pub fn write(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        at: VirtAddr,
        from: &[u8],
    ) -> Result<(), AccessError> {
        self.access(cx, space, at, from.len(), Verb::Write, &mut |to, count, place| {
            // SAFETY: as in `read`.
            unsafe { store(to, count, |index| from[place + index]) }
        })
    }

    /// Writes zeroes to so many bytes. As [`write`](Vm::write); pages of private areas that nobody has touched stay so.
    ///
    /// # Errors
    ///
    /// As [`write`](Vm::write).
    pub fn zero(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        at: VirtAddr,
        bytes: usize,
    ) -> Result<(), AccessError> {
        self.access(cx, space, at, bytes, Verb::Zero, &mut |to, count, _| {
            // SAFETY: as in `read`.
            unsafe { store(to, count, |_| 0) }
        })
    }

    fn access(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        at: VirtAddr,
        bytes: usize,
        verb: Verb,
        each: Each<'_>,
    ) -> Result<(), AccessError> {
        let mut done = 0;
        while done < bytes {
            let here = at.get().checked_add(done as u64).map(VirtAddr::new);
            let stopped = |cause| AccessError { done: done as u64, at: here.unwrap_or(at), cause };
            self.check_own(space).map_err(stopped)?;
            let Some(here) = here else { return Err(stopped(VmError::OutOfBounds { at })) };
            let most = (bytes - done).min(PART as usize);
            let mut shown = |memory: *mut u8, count, place| each(memory, count, done + place);
            let some = self.access_some(cx, space, here, most, verb, &mut shown).map_err(stopped)?;
            if some == 0 {
                self.fault(cx, space, here, verb.access()).map_err(stopped)?;
            }
            done += some;
            self.cond_resched(cx);
        }
        Ok(())
    }

    /// Shows what is mapped as it has to be from `at` on; how many bytes. At most so many, of one area.
    fn access_some(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        at: VirtAddr,
        most: usize,
        verb: Verb,
        each: Each<'_>,
    ) -> Result<usize, VmError> {
        let both = self.here(cx, space).both();
        let (task, access, areas) = (RefCell::new(cx), verb.access(), both.areas());
        let first = at.get() >> PAGE_SHIFT;
        let area = areas.find(first).ok_or(VmError::NoArea { at })?.info;
        if !area.kind.flags().contains(access.needs()) {
            return Err(VmError::Denied { at });
        }
        // The platform's map of it is another memory type.
        if area.kind.protection.attributes() != Protection::READ {
            return Err(VmError::Unreachable);
        }
        let into = (at.get() & (PAGE_BYTES - 1)) as usize;
        let end = area.range.end_page().min(first + ((into + most) as u64).div_ceil(PAGE_BYTES));
        let Some(span) = pages(first, end).filter(|_| !areas.alone) else { return Ok(0) };
        let mut table = both.table(self.tables(&task));
        let bytes_to = |page: u64| (((page - first) << PAGE_SHIFT) as usize - into).min(most);
        if verb == Verb::Zero && !area.kind.shared && !area.kind.sourced {
            let absent = table.absent(span)?;
            if absent > 0 {
                return Ok(bytes_to(first + absent));
            }
        }
        let (mut next, mut bad, mut noted, mut reached) = (first, None, true, true);
        table.walk(span, Flags::NONE, |run| {
            let zeroes = run.flags.contains(LENT) && !area.kind.sourced;
            if run.at.get() >> PAGE_SHIFT != next || bad.is_some() {
                return;
            }
            if zeroes && verb == Verb::Zero {
                next += run.extent.pages();
                return;
            }
            if !run.flags.contains(access.needs()) {
                return;
            }
            let pages = match self.frames().first_hwpoisoned(run.extent) {
                // A fault puts a page of the area's own there.
                Some(_) if zeroes => return,
                Some(frame) => {
                    bad = Some(frame);
                    frame.get() - run.extent.base().get()
                }
                None => run.extent.pages(),
            };
            let mut rest = run.extent.split_at(pages).0;
            while !rest.is_empty() {
                let shown = self.show(&task, rest, |memory, pages| {
                    let from = if next == first { 0 } else { bytes_to(next) };
                    let skipped = if next == first { into } else { 0 };
                    // SAFETY: within the window's first page.
                    each(unsafe { memory.add(skipped) }, bytes_to(next + pages) - from, from);
                });
                let Some(pages) = shown else {
                    reached = false;
                    break;
                };
                noted &= run.flags.contains(access.notes());
                next += pages;
                rest = rest.split_at(pages).1;
            }
        })?;
        if next == first {
            let failed = bad.map(|frame| VmError::HwPoisoned { frame });
            return failed.or((!reached).then_some(VmError::Unreachable)).map_or(Ok(0), Err);
        }
        if !noted {
            let size = area.kind.page.pages();
            // Whole leaves, so that none reaches over an end; what is around is not touched, and one look of ageing too young.
            let Some(whole) = pages(first / size * size, next.next_multiple_of(size)) else { return Ok(0) };
            let stale = table.protect(whole, Change { set: access.notes(), clear: Flags::NONE })?;
            drop(table);
            // As for a fault: what is not accessed is kept by nobody; what is clean may be kept as read-only.
            if access == Access::Write && !S::Format::FAULT_DROPS {
                let mut batch = ShootdownBatch::new(space.tlb());
                batch.stale(stale);
                batch.flush(self.shootdown(), &task.borrow(), self.shootdown_policy());
            }
        }
        Ok(bytes_to(next))
    }

    /// Shows frames through the direct map, from the first on: how many of them. `None` if the map does not reach it.
    fn show(&self, task: &RefCell<&mut Cx<'_, S>>, extent: Extent, each: impl FnOnce(*mut u8, u64)) -> Option<u64> {
        let cx = task.borrow();
        let map = cx.platform();
        let window = map.open(extent, None)?;
        let pages = window.pages.min(extent.pages());
        each(window.ptr, pages);
        // SAFETY: opened above, and nobody uses it any more.
        unsafe { map.close(window) };
        (pages > 0).then_some(pages)
    }
}

/// Copies `count` bytes that programs may be storing to.
///
/// # Safety
///
/// Both have as many; nobody else uses those at `into`.
pub(crate) unsafe fn load(from: *const u8, into: *mut u8, count: usize) {
    let mut done = 0;
    while done < count {
        // SAFETY: within both; words only where they are aligned and whole. Memory of programs is accessed by atomics here, and by their
        // own instructions otherwise.
        unsafe {
            let (at, to) = (from.add(done), into.add(done));
            done += match (at.addr().is_multiple_of(8), count - done) {
                // As fast as a plain copy, but where both are in the nearest cache.
                (true, 64..) => load_words::<8>(at, to),
                (true, 8..) => load_words::<1>(at, to),
                _ => {
                    to.write((*at.cast::<AtomicU8>()).load(Ordering::Relaxed));
                    1
                }
            };
        }
    }
}

/// The same for so many words, which are aligned. How many bytes.
unsafe fn load_words<const WORDS: usize>(from: *const u8, into: *mut u8) -> usize {
    // SAFETY: the caller's promises.
    unsafe {
        let words: [u64; WORDS] =
            core::array::from_fn(|word| (*from.cast::<AtomicU64>().add(word)).load(Ordering::Relaxed));
        ptr::copy_nonoverlapping(words.as_ptr().cast(), into, WORDS * 8);
    }
    WORDS * 8
}

/// Stores `count` bytes where programs may be loading and storing.
///
/// # Safety
///
/// There are as many at `to`.
pub(crate) unsafe fn store(to: *mut u8, count: usize, byte: impl Fn(usize) -> u8) {
    let mut done = 0;
    while done < count {
        // SAFETY: as in `load`.
        unsafe {
            let at = to.add(done);
            if at.addr().is_multiple_of(8) && count - done >= 8 {
                let word = u64::from_ne_bytes(core::array::from_fn(|index| byte(done + index)));
                (*at.cast::<AtomicU64>()).store(word, Ordering::Relaxed);
                done += 8;
            } else {
                (*at.cast::<AtomicU8>()).store(byte(done), Ordering::Relaxed);
                done += 1;
            }
        }
    }
}
