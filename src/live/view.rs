//! Layouts of a window, by its size.

use super::curves;
use super::headline;
use super::help;
use super::metrics;
use super::notes;
use super::phases;
use super::samples;
use super::state::LiveState;
use super::theme::Theme;
use ratatui::Frame;
use ratatui::layout::Rect;

/// Size of a medium window; a smaller one is small: one column of numbers.
const MEDIUM: (u16, u16) = (60, 20);

/// Size of a large window: everything side by side.
const LARGE: (u16, u16) = (140, 34);

/// Draws a run.
pub fn draw(frame: &mut Frame<'_>, state: &LiveState, theme: Theme) {
    let area = frame.area();
    if area.width >= LARGE.0 && area.height >= LARGE.1 {
        large(frame, area, state, theme);
    } else if area.width >= MEDIUM.0 && area.height >= MEDIUM.1 {
        medium(frame, area, state, theme);
    } else {
        small(frame, area, state, theme);
    }
    if state.help {
        help::draw(frame, area, state, theme);
    }
}

/// Cuts rows off the top of an area.
fn rows(area: &mut Rect, height: u16) -> Rect {
    let height = height.min(area.height);
    let top = Rect { height, ..*area };
    area.y += height;
    area.height -= height;
    top
}

/// Divides an area into columns, with a gap between them.
fn columns<const N: usize>(area: Rect, gap: u16) -> [Rect; N] {
    let count = N as u16;
    let column_width = area.width.saturating_sub(gap * (count - 1)) / count;
    std::array::from_fn(|at| {
        let x = area.x + at as u16 * (column_width + gap);
        // the last one takes the remainder
        let width = if at + 1 == N { area.right() - x } else { column_width };
        Rect { x, width, ..area }
    })
}

/// One column of numbers, as far as it fits.
fn small(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
    let mut rest = area;
    let keys = match area.height {
        0..4 => None,
        _ => {
            rest.height -= 1;
            Some(Rect { y: area.bottom() - 1, height: 1, ..area })
        }
    };
    headline::title(frame, rows(&mut rest, 1), state, theme);
    headline::status(frame, rows(&mut rest, 1), state, theme);
    headline::list(frame, rows(&mut rest, 6), state, theme);
    if let Some(keys) = keys {
        headline::keys(frame, keys, state, theme);
    }
    if !state.run.notes.is_empty() && rest.height > 0 {
        let line = Rect { y: rest.bottom() - 1, height: 1, ..rest };
        rest.height -= 1;
        notes::lines(frame, line, state, theme);
    }
    if rest.height >= 4 {
        curves::training(frame, rest, state, theme, false);
    } else if rest.height > 0 {
        samples::line(frame, rows(&mut rest, 1), state);
    }
}

/// Two curves, the largest phases, one sample.
fn medium(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
    let spare = area.height - MEDIUM.1;
    let mut rest = area;
    headline::line(frame, rows(&mut rest, 1), state, theme);
    headline::table(frame, rows(&mut rest, 2), state, theme);
    let known = metrics::phases(&state.run).len() as u16;
    let phase_rows = (4 + spare / 4).min(known.max(2) + 2);
    let sample_rows = 6 + spare / 4;
    let note_rows = 2 + spare / 8;
    let below = phase_rows + sample_rows + note_rows + 1;
    let [left, right] = columns(rows(&mut rest, area.height - 3 - below), 2);
    curves::training(frame, left, state, theme, true);
    curves::third(frame, right, state, theme);
    phases::draw(frame, rows(&mut rest, phase_rows), state, theme);
    samples::draw(frame, rows(&mut rest, sample_rows), state, theme);
    notes::draw(frame, rows(&mut rest, note_rows), state, theme);
    headline::keys(frame, rest, state, theme);
}

/// Everything.
fn large(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
    let mut rest = area;
    headline::line(frame, rows(&mut rest, 1), state, theme);
    rows(&mut rest, 1);
    headline::table(frame, rows(&mut rest, 2), state, theme);
    rows(&mut rest, 1);
    let phase_rows = (metrics::phases(&state.run).len() as u16).clamp(4, 12) + 3;
    let left = rest.height.saturating_sub(phase_rows + 1);
    let curve_rows = left / 2;
    let [first, second, third] = columns(rows(&mut rest, curve_rows), 3);
    curves::training(frame, first, state, theme, false);
    curves::validation(frame, second, state, theme);
    curves::third(frame, third, state, theme);
    let [left, right] = columns(rows(&mut rest, phase_rows), 3);
    phases::draw(frame, left, state, theme);
    notes::draw(frame, right, state, theme);
    let height = rest.height.saturating_sub(1);
    samples::side_by_side(frame, columns(rows(&mut rest, height), 3), state, theme);
    headline::keys(frame, rest, state, theme);
}
