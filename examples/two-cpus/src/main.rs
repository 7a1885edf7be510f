//! A kernel with two CPUs, from its first page to `fork`: `examples/two-cpus/run.sh` boots it.
//!
//! Both CPUs take page faults in one address space, change each other's translations, and are interrupted by timers whose handler
//! allocates. One forks. Everything of hugemm that it needs is in this file; what every PC needs is in `machine.rs`, and in the ring-0
//! example's `boot.rs`.
#![cfg_attr(target_os = "none", no_std, no_main)]
#![allow(unreachable_pub, reason = "in a binary, `pub` says what a module offers to the others")]

#[cfg(not(all(target_os = "none", target_arch = "x86_64")))]
fn main() -> std::process::ExitCode {
    eprintln!("hugemm-example-two-cpus: this is a kernel for bare x86-64; boot it with: examples/two-cpus/run.sh");
    std::process::ExitCode::FAILURE
}

#[cfg(all(target_os = "none", target_arch = "x86_64"))]
extern crate alloc;

#[cfg(all(target_os = "none", target_arch = "x86_64"))]
#[path = "../../ring0/src/boot.rs"]
mod boot;

#[cfg(all(target_os = "none", target_arch = "x86_64"))]
mod machine;

#[cfg(all(target_os = "none", target_arch = "x86_64"))]
mod kernel {
    use crate::boot::{FIRST_4_GIB, Serial, exit, ram};
    use crate::machine::{self, REGISTERS, SHOOTDOWN};
    use alloc::boxed::Box;
    use core::fmt::Write;
    use core::ptr::null_mut;
    use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
    use hugemm::prelude::*;
    use hugemm::vm::AddressSpace;

    type Machine = BareMetal<2>;
    type Types = DefaultSetup<Machine, BareMetalTlbs>;
    type Task = CpuCx<'static, Machine>;

    /// What is mapped one to one: everything below the registers of a PC's devices.
    const RAM: Extent = FIRST_4_GIB.split_at((4 << 18) - (32 << 8)).0;

    // SAFETY: the boot tables map it, and `Kernel::tables` after them. There is one task on each CPU, in ring 0, and it stays there.
    static MACHINE: Machine = unsafe { BareMetal::new(DirectMap::new(RAM, 0)) };

    #[global_allocator]
    static HEAP: GlobalHeap<Machine, Carved> = GlobalHeap::new();

    /// The kernel, when there is one.
    static KERNEL: AtomicPtr<Kernel> = AtomicPtr::new(null_mut());

    /// What the CPUs have for themselves.
    static CPUS: [PerCpu; 2] = [const { PerCpu::new() }; 2];

    /// What shootdowns know of their TLBs, and requests.
    static TLB_CPUS: [TlbCpu; 2] = [const { TlbCpu::new() }; 2];
    static INBOXES: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

    struct PerCpu {
        /// The space that is loaded: whose page faults are served.
        space: AtomicPtr<AddressSpace<Types>>,
        /// How often the timer has interrupted it.
        ticks: AtomicU64,
        /// What the last timer interrupt has allocated.
        kept: AtomicPtr<[u64; 32]>,
    }

    impl PerCpu {
        const fn new() -> Self {
            PerCpu { space: AtomicPtr::new(null_mut()), ticks: AtomicU64::new(0), kept: AtomicPtr::new(null_mut()) }
        }
    }

