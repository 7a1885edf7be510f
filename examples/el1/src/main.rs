//! An arm64 kernel with two CPUs: `examples/el1/run.sh` boots it.
//!
//! Both take blocks of all sizes, clear them, use the heap, and are interrupted by timers whose handler allocates. What every arm64
//! kernel needs is in `machine.rs`.
#![cfg_attr(target_os = "none", no_std, no_main)]
#![allow(unreachable_pub, reason = "in a binary, `pub` says what a module offers to the others")]

#[cfg(not(all(target_os = "none", target_arch = "aarch64")))]
fn main() -> std::process::ExitCode {
    eprintln!("hugemm-example-el1: this is a kernel for bare arm64; boot it with: examples/el1/run.sh");
    std::process::ExitCode::FAILURE
}

#[cfg(all(target_os = "none", target_arch = "aarch64"))]
extern crate alloc;

#[cfg(all(target_os = "none", target_arch = "aarch64"))]
mod machine;

#[cfg(all(target_os = "none", target_arch = "aarch64"))]
mod kernel {
    use crate::machine::{self, MEMORY, Serial};
    use alloc::{boxed::Box, vec::Vec};
    use core::fmt::Write;
    use core::ptr::{null_mut, with_exposed_provenance_mut};
    use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
    use hugemm::prelude::*;

    type Machine = BareMetal<2>;
    type Task = CpuCx<'static, Machine>;

    // SAFETY: the boot table maps it one to one. There is one task on each CPU, at EL1, and it stays there.
    static MACHINE: Machine = unsafe { BareMetal::new(DirectMap::new(MEMORY, MEMORY.start().get() as usize)) };

    #[global_allocator]
    static HEAP: GlobalHeap<Machine, Carved> = GlobalHeap::new();

    static FRAMES: AtomicPtr<Frames<'static, Carved>> = AtomicPtr::new(null_mut());
    static TICKS: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
    /// What the last timer interrupt of each CPU has allocated.
    static KEPT: [AtomicPtr<[u64; 32]>; 2] = [const { AtomicPtr::new(null_mut()) }; 2];
    static OTHER_IS_DONE: AtomicBool = AtomicBool::new(false);

    fn frames() -> &'static Frames<'static, Carved> {
        // SAFETY: set before anything asks, and there for good. Acquire pairs with `kernel_main`'s Release.
        unsafe { FRAMES.load(Ordering::Acquire).as_ref() }.expect("there is a manager")
    }

    /// The handler of interrupts: it allocates, from the heap and a frame, whatever it has interrupted.
    pub extern "C" fn interrupt() {
        if !machine::end_of_interrupt() {
            return;
        }
        let cpu = MACHINE.current().get() as usize;
        let ticks = TICKS[cpu].fetch_add(1, Ordering::Relaxed);
        let new = Box::into_raw(Box::new([ticks; 32]));
        let old = KEPT[cpu].swap(new, Ordering::Relaxed);
        // SAFETY: a box of an earlier tick.
        let old = (!old.is_null()).then(|| unsafe { Box::from_raw(old) });
        assert!(old.is_none_or(|words| words.iter().all(|word| *word == ticks - 1)), "somebody else has this memory");
        // SAFETY: a handler's own context, which is gone when it returns.
        let cx = unsafe { CpuCx::new(&MACHINE) };
        frames().alloc(&cx, Order::ZERO).map(|page| frames().free(&cx, page)).expect("a frame");
    }

