//! The kernel: from the loader's jump to the exit code.
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
//! | `space.rs` | a bare page table whose pages come when they are touched |
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
//! | `serial.rs`, `output.rs`, `exit.rs` | words, results, the end |
//! | `commands/` | what can be run |

mod apic;
mod clock;
mod commands;
mod entry;
mod exit;
mod fault;
mod irq_lock;
mod layout;
mod memory;
mod once;
mod output;
mod page_fault;
mod percpu;
mod platform;
mod segments;
mod serial;
mod smp;
mod space;
mod tables;
mod tlb;
mod traps;
mod vm;
mod vmemmap;
mod watchdog;

use hugemm_base::CpuCx;
use hugemm_kernel::cpus::CpuList;
use hugemm_kernel::memory_map::MemoryMap;
use hugemm_kernel::pvh::{self, StartInfo};
use hugemm_kernel::request::Request;
use once::Once;
use platform::KERNEL;

/// Longest command line, in bytes.
const COMMAND_LINE: usize = 1024;

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
    tlb::kernel_half().online(tlb::tlbs(), &cx);
    vmemmap::init(&cx, &found.map);
    apic::start_timer();
    smp::start(found.cpus.apic_ids());
    x86_64::instructions::interrupts::enable();
    output::boot(found.cpus.present);
    let line = core::str::from_utf8(&found.line[..found.line_bytes]).unwrap_or("");
    let result = match line.parse::<Request>() {
        Ok(request) => commands::run(&mut cx, &request),
        Err(error) => Err(commands::Failure::Request(error)),
    };
    match result {
        Ok(()) => {
            output::line("done", &[]);
            exit::now(exit::Code::Done)
        }
        Err(failure) => {
            output::line("failed", &[("text", (&failure).into())]);
            exit::now(exit::Code::Failed)
        }
    }
}
