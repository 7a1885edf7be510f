//! Which types may go from thread to thread: all, since lists and stores are everybody's and a slot is anybody's who holds it.

use crate::support::Runs;
use hugemm_frames::{Carved, Plain};
use hugemm_reclaim::*;
use hugemm_threads::{Memory, Threads};

type Here = hugemm_vm::DefaultSetup<Threads<Memory>>;

#[test]
fn every_type() {
    hugemm_threads::across_threads! {
        concat!(env!("CARGO_MANIFEST_DIR"), "/src"), private { }
        both {
            Lru<'static, 'static, Plain>, LruPolicy, LruStats,
            Compressed<'static, 'static, Plain, Runs>, Usage, Corrupt, SwapSlot, SwapStats, SlotError, StoreError, Evicted,
            Reclaim<'static, 'static, Here, Compressed<'static, 'static, Carved, Runs>>, ReclaimCounts, Ageing, Step,
            ShrinkBudget, ShrinkProgress, Watermarks, Level, Turn,
        }
    }
}
