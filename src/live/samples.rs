//! What the run writes: the newest sample, the step's best and worst, what the grader read in them.

use super::numbers::number;
use super::state::LiveState;
use super::texts::fit;
use super::theme::Theme;
use firebrick::report::{Pick, ShownSample};
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};
use std::fmt::Write;

/// Columns of a label.
const LABEL: usize = 12;

fn reason(pick: Pick) -> &'static str {
    match pick {
        Pick::Newest => "newest",
        Pick::Best => "best",
        Pick::Worst => "worst",
        Pick::Other => "another",
    }
}

fn reward(shown: &ShownSample) -> String {
    shown.excerpt.reward.map_or_else(|| "–".to_owned(), number)
}

/// The sample that the cursor is on; below it the best and the worst on a line each.
pub fn draw(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
    let inner = heading(frame, area, state.current(), theme);
    let Some(shown) = state.current() else { return };
    let mut whole = inner;
    whole.height = inner.height.saturating_sub(2);
    text(frame, whole, shown, theme);
    let below = inner.rows().skip(usize::from(whole.height));
    for (row, pick) in below.zip([Pick::Best, Pick::Worst]) {
        if let Some(shown) = state.picked(pick) {
            frame.render_widget(brief(shown, row.width, theme), row);
        }
    }
}

/// The sample that the cursor is on, the best and the worst side by side.
pub fn side_by_side(frame: &mut Frame<'_>, areas: [Rect; 3], state: &LiveState, theme: Theme) {
    let shown = [state.current(), state.picked(Pick::Best), state.picked(Pick::Worst)];
    for (area, shown) in areas.into_iter().zip(shown) {
        let inner = heading(frame, area, shown, theme);
        if let Some(shown) = shown {
            text(frame, inner, shown, theme);
        }
    }
}

/// The best sample on one line, without a heading.
pub fn line(frame: &mut Frame<'_>, area: Rect, state: &LiveState) {
    if let Some(shown) = state.picked(Pick::Best) {
        let line = brief(shown, area.width, Theme::PLAIN);
        frame.render_widget(line, area);
    }
}

fn heading(frame: &mut Frame<'_>, area: Rect, shown: Option<&ShownSample>, theme: Theme) -> Rect {
    let title = match shown {
        Some(shown) => format!(" {} of step {} ", reason(shown.pick), shown.excerpt.step),
        None => " no samples yet ".to_owned(),
    };
    theme.section(frame, area, title)
}

/// Reward, what the grader read and the completion on one line.
fn brief(shown: &ShownSample, width: u16, theme: Theme) -> Line<'static> {
    let label = format!("{:<LABEL$}", reason(shown.pick));
    let value = format!("{:<8}", reward(shown));
    let used = label.len() + value.chars().count();
    let left = usize::from(width).saturating_sub(used);
    let completion = fit(&shown.excerpt.completion, left, 1).concat();
    Line::from(vec![Span::styled(label, theme.label()), Span::styled(value, theme.strong()), Span::raw(completion)])
}

/// A sample as far as the rows go: its numbers, what was read, then prompt and completion.
fn text(frame: &mut Frame<'_>, area: Rect, shown: &ShownSample, theme: Theme) {
    let columns = usize::from(area.width).saturating_sub(LABEL);
    let rows = usize::from(area.height);
    let excerpt = &shown.excerpt;
    let mut lines = vec![labelled("reward", numbers(shown), theme)];
    // two rows at least are the prompt's and the completion's
    let read = read(shown, columns);
    let read = read.into_iter().take(rows.saturating_sub(3));
    let read: Vec<Line<'_>> = read.map(|(l, text)| labelled(l, text, theme)).collect();
    let left = rows.saturating_sub(1 + read.len());
    let prompt = fit(&excerpt.prompt, columns, (left / 3).max(1));
    let completion = fit(&excerpt.completion, columns, left.saturating_sub(prompt.len()).max(1));
    for (label, texts) in [("prompt", prompt), ("completion", completion)] {
        for (at, text) in texts.into_iter().enumerate() {
            lines.push(labelled(if at == 0 { label } else { "" }, text, theme));
        }
    }
    lines.extend(read);
    for (row, line) in area.rows().zip(lines) {
        frame.render_widget(line, row);
    }
}

fn labelled(label: &str, text: String, theme: Theme) -> Line<'static> {
    Line::from(vec![Span::styled(format!("{label:<LABEL$}"), theme.label()), Span::raw(text)])
}

/// Reward and its parts, advantage, length.
fn numbers(shown: &ShownSample) -> String {
    let excerpt = &shown.excerpt;
    // writing to a string cannot fail
    let mut text = reward(shown);
    if excerpt.reward_parts.len() > 1 {
        let parts = excerpt.reward_parts.iter();
        let parts: Vec<String> =
            parts.map(|(name, value)| format!("{name} {}", value.map_or("–".into(), number))).collect();
        let _ = write!(text, " ({})", parts.join(", "));
    }
    if let Some(advantage) = excerpt.advantage {
        let _ = write!(text, ", advantage {}", number(advantage));
    }
    let cut = if excerpt.is_truncated() { ", truncated" } else { "" };
    let tokens = excerpt.tokens;
    text + &format!(", {tokens} token{}{cut}", if tokens == 1 { "" } else { "s" })
}

/// What each rule read, beside the ground truth.
fn read(shown: &ShownSample, columns: usize) -> Vec<(&'static str, String)> {
    let truth = fit(&shown.excerpt.answer, columns.max(4), 1).concat();
    let rules = shown.read.iter();
    rules
        .map(|(rule, text)| {
            let found = match text {
                Some(text) => fit(text, columns.max(4), 1).concat(),
                None => "nothing".to_owned(),
            };
            let text = format!("{rule}: {found}  (truth: {truth})");
            ("read", fit(&text, columns, 1).concat())
        })
        .collect()
}
