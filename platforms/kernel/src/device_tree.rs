//! What a device tree says of an arm64 machine: memory, CPUs, the serial port, the interrupt controller, the firmware.
//!
//! Source: Devicetree Specification, release 0.4; the bindings of `arm,psci`, `arm,gic-v3` and `arm,pl011`.

use crate::MAX_CPUS;
use crate::memory_map::{MapError, MemoryMap};
use crate::pvh::Entry;
use core::fmt;
use dtoolkit::fdt::{Fdt, FdtNode};
use dtoolkit::{Node, Property};
use hugemm_base::{Extent, PAGE_BYTES, Pfn};

/// The instruction that reaches the firmware.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conduit {
    /// HVC: the firmware is a hypervisor.
    Hvc,
    /// SMC: it is more privileged than that.
    Smc,
}

const NO_TREE: &str = "there is no device tree at the beginning of memory; boot the image on QEMU's machine 'virt'";
const BROKEN: &str = "the device tree is broken";
const NO_MEMORY: &str = "the device tree names no memory";
const NO_PSCI: &str = "the device tree names no PSCI firmware, which starts CPUs and switches the machine off";
const NO_GIC: &str = "the device tree names no GICv3; boot with -machine virt,gic-version=3";
const NO_CONSOLE: &str = "the device tree names no PL011 serial port";

/// Why a machine cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceTreeError {
    /// There is no tree, it is broken, or something that the kernel cannot do without is not in it.
    Unusable(&'static str),
    /// Its memory cannot be described.
    Map(MapError),
    /// The interrupt controller has fewer CPUs than the machine.
    TooManyCpus {
        /// CPUs that the machine has.
        cpus: u32,
        /// Those that the interrupt controller has.
        interruptible: u64,
    },
}

impl fmt::Display for DeviceTreeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceTreeError::Unusable(why) => f.write_str(why),
            DeviceTreeError::Map(error) => error.fmt(f),
            DeviceTreeError::TooManyCpus { cpus, interruptible } => write!(
                f,
                "the machine has {cpus} CPUs and its interrupt controller {interruptible}; use --cpus {interruptible} or less"
            ),
        }
    }
}

impl core::error::Error for DeviceTreeError {}

impl From<&'static str> for DeviceTreeError {
    fn from(why: &'static str) -> Self {
        DeviceTreeError::Unusable(why)
    }
}

/// What is used of a machine.
#[derive(Clone, Debug)]
pub struct Board<'a> {
    /// Memory that nobody has reserved.
    pub map: MemoryMap,
    /// How hardware names the CPUs, in the tree's order, as many as there is room for.
    cpus: [u64; MAX_CPUS as usize],
    /// How many the tree names.
    pub present: u32,
    /// Registers of the serial port.
    pub console: Extent,
    /// Registers of the interrupt controller that are common to all CPUs.
    pub distributor: Extent,
    /// Those of each CPU: [`REDISTRIBUTOR`] bytes for one.
    pub redistributors: Extent,
    /// What the image is to do.
    pub command_line: &'a str,
}

/// Bytes of one CPU's registers of the interrupt controller.
pub const REDISTRIBUTOR: u64 = 0x2_0000;

impl<'a> Board<'a> {
    /// Reads a device tree at the beginning of `bytes`.
    ///
    /// # Errors
    ///
    /// All that [`DeviceTreeError`] says.
    pub fn read(bytes: &'a [u8]) -> Result<Self, DeviceTreeError> {
        let tree = tree(bytes)?;
        let console = compatible(tree, &["arm,pl011"]).and_then(|node| registers(node).next());
        let console = console.ok_or(NO_CONSOLE)?;
        conduit(bytes)?;
        let gic = compatible(tree, &["arm,gic-v3"]).ok_or(NO_GIC)?;
        let mut parts = registers(gic);
        let (Some(distributor), Some(redistributors)) = (parts.next(), parts.next()) else {
            return Err(NO_GIC.into());
        };
        let map = MemoryMap::new(memory(tree).chain(reserved(tree))).map_err(DeviceTreeError::Map)?;
        if map.pages() == 0 {
            return Err(NO_MEMORY.into());
        }
        let (mut cpus, mut present) = ([0; MAX_CPUS as usize], 0);
        for id in cpu_ids(tree) {
            if let Some(place) = cpus.get_mut(present as usize) {
                *place = id;
            }
            present += 1;
        }
        let chosen = tree.find_node("/chosen").and_then(|node| node.property("bootargs"));
        let command_line = chosen.and_then(|line| line.value_as().ok()).unwrap_or("");
        let board = Board { map, cpus, present, console, distributor, redistributors, command_line };
        let interruptible = redistributors.bytes() / REDISTRIBUTOR;
        if u64::from(present) > interruptible {
            return Err(DeviceTreeError::TooManyCpus { cpus: present, interruptible });
        }
        Ok(board)
    }

