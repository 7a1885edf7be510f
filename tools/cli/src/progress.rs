//! Progress on standard error, where it is a terminal; silence elsewhere.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar over `steps` steps, or nothing to see if standard error is no terminal or `quiet`.
pub fn bar(steps: u64, quiet: bool) -> ProgressBar {
    let target = if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bar = ProgressBar::with_draw_target(Some(steps), target);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {percent:>3}% {elapsed:>4} {wide_msg}") {
        bar.set_style(style);
    }
    bar
}
