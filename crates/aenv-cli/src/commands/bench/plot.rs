//! Plots: their data in the report, and pictures of it.

use std::fmt::Write;

use serde_json::{Value, json};

use super::html::escape;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 110.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 40.0;
const COLOURS: [&str; 6] = ["#1f6feb", "#d1242f", "#2da44e", "#bf8700", "#8250df", "#57606a"];

/// A plot of lines. `x`, `y`: what the axes show.
pub(super) fn plot(title: &str, x: &str, y: &str, lines: &[Value]) -> Value {
    json!({ "title": title, "x": x, "y": y, "lines": lines })
}

/// A line through the rows that have both fields: `[x, y, n]` for each.
pub(super) fn line(name: &str, rows: &[Value], x: &str, y: &str) -> Value {
    let points = rows.iter().filter(|row| row[y].is_number()).map(|row| json!([row[x], row[y], row["n"]]));
    json!({ "name": name, "points": points.collect::<Vec<_>>() })
}

/// The picture of a plot, as an SVG element. Empty for a plot without points.
pub(super) fn svg(plot: &Value) -> String {
    let lines: Vec<(String, Vec<[f64; 3]>)> = plot["lines"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|line| (text(&line["name"]), points(line)))
        .collect();
    let all = || lines.iter().flat_map(|(_, points)| points);
    let (Some(x_top), Some(y_top)) = (
        all().map(|point| point[0]).max_by(f64::total_cmp),
        all().map(|point| point[1]).max_by(f64::total_cmp),
    ) else {
        return String::new();
    };
    let (x_step, y_step) = (step(x_top), step(y_top));
    let end = |top: f64, step: f64| (top / step).ceil().max(1.0) * step;
    let (x_top, y_top) = (end(x_top, x_step), end(y_top, y_step));
    let across = |x: f64| LEFT + x / x_top * (WIDTH - LEFT - RIGHT);
    let up = |y: f64| HEIGHT - BOTTOM - y / y_top * (HEIGHT - TOP - BOTTOM);

    let mut svg = format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">");
    for y in ticks(y_top, y_step) {
        let (at, right) = (up(y), WIDTH - RIGHT);
        push(
            &mut svg,
            format_args!("<line x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{right}\" y2=\"{at:.1}\" class=\"grid\"/>"),
        );
        push(
            &mut svg,
            format_args!("<text x=\"{:.1}\" y=\"{:.1}\" class=\"end\">{y}</text>", LEFT - 6.0, at + 4.0),
        );
    }
    for x in ticks(x_top, x_step) {
        push(
            &mut svg,
            format_args!(
                "<text x=\"{:.1}\" y=\"{:.1}\" class=\"middle\">{x}</text>",
                across(x),
                HEIGHT - 24.0
            ),
        );
    }
    let middle = LEFT + (WIDTH - LEFT - RIGHT) / 2.0;
    let labels = [(middle, HEIGHT - 6.0, "middle", &plot["x"]), (4.0, TOP + 8.0, "start", &plot["y"])];
    for (x, y, class, label) in labels {
        push(
            &mut svg,
            format_args!("<text x=\"{x}\" y=\"{y}\" class=\"{class}\">{}</text>", escape(&text(label))),
        );
    }
    for (number, (name, points)) in lines.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        let path: Vec<String> =
            points.iter().map(|[x, y, _]| format!("{:.1},{:.1}", across(*x), up(*y))).collect();
        push(
            &mut svg,
            format_args!(
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
                path.join(" ")
            ),
        );
        let name = escape(name);
        for [x, y, n] in points {
            push(
                &mut svg,
                format_args!(
                    "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"><title>{name}: {y} at {x} (n = {n})</title></circle>",
                    across(*x),
                    up(*y),
                ),
            );
        }
        let at = TOP + 12.0 + 18.0 * f64::from(u16::try_from(number).unwrap_or(u16::MAX));
        let left = WIDTH - RIGHT + 12.0;
        push(&mut svg, format_args!("<text x=\"{left}\" y=\"{at}\" fill=\"{colour}\">{name}</text>"));
    }
    svg.push_str("</svg>");
    svg
}

