//! Matching of brackets.

use crate::lexer::{Kind, Token};

/// A bracket that opens at a token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bracket {
    /// The token that closes it.
    pub close: usize,
    /// True if its content has commas or semicolons at the top level.
    pub separated: bool,
}

/// The bracket that opens at each token; `None` if a bracket is not closed.
pub(crate) fn brackets(tokens: &[Token]) -> Option<Vec<Option<Bracket>>> {
    let mut brackets = vec![None; tokens.len()];
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
                brackets[start] = fits.then_some(Bracket { close, separated });
                brackets[start]?;
            }
            Kind::Symbol(',' | ';') => {
                if let Some((.., separated)) = open.last_mut() {
                    *separated = true;
                }
            }
            _ => {}
        }
    }
    open.is_empty().then_some(brackets)
}
