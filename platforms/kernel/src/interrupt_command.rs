//! Interrupt commands: how one reaches the local interrupt controller, and what has to come before it.
//!
//! In x2APIC mode the command is one model-specific register, and writing it waits for nothing: an interrupt may arrive
//! before stores that precede it in the program. `MFENCE; LFENCE` before the write prevents that (Intel SDM volume 3,
//! "MSR Access in x2APIC Mode"). Otherwise it is two registers in memory, mapped uncached, which are written in order after
//! all earlier stores; the command before has to have been taken.
//!
//! A target is named by its controller's number (physical destination mode). Several are named by one command in x2APIC mode, where
//! hardware has put numbers that differ in their lowest four bits only into a *cluster* (SDM volume 3, "Logical Destination Mode
//! in x2APIC Mode"): no machine that this has run on has that mode, so it is tested on paper. Elsewhere it is a command for each.

/// Offset of the low half of the command in memory; of the whole in x2APIC mode.
pub const COMMAND: u32 = 0x300;
/// Offset of the high half.
pub const COMMAND_HIGH: u32 = 0x310;
/// In the low half, not in x2APIC mode: the command before has not been taken.
pub const BUSY: u32 = 1 << 12;

/// In the command: the target is a cluster and which of its members, not a number.
const LOGICAL: u32 = 1 << 11;
/// log2 of the numbers in a cluster.
const CLUSTER: u32 = 4;
/// Bits of a number whose cluster can be named.
const NUMBERED: u32 = 20;

/// The registers of the calling CPU's controller.
pub trait Registers {
    /// Whether it is in x2APIC mode.
    fn is_x2(&self) -> bool;
    /// Reads a register in memory.
    fn read(&self, register: u32) -> u32;
    /// Writes a register in memory.
    fn write(&self, register: u32, value: u32);
    /// Writes the command in x2APIC mode, [after all earlier stores](write_x2_command).
    fn write_x2_command(&self, command: u64);
    /// Runs `f` with interrupts off.
    fn alone(&self, f: impl FnOnce());
}

/// Sends a command to the CPU whose controller has this number, after all earlier stores.
pub fn send(registers: &impl Registers, apic_id: u32, command: u32) {
    if registers.is_x2() {
        return registers.write_x2_command(u64::from(apic_id) << 32 | u64::from(command));
    }
    // The two halves must not be divided by an interrupt that sends too.
    registers.alone(|| {
        while registers.read(COMMAND) & BUSY != 0 {
            core::hint::spin_loop();
        }
        registers.write(COMMAND_HIGH, apic_id << 24);
        registers.write(COMMAND, command);
    });
}

/// Sends a command to the CPUs whose controllers have these numbers, after all earlier stores: one command for those in a row that
/// are of one cluster, where there are clusters.
pub fn send_to_each(registers: &impl Registers, apic_ids: impl Iterator<Item = u32>, command: u32) {
    let mut apic_ids = apic_ids.peekable();
    while let Some(id) = apic_ids.next() {
        if !registers.is_x2() || id >> NUMBERED != 0 {
            send(registers, id, command);
            continue;
        }
        let (cluster, member) = (id >> CLUSTER, |id: u32| 1_u32 << (id & ((1 << CLUSTER) - 1)));
        let mut members = member(id);
        while let Some(id) = apic_ids.next_if(|id| id >> CLUSTER == cluster) {
            members |= member(id);
        }
        send(registers, cluster << 16 | members, command | LOGICAL);
    }
}