    /// How hardware names the CPUs, the one that it calls `boot` first.
    pub fn from_boot_cpu(&self, boot: u64) -> impl Iterator<Item = u64> + '_ {
        let named = &self.cpus[..(self.present as usize).min(MAX_CPUS as usize)];
        core::iter::once(boot).chain(named.iter().copied().filter(move |id| *id != boot))
    }
}

/// The tree at the beginning of `bytes`.
fn tree(bytes: &[u8]) -> Result<Fdt<'_>, &'static str> {
    const MAGIC: u32 = 0xd00d_feed;
    let word = |at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    if word(0) != Some(MAGIC) {
        return Err(NO_TREE);
    }
    let bytes = word(4).and_then(|length| bytes.get(..length as usize)).ok_or(BROKEN)?;
    Fdt::new(bytes).map_err(|_| BROKEN)
}

/// How firmware is reached: what a machine needs to be switched off because of anything else that is missing.
///
/// # Errors
///
/// There is no device tree, it is broken, or names no PSCI firmware.
pub fn conduit(bytes: &[u8]) -> Result<Conduit, &'static str> {
    let psci = compatible(tree(bytes)?, &["arm,psci-1.0", "arm,psci-0.2"]).ok_or(NO_PSCI)?;
    match psci.property("method").and_then(|method| method.value_as::<&str>().ok()) {
        Some("hvc") => Ok(Conduit::Hvc),
        Some("smc") => Ok(Conduit::Smc),
        _ => Err(NO_PSCI),
    }
}

/// The first node on the root's level that says it is one of these.
fn compatible<'a>(tree: Fdt<'a>, names: &[&str]) -> Option<FdtNode<'a>> {
    tree.root().children().find(|node| {
        let strings = node.property("compatible");
        strings.is_some_and(|strings| {
            strings.value().split(|byte| *byte == 0).any(|string| names.iter().any(|name| name.as_bytes() == string))
        })
    })
}

/// First address and length of each group of a node's registers.
fn regions<'a>(node: FdtNode<'a>) -> impl Iterator<Item = (u64, u64)> + Clone + 'a {
    // Counted, since the library's own iterator is not `Clone`.
    (0..).map_while(move |index| {
        let region = node.reg().ok()??.nth(index)?;
        Some((region.address().ok()?, region.size().ok()?))
    })
}

/// The same in whole pages.
fn registers<'a>(node: FdtNode<'a>) -> impl Iterator<Item = Extent> + 'a {
    regions(node)
        .filter_map(|(start, bytes)| Extent::new(Pfn::new(start / PAGE_BYTES), bytes.div_ceil(PAGE_BYTES)).ok())
}

fn entry(ram: bool) -> impl Fn((u64, u64)) -> Entry + Clone {
    move |(start, bytes)| Entry { start, bytes, ram }
}

/// Memory: nodes of that type.
fn memory<'a>(tree: Fdt<'a>) -> impl Iterator<Item = Entry> + Clone + 'a {
    let nodes = (0..).map_while(move |index| tree.root().children().nth(index));
    let nodes = nodes.filter(|node| node.property("device_type").is_some_and(|kind| kind.value() == b"memory\0"));
    nodes.flat_map(regions).map(entry(true))
}

/// Memory that is somebody's already: the tree's own list, and the children of its node.
fn reserved<'a>(tree: Fdt<'a>) -> impl Iterator<Item = Entry> + Clone + 'a {
    let listed = (0..).map_while(move |index| tree.memory_reservations().nth(index));
    let listed = listed.map(|one| (one.address(), one.size()));
    let nodes = (0..).map_while(move |index| tree.find_node("/reserved-memory")?.children().nth(index));
    listed.chain(nodes.flat_map(regions)).map(entry(false))
}

