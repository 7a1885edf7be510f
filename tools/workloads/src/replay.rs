//! Replaying somebody else's allocations: a list of operations on numbered blocks, run through the allocator.
//!
//! A plan is made beforehand (from a trace of a Linux kernel, for instance), so that nothing but the allocator and a
//! loop over [`Op`] is left for the time that is measured: no text, no map from foreign frame numbers. Blocks are known
//! by a number, their *slot*; [`Slots`] holds where each was put this time. [`run`] does the work and [`walk`] goes the
//! same way with no allocator behind it: the difference is the allocator's.
//!
//! Every block is counted, with one reference on its head, as a page or folio of Linux is; memory is not touched. [`run_on`] takes
//! another allocator, which keeps no references.

use crate::alloc_free::Source;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Order, Pfn};
use hugemm_frames::{AllocError, AllocRequest, Env, FolioRef, Frames, Mobility, Put, RefError};

/// One operation. Slots are numbered from 0; each is filled once and emptied once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Allocates a block into an empty slot.
    Alloc {
        /// The slot.
        slot: u32,
        /// The block's order.
        order: Order,
        /// What it is for.
        mobility: Mobility,
    },
    /// Drops the only reference of the block in a slot.
    Free {
        /// The slot.
        slot: u32,
        /// The block's order.
        order: Order,
    },
    /// Splits the block in a slot into blocks of one smaller order, which fill consecutive empty slots.
    Split {
        /// The slot.
        slot: u32,
        /// How many blocks it becomes.
        pieces: u32,
        /// Their order.
        to: Order,
        /// The slot of the first.
        first: u32,
    },
}

/// Where the blocks are. A slot is empty before its block is allocated, after it is freed, and if allocating it failed.
#[derive(Debug)]
pub struct Slots<'s>(&'s mut [u64]);

/// No block: the highest number is no frame's.
const EMPTY: u64 = u64::MAX;

impl<'s> Slots<'s> {
    /// All empty, in the caller's memory: as many as there are words.
    pub fn new(words: &'s mut [u64]) -> Self {
        words.fill(EMPTY);
        Slots(words)
    }

    /// Where the block of a slot is.
    pub fn get(&self, slot: u32) -> Option<Pfn> {
        self.0.get(slot as usize).copied().filter(|word| *word != EMPTY).map(Pfn::new)
    }

    #[inline]
    fn take(&mut self, slot: u32) -> Option<Pfn> {
        let word = core::mem::replace(self.0.get_mut(slot as usize)?, EMPTY);
        (word != EMPTY).then_some(Pfn::new(word))
    }

    #[inline]
    fn put(&mut self, slot: u32, head: Pfn) {
        if let Some(word) = self.0.get_mut(slot as usize) {
            *word = head.number();
        }
    }
}

/// Why the allocator did not do what a plan says although the block is there: a bug in one or the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// It knows no reference to the block.
    Reference(RefError),
    /// It knows more references than the one that the plan has.
    StillReferenced,
    /// It cannot split a block.
    Indivisible,
}

impl core::fmt::Display for Refused {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Refused::Reference(error) => error.fmt(f),
            Refused::StillReferenced => f.write_str("the block has more references than the one it was given"),
            Refused::Indivisible => f.write_str("it cannot split blocks"),
        }
    }
}

impl core::error::Error for Refused {}

impl From<RefError> for Refused {
    fn from(error: RefError) -> Self {
        Refused::Reference(error)
    }
}

/// What came of the operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplayCounts {
    /// Operations.
    pub ops: u64,
    /// Allocations for which there was no memory.
    pub failed: u64,
    /// Frees and splits of blocks whose allocation had failed: nothing was done.
    pub skipped: u64,
    /// Why the first operation was refused that was.
    pub refused: Option<Refused>,
}

impl ReplayCounts {
    /// Both added up.
    pub fn plus(self, other: ReplayCounts) -> ReplayCounts {
        ReplayCounts {
            ops: self.ops + other.ops,
            failed: self.failed + other.failed,
            skipped: self.skipped + other.skipped,
            refused: self.refused.or(other.refused),
        }
    }
}

/// What the operations are done to.
trait Target {
    fn alloc(&mut self, order: Order, mobility: Mobility) -> Result<Option<Pfn>, Refused>;
    fn free(&mut self, head: Pfn, order: Order) -> Result<(), Refused>;
    fn split(&mut self, head: Pfn, pieces: u32, to: Order) -> Result<(), Refused>;
}

struct Real<'a, 'm, 'p, E: Env, P: Cpu>(&'a Frames<'m, E>, &'a CpuCx<'p, P>);

