//! Address spaces whose cost is that of clearing their memory.
//!
//! A [`Vm`] makes address [spaces](AddressSpace) of areas of 4 KiB, 2 MiB and 1 GiB pages, private and shared, over the frame
//! allocator, the page tables and the shootdowns of the crates below. It needs no heap, keeps no global state and never
//! panics on exhaustion: every operation that can run out of memory asks its [pager](Pager::relieve) for relief and then
//! says so.
//!
//! ```
//! use hugemm_base::sync::AtomicU64;
//! use hugemm_base::{Extent, PageSize, Pfn, SingleCpu, VirtAddr, VirtRange};
//! use hugemm_clear::Clearer;
//! use hugemm_frames::Frames;
//! use hugemm_paging::{Counting, Lookup, TlbCpu, TlbShootdown};
//! use hugemm_vm::{Backing, DefaultSetup, FaultAccess, Parts, Served, Vm, VmaKind};
//!
//! # let layout = std::alloc::Layout::from_size_align(16 << 20, 2 << 20)?;
//! # let (ram, base) = (Extent::new(Pfn::new(0), 4096)?, unsafe { std::alloc::alloc_zeroed(layout) });
//! // SAFETY: nobody else uses `ram`; it stays mapped at `base`.
//! let (mut cx, ram) = unsafe { SingleCpu::start(ram, base) };
//! let frames = Frames::carve(&cx, ram)?;
//! let (cpus, inboxes) = ([TlbCpu::default()], [AtomicU64::new(0)]);
//! // SAFETY: no CPU walks the tables; in a kernel its own `TlbHw` stands for `Counting`.
//! let shootdown = unsafe { TlbShootdown::new(&cpus, &inboxes, Counting) }?;
//! let parts = Parts::new(&frames, &shootdown, Clearer::uncalibrated());
//! // SAFETY: `SingleCpu` is a direct map; there is no other platform.
//! let vm: Vm<'_, DefaultSetup<SingleCpu>> = unsafe { Vm::new(parts) }.expect("small objects fit in a frame");
//!
//! let space = vm.create(&mut cx, VirtRange::new(VirtAddr::new(0), 1 << 47)?)?;
//! let at = VirtAddr::new(0x40_0000);
//! vm.map(&mut cx, &space, VirtRange::new(at, 2 << 20)?, VmaKind::private(PageSize::Size2M), Backing::Private)?;
//! // What a page fault handler calls, with the error code of a program's store: one page of 2 MiB, cleared around the touch, and mapped.
//! let tried = FaultAccess::from_x86_error(6).expect("a page cures it");
//! assert_eq!(vm.fault(&mut cx, &space, at, tried)?, Served::Mapped);
//!
//! assert_eq!(space.find_vma(&cx, at)?.range.bytes(), 2 << 20);
//! let Lookup::Mapped(leaf) = vm.lookup(&mut cx, &space, at) else { panic!("mapped above") };
//! // Where the page is mapped, by its descriptor and the areas of what it belongs to.
//! assert_eq!(vm.walk_mappings(&mut cx, leaf.frame, |_, place| assert_eq!(place.at, at)), 1);
//! # vm.destroy(&mut cx, space).map_err(|(error, _)| error)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | file | the rule it owns |
//! |---|---|
//! | [`setup`], `default_setup.rs` | which types an embedder chooses |
//! | `vm.rs` | what all spaces share; asking for relief; letting others run |
//! | [`vma`] | what an area says; finding areas |
//! | `cutting.rs` | cutting areas, and joining them again |
//! | `protection.rs` | what an area may be asked to allow |
//! | `cpu_masks.rs` | which CPUs use a space: as many words as there are CPUs for |
//! | `cpu_lines.rs` | a line of a space for each CPU: who reads its areas and its table; counts |
//! | `area_tree.rs` | which areas show a page |
//! | [`object`] | what a page belongs to; the reverse map; who holds references |
//! | `rmap.rs` | reverse-map walks |
//! | `address_space.rs` | what an address space is |
//! | `space.rs`, `mapping.rs` | making and ending spaces, objects, areas |
//! | `given.rs` | objects of given frames, which stay their owner's |
//! | [`fault`], `inflight_faults.rs` | demand faults, and CPUs that meet at one page |
//! | `zeroes.rs` | the page of zeroes that is shown where nobody has stored |
//! | `supply.rs` | taking, clearing, counting and dropping pages |
//! | [`prefault`]; [`pin`] | filling by any number of CPUs; keeping pages for devices |
//! | [`unmap`] | one flush per call, then frees by runs |
//! | `lock.rs` | what stays in memory, and how much may |
//! | `move_to.rs` | a range at other addresses, longer or shorter |
//! | `advise.rs` | what is known of the use of a range |
//! | `protect.rs`, `discard.rs` | other rights for a range, and giving up what it has, with one flush |
//! | `access.rs` | reading and writing a space from outside of it |
//! | `alone.rs` | having a space to oneself across reschedule points |
//! | [`fork`], `cow.rs`, `copy.rs` | sharing pages until somebody writes; copies without bad memory |
//! | [`source`], [`write_back`] | files: pages that come from somewhere; giving them back, and taking away what is there no longer |
//! | `cuts.rs` | what was read of a file before a part of it went |
//! | [`pager`] | the seam to reclaim and swap |
//! | `swap_entry.rs`, `refault.rs` | what stands for a page in swap or on the move; bringing it back |
//! | [`unhook`] | a page that is taken out of its entries is one value; putting it back |
//! | [`evict`], [`ageing`] | writing pages out; what is known of their use, through the reverse map |
//! | `usage.rs` | what is there of a range |
//! | `working_set.rs` | which pages of a range have been used, for others than reclaim |
//! | `moving.rs` | moving pages to other frames |
//! | [`notifier`], `followers.rs` | whoever follows a space |
//! | [`zeroing`] | clearing free memory ahead of need |
//! | [`pool`] | the huge page pools that areas may take their pages from |
//! | `error.rs`, `phases.rs` | why an operation failed; whoever wants to know what a long one is doing |
//! | `promises.rs` | a pool's promises, while faults have pages in hand |
//! | `guarded.rs`, `tables.rs` | locks; page tables' memory |
//! | `slabs.rs`, `small_objects.rs` | memory of small objects, and which of them have slabs |
//!
//! # Order of locks
//!
//! A space's area list, then an object's area list (a file's before those of the lineages that copy it), then an object's index, then a
//! space's page table; the registry of objects and the slabs come last and alone. None is taken with interrupts off, and nothing sleeps or
//! reschedules under one. The area list is held while other CPUs are flushed by copy-on-write; they serve such requests while they wait
//! for it, because they wait with interrupts on. A fork, and whoever changes rights, holds none of them for long: it marks the list, and
//! whoever meets the mark lets others run and looks again.
#![cfg_attr(not(test), no_std)]
#![warn(missing_debug_implementations)]
#![deny(clippy::missing_errors_doc)]

