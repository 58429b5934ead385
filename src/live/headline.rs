//! State of a run: its name, its headline numbers, the keys.

use super::metrics::{self, Headline, Unit};
use super::numbers::{duration, grouped, number, percent};
use super::state::LiveState;
use super::texts::{clean, fit, width};
use super::theme::Theme;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::text::{Line, Span};

/// Seconds without a step after which a watched run's silence is shown.
const SILENCE_SECONDS: f64 = 30.0;

/// Fewest columns of a shortened name; below it, the remaining time is dropped first.
const MIN_NAME: usize = 12;

/// The run and its step.
pub fn title(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
    let step = step(state);
    let columns = usize::from(area.width).saturating_sub(width(&step) + 2);
    let line = title_spans(shortened(&clean(&state.run.name), columns), step, theme);
    frame.render_widget(Line::from(line), area);
}

fn title_spans(name: String, step: String, theme: Theme) -> Vec<Span<'static>> {
    let mut spans = Vec::new();
    if !name.is_empty() {
        spans.extend([Span::styled(name, theme.strong()), Span::raw("  ")]);
    }
    spans.push(Span::raw(step));
    spans
}

fn step(state: &LiveState) -> String {
    match (state.run.warm_up, state.run.steps) {
        (Some((step, steps, _)), _) => format!("warm-up {step} of {steps}"),
        (None, Some(steps)) => format!("step {} of {steps}", state.run.step),
        (None, None) => format!("step {}", state.run.step),
    }
}

/// A name in at most `columns` columns; empty if they are too few.
fn shortened(name: &str, columns: usize) -> String {
    if width(name) <= columns {
        return name.to_owned();
    }
    fit(name, columns, 1).pop().unwrap_or_default()
}

/// Activity, speed and remaining time.
pub fn status(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
    let activity = activity(state, theme);
    let mut pace = pace(state);
    while !pace.is_empty() && activity.width() + columns(&pace) > area.width.into() {
        pace.remove(0);
    }
    frame.render_widget(Line::from(status_spans(activity, pace)), area);
}

fn status_spans(activity: Span<'static>, pace: Vec<String>) -> Vec<Span<'static>> {
    let pace = pace.into_iter();
    let pace = pace.map(|text| Span::raw(format!("  {text}")));
    [activity].into_iter().chain(pace).collect()
}

/// Columns of speed and time, with their gaps.
fn columns(pace: &[String]) -> usize {
    pace.iter().map(|text| width(text) + 2).sum()
}

/// All on one line. In a narrow window, the speed goes first, then the middle of a long name, then
/// the remaining time: no word is cut.
pub fn line(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
    const GAP: &str = "   ";
    let (name, step, activity) = (clean(&state.run.name), step(state), activity(state, theme));
    let mut pace = pace(state);
    let others = |pace: &[String]| 2 + width(&step) + width(GAP) + activity.width() + columns(pace);
    while !pace.is_empty() {
        // only the last of them may shorten the name
        let name = match pace.len() {
            1 => width(&name).min(MIN_NAME),
            _ => width(&name),
        };
        if name + others(&pace) <= area.width.into() {
            break;
        }
        pace.remove(0);
    }
    let name = shortened(&name, usize::from(area.width).saturating_sub(others(&pace)));
    let mut spans = title_spans(name, step, theme);
    spans.push(Span::raw(GAP));
    spans.extend(status_spans(activity, pace));
    frame.render_widget(Line::from(spans), area);
}

fn activity(state: &LiveState, theme: Theme) -> Span<'static> {
    let requests = state.requests;
    let warn = theme.warning();
    let (text, style) = match state.run.ended {
        Some(steps) if state.run.steps.is_none_or(|total| steps >= total) => ("finished".to_owned(), theme.strong()),
        Some(steps) => (format!("stopped after step {steps}"), warn),
        None if state.confirms_end => ("end in the middle of the step?".to_owned(), warn),
        None if requests.stopping => ("stops after this step".to_owned(), warn),
        None if requests.paused && state.run.phase.is_none() => ("paused".to_owned(), warn),
        None if requests.paused => ("pauses after this step".to_owned(), warn),
        None if requests.saving => ("saves after this step".to_owned(), warn),
        None => (running(state), Style::new()),
    };
    Span::styled(text, style)
}

