//! Places of the keys and values of a YAML text.

use serde_saphyr::granit_parser::{Event, Marker, Parser};
use std::collections::HashMap;

/// A place in a text, both from 1; columns count characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The line.
    pub line: usize,
    /// The character in the line.
    pub column: usize,
}

impl Place {
    fn of(mark: Marker) -> Self {
        Self { line: mark.line(), column: mark.col() + 1 }
    }

    /// Place of a parser's error, if it has one.
    pub(super) fn from_error(at: serde_saphyr::Location) -> Option<Self> {
        let (line, column) = (at.line() as usize, at.column() as usize);
        (line > 0).then_some(Self { line, column })
    }
}

/// Places of keys and values by JSON pointer.
#[derive(Debug, Default)]
pub struct Spans {
    keys: HashMap<String, Place>,
    values: HashMap<String, Place>,
    /// The first duplicate key of a section.
    pub duplicate: Option<DuplicateKey>,
    /// Starts of the collections that were open at the parser's error, the innermost first.
    pub open: Vec<Place>,
    pointer_bytes: usize,
}

/// A duplicate key of a section.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DuplicateKey {
    /// The key.
    pub key: String,
    /// Place of its first occurrence.
    pub first: Place,
    /// Place of its second occurrence.
    pub second: Place,
}

/// A collection around the parser's position.
enum Open {
    /// JSON pointer of a mapping, and the key of the next value.
    Map(String, Option<String>),
    /// JSON pointer of a list, and the number of its next entry.
    List(String, usize),
}

/// Deepest value with a place.
const MAX_DEPTH: usize = 64;
/// Most bytes of all pointers: those of a value repeat those around it.
const MAX_POINTER_BYTES: usize = 32 << 20;

impl Spans {
    /// Places of a text, up to its first error, or to a size that no configuration has.
    pub fn new(text: &str) -> Self {
        let mut this = Self::default();
        let mut open: Vec<Open> = Vec::new();
        for next in Parser::new_from_str(text) {
            let Ok((event, span)) = next else {
                let starts = open.iter().rev().map(|collection| match collection {
                    Open::Map(at, _) | Open::List(at, _) => this.values.get(at).copied(),
                });
                this.open = starts.flatten().collect();
                break;
            };
            if open.len() > MAX_DEPTH || this.pointer_bytes > MAX_POINTER_BYTES {
                break;
            }
            let place = Place::of(span.start);
            match event {
                Event::Scalar(word, ..) => this.node(&mut open, place, Some(&word), None),
                Event::Alias(_) => this.node(&mut open, place, None, None),
                Event::MappingStart(..) => {
                    this.node(&mut open, place, None, Some(|at| Open::Map(at, None)));
                }
                Event::SequenceStart(..) => {
                    this.node(&mut open, place, None, Some(|at| Open::List(at, 0)));
                }
                Event::MappingEnd | Event::SequenceEnd => {
                    open.pop();
                }
                _ => {}
            }
        }
        this
    }

    /// Adds a node: the next key, or the next value of a key or list.
    fn node(&mut self, open: &mut Vec<Open>, place: Place, word: Option<&str>, begins: Option<fn(String) -> Open>) {
        let pointer = match open.last_mut() {
            None => String::new(),
            Some(Open::Map(at, next)) => match next.take() {
                Some(key) => format!("{at}/{key}"),
                None => {
                    let key = word.unwrap_or_default();
                    let key = key.replace('~', "~0").replace('/', "~1");
                    self.pointer_bytes += at.len() + key.len();
                    let first = self.keys.insert(format!("{at}/{key}"), place);
                    if let (Some(first), None, Some(word)) = (first, &self.duplicate, word) {
                        self.duplicate = Some(DuplicateKey { key: word.to_owned(), first, second: place });
                    }
                    *next = Some(key);
                    return;
                }
            },
            Some(Open::List(at, number)) => {
                let pointer = format!("{at}/{number}");
                *number += 1;
                pointer
            }
        };
        self.pointer_bytes += pointer.len();
        self.values.insert(pointer.clone(), place);
        open.extend(begins.map(|begins| begins(pointer)));
    }

    /// Returns true if the text has a value there.
    pub fn has(&self, pointer: &str) -> bool {
        self.values.contains_key(pointer)
    }

    /// Place of a value or its key, or else of the nearest section around it; `None` for the whole text.
    pub fn nearest(&self, pointer: &str, at_key: bool) -> Option<Place> {
        let exact = if at_key {
            // an entry of a list has no key
            self.keys.get(pointer).or_else(|| self.values.get(pointer))
        } else {
            self.values.get(pointer).filter(|_| !pointer.is_empty())
        };
        if let Some(place) = exact {
            return Some(*place);
        }
        let (parent, _) = pointer.rsplit_once('/')?;
        // the place of a section is that of its key: its value may begin lines below
        let at_key = self.keys.contains_key(parent);
        self.nearest(parent, at_key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# a comment\nmodel: {path: m}\ntask:\n  kind: jsonl\n  rewards:\n    - kind: exact\n      weight: 2\n    - {kind: x}\n";

    #[test]
    fn keys_and_values_have_their_lines_and_columns() {
        let spans = Spans::new(TEXT);
        let at = |line, column| Some(Place { line, column });
        assert_eq!(spans.nearest("/model/path", true), at(2, 9));
        assert_eq!(spans.nearest("/model/path", false), at(2, 15));
        assert_eq!(spans.nearest("/task/rewards/0/weight", false), at(7, 15));
        assert_eq!(spans.nearest("/task/rewards/1/kind", true), at(8, 8));
    }

    #[test]
    fn what_is_not_there_is_shown_by_what_holds_it() {
        let spans = Spans::new(TEXT);
        let line = |pointer| spans.nearest(pointer, false).map(|place: Place| place.line);
        assert_eq!(line("/task/train"), Some(3));
        assert_eq!(line("/task/rewards/0/pattern"), Some(6));
        assert_eq!(line("/rollout/n"), None);
    }
}
