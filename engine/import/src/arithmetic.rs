//! Whole-number arithmetic of shells and Python: `$((1024 * 2))`, `2**15`.

/// Deepest nesting of brackets and signs.
const DEEPEST: usize = 64;

/// The value of an expression of numbers, names, `+ - * / % **` and brackets. `name` gives the values of names. Nothing
/// where the text is something else, or a number does not fit.
pub(super) fn evaluate(text: &str, name: &dyn Fn(&str) -> Option<i64>) -> Option<i64> {
    let mut reader = Reader { text: text.as_bytes(), at: 0, name, depth: 0 };
    let value = reader.sum()?;
    reader.skip_spaces();
    (reader.at == reader.text.len()).then_some(value)
}

struct Reader<'a> {
    text: &'a [u8],
    at: usize,
    name: &'a dyn Fn(&str) -> Option<i64>,
    depth: usize,
}

impl Reader<'_> {
    fn skip_spaces(&mut self) {
        while self.text.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
    }

    /// Whether an operator stands here, and then passes it.
    fn takes(&mut self, operator: &[u8]) -> bool {
        self.skip_spaces();
        let found = self.text[self.at..].starts_with(operator);
        // `**` is not two `*`
        let longer = operator == b"*" && self.text[self.at..].starts_with(b"**");
        if found && !longer {
            self.at += operator.len();
        }
        found && !longer
    }

    fn sum(&mut self) -> Option<i64> {
        let mut value = self.product()?;
        loop {
            if self.takes(b"+") {
                value = value.checked_add(self.product()?)?;
            } else if self.takes(b"-") {
                value = value.checked_sub(self.product()?)?;
            } else {
                return Some(value);
            }
        }
    }

    fn product(&mut self) -> Option<i64> {
        let mut value = self.power()?;
        loop {
            if self.takes(b"*") {
                value = value.checked_mul(self.power()?)?;
            } else if self.takes(b"//") || self.takes(b"/") {
                value = value.checked_div(self.power()?)?;
            } else if self.takes(b"%") {
                value = value.checked_rem(self.power()?)?;
            } else {
                return Some(value);
            }
        }
    }

    fn power(&mut self) -> Option<i64> {
        let base = self.atom()?;
        if self.takes(b"**") {
            self.depth += 1;
            if self.depth > DEEPEST {
                return None;
            }
            let exponent = self.power()?;
            self.depth -= 1;
            return base.checked_pow(u32::try_from(exponent).ok()?);
        }
        Some(base)
    }

    fn atom(&mut self) -> Option<i64> {
        self.depth += 1;
        if self.depth > DEEPEST {
            return None;
        }
        let value = if self.takes(b"-") {
            self.atom()?.checked_neg()?
        } else if self.takes(b"(") {
            let inner = self.sum()?;
            if !self.takes(b")") {
                return None;
            }
            inner
        } else {
            self.word()?
        };
        self.depth -= 1;
        Some(value)
    }

    fn word(&mut self) -> Option<i64> {
        // `$NAME` and `NAME` are the same in a shell's arithmetic
        let _ = self.takes(b"$");
        self.skip_spaces();
        let is_part = |b: &u8| b.is_ascii_alphanumeric() || *b == b'_';
        let rest = &self.text[self.at..];
        let end = rest.iter().position(|b| !is_part(b)).unwrap_or(rest.len());
        let word = std::str::from_utf8(&rest[..end]).ok()?;
        self.at += end;
        if word.starts_with(|c: char| c.is_ascii_digit()) {
            return word.replace('_', "").parse().ok();
        }
        (self.name)(word).filter(|_| !word.is_empty())
    }
}
