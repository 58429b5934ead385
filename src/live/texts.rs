//! Safe texts of samples and warnings: nothing in them moves the cursor or changes the direction of a line.

use ratatui::text::Span;

/// A text on one line: line breaks as `⏎`, other control characters and marks of direction as `�`.
pub fn clean(text: &str) -> String {
    let shown = |c: char| match c {
        '\n' => '⏎',
        '\t' | '\u{2028}' | '\u{2029}' => ' ',
        _ if c.is_control() || is_format_char(c) => '\u{fffd}',
        other => other,
    };
    text.replace("\r\n", "\n").chars().map(shown).collect()
}

/// Returns true if a character changes the direction of text, or is invisible.
fn is_format_char(c: char) -> bool {
    matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{61c}')
}

/// Columns that a text takes.
pub fn width(text: &str) -> usize {
    Span::raw(text).width()
}

/// A clean text in at most `lines` lines of `columns` columns. A longer one keeps its beginning and its end, where a
/// completion has its answer.
pub fn fit(text: &str, columns: usize, lines: usize) -> Vec<String> {
    if columns < 4 || lines == 0 {
        return Vec::new();
    }
    let mut wrapped = wrap(&clean(text), columns);
    if wrapped.len() <= lines {
        return wrapped;
    }
    if lines == 1 {
        let (head, tail) = (columns / 2, columns - columns / 2 - 1);
        let joined: String = wrapped.concat();
        let head = wrap(&joined, head).swap_remove(0);
        let mut end: Vec<char> = Vec::new();
        let mut left = tail;
        for c in joined.chars().rev() {
            let char_width = width(c.encode_utf8(&mut [0; 4]));
            if char_width > left {
                break;
            }
            left -= char_width;
            end.push(c);
        }
        let end: String = end.into_iter().rev().collect();
        return vec![format!("{head}…{end}")];
    }
    let first = lines.div_ceil(2);
    let last = lines - first;
    let mut rest = wrapped.split_off(wrapped.len() - last);
    wrapped.truncate(first);
    if let Some(line) = wrapped.last_mut() {
        // the mark takes the place of the last character
        while width(line) + 1 > columns {
            line.pop();
        }
        line.push('…');
    }
    wrapped.append(&mut rest);
    wrapped
}

/// Cuts a text into lines of at most `columns` columns.
fn wrap(text: &str, columns: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    let mut used = 0;
    for c in text.chars() {
        let taken = width(c.encode_utf8(&mut [0; 4]));
        if used + taken > columns {
            lines.push(String::new());
            used = 0;
        }
        used += taken;
        if let Some(line) = lines.last_mut() {
            line.push(c);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::{clean, fit, width};

    #[test]
    fn nothing_in_a_text_moves_the_cursor_or_turns_a_line() {
        let hostile = "a\x1b[2J\u{202e}b\r\nc\td\u{7}";
        assert_eq!(clean(hostile), "a\u{fffd}[2J\u{fffd}b⏎c d\u{fffd}");
    }

    #[test]
    fn a_long_text_keeps_its_beginning_and_its_end() {
        assert_eq!(fit("abcdefghij", 4, 3), ["abcd", "efgh", "ij"]);
        assert_eq!(fit("abcdefghijklmnop", 4, 2), ["abc…", "mnop"]);
        assert_eq!(fit("abcdefghijklmnop", 9, 1), ["abcd…mnop"]);
        assert_eq!(fit("", 9, 1), [""]);
        assert!(fit("abc", 0, 3).is_empty() && fit("abc", 9, 0).is_empty());
    }

    #[test]
    fn wide_characters_take_their_columns() {
        for (columns, lines) in [(4, 1), (5, 1), (5, 2), (7, 3)] {
            let fitted = fit("漢字かな交じり文の例です", columns, lines);
            assert!(fitted.len() <= lines);
            assert!(fitted.iter().all(|line| width(line) <= columns), "{fitted:?}");
        }
    }
}