/// Writes the command register of x2APIC mode after all earlier stores.
///
/// # Safety
///
/// In ring 0 of a CPU in x2APIC mode; what the command does is the caller's business.
#[cfg(target_arch = "x86_64")]
#[inline(never)]
pub unsafe extern "C" fn write_x2_command(command: u64) {
    // SAFETY: the caller's promise; no `nomem`, so that stores stay before it.
    unsafe {
        core::arch::asm!(
            "mfence",
            "lfence",
            "wrmsr",
            in("ecx") 0x800 + (COMMAND >> 4),
            in("eax") command as u32,
            in("edx") (command >> 32) as u32,
            options(nostack, preserves_flags)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    #[derive(Debug, PartialEq, Eq)]
    enum Event {
        Off,
        On,
        Write(u32, u32),
        X2(u64),
    }

    /// A controller on paper. `busy`: how often it is still busy.
    struct Mock {
        x2: bool,
        busy: Cell<u32>,
        events: RefCell<Vec<Event>>,
    }

    impl Registers for Mock {
        fn is_x2(&self) -> bool {
            self.x2
        }

        fn read(&self, register: u32) -> u32 {
            assert_eq!((register, self.x2), (COMMAND, false));
            let busy = self.busy.get();
            self.busy.set(busy.saturating_sub(1));
            if busy > 0 { BUSY } else { 0 }
        }

        fn write(&self, register: u32, value: u32) {
            assert_eq!(self.busy.get(), 0, "the command before has not been taken");
            self.events.borrow_mut().push(Event::Write(register, value));
        }

        fn write_x2_command(&self, command: u64) {
            self.events.borrow_mut().push(Event::X2(command));
        }

        fn alone(&self, f: impl FnOnce()) {
            self.events.borrow_mut().push(Event::Off);
            f();
            self.events.borrow_mut().push(Event::On);
        }
    }

    fn events(x2: bool, apic_id: u32) -> Vec<Event> {
        let mock = Mock { x2, busy: Cell::new(3), events: RefCell::default() };
        send(&mock, apic_id, 0x4041);
        mock.events.into_inner()
    }

    #[test]
    fn a_command_reaches_its_registers() {
        assert_eq!(events(true, 0x1_2345), [Event::X2(0x1_2345 << 32 | 0x4041)], "one write, which fences by itself");
        let two = [Event::Write(COMMAND_HIGH, 5 << 24), Event::Write(COMMAND, 0x4041)];
        let [high, low] = two;
        assert_eq!(events(false, 5), [Event::Off, high, low, Event::On]);
    }

    fn events_of_each(x2: bool, apic_ids: &[u32]) -> Vec<Event> {
        let mock = Mock { x2, busy: Cell::new(0), events: RefCell::default() };
        send_to_each(&mock, apic_ids.iter().copied(), 0x4041);
        mock.events.into_inner()
    }

    #[test]
    fn one_command_reaches_those_of_a_cluster() {
        let logical = |target: u64| Event::X2(target << 32 | 0x4841);
        assert_eq!(events_of_each(true, &[0, 1, 3, 15]), [logical(0x800b)]);
        assert_eq!(events_of_each(true, &[15, 16, 18, 0xf_ffff]), [0x8000, 0x1_0005, 0xffff_8000].map(logical));
        assert_eq!(events_of_each(true, &[16, 0x22, 18]), [0x1_0001, 0x2_0004, 0x1_0004].map(logical), "in a row");
        let far = 1 << 20;
        assert_eq!(events_of_each(true, &[far, far + 1])[1], Event::X2(0x10_0001 << 32 | 0x4041), "no cluster has it");
        let each = events_of_each(false, &[5, 6]);
        assert_eq!(each.len(), 8, "a command for each");
        assert_eq!(each[5..7], [Event::Write(COMMAND_HIGH, 6 << 24), Event::Write(COMMAND, 0x4041)]);
    }

    /// By disassembly, since no machine that runs this need have x2APIC: nothing but the two fences comes before the write.
    #[test]
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    fn the_write_is_fenced() {
        use iced_x86::{Code, Decoder, FlowControl};
        let code = write_x2_command as *const () as *const u8;
        // SAFETY: the function's own code, of which 64 bytes are there and readable; it is read only.
        let bytes = unsafe { core::slice::from_raw_parts(code, 64) };
        let all: Vec<Code> = Decoder::new(64, bytes, 0).into_iter().map(|found| found.code()).collect();
        let write = all.iter().position(|code| *code == Code::Wrmsr).expect("the write");
        assert_eq!(all[write - 2..write], [Code::Mfence, Code::Lfence], "{all:?}");
        let before = Decoder::new(64, bytes, 0).into_iter().take(write);
        before.for_each(|found| assert_eq!(found.flow_control(), FlowControl::Next, "always"));
    }
}
