//! Kernel virtual areas: addresses in a row for the kernel itself, over the largest blocks that there are.
//!
//! An [`Area`] owns a range of addresses and the pages behind it. Guard pages are on both sides. What is freed is detached at once, and
//! given back in batches after one TLB flush for many ([`Limits`]). Nothing here needs a heap: records are small objects of the frames'.
//!
//! ```
//! use hugemm_base::sync::AtomicU64;
//! use hugemm_base::{Extent, PageSize, Pfn, SingleCpu, VirtAddr, VirtRange};
//! use hugemm_clear::Clearer;
//! use hugemm_frames::{Carved, Frames};
//! use hugemm_kva::{Kva, KvaParts, KvaSetup, Request};
//! use hugemm_paging::{
//!     Counting, EditLock, Flags, FrameTables, KernelSpace, PageTable, TlbCpu, TlbShootdown, TlbSpace, X86_64,
//! };
//!
//! enum Example {}
//! impl KvaSetup for Example {
//!     type Platform = SingleCpu;
//!     type Env = Carved;
//!     type Format = X86_64;
//!     type Lock = EditLock;
//!     type Tlb = Counting;
//!     type Masks = [AtomicU64; 2];
//! }
//!
//! # let layout = std::alloc::Layout::from_size_align(8 << 20, 2 << 20)?;
//! # let (ram, base) = (Extent::new(Pfn::new(0), 2048)?, unsafe { std::alloc::alloc_zeroed(layout) });
//! // SAFETY: nobody else uses `ram`; it stays mapped at `base`.
//! let (mut cx, ram) = unsafe { SingleCpu::start(ram, base) };
//! let frames = Frames::carve(&cx, ram)?;
//! let (cpus, inboxes) = ([TlbCpu::default()], [AtomicU64::new(0)]);
//! // SAFETY: no CPU walks the tables of this example.
//! let shootdown = unsafe { TlbShootdown::new(&cpus, &inboxes, Counting) }?;
//! let half = VirtRange::new(VirtAddr::new(0xffff_8000_0000_0000), 1 << 39)?;
//! // SAFETY: one memory for tables, a direct map.
//! let table = unsafe { PageTable::with_fixed_top(&mut FrameTables::new(&frames, &cx), half) }?;
//! // SAFETY: as above; the only space.
//! let space: TlbSpace<KernelSpace> = unsafe { TlbSpace::new(&shootdown, table.root().start()) }?;
//! space.online(&shootdown, &cx);
//!
//! let parts = KvaParts::new(&frames, &table, &space, &shootdown, Clearer::uncalibrated());
//! // SAFETY: nobody else maps anything there; all of the memory is mapped as one.
//! let kva = unsafe { Kva::<Example>::new(&cx, parts, VirtRange::new(VirtAddr::new(0xffff_8000_4000_0000), 1 << 34)?) }?;
//!
//! let mut module = kva.alloc(&mut cx, Request::new(300 << 10, "a module").zeroed())?;
//! // ... its code is written there; then it can be executed, and be written to no more:
//! let text = module.range();
//! kva.protect(&cx, &mut module, text, Flags::EXEC)?;
//! kva.free(&mut cx, module).map_err(|(error, _)| error)?;
//! assert_eq!(kva.counts(&cx).waiting, 1); // until the batch is flushed, or somebody asks:
//! assert_eq!(kva.flush(&mut cx), 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | file | the rule it owns |
//! |---|---|
//! | [`setup`] | what a manager is built on, and how much may wait |
//! | [`area`] | what is asked for; the value that owns it; stacks |
//! | `kva.rs` | homes of addresses, records |
//! | `addresses.rs` | which addresses are whose |
//! | `alloc.rs` | the largest blocks first, mapped when all are there |
//! | `free.rs` | detached at once, given back after one flush for many |
//! | `protect.rs` | rights after filling |
//! | [`place`] | what an address is, for whoever reports a fault |
//! | [`error`] | why something was refused |
//!
//! # Who may call what where
//!
//! Taking, freeing, protecting and flushing wait for other CPUs, so they are a task's, with interrupts on. An interrupt handler may
//! [`free_later`](Kva::free_later) and ask [`what_is`](Kva::what_is) at an address; that also under any lock, of a page fault or an NMI.
//! Taking before other CPUs run works as it does later.
//!
//! Order of locks: the page table, then one of a home, of what waits, or of the frames', never two of those.
#![cfg_attr(not(test), no_std)]
#![warn(missing_debug_implementations)]
#![deny(clippy::missing_errors_doc, clippy::significant_drop_in_scrutinee)]

mod addresses;
mod alloc;
pub mod area;
pub mod error;
mod free;
mod kva;
pub mod place;
mod protect;
pub mod setup;

pub use area::{Area, Request, Stack};
pub use error::KvaError;
pub use free::KvaCounts;
pub use kva::Kva;
pub use place::{AreaInfo, AreaKind, Place};
pub use setup::{Cx, KvaParts, KvaSetup, Limits};