    /// What a CPU does until both have had some ticks.
    fn work(cx: &mut Task) -> u64 {
        let (frames, clearer, mut rounds) = (frames(), Clearer::uncalibrated(), 0);
        while rounds < 200 || TICKS.iter().any(|ticks| ticks.load(Ordering::Relaxed) < 200) {
            let order = Order::new(rounds as u32 % 10).expect("up to 2 MiB");
            let block = frames.alloc(cx, order).expect("memory");
            let cleared = clearer.clear(cx, block.into_content(), &ClearRequest::bulk(order.bytes()), &Never);
            let zeroed = cleared.map_err(|stopped| stopped.reason).expect("nothing stops it");
            let (base, number) = (zeroed.extent().start().get(), rounds << 1 | u64::from(MACHINE.current().get()));
            for at in (0..order.bytes()).step_by(2048) {
                let word = with_exposed_provenance_mut::<u64>((base + at) as usize);
                // SAFETY: in the direct map, of a block that is this CPU's.
                assert_eq!(unsafe { word.read_volatile() }, 0, "the block is zero");
                // SAFETY: as above; what is stored goes again before the block counts as zero.
                unsafe { word.write_volatile(number) };
            }
            let numbers: Vec<u64> = (0..rounds % 700).map(|word| word ^ number).collect();
            assert!(numbers.iter().enumerate().all(|(word, found)| *found == word as u64 ^ number));
            for at in (0..order.bytes()).step_by(2048) {
                let word = with_exposed_provenance_mut::<u64>((base + at) as usize);
                // SAFETY: as above.
                assert_eq!(unsafe { word.read_volatile() }, number, "nobody else has the block");
            }
            frames.free_extent(cx, zeroed.into_dirty());
            rounds += 1;
        }
        rounds
    }

    /// What a CPU has goes back, when it is interrupted no more.
    fn give_back(cx: &Task) {
        machine::stop_interrupts();
        let kept = KEPT[MACHINE.current().get() as usize].swap(null_mut(), Ordering::Relaxed);
        // SAFETY: the last tick's box.
        drop((!kept.is_null()).then(|| unsafe { Box::from_raw(kept) }));
        HEAP.get().expect("installed").trim(cx);
        frames().drain(cx);
    }

    /// What the second CPU begins with.
    pub extern "C" fn second_cpu() -> ! {
        // SAFETY: once, first of all.
        let mut cx = unsafe { MACHINE.enter(CpuId::new(1)) }.expect("there is room for two");
        machine::start_interrupts();
        work(&mut cx);
        give_back(&cx);
        OTHER_IS_DONE.store(true, Ordering::Release);
        machine::halt()
    }

    /// What `boot` jumps to.
    pub extern "C" fn kernel_main() -> ! {
        // SAFETY: once, first of all; TPIDR_EL1 is nobody's.
        let mut cx = unsafe { MACHINE.enter(CpuId::new(0)) }.expect("there is room for two");
        // SAFETY: nobody uses this memory, and there is no manager.
        let ram = unsafe { Ram::assume_unmanaged(machine::ram()) };
        let frames = Frames::carve_in_place(&cx, [ram]).expect("enough memory");
        FRAMES.store(core::ptr::from_ref(frames).cast_mut(), Ordering::Release);
        let heap = Heap::new(frames, &cx, 2).expect("memory for a heap");
        // SAFETY: once; this task is all that runs.
        unsafe { HEAP.install(heap, &MACHINE) };
        let before = frames.available(&cx);
        machine::start_interrupts();
        machine::start_second_cpu();
        let rounds = work(&mut cx);
        while !OTHER_IS_DONE.load(Ordering::Acquire) {
            core::hint::spin_loop();
        }
        give_back(&cx);
        let (ticks, available) = (TICKS.each_ref().map(|ticks| ticks.load(Ordering::Relaxed)), frames.available(&cx));
        writeln!(Serial, "{rounds} rounds, {ticks:?} ticks, {available} of {before} frames free")
            .expect("it takes everything");
        assert_eq!(available, before, "frames were lost: {:?}", MACHINE.counted());
        writeln!(Serial, "el1: everything is back").expect("it takes everything");
        machine::off()
    }

    #[panic_handler]
    fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
        // Nothing can be done about a port that takes nothing.
        let _ = writeln!(Serial, "el1: {info}");
        machine::off()
    }
}
