//! The kernel: from the loader's jump to the exit code.
//!
//! Public modules are for programs; what is public in a private one is for the others here.
//!
//! | file | the rule it owns |
//! |---|---|
//! | `entry.rs` | the way to 64-bit mode, for the boot CPU and for the others |
//! | `layout.rs` | what is where in virtual memory |
//! | `tables.rs` | the kernel's half of all address spaces |
//! | `memory.rs` | frames and descriptors come up |
//! | `vmemmap.rs` | the descriptor area, as huge page pools give parts of it back |
//! | `vm.rs` | address spaces of `hugemm-vm` on this machine |
//! | `page_fault.rs` | who serves a CPU's page faults; accesses that may fail |
//! | `tlb.rs` | invalidating, interrupting, loading tables; shootdowns |
//! | `percpu.rs` | what each CPU has for itself, by GS |
//! | `segments.rs`, `traps.rs` | descriptor tables; what happens at an exception or an interrupt |
//! | `fault.rs` | the report when something is wrong |
//! | `apic.rs`, `clock.rs` | interrupts to other CPUs, timer, time |
//! | `irq_lock.rs` | locks that interrupts may share |
//! | `platform.rs` | `hugemm_base`'s platform, implemented |
//! | `once.rs` | values that are set while the boot CPU is alone |
//! | `smp.rs` | starting CPUs, running a function on several |
//! | `watchdog.rs` | nothing hangs |
//! | `serial.rs`, `console.rs`, `exit.rs` | words, whole lines of them, the end |

mod apic;
pub mod clock;
pub mod console;
mod entry;
mod exit;
mod fault;
pub mod irq_lock;
pub mod layout;
pub mod memory;
mod once;
pub mod page_fault;
pub mod percpu;
pub mod platform;
mod segments;
mod serial;
pub mod smp;
pub mod tables;
pub mod tlb;
mod traps;
pub mod vm;
pub mod vmemmap;
mod watchdog;

use crate::ExitCode;
use crate::cpus::CpuList;
use crate::memory_map::MemoryMap;
use crate::pvh::{self, StartInfo};
use hugemm_base::CpuCx;
use once::Once;
use platform::{KERNEL, Kernel};

/// Longest command line, in bytes.
const COMMAND_LINE: usize = 1024;

/// The boot CPU's context: what `main` gets.
pub type Cx<'a> = &'a mut CpuCx<'static, Kernel>;

/// What the loader and the firmware said of the machine.
#[derive(Clone, Copy, Debug)]
pub struct BootInfo {
    /// The image's command line.
    pub command_line: &'static str,
    /// CPUs that the machine has; more than run here if there are more than the image supports.
    pub cpus_present: u32,
    /// What the interrupt controller is: `x2apic` or `xapic`.
    pub apic: &'static str,
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

/// What the loader and the firmware said, kept across the change of stacks.
struct Found {
    map: MemoryMap,
    free: MemoryMap,
    cpus: CpuList,
    line: [u8; COMMAND_LINE],
    line_bytes: usize,
}

static FOUND: Once<Found> = Once::new();

/// First Rust code: on the boot stack and the boot page tables, which map the first 4 GiB one to one.
extern "C" fn kernel_main(start_info: u64) -> ! {
    serial::init();
    percpu::init(0, || {
        segments::load(0);
        traps::load();
    });
    let found = look(start_info);
    let mut free = found.free.clone();
    tables::build(&found.map, &mut free, found.cpus.apic_ids().len() as u32, found.cpus.apic_address);
    // SAFETY: alone until `smp::start`, and nobody has asked for it.
    unsafe { FOUND.set(Found { free, ..found }) };
    entry::continue_on(tables::root(), layout::stack_top(0), kernel_run)
}

/// Reads what the loader and the firmware left in memory.
fn look(start_info: u64) -> Found {
    // SAFETY: the loader says so; its blocks lie below 4 GiB, which are mapped one to one.
    let bytes = unsafe { core::slice::from_raw_parts(start_info as *const u8, pvh::START_INFO_BYTES) };
    let info = StartInfo::parse(bytes).unwrap_or_else(|error| panic!("{error}"));
    let map_bytes = info.memory_map_entries as usize * pvh::ENTRY_BYTES;
    // SAFETY: as above.
    let entries = unsafe { core::slice::from_raw_parts(info.memory_map as *const u8, map_bytes) };
    let map = MemoryMap::new(pvh::entries(entries)).unwrap_or_else(|error| panic!("{error}"));
    let mut free = map.clone();
    free.remove(layout::image()).unwrap_or_else(|error| panic!("{error}"));
    // SAFETY: the loader's root pointer, or a machine with a BIOS; tables are below 4 GiB and mapped one to one.
    let cpus = unsafe { CpuList::read(memory::OneToOne, info.rsdp) }.unwrap_or_else(|error| panic!("{error}"));
    let mut found =
        Found { map, free, cpus: cpus.from_boot_cpu(apic::boot_id()), line: [0; COMMAND_LINE], line_bytes: 0 };
    if info.command_line != 0 {
        // SAFETY: the loader's string ends with a zero byte.
        let line = unsafe { core::ffi::CStr::from_ptr(info.command_line as *const core::ffi::c_char) }.to_bytes();
        found.line_bytes = line.len().min(COMMAND_LINE);
        found.line[..found.line_bytes].copy_from_slice(&line[..found.line_bytes]);
    }
    found
}

/// The rest: on the kernel's own tables and stack.
extern "C" fn kernel_run() -> ! {
    let found = FOUND.get();
    apic::init();
    clock::init();
    let cpus = found.cpus.apic_ids().len() as u32;
    // SAFETY: the boot CPU's only task and its only context.
    let mut cx = unsafe { CpuCx::new(&KERNEL) };
    memory::init(&cx, &found.map, found.free.clone(), cpus);
    tlb::kernel_half().online(tlb::shootdown(), &cx);
    vmemmap::init(&cx, &found.map);
    apic::start_timer();
    smp::start(found.cpus.apic_ids());
    x86_64::instructions::interrupts::enable();
    let command_line = core::str::from_utf8(&found.line[..found.line_bytes]).unwrap_or("");
    let boot = BootInfo { command_line, cpus_present: found.cpus.present, apic: apic::kind() };
    exit::now(hugemm_kernel_main(&mut cx, &boot))
}
