//! Several tasks at once, interrupts in between, and which types may go from thread to thread. No model MMU: frames are found by the
//! tables and reached in a direct map, so that Miri can interpret it.

use hugemm_base::sync::AtomicU64;
use hugemm_base::{CpuCx, Extent, Order, PAGE_BYTES, PhysMap, VirtAddr, VirtRange, with};
use hugemm_clear::Clearer;
use hugemm_frames::{Carved, Frames};
use hugemm_kva::*;
use hugemm_paging::{Counting, EditLock, FrameTables, KernelSpace, PageTable, TlbCpu, TlbShootdown, TlbSpace, X86_64};
use hugemm_threads::{CPUS, Memory, Random, Threads, run_as};
use std::collections::VecDeque;
use std::sync::Mutex;

type Machine = Threads<Memory>;

enum Here {}

impl KvaSetup for Here {
    type Platform = Machine;
    type Env = Carved;
    type Format = X86_64;
    type Lock = EditLock;
    type Tlb = Counting;
    type Masks = [AtomicU64; 2];
}

#[test]
fn every_type() {
    hugemm_threads::across_threads! {
        concat!(env!("CARGO_MANIFEST_DIR"), "/src"), private {}
        both {
            Kva<'static, Here>, KvaParts<'static, Here>, Area, Stack, Request, Limits, KvaCounts, KvaError, AreaInfo, AreaKind, Place,
        }
    }
}

struct World<'a, 'm> {
    threads: &'a Machine,
    frames: &'a Frames<'m, Carved>,
    table: &'a PageTable<X86_64, EditLock>,
    kva: &'a Kva<'m, Here>,
}

/// A machine with so much memory and a manager.
fn with_world(bytes: u64, limits: Limits, f: impl FnOnce(&World<'_, '_>)) {
    let (threads, ram) = Threads::with_memory(bytes);
    let cx = threads.cx();
    let frames = Frames::carve(&cx, ram).expect("enough memory");
    let cpus: Vec<TlbCpu> = (0..CPUS).map(|_| TlbCpu::default()).collect();
    let inboxes: Vec<AtomicU64> = (0..CPUS).map(|_| AtomicU64::new(0)).collect();
    // SAFETY: no CPU walks the tables.
    let shootdown = unsafe { TlbShootdown::new(&cpus, &inboxes, Counting) }.expect("fits");
    let half = VirtRange::new(VirtAddr::new(0xffff_8000_0000_0000), 1 << 39).expect("a range");
    // SAFETY: the memory is a direct map.
    let table = unsafe { PageTable::with_fixed_top(&mut FrameTables::new(&frames, &cx), half) }.expect("a table");
    // SAFETY: the only space.
    let space: TlbSpace<KernelSpace> = unsafe { TlbSpace::new(&shootdown, table.root().start()) }.expect("few CPUs");
    let parts = with!(KvaParts::new(&frames, &table, &space, &shootdown, Clearer::uncalibrated()), limits);
    let range = VirtRange::new(VirtAddr::new(0xffff_8000_4000_0000), 1 << 30).expect("a range");
    // SAFETY: nobody else maps anything there, and no CPU walks.
    let kva = unsafe { Kva::new(&cx, parts, range) }.expect("a manager");
    let mut cx = threads.cx();
    kva.trim(&mut cx);
    let free = frames.available(&cx) + kva.counts(&cx).record_frames;
    f(&World { threads: &threads, frames: &frames, table: &table, kva: &kva });
    kva.trim(&mut cx);
    assert_eq!(frames.available(&cx) + kva.counts(&cx).record_frames, free, "frames are lost");
    assert_eq!(cx.platform().counters_of_areas(), 0);
}

/// What is counted as in use for areas.
trait Uses {
    fn counters_of_areas(&self) -> i64;
}

impl Uses for Machine {
    fn counters_of_areas(&self) -> i64 {
        let of = |cpu| {
            run_as(cpu);
            hugemm_base::Cpu::counters(self).snapshot().frames.of(hugemm_base::FrameUse::AREAS)
        };
        let sum = (0..CPUS as u32).map(of).sum();
        run_as(0);
        sum
    }
}

impl World<'_, '_> {
    /// The word of each page of an area, as the tables have it.
    fn words(&self, cx: &CpuCx<'_, Machine>, area: &Area) -> Vec<*mut u64> {
        // SAFETY: the memory is a direct map.
        let table = self.table.shared(unsafe { FrameTables::new(self.frames, cx) });
        let pages = area.range().first_page()..area.range().end_page();
        pages
            .map(|page| {
                let at = table.translate(VirtAddr::new(page << 12)).expect("mapped");
                let frame = Extent::new(hugemm_base::Pfn::containing(at), 1).expect("a frame");
                cx.platform().open(frame, None).expect("a direct map").ptr.cast()
            })
            .collect()
    }

    fn mark(&self, cx: &CpuCx<'_, Machine>, area: &Area, mark: u64) {
        // SAFETY: the area's own pages, and its owner's; so below.
        self.words(cx, area).into_iter().for_each(|word| unsafe { word.write(mark) });
    }

