//! A cache line for each CPU that uses a space: there it counts itself as a reader of the space's two locks, and what it does.
//!
//! So CPUs whose faults, look-ups and pins have nothing to do with each other write no line that another one reads; whoever has the areas
//! or the page table alone [visits](hugemm_paging::cpu_readers) all lines, and sums are made when they are asked for. A space begins
//! with one line, for the CPU that made it. Another CPU gets one of its own with its first fault; if there is no memory for it, it uses
//! the first. A task that moves on between two uses may go on with its former CPU's: that is right, and slower.

use crate::address_space::AddressSpace;
use crate::setup::{Cx, Setup};
use crate::vm::Vm;
use crate::vma::Areas;
use core::fmt;
use core::mem::size_of;
use core::ops::{Deref, DerefMut};
use core::ptr::{NonNull, null_mut};
use hugemm_base::Outstanding;
use hugemm_base::counters::Counter;
use hugemm_base::platform::Cpu;
use hugemm_base::sync::{AtomicPtr, Ordering};
use hugemm_paging::cpu_readers::{Inside, ReaderLine, Readers};
use hugemm_paging::{Shared, TableMemory};

/// What one CPU has of a space.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct CpuLine {
    readers: ReaderLine,
    /// Pages to which [`Vm::pin`](crate::Vm::pin) takes references: begun before they are looked at, under locks that a fork has
    /// alone; ended when their references are gone.
    pub(crate) pinned: Outstanding,
    /// See [`AddressSpaceCounters`](crate::AddressSpaceCounters).
    pub(crate) mapped: Counter,
    pub(crate) waited: Counter,
    pub(crate) copied: Counter,
    pub(crate) reused: Counter,
}

const _: () = assert!(size_of::<CpuLine>() == 64);

/// Behind a space and its CPU masks, in its own memory.
struct Behind {
    first: CpuLine,
    readers: Readers,
}

/// The lines of one space. They live as long as its memory, except those that CPUs have got.
pub(crate) struct CpuLines {
    behind: NonNull<Behind>,
    /// By the CPU's number, null if it has none.
    by_cpu: NonNull<AtomicPtr<CpuLine>>,
    cpus: usize,
}

// SAFETY: a view of atomics, which may be sent and shared.
unsafe impl Send for CpuLines {}
// SAFETY: as above.
unsafe impl Sync for CpuLines {}

impl fmt::Debug for CpuLines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuLines").field("cpus", &self.cpus).finish_non_exhaustive()
    }
}

/// Bytes of the largest small object.
const MOST: usize = 4032;

/// Where the lines of a space stand that has so many bytes before them; how many CPUs can have one; bytes of all that. So many that it
/// fits in a frame: where there are more CPUs, several have one.
pub(crate) fn layout(before: usize, cpus: usize) -> (usize, usize, usize) {
    let behind = before.next_multiple_of(align_of::<Behind>());
    let by_cpu = behind + size_of::<Behind>();
    let cpus = cpus.min(MOST.saturating_sub(by_cpu) / size_of::<AtomicPtr<CpuLine>>()).max(1);
    (behind, cpus, by_cpu + cpus * size_of::<AtomicPtr<CpuLine>>())
}

impl CpuLines {
    /// The lines behind a space, with one for this CPU.
    ///
    /// # Safety
    ///
    /// The memory is the caller's, laid out as [`layout`] says, and outlives the value; it is aligned as a line.
    pub(crate) unsafe fn behind(memory: NonNull<u8>, before: usize, cpus: usize, cpu: usize) -> CpuLines {
        let (at, cpus, _) = layout(before, cpus);
        // SAFETY: the layout has room for both, aligned.
        let behind = unsafe { memory.add(at) }.cast::<Behind>();
        // SAFETY: as above.
        let by_cpu = unsafe { behind.add(1) }.cast::<AtomicPtr<CpuLine>>();
        // SAFETY: as above.
        unsafe { behind.write(Behind { first: CpuLine::default(), readers: Readers::default() }) };
        // SAFETY: written above; a raw pointer to all of the line.
        let first = unsafe { NonNull::new_unchecked(&raw mut (*behind.as_ptr()).first) };
        for index in 0..cpus {
            let own = if index == cpu % cpus { first.as_ptr() } else { null_mut() };
            // SAFETY: as above.
            unsafe { by_cpu.add(index).write(AtomicPtr::new(own)) };
        }
        let lines = CpuLines { behind, by_cpu, cpus };
        // SAFETY: new, and it stays as long as this.
        unsafe { lines.readers().as_ref().add(first.cast()) };
        lines
    }

    /// On which the space's locks count.
    pub(crate) fn readers(&self) -> NonNull<Readers> {
        // SAFETY: `behind` wrote it; a raw pointer.
        unsafe { NonNull::new_unchecked(&raw mut (*self.behind.as_ptr()).readers) }
    }

