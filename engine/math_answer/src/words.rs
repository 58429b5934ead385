//! Distinction of mathematics from words.

use crate::expr::Function;

/// Words of two letters that are not products of two variables.
const SHORT_WORDS: [&str; 13] = ["no", "on", "is", "it", "or", "if", "of", "to", "in", "at", "am", "pm", "as"];

/// Returns true if adjacent letters are variables, a constant or a function, not a word.
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

/// Returns true for a Greek letter.
pub(crate) fn is_greek(name: &str) -> bool {
    const GREEK: &str = "alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau \
                         phi varphi psi omega";
    GREEK.split(' ').any(|letter| letter == name)
}
