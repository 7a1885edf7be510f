//! Which types may go from thread to thread: nearly all, since spaces are everybody's and pages anybody's who has them.

use hugemm_base::sync::AtomicU64;
use hugemm_threads::{Memory, Threads};
use hugemm_vm::*;

type Here = DefaultSetup<Threads<Memory>>;

#[test]
fn every_type() {
    hugemm_threads::across_threads! {
        concat!(env!("CARGO_MANIFEST_DIR"), "/src"), private { CpuMasks, DefaultSetup, Owner, Place }
        both {
            Vm<'static, Here>, Parts<'static, Here>, Here, AddressSpace<Here>, AddressSpaceRef<'static, Here>,
            AddressSpaceCounters, SharedRef<'static, Here>, Backing<'static, 'static, Here>, Prefault<'static, 'static, 'static, Here>,
            Pinned, PinError, Pools<'static>, Usage, AccessError, VmaInfo, VmaKind, Protection, Access, FaultAccess, Served, VmError, Phase, LostPage, NoPager,
            Following, Recency, Unmapped, ZeroTurn, ZeroWorker, AgeRun<'static>,
            SourceError, StoredPages<'static>, Advice, Discard, Pattern,
        }
        // One task has it in hand.
        send { UnhookedPage<'static, 'static, Here, [AtomicU64; 2]>, Follower<Here>, }
        // Closures of one task, for one call.
        neither { Neighbours<'static, 'static, Here>, }
    }
}

/// Spaces and objects go from thread to thread whatever the setup is, so its locks do.
#[test]
fn every_setup_has_locks_for_threads() {
    fn across<T: Send + Sync>() {}
    fn of<S: Setup>() {
        across::<S::Lock>();
        across::<AddressSpaceRef<'static, S>>();
        across::<SharedRef<'static, S>>();
    }
    of::<Here>();
}
