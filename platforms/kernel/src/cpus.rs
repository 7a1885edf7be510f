//! Which CPUs there are, from ACPI's interrupt controller table.

use crate::MAX_CPUS;
use acpi::madt::{Madt, MadtEntry};
use acpi::{AcpiError, AcpiHandler, AcpiTables};

/// Bit 0 of an entry's flags: the CPU is enabled. Others may only become so by being plugged in.
const ENABLED: u32 = 1;

/// Enabled CPUs by the number of their interrupt controller, in the table's order, at most [`MAX_CPUS`].
#[derive(Clone, Copy, Debug)]
pub struct CpuList {
    apic_ids: [u32; MAX_CPUS as usize],
    count: usize,
    /// How many the table names.
    pub present: u32,
    /// Physical address of the interrupt controller's registers.
    pub apic_address: u64,
}

impl CpuList {
    /// Reads the table; `rsdp` is where the root pointer is, or 0 to scan the BIOS's areas for it.
    ///
    /// # Safety
    ///
    /// `rsdp` is the physical address of ACPI's root pointer, or 0 on a machine with a BIOS's memory layout; the handler
    /// maps what it is asked for.
    pub unsafe fn read<H: AcpiHandler>(handler: H, rsdp: u64) -> Result<Self, AcpiError> {
        // SAFETY: the caller's promise, passed on.
        let tables = unsafe {
            match usize::try_from(rsdp) {
                Ok(at) if at != 0 => AcpiTables::from_rsdp(handler, at),
                _ => AcpiTables::search_for_rsdp_bios(handler),
            }
        };
        let madt = tables?.find_table::<Madt>()?;
        let madt = madt.get();
        let mut list = CpuList {
            apic_ids: [0; MAX_CPUS as usize],
            count: 0,
            present: 0,
            apic_address: u64::from(madt.local_apic_address),
        };
        for entry in madt.entries() {
            match entry {
                MadtEntry::LocalApic(cpu) if cpu.flags & ENABLED != 0 => list.add(u32::from(cpu.apic_id)),
                MadtEntry::LocalX2Apic(cpu) if cpu.flags & ENABLED != 0 => list.add(cpu.x2apic_id),
                MadtEntry::LocalApicAddressOverride(over) => list.apic_address = over.local_apic_address,
                _ => {}
            }
        }
        Ok(list)
    }

    fn add(&mut self, apic_id: u32) {
        self.present += 1;
        if let Some(place) = self.apic_ids.get_mut(self.count) {
            *place = apic_id;
            self.count += 1;
        }
    }

    /// The CPUs, the one whose controller has the number `boot` first.
    pub fn from_boot_cpu(mut self, boot: u32) -> Self {
        if let Some(at) = self.apic_ids().iter().position(|id| *id == boot) {
            self.apic_ids[..=at].rotate_right(1);
        }
        self
    }

    /// Numbers of the interrupt controllers.
    pub fn apic_ids(&self) -> &[u32] {
        &self.apic_ids[..self.count]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use acpi::PhysicalMapping;
    use core::ptr::NonNull;

    /// Physical memory that is a test's own: address 0 is its first byte.
    #[derive(Clone)]
    struct Memory<'a>(&'a [u8]);

    impl AcpiHandler for Memory<'_> {
        unsafe fn map_physical_region<T>(&self, at: usize, size: usize) -> PhysicalMapping<Self, T> {
            assert!(at + size <= self.0.len(), "read past the tables: {at:#x}, {size}");
            let start = NonNull::new(self.0[at..].as_ptr().cast_mut().cast()).expect("not null");
            // SAFETY: within the memory, which outlives the mapping.
            unsafe { PhysicalMapping::new(at, start, size, size, self.clone()) }
        }

        fn unmap_physical_region<T>(_region: &PhysicalMapping<Self, T>) {}
    }

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_sub(*byte))
    }

    fn table(signature: &[u8; 4], body: &[u8]) -> Vec<u8> {
        let mut bytes = signature.to_vec();
        bytes.extend(((36 + body.len()) as u32).to_le_bytes());
        bytes.extend([1, 0]);
        bytes.extend(b"HUGEMMHUGEMM  ");
        bytes.extend([0; 12]);
        bytes.extend(body);
        bytes[9] = sum(&bytes);
        bytes
    }

    /// A root pointer at `at`, a root table behind it, a table of CPUs behind that.
    fn tables(at: usize, entries: &[u8]) -> Vec<u8> {
        let (root, cpus) = (at + 64, at + 256);
        let mut memory = vec![0; at];
        let mut pointer = b"RSD PTR \0HUGEMM\0".to_vec();
        pointer.extend((root as u32).to_le_bytes());
        pointer[8] = sum(&pointer);
        memory.extend(pointer);
        memory.resize(root, 0);
        memory.extend(table(b"RSDT", &(cpus as u32).to_le_bytes()));
        memory.resize(cpus, 0);
        let mut body = 0xfee0_0000_u32.to_le_bytes().to_vec();
        body.extend([0; 4]);
        body.extend(entries);
        memory.extend(table(b"APIC", &body));
        memory.resize(memory.len() + 64, 0);
        memory.resize(memory.len().max(0x11_0000), 0);
        memory
    }

    fn local(id: u8, flags: u32) -> Vec<u8> {
        let mut entry = vec![0, 8, id, id];
        entry.extend(flags.to_le_bytes());
        entry
    }

    fn read(memory: &[u8], rsdp: u64) -> Result<CpuList, AcpiError> {
        // SAFETY: the handler checks every access against the test's memory.
        unsafe { CpuList::read(Memory(memory), rsdp) }
    }

    #[test]
    fn enabled_cpus_are_listed_and_the_boot_cpu_comes_first() {
        let mut entries = [local(0, 1), local(1, 0), local(2, 1), local(3, 1)].concat();
        entries.extend([9, 16, 0, 0]);
        entries.extend([0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        entries.extend([5, 12, 0, 0]);
        entries.extend(0xfe00_0000_u64.to_le_bytes());
        let list = read(&tables(0x1000, &entries), 0x1000).expect("valid").from_boot_cpu(2);
        assert_eq!(list.apic_ids(), [2, 0, 3, 0x100]);
        assert_eq!((list.present, list.apic_address), (4, 0xfe00_0000));
    }

    #[test]
    fn more_cpus_than_supported_are_counted() {
        let entries: Vec<u8> = (0..70).flat_map(|id| local(id, 1)).collect();
        let list = read(&tables(0x1000, &entries), 0x1000).expect("valid");
        assert_eq!((list.present, list.apic_ids().len()), (70, MAX_CPUS as usize));
    }

    #[test]
    fn the_root_pointer_is_found_by_scanning() {
        let list = read(&tables(0xe_1000, &local(5, 1)), 0).expect("found");
        assert_eq!(list.apic_ids(), [5]);
    }

    #[test]
    fn no_tables_no_cpus() {
        assert!(read(&vec![0; 0x11_0000], 0).is_err());
        assert!(read(&vec![0; 0x11_0000], 0x1000).is_err());
    }
}
