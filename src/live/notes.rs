//! Warnings, and what else was said.

use super::state::LiveState;
use super::texts::fit;
use super::theme::Theme;
use firebrick::report::Note;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};

/// The newest below a heading.
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

/// The newest, the last at the bottom: warnings before what else was said.
pub fn lines(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
    let rows = usize::from(area.height);
    let newest = |warning: bool| {
        let own = state.run.notes.iter().enumerate().rev();
        own.filter(move |(_, note)| note.warning == warning)
    };
    let chosen = newest(true).chain(newest(false)).take(rows);
    let mut chosen: Vec<(usize, &Note)> = chosen.collect();
    chosen.sort_by_key(|(at, _)| *at);
    let mut texts: Vec<Line<'static>> = Vec::new();
    // a long one takes the rows that others leave
    let mut spare = rows - chosen.len();
    for (_, note) in chosen {
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
