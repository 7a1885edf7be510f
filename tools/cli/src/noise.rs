//! Saying when figures are too uncertain to be worth much.

use crate::document::Row;
use crate::saved::name;
use crate::units::is_counted;

/// A standard error beyond this share of the figure is worth a warning: a repetition may then differ by a tenth.
const UNCERTAIN: f64 = 0.05;

/// A figure's standard error as a share of it; none where it was measured once, counted, or is zero.
fn uncertainty(row: &Row) -> Option<f64> {
    let measured = row.runs > 1 && row.value != 0.0 && !is_counted(&row.unit);
    measured.then(|| row.stdev / (row.runs as f64).sqrt() / row.value.abs()).filter(|share| share.is_finite())
}

/// A line about noise, if there is any to speak of.
pub fn warning(rows: &[Row]) -> Option<String> {
    let judged: Vec<(f64, &Row)> = rows.iter().filter_map(|row| Some((uncertainty(row)?, row))).collect();
    let noisy = judged.iter().filter(|(share, _)| *share > UNCERTAIN);
    let (worst, row) = noisy.clone().max_by(|a, b| a.0.total_cmp(&b.0))?;
    Some(format!(
        "noise: {} of {} figures are uncertain by more than {:.0} %, most of all {} ({:.0} %); repeat with more --runs, \
         and see 'hugemm doctor'",
        noisy.count(),
        judged.len(),
        UNCERTAIN * 100.0,
        name(row),
        worst * 100.0
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(metric: &str, values: &[f64], unit: &'static str) -> Row {
        Row::median(metric, &values.iter().copied().collect(), unit)
    }

    #[test]
    fn only_what_was_measured_and_spreads_is_named() {
        let quiet = row("quiet", &[100.0, 101.0, 99.0], "ns");
        let counted = row("counted", &[1.0, 9.0], "count");
        let once = Row::single("once", 5.0, "ns");
        assert_eq!(warning(&[quiet.clone(), counted.clone(), once.clone()]), None);
        let loud = row("loud", &[100.0, 200.0, 50.0], "ns").label("order", 9);
        let line = warning(&[quiet, counted, once, loud]).expect("a warning");
        assert!(line.contains("1 of 2 figures") && line.contains("loud order=9 (44 %)"), "{line}");
    }
}
