//! Explanations of YAML errors.

use super::spans::{Place, Spans};

/// Place and message of the parser's error in a text.
pub fn mistake(text: &str, error: &serde_saphyr::Error) -> (Option<Place>, String) {
    let error = error.without_snippet();
    let spans = Spans::new(text);
    if let (serde_saphyr::Error::DuplicateMappingKey { .. }, Some(duplicate)) = (error, &spans.duplicate) {
        let (key, line) = (&duplicate.key, duplicate.first.line);
        let message = format!("duplicate key `{key}`, first in line {line}; remove one of the two");
        return (Some(duplicate.second), message);
    }
    // the parser stops at the line after an unclosed list; the mistake is where the list begins
    let unclosed = spans.open.iter().find_map(|&place| {
        let bracket = at(text, place).filter(|c| matches!(c, '[' | '{'))?;
        (!closes(text, place)).then_some((place, bracket))
    });
    if let Some((place, bracket)) = unclosed {
        let other = if bracket == '[' { ']' } else { '}' };
        return (Some(place), format!("`{bracket}` is never closed by a `{other}`"));
    }
    let place = error.location().and_then(Place::from_error);
    let message = error.to_string();
    let bare = message.rsplit_once(" at line ").map_or(&*message, |(bare, _)| bare);
    (place, bare.to_owned())
}

/// Lines of the text from a place on.
fn from(text: &str, place: Place) -> impl Iterator<Item = &str> {
    let mut skipped = place.column - 1;
    text.lines().skip(place.line - 1).map(move |line| {
        let start = line.char_indices().nth(std::mem::take(&mut skipped));
        start.map_or("", |(start, _)| &line[start..])
    })
}

fn at(text: &str, place: Place) -> Option<char> {
    from(text, place).next()?.chars().next()
}

/// Returns true if the bracket at a place is closed, apart from brackets in quotes and comments.
fn closes(text: &str, place: Place) -> bool {
    let mut depth = 0_usize;
    let mut quote = None;
    for line in from(text, place) {
        let mut before = ' ';
        for c in line.chars() {
            match (quote, c) {
                (Some(open), c) if open == c && before != '\\' => quote = None,
                (None, '#') if before == ' ' => break,
                // an apostrophe within a word is no quote
                (None, '"' | '\'') if !before.is_alphanumeric() => quote = Some(c),
                (None, '[' | '{') => depth += 1,
                (None, ']' | '}') => depth = depth.saturating_sub(1),
                _ => {}
            }
            if depth == 0 {
                return true;
            }
            before = c;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn error(text: &str) -> (Option<(usize, usize)>, String) {
        let error = serde_saphyr::from_str::<Value>(text).expect_err("no YAML");
        let (place, message) = mistake(text, &error);
        (place.map(|place| (place.line, place.column)), message)
    }

    #[test]
    fn a_bracket_that_is_never_closed_is_shown_where_it_opens() {
        for (text, place, bracket) in [
            ("model:\n  path: [a, b\noutput: o\n", (2, 9), '['),
            ("model:\n  path: [1\ntask: {kind: x}\n", (2, 9), '['),
            ("a: 1\ntask: {kind: x, y: [1, 2]\noutput: o\n", (2, 7), '{'),
            ("task: {kind: \"]}\", # }\noutput: o\n", (1, 7), '{'),
        ] {
            let (at, message) = error(text);
            assert_eq!(at, Some(place), "{text}: {message}");
            assert!(message.starts_with(&format!("`{bracket}` is never closed")), "{message}");
        }
    }

    #[test]
    fn other_mistakes_are_shown_where_the_parser_finds_them() {
        let (place, message) = error("a: [1, 2]\nb: [1, 2]]\nc: 3\n");
        assert_eq!(place.map(|place| place.0), Some(2), "{message}");
        assert!(!message.contains("never closed") && !message.contains(" line "), "{message}");
    }

    #[test]
    fn a_key_that_stands_twice_is_named_with_both_lines() {
        let (place, message) = error("output: a\nmodel: {path: m}\noutput: b\n");
        assert_eq!(place, Some((3, 1)));
        assert_eq!(message, "duplicate key `output`, first in line 1; remove one of the two");
        let (place, message) = error("task:\n  kind: a\n  kind: b\n");
        assert_eq!(place, Some((3, 3)));
        assert!(message.contains("`kind`") && message.contains("line 2"), "{message}");
    }
}
