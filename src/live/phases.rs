//! Time and memory of a step's phases, next to the plan's.

use super::metrics::{self, PhasePart};
use super::numbers::duration;
use super::state::LiveState;
use super::theme::Theme;
use firebrick::engine::plan::size::Bytes;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};
use std::fmt::Write;

/// A bar of the step, and a line for each phase, only the longest if there is no room for all.
pub fn draw(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
    let inner = theme.section(frame, area, format!(" {} ", heading(state)));
    let phases = metrics::phases(&state.run);
    if phases.is_empty() || inner.height == 0 {
        return;
    }
    let mut rows = inner.rows();
    if let Some(row) = rows.next() {
        frame.render_widget(bar(&phases, row.width, theme), row);
    }
    for (row, at) in rows.zip(longest(&phases, usize::from(inner.height) - 1)) {
        frame.render_widget(line(&phases[at], at, theme), row);
    }
}

fn heading(state: &LiveState) -> String {
    let size = |bytes: u64| Bytes(bytes).to_string();
    let Some(seconds) = state.run.value("timing_s/step") else {
        return match &state.run.planned {
            Some(plan) => format!("step: planned {}", size(plan.peak_bytes)),
            None => "step".to_owned(),
        };
    };
    // writing to a string cannot fail
    let mut text = format!("step {}", duration(seconds));
    let planned = state.run.planned.as_ref();
    if let Some(plan) = planned.filter(|plan| plan.seconds > 0.0) {
        let _ = write!(text, " (estimated {})", duration(plan.seconds));
    }
    if let Some(peak) = metrics::peak_bytes(&state.run) {
        let _ = write!(text, ", peak {}", size(peak));
    }
    if let Some(plan) = planned {
        let _ = write!(text, " of {} planned", size(plan.peak_bytes));
    }
    text
}

/// The longest phases for a number of rows, in the order of the step.
fn longest(phases: &[PhasePart], rows: usize) -> Vec<usize> {
    let mut longest: Vec<usize> = (0..phases.len()).collect();
    longest.sort_by(|&a, &b| phases[b].seconds.total_cmp(&phases[a].seconds));
    longest.truncate(rows);
    longest.sort_unstable();
    longest
}

/// One bar of all phases.
fn bar(phases: &[PhasePart], width: u16, theme: Theme) -> Line<'static> {
    let mut spans = Vec::new();
    let (mut before, mut drawn) = (0.0, 0);
    for (at, phase) in phases.iter().enumerate() {
        before += phase.share;
        let end = (before * f64::from(width)).round() as usize;
        let (fill, style) = theme.fill(at);
        spans.push(Span::styled(fill.to_string().repeat(end.saturating_sub(drawn)), style));
        drawn = drawn.max(end);
    }
    Line::from(spans)
}

fn line(phase: &PhasePart, at: usize, theme: Theme) -> Line<'static> {
    let (fill, style) = theme.fill(at);
    let size = |bytes: u64| Bytes(bytes).to_string();
    let bytes = match (phase.bytes, phase.planned) {
        (Some(bytes), Some(planned)) => {
            let share = bytes as f64 / planned.max(1) as f64 * 100.0;
            format!("{:>9} of {:>9} planned {share:>5.0} %", size(bytes), size(planned))
        }
        (Some(bytes), None) => format!("{:>9}", size(bytes)),
        (None, Some(planned)) => format!("{:>9}    {:>9} planned", "", size(planned)),
        (None, None) => String::new(),
    };
    let share = phase.share * 100.0;
    let over = phase.bytes.zip(phase.planned).is_some_and(|(b, p)| b > p);
    let bytes_style = if over { theme.warning() } else { theme.label() };
    Line::from(vec![
        Span::styled(format!("{fill} "), style),
        Span::raw(format!("{:<14}{:>9}{share:>5.0} %   ", phase.name, duration(phase.seconds))),
        Span::styled(bytes, bytes_style),
    ])
}
