//! Ranges at the end of what addresses can be, through every operation: refused, or done by what is there, and no panic.

use crate::support::{extent, lower};
use crate::{DATA, SMALL, Tables};
use hugemm_base::{CpuId, PageSize, Pfn, RangeSet, VirtAddr, VirtRange};
use hugemm_paging::{
    Aarch64, Change, Counting, EditLock, Editing, Flags, Lookup, OWNER_BITS, OwnerNext, PageFormat, PageTable, TlbCpu,
    TlbShootdown, X86_64,
};

const ALL: u64 = 1 << 52;

fn ranges() -> impl Iterator<Item = VirtRange> {
    let firsts = [0, 1, (1 << 35) - 1, 1 << 35, 1 << 36, 1 << 47, ALL - (1 << 35), ALL - 1];
    let lengths = [1, 512, (1 << 18) + 1, 1 << 35, 1 << 36, ALL - (1 << 35), ALL];
    firsts
        .into_iter()
        .flat_map(move |first| lengths.into_iter().filter_map(move |pages| VirtRange::from_pages(first, pages).ok()))
}

fn every_range<F: PageFormat>() {
    let table = Tables::<F>::new();
    let heap = &table.heap;
    for range in ranges() {
        // SAFETY: one heap; nothing translates by the table.
        if let Ok(table) = unsafe { PageTable::<F, EditLock>::new(&mut &*heap, range) } {
            let _ = (table.bounds(), table.root());
            // SAFETY: as above, and nothing is mapped.
            unsafe { table.retire(&mut &*heap, |_| panic!("empty")) };
        }
    }
    let mapped = VirtRange::from_pages(512, 512).expect("a range");
    table.exclusive().map(mapped, [extent(512, 512)], SMALL).expect("mapped");
    for range in ranges() {
        let inside = lower::<F>().covers(range);
        let mut guard = table.exclusive();
        assert_eq!(guard.walk(range, Flags::NONE, |_| {}).is_ok(), inside, "{range}");
        assert_eq!(guard.walk_owners(range, |_, _, _| {}).is_ok(), inside, "{range}");
        if !inside {
            for frames in [extent(0, 1), extent(Pfn::LIMIT.get() - 1, 1), extent(0, Pfn::LIMIT.get())] {
                assert!(guard.map(range, [frames], DATA).is_err(), "{range}");
            }
            let change = Change { set: Flags::WRITE, clear: Flags::NONE };
            assert!(guard.protect(range, change, Editing::LIVE).is_err(), "{range}");
            assert!(guard.write_protect(range).is_err() && guard.hand_down(range, Editing::LIVE).is_err(), "{range}");
            assert!(guard.detach(range, Editing::LIVE).is_err(), "{range}");
            assert!(guard.split(range, PageSize::Size4K, Editing::LIVE).is_err(), "{range}");
        }
    }
    for at in [0, 4095, 1 << 47, 1 << 48, 1 << 63, !0 << 12, u64::MAX].map(VirtAddr::new) {
        let mut guard = table.exclusive();
        assert_eq!((guard.lookup(at), guard.translate(at)), (Lookup::Absent, None), "{at}");
        assert!(guard.take_leaf(at, Pfn::new(u64::MAX), |_| Some(u64::MAX)).is_err());
        drop(guard);
        let mut guard = table.shared();
        assert!(guard.replace_owner(at, 1, OwnerNext::Owner(2)).is_err());
        for size in PageSize::ALL {
            assert!(at.get() < 1 << 47 || guard.enter_owner(at, size, u64::MAX).is_err(), "{at}");
        }
    }
    let mut guard = table.shared();
    guard.enter_owner(VirtAddr::new(0), PageSize::Size4K, u64::MAX).expect("nothing there");
    assert_eq!(guard.lookup(VirtAddr::new(0)), Lookup::Owner((1 << OWNER_BITS) - 1), "so many bits are kept");
    guard.replace_owner(VirtAddr::new(0), (1 << OWNER_BITS) - 1, OwnerNext::Owner(u64::MAX - 1)).expect("it is there");
    assert_eq!(guard.lookup(VirtAddr::new(0)), Lookup::Owner((1 << OWNER_BITS) - 2));
    guard.enter_owner(VirtAddr::new((1 << 47) - 1), PageSize::Size2M, 5).expect("it is in the last 2 MiB");
    assert_eq!(guard.lookup(VirtAddr::new((1 << 47) - (2 << 20))), Lookup::Owner(5));
    drop(guard);
    assert_eq!(table.runs(mapped).len(), 1, "nothing has changed");
}

#[test]
fn every_range_is_refused_or_served() {
    every_range::<X86_64>();
    every_range::<Aarch64>();
}

#[test]
fn cpus_that_do_not_exist() {
    let slots = [TlbCpu::default()];
    let inboxes: Vec<_> =
        (0..TlbShootdown::<Counting>::inbox_words(1)).map(|_| hugemm_base::sync::AtomicU64::new(0)).collect();
    // SAFETY: this view only.
    let shootdown = unsafe { TlbShootdown::new(&slots, &inboxes, Counting) }.expect("one CPU");
    for cpu in [1, 64, u32::MAX].map(CpuId::new) {
        assert_eq!(shootdown.counts_of(cpu), Default::default());
    }
    let mut all = RangeSet::default();
    ranges().for_each(|range| all.add(range));
    assert!(all.covers(VirtRange::ALL) && all.is_all());
}
