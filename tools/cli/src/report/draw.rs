//! Drawing plots: lines over numbers, bars over groups.

use super::axis::Axis;
use super::plot::{Plot, Point, Scale, Series, X, number, tick};
use super::svg::{Anchor, COLOURS, Svg, width};

/// Width of every picture. Small, so that text stays readable when a telephone shrinks it.
const WIDTH: f64 = 440.0;

const AREA: f64 = 250.0;

/// Labels of more letters than this are cut into lines.
const LABEL: usize = 20;

const TEXT: f64 = 14.0;

pub fn draw(plot: &Plot) -> (Svg, f64) {
    match &plot.x {
        X::Numbers(scale, title) => lines(plot, *scale, title),
        X::Groups(_) => bars(plot),
    }
}

/// The classes of a series: its colour, its weight, and dashes where colours come round again.
fn class(index: usize, series: &Series) -> String {
    let own = if series.own() { " own" } else { "" };
    let late = if index >= COLOURS { " late" } else { "" };
    format!("s{}{own}{late}", index % COLOURS)
}

/// What a figure says when it is pointed at.
fn hint(plot: &Plot, series: &Series, point: &Point) -> String {
    let place = plot.place_text(point.x);
    let names = [series.name.as_str(), place.as_str()];
    let names = names.into_iter().filter(|name| !name.is_empty()).collect::<Vec<_>>().join(", ");
    format!("{names}: {} ±{} {}", number(point.y), number(point.stdev), plot.unit)
}

/// A label in lines of at most [`LABEL`] letters where its words allow it.
fn cut(label: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in label.split_inclusive([' ', '_', '-', '+']) {
        let line = lines.last().map_or(0, |line| line.chars().count());
        if line > 0 && line + word.trim_end().chars().count() > LABEL {
            lines.push(String::new());
        }
        if let Some(line) = lines.last_mut() {
            line.push_str(word);
        }
    }
    lines.iter().map(|line| line.trim_end().to_owned()).collect()
}

/// How wide the widest label is: bold letters are wider.
fn widest(plot: &Plot, labels: &[Vec<String>]) -> f64 {
    let bold = |series: &Series| if series.own() { 1.2 } else { 1.0 };
    let all = plot.series.iter().zip(labels);
    all.flat_map(|(series, lines)| lines.iter().map(|line| bold(series) * width(line))).fold(0.0, f64::max)
}

fn lines(plot: &Plot, scale: Scale, title: &str) -> (Svg, f64) {
    let labels: Vec<Vec<String>> = plot.series.iter().map(|series| cut(&series.name)).collect();
    let widest = widest(plot, &labels);
    let (top, bottom) = (26.0, 26.0 + AREA);
    let axis = Axis::for_lines(plot.points().map(|point| point.y), bottom, top);
    let ticks = axis.ticks().into_iter().map(|tick| width(&self::tick(tick))).fold(0.0, f64::max);
    let (left, right) = (ticks + 10.0, WIDTH - widest.min(165.0) - 22.0);
    let mut svg = Svg::new(WIDTH);

    let unit = if axis.is_log() { format!("{} (logarithmic)", plot.unit_text()) } else { plot.unit_text() };
    svg.text("soft", Anchor::Start, (4.0, 13.0), &unit);
    for value in axis.ticks() {
        let y = axis.at(value);
        svg.line("grid", (left, y), (right, y));
        svg.text("soft small", Anchor::End, (left - 6.0, y + 4.0), &tick(value));
    }

    let places = plot.places();
    let (first, last) = (scale.place(places[0]), scale.place(places[places.len() - 1]));
    let at = |x: f64| left + 8.0 + (scale.place(x) - first) / (last - first).max(1e-9) * (right - left - 16.0);
    let mut free = f64::NEG_INFINITY;
    for place in &places {
        let x = at(*place);
        svg.line("axis", (x, bottom), (x, bottom + 4.0));
        let text = scale.text(*place);
        // Labels that would touch the one before are left out.
        if x - width(&text) / 2.0 < free {
            continue;
        }
        svg.text("soft small", Anchor::Middle, (x, bottom + 16.0), &text);
        let mut widest = width(&text);
        if scale == Scale::Order {
            let size = Scale::Bytes.text(4096.0 * place.exp2());
            svg.text("soft small", Anchor::Middle, (x, bottom + 29.0), &size);
            widest = widest.max(width(&size));
        }
        free = x + widest / 2.0 + 8.0;
    }
    svg.line("axis", (left, bottom), (right, bottom));
    let below = if scale == Scale::Order { bottom + 45.0 } else { bottom + 33.0 };
    svg.text("soft", Anchor::Middle, (f64::midpoint(left, right), below), title);

    let shown = plot.marks.iter().filter(|mark| (places[0]..=places[places.len() - 1]).contains(&mark.x));
    for (index, mark) in shown.enumerate() {
        let x = at(mark.x);
        svg.line("mark", (x, top), (x, bottom));
        // On the side with more room, one under the other.
        let y = bottom - 8.0 - index as f64 * TEXT;
        let (anchor, x) =
            if x > f64::midpoint(left, right) { (Anchor::End, x - 5.0) } else { (Anchor::Start, x + 5.0) };
        svg.text("small", anchor, (x, y), &mark.text);
    }

    // hugemm's own lines last, so that they are on top.
    let mut order: Vec<usize> = (0..plot.series.len()).collect();
    order.sort_by_key(|index| plot.series[*index].own());
    for index in order {
        let series = &plot.series[index];
        let class = class(index, series);
        let points: Vec<(f64, f64)> = series.points.iter().map(|point| (at(point.x), axis.at(point.y))).collect();
        svg.path(&format!("line {class}"), &points);
        for (point, place) in series.points.iter().zip(&points) {
            svg.marker(&format!("s{}", index % COLOURS), index, *place, &hint(plot, series, point));
        }
    }
    ends(&mut svg, plot, &labels, (right, top, bottom), &|point| (at(point.x), axis.at(point.y)));
    (svg, below + 10.0)
}

