//! Too little memory: full swap, failing allocations, overcommitment, pieces, nodes.

use crate::rig::{Cx, Handle, Model, NODE, Rig, Size, bounds, no_faults, span, with_cpu, with_rig};
use crate::rules::{AT, SIZE, SIZES, expect, filled, size_for};
use hugemm_base::inject::{FaultPlan, every_fault};
use hugemm_base::{CpuId, Dirty, Extent, Never, NodeId, Order, PageSize, Pfn, Shortfall, VirtAddr, with};
use hugemm_frames::{AllocRequest, ArenaSpec, FolioRun, Frames, FramesConfig, Frozen, Mobility, Placement, Plain};
use hugemm_paging::{Flags, Lookup};
use hugemm_reclaim::{Lru, LruPolicy, Reclaim, ShrinkBudget, Swap, Turn};
use hugemm_threads::Memory;
use hugemm_vm::{Access, Backing, Pager, VmaKind};

/// Swap that is full is an error to nobody: pages stay and keep what is in them.
#[test]
fn full_swap_keeps_pages() {
    for page in SIZES {
        // Just the compressor's working memory and a little.
        with_cpu(Size { swap: 60, ..size_for(page) }, 9, |rig, cx| {
            let pages = if page == PageSize::Size4K { 800 } else { 4 };
            let kind = VmaKind::private(page);
            let space = rig.space(cx, span(AT, pages * page.bytes()), kind);
            rig.enter(cx, &space);
            let mut rng = crate::support::Rng(5);
            let mut content = Vec::new();
            for index in 0..pages * page.pages() {
                // Too much to compress well.
                for word in 0..100 {
                    let value = rng.below(u64::MAX >> 32);
                    rig.put(cx, &space, AT + index * 4096 + word * 40, value).expect("memory");
                    content.push((AT + index * 4096 + word * 40, value));
                }
            }
            (0..5).for_each(|_| _ = rig.evict_all(cx));
            assert!(rig.store.stats(cx).refused_full > 0);
            for (at, value) in content {
                assert_eq!(rig.get(cx, &space, at), Ok(value));
            }
            rig.end(cx, space);
        });
    }
}

/// Whichever allocation fails, nothing is lost.
#[test]
fn every_allocation_may_fail() {
    for page in SIZES {
        let asked = every_fault(|plan| {
            with_rig(size_for(page), 10, plan, |rig| {
                rig.mmu.as_cpu(CpuId::new(0), |cx| {
                    let Ok(space) = rig.vm.create(cx, bounds()) else { return };
                    let kind = VmaKind::private(page);
                    let _ = rig.vm.map(cx, &space, span(AT, 2 * page.bytes()), kind, Backing::Private);
                    rig.enter(cx, &space);
                    let known: Vec<u64> =
                        (0..2).filter(|i| rig.put(cx, &space, AT + i * page.bytes(), i + 1).is_ok()).collect();
                    (0..3).for_each(|_| _ = rig.evict_all(cx));
                    let child = rig.vm.fork(cx, &space);
                    for index in known {
                        let at = AT + index * page.bytes();
                        // One failure is one access's; the next finds the page.
                        let got = rig.get(cx, &space, at).or_else(|_| rig.get(cx, &space, at));
                        assert_eq!(got, Ok(index + 1));
                    }
                    rig.leave(cx, &space);
                    if let Ok(child) = child {
                        rig.vm.destroy(cx, child).expect("destroyed");
                    }
                    rig.vm.destroy(cx, space).expect("destroyed");
                });
            });
        });
        assert!(asked > 10, "{asked}");
    }
}

/// More is written than there is memory: direct reclaim serves the faults.
#[test]
fn memory_may_be_overcommitted() {
    for (page, policy) in SIZES.into_iter().flat_map(|page| LruPolicy::ALL.map(|policy| (page, policy))) {
        let size = Size { policy, ..size_for(page) };
        with_cpu(size, 11, |rig, cx| {
            let pages = ((size.mib + 8) << 20) / page.bytes();
            let space = filled(rig, cx, page, pages);
            for index in 0..pages {
                assert_eq!(rig.get(cx, &space, AT + index * page.bytes() + 8), Ok(index + 1));
            }
            assert!(rig.vm.pager().counts().direct_freed.get() > 0);
            let flags = rig.vm.lookup(cx, &space, VirtAddr::new(AT + (pages - 1) * page.bytes()));
            assert!(matches!(flags, Lookup::Mapped(leaf) if leaf.flags.contains(Flags::WRITE)));
            rig.end(cx, space);
        });
    }
}

