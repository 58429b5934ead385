//! Tokens of an answer in LaTeX or plain text.

use crate::number::decimal;
use num_rational::BigRational;

/// Longest answer to parse, in bytes.
pub(crate) const MAX_BYTES: usize = 2_000;

/// Kind of a token.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Kind {
    /// A number without its sign, and true if it is spelled as an integer.
    Number(BigRational, bool),
    /// A run of letters.
    Letters(String),
    /// A LaTeX command without its backslash.
    Command(String),
    /// Upright text in LaTeX, mostly units.
    Words(String),
    /// Anything else. Braces of a set are `⦃` and `⦄`; those of LaTeX's groups are `{` and `}`.
    Symbol(char),
}

/// A token.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Token {
    pub kind: Kind,
    /// True after a space.
    pub spaced: bool,
}

/// Commands without meaning for the value.
const SILENT: &str = "left right big Big bigl bigr Bigl Bigr displaystyle textstyle limits boxed mathbf boldsymbol bf rm it \
                      middle hspace";

/// Commands whose argument is text.
const UPRIGHT: &str = "text textbf textit textrm mathrm mbox operatorname mathsf unit";

/// Symbols and their commands.
const SYMBOLS: [(char, &str); 20] = [
    ('*', "cdot times ast"),
    ('/', "div"),
    ('±', "pm"),
    ('∓', "mp"),
    ('≤', "le leq leqslant"),
    ('≥', "ge geq geqslant"),
    ('<', "lt"),
    ('>', "gt"),
    ('≠', "ne neq"),
    ('=', "approx equiv"),
    ('∪', "cup"),
    ('∈', "in"),
    ('⦃', "lbrace"),
    ('⦄', "rbrace"),
    ('|', "lvert rvert vert mid"),
    ('[', "lbrack"),
    (']', "rbrack"),
    ('°', "circ degree"),
    (':', "colon"),
    (',', "land"),
];

/// Returns true if a list of words has a name.
fn has(words: &str, name: &str) -> bool {
    words.split(' ').any(|word| word == name)
}

/// Splits a text into tokens; `None` for characters outside of mathematics and for long texts.
pub(crate) fn tokens(text: &str) -> Option<Vec<Token>> {
    if text.len() > MAX_BYTES {
        return None;
    }
    let mut lexer = Lexer { chars: text.chars().collect(), at: 0, depth: 0, spaced: false, tokens: Vec::new() };
    while lexer.at < lexer.chars.len() {
        lexer.step()?;
    }
    Some(lexer.tokens)
}

struct Lexer {
    chars: Vec<char>,
    at: usize,
    /// Depth of brackets, in which a comma separates.
    depth: usize,
    spaced: bool,
    tokens: Vec<Token>,
}

impl Lexer {
    fn peek(&self, ahead: usize) -> Option<char> {
        self.chars.get(self.at + ahead).copied()
    }

    fn push(&mut self, kind: Kind) {
        let spaced = std::mem::take(&mut self.spaced);
        self.tokens.push(Token { kind, spaced });
    }

