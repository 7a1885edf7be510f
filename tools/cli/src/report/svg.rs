//! Writing SVG: elements and escaped text, and the style that plots share with the page.
//!
//! Colours are classes, never attributes, so that one plot serves light, dark and print.

use std::fmt::Write;

/// Colours and lines. Series colours are from the palette of Okabe and Ito, which people with any kind of colour vision
/// can tell apart, lightened in the dark; each series also has a shape of its own and is labelled where it ends.
pub const STYLE: &str = "\
:root{--ink:#1b1f24;--soft:#59636e;--grid:#d8dee4;--paper:#fff;--wash:#f5f7f9;--good:#0b6e4f;--bad:#b3261e;\
--s0:#0072b2;--s1:#d55e00;--s2:#009e73;--s3:#b0578d;--s4:#b87d00;--s5:#3a8fc4;--s6:#6b6b6b;--s7:#8c6d46}\
@media (prefers-color-scheme:dark){:root{--ink:#e8eaed;--soft:#a4acb5;--grid:#3a424b;--paper:#14181d;--wash:#1d232a;\
--good:#5fd3a6;--bad:#ff8a80;--s0:#5ab4f0;--s1:#ff8c42;--s2:#35c99a;--s3:#e79bc9;--s4:#f0b93a;--s5:#9bd4f5;--s6:#b4b4b4;\
--s7:#cdb08a}}\
@media print{:root{--ink:#000;--soft:#444;--grid:#ccc;--paper:#fff;--wash:#fff;--good:#0b6e4f;--bad:#b3261e;--s0:#0072b2;\
--s1:#d55e00;--s2:#009e73;--s3:#b0578d;--s4:#b87d00;--s5:#3a8fc4;--s6:#6b6b6b;--s7:#8c6d46}}\
.plot text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:var(--ink)}\
.plot .soft{fill:var(--soft)}.plot .head{font-weight:600}.plot .small{font-size:11px}\
.plot .grid{stroke:var(--grid);stroke-width:1}.plot .axis{stroke:var(--soft);stroke-width:1}\
.plot .mark{stroke:var(--soft);stroke-width:1.2;stroke-dasharray:5 3}\
.plot .line{fill:none;stroke-width:1.5;stroke-linejoin:round}.plot .own{stroke-width:3}\
.plot .leader{stroke-width:1;opacity:.6}.plot .whisker{stroke:var(--ink);stroke-width:1;opacity:.7}\
.plot .late{stroke-dasharray:6 3}\
.s0{stroke:var(--s0);fill:var(--s0)}.s1{stroke:var(--s1);fill:var(--s1)}.s2{stroke:var(--s2);fill:var(--s2)}\
.s3{stroke:var(--s3);fill:var(--s3)}.s4{stroke:var(--s4);fill:var(--s4)}.s5{stroke:var(--s5);fill:var(--s5)}\
.s6{stroke:var(--s6);fill:var(--s6)}.s7{stroke:var(--s7);fill:var(--s7)}\
@media print{svg,.bar{-webkit-print-color-adjust:exact;print-color-adjust:exact}}";

pub const COLOURS: usize = 8;

/// Text as it may stand in XML, HTML and attribute values.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // XML has no way to write other control characters.
            c if c.is_control() && !matches!(c, '\n' | '\t') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// A coordinate: a tenth of a unit is finer than any screen.
pub fn at(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

/// How wide a text is, about: fonts differ, and nobody measures them here.
pub fn width(text: &str) -> f64 {
    text.chars().count() as f64 * 7.0
}

#[derive(Debug)]
pub struct Svg {
    body: String,
    width: f64,
}

#[derive(Clone, Copy, Debug)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

impl Svg {
    pub fn new(width: f64) -> Self {
        Svg { body: String::new(), width }
    }

    pub fn line(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        let (x1, y1, x2, y2) = (at(from.0), at(from.1), at(to.0), at(to.1));
        self.push(format_args!("<line class=\"{class}\" x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\"/>"));
    }

    pub fn path(&mut self, class: &str, points: &[(f64, f64)]) {
        let mut d = String::new();
        for (index, (x, y)) in points.iter().enumerate() {
            d.push_str(if index == 0 { "M" } else { " L" });
            d.push_str(&format!("{} {}", at(*x), at(*y)));
        }
        self.push(format_args!("<path class=\"{class}\" d=\"{d}\" style=\"fill:none\"/>"));
    }

    /// A rectangle that says something when it is pointed at.
    pub fn rect(&mut self, class: &str, (x, y): (f64, f64), (w, h): (f64, f64), hint: &str) {
        let (x, y, w, h, hint) = (at(x), at(y), at(w), at(h), escape(hint));
        self.push(format_args!(
            "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{w}\" height=\"{h}\"><title>{hint}</title></rect>"
        ));
    }

    /// A marker of one of six shapes that says something when it is pointed at.
    pub fn marker(&mut self, class: &str, shape: usize, (x, y): (f64, f64), hint: &str) {
        let polygon = |corners: &[(f64, f64)]| {
            let corners: Vec<String> =
                corners.iter().map(|(dx, dy)| format!("{},{}", at(x + dx), at(y + dy))).collect();
            corners.join(" ")
        };
        let points = match shape % 6 {
            0 => {
                let (x, y, hint) = (at(x), at(y), escape(hint));
                return self.push(format_args!(
                    "<circle class=\"{class}\" cx=\"{x}\" cy=\"{y}\" r=\"3\"><title>{hint}</title></circle>"
                ));
            }
            1 => polygon(&[(-3., -3.), (3., -3.), (3., 3.), (-3., 3.)]),
            2 => polygon(&[(0., -4.), (4., 3.), (-4., 3.)]),
            3 => polygon(&[(0., -4.), (4., 0.), (0., 4.), (-4., 0.)]),
            4 => polygon(&[(0., 4.), (4., -3.), (-4., -3.)]),
            _ => polygon(&[(-4., -1.), (4., -1.), (4., 1.), (-4., 1.)]),
        };
        self.push(format_args!(
            "<polygon class=\"{class}\" points=\"{points}\"><title>{}</title></polygon>",
            escape(hint)
        ));
    }

    pub fn text(&mut self, class: &str, anchor: Anchor, (x, y): (f64, f64), text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let (x, y, text) = (at(x), at(y), escape(text));
        self.push(format_args!("<text class=\"{class}\" x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\">{text}</text>"));
    }

    fn push(&mut self, element: std::fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.body, "{element}");
    }

    /// The picture as an element of a page that has the style. `label` is what a screen reader says.
    pub fn inline(&self, height: f64, label: &str) -> String {
        let (w, h, label) = (at(self.width), at(height), escape(label));
        let attributes = format!("class=\"plot\" viewBox=\"0 0 {w} {h}\" role=\"img\" aria-label=\"{label}\"");
        format!("<svg {attributes}>\n{}</svg>\n", self.body)
    }
}
