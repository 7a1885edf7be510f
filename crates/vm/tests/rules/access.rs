//! A space's memory from outside of it: any address and length, what is missing, shared, away and denied. On both formats.

use crate::support::{AT, Cx, Model, Rig, SMALL, as_first, bounds, on_both_formats, span, with_cpu};
use hugemm_base::inject::{FaultPlan, every_fault};
use hugemm_base::{Never, PageSize, VirtAddr};
use hugemm_frames::HwPoisoned;
use hugemm_paging::{Flags, Lookup, PageFormat};
use hugemm_threads::Random;
use hugemm_vm::{AccessError, AddressSpace, Backing, Protection, Usage, VmError, VmaKind};

const BYTES: u64 = 6 << 20;

fn stopped(done: u64, at: u64, cause: impl Fn(VirtAddr) -> VmError) -> Result<(), AccessError> {
    let at = VirtAddr::new(at);
    Err(AccessError { done, at, cause: cause(at) })
}

fn no_area(at: VirtAddr) -> VmError {
    VmError::NoArea { at }
}

fn denied(at: VirtAddr) -> VmError {
    VmError::Denied { at }
}

fn random<F: PageFormat>(seed: u64) {
    as_first::<F, false>(48, 1, seed, |rig, cx| {
        let object = rig.vm.create_shared(cx, 512, PageSize::Size4K, false).expect("memory");
        let space = rig.space(cx, span(AT, 2 << 20), SMALL);
        let large = VmaKind::private(PageSize::Size2M);
        rig.vm.map(cx, &space, span(AT + (2 << 20), 2 << 20), large, Backing::Private).expect("an area");
        rig.vm.map(cx, &space, span(AT + (4 << 20), 2 << 20), SMALL, Backing::Shared(&object, 0)).expect("an area");
        rig.enter(cx, &space);
        let mut known = vec![0_u8; BYTES as usize];
        let mut random = Random(seed);
        for round in 0..200_u64 {
            let from = random.below(BYTES) as usize;
            let longest = [9, 5000, BYTES][random.below(3) as usize];
            let to = (from + 1 + random.below(longest) as usize).min(known.len());
            let at = VirtAddr::new(AT + from as u64);
            match random.below(4) {
                0 => {
                    let bytes: Vec<u8> = (from..to).map(|index| (index as u64 * 31 + round) as u8).collect();
                    assert_eq!(rig.vm.write(cx, &space, at, &bytes), Ok(()));
                    known[from..to].copy_from_slice(&bytes);
                }
                1 => {
                    assert_eq!(rig.vm.zero(cx, &space, at, to - from), Ok(()));
                    known[from..to].fill(0);
                }
                2 => {
                    let mut bytes = vec![0xa5; to - from];
                    assert_eq!(rig.vm.read(cx, &space, at, &mut bytes), Ok(()));
                    assert!(bytes == known[from..to], "{from:#x}..{to:#x}");
                }
                // The process itself.
                _ => {
                    let word = from & !7;
                    assert_eq!(rig.store(cx, &space, AT + word as u64, round), Ok(()));
                    known[word..word + 8].copy_from_slice(&round.to_ne_bytes());
                }
            }
        }
        for word in (0..known.len()).step_by(8 * 97) {
            let found = rig.load(cx, &space, AT + word as u64).expect("memory");
            assert_eq!(found.to_ne_bytes(), known[word..word + 8], "{word:#x}");
        }
        rig.end(cx, space);
        rig.vm.close(cx, object).expect("its own");
    });
}

fn leaf_flags<'h, F: PageFormat>(
    rig: &Rig<'h, F>,
    cx: &mut Cx<'_, 'h>,
    space: &AddressSpace<Model<'h, F>>,
    at: u64,
) -> Flags {
    match rig.vm.lookup(cx, space, VirtAddr::new(at)) {
        Lookup::Mapped(leaf) => leaf.flags,
        found => panic!("{found:?}"),
    }
}

fn used<F: PageFormat>(size: PageSize) {
    as_first::<F, false>(16, 1, 5, |rig, cx| {
        let whole = span(AT, 2 * size.bytes());
        let space = rig.space(cx, whole, VmaKind::private(size));
        rig.vm.prefault(&space, whole, None).work(cx, &Never).expect("memory");
        rig.vm.test_and_clear_young(cx, &space, whole, |_| ()).expect("in the space");
        let at = VirtAddr::new(AT + size.bytes() - 3);
        // arm64 without a pager folds, so written it is.
        let fresh = leaf_flags(rig, cx, &space, AT) & Flags::DIRTY;
        rig.enter(cx, &space);
        let flushes = rig.flushes();
        rig.vm.read(cx, &space, at, &mut [0; 6]).expect("mapped");
        assert_eq!(rig.flushes(), flushes, "what is not accessed is kept by nobody");
        assert_eq!(leaf_flags(rig, cx, &space, AT) & Flags::HARDWARE, fresh | Flags::ACCESSED);
        rig.vm.write(cx, &space, VirtAddr::new(AT + 1), &[1]).expect("mapped");
        assert_eq!(leaf_flags(rig, cx, &space, AT) & Flags::HARDWARE, Flags::HARDWARE, "as by a store");
        assert_eq!(leaf_flags(rig, cx, &space, AT + size.bytes()) & Flags::DIRTY, fresh);
        rig.vm.test_and_clear_young(cx, &space, whole, |_| ()).expect("in the space");
        let flushes = rig.flushes();
        rig.vm.write(cx, &space, VirtAddr::new(AT + size.bytes()), &[1]).expect("mapped");
        let owed = u64::from(!F::FAULT_DROPS);
        assert_eq!(rig.flushes() - flushes, owed, "what was clean may be kept as read-only");
        rig.end(cx, space);
    });
}