    fn symbol(&mut self, symbol: char) {
        match symbol {
            '(' | '[' | '⦃' => self.depth += 1,
            ')' | ']' | '⦄' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        self.push(Kind::Symbol(symbol));
    }

    fn run(&mut self, keep: fn(char) -> bool) -> String {
        let start = self.at;
        while self.peek(0).is_some_and(keep) {
            self.at += 1;
        }
        self.chars[start..self.at].iter().collect()
    }

    fn step(&mut self) -> Option<()> {
        let Some(c) = self.peek(0) else {
            return Some(());
        };
        let digit_follows = self.peek(1).is_some_and(|c| c.is_ascii_digit());
        match c {
            '\\' => return self.command(),
            c if c.is_whitespace() || c == '~' || c == '\u{200b}' => self.spaced = true,
            '$' => {}
            '0'..='9' => return self.number(),
            '.' if digit_follows => return self.number(),
            c if c.is_alphabetic() && c != 'π' => {
                let letters = self.run(|c| c.is_alphabetic() && c != 'π');
                self.push(Kind::Letters(letters));
                return Some(());
            }
            '*' if self.peek(1) == Some('*') => {
                self.at += 1;
                self.symbol('^');
            }
            '<' | '>' | '!' if self.peek(1) == Some('=') => {
                self.at += 1;
                self.symbol(match c {
                    '<' => '≤',
                    '>' => '≥',
                    _ => '≠',
                });
            }
            _ => self.symbol(plain(c)?),
        }
        self.at += 1;
        Some(())
    }

    /// A command, its backslash being the next character.
    fn command(&mut self) -> Option<()> {
        self.at += 1;
        let name = self.run(|c| c.is_ascii_alphabetic());
        if name.is_empty() {
            let c = self.peek(0)?;
            self.at += 1;
            match c {
                '{' => self.symbol('⦃'),
                '}' => self.symbol('⦄'),
                '%' => self.symbol('%'),
                '|' => self.symbol('|'),
                '\\' => self.push(Kind::Command("\\".into())),
                '&' => self.symbol('&'),
                '!' | '$' | '(' | ')' | '[' | ']' => {}
                ',' | ';' | ':' | ' ' | '\n' => self.spaced = true,
                _ => return None,
            }
            return Some(());
        }
        if has(SILENT, &name) {
            // the invisible bracket of `\left.`
            if matches!(name.as_str(), "left" | "right") && self.peek(0) == Some('.') {
                self.at += 1;
            }
        } else if has(UPRIGHT, &name) {
            let words = self.argument()?;
            if words.contains(|c: char| c.is_ascii_digit()) {
                // a number set upright is a number: its braces become space, and it is read like the rest
                let end = self.at - 1;
                let start = end - words.chars().count() - 1;
                (self.chars[start], self.chars[end]) = (' ', ' ');
                self.at = start;
            } else {
                self.push(Kind::Words(words.trim().to_owned()));
            }
        } else if matches!(name.as_str(), "quad" | "qquad" | "space" | "thinspace") {
            self.spaced = true;
        } else if let Some((symbol, _)) = SYMBOLS.iter().find(|(_, names)| has(names, &name)) {
            self.symbol(*symbol);
        } else {
            let short = match name.as_str() {
                "dfrac" | "tfrac" | "cfrac" => "frac",
                "dbinom" | "tbinom" => "binom",
                "infin" => "infty",
                _ => &name,
            };
            let short = short.to_owned();
            let arguments = usize::from(matches!(short.as_str(), "frac" | "binom")) * 2;
            self.push(Kind::Command(short));
            for _ in 0..arguments {
                self.single()?;
            }
        }
        Some(())
    }

    /// The one digit or letter that is an argument without braces: `\frac12`.
    fn single(&mut self) -> Option<()> {
        let blank = self.run(char::is_whitespace);
        match self.peek(0) {
            Some(c) if c.is_ascii_digit() => {
                let number = decimal(&c.to_string(), "", "")?;
                self.push(Kind::Number(number, true));
                self.at += 1;
            }
            Some(c) if c.is_ascii_alphabetic() => {
                self.push(Kind::Letters(c.to_string()));
                self.at += 1;
            }
            _ => self.at -= blank.chars().count(),
        }
        Some(())
    }

    /// The text between the braces that come next.
    fn argument(&mut self) -> Option<String> {
        self.run(char::is_whitespace);
        if self.peek(0) != Some('{') {
            return None;
        }
        let start = self.at + 1;
        let mut open = 0_usize;
        while let Some(c) = self.peek(0) {
            self.at += 1;
            match c {
                '{' => open += 1,
                '}' if open == 1 => {
                    return Some(self.chars[start..self.at - 1].iter().collect());
                }
                '}' => open -= 1,
                _ => {}
            }
        }
        None
    }

    fn digits(&mut self) -> String {
        self.run(|c| c.is_ascii_digit())
    }

    /// Characters of the mark of thousands that comes next, where one does and three digits follow it, not four.
    fn thousands(&self) -> Option<usize> {
        let marks: [(&[char], bool); 5] = [
            (&['{', ',', '}'], true),
            (&[',', '\\', '!'], true),
            (&['\\', ','], true),
            (&['\\', '!'], true),
            (&[','], self.depth == 0),
        ];
        marks.iter().find_map(|(mark, allowed)| {
            let here = |(i, c): (usize, &char)| self.peek(i) == Some(*c);
            let digit = |i: usize| self.peek(mark.len() + i).is_some_and(|c| c.is_ascii_digit());
            let fits = *allowed && mark.iter().enumerate().all(here);
            (fits && (0..3).all(digit) && !digit(3)).then_some(mark.len())
        })
    }

    fn number(&mut self) -> Option<()> {
        let mut whole = self.digits();
        let (mut fraction, mut repeating) = (String::new(), String::new());
        if !whole.is_empty() && whole.len() <= 3 && !whole.starts_with('0') {
            while let Some(mark) = self.thousands() {
                self.at += mark;
                whole.push_str(&self.digits());
            }
        }
        let point = self.peek(0) == Some('.');
        let overline: Vec<char> = "\\overline{".chars().collect();
        let repeats = |lexer: &Self| (0..overline.len()).all(|i| lexer.peek(i) == Some(overline[i]));
        if point && self.peek(1).is_some_and(|c| c.is_ascii_digit() || c == '\\') {
            self.at += 1;
            fraction = self.digits();
            if repeats(self) {
                self.at += overline.len();
                repeating = self.digits();
                if repeating.is_empty() || self.peek(0) != Some('}') {
                    return None;
                }
                self.at += 1;
            }
        } else if point {
            // a full stop after a number
            self.at += 1;
        }
        let integer = fraction.is_empty() && repeating.is_empty();
        let number = decimal(&whole, &fraction, &repeating)?;
        self.push(Kind::Number(number, integer));
        Some(())
    }
}

/// The parser's character of a plain character.
fn plain(c: char) -> Option<char> {
    Some(match c {
        '×' | '·' | '⋅' | '∗' => '*',
        '÷' | '∕' | '⁄' => '/',
        '−' | '–' => '-',
        '≈' | '≡' => '=',
        '（' => '(',
        '）' => ')',
        '，' => ',',
        '+' | '-' | '*' | '/' | '^' | '_' | '(' | ')' | '[' | ']' | '{' | '}' | ',' | ';' | '=' | '<' | '>' | '≤'
        | '≥' | '≠' | '!' | '%' | '|' | '&' | '±' | '∓' | '∪' | '∈' | '°' | '√' | '∞' | 'π' | '∅' | ':' | '\''
        | '"' | '.' | '?' | '€' | '£' => c,
        _ => return None,
    })
}
