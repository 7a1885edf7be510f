//! What the loader and the firmware say of the machine, in one form for all architectures.

use crate::MAX_CPUS;
use crate::memory_map::MemoryMap;
use hugemm_base::Extent;

/// Longest command line, in bytes.
const COMMAND_LINE: usize = 1024;

/// Most groups of device registers.
const DEVICES: usize = 3;

/// A machine.
pub(crate) struct Machine {
    /// Its memory.
    pub map: MemoryMap,
    /// Memory that nobody uses yet.
    pub free: MemoryMap,
    /// How hardware names the CPUs that run here, the boot CPU first.
    hardware_ids: [u64; MAX_CPUS as usize],
    cpus: usize,
    /// CPUs that it has; more than run here if there are more than the image supports.
    pub present: u32,
    /// Device registers, and where in virtual memory they belong.
    pub devices: [(u64, Extent); DEVICES],
    line: [u8; COMMAND_LINE],
    line_bytes: usize,
}

impl Machine {
    /// A machine with this memory and these CPUs, of which the first ones run here.
    pub(crate) fn new(map: MemoryMap, hardware_ids: impl Iterator<Item = u64>, present: u32) -> Self {
        let devices = [(0, Extent::default()); DEVICES];
        let (free, hardware) = (map.clone(), [0; MAX_CPUS as usize]);
        let (line, line_bytes) = ([0; COMMAND_LINE], 0);
        let mut machine = Machine { map, free, hardware_ids: hardware, cpus: 0, present, devices, line, line_bytes };
        for (place, id) in machine.hardware_ids.iter_mut().zip(hardware_ids) {
            *place = id;
            machine.cpus += 1;
        }
        machine
    }

    /// How hardware names the CPUs that run here, the boot CPU first.
    pub(crate) fn hardware_ids(&self) -> &[u64] {
        &self.hardware_ids[..self.cpus]
    }

    /// Keeps as much of a command line as there is room for.
    pub(crate) fn keep_line(&mut self, line: &[u8]) {
        self.line_bytes = line.len().min(COMMAND_LINE);
        self.line[..self.line_bytes].copy_from_slice(&line[..self.line_bytes]);
    }

    /// The command line.
    pub(crate) fn line(&self) -> &str {
        core::str::from_utf8(&self.line[..self.line_bytes]).unwrap_or("")
    }
}
