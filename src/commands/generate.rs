//! `firebrick generate`.

use super::{Loaded, load};
use crate::arguments::GenerateArgs;
use crate::output;
use firebrick::engine::checkpoint::check_ends;
use firebrick::models::random::DrawKey;
use firebrick::models::tokenizer::{ChatOptions, Control, EndTokens, Message};
use firebrick::sampler::{GenerationRequest, Generator, SamplingParams, text_before_stop};
use serde_json::json;

pub fn run(args: &GenerateArgs) -> anyhow::Result<()> {
    let Loaded { checkpoint, tokenizer, decoder } = load(&args.checkpoint, args.device)?;
    let stop_ids = EndTokens::new(&checkpoint.eos_ids(), &tokenizer).ids;
    check_ends(&stop_ids, checkpoint.arch())?;
    let sampling = SamplingParams {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        max_new_tokens: args.max_new_tokens,
        stop_ids,
        stop_strings: args.stop.clone(),
    };
    let mut requests = Vec::with_capacity(args.prompt.len());
    for (index, prompt) in args.prompt.iter().enumerate() {
        let tokens = if args.chat {
            tokenizer.encode_chat(&[Message::new("user", prompt.clone())], ChatOptions::prompt())?.1
        } else {
            // the argument may be a rendered prompt
            tokenizer.encode_text(prompt, &Control::Everywhere, true)?
        };
        requests.push(GenerationRequest {
            tokens,
            key: DrawKey { seed: args.seed, step: 0, prompt_index: index as u32, sample: 0 },
            max_new_tokens: None,
        });
    }
    for sample in Generator::new(&decoder, Some(&tokenizer), &sampling)?.run(
        &requests,
        usize::from(args.n),
        256.max(usize::from(args.n)),
    )? {
        let text = text_before_stop(&tokenizer, &sampling, &sample.tokens, 0)?;
        let prompt = &args.prompt[sample.request];
        if args.json {
            let line = json!({
                "prompt": prompt, "sample": sample.sample, "completion": text, "tokens": sample.tokens,
                "logprobs": sample.logps, "full_logprobs": sample.full_logps, "finish": sample.finish,
            });
            output::print_raw(&format!("{line}\n"))?;
        } else {
            output::print(&format!("{prompt}{text}\n"))?;
        }
    }
    Ok(())
}