    fn check(&self, cx: &CpuCx<'_, Machine>, area: &Area, mark: u64) {
        // SAFETY: as above.
        self.words(cx, area).into_iter().for_each(|word| assert_eq!(unsafe { word.read() }, mark, "{area:?}"));
    }

    /// One CPU's program: areas come from everybody's shelf and go there.
    fn run(&self, cpu: u32, steps: u64, shelf: &Mutex<VecDeque<(Area, u64)>>) {
        run_as(cpu);
        let (mut cx, mut random) = (self.threads.cx(), Random(cpu.into()));
        for step in 0..steps {
            if random.below(2) == 0 {
                let most = if random.below(16) == 0 { 600 } else { 20 };
                let bytes = (1 + random.below(most)) * PAGE_BYTES;
                let (mark, request) =
                    (step << 8 | u64::from(cpu), with!(Request::new(bytes, "it"), zeroed = random.below(2) == 0));
                let Ok(area) = self.kva.alloc(&mut cx, request) else { continue };
                if request.zeroed {
                    self.check(&cx, &area, 0);
                }
                self.mark(&cx, &area, mark);
                shelf.lock().expect("shelf").push_back((area, mark));
            } else {
                let Some((area, mark)) = shelf.lock().expect("shelf").pop_front() else { continue };
                self.check(&cx, &area, mark);
                match random.below(4) {
                    0 => self.kva.free_later(&cx, area).expect("its own"),
                    _ => self.kva.free(&mut cx, area).expect("its own"),
                }
            }
        }
    }
}

/// Whoever has an area finds what it wrote, and all is back at the end.
#[test]
fn several_tasks_take_and_free() {
    let (cpus, steps) = if cfg!(miri) { (2, 8) } else { (8, 1500) };
    let _watched = hugemm_threads::Watchdog::new();
    with_world(32 << 20, Limits::new(20, 1000), |world| {
        let shelf = Mutex::new(VecDeque::new());
        std::thread::scope(|scope| {
            (0..cpus).for_each(|cpu| {
                let shelf = &shelf;
                scope.spawn(move || world.run(cpu, steps, shelf));
            });
        });
        let mut cx = world.threads.cx();
        for (area, mark) in shelf.into_inner().expect("shelf") {
            world.check(&cx, &area, mark);
            world.kva.free(&mut cx, area).expect("its own");
        }
    });
}

/// A handler, wherever an interrupt could come, asks what addresses are and frees what tasks have taken.
#[test]
fn interrupts_free_and_ask() {
    let steps = if cfg!(miri) { 4 } else { 60 };
    with_world(16 << 20, Limits::new(8, 1000), |world| {
        let (shelf, mut asked) = (Mutex::new(Vec::<Area>::new()), 0_u64);
        let handler = |cx: &mut CpuCx<'_, Machine>| {
            asked += 1;
            let at = VirtAddr::new(0xffff_8000_4000_0000 + asked % 64 * PAGE_BYTES);
            assert!(world.kva.what_is(cx, at).is_some(), "interrupts are off where the lock is held");
            if let Some(area) = shelf.try_lock().ok().and_then(|mut shelf| shelf.pop()) {
                world.kva.free_later(cx, area).expect("its own");
            }
        };
        world.threads.interrupted(handler, |cx| {
            for step in 0..steps {
                let area = world.kva.alloc(cx, Request::new((1 + step % 7) * PAGE_BYTES, "it")).expect("memory");
                let stack = world.kva.alloc_stack(cx, Order::ZERO, "stack").expect("memory");
                shelf.lock().expect("shelf").push(area);
                world.kva.free(cx, stack.into_area()).expect("its own");
            }
        });
        let mut cx = world.threads.cx();
        shelf.into_inner().expect("shelf").into_iter().for_each(|area| world.kva.free(&mut cx, area).expect("its own"));
        assert!(asked > steps);
    });
}

/// Whoever finds no memory while another CPU is giving some back waits for that one.
#[test]
fn a_flush_under_way_is_waited_for() {
    let _watched = hugemm_threads::Watchdog::new();
    let bytes = 8 << 20;
    with_world(bytes, Limits::new(u64::MAX, u64::MAX), |world| {
        let (request, reached) = (Request::new(4 << 20, "most"), std::sync::Barrier::new(2));
        let mut cx = world.threads.cx();
        let area = world.kva.alloc(&mut cx, request).expect("memory");
        world.kva.free(&mut cx, area).expect("its own");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                run_as(1);
                let mut met = false;
                // An interrupt of the flusher: what waits is in its hands.
                let handler = |cx: &mut CpuCx<'_, Machine>| {
                    if !met && world.kva.counts(cx).waiting == 0 {
                        met = true;
                        reached.wait();
                        std::thread::sleep(std::time::Duration::from_millis(if cfg!(miri) { 1 } else { 50 }));
                    }
                };
                world.threads.interrupted(handler, |cx| world.kva.flush(cx));
            });
            reached.wait();
            let area = world.kva.alloc(&mut cx, request).expect("what the other gives back");
            world.kva.free(&mut cx, area).expect("its own");
        });
    });
}
