//! What a plot shows, before anything is drawn: series of figures over numbers or over groups.

use crate::units::Better;
use hugemm_workloads::size::Size;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Bytes, logarithmic.
    Bytes,
    /// Orders of blocks, each twice as large as the one before.
    Order,
    /// Counts, such as CPUs, logarithmic.
    Count,
}

impl Scale {
    /// Where a value lies, in equal steps.
    pub fn place(self, x: f64) -> f64 {
        match self {
            Scale::Order => x,
            Scale::Bytes | Scale::Count => x.max(f64::MIN_POSITIVE).log2(),
        }
    }

    /// A value as people write it.
    pub fn text(self, x: f64) -> String {
        match self {
            Scale::Bytes => Size(x as u64).rounded(),
            Scale::Order | Scale::Count => format!("{x}"),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum X {
    /// Numbers, with the axis's title.
    Numbers(Scale, String),
    /// Named groups, in this order; a point's `x` is the place of its group.
    Groups(Vec<String>),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    pub x: f64,
    pub y: f64,
    pub stdev: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    pub name: String,
    /// Its points, by ascending `x`.
    pub points: Vec<Point>,
}

impl Series {
    /// Whether it is hugemm's own among others: it is drawn with more weight.
    pub fn own(&self) -> bool {
        self.name.starts_with("hugemm") || self.name == "policy"
    }

    pub fn at(&self, x: f64) -> Option<&Point> {
        self.points.iter().find(|point| point.x == x)
    }
}

/// Something worth seeing at a place of the horizontal axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Mark {
    pub x: f64,
    pub text: String,
}

/// One plot, and all that its table has.
#[derive(Clone, Debug, PartialEq)]
pub struct Plot {
    /// A name for files and links: small letters, digits and hyphens.
    pub id: String,
    pub title: String,
    /// What a reader should know.
    pub note: &'static str,
    pub x: X,
    pub unit: String,
    pub better: Option<Better>,
    pub series: Vec<Series>,
    pub marks: Vec<Mark>,
}

/// More bars than this are no picture any more; their table remains.
const MOST_BARS: usize = 48;

/// More lines than this cannot be told apart.
const MOST_LINES: usize = 12;

impl Plot {
    /// Every place on the horizontal axis that has a figure, ascending.
    pub fn places(&self) -> Vec<f64> {
        let mut places: Vec<f64> = self.points().map(|point| point.x).collect();
        places.sort_by(f64::total_cmp);
        places.dedup();
        places
    }

    pub fn points(&self) -> impl Iterator<Item = &Point> + Clone {
        self.series.iter().flat_map(|series| &series.points)
    }

    pub fn place_text(&self, x: f64) -> String {
        match &self.x {
            X::Numbers(scale, _) => scale.text(x),
            X::Groups(names) => names.get(x as usize).cloned().unwrap_or_default(),
        }
    }

    /// The title of the vertical axis: the unit, and which way is better.
    pub fn unit_text(&self) -> String {
        match self.better {
            Some(Better::Lower) => format!("{}, lower is better", self.unit),
            Some(Better::Higher) => format!("{}, higher is better", self.unit),
            None => self.unit.clone(),
        }
    }

    /// Whether there is something to see: two figures at least, and not too many to tell apart.
    pub fn is_drawable(&self) -> bool {
        let points = self.points().count();
        match self.x {
            X::Numbers(..) => points > 1 && self.series.len() <= MOST_LINES,
            X::Groups(_) => points > 1 && points <= MOST_BARS,
        }
    }

    /// Lines through fewer than three places say nothing that bars do not say better.
    pub fn with_bars_for_few_places(mut self) -> Self {
        let places = self.places();
        let X::Numbers(scale, title) = &self.x else { return self };
        if places.len() >= 3 {
            return self;
        }
        let names = places.iter().map(|place| match scale {
            Scale::Bytes => scale.text(*place),
            Scale::Order => format!("order {place}"),
            // 1 CPU, 2 CPUs.
            Scale::Count if *place == 1.0 => format!("{place} {}", title.trim_end_matches('s')),
            Scale::Count => format!("{place} {title}"),
        });
        self.x = X::Groups(names.collect());
        for point in self.series.iter_mut().flat_map(|series| &mut series.points) {
            point.x = places.iter().position(|place| *place == point.x).unwrap_or(0) as f64;
        }
        self.marks.clear();
        self
    }

    /// The table: a head, then a line for each place (numbers) or each series (groups). Cells are figures.
    pub fn table(&self) -> (Vec<String>, Vec<Vec<String>>) {
        let cell = |series: &Series, place: f64| series.at(place).map_or(String::new(), cell);
        let places = self.places();
        match &self.x {
            X::Numbers(_, title) => {
                let heads = std::iter::once(title.clone()).chain(self.series.iter().map(|s| s.name.clone()));
                let line = |place: &f64| {
                    let cells = self.series.iter().map(|series| cell(series, *place));
                    std::iter::once(self.place_text(*place)).chain(cells).collect()
                };
                (heads.collect(), places.iter().map(line).collect())
            }
            X::Groups(_) => {
                let heads = places.iter().map(|place| match self.place_text(*place) {
                    name if name.is_empty() => self.unit.clone(),
                    name => name,
                });
                let line = |series: &Series| {
                    let cells = places.iter().map(|place| cell(series, *place));
                    std::iter::once(series.name.clone()).chain(cells).collect()
                };
                (std::iter::once(String::new()).chain(heads).collect(), self.series.iter().map(line).collect())
            }
        }
    }
}

pub fn cell(point: &Point) -> String {
    match point.stdev {
        0.0 => number(point.y),
        stdev => format!("{} ±{}", number(point.y), number(stdev)),
    }
}

/// A number on an axis: thousands and millions by their letters.
pub fn tick(value: f64) -> String {
    match value.abs() {
        size if size >= 1e9 => format!("{}G", number(value / 1e9)),
        size if size >= 1e6 => format!("{}M", number(value / 1e6)),
        size if size >= 1e4 => format!("{}k", number(value / 1e3)),
        // Ticks are 1, 2 or 5 times a power of ten: no digits beyond those.
        size if size > 0.0 && size < 0.01 => format!("{value:.0e}"),
        _ => format!("{}", (value * 1e6).round() / 1e6),
    }
}

/// A number with three significant digits, all of them if it is whole.
pub fn number(value: f64) -> String {
    if value.is_nan() {
        return "–".to_owned();
    }
    let size = value.abs();
    match size {
        s if s < 1e15 && (s >= 100.0 || value.fract() == 0.0) => grouped(value.round_ties_even() as i64),
        s if s >= 10.0 => format!("{value:.1}"),
        s if s >= 0.01 => format!("{value:.2}"),
        s if s >= 0.001 => format!("{value:.3}"),
        _ => format!("{value:.1e}"),
    }
}

/// All digits, those of large numbers in threes with narrow spaces that do not break.
fn grouped(value: i64) -> String {
    let digits = value.to_string();
    if value.abs() < 10_000 {
        return digits;
    }
    let mut text = String::new();
    for (index, digit) in digits.char_indices() {
        if index > 0 && digits[..index] != *"-" && (digits.len() - index).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_digits_they_bear() {
        for (value, text) in
            [(0.0, "0"), (6.0, "6"), (0.123, "0.12"), (12.34, "12.3"), (1234.5, "1234"), (1e-4, "1.0e-4")]
        {
            assert_eq!(number(value), text);
        }
        assert_eq!(number(5_024_613.2), "5\u{202f}024\u{202f}613");
        assert_eq!(number(-123_456.0), "-123\u{202f}456");
        assert_eq!((number(4096.0), number(f64::NAN)), ("4096".to_owned(), "–".to_owned()));
    }

    #[test]
    fn two_places_become_groups() {
        let point = |x, y| Point { x, y, stdev: 0.0 };
        let plot = Plot {
            id: String::new(),
            title: String::new(),
            note: "",
            x: X::Numbers(Scale::Count, "CPUs".to_owned()),
            unit: "ns".to_owned(),
            better: None,
            series: vec![Series { name: "a".to_owned(), points: vec![point(1.0, 5.0), point(4.0, 6.0)] }],
            marks: Vec::new(),
        };
        let plot = plot.with_bars_for_few_places();
        assert_eq!(plot.x, X::Groups(vec!["1 CPU".to_owned(), "4 CPUs".to_owned()]));
        assert_eq!(plot.table().1, [["a", "5", "6"]]);
    }
}
