//! Line charts in SVG.

use plotters::coord::ranged1d::ValueFormatter;
use plotters::prelude::*;
use std::path::Path;

/// A curve.
pub struct Line {
    /// What the legend calls it; several may have one name between them.
    pub name: Option<String>,
    pub colour: RGBColor,
    /// Abscissa and ordinate.
    pub points: Vec<(f64, f64)>,
}

/// A chart: axes from zero.
pub struct Chart<'a> {
    pub title: &'a str,
    pub x: &'a str,
    pub y: &'a str,
    /// Where the axes end.
    pub ends: (f64, f64),
    /// How ordinates are written.
    pub ordinate: fn(&f64) -> String,
    /// An ordinate that is marked.
    pub mark: Option<f64>,
    pub lines: Vec<Line>,
}

/// Colours that colour-blind readers tell apart (Okabe and Ito).
pub const COLOURS: [RGBColor; 5] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
];

const GREY: RGBColor = RGBColor(110, 110, 110);

/// Writes charts side by side.
pub fn draw(path: &Path, charts: &[Chart<'_>]) {
    let area = SVGBackend::new(path, (760 * charts.len() as u32, 420)).into_drawing_area();
    area.fill(&WHITE).expect("a picture");
    for (chart, area) in charts.iter().zip(area.split_evenly((1, charts.len()))) {
        one(&area, chart);
    }
    area.present().expect("a file for the picture");
}

fn one(area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>, chart: &Chart<'_>) {
    let mut builder = ChartBuilder::on(area);
    builder.caption(chart.title, ("sans-serif", 16)).margin(12).x_label_area_size(40).y_label_area_size(64);
    let mut axes = builder.build_cartesian_2d(0.0..chart.ends.0, 0.0..chart.ends.1).expect("axes");
    axes.configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc(chart.x)
        .y_desc(chart.y)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&chart.ordinate)
        .draw()
        .expect("a grid");
    for line in &chart.lines {
        curve(&mut axes, line);
    }
    if let Some(mark) = chart.mark {
        let ends = [(0.0, mark), (chart.ends.0, mark)];
        axes.draw_series(DashedLineSeries::new(ends, 6, 6, GREY.stroke_width(1))).expect("a mark");
    }
    if chart.lines.len() > 1 {
        axes.configure_series_labels()
            .position(SeriesLabelPosition::LowerRight)
            .border_style(GREY)
            .background_style(WHITE)
            .draw()
            .expect("names");
    }
}

fn curve<X, Y>(axes: &mut ChartContext<'_, SVGBackend<'_>, Cartesian2d<X, Y>>, line: &Line)
where
    X: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let style = line.colour.stroke_width(2);
    let series = LineSeries::new(line.points.iter().copied(), style).point_size(2);
    let drawn = axes.draw_series(series).expect("a curve");
    if let Some(name) = &line.name {
        drawn.label(name).legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], style));
    }
}
