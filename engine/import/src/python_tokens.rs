//! Python source as tokens: names, numbers, texts, signs. Comments are dropped, and brackets join lines.

use super::error::ImportError;

/// What a token is.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum PythonTokenKind {
    /// A name, with its dots: `torch.bfloat16`.
    Name(String),
    /// A number, as it is written.
    Number(String),
    /// A text without quotes.
    Text(String),
    /// A text whose parts are computed (`f"…"`), as it is written.
    Computed(String),
    /// Brackets, operators, commas; `**` is one.
    Sign(&'static str),
    /// The end of a statement.
    End,
}

/// A token and its line.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PythonToken {
    pub kind: PythonTokenKind,
    pub line: usize,
}

/// Signs, longer ones first.
const SIGNS: [&str; 34] = [
    "**", "//", "==", "!=", "<=", ">=", "->", ":=", "+=", "-=", "*=", "/=", "(", ")", "[", "]", "{", "}", ",", ":",
    "=", "+", "-", "*", "/", "%", "@", "<", ">", "|", "&", "^", "~", ";",
];

/// All tokens of a program.
pub(super) fn tokens(file: &str, text: &str) -> Result<Vec<PythonToken>, ImportError> {
    let mut reader = Reader { file, chars: text.chars().collect(), at: 0, line: 1, open: Vec::new() };
    let mut tokens = Vec::new();
    while let Some(token) = reader.token()? {
        tokens.push(token);
    }
    if let Some((sign, line)) = reader.open.last() {
        let detail = format!("a bracket {sign} that begins here is never closed");
        return Err(ImportError::at(file, Some(*line), detail));
    }
    Ok(tokens)
}

struct Reader<'a> {
    file: &'a str,
    chars: Vec<char>,
    at: usize,
    line: usize,
    /// Brackets that are open, and where.
    open: Vec<(&'static str, usize)>,
}

impl Reader<'_> {
    fn peek(&self, ahead: usize) -> Option<char> {
        self.chars.get(self.at + ahead).copied()
    }

    fn next(&mut self) -> Option<char> {
        let next = self.peek(0)?;
        self.at += 1;
        self.line += usize::from(next == '\n');
        Some(next)
    }

    fn token(&mut self) -> Result<Option<PythonToken>, ImportError> {
        loop {
            let line = self.line;
            let Some(c) = self.peek(0) else {
                return Ok(None);
            };
            let kind = match c {
                '\n' if self.open.is_empty() => {
                    self.next();
                    PythonTokenKind::End
                }
                '#' => {
                    while self.peek(0).is_some_and(|c| c != '\n') {
                        self.next();
                    }
                    continue;
                }
                '\\' => {
                    self.next();
                    self.next();
                    continue;
                }
                c if c.is_whitespace() => {
                    self.next();
                    continue;
                }
                '\'' | '"' => PythonTokenKind::Text(self.text(false)?),
                c if c.is_ascii_digit() => PythonTokenKind::Number(self.number()),
                '.' if self.peek(1).is_some_and(|c| c.is_ascii_digit()) => PythonTokenKind::Number(self.number()),
                c if c.is_alphabetic() || c == '_' => self.name()?,
                _ => match self.sign() {
                    Some(";") => PythonTokenKind::End,
                    Some(sign) => PythonTokenKind::Sign(sign),
                    None => {
                        self.next();
                        continue;
                    }
                },
            };
            return Ok(Some(PythonToken { kind, line }));
        }
    }

    fn sign(&mut self) -> Option<&'static str> {
        let here = |sign: &&&str| sign.chars().enumerate().all(|(i, c)| self.peek(i) == Some(c));
        let sign = *SIGNS.iter().find(here)?;
        match sign {
            "(" | "[" | "{" => self.open.push((sign, self.line)),
            ")" | "]" | "}" => {
                self.open.pop();
            }
            _ => {}
        }
        self.at += sign.len();
        Some(sign)
    }

    fn number(&mut self) -> String {
        let start = self.at;
        while let Some(c) = self.peek(0) {
            let exponent = matches!(c, '+' | '-') && self.at > start && matches!(self.chars[self.at - 1], 'e' | 'E');
            if !(c.is_ascii_alphanumeric() || c == '_' || c == '.' || exponent) {
                break;
            }
            self.at += 1;
        }
        self.chars[start..self.at].iter().filter(|c| **c != '_').collect()
    }

    fn name(&mut self) -> Result<PythonTokenKind, ImportError> {
        let start = self.at;
        while self.peek(0).is_some_and(|c| c.is_alphanumeric() || c == '_' || c == '.') {
            self.at += 1;
        }
        let name: String = self.chars[start..self.at].iter().collect();
        if !matches!(self.peek(0), Some('\'' | '"')) {
            return Ok(PythonTokenKind::Name(name));
        }
        match name.to_ascii_lowercase().as_str() {
            "r" => self.text(true).map(PythonTokenKind::Text),
            "u" | "b" => self.text(false).map(PythonTokenKind::Text),
            _ => {
                let text = self.text(false)?;
                Ok(PythonTokenKind::Computed(format!("{name}\"{text}\"")))
            }
        }
    }

    /// The text between quotes, one or three. `raw`: backslashes stand for themselves.
    fn text(&mut self, raw: bool) -> Result<String, ImportError> {
        let line = self.line;
        let quote = self.next().unwrap_or('"');
        let long = self.peek(0) == Some(quote) && self.peek(1) == Some(quote);
        if long {
            self.next();
            self.next();
        }
        let mut text = String::new();
        loop {
            let closes =
                self.peek(0) == Some(quote) && (!long || (self.peek(1) == Some(quote) && self.peek(2) == Some(quote)));
            if closes {
                self.at += if long { 3 } else { 1 };
                return Ok(text);
            }
            match self.next() {
                Some('\n') if !long => break,
                None => break,
                Some('\\') => self.escape(raw, &mut text),
                Some(c) => text.push(c),
            }
        }
        let detail = format!("a quote {quote} that begins here is never closed");
        Err(ImportError::at(self.file, Some(line), detail))
    }

    fn escape(&mut self, raw: bool, text: &mut String) {
        let Some(c) = self.next() else {
            return;
        };
        match c {
            _ if raw => text.extend(['\\', c]),
            '\n' => {}
            'n' => text.push('\n'),
            't' => text.push('\t'),
            '\\' | '\'' | '"' => text.push(c),
            c => text.extend(['\\', c]),
        }
    }
}