impl<E: Env, P: Cpu> Target for Real<'_, '_, '_, E, P> {
    #[inline]
    fn alloc(&mut self, order: Order, mobility: Mobility) -> Result<Option<Pfn>, Refused> {
        match self.0.alloc(self.1, AllocRequest { mobility, ..AllocRequest::order(order) }) {
            // The plan keeps numbers.
            Ok(block) => match self.0.count(block) {
                Ok(folio) => Ok(Some(folio.into_pfn())),
                Err(_) => Err(RefError::NotManaged.into()),
            },
            Err(AllocError::OutOfMemory | AllocError::NoSuchNode | AllocError::WouldWait) => Ok(None),
        }
    }

    #[inline]
    fn free(&mut self, head: Pfn, _: Order) -> Result<(), Refused> {
        // SAFETY: the plan frees what it allocated, or divided, once.
        match self.0.put(self.1, unsafe { FolioRef::from_pfn(head) }) {
            Ok(Put::Last) => Ok(()),
            Ok(Put::Kept) => Err(Refused::StillReferenced),
            Err(_) => Err(RefError::NotManaged.into()),
        }
    }

    #[inline]
    fn split(&mut self, head: Pfn, _: u32, to: Order) -> Result<(), Refused> {
        // SAFETY: as above; what it is divided into is freed instead.
        match self.0.split_counted(unsafe { FolioRef::from_pfn(head) }, to) {
            Ok(parts) => {
                let _ = parts.into_extent();
                Ok(())
            }
            Err(_) => Err(Refused::StillReferenced),
        }
    }
}

/// Another allocator, whose blocks are numbers.
struct Other<'a, 'p, S, P: Cpu>(&'a S, &'a CpuCx<'p, P>);

impl<P: Cpu, S: Source<P, Block = u64>> Target for Other<'_, '_, S, P> {
    #[inline]
    fn alloc(&mut self, order: Order, _: Mobility) -> Result<Option<Pfn>, Refused> {
        Ok(self.0.alloc(self.1, order).map(Pfn::new))
    }

    #[inline]
    fn free(&mut self, head: Pfn, order: Order) -> Result<(), Refused> {
        self.0.free(self.1, head.number(), order);
        Ok(())
    }

    #[inline]
    fn split(&mut self, head: Pfn, pieces: u32, to: Order) -> Result<(), Refused> {
        let from = Order::new(to.get() + pieces.ilog2()).map_err(|_| Refused::Indivisible)?;
        self.0.divide(head.number(), from).map(|_| ()).map_err(|_| Refused::Indivisible)
    }
}

/// Hands out numbers.
struct Nobody(u64);

impl Target for Nobody {
    #[inline]
    fn alloc(&mut self, order: Order, _: Mobility) -> Result<Option<Pfn>, Refused> {
        self.0 += order.pages();
        Ok(Some(Pfn::new(self.0)))
    }

    #[inline]
    fn free(&mut self, head: Pfn, _: Order) -> Result<(), Refused> {
        core::hint::black_box(head);
        Ok(())
    }

    #[inline]
    fn split(&mut self, head: Pfn, _: u32, _: Order) -> Result<(), Refused> {
        core::hint::black_box(head);
        Ok(())
    }
}

#[inline]
fn each(target: &mut impl Target, ops: &[Op], slots: &mut Slots<'_>) -> ReplayCounts {
    let mut tally = ReplayCounts { ops: ops.len() as u64, ..ReplayCounts::default() };
    for op in ops {
        let outcome = match *op {
            Op::Alloc { slot, order, mobility } => target.alloc(order, mobility).map(|block| match block {
                Some(head) => slots.put(slot, head),
                None => tally.failed += 1,
            }),
            Op::Free { slot, order } => match slots.take(slot) {
                Some(head) => target.free(head, order),
                None => {
                    tally.skipped += 1;
                    Ok(())
                }
            },
            Op::Split { slot, pieces, to, first } => match slots.take(slot) {
                Some(head) => target.split(head, pieces, to).map(|()| {
                    for index in 0..pieces {
                        let at = head.number() + (u64::from(index) << to.get());
                        slots.put(first + index, Pfn::new(at));
                    }
                }),
                None => {
                    tally.skipped += 1;
                    Ok(())
                }
            },
        };
        if let Err(error) = outcome {
            tally.refused = tally.refused.or(Some(error));
        }
    }
    tally
}

/// Runs operations on the calling CPU. Any context but NMI; never sleeps.
pub fn run<P: Cpu, E: Env>(
    cx: &CpuCx<'_, P>,
    frames: &Frames<'_, E>,
    ops: &[Op],
    slots: &mut Slots<'_>,
) -> ReplayCounts {
    each(&mut Real(frames, cx), ops, slots)
}

/// The same with another allocator, whose blocks are known by number.
pub fn run_on<P: Cpu, S: Source<P, Block = u64>>(
    cx: &CpuCx<'_, P>,
    source: &S,
    ops: &[Op],
    slots: &mut Slots<'_>,
) -> ReplayCounts {
    each(&mut Other(source, cx), ops, slots)
}

/// The same loop over the same slots with no allocator behind it: what [`run`] costs apart from the allocator.
pub fn walk(ops: &[Op], slots: &mut Slots<'_>) -> ReplayCounts {
    each(&mut Nobody(1), ops, slots)
}
