//! The time stamp counter.
//!
//! Its frequency comes from the hypervisor's CPUID leaf where there is one, and otherwise from the interval timer that
//! every PC has: channel 2, whose end can be read from a port.

use core::arch::x86_64::_rdtsc;
use raw_cpuid::CpuId;
use x86_64::instructions::port::Port;

/// Frequency of the interval timer in Hz.
const PIT_HZ: u64 = 1_193_182;
/// Length of a measurement in counts of the interval timer: about 10 ms, far less than it takes to wrap.
const PIT_COUNTS: u16 = (PIT_HZ / 100) as u16;
/// How often it is measured. The measurement that took the shortest time counts: where the host stops an emulated CPU for
/// longer than the timer takes to wrap, that is 55 ms, the timer seems to have counted a fraction of what it did.
const MEASUREMENTS: usize = 5;
/// Readings of both counters of which the one that took the shortest time is used.
const READINGS: u32 = 8;

/// The counter.
pub(crate) fn read() -> u64 {
    // SAFETY: the counter exists on every x86-64 CPU.
    unsafe { _rdtsc() }
}

/// Counts per millisecond, about 50 ms if they have to be measured.
pub(crate) fn khz() -> u64 {
    let stated = CpuId::new().get_hypervisor_info().and_then(|info| info.tsc_frequency()).map(u64::from);
    let measured = || (0..MEASUREMENTS).map(|_| measure()).min().map_or(0, |(_, khz)| khz);
    stated.filter(|khz| *khz > 0).unwrap_or_else(measured)
}

/// Both counters at one moment: of several readings the one with the least time in between, since an emulated CPU may be
/// stopped anywhere.
fn both() -> (u64, u16) {
    let (mut command, mut data) = (Port::<u8>::new(0x43), Port::<u8>::new(0x42));
    let mut best = (u64::MAX, 0, 0);
    for _ in 0..READINGS {
        let before = read();
        // SAFETY: latches and reads channel 2 of the interval timer.
        let count = unsafe {
            command.write(0x80);
            u16::from(data.read()) | u16::from(data.read()) << 8
        };
        best = best.min((read() - before, before, count));
    }
    (best.1, best.2)
}

/// How many counts of the time stamp counter a measurement took, and how many a millisecond has by it.
fn measure() -> (u64, u64) {
    let (mut gate, mut command, mut data) = (Port::<u8>::new(0x61), Port::<u8>::new(0x43), Port::<u8>::new(0x42));
    // SAFETY: the interval timer's channel 2 and its gate, which drive the speaker at most; the speaker stays off. It
    // counts down once, from the largest value.
    unsafe {
        let was = gate.read() & !3;
        gate.write(was);
        command.write(0xb0);
        data.write(0xff);
        data.write(0xff);
        gate.write(was | 1);
    }
    let (start, from) = both();
    loop {
        let (end, to) = both();
        let counts = from.wrapping_sub(to);
        if counts >= PIT_COUNTS {
            return (end - start, (end - start) * PIT_HZ / (u64::from(counts) * 1000));
        }
    }
}
