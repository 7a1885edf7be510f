//! A thread is one CPU of one machine, and gets what that machine grants.

use crate::cpu::{CpuError, CpuPlace, Host};
use hugemm_base::{Cpu, CpuId, Extent, NodeId, PAGE_BYTES, Pfn, PhysMap};

fn machine(cpus: usize) -> Host<'static> {
    Host::new(&vec![CpuPlace { os_cpu: 0, node: NodeId::new(0) }; cpus], &mut []).expect("a machine")
}

/// Whoever takes a turn on a second machine is the same CPU of the first, whose contexts and pins are still there.
#[test]
fn a_turn_on_another_machine_leaves_the_cpu_what_it_is() {
    let (outer, inner) = (machine(3), machine(2));
    outer
        .run_on(CpuId::new(2), |cx| {
            let within = inner.run_on(CpuId::new(1), |within| {
                assert_eq!((cx.platform().current(), within.platform().current()), (CpuId::new(2), CpuId::new(1)));
                assert_eq!(cx.pinned(|pin| pin.cpu()), CpuId::new(2));
                // Nobody is two CPUs of one machine, however deep.
                let again = outer.run_on(CpuId::new(0), |_| ());
                assert!(matches!(again, Err(CpuError::Nested { cpu }) if cpu == CpuId::new(2)), "{again:?}");
            });
            assert!(within.is_ok());
            assert_eq!((outer.current(), inner.current()), (CpuId::new(2), CpuId::new(0)), "the turn is over");
            let again = outer.run_on(CpuId::new(0), |_| ());
            assert!(matches!(again, Err(CpuError::Nested { cpu }) if cpu == CpuId::new(2)), "{again:?}");
        })
        .expect("the CPU exists");
}

#[test]
fn vector_registers_are_granted_until_the_machine_is_told_otherwise() {
    let host = machine(1);
    let granted =
        || host.run_on(CpuId::new(0), |cx| cx.with_vector(true, |vector| vector.is_some())).expect("the CPU exists");
    assert!(granted());
    host.grant_vectors(false);
    assert!(!granted());
    host.grant_vectors(true);
    assert!(granted());
}

/// What begins in the memory is opened as far as the memory goes, and nothing else is.
#[test]
fn only_the_machines_memory_is_opened() {
    #[repr(align(4096))]
    struct Pages([u8; 4 * PAGE_BYTES as usize]);
    let mut memory = Pages([0; 4 * PAGE_BYTES as usize]);
    let bytes = &mut memory.0[..];
    let start = bytes.as_mut_ptr();
    let host = Host::new(&[CpuPlace { os_cpu: 0, node: NodeId::new(0) }], bytes).expect("a machine");
    let first = host.frames().base().get();
    let open = |frame: u64, pages: u64| {
        let window = host.open(Extent::new(Pfn::new(frame), pages).expect("an extent"), None)?;
        Some((window.ptr.addr() - start.addr(), window.pages))
    };
    assert_eq!(open(first + 1, 2), Some((PAGE_BYTES as usize, 2)));
    assert_eq!(open(first + 3, 2), Some((3 * PAGE_BYTES as usize, 1)), "as far as it goes");
    assert_eq!(open(first + 4, 1), None, "behind the last");
    assert_eq!(open(first - 1, 2), None, "before the first");
    assert_eq!(open(first, 0), None, "nothing");
}
