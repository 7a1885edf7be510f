//! The feature `debug`: free memory is filled with a pattern that is looked for when it is taken, and each block has a record of who took it
//! and who freed it. So whoever wrote after a free is found, with the names of those two; so is what is freed twice; and what is in
//! use can be listed by use and caller.
//!
//! Without the feature nothing of this is compiled. With it a free writes all of the memory, and an allocation reads it. Memory that is
//! known to be zero stays so, and is not looked at.

use crate::frames::{Env, Frames};
use core::fmt;
use core::marker::PhantomData;
use core::panic::Location;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use hugemm_base::{Extent, FrameUse, Order, PAGE_BYTES, Pfn};

/// What free memory is filled with: as an address it is in nobody's half.
const PATTERN: u64 = 0x6ead_f4ee_6ead_f4ee;

/// States of a record.
const USED: u64 = 1;
const FREED: u64 = 2;
const FILLED: u64 = 3;

type Site = Location<'static>;

/// What is known of a frame: 24 bytes.
#[derive(Debug, Default)]
pub struct Record {
    taken: AtomicPtr<Site>,
    freed: AtomicPtr<Site>,
    /// State in bits 0 and 1, order in 8 to 15, the use's number and one in 16 to 23, the epoch of the allocation from 32 on.
    state: AtomicU64,
}

fn site(at: &AtomicPtr<Site>) -> Option<&'static Site> {
    // SAFETY: only places in the program are stored, which are there for good.
    unsafe { at.load(Ordering::Relaxed).as_ref() }
}

/// A block that somebody has, or had when it was freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The block's first frame.
    pub head: Pfn,
    /// Its order when it was taken.
    pub order: Order,
    /// What it was [taken for](Frames::alloc_for), if that was said.
    pub of: Option<FrameUse>,
    /// Who took it.
    pub taken: Option<&'static Location<'static>>,
    /// Who freed it last.
    pub freed: Option<&'static Location<'static>>,
}

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// A frame was written to while it was free.
    UsedAfterFree {
        /// Which.
        frame: Pfn,
        /// The first byte of it that is not as it was left.
        byte: u64,
        /// Who had it before, and freed it.
        holder: Holder,
    },
    /// A frame was freed that was free.
    FreedTwice {
        /// Which.
        frame: Pfn,
        /// Who had it before, and freed it the first time.
        holder: Holder,
        /// Who freed it now.
        again: &'static Location<'static>,
    },
}

struct At(Option<&'static Site>);

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(site) => write!(f, "{}:{}", site.file(), site.line()),
            None => f.write_str("nobody knows where"),
        }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "frame {}, order {}, taken at {}", self.head, self.order, At(self.taken))?;
        self.of.map_or(Ok(()), |of| write!(f, " for {of}"))
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finding::UsedAfterFree { frame, byte, holder } => {
                write!(f, "use after free: byte {byte} of frame {frame} was written after it was freed at ")?;
                write!(f, "{}; it was {holder}", At(holder.freed))
            }
            Finding::FreedTwice { frame, holder, again } => {
                write!(f, "double free: frame {frame} is freed at {} and was at ", At(Some(again)))?;
                write!(f, "{}; it was {holder}", At(holder.freed))
            }
        }
    }
}

/// What [`Env::watch`] gives a manager to watch its memory with.
#[derive(Debug)]
pub struct Watch<'m> {
    first: Pfn,
    records: &'m [Record],
    /// Where frame 0 is, or would be.
    offset: usize,
    report: fn(&Finding),
    epoch: AtomicU64,
    memory: PhantomData<*mut u8>,
}

// SAFETY: records are atomics; a frame's bytes are touched by who frees or takes it alone.
unsafe impl Sync for Watch<'_> {}
// SAFETY: as above.
unsafe impl Send for Watch<'_> {}

impl<'m> Watch<'m> {
    /// Watches the frames from `first` on, as many as there are `records`, all new. What is found goes to `report`, which may be called in any
    /// context, by who frees or takes the frame.
    ///
    /// # Safety
    ///
    /// Each of these frames that the manager has is mapped, to be read and written, for `'m`, at its physical address and `offset`.
    pub const unsafe fn new(first: Pfn, records: &'m [Record], offset: usize, report: fn(&Finding)) -> Self {
        Watch { first, records, offset, report, epoch: AtomicU64::new(0), memory: PhantomData }
    }