fn running(state: &LiveState) -> String {
    if let Some((_, _, Some(loss))) = state.run.warm_up {
        return format!("loss {}", number(loss));
    }
    if let Some((phase, since)) = state.run.phase {
        let seconds = state.clock.saturating_sub(since).as_secs_f64();
        return format!("{phase} for {}", duration(seconds));
    }
    match state.silent {
        Some(silent) if silent.as_secs_f64() >= SILENCE_SECONDS => {
            format!("no step for {}", duration(silent.as_secs_f64()))
        }
        _ if state.run.step == 0 && !state.watching => "starting".to_owned(),
        _ => "running".to_owned(),
    }
}

/// Speed and the remaining time, the more important last.
fn pace(state: &LiveState) -> Vec<String> {
    let speed = state.run.value(metrics::THROUGHPUT);
    let speed = speed.map(|speed| format!("{} tokens/s", grouped(speed)));
    let step = state.run.value("timing_s/step");
    let step = step.filter(|_| speed.is_none()).map(|step| format!("{} a step", duration(step)));
    let left = metrics::left(&state.run).map(|left| format!("{} left", duration(left)));
    [speed, step, left].into_iter().flatten().collect()
}

fn value(headline: &Headline) -> String {
    let Some(value) = headline.value else {
        return "–".to_owned();
    };
    match headline.unit {
        Unit::Percent => percent(value),
        Unit::Number | Unit::Alone => number(value),
    }
}

fn change(headline: &Headline) -> String {
    let Some(change) = headline.change.filter(|&change| change != 0.0) else {
        return String::new();
    };
    let size = match headline.unit {
        Unit::Percent => format!("{:.1}", change.abs() * 100.0),
        Unit::Number | Unit::Alone => format!("{:.3}", change.abs()),
    };
    let sign = if change < 0.0 { '-' } else { '+' };
    format!("{sign}{size}")
}

/// Labels above numbers.
pub fn table(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
    let headlines = metrics::headlines(&state.run);
    let width = area.width / headlines.len().max(1) as u16;
    for (at, headline) in headlines.iter().enumerate() {
        let column = Rect { x: area.x + at as u16 * width, width, height: area.height.min(1), ..area };
        frame.render_widget(Span::styled(headline.label, theme.label()), column);
        let (value, change) = (value(headline), change(headline));
        let mut spans = vec![Span::styled(value.clone(), theme.strong())];
        if value.len() + 1 + change.len() < usize::from(width) {
            spans.push(Span::styled(format!(" {change}"), theme.label()));
        }
        let below = column.offset(ratatui::layout::Offset { x: 0, y: 1 });
        frame.render_widget(Line::from(spans), below.intersection(area));
    }
}

/// A label and a number per line.
pub fn list(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
    for (row, headline) in area.rows().zip(&metrics::headlines(&state.run)) {
        let line = Line::from(vec![
            Span::styled(format!("{:<12}", headline.label), theme.label()),
            Span::styled(value(headline), theme.strong()),
            Span::styled(format!("  {}", change(headline)), theme.label()),
        ]);
        frame.render_widget(line, row);
    }
}

/// Current actions of the keys.
pub fn keys(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
    let pause = if state.requests.paused { "continue" } else { "pause" };
    let keys: &[(&str, &str)] = if state.confirms_end {
        &[("y", "end now"), ("c", "do not stop"), ("any other", "wait for the step")]
    } else if state.watching {
        &[("q", "leave"), ("n", "next sample"), ("?", "help")]
    } else if area.width < 60 {
        &[("p", pause), ("s", "save"), ("q", "stop"), ("?", "help")]
    } else {
        &[("p", pause), ("s", "save now"), ("q", "stop after this step"), ("n", "next sample"), ("?", "help")]
    };
    let spans = keys.iter().flat_map(|(key, does)| {
        [Span::styled((*key).to_owned(), theme.strong()), Span::styled(format!(" {does}   "), theme.label())]
    });
    frame.render_widget(spans.collect::<Line<'_>>(), area);
}