/// Memory is free, but in pieces: pages move, and a page of 2 MiB comes back whole. What cannot move stays.
#[test]
fn a_large_page_comes_back_where_memory_is_in_pieces() {
    for (shared, policy) in [false, true].into_iter().zip(LruPolicy::ALL) {
        with_cpu(Size { mib: 64, policy, ..size_for(PageSize::Size2M) }, 13, |rig, cx| {
            let large = filled(rig, cx, PageSize::Size2M, 1);
            (0..3).for_each(|_| _ = rig.evict_all(cx));
            expect(rig, true, rig.vm.lookup(cx, &large, VirtAddr::new(AT)));
            rig.leave(cx, &large);
            // All other memory in small pages of two spaces in turn, of which one goes; but for what is somebody else's.
            let pages = (rig.vm.frames().available(cx) - rig.vm.pager().marks().high()) / 2 - 100;
            let object = rig.vm.create_shared(cx, pages, PageSize::Size4K, false).expect("an object");
            let at = |index: u64| AT + (index << 12);
            let [gone, small] = [false, shared].map(|shared| {
                let space = rig.vm.create(cx, bounds()).expect("a space");
                let from = if shared { Backing::Shared(&object, 0) } else { Backing::Private };
                let kind = VmaKind::private(PageSize::Size4K);
                rig.vm.map(cx, &space, span(AT, pages << 12), kind, from).expect("an area");
                space
            });
            for index in 0..pages {
                for space in [&gone, &small] {
                    rig.enter(cx, space);
                    rig.put(cx, space, at(index) + 8, index).expect("memory");
                    rig.leave(cx, space);
                }
            }
            let child = rig.vm.fork(cx, &small).expect("forked");
            let whole = AllocRequest::order(PageSize::Size2M.order());
            let others: Vec<Frozen> = std::iter::from_fn(|| rig.vm.frames().alloc(cx, whole).ok()).collect();
            let mut pins = Vec::new();
            rig.vm
                .pin(cx, &small, span(at(7), 4096), Access::Write, None, &Never, |pin| pins.push(pin))
                .expect("pinned");
            rig.vm.destroy(cx, gone).expect("destroyed");
            rig.vm.frames().drain(cx);
            let stored = rig.store.stats(cx).stores;
            assert_eq!(rig.vm.frames().stats(cx).extents(PageSize::Size2M.order()), 0, "in pieces");
            rig.enter(cx, &large);
            assert_eq!(rig.get(cx, &large, AT + 8), Ok(1));
            rig.leave(cx, &large);
            assert_eq!(rig.vm.pager().counts().compacted.get(), 1);
            // Ahead of any fault.
            assert!(rig.vm.pager().compact(&rig.vm, cx, NODE));
            assert_eq!(rig.vm.pager().counts().compacted.get(), 2);
            assert_eq!(rig.vm.frames().stats(cx).extents(PageSize::Size2M.order()), 1);
            assert_eq!(rig.store.stats(cx).stores, stored, "pages move, none goes away");
            for space in [&small, &child] {
                rig.enter(cx, space);
                for index in 0..pages {
                    assert_eq!(rig.get(cx, space, at(index) + 8), Ok(index));
                }
                rig.leave(cx, space);
            }
            for pin in pins {
                let found = rig.vm.lookup(cx, &small, pin.at());
                assert!(matches!(found, Lookup::Mapped(leaf) if leaf.frame == pin.extent().base()), "{found:?}");
                rig.vm.unpin(cx, &small, pin).expect("its own");
            }
            for space in [large, small, child] {
                rig.vm.destroy(cx, space).expect("destroyed");
            }
            others.into_iter().for_each(|block| rig.vm.frames().free(cx, block));
            rig.vm.close(cx, object).expect("its own");
        });
    }
}

/// On which node the page is that is mapped at an address.
fn node_at<'h>(rig: &Rig<'h>, cx: &mut crate::rig::Cx<'_, 'h>, space: &Handle<'_, 'h>, at: u64) -> Option<NodeId> {
    match rig.vm.lookup(cx, space, VirtAddr::new(at)) {
        Lookup::Mapped(leaf) => rig.vm.frames().node_of(leaf.frame),
        _ => None,
    }
}

