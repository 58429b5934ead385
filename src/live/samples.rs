//! Samples: the newest, the step's best and worst, and the answers in them.

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

/// The sample at the cursor; below it the best and the worst on a line each.
pub fn draw(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
    let inner = heading(frame, area, state.current(), theme);
    let Some(shown) = state.current() else { return };
    let mut main = inner;
    main.height = inner.height.saturating_sub(2);
    text(frame, main, shown, theme);
    let below = inner.rows().skip(usize::from(main.height));
    for (row, pick) in below.zip([Pick::Best, Pick::Worst]) {
        if let Some(shown) = state.picked(pick) {
            frame.render_widget(summary(shown, row.width, theme), row);
        }
    }
}

/// The sample at the cursor, the best and the worst side by side.
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
        let line = summary(shown, area.width, Theme::PLAIN);
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

/// Reward and completion on one line.
fn summary(shown: &ShownSample, width: u16, theme: Theme) -> Line<'static> {
    let label = format!("{:<LABEL$}", reason(shown.pick));
    let value = format!("{:<8}", reward(shown));
    let used = label.len() + value.chars().count();
    let left = usize::from(width).saturating_sub(used);
    let completion = fit(&shown.excerpt.completion, left, 1).concat();
    Line::from(vec![Span::styled(label, theme.label()), Span::styled(value, theme.strong()), Span::raw(completion)])
}

/// A sample in the available rows: its numbers, prompt, completion and answers.
fn text(frame: &mut Frame<'_>, area: Rect, shown: &ShownSample, theme: Theme) {
    let columns = usize::from(area.width).saturating_sub(LABEL);
    let rows = usize::from(area.height);
    let excerpt = &shown.excerpt;
    let mut lines = vec![labeled("reward", numbers(shown), theme)];
    // prompt and completion get at least two rows
    let answers = answers(shown, columns);
    let answers = answers.into_iter().take(rows.saturating_sub(3));
    let answers: Vec<Line<'_>> = answers.map(|text| labeled("read", text, theme)).collect();
    let left = rows.saturating_sub(1 + answers.len());
    let prompt = fit(&excerpt.prompt, columns, (left / 3).max(1));
    let completion = fit(&excerpt.completion, columns, left.saturating_sub(prompt.len()).max(1));
    for (label, texts) in [("prompt", prompt), ("completion", completion)] {
        for (at, text) in texts.into_iter().enumerate() {
            lines.push(labeled(if at == 0 { label } else { "" }, text, theme));
        }
    }
    lines.extend(answers);
    for (row, line) in area.rows().zip(lines) {
        frame.render_widget(line, row);
    }
}

fn labeled(label: &str, text: String, theme: Theme) -> Line<'static> {
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

/// The answer of each rule, with the ground truth.
fn answers(shown: &ShownSample, columns: usize) -> Vec<String> {
    let truth = fit(&shown.excerpt.answer, columns.max(4), 1).concat();
    let answers = shown.read.iter().map(|(rule, text)| {
        let answer = text.as_ref().map_or_else(|| "nothing".to_owned(), |text| fit(text, columns.max(4), 1).concat());
        fit(&format!("{rule}: {answer}  (truth: {truth})"), columns, 1).concat()
    });
    answers.collect()
}