/// The rows' times side by side: from p50 (a dot) to p99, and the floor (a mark). Empty when no row has a time.
pub(super) fn bars(rows: &[Value]) -> String {
    let timed: Vec<&Value> = rows.iter().filter(|row| row["p50"].is_number()).collect();
    let number = |row: &Value, field: &str| row[field].as_f64().filter(|number| *number >= 0.0);
    let Some(top) = timed.iter().filter_map(|row| number(row, "p99")).max_by(f64::total_cmp) else {
        return String::new();
    };
    let left = 280.0;
    let step = step(top);
    let top = (top / step).ceil().max(1.0) * step;
    let across = |ms: f64| left + (ms / top).min(1.0) * (WIDTH - left - 20.0);
    let down = |line: usize| 24.0 + 22.0 * line as f64;
    let height = down(timed.len()) + 16.0;
    let mut svg = format!("<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">");
    for (line, row) in timed.iter().enumerate() {
        let y = down(line);
        let name = escape(&text(&row["operation"]));
        push(
            &mut svg,
            format_args!("<text x=\"{}\" y=\"{}\" class=\"end\">{name}</text>", left - 12.0, y + 4.0),
        );
        let (p50, p99) = (number(row, "p50").unwrap_or(0.0), number(row, "p99").unwrap_or(0.0));
        push(
            &mut svg,
            format_args!(
                "<line x1=\"{0:.1}\" y1=\"{y}\" x2=\"{1:.1}\" y2=\"{y}\" stroke=\"{2}\" stroke-width=\"3\"/>\
                 <circle cx=\"{0:.1}\" cy=\"{y}\" r=\"5\" fill=\"{2}\"><title>{name}: p50 {p50} ms, p99 {p99} ms</title></circle>",
                across(p50),
                across(p99),
                COLOURS[0],
            ),
        );
        if let Some(floor) = number(row, "floorMs") {
            push(
                &mut svg,
                format_args!(
                    "<line x1=\"{0:.1}\" y1=\"{1}\" x2=\"{0:.1}\" y2=\"{2}\" stroke=\"{3}\" stroke-width=\"3\">\
                     <title>floor {floor} ms</title></line>",
                    across(floor),
                    y - 8.0,
                    y + 8.0,
                    COLOURS[1],
                ),
            );
        }
    }
    for ms in ticks(top, step) {
        push(
            &mut svg,
            format_args!("<text x=\"{:.1}\" y=\"{}\" class=\"middle\">{ms}</text>", across(ms), height - 4.0),
        );
    }
    svg.push_str("</svg>");
    svg
}

fn push(svg: &mut String, text: std::fmt::Arguments<'_>) {
    svg.write_fmt(text).expect("a String takes everything");
}

fn points(line: &Value) -> Vec<[f64; 3]> {
    let point = |point: &Value| {
        let number = |index: usize| point[index].as_f64().filter(|number| *number >= 0.0);
        Some([number(0)?, number(1)?, number(2).unwrap_or(1.0)])
    };
    line["points"].as_array().into_iter().flatten().filter_map(point).collect()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// The distance between marks of an axis that ends here: 1, 2 or 5 times a power of ten, and five to ten of them.
fn step(top: f64) -> f64 {
    let top = if top > 0.0 { top } else { 1.0 };
    let power = 10f64.powf((top / 10.0).log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .map(|times| times * power)
        .into_iter()
        .find(|step| top / step <= 10.0)
        .unwrap_or(power * 10.0)
}

fn ticks(top: f64, step: f64) -> impl Iterator<Item = f64> {
    (0..=10)
        .map(move |number| super::series::round(f64::from(number) * step))
        .filter(move |tick| *tick <= top * 1.001)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_few_round_marks() {
        for (top, wanted) in
            [(10.0, 1.0), (64.0, 10.0), (1024.0, 200.0), (0.7, 0.1), (0.0, 0.1), (99.0, 10.0)]
        {
            assert!((step(top) - wanted).abs() < 1e-9, "{top}: {}", step(top));
        }
    }

    #[test]
    fn a_picture_is_whole_and_escaped() {
        let lines = [json!({ "name": "<p50>", "points": [[0, 5, 3], [16, 9, 3], ["x", 1]] })];
        let picture = svg(&plot("t", "a & b", "ms", &lines));
        assert!(picture.contains("&lt;p50&gt;: 9 at 16 (n = 3)") && picture.contains("a &amp; b"));
        assert_eq!(picture.matches("<circle").count(), 2);
        assert!(!picture.contains("NaN") && !picture.contains("inf"));
        let rows =
            [json!({ "operation": "<a>", "p50": 2, "p99": 4, "floorMs": 9 }), json!({ "operation": "b" })];
        let picture = bars(&rows);
        assert!(picture.contains("&lt;a&gt;: p50 2 ms, p99 4 ms") && picture.contains("floor 9 ms"));
        assert_eq!((picture.matches("<circle").count(), bars(&rows[1..]).as_str()), (1, ""));
        assert_eq!(svg(&plot("t", "x", "y", &[])), "");
        let origin = svg(&plot("t", "x", "y", &[json!({ "name": "a", "points": [[0, 0, 1]] })]));
        assert!(origin.contains("<circle") && !origin.contains("NaN"));
    }
}