    fn record(&self, frame: Pfn) -> Option<&'m Record> {
        self.records.get(frame.get().checked_sub(self.first.get())? as usize)
    }

    fn frames(&self, extent: Extent) -> impl Iterator<Item = (Pfn, &'m Record)> {
        (0..extent.pages()).filter_map(move |page| {
            let frame = Pfn::new(extent.base().get() + page);
            Some((frame, self.record(frame)?))
        })
    }

    fn words(&self, frame: Pfn) -> *mut u64 {
        core::ptr::with_exposed_provenance_mut(self.offset.wrapping_add(frame.start().get() as usize))
    }

    /// The holder that a frame's record names.
    fn holder(&self, frame: Pfn, record: &Record) -> Holder {
        let state = record.state.load(Ordering::Relaxed);
        Holder {
            head: frame,
            order: Order::new((state >> 8 & 0xff) as u32).unwrap_or_default(),
            of: (state >> 16 & 0xff).checked_sub(1).and_then(|number| FrameUse::from_number(number as u8)),
            taken: site(&record.taken),
            freed: site(&record.freed),
        }
    }

    /// Frames have been taken: what they were filled with is to be there.
    fn taken(&self, extent: Extent, order: Order, at: &'static Site) {
        let epoch = self.epoch.load(Ordering::Relaxed);
        for (frame, record) in self.frames(extent) {
            if record.state.load(Ordering::Relaxed) & 3 == FILLED {
                // SAFETY: mapped by the promise made to `new`; the frame is the caller's.
                let word = |index| unsafe { self.words(frame).add(index).read_volatile() };
                let spoilt = (0..PAGE_BYTES as usize / 8).map(word).enumerate().find(|(_, word)| *word != PATTERN);
                if let Some((index, word)) = spoilt {
                    let byte = index as u64 * 8 + u64::from((word.to_le() ^ PATTERN.to_le()).trailing_zeros() / 8);
                    let holder = self.holder(frame, record);
                    (self.report)(&Finding::UsedAfterFree { frame, byte, holder });
                }
            }
            record.taken.store(core::ptr::from_ref(at).cast_mut(), Ordering::Relaxed);
            record.freed.store(null_mut(), Ordering::Relaxed);
            record.state.store(USED | u64::from(order.get()) << 8 | epoch << 32, Ordering::Relaxed);
        }
    }

    /// Frames are about to be freed.
    fn freed(&self, extent: Extent, zero: bool, at: &'static Site, is_bad: impl Fn(Pfn) -> bool) {
        for (frame, record) in self.frames(extent) {
            let before = record.state.load(Ordering::Relaxed);
            if matches!(before & 3, FREED | FILLED) {
                let holder = self.holder(frame, record);
                (self.report)(&Finding::FreedTwice { frame, holder, again: at });
            }
            record.freed.store(core::ptr::from_ref(at).cast_mut(), Ordering::Relaxed);
            let fill = !zero && !is_bad(frame);
            if fill {
                // SAFETY: as in `taken`: the caller is about to give it up.
                (0..PAGE_BYTES as usize / 8).for_each(|index| unsafe { self.words(frame).add(index).write(PATTERN) });
            }
            record.state.store(before & !3 | if fill { FILLED } else { FREED }, Ordering::Relaxed);
        }
    }

    fn used_for(&self, extent: Extent, of: FrameUse) {
        for (_, record) in self.frames(extent) {
            record.state.fetch_or((u64::from(of.number()) + 1) << 16, Ordering::Relaxed);
        }
    }

    /// Begins to watch for leaks: what is taken from here on and still in use is what [`in_use_since`](Watch::in_use_since) the number
    /// finds. At most 2^32 times.
    pub fn begin(&self) -> u64 {
        self.epoch.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Blocks in use that were taken since then, in ascending order; 0 for all. What counted blocks were split into is single frames. O(records);
    /// a snapshot while others allocate.
    pub fn in_use_since(&self, began: u64) -> impl Iterator<Item = Holder> {
        let frame = |index: usize| Pfn::new(self.first.get() + index as u64);
        let is_used = move |record: &Record| {
            let state = record.state.load(Ordering::Relaxed);
            state & 3 == USED && state >> 32 >= began
        };
        let mut past = Pfn::new(0);
        let all = self.records.iter().enumerate().filter(move |(_, record)| is_used(record));
        all.map(move |(index, record)| self.holder(frame(index), record)).filter(move |holder| {
            let head = holder.head >= past;
            if head {
                past = Pfn::new(holder.head.get() + holder.order.pages());
            }
            head
        })
    }

    /// The same by use and caller: fills `rows` with a holder of each and how many frames those have, and says how many rows there are, which
    /// may be more than fit.
    pub fn in_use_by_caller(&self, began: u64, rows: &mut [Option<(Holder, u64)>]) -> usize {
        let mut count = 0;
        for holder in self.in_use_since(began) {
            let pages = holder.order.pages();
            let same = |row: &&mut Option<(Holder, u64)>| {
                row.is_some_and(|(known, _)| (known.of, known.taken) == (holder.of, holder.taken))
            };
            match rows.iter_mut().find(same) {
                Some(Some((_, sum))) => *sum += pages,
                _ => {
                    if let Some(row) = rows.get_mut(count) {
                        *row = Some((holder, pages));
                    }
                    count += 1;
                }
            }
        }
        count
    }
}

impl<E: Env> Frames<'_, E> {
    pub(crate) fn note_taken(&self, extent: Extent, order: Order, at: &'static Site) {
        self.env().watch().into_iter().for_each(|watch| watch.taken(extent, order, at));
    }

    pub(crate) fn note_use(&self, extent: Extent, of: FrameUse) {
        self.env().watch().into_iter().for_each(|watch| watch.used_for(extent, of));
    }

    pub(crate) fn note_freed(&self, extent: Extent, zero: bool, at: &'static Site) {
        let is_bad = |frame| self.is_hwpoisoned(frame);
        self.env().watch().into_iter().for_each(|watch| watch.freed(extent, zero, at, is_bad));
    }
}
