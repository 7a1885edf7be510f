//! The feature `debug` finds what was planted, and nothing where nothing is.

use super::{order, request};
use hugemm_base::inject::Inject;
use hugemm_base::lock::SpinLock;
use hugemm_base::platform::{LinearMap, Window};
use hugemm_base::random::Random;
use hugemm_base::{CpuCx, Dirty, Extent, FrameUse, NodeId, Order, Pfn, PhysMap, Ram, VirtAddr, Zeroed};
use hugemm_frames::debug::{Finding, Record, Watch};
use hugemm_frames::{ArenaSpec, CarveReason, Env, Frames, FramesConfig, Frozen, Mobility, NoMigration};
use hugemm_threads::{Memory, Threads};
use std::cell::RefCell;

thread_local! {
    static FOUND: RefCell<Vec<Finding>> = const { RefCell::new(Vec::new()) };
}

struct Watched(Watch<'static>);

impl Inject for Watched {}

// SAFETY: descriptors are where the array is.
unsafe impl Env for Watched {
    type Lock = SpinLock;

    fn watch(&self) -> Option<&Watch<'_>> {
        Some(&self.0)
    }
}

type Cx<'a> = CpuCx<'a, Threads<Memory>>;

/// Runs a test in 8 MiB that are watched; what was found. Every frame is free again at the end.
fn watched(test: impl FnOnce(&mut Cx<'_>, &Frames<'_, Watched>)) -> Vec<Finding> {
    FOUND.take();
    let (threads, ram) = Threads::with_memory(8 << 20);
    let (mut cx, extent) = (threads.cx(), ram.extent());
    let window = threads.open(extent, None).expect("mapped");
    let offset = window.ptr.expose_provenance().wrapping_sub(extent.start().get() as usize);
    let records = Box::leak((0..extent.pages()).map(|_| Record::default()).collect::<Vec<_>>().into_boxed_slice());
    let report = |finding: &Finding| FOUND.with_borrow_mut(|found| found.push(*finding));
    // SAFETY: the test's memory, in one piece, longer than the manager.
    let watch = unsafe { Watch::new(extent.base(), records, offset, report) };
    let arenas = [ArenaSpec::new(extent, NodeId::new(0))];
    let config = FramesConfig::new(&arenas, 1);
    let metadata = Memory::new(Frames::<Watched>::required_bytes(&config).expect("valid"));
    // SAFETY: zeroed, of this size, used once; one platform.
    let frames = unsafe { Frames::new(&config, Watched(watch), metadata.ptr(), metadata.bytes()) }.expect("fits");
    // SAFETY: once.
    unsafe { frames.release(&cx, ram.into_dirty()) };
    test(&mut cx, &frames);
    frames.drain(&cx);
    assert_eq!(frames.stats(&cx).free, extent.pages());
    FOUND.take()
}

/// Where a frame's bytes are.
fn bytes(cx: &Cx<'_>, extent: Extent) -> *mut u8 {
    cx.platform().open(extent, None).expect("mapped").ptr
}

/// A write to what was freed is found by who gets the frame next, with the frame, its order, its use, who took it and who freed it.
#[test]
fn a_use_after_free_is_named() {
    let (mut taken, mut freed, mut frame) = (0, 0, None);
    let found = watched(|cx, frames| {
        let block = frames.alloc_for(cx, FrameUse::TABLES, order(2)).expect("memory");
        taken = line!() - 1;
        let extent = block.extent();
        frames.free_for(cx, FrameUse::TABLES, block);
        freed = line!() - 1;
        // SAFETY: none: this is what is to be found.
        unsafe { bytes(cx, extent).add(2 * 4096 + 100).write(7) };
        frame = Some(extent.slice(2, 3).base());
        let all: Vec<_> = core::iter::from_fn(|| frames.alloc(cx, Order::ZERO).ok()).collect();
        all.into_iter().for_each(|block| frames.free(cx, block));
    });
    let [Finding::UsedAfterFree { frame: named, byte, holder }] = found[..] else { panic!("{found:?}") };
    assert_eq!((Some(named), byte), (frame, 100));
    assert_eq!((holder.order, holder.of), (order(2), Some(FrameUse::TABLES)));
    let lines = [holder.taken, holder.freed].map(|at| at.map(|at| (at.file().ends_with("debug.rs"), at.line())));
    assert_eq!(lines, [Some((true, taken)), Some((true, freed))]);
    let said = found[0].to_string();
    assert!(said.contains("page tables") && said.contains(&format!("debug.rs:{freed}")), "{said}");
}

