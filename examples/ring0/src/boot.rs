//! From the loader's jump to Rust, words to the serial port, and the end: what every kernel has before hugemm comes in.

use core::arch::global_asm;
use core::fmt;
use core::ptr::with_exposed_provenance;
use hugemm::base::{Extent, PhysAddr};
use uart_16550::{Config, Uart16550, backend::PioBackend};
use x86_64::instructions::{hlt, interrupts, port::Port};

global_asm!(
    r#"
    # The note by which a PVH loader finds the 32-bit entry: type 18 of owner "Xen".
    .section .note.Xen, "a", @note
    .balign 4
    .long 4, 8, 18
    .asciz "Xen"
    .quad pvh_entry

    .section .boot, "ax"
    .code32
    .global pvh_entry
pvh_entry:
    cli
    cld
    # 4 GiB one to one, by 2048 entries of 2 MiB, present and writable.
    movl $boot_pd, %edi
    movl $0x83, %eax
    movl $2048, %ecx
1:  movl %eax, (%edi)
    addl $0x200000, %eax
    addl $8, %edi
    loop 1b
    movl $boot_pdpt, %edi
    movl $boot_pd + 3, %eax
    movl $4, %ecx
2:  movl %eax, (%edi)
    addl $0x1000, %eax
    addl $8, %edi
    loop 2b
    movl $boot_pdpt + 3, boot_pml4
    # CR4.PAE, the tables, EFER.LME and EFER.NXE, CR0.PG, CR0.WP and CR0.PE.
    movl %cr4, %eax
    orl $0x20, %eax
    movl %eax, %cr4
    movl $boot_pml4, %eax
    movl %eax, %cr3
    movl $0xc0000080, %ecx
    rdmsr
    orl $0x900, %eax
    wrmsr
    movl %cr0, %eax
    orl $0x80010001, %eax
    movl %eax, %cr0
    lgdt boot_gdt_pointer
    ljmpl $8, $boot_long

    .code64
boot_long:
    movw $16, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    movq $boot_stack_top, %rsp
    movl %ebx, %edi
    xorl %ebp, %ebp
    call {main}
    ud2

    # Null, 64-bit code, data.
    .section .rodata.boot_gdt, "a"
    .balign 8
    .global boot_gdt
boot_gdt:
    .quad 0, 0x00af9b000000ffff, 0x00cf93000000ffff
boot_gdt_pointer:
    .word 23
    .long boot_gdt

    .section .bss.boot, "aw", @nobits
    .balign 4096
    .global boot_pml4
boot_pml4:
    .skip 4096
boot_pdpt:
    .skip 4096
boot_pd:
    .skip 4 * 4096
    .skip 65536
boot_stack_top:

    .text
    "#,
    main = sym super::kernel_main,
    options(att_syntax)
);

unsafe extern "C" {
    static image_end: u8;
}

/// What the boot tables map, one to one.
pub const FIRST_4_GIB: Extent = Extent::within(PhysAddr::new(0), 4 << 30);

/// The RAM of the loader's memory map above what the program itself lies in, by pieces.
///
/// # Safety
///
/// `start_info` is the address of a PVH start info block of version 1.
pub unsafe fn ram(start_info: u64) -> impl Iterator<Item = Extent> {
    let word = |at: u64| {
        // SAFETY: within the loader's blocks, which lie below 1 MiB, mapped, and which nobody writes.
        unsafe { with_exposed_provenance::<u64>(at as usize).read_unaligned() }
    };
    // The map's address and its number of entries, each of which is a first byte, a length and a type: 1 is RAM.
    let (map, entries) = (word(start_info + 40), word(start_info + 48) & 0xffff_ffff);
    let ram = (0..entries).map(move |index| map + index * 24).filter(move |entry| word(entry + 16) & 0xffff_ffff == 1);
    let pieces = ram.map(move |entry| Extent::within(PhysAddr::new(word(entry)), word(entry + 8)));
    let (below, _) = FIRST_4_GIB.split_at((&raw const image_end).addr().div_ceil(4096) as u64);
    pieces.map(move |piece| piece.without(below).1)
}

/// The serial port.
pub struct Serial(Uart16550<PioBackend>);

impl Serial {
    /// Sets the first serial port of a PC up; `None` if there is none.
    pub fn new() -> Option<Self> {
        // SAFETY: on a PC nothing else is at this port, and without a serial port nothing is.
        let mut port = unsafe { Uart16550::new_port(0x3f8) }.ok()?;
        port.init(Config::default()).ok()?;
        Some(Serial(port))
    }
}

impl fmt::Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.send_bytes_exact(text.as_bytes());
        Ok(())
    }
}

/// Ends the machine: QEMU's `isa-debug-exit` device makes 33 of success and 35 of failure its exit code.
pub fn exit(success: bool) -> ! {
    // SAFETY: the port is the device's, or nobody's.
    unsafe { Port::new(0xf4).write(if success { 16_u32 } else { 17 }) };
    interrupts::disable();
    loop {
        hlt();
    }
}
