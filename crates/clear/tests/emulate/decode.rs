//! A decoder for the few store instructions that the primitives use and a CPU may lack.

/// What one instruction does to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// `clzero`: zeroes the line that holds `addr`.
    Clzero { addr: u64 },
    /// `movdir64b`: copies 64 bytes.
    Movdir64b { dst: u64, src: u64 },
    /// `vmovntdq` of `bytes` (32 or 64) of vector register `reg`.
    Vmovntdq { dst: u64, reg: u8, bytes: usize },
}

/// An instruction, and how long it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Decoded {
    pub(crate) op: Op,
    pub(crate) len: u64,
}

/// Reads code bytes one at a time, so that nothing past the instruction's end is ever touched.
struct Bytes<'a> {
    fetch: &'a dyn Fn(u64) -> u8,
    at: u64,
}

impl Bytes<'_> {
    fn next(&mut self) -> u8 {
        self.at += 1;
        (self.fetch)(self.at - 1)
    }

    fn expect(&mut self, byte: u8) -> Option<()> {
        (self.next() == byte).then_some(())
    }

    fn i32(&mut self) -> i32 {
        i32::from_le_bytes([self.next(), self.next(), self.next(), self.next()])
    }
}

/// The register-number extensions of a prefix, each already shifted to bit 3 (`reg` also to bit 4).
struct Extend {
    reg: u8,
    index: u8,
    base: u8,
}

/// Decodes the instruction at `rip` of a 64-bit program with the general registers `gpr` (in the order of their
/// numbers: rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8 …). `None` for any instruction or form not known here, such as
/// segment and address-size prefixes.
pub(crate) fn decode(fetch: &dyn Fn(u64) -> u8, rip: u64, gpr: &[u64; 16]) -> Option<Decoded> {
    let mut code = Bytes { fetch, at: rip };
    let op = match code.next() {
        0x0F => {
            code.expect(0x01)?;
            code.expect(0xFC)?;
            Op::Clzero { addr: gpr[0] & !63 }
        }
        0x66 => {
            let mut byte = code.next();
            let mut rex = 0;
            if byte & 0xF0 == 0x40 {
                rex = byte;
                byte = code.next();
            }
            (byte == 0x0F).then_some(())?;
            code.expect(0x38)?;
            code.expect(0xF8)?;
            let extend = Extend { reg: (rex & 4) << 1, index: (rex & 2) << 2, base: (rex & 1) << 3 };
            let (src, reg) = memory_operand(&mut code, gpr, &extend, 1)?;
            Op::Movdir64b { dst: gpr[usize::from(reg)], src }
        }
        0xC5 => vmovntdq_vex(&mut code, gpr, None)?,
        0xC4 => {
            let p0 = code.next();
            vmovntdq_vex(&mut code, gpr, Some(p0))?
        }
        0x62 => vmovntdq_evex(&mut code, gpr)?,
        _ => return None,
    };
    Some(Decoded { op, len: code.at - rip })
}

/// VEX.256.66.0F.WIG E7 /r. `p0` is the three-byte form's first payload byte.
fn vmovntdq_vex(code: &mut Bytes<'_>, gpr: &[u64; 16], p0: Option<u8>) -> Option<Op> {
    let last = code.next();
    // The two-byte form holds R where the three-byte form holds W, and implies X, B (inverted) and map 0F.
    let p0 = p0.unwrap_or((last & 0x80) | 0x61);
    let map_0f = p0 & 0x1F == 1;
    let no_vvvv = last & 0x78 == 0x78;
    let l256 = last & 4 != 0;
    let pp_66 = last & 3 == 1;
    (map_0f && no_vvvv && l256 && pp_66).then_some(())?;
    code.expect(0xE7)?;
    let extend = Extend { reg: (!p0 & 0x80) >> 4, index: (!p0 & 0x40) >> 3, base: (!p0 & 0x20) >> 2 };
    let (dst, reg) = memory_operand(code, gpr, &extend, 1)?;
    Some(Op::Vmovntdq { dst, reg, bytes: 32 })
}

/// EVEX.512.66.0F.W0 E7 /r, with disp8 scaled by 64.
fn vmovntdq_evex(code: &mut Bytes<'_>, gpr: &[u64; 16]) -> Option<Op> {
    let (p0, p1, p2) = (code.next(), code.next(), code.next());
    let map_0f = p0 & 0x0F == 1;
    let w0_no_vvvv_66 = p1 == 0x7D;
    // z = 0, L'L = 2, b = 0, V' = 1 (inverted), aaa = 0.
    let plain_512 = p2 == 0x48;
    (map_0f && w0_no_vvvv_66 && plain_512).then_some(())?;
    code.expect(0xE7)?;
    let extend = Extend { reg: (!p0 & 0x80) >> 4 | (!p0 & 0x10), index: (!p0 & 0x40) >> 3, base: (!p0 & 0x20) >> 2 };
    let (dst, reg) = memory_operand(code, gpr, &extend, 64)?;
    Some(Op::Vmovntdq { dst, reg, bytes: 64 })
}

/// ModRM, SIB and displacement of a memory operand that ends the instruction: its address, and ModRM's register number.
fn memory_operand(code: &mut Bytes<'_>, gpr: &[u64; 16], extend: &Extend, disp8: i64) -> Option<(u64, u8)> {
    let modrm = code.next();
    let (mode, rm) = (modrm >> 6, modrm & 7);
    let reg = (modrm >> 3 & 7) | extend.reg;
    if mode == 3 {
        return None;
    }
    if mode == 0 && rm == 5 {
        let disp = code.i32();
        return Some((code.at.wrapping_add_signed(i64::from(disp)), reg));
    }
    let mut address = 0u64;
    let mut no_base = false;
    if rm == 4 {
        let sib = code.next();
        let index = (sib >> 3 & 7) | extend.index;
        if index != 4 {
            address = gpr[usize::from(index)] << (sib >> 6);
        }
        no_base = mode == 0 && sib & 7 == 5;
        if !no_base {
            address = address.wrapping_add(gpr[usize::from((sib & 7) | extend.base)]);
        }
    } else {
        address = gpr[usize::from(rm | extend.base)];
    }
    let disp = match mode {
        1 => i64::from(code.next() as i8) * disp8,
        2 => i64::from(code.i32()),
        _ if no_base => i64::from(code.i32()),
        _ => 0,
    };
    Some((address.wrapping_add_signed(disp), reg))
}
