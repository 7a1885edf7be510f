//! Segments and task states: one code and one data segment, and stacks for what must not use the running one.

use super::super::percpu;
use crate::MAX_CPUS;
use core::cell::UnsafeCell;
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

struct Slot(UnsafeCell<Tables>);

// SAFETY: each CPU fills its own slot once, in `load`; afterwards only the hardware reads it.
unsafe impl Sync for Slot {}

static SLOTS: [Slot; MAX_CPUS as usize] =
    [const { Slot(UnsafeCell::new(Tables { gdt: GlobalDescriptorTable::empty(), tss: TaskStateSegment::new() })) };
        MAX_CPUS as usize];

/// Emergency stacks, apart from the tables, so that they take no room in the image's file.
struct Stacks(UnsafeCell<[[Stack; 3]; MAX_CPUS as usize]>);

// SAFETY: only the hardware writes here, each CPU to its own.
unsafe impl Sync for Stacks {}

static STACKS: Stacks = Stacks(UnsafeCell::new([const { [const { Stack([0; STACK]) }; 3] }; MAX_CPUS as usize]));

/// Loads the calling CPU's tables. Once per CPU.
pub(super) fn load(cpu: u32) {
    // SAFETY: see `Slot`: this is the CPU's only call.
    let tables: &'static mut Tables = unsafe { &mut *SLOTS[cpu as usize].0.get() };
    let stacks = VirtAddr::from_ptr(STACKS.0.get().cast::<[Stack; 3]>().wrapping_add(cpu as usize));
    for index in [NMI, DOUBLE_FAULT, MACHINE_CHECK] {
        tables.tss.interrupt_stack_table[usize::from(index)] = stacks + (u64::from(index) + 1) * STACK as u64;
    }
    let code = tables.gdt.append(Descriptor::kernel_code_segment());
    let data = tables.gdt.append(Descriptor::kernel_data_segment());
    // SAFETY: the task state is in the same static slot and is not written again.
    let task = tables.gdt.append(unsafe { Descriptor::tss_segment_unchecked(&raw const tables.tss) });
    // SAFETY: the table is static and its descriptors are those of a 64-bit kernel. Reloading DS and ES leaves GS alone,
    // whose base `percpu::init` has set or will set.
    unsafe {
        tables.gdt.load_unsafe();
        CS::set_reg(code);
        SS::set_reg(data);
        DS::set_reg(data);
        ES::set_reg(data);
        load_tss(task);
    }
    debug_assert_eq!(percpu::current(), cpu);
}
