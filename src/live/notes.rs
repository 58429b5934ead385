//! Warnings and other notes.

use super::state::LiveState;
use super::texts::fit;
use super::theme::Theme;
use firebrick::report::Note;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};

/// The newest notes below a heading.
pub fn draw(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
    let heading = match state.run.warnings {
        0 => " no warnings ".to_owned(),
        1 => " 1 warning ".to_owned(),
        many => format!(" {many} warnings "),
    };
    let heading = if state.run.warnings > 0 { Span::styled(heading, theme.warning()) } else { Span::raw(heading) };
    let inner = theme.section(frame, area, heading);
    lines(frame, inner, state, theme);
}

/// The newest notes, the last at the bottom; warnings take precedence.
pub fn lines(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
    let rows = usize::from(area.height);
    let newest = |warning: bool| {
        let notes = state.run.notes.iter().enumerate().rev();
        notes.filter(move |(_, note)| note.warning == warning)
    };
    let mut shown: Vec<(usize, &Note)> = newest(true).chain(newest(false)).take(rows).collect();
    shown.sort_by_key(|(at, _)| *at);
    let mut texts: Vec<Line<'static>> = Vec::new();
    // a long note takes spare rows
    let mut spare = rows - shown.len();
    for (_, note) in shown {
        let count = match note.count {
            1 => String::new(),
            many => format!(" ({many} times)"),
        };
        let text = format!("step {}: {}{count}", note.step, note.text);
        let fitted = fit(&text, usize::from(area.width), 1 + spare);
        spare -= fitted.len().saturating_sub(1).min(spare);
        let style = if note.warning { theme.warning() } else { theme.label() };
        texts.extend(fitted.into_iter().map(|text| Line::styled(text, style)));
    }
    for (row, line) in area.rows().zip(texts) {
        frame.render_widget(line, row);
    }
}
