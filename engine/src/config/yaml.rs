//! Why a text is no YAML: where it is to be mended, in the words of this program.

use super::spans::{Place, Spans};

/// What is wrong with a text that the parser refused, and where.
pub fn mistake(text: &str, error: &serde_saphyr::Error) -> (Option<Place>, String) {
    let error = error.without_snippet();
    let spans = Spans::of(text);
    if let (serde_saphyr::Error::DuplicateMappingKey { .. }, Some(twice)) = (error, &spans.twice) {
        let said = format!("duplicate key `{}`, first in line {}; remove one of the two", twice.key, twice.first.line);
        return (Some(twice.again), said);
    }
    // the parser stops where the next line cannot go on with a list; what is to be mended is the line that began it
    let unclosed = spans.open.iter().find_map(|&place| {
        let bracket = at(text, place).filter(|c| matches!(c, '[' | '{'))?;
        (!closes(text, place)).then_some((place, bracket))
    });
    if let Some((place, bracket)) = unclosed {
        let other = if bracket == '[' { ']' } else { '}' };
        return (Some(place), format!("`{bracket}` is never closed by a `{other}`"));
    }
    let place = error.location().and_then(Place::of_error);
    let said = error.to_string();
    let bare = said.rsplit_once(" at line ").map_or(&*said, |(bare, _)| bare);
    (place, bare.to_owned())
}

/// The text from a place on.
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

/// Whether the bracket at a place has one that closes it; those in quotes and comments count for nothing.
fn closes(text: &str, place: Place) -> bool {
    let mut depth = 0_usize;
    let mut quote = None;
    for line in from(text, place) {
        let mut before = ' ';
        for c in line.chars() {
            match (quote, c) {
                (Some(own), c) if own == c && before != '\\' => quote = None,
                (None, '#') if before == ' ' => break,
                // within a word an apostrophe quotes nothing
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

    fn of(text: &str) -> (Option<(usize, usize)>, String) {
        let error = serde_saphyr::from_str::<Value>(text).expect_err("no YAML");
        let (place, said) = mistake(text, &error);
        (place.map(|place| (place.line, place.column)), said)
    }

    #[test]
    fn a_bracket_that_is_never_closed_is_shown_where_it_opens() {
        for (text, place, bracket) in [
            ("model:\n  path: [a, b\noutput: o\n", (2, 9), '['),
            ("model:\n  path: [1\ntask: {kind: x}\n", (2, 9), '['),
            ("a: 1\ntask: {kind: x, y: [1, 2]\noutput: o\n", (2, 7), '{'),
            ("task: {kind: \"]}\", # }\noutput: o\n", (1, 7), '{'),
        ] {
            let (found, said) = of(text);
            assert_eq!(found, Some(place), "{text}: {said}");
            assert!(said.starts_with(&format!("`{bracket}` is never closed")), "{said}");
        }
    }

    #[test]
    fn other_mistakes_are_shown_where_the_parser_finds_them() {
        let (place, said) = of("a: [1, 2]\nb: [1, 2]]\nc: 3\n");
        assert_eq!(place.map(|place| place.0), Some(2), "{said}");
        assert!(!said.contains("never closed") && !said.contains(" line "), "{said}");
    }

    #[test]
    fn a_key_that_stands_twice_is_named_with_both_lines() {
        let (place, said) = of("output: a\nmodel: {path: m}\noutput: b\n");
        assert_eq!(place, Some((3, 1)));
        assert_eq!(said, "duplicate key `output`, first in line 1; remove one of the two");
        let (place, said) = of("task:\n  kind: a\n  kind: b\n");
        assert_eq!(place, Some((3, 3)));
        assert!(said.contains("`kind`") && said.contains("line 2"), "{said}");
    }
}
