//! By DCZID_EL0.

use super::{Features, bit};
use crate::primitive::Primitive;

pub(super) fn detect() -> Features {
    let block = crate::raw::dc_zva_block();
    let mut bits = bit(Primitive::Portable) | bit(Primitive::Unrolled) | bit(Primitive::Stnp);
    if block.is_some() {
        bits |= bit(Primitive::DcZva);
    }
    // At most 2048, so it fits.
    Features { bits, identity: None, zva_block: block.unwrap_or(0) as u16 }
}

pub(super) fn llc_bytes() -> Option<u64> {
    None // the cache geometry registers are not readable at EL0
}
