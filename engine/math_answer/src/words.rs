//! Letters that are mathematics, and letters that are words.

use crate::expr::Function;

/// Words of two letters, which are no product of two variables.
const SHORT_WORDS: [&str; 13] = ["no", "on", "is", "it", "or", "if", "of", "to", "in", "at", "am", "pm", "as"];

/// Whether letters that stand together are variables, a constant or a function, rather than a word.
pub(crate) fn is_mathematics(letters: &str) -> bool {
    let lower = letters.to_lowercase();
    let named = matches!(lower.as_str(), "pi" | "inf" | "infinity" | "oo" | "sqrt" | "log");
    if named || (letters.len() > 1 && Function::named(&lower).is_some()) {
        return true;
    }
    match letters.chars().count() {
        1 => true,
        2 => !SHORT_WORDS.contains(&lower.as_str()),
        3 => letters.chars().all(|c| "xyz".contains(c)) || letters.chars().all(|c| "abc".contains(c)),
        _ => false,
    }
}

/// Whether a command is a letter that can be a variable.
pub(crate) fn is_greek(name: &str) -> bool {
    const GREEK: &str = "alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau \
                         phi varphi psi omega";
    GREEK.split(' ').any(|letter| letter == name)
}