/// What is freed again is named, with both frees; that the types forbid it is no help to who makes an owner of a number.
#[test]
fn a_double_free_is_named() {
    let mut first = 0;
    let found = watched(|cx, frames| {
        let block = frames.alloc(cx, Order::ZERO).expect("memory");
        let pfn = block.pfn();
        frames.free(cx, block);
        first = line!() - 1;
        // SAFETY: none: this is what is to be found.
        let again = unsafe { Frozen::assume_owned(pfn, Order::ZERO, Mobility::Unmovable) };
        frames.free(cx, again);
        // It is in the CPU's cache twice: both come out again, and one goes back.
        let [one, two] = [(); 2].map(|()| frames.alloc(cx, Order::ZERO).expect("cached"));
        assert_eq!((one.pfn(), two.pfn()), (pfn, pfn));
        let _ = one.into_dirty();
        frames.free(cx, two);
    });
    let [Finding::FreedTwice { holder, again, .. }] = found[..] else { panic!("{found:?}") };
    assert_eq!(holder.freed.map(|at| at.line()), Some(first));
    assert!(again.line() > first && found[0].to_string().starts_with("double free"));
}

/// What is still in use at the end is listed, by use and caller.
#[test]
fn leaks_are_listed_by_use_and_caller() {
    let found = watched(|cx, frames| {
        let before = frames.alloc(cx, order(1)).expect("memory");
        let watch = frames.env().watch().expect("there is one");
        let began = watch.begin();
        let sound = frames.alloc(cx, order(3)).expect("memory");
        let leaked: Vec<_> = (0..3).map(|_| frames.alloc_for(cx, FrameUse::HEAP, order(1)).expect("memory")).collect();
        let at = line!() - 1;
        let other = frames.take_range(cx, sound.extent().slice(0, 1)).err().map(|_| frames.alloc(cx, Order::ZERO));
        frames.free(cx, sound);
        let mut rows = [None; 4];
        assert_eq!(watch.in_use_by_caller(began, &mut rows), 2);
        let [(heap, six), (single, one)] = [rows[0], rows[1]].map(|row| row.expect("a row"));
        let ((heap, six), (single, one)) =
            if heap.of.is_some() { ((heap, six), (single, one)) } else { ((single, one), (heap, six)) };
        assert_eq!((heap.of, heap.taken.map(|at| at.line()), six), (Some(FrameUse::HEAP), Some(at), 6));
        assert_eq!((single.of, one), (None, 1));
        assert_eq!(watch.in_use_by_caller(began, &mut []), 4, "what does not fit is counted block by block");
        assert_eq!(watch.in_use_since(0).count(), 5, "the one from before too");
        let other = other.expect("it is in use").expect("memory");
        leaked.into_iter().chain([before, other]).for_each(|block| frames.free(cx, block));
        assert_eq!(watch.in_use_since(0).count(), 0);
    });
    assert_eq!(found, []);
}

/// Everything that takes and frees, on memory that is written to and on zeroes, while it is somebody's: nothing is found.
#[test]
fn a_sound_program_is_left_alone() {
    let found = watched(|cx, frames| {
        let (mut random, mut held) = (Random(5), Vec::<Dirty>::new());
        for _ in 0..if cfg!(miri) { 60 } else { 3000 } {
            let some = match random.below(7) {
                0 => frames.alloc(cx, request(random.below(5) as u32)).ok().map(Frozen::into_dirty),
                1 => frames.alloc(cx, request(0).prefer_zeroed()).ok().map(Frozen::into_dirty),
                2 => frames.alloc_exact(cx, 1 + random.below(30), Order::ZERO).ok(),
                3 => frames.alloc_nowait(cx, request(1)).ok().map(Frozen::into_dirty),
                4 if random.below(50) == 0 => {
                    let all = frames.alloc_contig_range(cx, super::support::extent(512, 512), &mut NoMigration);
                    all.ok()
                }
                _ => None,
            };
            held.extend(some);
            if held.len() > 20 || random.below(3) == 0 {
                let Some(one) = (!held.is_empty()).then(|| held.swap_remove(random.below(held.len() as u64) as usize))
                else {
                    continue;
                };
                let zero = random.below(3) == 0;
                // SAFETY: the extent is the test's until it is freed.
                unsafe {
                    bytes(cx, one.extent()).write_bytes(if zero { 0 } else { 9 }, one.extent().bytes() as usize);
                    match zero {
                        true => frames.free_zeroed(cx, Zeroed::assume_owned(one.into_extent())),
                        false => frames.free_extent(cx, one),
                    };
                }
            }
        }
        let folio = frames.count(frames.alloc(cx, order(3)).expect("memory")).expect("ours");
        let _ = frames.put(cx, folio);
        held.into_iter().for_each(|one| _ = frames.free_extent(cx, one));
        assert_eq!(frames.env().watch().expect("there is one").in_use_since(0).count(), 0);
    });
    assert_eq!(found, []);
}