    fn own() -> &'static PerCpu {
        &CPUS[MACHINE.current().get() as usize]
    }

    /// What runs once the boot CPU has made it.
    struct Kernel {
        frames: &'static Frames<'static, Carved>,
        shootdown: &'static TlbShootdown<'static, BareMetalTlbs>,
        vm: Vm<'static, Types>,
    }

    fn kernel() -> &'static Kernel {
        // SAFETY: set before anything asks, and there for good. Acquire pairs with `kernel_main`'s Release.
        unsafe { KERNEL.load(Ordering::Acquire).as_ref() }.expect("there is a kernel")
    }

    /// The addresses that the kernel has for itself, in every space: the lowest 512 GiB.
    fn kernel_range() -> VirtRange {
        VirtRange::new(VirtAddr::new(0), 1 << 39).expect("a range")
    }

    /// The rest of the lower half.
    fn user_range() -> VirtRange {
        VirtRange::new(VirtAddr::new(1 << 39), (1 << 47) - (1 << 39)).expect("a range")
    }

    impl Kernel {
        /// The kernel's tables: memory one to one, as the boot tables have it, and the interrupt controller.
        fn tables(cx: &Task, frames: &Frames<'static, Carved>) -> &'static PageTable<X86_64> {
            const ALL: Flags = Flags::WRITE.with(Flags::EXEC).with(Flags::GLOBAL).with(Flags::HARDWARE);
            // SAFETY: the platform's direct map has all frames.
            let mut memory = unsafe { FrameTables::new(frames, cx) };
            // SAFETY: nothing of it is ever taken away.
            let table = unsafe { PageTable::with_fixed_top(&mut memory, kernel_range()) }.expect("memory for tables");
            let registers = Extent::from_bytes(REGISTERS, 4096).expect("a page");
            for (extent, flags) in [(RAM, ALL), (registers, ALL | Flags::UNCACHED)] {
                let span = VirtRange::new(VirtAddr::new(extent.start().get()), extent.bytes()).expect("whole pages");
                let how = Mapping { flags, largest: PageSize::Size2M };
                table.shared(&mut memory).map(span, [extent], how).expect("nothing is there");
            }
            Box::leak(Box::new(table))
        }
    }

    /// The page fault handler.
    pub extern "C" fn page_fault(at: u64, error: u64, interrupts_were_on: bool) {
        // SAFETY: the CPU's own task has loaded it, and waits.
        let space = unsafe { own().space.load(Ordering::Relaxed).as_ref() };
        if interrupts_were_on {
            x86_64::instructions::interrupts::enable();
        }
        // SAFETY: the interrupted task waits; there are no vector registers.
        let served = space.zip(unsafe { CpuCx::of_fault(&MACHINE) });
        let (at, served) = (VirtAddr::new(at), served.zip(FaultAccess::from_x86_error(error)));
        let served =
            served.is_some_and(|((space, mut cx), tried)| kernel().vm.fault(&mut cx, space, at, tried).is_ok());
        x86_64::instructions::interrupts::disable();
        assert!(served, "page fault at {at:?}, error code {error}");
    }

    /// The timer's handler: it allocates, from the heap and a frame, whatever it has interrupted.
    pub extern "C" fn timer() {
        machine::end_of_interrupt();
        let own = own();
        let ticks = own.ticks.fetch_add(1, Ordering::Relaxed);
        let new = Box::into_raw(Box::new([ticks; 32]));
        let old = own.kept.swap(new, Ordering::Relaxed);
        // SAFETY: a box of an earlier tick.
        let old = (!old.is_null()).then(|| unsafe { Box::from_raw(old) });
        assert!(old.is_none_or(|words| words.iter().all(|word| *word == ticks - 1)), "somebody else has this memory");
        // SAFETY: a handler's own context, which is gone when it returns.
        let cx = unsafe { CpuCx::new(&MACHINE) };
        let frames = kernel().frames;
        frames.alloc(&cx, Order::ZERO).map(|page| frames.free(&cx, page)).expect("a frame");
    }

    /// The handler of other CPUs' requests.
    pub extern "C" fn shootdown() {
        machine::end_of_interrupt();
        // SAFETY: as in `timer`.
        kernel().shootdown.handle_ipi(&unsafe { CpuCx::new(&MACHINE) });
    }

    /// Runs `f` with a space loaded.
    fn with<R>(cx: &mut Task, space: &AddressSpaceRef<'_, Types>, f: impl FnOnce(&mut Task) -> R) -> R {
        space.tlb().switch_in(kernel().shootdown, cx);
        let before = own().space.swap((&raw const **space).cast_mut(), Ordering::Relaxed);
        let result = f(cx);
        own().space.store(before, Ordering::Relaxed);
        space.tlb().switch_out(kernel().shootdown, cx);
        result
    }

    /// Every word of a range that is looked at.
    fn words(range: VirtRange) -> impl Iterator<Item = *mut u64> {
        (0..range.pages())
            .map(move |page| core::ptr::with_exposed_provenance_mut((range.start().get() + page * 4096) as usize))
    }

    /// Stores numbers from `first` on, or finds them there.
    fn store(range: VirtRange, first: u64) {
        // SAFETY: the loaded space's, which nobody else uses.
        words(range).zip(first..).for_each(|(at, word)| unsafe { at.write_volatile(word) });
    }

    fn check(range: VirtRange, mut expected: impl FnMut(u64) -> u64) {
        for (page, at) in words(range).enumerate() {
            // SAFETY: as above.
            let found = unsafe { at.read_volatile() };
            assert_eq!(found, expected(page as u64), "page {page} of {range:?}");
        }
    }

    /// What a CPU does in a space that both have loaded, until both have had some ticks.
    fn work(cx: &mut Task, space: &AddressSpaceRef<'_, Types>) -> u64 {
        let (vm, cpu) = (&kernel().vm, u64::from(MACHINE.current().get()));
        // 64 pages for each CPU, in one area's reach: they share a page table.
        let range = VirtRange::new(user_range().start().checked_add(cpu << 18).expect("in range"), 64 << 12)
            .expect("whole pages");
        let mut rounds = 0;
        while rounds < 100 || CPUS.iter().any(|cpu| cpu.ticks.load(Ordering::Relaxed) < 20) {
            vm.map(cx, space, range, VmaKind::private(PageSize::Size4K), Backing::Private).expect("nothing is there");
            check(range, |_| 0); // by page faults
            store(range, rounds << 32);
            if cpu == 0 && rounds % 4 == 0 {
                let child = vm.fork(cx, space).expect("memory");
                with(cx, &child, |_| {
                    check(range, |page| rounds << 32 | page);
                    store(range, u64::MAX >> 1);
                });
                space.tlb().switch_in(kernel().shootdown, cx);
                vm.destroy(cx, child).map_err(|(error, _)| error).expect("nobody has it");
            }
            check(range, |page| rounds << 32 | page);
            vm.unmap(cx, space, range).expect("it is mapped"); // by a shootdown of the other CPU
            rounds += 1;
        }
        rounds
    }

    static SPACE: AtomicPtr<AddressSpaceRef<'static, Types>> = AtomicPtr::new(null_mut());
    static OTHER_IS_DONE: AtomicBool = AtomicBool::new(false);

    /// What the second CPU begins with.
    pub extern "C" fn second_cpu() -> ! {
        // SAFETY: once, first of all.
        let mut cx = unsafe { MACHINE.enter(CpuId::new(1)) }.expect("there is room for two");
        machine::start_interrupts();
        // SAFETY: the boot CPU keeps it until this one is done.
        let space = unsafe { SPACE.load(Ordering::Acquire).as_ref() }.expect("it was made before");
        with(&mut cx, space, |cx| work(cx, space));
        machine::stop_timer();
        kernel().frames.serve(&cx);
        OTHER_IS_DONE.store(true, Ordering::Release);
        machine::halt()
    }

    /// What `boot` jumps to, with the physical address of the loader's start info.
    pub extern "C" fn kernel_main(start_info: u64) -> ! {
        let mut serial = Serial::new().expect("a PC has a serial port");
        // SAFETY: once, first of all; GS is nobody's.
        let mut cx = unsafe { MACHINE.enter(CpuId::new(0)) }.expect("there is room for two");
        // SAFETY: what the loader gave, once; nobody uses this memory, and there is no manager.
        let ram = unsafe { ram(start_info) }.map(|piece| unsafe { Ram::assume_unmanaged(piece) });
        let frames = Frames::carve_in_place(&cx, ram).expect("enough memory");
        let heap = Heap::new(frames, &cx, 2).expect("memory for a heap");
        // SAFETY: once; this task is all that runs.
        unsafe { HEAP.install(heap, &MACHINE) };

        let tables = Kernel::tables(&cx, frames);
        // SAFETY: every space is made beside them; `start_interrupts` sets CR4.PGE, and the gate of `SHOOTDOWN` leads to `shootdown`.
        let tlbs = unsafe { BareMetalTlbs::new(tables.root().start(), |cpu| machine::interrupt(cpu.get(), SHOOTDOWN)) };
        // SAFETY: interrupts are off until `start_interrupts`.
        unsafe { tlbs.unload(CpuId::new(0)) };
        // SAFETY: as many CPUs as the machine has, their TLBs, and words that are nobody else's.
        let shootdown = unsafe { TlbShootdown::new(&TLB_CPUS, &INBOXES, tlbs) }.expect("two CPUs");
        let shootdown: &'static _ = Box::leak(Box::new(shootdown));
        // SAFETY: the direct map has all frames; one platform, whose TLBs these are; the clearer uses no vector registers.
        let vm = unsafe { Vm::new(Parts::new(frames, shootdown, Clearer::uncalibrated())) }.expect("objects fit");
        // SAFETY: the tables are in frames of the manager; nothing changes there any more.
        let vm = unsafe { vm.beside(tables) };
        KERNEL.store(Box::leak(Box::new(Kernel { frames, shootdown, vm })), Ordering::Release);
        let vm = &kernel().vm;
        machine::start_interrupts();

        let mut before = 0;
        for turn in 0..2 {
            let mut space = vm.create(&mut cx, user_range()).expect("memory");
            SPACE.store(&raw mut space, Ordering::Release);
            if turn == 0 {
                machine::start_second_cpu();
            }
            let rounds = with(&mut cx, &space, |cx| work(cx, &space));
            while !OTHER_IS_DONE.load(Ordering::Acquire) {
                core::hint::spin_loop();
            }
            vm.destroy(&mut cx, space).map_err(|(error, _)| error).expect("nobody has it");
            vm.trim(&cx);
            HEAP.get().expect("installed").trim(&cx);
            frames.drain(&cx);
            let (ticks, counted) = (CPUS.each_ref().map(|cpu| cpu.ticks.load(Ordering::Relaxed)), MACHINE.counted());
            let available = frames.stats(&cx).available();
            writeln!(
                serial,
                "{rounds} rounds, {ticks:?} ticks, {} flushes, {available} frames free",
                shootdown.counts().flushes()
            )
            .expect("the serial port takes everything");
            assert!(turn == 0 || available == before, "frames were lost: there were {before}, {counted:?}");
            before = available;
        }
        writeln!(serial, "two-cpus: everything is back").expect("the serial port takes everything");
        exit(true)
    }

    #[panic_handler]
    fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
        if let Some(mut serial) = Serial::new() {
            // Nothing can be done about a port that takes nothing.
            let _ = writeln!(serial, "two-cpus: {info}");
        }
        exit(false)
    }
}

#[cfg(all(target_os = "none", target_arch = "x86_64"))]
use kernel::kernel_main;
