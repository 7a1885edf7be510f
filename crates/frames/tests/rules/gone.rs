//! What a call still does when the frames that it was given are free, and so their arena may be gone: the lock that it has just left lets
//! another CPU run, which unplugs the arena. What was kept about it is out of reach from then on.

use super::support::{Memory, Threads, arena, extent};
use hugemm_base::inject::{FaultPoint, Inject};
use hugemm_base::lock::RawLock;
use hugemm_base::{CpuCx, Dirty, Extent, NodeId, Order, Pfn};
use hugemm_frames::{
    AllocContigError, ArenaSpec, Env, FAULT_CLAIM, FolioRun, Frames, FramesConfig, Frozen, Mobility, NoMigration, Put,
    RemoveError,
};
use std::cell::RefCell;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

thread_local! {
    /// What another CPU does as soon as this one has left a lock.
    static NEXT: RefCell<Option<Box<dyn FnOnce() + Send>>> = const { RefCell::new(None) };
    /// What this one does when it next comes to a lock.
    static BEFORE: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
    /// What another does when this one has begun to claim frames by their numbers, and has no lock yet.
    static AT_CLAIM: RefCell<Option<Box<dyn FnOnce() + Send>>> = const { RefCell::new(None) };
}

/// A lock behind which [`NEXT`] happens.
struct Behind(AtomicBool);

// SAFETY: one compare-and-swap wins, until the winner's store.
unsafe impl RawLock for Behind {
    fn new() -> Self {
        Behind(AtomicBool::new(false))
    }

    fn lock(&self) {
        if let Some(before) = BEFORE.take() {
            before();
        }
        while !self.try_lock() {
            std::thread::yield_now();
        }
    }

    fn try_lock(&self) -> bool {
        self.0.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    unsafe fn unlock(&self) {
        self.0.store(false, Ordering::Release);
        if let Some(next) = NEXT.take() {
            std::thread::spawn(next).join().expect("no panic");
        }
    }
}

#[derive(Default)]
struct Watched;

impl Inject for Watched {
    fn fault(&self, point: FaultPoint) -> bool {
        if point == FAULT_CLAIM
            && let Some(next) = AT_CLAIM.take()
        {
            std::thread::spawn(next).join().expect("no panic");
        }
        false
    }
}

// SAFETY: descriptors as ever.
unsafe impl Env for Watched {
    type Lock = Behind;
}

type Manager = Frames<'static, Watched>;

/// What is kept about an arena that is removed: of so many bytes from `at` on.
#[derive(Clone, Copy)]
struct Room(NonNull<[u8]>);

// SAFETY: only an address, until somebody says otherwise.
unsafe impl Send for Room {}

impl Room {
    /// Of the system, so that it can be given back in part, and whoever looks there then is stopped.
    fn of(extent: Extent) -> Self {
        let bytes = Manager::added_bytes(&spec(extent)).expect("valid").size();
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, at an address of the system's choice.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        Room(NonNull::slice_from_raw_parts(NonNull::new(at.cast()).expect("mapped"), bytes))
    }

    fn add(self, frames: &Manager, cx: &CpuCx<'_, Threads>, extent: Extent) {
        // SAFETY: memory of its own, which stays until the arena is removed; the tests say whose the frames are.
        unsafe {
            frames.add(cx, &spec(extent), self.0.as_ptr().cast(), self.0.len()).expect("room");
            frames.release_extent(cx, extent);
        }
    }

    fn give_back(self) {
        // SAFETY: whole pages of a mapping that the manager has given back.
        assert_eq!(unsafe { libc::munmap(self.0.as_ptr().cast(), self.0.len()) }, 0);
    }
}

fn spec(extent: Extent) -> ArenaSpec {
    ArenaSpec::new(extent, NodeId::new(0))
}

/// As an embedder unplugs; what was kept about the arena is the system's again.
fn unplug(frames: &Manager, cx: &mut CpuCx<'_, Threads>, extent: Extent) {
    let all = frames.alloc_contig_range(cx, extent, &mut NoMigration).expect("free");
    // SAFETY: the tests ask about no frame of it by its number.
    let removed = unsafe { frames.remove(cx, all, |_| ()) }.map_err(|(_, error)| error).expect("added");
    Room(removed.memory).give_back();
}

/// A manager with 2 MiB that stay and hold nothing, and slots for two arenas, both empty.
fn manager() -> &'static Manager {
    let arenas = [arena(512, 512, 0)];
    let config = FramesConfig::new(&arenas, 2).on_nodes(&const { [NodeId::new(0), NodeId::new(0)] });
    let memory: &'static mut Memory =
        Box::leak(Box::new(Memory::new(Manager::required_bytes(&config).expect("valid"))));
    // SAFETY: one manager, one platform, frame numbers that no other manager's handles meet.
    let frames = unsafe { Manager::in_slice(&config, Watched, memory.bytes()) }.expect("enough");
    let frames = Box::leak(Box::new(frames));
    hugemm_threads::run_as(0);
    let threads = <Threads>::default();
    let slots = [extent(1 << 20, 512), extent(1 << 21, 512)];
    slots.iter().for_each(|slot| Room::of(*slot).add(frames, &threads.cx(), *slot));
    slots.iter().for_each(|slot| unplug(frames, &mut threads.cx(), *slot));
    frames
}