/// It ends where there is no area, or one that does not allow it, and says so; what comes before is done.
#[test]
fn what_cannot_be_reached_ends_it() {
    with_cpu(16, 1, 6, |rig, cx| {
        let space = rig.space(cx, span(AT, 0x4000), SMALL);
        let read_only = SMALL.allowing(Protection::USER);
        rig.vm.map(cx, &space, span(AT + 0x4000, 0x1000), read_only, Backing::Private).expect("an area");
        let at = VirtAddr::new(AT + 0x3ffd);
        assert_eq!(rig.vm.write(cx, &space, at, &[1, 2, 3, 4]), stopped(3, AT + 0x4000, denied));
        assert_eq!(rig.vm.zero(cx, &space, at, 4), stopped(3, AT + 0x4000, denied));
        assert_eq!(rig.vm.write(cx, &space, at, &[1, 2, 3]), Ok(()));
        let mut bytes = vec![9; 0x2000];
        assert_eq!(rig.vm.read(cx, &space, at, &mut bytes), stopped(0x1003, AT + 0x5000, no_area));
        assert_eq!((&bytes[..4], bytes[0x1002], bytes[0x1003]), (&[1, 2, 3, 0][..], 0, 9));
        assert_eq!(rig.vm.read(cx, &space, VirtAddr::new(AT - 1), &mut [0]), stopped(0, AT - 1, no_area));
        assert_eq!(rig.vm.read(cx, &space, VirtAddr::new(AT - 1), &mut []), Ok(()), "nothing is nowhere");
        let last = VirtAddr::new(u64::MAX);
        assert!(rig.vm.read(cx, &space, last, &mut [0, 0]).is_err());
        // A bad frame.
        let found = rig.vm.lookup(cx, &space, VirtAddr::new(AT + 0x3000));
        let Lookup::Mapped(leaf) = found else { panic!("{found:?}") };
        rig.vm.write(cx, &space, VirtAddr::new(AT + 0x2000), &[7]).expect("an area");
        assert!(!matches!(rig.vm.frames().hwpoison(cx, leaf.frame), HwPoisoned::NotManaged));
        let bad = |_| VmError::HwPoisoned { frame: leaf.frame };
        assert_eq!(rig.vm.read(cx, &space, VirtAddr::new(AT + 0x2000), &mut bytes), stopped(0x1000, AT + 0x3000, bad));
        assert_eq!(bytes[0], 7);
        rig.vm.destroy(cx, space).expect("nobody uses it");
    });
}

/// A page that a fork shares is copied before it is written; zeroes take no page where there is none; memory may run out anywhere.
fn forked(rig: &Rig<'_>) {
    rig.on(0, |cx| {
        let Ok(space) = rig.vm.create(cx, bounds()) else { return };
        let area = rig.vm.map(cx, &space, span(AT, 0x8000), SMALL, Backing::Private);
        let zeroed = rig.vm.zero(cx, &space, VirtAddr::new(AT + 7), 0x7000);
        assert_eq!(zeroed.is_ok(), area.is_ok(), "{zeroed:?}");
        assert_eq!(rig.vm.usage(cx, &space, span(AT, 0x8000)), Ok(Usage::default()));
        let mut known = vec![0_u8; 0x4000];
        let mut write = |cx: &mut _, byte: u8| {
            let done = match rig.vm.write(cx, &space, VirtAddr::new(AT + 0x800), &[byte; 0x4000]) {
                Ok(()) => 0x4000,
                Err(AccessError { done, cause, at }) => {
                    assert!(matches!(cause, VmError::NoMemory | VmError::NoArea { .. }), "{cause}");
                    assert_eq!(at.get(), AT + 0x800 + done);
                    done as usize
                }
            };
            known[..done].fill(byte);
            known.clone()
        };
        let before = write(cx, 3);
        let child = rig.vm.fork(cx, &space);
        let after = write(cx, 4);
        for (space, known) in [Ok(&space), child.as_ref()].into_iter().zip([after, before]) {
            let Ok(space) = space else { continue };
            let mut found = vec![0; 0x4000];
            let done = rig
                .vm
                .read(cx, space, VirtAddr::new(AT + 0x800), &mut found)
                .map_or_else(|error| error.done, |()| 0x4000);
            assert!(found[..done as usize] == known[..done as usize], "{done}");
        }
        for space in [Ok(space), child].into_iter().flatten() {
            rig.vm.destroy(cx, space).expect("nobody uses it");
        }
    });
}

#[test]
fn forks_and_exhaustion() {
    let runs = every_fault(|plan: &FaultPlan| crate::support::with_rig(8, 1, 21, plan, forked));
    assert!(runs > 10, "{runs} allocations");
}

on_both_formats! {
    fn bytes_are_those_that_were_written_last: random (each 0..3);
    /// What was read is known as accessed, what was written as written.
    fn uses_are_noted: used (each [PageSize::Size4K, PageSize::Size2M]);
}
