//! A struct's value with some fields changed.

/// A value with some of its public fields changed. What settings and statistics consist of may grow, so that other crates do not write
/// them out: they begin with a constructor's value.
///
/// ```
/// use hugemm_base::{CounterSnapshot, with};
/// let units = 7;
/// let counted = with!(CounterSnapshot::default(), fences = 1, units);
/// assert_eq!((counted.fences, counted.units, counted.reschedules), (1, 7, 0));
/// ```
#[macro_export]
macro_rules! with {
    ($value:expr, $($field:ident $(= $to:expr)?),+ $(,)?) => {{
        let mut value = $value;
        $(value.$field = $crate::with!(@ $field $($to)?);)+
        value
    }};
    (@ $field:ident) => { $field };
    (@ $field:ident $to:expr) => { $to };
}