/// Another CPU does this when this one leaves its next lock.
fn then(act: impl FnOnce(&mut CpuCx<'_, Threads>) + Send + 'static) {
    NEXT.set(Some(elsewhere(act)));
}

fn elsewhere(act: impl FnOnce(&mut CpuCx<'_, Threads>) + Send + 'static) -> Box<dyn FnOnce() + Send> {
    Box::new(move || {
        hugemm_threads::run_as(1);
        act(&mut <Threads>::default().cx());
    })
}

/// All of two arenas that adjoin, owned.
fn own_both(frames: &'static Manager, a: Extent, b: Extent) -> Dirty {
    let threads = <Threads>::default();
    let own = |part: Extent| {
        Room::of(part).add(frames, &threads.cx(), part);
        frames.alloc_contig_range(&mut threads.cx(), part, &mut NoMigration).expect("free")
    };
    let first = own(a);
    first.join(own(b)).expect("they adjoin")
}

/// The first arena goes while the second is still to be freed, and comes again behind it, and somebody has all of it.
fn come_again(frames: &'static Manager, a: Extent) {
    then(move |cx| {
        unplug(frames, cx, a);
        let other = extent(1 << 20, 512);
        Room::of(other).add(frames, cx, other);
        Room::of(a).add(frames, cx, a);
        let mine = frames.alloc_contig_range(cx, a, &mut NoMigration).expect("free");
        assert_eq!(mine.into_extent(), a);
    });
}

const A: (u64, u64) = (8192, 1024);
const B: (u64, u64) = (9216, 1024);

#[test]
fn a_part_that_was_freed_is_not_freed_again_in_another_arena() {
    let (frames, threads) = (manager(), <Threads>::default());
    let (a, b) = (extent(A.0, A.1), extent(B.0, B.1));
    let both = own_both(frames, a, b);
    come_again(frames, a);
    assert_eq!(frames.free_extent(&threads.cx(), both), 2048);
    assert!(NEXT.take().is_none(), "it has happened");
    assert!(frames.take_range(&threads.cx(), a).is_err(), "somebody has it");
    assert!(frames.take_range(&threads.cx(), b).is_ok());
}

/// The same for references to the frames.
#[test]
fn a_part_whose_references_were_dropped_is_not_looked_for_again() {
    let (frames, threads) = (manager(), <Threads>::default());
    let (a, b) = (extent(A.0, A.1), extent(B.0, B.1));
    let both = own_both(frames, a, b).into_extent();
    let count = |block: Extent| {
        // SAFETY: just taken, and given up.
        let block = unsafe { Frozen::assume_owned(block.base(), Order::new(10).expect("valid"), Mobility::Unmovable) };
        frames.count_run(frames.split(block, Order::ZERO).expect("managed")).expect("managed").into_extent()
    };
    let _ = [a, b].map(count);
    come_again(frames, a);
    // SAFETY: the only references.
    let report = frames.free_range(&mut threads.cx(), unsafe { FolioRun::from_extent(both, Order::ZERO) });
    assert_eq!((report.freed, report.invalid, report.runs), (2048, 0, 2));
    assert!(frames.take_range(&threads.cx(), a).is_err(), "somebody has it");
}

/// What frees the last frame of an arena looks at nothing of it afterwards.
#[test]
fn nothing_of_an_arena_is_read_when_its_last_frame_is_free() {
    type Free = fn(&Manager, &mut CpuCx<'_, Threads>, Frozen);
    let ways: [Free; 5] = [
        |frames, cx, last| frames.free_nowait(cx, last),
        |frames, cx, last| {
            frames.free(cx, last);
            frames.drain(cx);
        },
        |frames, cx, last| assert_eq!(frames.free_extent(cx, last.into_dirty()), 512),
        |frames, cx, last| {
            let folio = frames.count(last).expect("managed");
            assert_eq!(frames.put(cx, folio), Ok(Put::Last));
            frames.drain(cx);
        },
        |frames, cx, last| {
            let run = frames.count_run(frames.split(last, Order::ZERO).expect("managed")).expect("managed");
            assert_eq!(frames.free_range(cx, run).freed, 512);
            frames.drain(cx);
        },
    ];
    for way in ways {
        let (frames, threads) = (manager(), <Threads>::default());
        let whole = extent(A.0, A.1);
        Room::of(whole).add(frames, &threads.cx(), whole);
        let block = || frames.alloc(&threads.cx(), super::request(9)).expect("free");
        let (first, last) = (block(), block());
        assert_eq!(first.pfn(), Pfn::new(A.0));
        frames.free(&threads.cx(), first);
        frames.drain(&threads.cx());
        then(move |cx| unplug(frames, cx, whole));
        way(frames, &mut threads.cx(), last);
        assert!(NEXT.take().is_none(), "it has happened");
        assert_eq!((frames.frames(), frames.managed()), (512, 0));
    }
}

/// Interrupts stay on while what is kept about an arena that comes is filled: 369 MB of 1 TiB.
#[test]
fn what_is_kept_is_filled_before_the_lock() {
    let (frames, threads) = (manager(), <Threads>::default());
    let whole = extent(A.0, A.1);
    let room = Room::of(whole);
    BEFORE.set(Some(Box::new(move || {
        // SAFETY: nobody else looks there yet.
        let bytes = unsafe { room.0.as_ref() };
        // All frames of a new arena are blocks of their own.
        assert!(bytes.windows(64).any(|starts| starts.iter().all(|byte| *byte == 0xff)));
    })));
    room.add(frames, &threads.cx(), whole);
    assert!(BEFORE.take().is_none(), "a lock was taken");
}

/// A row begins in one arena; what adjoins it is looked for by number, and its arena goes at that moment.
#[test]
fn a_row_does_not_reach_into_an_arena_that_goes() {
    let (frames, threads) = (manager(), <Threads>::default());
    let (a, b) = (extent(A.0, A.1), extent(B.0, B.1));
    Room::of(a).add(frames, &threads.cx(), a);
    let _lower = frames.take_range(&threads.cx(), a.slice(0, 512)).expect("free");
    Room::of(b).add(frames, &threads.cx(), b);
    AT_CLAIM.set(Some(elsewhere(move |cx| unplug(frames, cx, b))));
    let row = frames.alloc_row(&threads.cx(), 1024, super::request(0), |_| true);
    assert!(AT_CLAIM.take().is_none(), "it has happened");
    assert!(row.is_err(), "512 frames are left: {row:?}");
    assert_eq!((frames.frames(), frames.available(&threads.cx())), (512 + 1024, 512));
}

/// Who compacts claims blocks that it has only looked at; their owner may unplug them meanwhile.
#[test]
fn an_arena_stays_while_a_claim_is_at_work_in_it() {
    let (frames, threads) = (manager(), <Threads>::default());
    let a = extent(A.0, A.1);
    Room::of(a).add(frames, &threads.cx(), a);
    let mut mine = Some(frames.alloc_contig_range(&mut threads.cx(), a, &mut NoMigration).expect("free"));
    let mut remove = |cx: &CpuCx<'_, Threads>| {
        // SAFETY: nobody asks about a frame by its number.
        let removed = unsafe { frames.remove(cx, mine.take().expect("refused before"), |_| ()) };
        removed.map(|removed| Room(removed.memory).give_back()).map_err(|(frames, error)| {
            mine = Some(frames);
            error
        })
    };
    let mut tried = Vec::new();
    let claimed = frames.alloc_contig_range(&mut threads.cx(), a, &mut |cx: &mut CpuCx<'_, Threads>, _: Extent| {
        tried.push(remove(cx));
        false
    });
    assert_eq!(tried, [Err(RemoveError::Contended)]);
    assert_eq!(claimed.unwrap_err(), AllocContigError::InUse(a.base()));
    assert_eq!(remove(&threads.cx()), Ok(()));
    assert_eq!(frames.take_range(&threads.cx(), a).unwrap_err(), AllocContigError::NotManaged);
}
