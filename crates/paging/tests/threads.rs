//! Which types may go from thread to thread: nearly all. What holds a table's lock stays where it was locked.
#![cfg(not(loom))]

use hugemm_frames::Plain;
use hugemm_paging::cpu_readers::{CountedLock, Half, Inside, ReaderLine, Readers};
use hugemm_paging::*;
use hugemm_threads::{Memory, Threads};

type Frames = FrameTables<'static, 'static, 'static, Threads<Memory>, Plain>;

#[test]
fn every_type() {
    hugemm_threads::across_threads! {
        concat!(env!("CARGO_MANIFEST_DIR"), "/src"), private { Aarch64, TlbiStep, X86, KernelSpace, UserSpace, Deferred, TableContent, NoTable }
        both {
            PageTable<X86_64>, EditLock, Editing, Change, Flags, Leaf, Leaves<'static, X86_64>, Lookup, Mapping, OwnerNext, PagingError,
            Run, Stale, Young, Harvest, Detached, Unhooked, Keep, Counting, Tlbi, BareMetalTlbs, TlbCpu, TlbShootdownError,
            TlbShootdown<'static, Counting>, TlbSpace<UserSpace>, DeferredUnmap, ShootdownCounts, ShootdownPolicy,
            ShootdownBatch<'static, UserSpace, Keep, [hugemm_base::sync::AtomicU64; 2]>,
            Half, ReaderLine, Readers, CountedLock<EditLock>,
        }
        // The task's context is in it; a table is unlocked where it was locked.
        neither { FrameTables<'static, 'static, 'static, Threads<Memory>, Plain>, }
        neither {
            Shared<'static, X86_64, EditLock, Frames>, Exclusive<'static, X86_64, EditLock, Frames>, Inside<'static, EditLock, 2>,
        }
    }
}