    fn place(&self, cpu: usize) -> &AtomicPtr<CpuLine> {
        let index = if cpu < self.cpus { cpu } else { cpu % self.cpus };
        // SAFETY: `behind` wrote so many there.
        unsafe { self.by_cpu.add(index).as_ref() }
    }

    /// A CPU's own line, if it has one.
    #[inline]
    fn of(&self, cpu: usize) -> Option<&CpuLine> {
        // Acquire pairs with the Release in `give`. SAFETY: lines that were given stay.
        unsafe { self.place(cpu).load(Ordering::Acquire).as_ref() }
    }

    fn first(&self) -> &CpuLine {
        // SAFETY: `behind` wrote it.
        unsafe { &self.behind.as_ref().first }
    }

    /// Gives a CPU a new line. If it has got one meanwhile, that one stays its own, and nobody uses this.
    ///
    /// # Safety
    ///
    /// The line is new, and stays until it is [drained](CpuLines::drain).
    unsafe fn give(&self, cpu: usize, line: NonNull<CpuLine>) {
        // Before anybody can enter by it.
        // SAFETY: the caller's promise.
        unsafe { self.readers().as_ref().add(line.cast()) };
        // Release pairs with the Acquire in `of`.
        let _ = self.place(cpu).compare_exchange(null_mut(), line.as_ptr(), Ordering::Release, Ordering::Relaxed);
    }

    fn all(&self) -> impl Iterator<Item = NonNull<CpuLine>> {
        // SAFETY: `behind` wrote it; lines on the list are the first of a `CpuLine` each, by pointers to all of it.
        unsafe { self.readers().as_ref() }.lines().map(NonNull::cast)
    }

    /// The sum of something over all lines.
    pub(crate) fn sum(&self, of: impl Fn(&CpuLine) -> u64) -> u64 {
        // SAFETY: lines stay.
        self.all().fold(0, |sum, line| sum.wrapping_add(of(unsafe { line.as_ref() })))
    }

    /// Whether anything is pinned: what a fork asks, during which no references are taken, and whoever ends the space.
    pub(crate) fn any_pinned(&self) -> bool {
        // SAFETY: lines stay.
        Outstanding::any(|| self.all().map(|line| &unsafe { line.as_ref() }.pinned))
    }

    /// The lines that CPUs have got: the caller's again, to be freed.
    ///
    /// # Safety
    ///
    /// The space is the caller's alone, and this is not used any more.
    pub(crate) unsafe fn drain(&self) -> impl Iterator<Item = NonNull<CpuLine>> {
        let first = self.first();
        self.all().filter(move |line| !core::ptr::eq(line.as_ptr(), first))
    }
}

/// A space as a CPU sees it that has a line there: how to look at its areas and at its page table.
pub(crate) struct Here<'s, S: Setup> {
    space: &'s AddressSpace<S>,
    line: &'s CpuLine,
}

impl<S: Setup> Clone for Here<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Setup> Copy for Here<'_, S> {}

impl<S: Setup> Vm<'_, S> {
    /// The space from this CPU, which gets a line if it has none. Any locks may be held.
    #[inline]
    pub(crate) fn here<'s>(&self, cx: &Cx<'_, S>, space: &'s AddressSpace<S>) -> Here<'s, S> {
        let line = space.lines().of(cpu::<S>(cx)).unwrap_or_else(|| self.new_line(cx, space));
        Here { space, line }
    }

    #[cold]
    fn new_line<'s>(&self, cx: &Cx<'_, S>, space: &'s AddressSpace<S>) -> &'s CpuLine {
        let (lines, cpu) = (space.lines(), cpu::<S>(cx));
        if let Ok(line) = self.try_keep(cx, CpuLine::default()) {
            // SAFETY: new; freed after the space has ended.
            unsafe { lines.give(cpu, line) };
        }
        lines.of(cpu).unwrap_or(lines.first())
    }
}

/// The number of the CPU, which the task may leave at once.
pub(crate) fn cpu<S: Setup>(cx: &Cx<'_, S>) -> usize {
    cx.platform().current().get() as usize
}

impl<'s, S: Setup> Here<'s, S> {
    /// The space from this CPU, by the first line if it has none of its own.
    #[inline]
    pub(crate) fn known(cx: &Cx<'_, S>, space: &'s AddressSpace<S>) -> Self {
        let line = space.lines().of(cpu::<S>(cx)).unwrap_or(space.lines().first());
        Here { space, line }
    }

