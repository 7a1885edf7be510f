//! Zeroed memory by the clearing engine, on real memory: in bounded units, never twice.

use hugemm_base::inject::NoFaults;
use hugemm_base::{CpuId, Never, NodeId, Order, PreemptModel, with};
use hugemm_clear::{ClearPolicy, ClearRequest, Clearer, Features, Profile};
use hugemm_frames::{AllocRequest, ArenaSpec, FramesConfig};
use hugemm_host::cpu::{BASE_FRAME, CpuPlace, Host, allowed_cpus};
use hugemm_host::mmap::Mmap;

/// A zeroed block is cleared by the engine, in units with a reschedule point each, and a block that is
/// known to be zero is handed out as it is.
#[test]
fn zeroed_blocks_are_cleared_in_units_and_once() {
    let mut region = Mmap::anonymous(32 << 20).expect("32 MiB of memory");
    region.bytes_mut().fill(0xa5);
    let first = region.start();
    let os_cpu = allowed_cpus().expect("a CPU")[0];
    let host = Host::new(&[CpuPlace { os_cpu, node: NodeId::new(0) }], region.bytes_mut()).expect("a machine");
    host.set_preempt_model(PreemptModel::None);
    let features = Features::detect();
    let policy = with!(ClearPolicy::new(Profile::uncalibrated(&features, None)), unit = Some(4 << 20));
    let clearer = Clearer::new(features, policy).expect("what the CPU has");

    let arenas = [ArenaSpec::new(host.frames(), NodeId::new(0))];
    let config = FramesConfig::new(&arenas, 1);
    let memory = crate::support::Memory::for_config(&config);
    let frames = memory.manager(&config, NoFaults);
    // SAFETY: the only owner of the host's frames, made once, released once.
    host.run_on(CpuId::new(0), |cx| unsafe { frames.release(cx, host.own_frames()) }).expect("a CPU");
    host.run_on(CpuId::new(0), |cx| {
        let order = Order::new(12).expect("16 MiB");
        let request = AllocRequest::order(order).prefer_zeroed();
        let block = frames.alloc(cx, request).expect("memory");
        let hint = ClearRequest::bulk(order.bytes());
        let zeroed = clearer.clear(cx, block.into_content(), &hint, &Never).expect("reachable");
        let counted = host.counters_sum();
        assert_eq!((counted.units, counted.reschedules), (4, 4), "16 MiB by 4 MiB");
        assert_eq!(counted.bytes_bulk + counted.bytes_cached, order.bytes());
        let offset = (zeroed.extent().base().get() - BASE_FRAME.get()) << 12;
        // SAFETY: the block's bytes lie in the region and are this test's.
        let bytes = unsafe { std::slice::from_raw_parts(first.as_ptr().add(offset as usize), 16 << 20) };
        assert!(bytes.iter().all(|byte| *byte == 0));
        // Freed as zero, it is found again, and nothing is cleared.
        frames.free_zeroed(cx, zeroed);
        let again = frames.alloc(cx, request).expect("memory");
        let zeroed = clearer.clear(cx, again.into_content(), &hint, &Never).expect("zero already");
        let counted = host.counters_sum().since(counted);
        assert_eq!((counted.units, counted.clears_skipped), (0, 1));
        frames.free_zeroed(cx, zeroed);
    })
    .expect("a CPU");
}