/// How hardware names the CPUs.
fn cpu_ids<'a>(tree: Fdt<'a>) -> impl Iterator<Item = u64> + 'a {
    let cpus = tree.find_node("/cpus").into_iter().flat_map(|cpus| cpus.children());
    let cpus = cpus.filter(|node| node.property("device_type").is_some_and(|kind| kind.value() == b"cpu\0"));
    // One or two cells, by the node's own count; a CPU's address has no length.
    cpus.filter_map(|cpu| {
        let id = cpu.property("reg")?;
        Some(id.value().iter().fold(0_u64, |id, byte| id << 8 | u64::from(*byte)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_map::MOST;
    use dtoolkit::ToPropertyValue;
    use dtoolkit::model::{DeviceTree, DeviceTreeNode, DeviceTreeProperty};

    fn set(node: &mut DeviceTreeNode, name: &str, value: impl ToPropertyValue) {
        node.add_property(DeviceTreeProperty::new(name, value).expect("a name"));
    }

    fn node(name: &str, kind: (&str, &str), reg: &[u32]) -> DeviceTreeNode {
        let mut node = DeviceTreeNode::new(name).expect("a name");
        set(&mut node, kind.0, kind.1);
        if !reg.is_empty() {
            set(&mut node, "reg", reg);
        }
        node
    }

    /// What QEMU's `virt` has, with so many CPUs and room for so many in the interrupt controller.
    fn virt(cpus: u32, interruptible: u32) -> DeviceTree {
        let mut tree = DeviceTree::new();
        set(&mut tree.root, "#address-cells", 2_u32);
        set(&mut tree.root, "#size-cells", 2_u32);
        let mut psci = node("psci", ("compatible", "arm,psci-1.0"), &[]);
        set(&mut psci, "method", "smc");
        let redistributors = interruptible * REDISTRIBUTOR as u32;
        let gic = node(
            "intc@8000000",
            ("compatible", "arm,gic-v3"),
            &[0, 0x800_0000, 0, 0x1_0000, 0, 0x80a_0000, 0, redistributors],
        );
        let mut chosen = DeviceTreeNode::new("chosen").expect("a name");
        set(&mut chosen, "bootargs", "free n=1");
        let mut group = DeviceTreeNode::new("cpus").expect("a name");
        set(&mut group, "#address-cells", 1_u32);
        set(&mut group, "#size-cells", 0_u32);
        for cpu in 0..cpus {
            group.add_child(node(&format!("cpu@{cpu:x}"), ("device_type", "cpu"), &[cpu]));
        }
        let memory = node("memory@40000000", ("device_type", "memory"), &[0, 0x4000_0000, 0, 0x1000_0000]);
        let console = node("pl011@9000000", ("compatible", "arm,pl011"), &[0, 0x900_0000, 0, 0x1000]);
        for child in [psci, gic, chosen, group, memory, console] {
            tree.root.add_child(child);
        }
        tree
    }

    #[test]
    fn a_machine_is_read() {
        let mut bytes = virt(3, 4).to_dtb();
        // QEMU leaves room behind it.
        bytes.resize(1 << 16, 0);
        let board = Board::read(&bytes).expect("valid");
        assert_eq!((board.map.pages(), board.present), (0x1_0000, 3));
        assert_eq!(conduit(&bytes), Ok(Conduit::Smc));
        assert_eq!(board.from_boot_cpu(2).collect::<Vec<_>>(), [2, 0, 1]);
        assert_eq!(board.console.start().get(), 0x900_0000);
        assert_eq!((board.distributor.pages(), board.redistributors.bytes()), (16, 4 * REDISTRIBUTOR));
        assert_eq!(board.command_line, "free n=1");
    }

    #[test]
    fn reserved_memory_is_left_out() {
        let mut tree = virt(1, 1);
        tree.memory_reservations.push(dtoolkit::memreserve::MemoryReservation::new(0x4000_0000, 0x1000));
        let mut group = DeviceTreeNode::new("reserved-memory").expect("a name");
        set(&mut group, "#address-cells", 2_u32);
        set(&mut group, "#size-cells", 2_u32);
        group.add_child(node("firmware@40002000", ("status", "okay"), &[0, 0x4000_2000, 0, 0x2000]));
        tree.root.add_child(group);
        let bytes = tree.to_dtb();
        assert_eq!(Board::read(&bytes).expect("valid").map.pages(), 0x1_0000 - 3);
    }

    #[test]
    fn what_is_missing_is_named() {
        let without = |name: &str| {
            let mut tree = virt(2, 2);
            tree.root.remove_child(name).expect("there");
            let bytes = tree.to_dtb();
            Board::read(&bytes).map(|board| board.present).expect_err(name)
        };
        assert_eq!(without("memory@40000000"), NO_MEMORY.into());
        assert_eq!(without("psci"), NO_PSCI.into());
        assert_eq!(without("intc@8000000"), NO_GIC.into());
        assert_eq!(without("pl011@9000000"), NO_CONSOLE.into());
        assert_eq!(Board::read(&[0; 64]).map(|_| ()), Err(NO_TREE.into()));
        let bytes = virt(1, 1).to_dtb();
        assert_eq!(Board::read(&bytes[..bytes.len() / 2]).map(|_| ()), Err(BROKEN.into()));
        let bytes = virt(3, 2).to_dtb();
        let error = Board::read(&bytes).map(|_| ()).expect_err("too many");
        assert_eq!(error, DeviceTreeError::TooManyCpus { cpus: 3, interruptible: 2 });
        assert!(error.to_string().contains("--cpus 2 or less"), "{error}");
        let mut tree = virt(1, 1);
        for piece in 0..=MOST as u64 {
            tree.memory_reservations
                .push(dtoolkit::memreserve::MemoryReservation::new(0x4000_1000 + piece * 0x2000, 0x1000));
        }
        let bytes = tree.to_dtb();
        let error = Board::read(&bytes).map(|_| ()).expect_err("too many pieces");
        assert_eq!(error.to_string(), MapError::TooFragmented.to_string());
    }
}
