//! A CPU that cannot be asked.

use super::Features;

pub(super) fn detect() -> Features {
    Features::none()
}
