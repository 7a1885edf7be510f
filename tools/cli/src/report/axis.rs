//! Where values lie on a vertical axis or along a bar, and which of them are labelled.

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Axis {
    low: f64,
    high: f64,
    log: bool,
    from: f64,
    to: f64,
}

/// Values that differ by more than this factor need a logarithmic axis.
const WIDE: f64 = 30.0;

impl Axis {
    /// An axis for lines through `values`, from pixel `from` (the least) to `to`: logarithmic where values differ by much.
    pub fn for_lines(values: impl Iterator<Item = f64> + Clone, from: f64, to: f64) -> Self {
        let least = values.clone().fold(f64::INFINITY, f64::min);
        let most = values.fold(f64::NEG_INFINITY, f64::max);
        if least > 0.0 && most / least > WIDE {
            // To the next of 1, 2, 5 below and above, so that the first and the last line are labelled.
            let (low, high) = (floor125(least), ceil125(most));
            return Axis { low, high, log: true, from, to };
        }
        Self::linear(least, most, from, to)
    }

    /// An axis for bars: from zero, whatever the values.
    pub fn for_bars(values: impl Iterator<Item = f64> + Clone, from: f64, to: f64) -> Self {
        let least = values.clone().fold(0.0, f64::min);
        let most = values.fold(0.0, f64::max);
        Axis { low: least, high: if most > least { most } else { least + 1.0 }, log: false, from, to }
    }

    fn linear(least: f64, most: f64, from: f64, to: f64) -> Self {
        let (least, most) = (least.min(0.0), most.max(0.0));
        let step = step(most - least);
        let high = (most / step).ceil() * step;
        let low = (least / step).floor() * step;
        Axis { low, high: if high > low { high } else { low + 1.0 }, log: false, from, to }
    }

    pub fn is_log(&self) -> bool {
        self.log
    }

    /// The pixel of a value; values outside lie on the border.
    pub fn at(&self, value: f64) -> f64 {
        let share = if self.log {
            (value.max(self.low) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        self.from + share.clamp(0.0, 1.0) * (self.to - self.from)
    }

    pub fn ticks(&self) -> Vec<f64> {
        if !self.log {
            let step = step(self.high - self.low);
            let count = ((self.high - self.low) / step).round() as i32;
            return (0..=count).map(|i| self.low + f64::from(i) * step).collect();
        }
        let decades = (self.high / self.low).log10();
        let digits: &[f64] = if decades <= 2.5 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let from = self.low.log10().floor() as i32;
        let to = self.high.log10().ceil() as i32;
        let all = (from..=to).flat_map(|exponent| digits.iter().map(move |digit| digit * 10_f64.powi(exponent)));
        // A little room: powers of ten are not exact.
        all.filter(|tick| *tick >= self.low * 0.999 && *tick <= self.high * 1.001).collect()
    }
}

/// A step of 1, 2 or 5 times a power of ten that divides a span into four to eight parts.
fn step(span: f64) -> f64 {
    if span <= 0.0 || !span.is_finite() { 1.0 } else { ceil125(span / 8.0) }
}

/// The next 1, 2 or 5 times a power of ten, from `value` on.
fn ceil125(value: f64) -> f64 {
    let power = 10_f64.powf(value.log10().floor());
    let digit = value / power;
    power * [1.0, 2.0, 5.0].into_iter().find(|d| digit <= *d * 1.000_001).unwrap_or(10.0)
}

/// The last one up to `value`.
fn floor125(value: f64) -> f64 {
    let power = 10_f64.powf(value.log10().floor());
    let digit = value / power;
    power * [5.0, 2.0].into_iter().find(|d| digit >= *d * 0.999_999).unwrap_or(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linear_axes_begin_at_zero_and_end_at_a_label() {
        let axis = Axis::for_lines([12.0, 50.4].into_iter(), 100.0, 0.0);
        assert_eq!(axis.ticks(), [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0]);
        assert_eq!((axis.at(0.0), axis.at(30.0), axis.at(60.0), axis.at(99.0)), (100.0, 50.0, 0.0, 0.0));
    }

    #[test]
    fn wide_ranges_are_logarithmic() {
        let axis = Axis::for_lines([3.0, 1240.0].into_iter(), 0.0, 300.0);
        assert!(axis.is_log());
        let ticks = axis.ticks();
        assert_eq!((ticks[0].round(), ticks[ticks.len() - 1].round()), (10.0, 1000.0));
        assert!((axis.at(2.0) - 0.0).abs() < 1e-9 && (axis.at(2000.0) - 300.0).abs() < 1e-9);
        assert!((axis.at(20.0) - 100.0).abs() < 1e-9);
    }

    #[test]
    fn nothing_and_sameness_do_no_harm() {
        for values in [vec![], vec![0.0], vec![7.0, 7.0], vec![-3.0, -3.0]] {
            let axis = Axis::for_lines(values.iter().copied(), 0.0, 1.0);
            assert!(axis.ticks().len() >= 2 && axis.at(0.0).is_finite(), "{values:?}: {axis:?}");
            assert!(Axis::for_bars(values.into_iter(), 0.0, 1.0).at(1.0).is_finite());
        }
    }
}
