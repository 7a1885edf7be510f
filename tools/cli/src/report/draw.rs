//! Lines over numbers, drawn by `poloto`: its elements have classes, so one picture serves light, dark and print. Bars are cells of the
//! table of figures.

use super::html::escape;
use super::plot::{Figure, Plot, number};
use poloto::build;

/// Values that differ by more than this factor need a logarithmic axis.
const WIDE: f64 = 30.0;

/// Colours from the palette of Okabe and Ito, which people with any kind of colour vision can tell apart, lightened in the dark.
pub const STYLE: &str = "\
:root{--ink:#1b1f24;--soft:#59636e;--grid:#d8dee4;--paper:#fff;--good:#0b6e4f;--bad:#b3261e;\
--s0:#0072b2;--s1:#d55e00;--s2:#009e73;--s3:#b0578d;--s4:#b87d00;--s5:#3a8fc4;--s6:#6b6b6b;--s7:#8c6d46}\
@media (prefers-color-scheme:dark){:root{--ink:#e8eaed;--soft:#a4acb5;--grid:#3a424b;--paper:#14181d;\
--good:#5fd3a6;--bad:#ff8a80;--s0:#5ab4f0;--s1:#ff8c42;--s2:#35c99a;--s3:#e79bc9;--s4:#f0b93a;--s5:#9bd4f5;--s6:#b4b4b4;\
--s7:#cdb08a}}\
@media print{:root{--ink:#000;--soft:#444;--grid:#ccc;--paper:#fff}.bar{print-color-adjust:exact}}\
.poloto{font:18px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;stroke-linejoin:round}\
.poloto_text{fill:var(--ink)}.poloto_name,.poloto_ticks.poloto_x{text-anchor:middle}.poloto_ticks.poloto_y{text-anchor:end}\
.poloto_imgs.poloto_ticks{stroke:var(--soft);fill:none}.poloto_grid{stroke:var(--grid)}.poloto_line{stroke-width:3}\
.poloto0{stroke:var(--s0)}.poloto1{stroke:var(--s1)}.poloto2{stroke:var(--s2)}.poloto3{stroke:var(--s3)}\
.poloto4{stroke:var(--s4)}.poloto5{stroke:var(--s5)}.poloto6{stroke:var(--s6)}.poloto7{stroke:var(--s7)}\
.poloto_background{fill:none}text.poloto_legend{stroke:none}.bar div{height:.6em;background:var(--s0)}";

/// The picture of a plot whose lines can be told apart, if it is one.
pub fn draw(plot: &Plot) -> Option<String> {
    let (lines, title) = (plot.lines()?, plot.x.as_ref()?.replace('_', " "));
    let bounds = |(least, most): (f64, f64), y: f64| (least.min(y), most.max(y));
    let (least, most) = plot.figures.iter().map(|figure| figure.y).fold((f64::INFINITY, f64::NEG_INFINITY), bounds);
    let log = least > 0.0 && most / least > WIDE;
    let height = |y: f64| if log { y.log10() } else { y };
    let ticks = if log { decades(least, most) } else { steps(least.min(0.0), most.max(0.0)) };
    let (low, high) = (*ticks.first()?, *ticks.last()?);
    let mut places: Vec<f64> = plot.figures.iter().map(|figure| figure.x).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let places: Vec<(f64, String)> = places.into_iter().map(|x| (plot.place(x), plot.place_text(x))).collect();
    let (first, last) = (places.first()?.0, places.last()?.0);
    let count = lines.len();
    let line = |(name, points): (&str, Vec<&Figure>)| {
        let points: Vec<_> = points.iter().map(|figure| (plot.place(figure.x), height(figure.y))).collect();
        build::plot(name.to_owned()).line(points)
    };
    let lines: Vec<_> = lines.into_iter().map(line).collect();
    let at: Vec<f64> = places.iter().map(|(x, _)| *x).collect();
    let place = move |x: &f64| places.iter().find(|(at, _)| at == x).map_or(String::new(), |(_, text)| text.clone());
    let unit = if log { format!("{} (logarithmic)", plot.unit) } else { plot.unit.clone() };
    let body = poloto::frame_build()
        .data(poloto::plots!(lines, build::markers([first, last], [low, high])))
        .map_xticks(|_| poloto::ticks::from_iter(at).with_tick_fmt(place))
        .map_yticks(|_| {
            poloto::ticks::from_iter(ticks).with_tick_fmt(move |y| number(if log { 10_f64.powf(*y) } else { *y }))
        })
        .build_and_label(("", title.as_str(), unit.as_str()))
        .headless()
        .render_string()
        .ok()?;
    // Several pictures stand on one page: none of their parts may have a name.
    let body = (0..count).fold(body, |body, index| body.replace(&format!(" id=\"poloto_plot{index}\""), ""));
    let label = escape(&format!("{}; {}", plot.title, plot.unit));
    Some(format!("<svg class=\"poloto\" viewBox=\"0 0 1050 500\" role=\"img\" aria-label=\"{label}\">{body}</svg>\n"))
}

/// The powers of ten around values, as exponents.
fn decades(least: f64, most: f64) -> Vec<f64> {
    (least.log10().floor() as i32..=most.log10().ceil() as i32).map(f64::from).collect()
}

/// Four to eight equal steps of 1, 2 or 5 times a power of ten around values.
fn steps(least: f64, most: f64) -> Vec<f64> {
    let span = if most > least { most - least } else { 1.0 };
    let power = 10_f64.powf((span / 8.0).log10().floor());
    let step = power * [1.0, 2.0, 5.0].into_iter().find(|digit| span / 8.0 / power <= *digit).unwrap_or(10.0);
    let (from, to) = ((least / step).floor() as i64, (most / step).ceil() as i64);
    (from..=to.max(from + 1)).map(|tick| tick as f64 * step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(points: &[(f64, f64)]) -> Plot {
        let figure = |(x, y): &(f64, f64)| Figure { series: "a <b>".to_owned(), x: *x, y: *y, stdev: 0.0 };
        let figures = points.iter().map(figure).collect();
        Plot { title: "p".to_owned(), unit: "GB/s".to_owned(), x: Some("size".to_owned()), figures }
    }

    #[test]
    fn a_curve_has_its_name_and_labels() {
        let text = draw(&plot(&[(4096.0, 0.0), (8192.0, 25.0), (16384.0, 50.0)])).expect("lines");
        for part in ["4KB", "8KB", "16KB", ">50<", ">0<", "a &lt;b&gt;", "size", "GB/s"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(!text.contains(" id=") && !text.contains("logarithmic"), "{text}");
        let wide = draw(&plot(&[(4096.0, 3.0), (8192.0, 1240.0)])).expect("lines");
        assert!(wide.contains("GB/s (logarithmic)") && wide.contains(">100<"), "{wide}");
    }

    #[test]
    fn steps_begin_and_end_at_labels() {
        assert_eq!(steps(0.0, 50.4), [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0]);
        assert_eq!((steps(0.0, 0.0).len(), decades(3.0, 1240.0)), (2, vec![0.0, 1.0, 2.0, 3.0, 4.0]));
        assert!(steps(-3.0, 0.0).contains(&0.0));
    }
}
