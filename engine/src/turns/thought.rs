//! Thoughts: text of a turn before its answer, which its prompt may have opened.

use crate::Result;
use firebrick_models::Tokenizer;
use firebrick_sampler::Sample;

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// Returns true if the text before the last turn of a sample opens a thought; `prompt` is the text of its prompt.
///
/// # Errors
/// `Error::Model` if tokens cannot be decoded.
pub fn opens_thought(tokenizer: &Tokenizer, prompt: &str, sample: &Sample) -> Result<bool> {
    let opens = |text: &str| text.trim_end().ends_with(OPEN);
    Ok(match sample.inserted.last() {
        Some(between) => opens(&tokenizer.decode(&sample.tokens[between.clone()], false)?),
        None => opens(prompt),
    })
}

/// Text of a turn after its thought: all of it without a thought, nothing if the thought does not end. `opened`: the
/// text before the turn opens it.
pub fn behind_thought(turn: &str, opened: bool) -> &str {
    if !opened && !turn.trim_start().starts_with(OPEN) {
        return turn;
    }
    turn.split_once(CLOSE).map_or("", |(_, behind)| behind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_behind_a_thought_is_the_answer() {
        for (turn, opened, behind) in [
            ("4", false, "4"),
            ("a</think>4", false, "a</think>4"),
            ("a</think>4", true, "4"),
            ("\n<think>a</think>4</think>", false, "4</think>"),
            ("<think>4", false, ""),
            ("4", true, ""),
        ] {
            assert_eq!(behind_thought(turn, opened), behind, "{turn:?} {opened}");
        }
    }
}
