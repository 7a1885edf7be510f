//! Memory can run out at every allocation: whatever was going on, the space stays right, and every frame comes back.

#![cfg(all(target_os = "linux", not(miri)))]

mod support;

use hugemm_base::inject::{FaultPlan, every_fault};
use hugemm_base::{CpuId, Never, PageSize, VirtAddr};
use hugemm_vm::{AreaKind, Backing, VmError};
use std::collections::BTreeMap;
use support::{Cx, Handle, Rig, bounds, span, with_rig};

const AT: u64 = 0x4000_0000;

/// Stores, and remembers what was stored.
fn store<'h>(
    rig: &Rig<'h>,
    cx: &mut Cx<'_, 'h>,
    space: &Handle<'_, 'h>,
    known: &mut BTreeMap<u64, u64>,
    at: u64,
    value: u64,
) {
    match rig.store(cx, space, at, value) {
        Ok(()) => {
            known.insert(at, value);
        }
        Err(error) => assert!(matches!(error, VmError::NoMemory | VmError::NoArea { .. }), "{error}"),
    }
}

fn check<'h>(rig: &Rig<'h>, cx: &mut Cx<'_, 'h>, space: &Handle<'_, 'h>, known: &BTreeMap<u64, u64>) {
    for (at, value) in known {
        match rig.load(cx, space, *at) {
            Ok(found) => assert_eq!(found, *value, "at {at:#x}"),
            // A page of a shared object can be there, and the table for it not.
            Err(error) => assert_eq!(error, VmError::NoMemory),
        }
    }
}

fn scenario(rig: &Rig<'_>) {
    rig.mmu.as_cpu(CpuId(0), |cx| {
        let Ok(space) = rig.vm.create(cx, bounds()) else { return };
        let mut known = BTreeMap::new();
        let small = AreaKind::private(PageSize::Size4K);
        let _ = rig.vm.map(cx, &space, span(AT, 1 << 20), small, Backing::Private);
        let large = AreaKind::private(PageSize::Size2M);
        let _ = rig.vm.map(cx, &space, span(2 * AT, 4 << 20), large, Backing::Private);
        let object = rig.vm.create_shared(cx, 512, PageSize::Size4K, false);
        if let Ok(object) = &object {
            let _ = rig.vm.map(cx, &space, span(3 * AT, 1 << 20), small, Backing::Shared(object, 0));
            let _ = rig.vm.prefault_shared(object, 0, 16).work(cx, &Never);
        }
        rig.enter(cx, &space);
        for (index, at) in [AT, AT + 0x5000, 2 * AT, 3 * AT, 3 * AT + 0x2_0000].into_iter().enumerate() {
            store(rig, cx, &space, &mut known, at, index as u64 + 1);
        }
        let _ = rig.vm.prefault(&space, span(AT + 0x1_0000, 0x2_0000), None).work(cx, &Never);
        let mut pinned = Vec::new();
        let _ = rig.vm.pin(cx, &space, span(AT, 0x4000), None, &Never, |run| pinned.push(run));
        check(rig, cx, &space, &known);
        let child = rig.vm.fork(cx, &space);
        if let Ok(child) = &child {
            let mut theirs = known.clone();
            rig.enter(cx, child);
            rig.leave(cx, &space);
            check(rig, cx, child, &theirs);
            store(rig, cx, child, &mut theirs, AT + 0x5000, 99);
            store(rig, cx, child, &mut theirs, 2 * AT, 98);
            check(rig, cx, child, &theirs);
            rig.enter(cx, &space);
            rig.leave(cx, child);
        }
        check(rig, cx, &space, &known);
        store(rig, cx, &space, &mut known, AT, 50);
        let hole = span(AT + 0x4000, 0x8000);
        if rig.vm.unmap(cx, &space, hole).is_ok() {
            known.retain(|at, _| !(hole.start().get()..hole.start().get() + hole.bytes()).contains(at));
            assert!(space.area_at(VirtAddr::new(AT + 0x5000)).is_err());
        }
        check(rig, cx, &space, &known);
        for run in pinned {
            rig.vm.unpin(cx, &space, run).expect("its own");
        }
        rig.leave(cx, &space);
        if let Ok(child) = child {
            rig.vm.destroy(cx, child).expect("destroying takes no memory");
        }
        rig.vm.destroy(cx, space).expect("destroying takes no memory");
        if let Ok(object) = object {
            rig.vm.close(cx, object).expect("its own");
        }
    });
}

#[test]
fn every_allocation_can_fail() {
    let runs = every_fault(|plan| with_rig(8, 2, 21, plan, scenario));
    assert!(runs > 50, "{runs} allocations");
}

/// A steady share of failures, so that failures meet in one run.
#[test]
fn several_allocations_can_fail() {
    for period in [2, 3, 5, 7, 11, 17, 29] {
        for first in 0..period.min(8) {
            let plan = FaultPlan::periodic(first, period);
            with_rig(8, 2, first, &plan, scenario);
        }
    }
}
