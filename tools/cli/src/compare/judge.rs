//! Whether two figures differ, and whether that is good.

use super::sides::{Figure, Pair};
use crate::units::{Better, is_counted};

/// Quantiles of Student's t for a two-sided interval of 99 %, by degrees of freedom from 1. A document has a hundred
/// figures or more: at 95 % several would stand out by chance alone.
const T99: [f64; 30] = [
    63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106, 3.055, 3.012, 2.977, 2.947, 2.921,
    2.898, 2.878, 2.861, 2.845, 2.831, 2.819, 2.807, 2.797, 2.787, 2.779, 2.771, 2.763, 2.756, 2.750,
];

/// From 120 degrees of freedom on; between 30 and 120 the quantile for 30 stands, which is on the safe side.
const T99_MANY: f64 = 2.617;

hugemm_workloads::named! {
    /// How two figures differ, in the order of the summary.
    Verdict {
        /// Worse beyond the threshold and the noise.
        Worse = "worse",
        /// Better beyond the threshold and the noise.
        Better = "better",
        /// Beyond the noise, below the threshold.
        Small = "below the threshold",
        /// Beyond the noise, and nobody knows which way is better.
        Differs = "differs",
        /// Measured once on a side, so the noise is unknown.
        Once = "one run, not judged",
        /// One side has no figure.
        Absent = "no figure",
        /// Within the noise.
        Same = "same",
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Judgement {
    /// B - A in percent of A; none if A is 0 or a side has no figure.
    pub percent: Option<f64>,
    /// Half the width of the 99 % interval of that difference, in percent of A; none where it is unknown.
    pub noise: Option<f64>,
    pub verdict: Verdict,
}

/// Judges a pair: Welch's interval for measured figures; a figure that was counted, the same in every run, has no noise.
pub fn judge(pair: &Pair, threshold: f64) -> Judgement {
    let (a, b) = (pair.a, pair.b);
    if a.value.is_nan() || b.value.is_nan() {
        return Judgement { percent: None, noise: None, verdict: Verdict::Absent };
    }
    let difference = b.value - a.value;
    let percent = |value: f64| (a.value != 0.0).then(|| 100.0 * value / a.value.abs());
    let exact = is_counted(&pair.unit) && a.stdev == 0.0 && b.stdev == 0.0;
    let half = if exact { Some(0.0) } else { half_width(a, b) };
    let change = percent(difference);
    let verdict = match half {
        _ if difference == 0.0 => Verdict::Same,
        None => Verdict::Once,
        Some(half) if difference.abs() <= half => Verdict::Same,
        Some(_) => match pair.better {
            None => Verdict::Differs,
            Some(_) if change.is_some_and(|change| change.abs() <= threshold) => Verdict::Small,
            Some(better) if (better == Better::Higher) == (difference > 0.0) => Verdict::Better,
            Some(_) => Verdict::Worse,
        },
    };
    Judgement { percent: change, noise: half.and_then(percent), verdict }
}

/// Half the width of the 99 % interval of the difference of two means with unequal variances, in the figures' unit. The
/// figures may be medians: their own spread is no larger unless outliers make the deviation larger too, so the interval is
/// rather too wide than too narrow.
fn half_width(a: Figure, b: Figure) -> Option<f64> {
    if a.runs < 2 || b.runs < 2 {
        return None;
    }
    let part = |f: Figure| f.stdev * f.stdev / f.runs as f64;
    let (va, vb) = (part(a), part(b));
    let sum = va + vb;
    if sum == 0.0 {
        return Some(0.0);
    }
    let freedom = sum * sum / (va * va / (a.runs - 1) as f64 + vb * vb / (b.runs - 1) as f64);
    let t = match freedom {
        f if f >= 120.0 => T99_MANY,
        f => T99[(f as usize).clamp(1, T99.len()) - 1],
    };
    Some(t * sum.sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(unit: &str, better: Option<Better>, a: (f64, f64, usize), b: (f64, f64, usize)) -> Pair {
        let figure = |(value, stdev, runs)| Figure { value, stdev, runs };
        Pair::for_tests(unit, better, figure(a), figure(b))
    }

    fn verdict(unit: &str, better: Option<Better>, a: (f64, f64, usize), b: (f64, f64, usize)) -> Verdict {
        judge(&pair(unit, better, a, b), 5.0).verdict
    }

    /// The worked example of two samples of 10 with variances 4 and 16: 20 / (…): by hand.
    #[test]
    fn welch_by_hand() {
        let judged = judge(&pair("ns", Some(Better::Lower), (100.0, 2.0, 10), (104.0, 4.0, 10)), 3.0);
        // s²/n: 0.4 and 1.6; freedom 4 / (0.16/9 + 2.56/9) = 13.2; t(13) = 3.012; half = 3.012 √2 = 4.26.
        assert!(judged.noise.is_some_and(|noise| (noise - 3.012 * 2.0_f64.sqrt()).abs() < 1e-9), "{judged:?}");
        assert_eq!((judged.percent, judged.verdict), (Some(4.0), Verdict::Same));
    }

    #[test]
    fn worse_needs_both_the_threshold_and_the_noise() {
        let lower = Some(Better::Lower);
        assert_eq!(verdict("ns", lower, (100.0, 1.0, 10), (110.0, 1.0, 10)), Verdict::Worse);
        assert_eq!(verdict("ns", lower, (110.0, 1.0, 10), (100.0, 1.0, 10)), Verdict::Better);
        assert_eq!(verdict("ns", lower, (100.0, 0.1, 10), (103.0, 0.1, 10)), Verdict::Small);
        assert_eq!(verdict("ns", lower, (100.0, 30.0, 5), (110.0, 30.0, 5)), Verdict::Same);
        assert_eq!(verdict("GB/s", Some(Better::Higher), (100.0, 1.0, 10), (110.0, 1.0, 10)), Verdict::Better);
        assert_eq!(verdict("furlongs", None, (100.0, 1.0, 10), (110.0, 1.0, 10)), Verdict::Differs);
    }

    #[test]
    fn one_run_has_no_noise_to_judge_by_unless_it_counts() {
        let lower = Some(Better::Lower);
        assert_eq!(verdict("ns", lower, (100.0, 0.0, 1), (300.0, 0.0, 1)), Verdict::Once);
        assert_eq!(verdict("count", None, (100.0, 0.0, 1), (101.0, 0.0, 1)), Verdict::Differs);
        assert_eq!(verdict("per block", lower, (1.0, 0.0, 1), (2.0, 0.0, 1)), Verdict::Worse);
        assert_eq!(verdict("count", lower, (0.0, 0.0, 1), (1.0, 0.0, 1)), Verdict::Worse);
        assert_eq!(verdict("count", lower, (0.0, 0.0, 1), (0.0, 0.0, 1)), Verdict::Same);
        assert_eq!(verdict("ns", lower, (f64::NAN, 0.0, 1), (1.0, 0.0, 1)), Verdict::Absent);
    }
}
