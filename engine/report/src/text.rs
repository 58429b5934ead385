//! Texts of samples, cut if they are long.

use serde::{Serialize, Serializer};

/// Fraction of a cut text that comes from its end, which has the answer of a completion.
const TAIL_SHARE: f64 = 0.4;

/// A complete text, or its beginning and end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Text {
    /// All of it.
    Whole(String),
    /// Too long.
    Cut {
        /// Its beginning.
        head: String,
        /// Omitted characters.
        left_out: usize,
        /// Its end.
        tail: String,
    },
}

impl Text {
    /// Cuts a text of more than `most` bytes as JSON.
    pub fn new(text: &str, most: usize) -> Self {
        let mut bytes = 0;
        let fits = text.chars().all(|c| {
            bytes += cost(c);
            bytes <= most
        });
        if fits {
            return Self::Whole(text.to_owned());
        }
        let last = (most as f64 * TAIL_SHARE) as usize;
        let head = prefix(text.chars(), most - last);
        let tail = prefix(text.chars().rev(), last);
        let (start, end) = (head, text.len() - tail);
        Self::Cut {
            head: text[..start].to_owned(),
            left_out: text[start..end].chars().count(),
            tail: text[end..].to_owned(),
        }
    }

    /// The text, with a mark for the omitted part.
    pub fn joined(self) -> String {
        match self {
            Self::Whole(text) => text,
            Self::Cut { head, tail, .. } => format!("{head}…{tail}"),
        }
    }
}

/// Bytes of a character in the data block.
pub fn cost(c: char) -> usize {
    match c {
        '"' | '\\' | '\n' | '\r' | '\t' => 2,
        '\0'..='\u{1f}' | '<' | '\u{2028}' | '\u{2029}' => 6,
        _ => c.len_utf8(),
    }
}

/// Length in bytes of the longest prefix that costs at most `most`.
fn prefix(chars: impl Iterator<Item = char>, most: usize) -> usize {
    let mut left = most;
    let within = chars.take_while(|&c| {
        let fits = cost(c) <= left;
        left = left.saturating_sub(cost(c));
        fits
    });
    within.map(char::len_utf8).sum()
}

impl Serialize for Text {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Whole(text) => serializer.serialize_str(text),
            Self::Cut { head, left_out, tail } => (head, left_out, tail).serialize(serializer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Text;

    #[test]
    fn a_long_text_keeps_its_beginning_and_its_end_and_says_what_is_left_out() {
        let text = format!("{}{}", "a".repeat(900), "é".repeat(100));
        let Text::Cut { head, left_out, tail } = Text::new(&text, 100) else {
            panic!("1,100 bytes are more than 100");
        };
        assert_eq!(head, "a".repeat(60));
        assert_eq!(tail, "é".repeat(20));
        assert_eq!(left_out, 1000 - 60 - 20);
    }

    #[test]
    fn what_fits_stays_whole_and_control_characters_count_as_they_are_written() {
        assert_eq!(Text::new("short", 5), Text::Whole("short".into()));
        assert_eq!(Text::new("", 0), Text::Whole(String::new()));
        assert!(matches!(Text::new("\u{1}\u{1}", 11), Text::Cut { .. }));
        assert!(matches!(Text::new("\u{1}\u{1}", 12), Text::Whole(_)));
    }
}
