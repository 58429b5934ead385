//! When a completion ends, and its text without what ended it.

use super::request::{GenerationRequest, Sample};
use super::sampling_params::SamplingParams;
use super::scheduler_config::SchedulerConfig;
use firebrick_models::{Result, Tokenizer};

/// Stop tokens, stop strings and length limits (transformers' `StoppingCriteria`).
#[derive(Clone, Copy, Debug)]
pub(super) struct StoppingCriteria<'a> {
    /// Decodes completions; needed for stop strings.
    tokenizer: Option<&'a Tokenizer>,
    pub sampling: &'a SamplingParams,
    /// True if a stop string contains a special token, which is then a part of the text.
    special: bool,
}

impl<'a> StoppingCriteria<'a> {
    pub fn new(tokenizer: Option<&'a Tokenizer>, sampling: &'a SamplingParams) -> Self {
        let special = tokenizer.is_some_and(|tokenizer| has_special(tokenizer, &sampling.stop_strings));
        Self { tokenizer, sampling, special }
    }

    /// True if a turn ends with a stop token or contains a stop string.
    pub fn is_met(&self, sample: &Sample) -> Result<bool> {
        let last = sample.tokens.last();
        if last.is_some_and(|last| self.sampling.stop_ids.contains(last)) {
            return Ok(true);
        }
        let stops = &self.sampling.stop_strings;
        let (Some(tokenizer), false) = (self.tokenizer, stops.is_empty()) else {
            return Ok(false);
        };
        let turn = &sample.tokens[sample.turn_start()..];
        let mut met = first(&tokenizer.decode(turn, true)?, stops).is_some();
        if !met && self.special {
            met = first(&tokenizer.decode(turn, false)?, stops).is_some();
        }
        Ok(met)
    }

    /// Most tokens of a completion of this request.
    pub fn max_new_tokens(&self, request: &GenerationRequest, config: &SchedulerConfig) -> usize {
        let left = config.max_model_len.map(|most| most.saturating_sub(request.tokens.len()));
        [request.max_new_tokens, left].into_iter().flatten().fold(self.sampling.max_new_tokens, usize::min)
    }
}

/// The text of sampled tokens from one of them on, without special tokens, without the stop token and the stop string
/// that ended it and what follows that (vLLM's `include_stop_str_in_output: false`). The string is looked for from
/// `turn` on, where the last turn begins.
///
/// # Errors
/// [`Error::Tokenizer`](firebrick_models::Error::Tokenizer) where tokens cannot be decoded.
pub fn text_before_stop(
    tokenizer: &Tokenizer,
    sampling: &SamplingParams,
    tokens: &[u32],
    turn: usize,
) -> Result<String> {
    let tokens = match tokens.split_last() {
        Some((last, rest)) if rest.len() >= turn && sampling.stop_ids.contains(last) => rest,
        _ => tokens,
    };
    let stops = &sampling.stop_strings;
    if stops.is_empty() {
        return tokenizer.decode(tokens, true);
    }
    let last = &tokens[turn.min(tokens.len())..];
    for without_special in [true, false] {
        if !(without_special || has_special(tokenizer, stops)) {
            continue;
        }
        let text = tokenizer.decode(last, without_special)?;
        let Some(end) = first(&text, stops) else { continue };
        // the tokens before the string, and the characters before it of the token in which it begins
        let (kept, rest) = before(tokenizer, last, without_special, &text[..end])?;
        return Ok(tokenizer.decode(&tokens[..turn + kept], true)? + &rest);
    }
    tokenizer.decode(tokens, true)
}

/// The most tokens whose text a text begins with, and the rest of it.
fn before(tokenizer: &Tokenizer, tokens: &[u32], without_special: bool, text: &str) -> Result<(usize, String)> {
    for kept in (1..=tokens.len()).rev() {
        let decoded = tokenizer.decode(&tokens[..kept], without_special)?;
        if let Some(rest) = text.strip_prefix(&decoded) {
            return Ok((kept, rest.to_owned()));
        }
    }
    Ok((0, text.to_owned()))
}

/// Index of the first stop string in a text.
fn first(text: &str, stops: &[String]) -> Option<usize> {
    stops.iter().filter_map(|stop| text.find(stop.as_str())).min()
}

fn has_special(tokenizer: &Tokenizer, stops: &[String]) -> bool {
    let mut special = tokenizer.special_tokens().values();
    special.any(|token| stops.iter().any(|stop| stop.contains(token.as_str())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FinishReason;

    /// One token a character, and some of several; `<eos>` is a special token.
    fn tokenizer() -> Tokenizer {
        Tokenizer::characters_and_words("abQ:\n !<>", &["b\nQ"]).expect("a tokenizer")
    }

    fn sampling(stops: &[&str], stop_ids: &[u32]) -> SamplingParams {
        let stop_strings = stops.iter().map(|&stop| stop.to_owned()).collect();
        SamplingParams { stop_ids: stop_ids.to_vec(), stop_strings, ..SamplingParams::default() }
    }

    fn sample(tokens: &[u32]) -> Sample {
        Sample {
            request: 0,
            sample: 0,
            tokens: tokens.to_vec(),
            inserted: Vec::new(),
            logps: Vec::new(),
            full_logps: Vec::new(),
            finish: FinishReason::Stop,
            routes: None,
        }
    }

    #[test]
    fn a_text_ends_before_the_stop_string_also_within_a_token() {
        let tokenizer = tokenizer();
        for (text, stops, before) in [
            ("a\nQ:", &["\nQ:"][..], "a"),
            // it begins within the token `b\nQ`
            ("ab\nQ:", &["\nQ:"], "ab"),
            ("ab\nQ:a", &["Q", "\nQ:"], "ab"),
            ("a:a:", &["a:"], ""),
            ("ab", &["!"], "ab"),
            ("a ", &[], "a "),
            // a special token is a part of the text where a stop string has one
            ("ab<eos>", &["<eos>"], "ab"),
            ("a<eos>\nb", &["<eos>\n"], "a"),
            ("a<pad>b!", &["!"], "ab"),
            ("a<pad>b<eos>", &["b<eos>"], "a"),
            ("", &["a"], ""),
        ] {
            let tokens = tokenizer.encode(text, false).expect("tokens");
            let sampling = sampling(stops, &[]);
            let text_before = text_before_stop(&tokenizer, &sampling, &tokens, 0).expect("a text");
            assert_eq!(text_before, before, "{text:?}, {stops:?}");
            let met = StoppingCriteria::new(Some(&tokenizer), &sampling).is_met(&sample(&tokens)).expect("looked at");
            assert_eq!(met, text.len() > before.len() && !stops.is_empty(), "{text:?}, {stops:?}");
        }
    }

    #[test]
    fn a_stop_string_of_an_earlier_turn_and_a_stop_token_elsewhere_stay() {
        let tokenizer = tokenizer();
        let tokens = tokenizer.encode("a!b:a!", false).expect("tokens");
        let text = |turn, sampling| text_before_stop(&tokenizer, &sampling, &tokens, turn).expect("a text");
        assert_eq!(text(3, sampling(&["!"], &[])), "a!b:a");
        assert_eq!(text(0, sampling(&["!"], &[])), "a");
        // the token `!` ends the completion; in the middle it is a part of it
        let end = tokenizer.token_id("!").expect("a token");
        assert_eq!(text(0, sampling(&[], &[end])), "a!b:a");
        assert_eq!(text(6, sampling(&[], &[end])), "a!b:a!");
    }
}
