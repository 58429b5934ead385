//! Values over steps.

use super::metrics;
use super::numbers::number;
use super::state::LiveState;
use super::theme::Theme;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis, Block, Borders, Chart, Dataset, GraphType};

/// A curve of one chart.
struct Curve<'a> {
    name: String,
    points: &'a [(f64, f64)],
    style: Style,
    /// Single points, or a line through them.
    single: bool,
}

/// Reward or loss; `both` adds the validation for windows without room for two charts.
pub fn training(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme, both: bool) {
    let [training, validation, _] = curves(state, theme);
    let validation = Curve { name: format!("• {}", validation.name), single: true, ..validation };
    let shown = if both { vec![training, validation] } else { vec![training] };
    draw(frame, area, &shown, theme);
}

/// Validation.
pub fn validation(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
    draw(frame, area, &curves(state, theme)[1..2], theme);
}

/// Truncation, or the gradient norm.
pub fn third(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
    draw(frame, area, &curves(state, theme)[2..], theme);
}

/// The curves of training, of validation, and the third chart.
fn curves(state: &LiveState, theme: Theme) -> [Curve<'_>; 3] {
    let styles = [theme.training(), theme.validation(), theme.training()];
    let metrics = metrics::curves(&state.run);
    std::array::from_fn(|at| {
        let (name, metric) = metrics[at];
        Curve { name: name.to_owned(), points: state.run.scalars.curve(metric), style: styles[at], single: false }
    })
}

fn draw(frame: &mut Frame<'_>, area: Rect, curves: &[Curve<'_>], theme: Theme) {
    // a dot of Braille is half a column wide: average further points
    let most = usize::from(area.width).max(8) * 2;
    let points: Vec<Vec<(f64, f64)>> = curves.iter().map(|c| thin(c.points, most)).collect();
    let every_point = points.iter().flatten();
    let steps = bounds(every_point.clone().map(|point| point.0));
    let values = bounds(every_point.map(|point| point.1));
    let block = block(curves, steps, area.width, theme);
    let (Some(steps), Some(values)) = (steps, values) else {
        frame.render_widget(block.title(" no steps yet "), area);
        return;
    };
    let datasets = curves.iter().zip(&points).map(|(curve, points)| {
        let dataset = Dataset::default().data(points).style(curve.style);
        if curve.single {
            dataset.marker(Marker::Dot).graph_type(GraphType::Scatter)
        } else {
            dataset.marker(Marker::Braille).graph_type(GraphType::Line)
        }
    });
    let (steps, (low, high)) = (widened(steps), widened(values));
    let labels = [values.0, values.1].map(|value| Span::styled(number(value), theme.label()));
    let labels =
        if values.0 < values.1 { labels.to_vec() } else { vec![Span::raw(""), labels[0].clone(), Span::raw("")] };
    let chart = Chart::new(datasets.collect())
        .block(block)
        .x_axis(Axis::default().bounds(steps.into()))
        .y_axis(Axis::default().bounds([low, high]).labels(labels).style(theme.label()));
    frame.render_widget(chart, area);
}

/// The names of curves with their newest values, and their steps if there is room.
fn block(curves: &[Curve<'_>], steps: Option<(f64, f64)>, width: u16, theme: Theme) -> Block<'static> {
    let names = curves.iter().flat_map(|curve| {
        let last = curve.points.last();
        let value = last.map_or_else(String::new, |(_, value)| format!(" {} ", number(*value)));
        let name = Span::styled(format!(" {}", curve.name), curve.style);
        [name, Span::styled(value, theme.strong())]
    });
    let names: Line<'static> = names.collect();
    let used = names.width();
    let block = Block::new().borders(Borders::TOP).border_style(theme.label()).title(names);
    let several = steps.filter(|(first, last)| first < last);
    let steps = several.map(|(first, last)| format!(" steps {first:.0} to {last:.0} "));
    match steps.filter(|steps| used + steps.len() <= usize::from(width)) {
        Some(steps) => block.title(Line::from(Span::styled(steps, theme.label())).right_aligned()),
        None => block,
    }
}

/// Means of consecutive points, at most `most`.
fn thin(points: &[(f64, f64)], most: usize) -> Vec<(f64, f64)> {
    let each = points.len().div_ceil(most).max(1);
    let mean = |chunk: &[(f64, f64)]| {
        let sum = |of: fn(&(f64, f64)) -> f64| chunk.iter().map(of).sum::<f64>();
        let count = chunk.len() as f64;
        (sum(|point| point.0) / count, sum(|point| point.1) / count)
    };
    points.chunks(each).map(mean).collect()
}

/// The smallest and the largest of finite values.
fn bounds(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    let finite = values.filter(|value| value.is_finite());
    finite.fold(None, |range, value| {
        let (low, high): (f64, f64) = range.unwrap_or((value, value));
        Some((low.min(value), high.max(value)))
    })
}

/// Widens equal bounds.
fn widened((low, high): (f64, f64)) -> (f64, f64) {
    if low < high {
        return (low, high);
    }
    let half = (low.abs() / 2.0).max(0.5);
    (low - half, high + half)
}

#[cfg(test)]
mod tests {
    use super::{bounds, thin, widened};

    #[test]
    fn many_points_become_means_and_few_stay() {
        let points: Vec<(f64, f64)> = (0..100).map(|at| (f64::from(at), 1.0)).collect();
        assert_eq!(thin(&points, 100), points);
        let thinned = thin(&points, 30);
        assert_eq!(thinned.len(), 25);
        assert_eq!(thinned[0], (1.5, 1.0));
        assert!(thin(&[], 30).is_empty());
    }

    #[test]
    fn bounds_are_never_one_number() {
        assert_eq!(bounds([2.0, f64::NAN, 1.0].into_iter()), Some((1.0, 2.0)));
        assert_eq!(bounds([f64::NAN].into_iter()), None);
        assert_eq!(widened((0.0, 0.0)), (-0.5, 0.5));
        assert_eq!(widened((4.0, 4.0)), (2.0, 6.0));
    }
}
