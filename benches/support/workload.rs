//! Models, sequences and prompts that several benches share.

use firebrick::backends::DeviceSpec;
use firebrick::backends::device::open;
use firebrick::engine::sequence::Sequence;
use firebrick::models::random::{DrawKey, Stream};
use firebrick::models::{Arch, Decoder};
use firebrick::sampler::GenerationRequest;
use serde_json::{Value, json};
use std::path::Path;

/// Tokens of [`small`].
pub const VOCAB: usize = 4096;

/// A random decoder on the CPU, from a config with transformers' names.
fn decoder(config: &Value) -> Decoder {
    let config = config.as_object().expect("an object");
    let arch = Arch::from_config(config, Path::new("bench")).expect("a valid architecture");
    let (device, _) = open(DeviceSpec::CPU).expect("the CPU is always there");
    Decoder::random(arch, 1, &device)
}

/// The model of `examples/arithmetic.yaml`: 0.6 million parameters, 16 tokens.
pub fn arithmetic() -> Decoder {
    decoder(&json!({
        "model_type": "qwen3", "vocab_size": 16, "hidden_size": 128, "intermediate_size": 384,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32
    }))
}

/// 6.5 million parameters.
pub fn small() -> Decoder {
    decoder(&json!({
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 704,
        "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4
    }))
}

/// The shape of Qwen2.5-0.5B: 494 million parameters, 2 GB in f32.
pub fn real() -> Decoder {
    decoder(&json!({
        "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": true
    }))
}

fn token(index: usize, salt: usize, vocab: usize) -> u32 {
    ((index * 7919 + salt * 104_729) % vocab) as u32
}

/// Sequences of these lengths whose second half is a completion.
pub fn sequences(lengths: impl IntoIterator<Item = usize>, vocab: usize) -> Vec<Sequence> {
    lengths
        .into_iter()
        .enumerate()
        .map(|(salt, n)| {
            let tokens: Vec<u32> = (0..n).map(|i| token(i, salt, vocab)).collect();
            let mut sequence = Sequence::completion(&tokens[..n / 2], &tokens[n / 2..]);
            sequence.columns.weight = Some(vec![1e-3; n - n / 2]);
            sequence
        })
        .collect()
}

/// Lengths of grade-school word problems with their solutions: log-normal, median 250 tokens, a tenth above 400.
pub fn word_problems(count: usize) -> impl Iterator<Item = usize> {
    log_normal(count, 5.5, 0.38).map(|length| length.clamp(60, 1024))
}

/// Lengths with a long tail: log-normal, median 250 tokens, one in nine above 650, at most 2,048.
pub fn long_tailed(count: usize) -> impl Iterator<Item = usize> {
    log_normal(count, 250_f64.ln(), 0.8).map(|length| length.clamp(1, 2048))
}

fn log_normal(count: usize, mean: f64, sigma: f64) -> impl Iterator<Item = usize> {
    let mut random = Stream::new(1, 0);
    (0..count).map(move |_| (mean + sigma * f64::from(random.normal())).exp().round() as usize)
}

/// Prompts of [`small`], of `length(index)` tokens.
pub fn prompts(count: usize, length: impl Fn(usize) -> usize) -> Vec<GenerationRequest> {
    (0..count)
        .map(|i| GenerationRequest {
            tokens: (0..length(i)).map(|at| token(at, i, VOCAB)).collect(),
            key: DrawKey { seed: 1, step: 0, prompt_index: i as u32, sample: 0 },
            max_new_tokens: None,
        })
        .collect()
}
