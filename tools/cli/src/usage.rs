//! What is wrong with a command line.

/// What clap says of a command line, on one line: the complaint, what it lists, and what may have been meant.
pub fn usage_error(error: &clap::Error) -> String {
    let text = error.to_string();
    let mut lines = text.lines();
    let complaint = lines.next().unwrap_or_default().trim_start_matches("error: ");
    let listed: Vec<_> = lines.by_ref().take_while(|line| !line.is_empty()).map(str::trim).collect();
    // That a dash may stand behind `--` helps with no argument of ours, and behind it a lease has its command.
    let tips = lines.filter_map(|line| line.trim().strip_prefix("tip: ")).filter(|tip| !tip.starts_with("to pass "));
    let tips: String = tips.map(|tip| format!("; {tip}")).collect();
    format!("{} {}", complaint, listed.join(", ")).trim_end().to_owned() + &tips
}
