//! `firebrick logprobs`.

use super::{Loaded, UserError, load};
use crate::arguments::LogprobsArgs;
use anyhow::Context;
use firebrick::engine::batch::MicroBatchLimits;
use firebrick::engine::executor::{Executor, Runtime, score_all};
use firebrick::engine::learner::score_cut;
use firebrick::engine::plan::MemoryConfig;
use firebrick::engine::sequence::Sequence;
use firebrick::models::Tokenizer;
use firebrick::models::tokenizer::Control;
use firebrick::sampler::check_ids;
use firebrick::spec::file::read_line;
use serde::Deserialize;
use serde_json::json;
use std::fmt::Write;
use std::fs::File;
use std::io::BufReader;

/// A line of the input.
#[derive(Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum Line {
    Ids { input_ids: Vec<u32> },
    Text { prompt: String, completion: String },
}

impl Line {
    fn tokens(self, tokenizer: &Tokenizer) -> anyhow::Result<Vec<u32>> {
        Ok(match self {
            Self::Ids { input_ids } => input_ids,
            Self::Text { prompt, completion } => {
                let prompt = tokenizer.encode_text(&prompt, &Control::Everywhere, true)?;
                [prompt, tokenizer.encode(&completion, false)?].concat()
            }
        })
    }
}

pub fn run(args: &LogprobsArgs) -> anyhow::Result<()> {
    if args.temperature.is_nan() || args.temperature <= 0.0 {
        return Err(UserError(format!("--temperature must be above 0, got {}", args.temperature)).into());
    }
    let unreadable = |e: std::io::Error| UserError(format!("cannot read {}: {e}", args.input.display()));
    let mut input = BufReader::new(File::open(&args.input).map_err(unreadable)?);
    let Loaded { tokenizer, decoder, .. } = load(&args.checkpoint, args.device)?;
    let mut sequences = Vec::new();
    let (mut text, mut number) = (Vec::new(), 0);
    while read_line(&mut input, &mut text).map_err(unreadable)? {
        number += 1;
        let at = || format!("{} line {number}", args.input.display());
        let line: Line = serde_json::from_slice(text.trim_ascii_end()).map_err(|_| {
            UserError(format!(
                "{}: expected {{\"input_ids\": [...]}} or {{\"prompt\": \"...\", \"completion\": \"...\"}}",
                at()
            ))
        })?;
        let tokens = line.tokens(&tokenizer).with_context(at)?;
        if tokens.is_empty() {
            return Err(UserError(format!("{}: no tokens", at())).into());
        }
        check_ids(&tokens, decoder.arch().vocab_size).with_context(at)?;
        let positions = (0..tokens.len()).collect();
        sequences.push(Sequence { tokens, positions, ..Sequence::default() });
    }
    let plan = MemoryConfig::default().plan(decoder.arch())?;
    let runtime = Runtime::new(decoder.device());
    let executor = Executor::new(&plan, &runtime, args.temperature);
    let cut = MicroBatchLimits { max_tokens: args.max_tokens, key: "--max-tokens", ..score_cut(&plan, &decoder) };
    let scores = score_all(&executor, &decoder, &sequences, cut)?;
    let mut out = String::new();
    for (logp, entropy) in scores.logp.iter().zip(&scores.entropy) {
        // the last position has an entropy and no next token
        writeln!(out, "{}", json!({"logprobs": logp[..logp.len() - 1], "entropy": entropy}))?;
    }
    std::fs::write(&args.output, out)
        .map_err(|e| UserError(format!("cannot write {}: {e}", args.output.display())).into())
}
