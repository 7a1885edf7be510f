//! What a PVH loader hands over: the start info block and the memory map that it points to.
//!
//! Source: the PVH boot protocol (`xen/include/public/arch-x86/hvm/start_info.h`), which QEMU, Firecracker and Cloud
//! Hypervisor implement. All fields are little-endian.

/// First word of a start info block.
pub const MAGIC: u32 = 0x336e_c578;

/// Bytes of a start info block of version 1.
pub const START_INFO_BYTES: usize = 56;

/// Bytes of an entry of the memory map.
pub const ENTRY_BYTES: usize = 24;

/// The start info block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartInfo {
    /// Physical address of the command line, a string that ends with a zero byte; 0 if there is none.
    pub command_line: u64,
    /// Physical address of the ACPI root pointer; 0 if the loader does not say.
    pub rsdp: u64,
    /// Physical address of the memory map.
    pub memory_map: u64,
    /// How many entries it has.
    pub memory_map_entries: u32,
}

const NO_INFO: &str = "no PVH start info; boot the image with a PVH loader";
const NO_MEMORY_MAP: &str = "the loader gave no memory map; use one that speaks version 1 of the PVH protocol";
const SHORT: &str = "the PVH start info is cut off";

fn word<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], &'static str> {
    bytes.get(at..at + N).and_then(|part| part.try_into().ok()).ok_or(SHORT)
}

fn word32(bytes: &[u8], at: usize) -> Result<u32, &'static str> {
    word(bytes, at).map(u32::from_le_bytes)
}

fn word64(bytes: &[u8], at: usize) -> Result<u64, &'static str> {
    word(bytes, at).map(u64::from_le_bytes)
}

impl StartInfo {
    /// Reads a block from its [`START_INFO_BYTES`] bytes; the error says why it cannot be used.
    pub fn parse(bytes: &[u8]) -> Result<Self, &'static str> {
        if word32(bytes, 0)? != MAGIC {
            return Err(NO_INFO);
        }
        if word32(bytes, 4)? < 1 {
            return Err(NO_MEMORY_MAP);
        }
        let info = StartInfo {
            command_line: word64(bytes, 24)?,
            rsdp: word64(bytes, 32)?,
            memory_map: word64(bytes, 40)?,
            memory_map_entries: word32(bytes, 48)?,
        };
        if info.memory_map == 0 || info.memory_map_entries == 0 { Err(NO_MEMORY_MAP) } else { Ok(info) }
    }
}

/// An entry of the memory map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// First byte.
    pub start: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Whether it is memory that anybody may use (E820 type 1).
    pub ram: bool,
}

/// The entries of a memory map, from its bytes. A cut-off last entry is left out.
pub fn entries(bytes: &[u8]) -> impl Iterator<Item = Entry> + Clone + '_ {
    bytes.chunks_exact(ENTRY_BYTES).filter_map(|entry| {
        Some(Entry { start: word64(entry, 0).ok()?, bytes: word64(entry, 8).ok()?, ram: word32(entry, 16).ok()? == 1 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(magic: u32, version: u32, map: u64, count: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        for word in [magic, version, 0, 0] {
            bytes.extend(word.to_le_bytes());
        }
        for word in [0_u64, 0x1000, 0x2000, map] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(count.to_le_bytes());
        bytes.extend(0_u32.to_le_bytes());
        assert_eq!(bytes.len(), START_INFO_BYTES);
        bytes
    }

    #[test]
    fn a_block_is_read() {
        let info = StartInfo::parse(&block(MAGIC, 1, 0x3000, 7)).expect("valid");
        let expected = StartInfo { command_line: 0x1000, rsdp: 0x2000, memory_map: 0x3000, memory_map_entries: 7 };
        assert_eq!(info, expected);
    }

    #[test]
    fn what_is_no_block_is_refused() {
        assert_eq!(StartInfo::parse(&block(1, 1, 0x3000, 7)), Err(NO_INFO));
        assert_eq!(StartInfo::parse(&block(MAGIC, 0, 0x3000, 7)), Err(NO_MEMORY_MAP));
        assert_eq!(StartInfo::parse(&block(MAGIC, 1, 0x3000, 0)), Err(NO_MEMORY_MAP));
        assert_eq!(StartInfo::parse(&block(MAGIC, 1, 0x3000, 7)[..50]), Err(SHORT));
        assert_eq!(StartInfo::parse(&[]), Err(SHORT));
    }

    #[test]
    fn entries_are_read_and_a_cut_off_one_is_left_out() {
        let mut bytes = Vec::new();
        for (start, len, kind) in [(0_u64, 0x9fc00_u64, 1_u32), (0xf_0000, 0x1_0000, 2)] {
            bytes.extend(start.to_le_bytes());
            bytes.extend(len.to_le_bytes());
            bytes.extend(kind.to_le_bytes());
            bytes.extend(0_u32.to_le_bytes());
        }
        bytes.extend([1, 2, 3]);
        let found: Vec<_> = entries(&bytes).collect();
        let expected =
            [Entry { start: 0, bytes: 0x9fc00, ram: true }, Entry { start: 0xf_0000, bytes: 0x1_0000, ram: false }];
        assert_eq!(found, expected);
    }
}