/// Each node has its own LRU and marks: what is short on one is freed there, whatever the other has.
#[test]
fn each_node_is_reclaimed_by_itself() {
    with_cpu(Size { nodes: 2, ..SIZE }, 14, |rig, cx| {
        let pager = rig.vm.pager();
        let free = |cx: &crate::rig::Cx<'_, '_>, node| rig.vm.frames().node_stats(cx, NodeId::new(node)).available();
        let space = rig.vm.create(cx, bounds()).expect("a space");
        let at = |node: u32, index: u64| AT * u64::from(node + 1) + (index << 12) + 8;
        rig.enter(cx, &space);
        // Node 1 down to its low mark, node 0 less than half full.
        for (node, pages) in [(0, 500), (1, free(cx, 1) - pager.marks().low() / 2)] {
            let kind = with!(VmaKind::private(PageSize::Size4K), from = Placement::Only(NodeId::new(node)));
            rig.vm.map(cx, &space, span(at(node, 0) - 8, pages << 12), kind, Backing::Private).expect("an area");
            (0..pages).for_each(|index| rig.put(cx, &space, at(node, index), index).expect("memory"));
        }
        assert!(free(cx, 1) < pager.marks().low() && free(cx, 0) > pager.marks().high());
        let (turn, done) = pager.balance(&rig.vm, cx, NodeId::new(0), u64::MAX, &Never);
        assert_eq!((turn, done.scanned), (Turn::Balanced, 0));
        let (turn, done) = pager.balance(&rig.vm, cx, NodeId::new(1), u64::MAX, &Never);
        assert_eq!(turn, Turn::Balanced);
        assert!(done.freed > 0 && free(cx, 1) >= pager.marks().high());
        assert!(
            (0..500).all(|index| node_at(rig, cx, &space, at(0, index)) == Some(NodeId::new(0))),
            "nothing of node 0 went"
        );
        let away =
            (0..500).find(|index| node_at(rig, cx, &space, at(1, *index)).is_none()).expect("some of node 1 did");
        assert_eq!(rig.get(cx, &space, at(1, away)), Ok(away));
        assert_eq!(node_at(rig, cx, &space, at(1, away)), Some(NodeId::new(1)), "back where the area wants it");
        // A fault that finds its node empty takes from that node too, and no longer than it needs.
        let (before, pages) = (pager.counts().direct_freed.get(), free(cx, 1) + 256);
        let kind = with!(VmaKind::private(PageSize::Size4K), from = Placement::Only(NodeId::new(1)));
        rig.vm.map(cx, &space, span(5 * AT, pages << 12), kind, Backing::Private).expect("an area");
        for index in 0..pages {
            // Where all are young, the first looks find nothing.
            let put = (0..8).any(|_| rig.put(cx, &space, 5 * AT + (index << 12), index).is_ok());
            assert!(put, "page {index} of {pages}");
        }
        assert!(pager.counts().direct_freed.get() > before, "no fault had to take pages");
        assert!(
            (0..500).all(|index| node_at(rig, cx, &space, at(0, index)) == Some(NodeId::new(0))),
            "nothing of node 0 went"
        );
        // An object is filled where it is wanted, not where the worker is.
        let object = rig.vm.create_shared(cx, 16, PageSize::Size4K, false).expect("an object");
        rig.vm.prefault_shared(&object, 0, 16).from(Placement::Only(NodeId::new(1))).work(cx, &Never).expect("memory");
        let kind = VmaKind::private(PageSize::Size4K);
        rig.vm.map(cx, &space, span(4 * AT, 16 << 12), kind, Backing::Shared(&object, 0)).expect("an area");
        for index in 0..16 {
            assert_eq!(rig.get(cx, &space, 4 * AT + (index << 12)), Ok(0));
            assert_eq!(node_at(rig, cx, &space, 4 * AT + (index << 12)), Some(NodeId::new(1)));
        }
        rig.end(cx, space);
        rig.vm.close(cx, object).expect("its own");
    });
}