/// Names the lines where they end, moved apart where they would overlap.
fn ends(
    svg: &mut Svg,
    plot: &Plot,
    labels: &[Vec<String>],
    (right, top, bottom): (f64, f64, f64),
    at: &dyn Fn(&Point) -> (f64, f64),
) {
    let mut wanted: Vec<(usize, (f64, f64), f64)> = plot
        .series
        .iter()
        .enumerate()
        .filter_map(|(index, series)| {
            let end = at(series.points.last()?);
            Some((index, end, labels[index].len() as f64 * TEXT))
        })
        .collect();
    wanted.sort_by(|a, b| a.1.1.total_cmp(&b.1.1));
    let spans: Vec<(f64, f64)> = wanted.iter().map(|(_, end, height)| (end.1, *height)).collect();
    let middles = apart(&spans, top - 6.0, bottom + 6.0);
    for ((index, end, height), middle) in wanted.iter().zip(middles) {
        let series = &plot.series[*index];
        let class = class(*index, series);
        svg.line(&format!("leader {class}"), (end.0 + 4.0, end.1), (right + 8.0, middle));
        svg.marker(&format!("s{}", index % COLOURS), *index, (right + 10.0, middle), &series.name);
        for (line, text) in labels[*index].iter().enumerate() {
            let y = middle - height / 2.0 + (line as f64 + 0.78) * TEXT;
            let weight = if series.own() { "head small" } else { "small" };
            svg.text(weight, Anchor::Start, (right + 18.0, y), text);
        }
    }
}

/// The middles of labels of these heights, as near as may be to where they are wanted (ascending), without overlap and
/// within the border if they fit.
fn apart(spans: &[(f64, f64)], top: f64, bottom: f64) -> Vec<f64> {
    let mut middles: Vec<f64> = Vec::with_capacity(spans.len());
    let mut free = top;
    for (wanted, height) in spans {
        let middle = wanted.max(free + height / 2.0);
        free = middle + height / 2.0;
        middles.push(middle);
    }
    // What has been pushed out below pushes back.
    let mut limit = bottom;
    for (middle, (_, height)) in middles.iter_mut().zip(spans).rev() {
        *middle = middle.min(limit - height / 2.0);
        limit = *middle - height / 2.0;
    }
    middles
}

