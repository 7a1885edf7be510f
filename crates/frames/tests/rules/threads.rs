//! Which types may go from thread to thread: nearly all, since a frame is anybody's who is given it, and a manager is everybody's.

use hugemm_base::lock::SpinLock;
use hugemm_frames::*;

#[test]
fn every_type() {
    hugemm_threads::across_threads! {
        concat!(env!("CARGO_MANIFEST_DIR"), "/src"), private { Dropped, Finding, Holder, Mailbox, PackedSide, Record, Watch }
        both {
            Frames<'static, Plain>, Frames<'static, Carved>, Plain, Carved, CarveError, CarveReason, FramesConfigError, AllocRequest, AllocError, AllocContigError, NoMigration, Placement, Mobility,
            HwPoisoned, Frozen, FrozenRun, FolioRef, FolioRun, Put, RefError, RangeReport, NodeStats, WideCounts,
            Descriptor, Slab<SpinLock>, SlabStats, RemoveError,
        }
        // Pointers to descriptors or metadata; stores to a descriptor are its owner's.
        neither { DescMut<'static>, DescRef<'static>, ArenaSpec, FramesConfig<'static>, RemovedArena, }
    }
}
