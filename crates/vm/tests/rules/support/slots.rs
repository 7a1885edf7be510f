//! Where pages' contents are while they are away.

use super::{Cx, Model};
use hugemm_base::inject::FaultPlan;
use hugemm_base::{Cpu, Extent, NodeId, Order, PAGE_BYTES, Pfn, PhysMap, Shortfall};
use hugemm_frames::{FolioRun, Frames, Frozen, Plain};
use hugemm_host::mmu::Mmu;
use hugemm_paging::PageFormat;
use hugemm_vm::{LostPage, Pager, Vm};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

type Page = [u8; PAGE_BYTES as usize];

/// Slots in memory, each with as many shares as are asked for. `AWAY`: whether there are any.
#[derive(Default)]
pub struct Slots<const AWAY: bool> {
    state: Mutex<State>,
    /// Whether it says that it helped when it was asked for relief, and how often it was.
    pub helps: AtomicBool,
    pub asked: AtomicU64,
    /// What is free is needed for storing pages.
    pub reserves: AtomicBool,
    /// It is kept for pages that come back.
    pub holds_back: AtomicBool,
}

#[derive(Default)]
struct State {
    /// What they hold, and how often each is held.
    slots: BTreeMap<u64, (Box<Page>, u64)>,
    next: u64,
    /// Pages that it was told of when they became somebody's.
    known: BTreeSet<Pfn>,
    /// Runs of references that were dropped.
    drops: u64,
    /// Pages that it was told of as used.
    used: Vec<Pfn>,
    /// Pages that it was told of as not needed soon.
    unused: Vec<Pfn>,
    /// Reschedule points when one was last given back, how many have been since, and the most that were between two.
    points: u64,
    since: u64,
    most: u64,
}

fn bytes(platform: &Mmu<'_, '_>, frame: Pfn) -> *mut Page {
    platform.open(Extent::block(frame, Order::ZERO), None).expect("memory").ptr.cast()
}

impl<const AWAY: bool> Slots<AWAY> {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("slots")
    }

    /// How many are held.
    pub fn used(&self) -> usize {
        self.state().slots.len()
    }

    /// The pages that it was told of as used, in that order, since somebody asked.
    pub fn used_pages(&self) -> Vec<Pfn> {
        std::mem::take(&mut self.state().used)
    }

    /// The pages that it was told of as not needed soon, since somebody asked.
    pub fn unused_pages(&self) -> Vec<Pfn> {
        std::mem::take(&mut self.state().unused)
    }

    /// How many pages it has been told of.
    pub fn known(&self) -> usize {
        self.state().known.len()
    }

    /// How often references were dropped so far: some at a time.
    pub fn drops(&self) -> u64 {
        self.state().drops
    }

    /// The most that were given back between two reschedule points since somebody asked.
    pub fn most_between_reschedules(&self) -> u64 {
        let mut state = self.state();
        state.since = 0;
        std::mem::take(&mut state.most)
    }

    /// Stores a page of a block.
    pub fn store(&self, cx: &Cx<'_, '_>, block: &Frozen, page: u64) -> u64 {
        let frame = Pfn::new(block.pfn().get() + page);
        // SAFETY: the caller's block, which nobody stores to.
        let content = Box::new(unsafe { bytes(cx.platform(), frame).read() });
        let mut state = self.state();
        state.next += 1;
        let slot = state.next;
        state.slots.insert(slot, (content, 1));
        slot
    }
}

// SAFETY: it stores to blocks and does not change them for others.
unsafe impl<'h, F: PageFormat, const AWAY: bool> Pager<Model<'h, F, AWAY>> for Slots<AWAY> {
    const ACTIVE: bool = AWAY;

    unsafe fn lru_add(&self, _: &Frames<'_, Plain<&'h FaultPlan>>, _: &Cx<'_, 'h>, pages: Extent, order: Order) {
        if AWAY {
            self.state().known.extend(pages.chunks(order).map(|(head, _)| head));
        }
    }

    fn drops_sourced(&self) -> u64 {
        let mut state = self.state();
        state.next += 1;
        state.next
    }

    unsafe fn drop_references(
        &self,
        frames: &Frames<'_, Plain<&'h FaultPlan>>,
        cx: &Cx<'_, 'h>,
        pages: impl IntoIterator<Item = FolioRun>,
    ) {
        let mut state = self.state();
        state.drops += 1;
        for mut run in pages {
            while let Some(folio) = run.pop() {
                assert!(state.known.contains(&folio.pfn()), "nobody told of {}", folio.pfn());
                let _ = frames.put(cx, folio);
            }
        }
    }

    unsafe fn used(&self, _: &Frames<'_, Plain<&'h FaultPlan>>, _: &Cx<'_, 'h>, heads: &[Pfn]) {
        assert!(!heads.is_empty(), "told of nothing");
        self.state().used.extend(heads);
    }

    unsafe fn unused(&self, _: &Frames<'_, Plain<&'h FaultPlan>>, _: &Cx<'_, 'h>, heads: &[Pfn]) {
        assert!(!heads.is_empty(), "told of nothing");
        self.state().unused.extend(heads);
    }

    unsafe fn load(&self, cx: &Cx<'_, 'h>, slot: u64, into: &mut Frozen, page: u64) -> Result<(), LostPage> {
        let state = self.state();
        let (content, _) = state.slots.get(&slot).ok_or(LostPage)?;
        // SAFETY: the caller's block.
        unsafe { bytes(cx.platform(), Pfn::new(into.pfn().get() + page)).write(**content) };
        Ok(())
    }

    unsafe fn share(&self, _: &Cx<'_, 'h>, slot: u64) -> Option<u64> {
        self.state().slots.get_mut(&slot).expect("held").1 += 1;
        Some(slot)
    }

    unsafe fn free(&self, cx: &Cx<'_, 'h>, slot: u64) {
        let points = cx.platform().counters().reschedules.get();
        let mut state = self.state();
        if points != state.points {
            (state.points, state.since) = (points, 0);
        }
        state.since += 1;
        state.most = state.most.max(state.since);
        let (_, held) = state.slots.get_mut(&slot).expect("held");
        *held -= 1;
        if *held == 0 {
            state.slots.remove(&slot);
        }
    }

    fn may_take(&self, _: &Frames<'_, Plain<&'h FaultPlan>>, _: &Cx<'_, 'h>, _: Order) -> bool {
        !self.reserves.load(Ordering::Relaxed)
    }

    fn holds_back(&self, _: &Frames<'_, Plain<&'h FaultPlan>>, _: &Cx<'_, 'h>, _: NodeId, _: Order) -> bool {
        super::come_to(&super::AT_SUPPLY);
        self.holds_back.load(Ordering::Relaxed)
    }

    fn relieve(&self, _: &Vm<'_, Model<'h, F, AWAY>>, cx: &mut Cx<'_, 'h>, _: Shortfall) -> u64 {
        super::called_back(cx);
        self.asked.fetch_add(1, Ordering::Relaxed);
        u64::from(self.helps.load(Ordering::Relaxed))
    }
}