/// Neighbours in a page table may be of another node, whose LRU has a lock of its own: looking around leaves them to it.
#[test]
fn look_around_keeps_to_its_own_node() {
    with_cpu(Size { nodes: 2, ..SIZE }, 15, |rig, cx| {
        const PAGES: u64 = 256;
        let pager = rig.vm.pager();
        let object = rig.vm.create_shared(cx, PAGES, PageSize::Size4K, false).expect("an object");
        for index in 0..PAGES {
            let node = Placement::Only(NodeId::new((index % 2) as u32));
            rig.vm.prefault_shared(&object, index, index + 1).from(node).work(cx, &Never).expect("memory");
        }
        let space = rig.vm.create(cx, bounds()).expect("a space");
        let kind = VmaKind::private(PageSize::Size4K);
        rig.vm.map(cx, &space, span(AT, PAGES << 12), kind, Backing::Shared(&object, 0)).expect("an area");
        rig.enter(cx, &space);
        for index in 0..PAGES {
            assert_eq!(rig.get(cx, &space, AT + (index << 12)), Ok(0));
            assert_eq!(node_at(rig, cx, &space, AT + (index << 12)), Some(NodeId::new((index % 2) as u32)));
        }
        let stats = |cx: &crate::rig::Cx<'_, '_>, node| pager.lru(NodeId::new(node)).expect("a node").stats(cx);
        let budget = ShrinkBudget::new(u64::MAX, 8);
        let looked = pager.shrink(&rig.vm, cx, NodeId::new(0), budget, &Never);
        assert!(looked.young > 0, "{looked:?}");
        assert!(stats(cx, 0).promoted > 0, "there was something to look around at");
        assert_eq!(stats(cx, 1).promoted, 0);
        for node in [0, 1] {
            assert_eq!((stats(cx, node).folios, stats(cx, node).pages()), (PAGES / 2, PAGES / 2), "of node {node}");
        }
        // Each node's are found on its own lists, and go from there.
        let budget = ShrinkBudget::new(u64::MAX, 4 * PAGES);
        for node in [0, 1] {
            assert_eq!(pager.shrink(&rig.vm, cx, NodeId::new(node), budget, &Never).freed, PAGES / 2, "of node {node}");
        }
        for index in 0..PAGES {
            assert_eq!(rig.get(cx, &space, AT + (index << 12)), Ok(0));
        }
        rig.end(cx, space);
        rig.vm.close(cx, object).expect("its own");
    });
}

/// References are dropped together: a batch takes a few rounds of the LRU's lock, not one per page.
#[test]
fn a_batch_takes_few_lock_rounds() {
    with_cpu(SIZE, 16, |rig, cx| {
        const PAGES: u64 = 256;
        let kind = VmaKind::private(PageSize::Size4K);
        let space = rig.space(cx, span(AT, PAGES << 12), kind);
        rig.enter(cx, &space);
        (0..PAGES).for_each(|index| rig.put(cx, &space, AT + (index << 12), index).expect("memory"));
        let lru = rig.vm.pager().lru(NODE).expect("a node");
        let rounds = |cx: &crate::rig::Cx<'_, '_>| lru.stats(cx).lock_rounds;
        let before = rounds(cx);
        let budget = ShrinkBudget::new(u64::MAX, 128);
        let kept = rig.vm.pager().shrink(&rig.vm, cx, NODE, budget, &Never);
        assert!(kept.freed == 0 && kept.batches == 4 && lru.stats(cx).promoted > 0, "{kept:?}");
        // The policy, isolation, neighbours, putting back, and the batch's references.
        let taken = rounds(cx) - before - 2;
        assert!(taken <= 4 * 5 + 1, "{taken} rounds");
        rig.end(cx, space);
    });
}

/// A page of 4 KiB may always be taken, a larger one only if enough stays free for storing two of 2 MiB.
#[test]
fn large_pages_leave_room_for_storing_them() {
    with_cpu(SIZE, 12, |rig, cx| {
        const RESERVE: u64 = 2 * 513;
        let (frames, pager) = (rig.vm.frames(), rig.vm.pager());
        let mut taken = Vec::new();
        for (order, room) in [(9, 512 + RESERVE), (3, 8 + RESERVE), (0, 0)] {
            let order = Order::new(order).expect("valid");
            for room in [room + 1, room, room.saturating_sub(1)] {
                while frames.stats(cx).available() > room {
                    taken.push(frames.alloc(cx, AllocRequest::order(Order::ZERO)).expect("there is some"));
                }
                let enough = order == Order::ZERO || frames.stats(cx).available() >= order.pages() + RESERVE;
                let may = Pager::<crate::rig::Model<'_>>::may_take(pager, frames, cx, order);
                assert_eq!(may, enough, "order {} with {room} free", order.get());
            }
        }
        taken.into_iter().for_each(|block| frames.free(cx, block));
    });
}

