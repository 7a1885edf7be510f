//! What the device tree says of the machine.

use super::super::layout;
use super::super::machine::Machine;
use super::{controller, psci, serial};
use crate::device_tree::{self, Board};

/// Where QEMU leaves the device tree for images that are not Linux's: at the beginning of memory.
const USUAL: u64 = 0x4000_0000;

/// The most that a device tree may have, in bytes: QEMU's limit.
const MOST: usize = 1 << 20;

/// Reads the device tree, of which `info` is the physical address, or 0 if the loader did not say. On the boot tables.
pub(crate) fn look(info: u64) -> Machine {
    let at = if info == 0 { USUAL } else { info };
    // SAFETY: the beginning of memory, or what the loader says is a device tree; the boot tables map it.
    let bytes = unsafe { core::slice::from_raw_parts(layout::direct(at), MOST) };
    // Whatever else is missing, the machine can be switched off then.
    if let Ok(conduit) = device_tree::conduit(bytes) {
        psci::set(conduit);
    }
    let board = Board::read(bytes).unwrap_or_else(|error| panic!("{error}"));
    serial::move_to(layout::direct(board.console.start().get()) as u64);
    let ids = board.from_boot_cpu(controller::own_id());
    let mut machine = Machine::new(board.map.clone(), ids, board.present);
    machine.devices = [
        (layout::DEVICES, board.console),
        (controller::DISTRIBUTOR, board.distributor),
        (controller::REDISTRIBUTORS, board.redistributors),
    ];
    machine.keep_line(board.command_line.as_bytes());
    machine
}
