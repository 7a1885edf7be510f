//! Segments and task states: one code and one data segment, and stacks for what must not use the running one.

use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use x86_64::VirtAddr;
use x86_64::instructions::segmentation::{CS, DS, ES, SS, Segment};
use x86_64::instructions::tables::load_tss;
use x86_64::structures::gdt::{Descriptor, GlobalDescriptorTable};
use x86_64::structures::tss::TaskStateSegment;

/// Bytes of a stack for one kind of emergency.
const STACK: usize = 16 << 10;

/// Emergencies that have stacks of their own: index in the task state, and in the gates one more.
pub(super) const NMI: u16 = 0;
/// A double fault: mostly a stack that ran over.
pub(super) const DOUBLE_FAULT: u16 = 1;
/// A machine check.
pub(super) const MACHINE_CHECK: u16 = 2;

#[repr(C, align(16))]
struct Stack([u8; STACK]);

/// One CPU's tables.
struct Tables {
    gdt: GlobalDescriptorTable,
    tss: TaskStateSegment,
}

/// What the hardware needs of each CPU: emergency stacks, and tables that [`load`] makes.
#[repr(C, align(128))]
pub(crate) struct Own {
    stacks: UnsafeCell<[Stack; 3]>,
    tables: UnsafeCell<MaybeUninit<Tables>>,
}

// SAFETY: each CPU fills its own tables once, in `load`; afterwards only the hardware reads them. It alone writes to the stacks.
unsafe impl Sync for Own {}

impl Own {
    /// All zero.
    pub(crate) const fn new() -> Self {
        Own {
            stacks: UnsafeCell::new([const { Stack([0; STACK]) }; 3]),
            tables: UnsafeCell::new(MaybeUninit::zeroed()),
        }
    }
}

/// Loads the calling CPU's tables. Once per CPU.
pub(super) fn load(own: &'static Own) {
    // SAFETY: see `Own`: this is the CPU's only call.
    let tables: &'static mut MaybeUninit<Tables> = unsafe { &mut *own.tables.get() };
    let tables = tables.write(Tables { gdt: GlobalDescriptorTable::empty(), tss: TaskStateSegment::new() });
    let stacks = VirtAddr::from_ptr(own.stacks.get());
    for index in [NMI, DOUBLE_FAULT, MACHINE_CHECK] {
        tables.tss.interrupt_stack_table[usize::from(index)] = stacks + (u64::from(index) + 1) * STACK as u64;
    }
    let code = tables.gdt.append(Descriptor::kernel_code_segment());
    let data = tables.gdt.append(Descriptor::kernel_data_segment());
    // SAFETY: the task state stays where it is and is not written again.
    let task = tables.gdt.append(unsafe { Descriptor::tss_segment_unchecked(&raw const tables.tss) });
    // SAFETY: the table stays, and its descriptors are those of a 64-bit kernel. Reloading DS and ES leaves GS alone,
    // whose base `percpu::init` has set or will set.
    unsafe {
        tables.gdt.load_unsafe();
        CS::set_reg(code);
        SS::set_reg(data);
        DS::set_reg(data);
        ES::set_reg(data);
        load_tss(task);
    }
}
