//! Which types may go from thread to thread: all, since what is known of a CPU and what is left of an extent is anybody's
//! who has it. What may not is the context of the CPU that clears, which is borrowed for the time.
use hugemm_clear::features::{CpuIdentity, Vendor};
use hugemm_clear::parallel::Partly;
use hugemm_clear::*;

#[test]
fn every_type() {
    hugemm_threads::across_threads! {
        concat!(env!("CARGO_MANIFEST_DIR"), "/src"), private {}
        both {
            Warmth, Best, Mbps, Crossover, Profile, ProfileError, Vendor, CpuIdentity, Features, Content, Stopped, StopReason,
            Unit, Clearer, Primitive, PrimitiveClass, Lane, ParallelClear<'static>, Partly<'static>, Outcome<'static>,
            CalibrateError, ClearRequest, ClearPolicy,
        }
    }
}
