//! The kernel: from the loader's jump to the exit code.
//!
//! Public modules are for programs; what is public in a private one is for the others here.
//!
//! | file | the rule it owns |
//! |---|---|
//! | `arch` | what differs between architectures: a folder for each, below |
//! | `machine.rs` | what the loader and the firmware say of the machine |
//! | `layout.rs` | what is where in virtual memory |
//! | `tables.rs` | the kernel's half of all address spaces |
//! | `memory.rs` | frames and descriptors come up |
//! | `heap.rs` | the program's global allocator |
//! | `vmemmap.rs` | the descriptor area, as huge page pools give parts of it back |
//! | `kva.rs` | areas of `hugemm-kva` on this machine: other CPUs' data and stacks |
//! | `stack.rs` | where stacks are, and what of them was used |
//! | `vm.rs` | address spaces of `hugemm-vm` on this machine |
//! | `page_fault.rs` | who serves a CPU's page faults; accesses that may fail |
//! | `tlb.rs` | shootdowns |
//! | `percpu.rs` | what each CPU has for itself |
//! | `fault.rs` | the report when something is wrong |
//! | `clock.rs` | time |
//! | `irq_lock.rs` | locks that interrupts may share; none is held at a reschedule point |
//! | `platform.rs` | `hugemm_base`'s platform, implemented |
//! | `smp.rs` | starting CPUs, running a function on several |
//! | `watchdog.rs` | nothing hangs |
//! | `console.rs` | whole lines of words |
//!
//! What `arch` is asked for, on either side of the line by the same names:
//!
//! | module | what |
//! |---|---|
//! | `Format` | page table entries |
//! | `entry` | the way from the loader to [`boot_main`] and from a started CPU to `smp::ap_main`; `continue_on` other tables and another stack |
//! | `firmware` | `look`: what the loader and the firmware say |
//! | `interrupts` | on, off, waiting |
//! | `percpu` | the calling CPU's number and data; `Own`: what the hardware needs of each CPU |
//! | `traps` | `load`: what happens at an exception or an interrupt; `Frame`: where it was |
//! | `controller` | interrupts to other CPUs, among them one that cannot be kept off; starting CPUs; the timer |
//! | `counter` | time |
//! | `mmu` | control bits, what may be changed in place, loading tables, invalidating here and everywhere, what a conflict of translations does |
//! | `serial`, `exit` | words, the end |

#[cfg_attr(target_arch = "aarch64", path = "kernel/aarch64/mod.rs")]
#[cfg_attr(target_arch = "x86_64", path = "kernel/x86_64/mod.rs")]
pub mod arch;
pub mod clock;
pub mod console;
mod fault;
pub mod heap;
pub mod irq_lock;
pub mod kva;
pub mod layout;
mod machine;
pub mod memory;
pub mod page_fault;
pub mod percpu;
pub mod platform;
pub mod smp;
pub mod stack;
pub mod tables;
pub mod tlb;
pub mod vm;
pub mod vmemmap;
mod watchdog;

use crate::ExitCode;
use arch::{controller, entry, exit, firmware, interrupts, serial, traps};
use core::sync::atomic::Ordering;
use hugemm_base::CpuCx;
use machine::Machine;
use platform::{KERNEL, Kernel};
use spin::Once;

/// The boot CPU's context: what `main` gets.
pub type Cx<'a> = &'a mut CpuCx<'static, Kernel>;

/// What the loader and the firmware said of the machine.
#[derive(Clone, Copy, Debug)]
pub struct BootInfo {
    /// The image's command line.
    pub command_line: &'static str,
    /// CPUs that the machine has; more than run here if there are more than the image supports.
    pub cpus_present: u32,
    /// What the interrupt controller is.
    pub interrupt_controller: &'static str,
}

/// Says which function the kernel calls once all CPUs run: a [`Cx`] and a [`BootInfo`] go in, an [`ExitCode`] comes out and
/// ends the machine. Once per program.
#[macro_export]
macro_rules! main {
    ($main:path) => {
        // SAFETY: the only definition of this name, of the type that `hugemm_kernel` declares it with.
        #[unsafe(no_mangle)]
        fn hugemm_kernel_main(cx: $crate::Cx<'_>, boot: &$crate::BootInfo) -> $crate::ExitCode {
            $main(cx, boot)
        }
    };
}

unsafe extern "Rust" {
    /// Defined by [`main!`](crate::main), with this type.
    safe fn hugemm_kernel_main(cx: Cx<'_>, boot: &BootInfo) -> ExitCode;
}

/// What the boot CPU has set up while it was alone. Before that, a panic: the order of starting up is wrong.
fn set_up<T>(once: &Once<T>) -> &T {
    once.get().unwrap_or_else(|| panic!("used before it was set up"))
}

/// The machine, kept across the change of stacks.
static MACHINE: Once<Machine> = Once::new();

/// First Rust code: on the boot stack and the boot page tables. `info` is what the loader left in a register.
extern "C" fn boot_main(info: u64) -> ! {
    serial::init();
    percpu::init(0, traps::load);
    let mut machine = firmware::look(info);
    machine.free.remove(layout::image()).unwrap_or_else(|error| panic!("{error}"));
    tables::build(&mut machine);
    MACHINE.call_once(|| machine);
    let [_, top] = layout::BOOT_STACK;
    percpu::own().stack_top.store(top, Ordering::Relaxed);
    entry::continue_on(tables::root(), top, kernel_run)
}

/// The rest: on the kernel's own tables and stack.
extern "C" fn kernel_run() -> ! {
    let machine = set_up(&MACHINE);
    controller::init();
    clock::init();
    let ids = machine.hardware_ids();
    // SAFETY: the boot CPU's only task and its only context.
    let mut cx = unsafe { CpuCx::new(&KERNEL) };
    memory::init(&cx, &machine.map, machine.free.clone(), ids.len() as u32);
    heap::init(&cx, ids.len() as u32);
    tlb::kernel_half().online(tlb::shootdown(), &cx);
    vmemmap::init(&cx, &machine.map);
    controller::start_timer();
    kva::init(&cx);
    smp::start(&mut cx, ids);
    interrupts::enable();
    let (command_line, interrupt_controller) = (machine.line(), controller::kind());
    let boot = BootInfo { command_line, cpus_present: machine.present, interrupt_controller };
    exit::now(hugemm_kernel_main(&mut cx, &boot))
}
