//! What a PVH loader and ACPI say of the machine.

use super::super::layout;
use super::super::machine::Machine;
use super::controller;
use crate::cpus::CpuList;
use crate::memory_map::MemoryMap;
use crate::pvh::{self, StartInfo};
use acpi::{AcpiHandler, PhysicalMapping};
use core::ptr::NonNull;
use hugemm_base::{Extent, PAGE_BYTES, Pfn};

/// ACPI's tables through the boot tables, which map the first 4 GiB one to one.
#[derive(Clone, Copy)]
struct OneToOne;

impl AcpiHandler for OneToOne {
    unsafe fn map_physical_region<T>(&self, at: usize, size: usize) -> PhysicalMapping<Self, T> {
        let Some(start) = NonNull::new(at as *mut T) else { panic!("ACPI names address 0") };
        // SAFETY: mapped one to one, by this type's users' choice of the boot tables.
        unsafe { PhysicalMapping::new(at, start, size, size, OneToOne) }
    }

    fn unmap_physical_region<T>(_region: &PhysicalMapping<Self, T>) {}
}

/// Reads what the loader and the firmware left in memory. On the boot tables.
pub(crate) fn look(start_info: u64) -> Machine {
    // SAFETY: the loader says so; its blocks lie below 4 GiB, which are mapped one to one.
    let bytes = unsafe { core::slice::from_raw_parts(start_info as *const u8, pvh::START_INFO_BYTES) };
    let info = StartInfo::parse(bytes).unwrap_or_else(|error| panic!("{error}"));
    let map_bytes = info.memory_map_entries as usize * pvh::ENTRY_BYTES;
    // SAFETY: as above.
    let entries = unsafe { core::slice::from_raw_parts(info.memory_map as *const u8, map_bytes) };
    let map = MemoryMap::new(pvh::entries(entries)).unwrap_or_else(|error| panic!("{error}"));
    // SAFETY: the loader's root pointer, or a machine with a BIOS; tables are below 4 GiB and mapped one to one.
    let cpus = unsafe { CpuList::read(OneToOne, info.rsdp) };
    let cpus = cpus.unwrap_or_else(|error| panic!("ACPI does not say which CPUs there are ({error:?})"));
    let cpus = cpus.from_boot_cpu(controller::boot_id());
    let mut machine = Machine::new(map, cpus.apic_ids().iter().map(|id| u64::from(*id)), cpus.present);
    let registers = Extent::new(Pfn::new(cpus.apic_address / PAGE_BYTES), 1).unwrap_or_default();
    machine.devices[0] = (layout::DEVICES, registers);
    if info.command_line != 0 {
        // SAFETY: the loader's string ends with a zero byte.
        let line = unsafe { core::ffi::CStr::from_ptr(info.command_line as *const core::ffi::c_char) };
        machine.keep_line(line.to_bytes());
    }
    machine
}