/// A carved manager can watch, too: all of its memory, holes left out, but for what it needs itself.
#[test]
fn a_carved_manager_watches_all_of_its_memory() {
    FOUND.take();
    let (threads, ram) = Threads::with_memory(8 << 20);
    let cx = threads.cx();
    let (below, rest) = ram.split_at(100);
    let (_hole, above) = rest.split_at(50);
    let there = below.extent().pages() + above.extent().pages();
    let report = |finding: &Finding| FOUND.with_borrow_mut(|found| found.push(*finding));
    let frames = Frames::carve_watched(&cx, [above, below], report).expect("enough");
    let own = there - frames.managed();
    assert!((12..60).contains(&own), "{own} frames for records of 24 bytes and the metadata");
    let all = || core::iter::from_fn(|| frames.alloc(&cx, Order::ZERO).ok()).collect::<Vec<_>>();
    let blocks = all();
    assert_eq!(blocks.len() as u64, frames.managed());
    let watch = frames.env().watch().expect("there is one");
    assert_eq!(watch.in_use_since(0).count() as u64, frames.managed());
    let mut planted = [0, 99, 100, blocks.len() - 1].map(|index| blocks[index].extent());
    blocks.into_iter().for_each(|block| frames.free(&cx, block));
    // SAFETY: none: this is what is to be found.
    planted.iter().for_each(|page| unsafe { bytes(&cx, *page).add(4095).write(7) });
    all().into_iter().for_each(|block| frames.free(&cx, block));
    let mut found: Vec<_> = FOUND
        .take()
        .into_iter()
        .map(|finding| match finding {
            Finding::UsedAfterFree { frame, byte: 4095, .. } => frame,
            other => panic!("{other}"),
        })
        .collect();
    found.sort_unstable();
    planted.sort_unstable_by_key(|page| page.base());
    assert_eq!(found, planted.map(|page| page.base()));
    assert_eq!(watch.in_use_since(0).count(), 0);
}

/// Memory of which the second half is mapped apart from the first: so many of its frames have no memory there.
struct Apart(Memory, u64);

// SAFETY: the memory's own windows, none over the border; each page of it has one number.
unsafe impl PhysMap for Apart {
    fn open(&self, extent: Extent, user: Option<VirtAddr>) -> Option<Window> {
        let (below, above) = self.0.frames().split_at(self.0.frames().pages() / 2);
        if below.contains(extent.base()) {
            return self.0.open(extent.intersection(below), user);
        }
        let first = extent.base().get().checked_sub(self.1).map(Pfn::new).filter(|first| above.contains(*first))?;
        self.0.open(Extent::new(first, extent.pages().min(above.end().get() - first.get())).ok()?, user)
    }
}

// SAFETY: as the memory's.
unsafe impl LinearMap for Apart {}

/// All of what is watched is reached by one offset: pieces that are mapped elsewhere are refused, and a piece of which the end is.
#[test]
fn memory_that_is_mapped_at_two_distances_is_not_watched() {
    for gap in [0, 100] {
        let layout = std::alloc::Layout::from_size_align(8 << 20, 2 << 20).expect("a layout");
        let threads = Threads::new(Apart(Memory::new(layout), gap));
        let (below, above) = threads.0.frames().split_at(1024);
        let above = Extent::new(Pfn::new(above.base().get() + gap), above.pages()).expect("in range");
        // SAFETY: the memory has just been made, and its numbers are nobody else's.
        let ram = [below, above].map(|piece| unsafe { Ram::assume_unmanaged(piece) });
        let report = |finding: &Finding| panic!("{finding}");
        let carved = Frames::carve_watched(&threads.cx(), ram, report);
        let piece = if gap == 0 { below.join(above).expect("they adjoin") } else { above };
        assert_eq!(carved.err(), Some(CarveReason::NotMapped(piece)), "a gap of {gap}");
    }
}
