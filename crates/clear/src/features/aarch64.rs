//! By DCZID_EL0.

use super::{Features, bit};
use crate::primitive::Primitive;

pub(super) fn detect() -> Features {
    let mut bits = bit(Primitive::Portable) | bit(Primitive::Unrolled) | bit(Primitive::Stnp);
    if crate::raw::dc_zva_block().is_some() {
        bits |= bit(Primitive::DcZva);
    }
    Features { bits, identity: None }
}
