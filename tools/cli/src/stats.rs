//! Statistics over repeated runs.

/// Values of one quantity over several runs.
#[derive(Clone, Debug, Default)]
pub struct Samples(Vec<f64>);

impl FromIterator<f64> for Samples {
    fn from_iter<I: IntoIterator<Item = f64>>(values: I) -> Self {
        Samples(values.into_iter().collect())
    }
}

impl Samples {
    /// What was measured or counted once.
    pub fn once(value: f64) -> Self {
        Samples(vec![value])
    }

    pub fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    pub fn runs(&self) -> usize {
        self.0.len()
    }

    /// The arithmetic mean; 0 without runs.
    pub fn mean(&self) -> f64 {
        if self.0.is_empty() { 0.0 } else { self.0.iter().sum::<f64>() / self.0.len() as f64 }
    }

    /// The sample standard deviation; 0 with fewer than two runs.
    pub fn stdev(&self) -> f64 {
        let n = self.0.len();
        if n < 2 {
            return 0.0;
        }
        let mean = self.mean();
        (self.0.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1) as f64).sqrt()
    }

    pub fn stdev_percent(&self) -> f64 {
        let mean = self.mean();
        if mean == 0.0 { 0.0 } else { 100.0 * self.stdev() / mean }
    }

    /// The middle value (the mean of the two middle ones); 0 without runs.
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        match sorted.len() {
            0 => 0.0,
            n if n % 2 == 1 => sorted[n / 2],
            n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
        }
    }

    /// The values of every other run, from the first on and from the second on; with one run that run twice.
    ///
    /// What is chosen for being largest or smallest among noisy figures is so by luck in part. Chosen by one half and measured by
    /// the other, it is not.
    pub fn halves(&self) -> [Samples; 2] {
        let from = |first| Samples(self.0.iter().copied().skip(first).step_by(2).collect());
        [from(0), from(usize::from(self.runs() > 1))]
    }

    /// Every value converted, as from one unit to another.
    pub fn map(&self, f: impl Fn(f64) -> f64) -> Samples {
        Samples(self.0.iter().copied().map(f).collect())
    }

    /// The value by value quotient with another quantity measured in the same runs: noise that hits both sides of a run
    /// cancels out.
    pub fn per_run_ratio(&self, other: &Samples) -> Samples {
        Samples(self.0.iter().zip(&other.0).map(|(a, b)| if *b == 0.0 { 0.0 } else { a / b }).collect())
    }
}

/// Two-sided 95 % quantiles of Student's t by degrees of freedom, from 1 on; of more than these, 2 is near enough.
const T95: [f64; 24] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064,
];

/// By how much a figure of so many runs is uncertain, with 95 % confidence; 0 where there was one.
pub fn margin(stdev: f64, runs: usize) -> f64 {
    let t = T95.get(runs.wrapping_sub(2)).copied().unwrap_or(2.0);
    if runs < 2 { 0.0 } else { t * stdev / (runs as f64).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(values: &[f64]) -> Samples {
        values.iter().copied().collect()
    }

    #[test]
    fn figures_of_known_data() {
        let s = samples(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]);
        assert_eq!((s.mean(), s.median(), s.runs()), (5.0, 4.5, 8));
        assert!((s.stdev() - (32.0_f64 / 7.0).sqrt()).abs() < 1e-12);
        assert_eq!(samples(&[3.0, 1.0, 2.0]).median(), 2.0);
    }

    #[test]
    fn few_runs_have_no_deviation() {
        assert_eq!((samples(&[]).mean(), samples(&[]).median(), samples(&[7.0]).stdev()), (0.0, 0.0, 0.0));
    }

    #[test]
    fn halves_share_no_run() {
        let [first, second] = samples(&[1.0, 2.0, 3.0, 4.0, 5.0]).halves();
        assert_eq!((first.0, second.0), (vec![1.0, 3.0, 5.0], vec![2.0, 4.0]));
        assert_eq!(samples(&[7.0]).halves().map(|half| half.0), [[7.0], [7.0]]);
    }

    #[test]
    fn ratios_pair_runs() {
        let r = samples(&[10.0, 20.0]).per_run_ratio(&samples(&[5.0, 10.0]));
        assert_eq!((r.median(), r.stdev()), (2.0, 0.0));
    }
}
