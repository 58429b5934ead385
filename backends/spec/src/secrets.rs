//! Secrets in texts: passwords of URLs and tokens of the Hugging Face Hub.

use std::borrow::Cow;

/// Shown in place of a user and password.
const HIDDEN: &str = "***";

/// Fewest letters and digits of a token after its `hf_`.
const TOKEN_LETTERS: usize = 30;

/// Place of the user and password in the first URL of a text that has them: between `://` and `@`.
fn credentials(text: &str) -> Option<(usize, usize)> {
    let mut from = 0;
    while let Some(found) = text[from..].find("://") {
        let start = from + found + 3;
        let is_end = |c: char| c.is_whitespace() || c.is_control() || "/?#\"'<>`".contains(c);
        let host = &text[start..start + text[start..].find(is_end).unwrap_or(text.len() - start)];
        if let Some(at) = host.rfind('@').filter(|&at| at > 0) {
            return Some((start, start + at));
        }
        from = start;
    }
    None
}

/// The text, with users and passwords of URLs hidden.
pub fn without_passwords(text: &str) -> Cow<'_, str> {
    let mut rest = text;
    let mut shown = String::new();
    while let Some((start, end)) = credentials(rest) {
        shown.push_str(&rest[..start]);
        shown.push_str(HIDDEN);
        rest = &rest[end..];
    }
    if shown.is_empty() { Cow::Borrowed(text) } else { Cow::Owned(shown + rest) }
}

/// The kind of secret that a text has, if it has one.
pub fn secret_in(text: &str) -> Option<&'static str> {
    let has_token = text.match_indices("hf_").any(|(at, prefix)| {
        let letters = text[at + prefix.len()..].bytes().take_while(u8::is_ascii_alphanumeric);
        letters.count() >= TOKEN_LETTERS
    });
    match credentials(text) {
        Some(_) => Some("a password in a URL"),
        None if has_token => Some("a token of the Hugging Face Hub"),
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_of_urls_are_hidden_and_nothing_else_is() {
        for (text, shown) in [
            ("get https://me:secret@host/x?a=1.", "get https://***@host/x?a=1."),
            ("https://token@host", "https://***@host"),
            ("a://b:c@d e://f:p@ss@g/@h", "a://***@d e://***@g/@h"),
            ("https://host/me@x", "https://host/me@x"),
            ("owner/name@main and me@host", "owner/name@main and me@host"),
            ("hf://datasets/owner/name@main/x", "hf://datasets/owner/name@main/x"),
            ("://", "://"),
        ] {
            assert_eq!(without_passwords(text), shown);
            assert_eq!(secret_in(text).is_some(), text != shown, "{text}");
        }
    }

    #[test]
    fn tokens_are_found_by_their_form() {
        let token = format!("--token=hf_{}", "aB3".repeat(11));
        assert_eq!(secret_in(&token), Some("a token of the Hugging Face Hub"));
        assert_eq!(secret_in("hf_hub_offline and hf_transfer"), None);
    }
}