/// Who frees memory asks nobody for some; direct reclaim of others is counted, with what it freed; so is a worker's.
#[test]
fn what_is_reclaimed_is_counted() {
    with_cpu(SIZE, 13, |rig, cx| {
        let space = filled(rig, cx, PageSize::Size4K, 200);
        rig.leave(cx, &space);
        let pager = rig.vm.pager();
        let need = Shortfall::frames(50);
        assert_eq!(cx.freeing(|cx| cx.relieved_by(&rig.vm, need)), 0);
        assert_eq!((pager.counts().direct.get(), pager.counts().direct_freed.get()), (0, 0));
        assert_eq!(pager.relieve(&rig.vm, cx, need.only(Some(NodeId::new(7)))), 0);
        let freed = pager.relieve(&rig.vm, cx, need);
        assert!((50..114).contains(&freed), "{freed}");
        assert_eq!((pager.counts().direct.get(), pager.counts().direct_freed.get()), (2, freed));
        assert_eq!(pager.balance(&rig.vm, cx, NODE, 1000, &Never).0, Turn::Balanced);
        assert_eq!(pager.balance(&rig.vm, cx, NodeId::new(7), 1000, &Never).0, Turn::Hopeless, "no such node");
        assert_eq!(pager.counts().worker_freed.get(), 0);
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// What the first node gives is no longer asked of the next.
#[test]
fn nodes_give_together_what_was_asked() {
    with_rig(Size { nodes: 2, cpus: 2, ..SIZE }, 19, &no_faults(), |rig| {
        let spaces = [(0, 40), (1, 200)].map(|(cpu, pages)| {
            rig.mmu.as_cpu(CpuId::new(cpu), |cx| {
                let space = filled(rig, cx, PageSize::Size4K, pages);
                rig.leave(cx, &space);
                assert!(rig.vm.pager().lru(NodeId::new(cpu)).expect("its node's").stats(cx).folios >= pages);
                space
            })
        });
        rig.mmu.as_cpu(CpuId::new(0), |cx| {
            let freed = rig.vm.pager().relieve(&rig.vm, cx, Shortfall::frames(60));
            assert!((60..40 + 64).contains(&freed), "{freed}");
            spaces.into_iter().for_each(|space| rig.vm.destroy(cx, space).expect("destroyed"));
        });
    });
}

/// Frames of which there are only the numbers.
type Numbers<'m, 'h> = Frames<'m, Plain<&'h FaultPlan>>;

/// A manager of an arena of 2 MiB for each of these nodes, side by side.
fn with_arenas<'h>(rig: &Rig<'h>, cx: &Cx<'_, 'h>, nodes: &[u32], test: impl FnOnce(&Numbers<'_, 'h>)) {
    let place = |at: usize| Extent::block(Pfn::new(1 << 30 | (at as u64) << 9), PageSize::Size2M.order());
    let arena = |(at, node): (usize, &u32)| ArenaSpec::new(place(at), NodeId::new(*node));
    let arenas: Vec<ArenaSpec> = nodes.iter().enumerate().map(arena).collect();
    let config = FramesConfig::new(&arenas, 1);
    let metadata = Memory::new(Frames::<Plain>::required_bytes(&config).expect("valid"));
    // SAFETY: zeroed, of this size, used once; one platform; nobody else has these frames' numbers.
    let frames = unsafe { Frames::new(&config, *rig.vm.frames().env(), metadata.ptr(), metadata.bytes()) };
    let frames = frames.expect("room");
    // SAFETY: once.
    arenas.iter().for_each(|arena| _ = unsafe { frames.release(cx, Dirty::assume_owned(arena.extent)) });
    test(&frames);
}

/// A pager may have been given LRUs for some nodes only, or for other frames. Pages of the others are on none; a run that ends
/// reaches from one to the other, whichever comes first, and what their descriptors said before they were pages is believed by nobody.
#[test]
fn pages_without_an_lru_are_on_none() {
    with_cpu(SIZE, 16, |rig, cx| {
        for nodes in [[0, 1], [1, 0]] {
            with_arenas(rig, cx, &nodes, |frames| {
                ends_on_no_list(rig, cx, frames, frames);
                with_arenas(rig, cx, &[0], |others| ends_on_no_list(rig, cx, frames, others));
            });
        }
    });
}

/// Pages of two nodes are counted, and end in one run. The pager has one LRU: for the first node of the `listed` frames.
fn ends_on_no_list<'h>(rig: &Rig<'h>, cx: &Cx<'_, 'h>, frames: &Numbers<'_, 'h>, listed: &Numbers<'_, 'h>) {
    let lrus = [Lru::new(listed, SIZE.policy)];
    let pager: Reclaim<'_, '_, Model<'h>, _> = Reclaim::new(&lrus, rig.store, rig.vm.pager().marks(), ());
    let both = Extent::new(Pfn::new((1 << 30) + 511), 2).expect("in range");
    frames.drain(cx);
    let mut victim = frames.alloc(cx, AllocRequest::order(Order::ZERO)).expect("memory");
    let victims = frames.descriptor_mut(&mut victim).expect("managed");
    (0..8).for_each(|word| victims.store(word, 7));
    for pfn in [both.base(), Pfn::new(both.base().get() + 1)] {
        let _ = frames.take_range(cx, Extent::block(pfn, Order::ZERO)).expect("free").into_extent();
        // SAFETY: taken just now.
        let mut page = unsafe { Frozen::assume_owned(pfn, Order::ZERO, Mobility::Movable) };
        let descriptor = frames.descriptor_mut(&mut page).expect("managed");
        // As a folio's on a list between others.
        for (word, value) in [(2, victim.pfn().get() + 1), (3, victim.pfn().get() + 1), (4, 1 << 16)] {
            descriptor.store(word, value);
        }
        let extent = page.extent();
        let _ = frames.count(page).expect("managed").into_pfn();
        // SAFETY: counted just now, and it is told once.
        unsafe { pager.lru_add(frames, cx, extent, Order::ZERO) };
    }
    assert_eq!(lrus[0].stats(cx).folios, u64::from(core::ptr::eq(frames, listed)));
    // SAFETY: the references that became numbers above.
    unsafe { pager.drop_references(frames, cx, [FolioRun::from_extent(both, Order::ZERO)]) };
    assert_eq!(lrus[0].stats(cx).folios, 0);
    let victims = frames.descriptor(victim.pfn()).expect("managed");
    assert!((0..8).all(|word| victims.load(word) == 7), "a stranger was linked");
    frames.free(cx, victim);
    assert_eq!(frames.stats(cx).available(), frames.managed());
}

/// References of one call may be to pages of several nodes, in any order, and each leaves the LRU on which it is.
#[test]
fn references_of_several_nodes_are_dropped_in_one_call() {
    with_cpu(Size { nodes: 2, ..SIZE }, 18, |rig, cx| {
        let (frames, pager) = (rig.vm.frames(), rig.vm.pager());
        let lrus = [0, 1].map(|node| pager.lru(NodeId::new(node)).expect("one for each node"));
        let mut runs: Vec<FolioRun> = (0..100_u32)
            .map(|turn| {
                let from = AllocRequest::order(Order::ZERO).movable().from(Placement::Only(NodeId::new(turn / 3 % 2)));
                let page = frames.alloc(cx, from).expect("memory");
                let extent = page.extent();
                let _ = frames.count(page).expect("managed").into_pfn();
                // SAFETY: counted just now, and it is told once.
                unsafe { pager.lru_add(frames, cx, extent, Order::ZERO) };
                // SAFETY: the reference that became a number above.
                unsafe { FolioRun::from_extent(extent, Order::ZERO) }
            })
            .collect();
        assert!(lrus.iter().all(|lru| lru.stats(cx).folios > 40));
        // SAFETY: the pager was told of the page, as of the others below.
        unsafe { pager.drop_references(frames, cx, runs.pop()) };
        assert_eq!(lrus.iter().map(|lru| lru.stats(cx).folios).sum::<u64>(), 99);
        // SAFETY: as above.
        unsafe { pager.drop_references(frames, cx, runs) };
        assert!(lrus.iter().all(|lru| lru.stats(cx).folios == 0));
    });
}

/// An LRU for other frames is nobody's: what is on it is not looked at, held or let go, whoever asks for memory of its node.
#[test]
fn a_strangers_lru_is_left_alone() {
    with_cpu(Size { nodes: 2, strange: true, ..SIZE }, 17, |rig, cx| {
        // Of the same number as a page that is in use here.
        let space = filled(rig, cx, PageSize::Size4K, 1);
        let Lookup::Mapped(leaf) = rig.vm.lookup(cx, &space, VirtAddr::new(AT)) else { panic!("mapped") };
        let (pager, page) = (rig.vm.pager(), Extent::block(leaf.frame, Order::ZERO));
        assert_eq!(rig.others.node_of(leaf.frame), Some(NODE));
        let theirs = pager.lru(NodeId::new(1)).expect("one for each node");
        let other: Reclaim<'_, '_, Model<'_>, _> =
            Reclaim::new(std::slice::from_ref(theirs), rig.store, pager.marks(), ());
        // SAFETY: it has been given to neither that manager nor anybody in its name; nobody looks at its bytes.
        let frozen = unsafe { Frozen::assume_owned(page.base(), Order::ZERO, Mobility::Movable) };
        let _ = rig.others.count(frozen).expect("managed").into_pfn();
        // SAFETY: counted just now, and it is told once.
        unsafe { other.lru_add(rig.others, cx, page, Order::ZERO) };
        assert_eq!(theirs.stats(cx).folios, 1);
        let before = rig.vm.frames().stats(cx);
        let budget = ShrinkBudget::new(8, 8);
        assert_eq!(pager.shrink(&rig.vm, cx, NodeId::new(1), budget, &Never).scanned, 0);
        assert!(!pager.compact(&rig.vm, cx, NodeId::new(1)));
        let need = Shortfall::frames(8).only(Some(NodeId::new(1)));
        assert_eq!(pager.relieve(&rig.vm, cx, need), 0);
        assert_eq!(pager.counts().aged.get(), 0, "looked at");
        assert_eq!((theirs.stats(cx).folios, rig.others.references(page.base())), (1, 1));
        assert_eq!(rig.vm.frames().stats(cx).free, before.free);
        rig.end(cx, space);
        // SAFETY: the reference that became a number above.
        unsafe { other.drop_references(rig.others, cx, [FolioRun::from_extent(page, Order::ZERO)]) };
        assert_eq!(theirs.stats(cx).folios, 0);
    });
}

/// Gathering gives up after eight blocks that cannot be emptied, and takes the one after seven.
#[test]
fn few_blocks_are_tried() {
    const ORDER: Order = PageSize::Size2M.order();
    for (movable, compacted) in [(7, true), (8, false)] {
        with_cpu(Size { mib: 32, ..SIZE }, 26, |rig, cx| {
            let frames = rig.vm.frames();
            let area = span(AT, 2 << 20);
            let space = rig.space(cx, area, VmaKind::private(PageSize::Size4K));
            let fault = |cx: &mut _, page: u64| {
                let at = VirtAddr::new(AT + (page << 12));
                rig.vm.fault(cx, &space, at, hugemm_vm::Access::Write).expect("memory");
                let Lookup::Mapped(leaf) = rig.vm.lookup(cx, &space, at) else { panic!("mapped") };
                leaf.frame
            };
            // Its table.
            fault(cx, 511);
            rig.vm.unmap(cx, &space, span(AT + (511 << 12), 0x1000)).expect("its own");
            let all = |cx: &Cx<'_, '_>, order| {
                core::iter::from_fn(|| frames.alloc(cx, AllocRequest::order(order)).ok()).collect()
            };
            let blocks: Vec<Frozen> = all(cx, ORDER);
            let few: Vec<Frozen> = all(cx, Order::ZERO);
            assert!(blocks.len() > 9, "{}", blocks.len());
            // In each of nine blocks one page of the space. Of one the other frames are free.
            let mut kept = Vec::new();
            for (page, block) in (0..).zip(blocks) {
                let extent = block.extent();
                let mut rest = frames.split(block, Order::ZERO).expect("its own");
                if page < 9 {
                    frames.free(cx, rest.pop().expect("one"));
                    assert!(extent.contains(fault(cx, page)));
                }
                kept.push(rest);
            }
            let mut emptied = kept.remove(movable);
            while let Some(frame) = emptied.pop() {
                frames.free(cx, frame);
            }
            few.into_iter().for_each(|block| frames.free(cx, block));
            assert_eq!(rig.vm.pager().compact(&rig.vm, cx, NODE), compacted, "block {movable}");
            for mut run in kept {
                while let Some(frame) = run.pop() {
                    frames.free(cx, frame);
                }
            }
            rig.vm.destroy(cx, space).expect("nobody uses it");
        });
    }
}
