//! Which bracket closes which.

use crate::lexer::{Kind, Token};

/// A bracket that opens at a token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bracket {
    /// The token that closes it.
    pub close: usize,
    /// Whether commas or semicolons separate what it holds.
    pub separated: bool,
}

/// The brackets that open at each token; none where one is not closed.
pub(crate) fn brackets(tokens: &[Token]) -> Option<Vec<Option<Bracket>>> {
    let mut found = vec![None; tokens.len()];
    let mut open: Vec<(usize, char, bool)> = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        match token.kind {
            Kind::Symbol(symbol @ ('(' | '[' | '{' | '⦃')) => open.push((at, symbol, false)),
            Kind::Symbol(symbol @ (')' | ']' | '}' | '⦄')) => {
                let (start, first, separated) = open.pop()?;
                let fits = match first {
                    '{' => symbol == '}',
                    '⦃' => symbol == '⦄',
                    _ => matches!(symbol, ')' | ']'),
                };
                let close = at;
                found[start] = fits.then_some(Bracket { close, separated });
                found[start]?;
            }
            Kind::Symbol(',' | ';') => {
                if let Some((.., separated)) = open.last_mut() {
                    *separated = true;
                }
            }
            _ => {}
        }
    }
    open.is_empty().then_some(found)
}
