//! Which types may go from thread to thread: nearly all, since pools are everybody's and a page is anybody's who has it.

use hugemm_frames::Plain;
use hugemm_hugetlb::*;

type Map = crate::support::Map<'static>;

#[test]
fn every_type() {
    hugemm_threads::across_threads! {
        concat!(env!("CARGO_MANIFEST_DIR"), "/src"), private { SoftMap, PagedMap }
        both {
            HugePool<'static>, PoolCounts, PoolError, PoolArena, Group, HugePage, HugePageCounts, Nodes, ResizeReport,
            VmemmapOptimizer<'static, Plain, Map>,
            Map, OptimizerPolicy, DescriptorLeaf, Mapped, Tail, FlatMemory, Descriptors,
        }
    }
}