fn bars(plot: &Plot) -> (Svg, f64) {
    const BAR: f64 = 15.0;
    let labels: Vec<Vec<String>> = plot.series.iter().map(|series| cut(&series.name)).collect();
    let left = widest(plot, &labels).min(190.0) + 12.0;
    let figures = plot.points().map(|point| width(&number(point.y))).fold(0.0, f64::max);
    // The deviation belongs to the bar.
    let ends = plot.points().map(|point| point.y + if point.y < 0.0 { -point.stdev } else { point.stdev });
    let axis = Axis::for_bars(ends, left, WIDTH - figures - 14.0);
    let zero = axis.at(0.0);
    let mut svg = Svg::new(WIDTH);
    svg.text("soft", Anchor::Start, (4.0, 13.0), &plot.unit_text());
    let mut y = 22.0;
    for place in plot.places() {
        let group = plot.place_text(place);
        if !group.is_empty() {
            y += 4.0;
            svg.text("head", Anchor::Start, (4.0, y + 11.0), &group);
            y += 18.0;
        }
        let from = y;
        for (index, series) in plot.series.iter().enumerate() {
            let Some(point) = series.at(place) else { continue };
            let height = (labels[index].len() as f64 * TEXT).max(BAR) + 4.0;
            let middle = y + height / 2.0;
            for (line, text) in labels[index].iter().enumerate() {
                let base = middle - labels[index].len() as f64 * TEXT / 2.0 + (line as f64 + 0.78) * TEXT;
                let weight = if series.own() { "head small" } else { "small" };
                svg.text(weight, Anchor::End, (left - 6.0, base), text);
            }
            let end = axis.at(point.y);
            let size = ((end - zero).abs().max(0.5), BAR - 3.0);
            let class = format!("bar s{}", index % COLOURS);
            svg.rect(&class, (zero.min(end), middle - size.1 / 2.0), size, &hint(plot, series, point));
            let (low, high) = (axis.at(point.y - point.stdev), axis.at(point.y + point.stdev));
            if point.stdev > 0.0 {
                svg.line("whisker", (low, middle), (high, middle));
            }
            let text = number(point.y);
            svg.text("small", Anchor::Start, (zero.max(high) + 5.0, middle + 4.0), &text);
            y += height;
        }
        svg.line("axis", (zero, from), (zero, y));
        y += 4.0;
    }
    (svg, y + 4.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(x: X, series: &[(&str, &[(f64, f64)])]) -> Plot {
        let series = series.iter().map(|(name, points)| Series {
            name: (*name).to_owned(),
            points: points.iter().map(|(x, y)| Point { x: *x, y: *y, stdev: 0.0 }).collect(),
        });
        Plot {
            id: "p".to_owned(),
            title: "p".to_owned(),
            note: "",
            x,
            unit: "GB/s".to_owned(),
            better: None,
            series: series.collect(),
            marks: Vec::new(),
        }
    }

    /// Three sizes, each twice as large: equal steps to the right; 0, 25 and 50 of 50: the bottom, the middle, the top.
    #[test]
    fn a_known_curve_has_known_coordinates() {
        let points = [(4096.0, 0.0), (8192.0, 25.0), (16384.0, 50.0)];
        let (svg, height) = draw(&plot(X::Numbers(Scale::Bytes, "size".to_owned()), &[("ab", &points)]));
        let text = svg.inline(height, "p");
        // The area is 2 × 7 + 10 + 8 to 440 - 2 × 7 - 22 - 8 wide and 26 to 276 high.
        assert_eq!(f64::midpoint(32.0, 396.0), 214.0);
        let path = "M32 276 L214 151 L396 26";
        assert!(text.contains(path), "{path} in {text}");
        for label in ["4KB", "8KB", "16KB", ">50<", ">0<"] {
            assert!(text.contains(label), "{label}");
        }
    }

    #[test]
    fn bars_are_as_long_as_their_figures() {
        let (svg, height) =
            draw(&plot(X::Groups(vec!["g".to_owned()]), &[("ab", &[(0.0, 10.0)]), ("cd", &[(0.0, 5.0)])]));
        let text = svg.inline(height, "p");
        // From 2 × 7 + 12 to 440 - 2 × 7 - 14.
        assert!(text.contains("width=\"386\"") && text.contains("width=\"193\""), "{text}");
    }

    #[test]
    fn labels_do_not_overlap_and_stay_inside() {
        let middles = apart(&[(10.0, 14.0), (12.0, 14.0), (13.0, 28.0)], 0.0, 200.0);
        assert_eq!(middles, [10.0, 24.0, 45.0]);
        let middles = apart(&[(90.0, 14.0), (99.0, 14.0)], 0.0, 100.0);
        assert_eq!(middles, [79.0, 93.0]);
    }

    #[test]
    fn long_labels_are_cut_where_words_end() {
        assert_eq!(cut("buddy_system_allocator"), ["buddy_system_", "allocator"]);
        assert_eq!(cut("hugemm, calibrated policy"), ["hugemm, calibrated", "policy"]);
        assert_eq!(cut("shrinking, 6.12.107+deb13-cloud-amd64"), ["shrinking, 6.12.107+", "deb13-cloud-amd64"]);
        assert_eq!(cut("short"), ["short"]);
        assert_eq!(cut("ÄÖÜäöüÄÖÜäöüÄÖÜäöüÄÖÜäöü").len(), 1);
    }
}