mod access;
mod address_space;
mod advise;
pub mod ageing;
mod alone;
mod area_tree;
mod copy;
mod cow;
mod cpu_lines;
mod cpu_masks;
mod cuts;
mod cutting;
mod default_setup;
mod discard;
mod error;
pub mod evict;
pub mod fault;
mod followers;
pub mod fork;
mod given;
mod guarded;
mod inflight_faults;
mod lock;
mod mapping;
mod move_to;
mod moving;
pub mod notifier;
pub mod object;
pub mod pager;
mod phases;
pub mod pin;
pub mod pool;
pub mod prefault;
mod promises;
mod protect;
mod protection;
mod refault;
mod rmap;
pub mod setup;
mod slabs;
mod small_objects;
pub mod source;
mod space;
mod supply;
mod swap_entry;
mod tables;
pub mod unhook;
pub mod unmap;
mod usage;
mod vm;
pub mod vma;
mod working_set;
pub mod write_back;
mod zeroes;
pub mod zeroing;

pub use access::AccessError;
pub use address_space::{AddressSpace, AddressSpaceCounters, AddressSpaceRef};
pub use advise::Advice;
pub use ageing::{AgeRun, Neighbours, Recency};
pub use cpu_masks::{CpuMasks, SpaceTlb};
pub use default_setup::DefaultSetup;
pub use discard::Discard;
pub use error::VmError;
pub use fault::{Access, FaultAccess, Served};
pub use followers::Follower;
pub use mapping::{Backing, SharedRef};
pub use notifier::{Following, Notifier};
pub use object::Owner;
pub use pager::{LostPage, NoPager, Pager};
pub use phases::{Phase, Phases};
pub use pin::{PinError, Pinned};
pub use pool::Pools;
pub use prefault::Prefault;
pub use protection::Protection;
pub use rmap::Place;
pub use setup::{Cx, Setup};
pub use source::{PageSource, SourceError, StoredPages};
pub use unhook::UnhookedPage;
pub use unmap::Unmapped;
pub use usage::Usage;
pub use vm::{Parts, Vm};
pub use vma::{Pattern, VmaInfo, VmaKind};
pub use zeroes::LENT;
pub use zeroing::{ZeroTurn, ZeroWorker};