    pub(crate) fn space(self) -> &'s AddressSpace<S> {
        self.space
    }

    pub(crate) fn line(self) -> &'s CpuLine {
        self.line
    }

    /// Waits until nobody changes the areas.
    #[inline]
    pub(crate) fn areas(self) -> AreasHere<'s, S> {
        // SAFETY: the space's own line and lock.
        let inside = unsafe { Inside::enter(&self.line.readers, [self.space.areas().lock()]) };
        AreasHere { space: self.space, _inside: inside }
    }

    /// Waits until nobody takes away entries.
    #[inline]
    pub(crate) fn table<M: TableMemory>(self, memory: M) -> TableHere<'s, S, M> {
        let table = self.space.table();
        // SAFETY: as above.
        let inside = unsafe { Inside::enter(&self.line.readers, [table.lock()]) };
        // SAFETY: inside, and the guard is dropped first.
        TableHere { shared: unsafe { table.shared_inside(memory) }, _inside: inside }
    }

    /// Both, at the cost of one.
    #[inline]
    pub(crate) fn both(self) -> Both<'s, S> {
        let Here { space, line } = self;
        // SAFETY: as above; the areas count low, the table high.
        let inside = unsafe { Inside::enter(&line.readers, [space.areas().lock(), space.table().lock()]) };
        Both { space, _inside: inside }
    }
}

/// Holds a space's areas shared.
#[clippy::has_significant_drop]
pub(crate) struct AreasHere<'s, S: Setup> {
    space: &'s AddressSpace<S>,
    _inside: Inside<'s, S::Lock, 1>,
}

impl<S: Setup> Deref for AreasHere<'_, S> {
    type Target = Areas<S>;

    fn deref(&self) -> &Areas<S> {
        // SAFETY: inside.
        unsafe { self.space.areas().inside() }
    }
}

/// Holds a space's page table shared.
#[clippy::has_significant_drop]
pub(crate) struct TableHere<'s, S: Setup, M: TableMemory> {
    shared: Shared<'s, S::Format, S::Lock, M>,
    _inside: Inside<'s, S::Lock, 1>,
}

impl<'s, S: Setup, M: TableMemory> Deref for TableHere<'s, S, M> {
    type Target = Shared<'s, S::Format, S::Lock, M>;

    fn deref(&self) -> &Self::Target {
        &self.shared
    }
}

impl<S: Setup, M: TableMemory> DerefMut for TableHere<'_, S, M> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.shared
    }
}

/// Holds a space's areas and its page table shared.
#[clippy::has_significant_drop]
pub(crate) struct Both<'s, S: Setup> {
    space: &'s AddressSpace<S>,
    _inside: Inside<'s, S::Lock, 2>,
}

impl<S: Setup> Both<'_, S> {
    pub(crate) fn areas(&self) -> &Areas<S> {
        // SAFETY: inside.
        unsafe { self.space.areas().inside() }
    }

    pub(crate) fn table<M: TableMemory>(&self, memory: M) -> Shared<'_, S::Format, S::Lock, M> {
        // SAFETY: inside, for as long as this is borrowed.
        unsafe { self.space.table().shared_inside(memory) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A space with its lines fits in a frame however many CPUs there are; up to some hundreds each has a place of its own.
    #[test]
    fn all_places_fit_in_a_frame() {
        for (cpus, own) in [(1_usize, 1), (2, 2), (256, 256), (360, 360), (8192, 100)] {
            let masks = 2 * 8 * cpus.div_ceil(64);
            let (at, places, bytes) = layout(768 + masks, cpus);
            assert!(places >= own && places <= cpus && bytes <= MOST, "{cpus} CPUs: {places} in {bytes} bytes");
            assert_eq!(at % 64, 0);
        }
        assert_eq!(layout(1 << 20, 4).1, 1, "for a space that does not fit");
    }

    /// CPUs without a place of their own have one with others; who has no line finds none.
    #[test]
    fn each_cpu_finds_the_line_that_it_was_given() {
        #[repr(align(64))]
        struct Memory([u8; 4096]);
        let mut memory = Memory([0; 4096]);
        let (mut mine, mut second) = (CpuLine::default(), CpuLine::default());
        let mine = NonNull::from(&mut mine);
        // SAFETY: large enough, and outlives the lines.
        let lines = unsafe { CpuLines::behind(NonNull::from(&mut memory.0).cast(), 100, 3, 4) };
        let of = |cpu| lines.of(cpu).map(core::ptr::from_ref);
        assert_eq!([0, 1, 2, 4].map(of), [None, Some(core::ptr::from_ref(lines.first())), None, of(1)]);
        // SAFETY: new, and they outlive the lines.
        unsafe { lines.give(2, mine) };
        // SAFETY: as above.
        unsafe { lines.give(5, NonNull::from(&mut second)) };
        assert_eq!([of(2), of(5), of(0)], [Some(mine.as_ptr().cast_const()), of(2), None]);
        // SAFETY: it is there.
        let mine = unsafe { mine.as_ref() };
        lines.first().pinned.begin(3);
        assert!(lines.any_pinned());
        mine.pinned.end(3);
        assert!(!lines.any_pinned());
        mine.mapped.add(2);
        lines.first().mapped.add(5);
        assert_eq!(lines.sum(|line| line.mapped.get()), 7);
        // SAFETY: nobody else uses them.
        assert_eq!(unsafe { lines.drain() }.count(), 2);
    }
}
