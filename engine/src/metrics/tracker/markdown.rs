//! Texts as Markdown.

use std::fmt::Write;

/// A text as a code block of Markdown: lines indented by four spaces, which no text can end. At most so many characters
/// of it.
pub(super) fn code_block(text: &str, most: usize) -> String {
    let mut block = String::new();
    let cut = text.char_indices().nth(most).map(|(at, _)| at);
    for line in text[..cut.unwrap_or(text.len())].split(['\n', '\r']) {
        // writing to a string cannot fail
        let _ = writeln!(block, "    {line}");
    }
    if cut.is_some() {
        block.push_str("    …\n");
    }
    block
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_block_holds_any_text_and_cuts_a_long_one() {
        let hostile = "```\n<b>\r\n</script>\rx";
        let block = code_block(hostile, 100);
        assert!(block.lines().all(|line| line.starts_with("    ")), "{block}");
        assert!(!block.contains('\r'), "{block:?}");
        let long = code_block(&"ä".repeat(11), 10);
        assert_eq!(long.matches('ä').count(), 10);
        assert!(long.ends_with("…\n"));
    }
}
