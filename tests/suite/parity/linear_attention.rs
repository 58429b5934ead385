//! What `golden/extra.safetensors` holds of gated `DeltaNet`: the states after a prompt and after a long row, against transformers.

use burn::tensor::Tensor;
use firebrick_models::arch::{GatedDeltaNet, Mixer};

use super::long_rows::{long_row, models, run_through_the_cache};
use crate::support::golden::Golden;
use crate::support::model::Model;
use crate::support::{assert_all_close, checked, is_foreign, report, values};

/// Chunk lengths of a prompt: all at once, in pieces that cut chunks of 64, and a token at a time.
const PREFILLS: [usize; 4] = [1000, 64, 19, 1];

/// The models with such layers, their golden files, shapes, and layers.
fn linear() -> impl Iterator<Item = (Model, Golden, GatedDeltaNet, Vec<usize>)> {
    models().filter_map(|(model, golden)| {
        let arch = model.decoder.arch();
        let layers = (0..arch.num_layers).filter(|&i| arch.mixers[i] == Mixer::GatedDeltaNet);
        let (delta, layers) = (arch.delta_net?, layers.collect());
        Some((model, golden, delta, layers))
    })
}

fn found(cases: usize, what: &str) {
    if cases > 0 || !is_foreign() {
        checked(what, cases);
    } else {
        report(&format!("no {what}"));
    }
}

/// The states of a layer after some tokens: of the delta rule, and of the convolution, `[taps − 1, channels]`.
fn states(model: &Model, tokens: &[u32], prefill: usize, layer: usize) -> [Vec<f64>; 2] {
    let (_, cache, table) = run_through_the_cache(model, tokens, prefill);
    let own = cache.states_of(&table, layer).expect("linear attention");
    own.map(|state: Tensor<1>| values(state))
}

#[test]
fn states_after_a_prompt_are_those_of_transformers_however_it_is_divided() {
    let mut cases = 0;
    for (model, golden, delta, layers) in linear() {
        let greedy = model.manifest.greedy.as_ref().expect("continuations");
        let prompt = &greedy.samples[0].prompt_ids;
        for (prefill, layer) in PREFILLS
            .into_iter()
            .flat_map(|p| layers.iter().map(move |&l| (p, l)))
        {
            let label = format!("{}: layer {layer}, {prefill} tokens at a time", model.name);
            let [recurrent, convolution] = states(&model, prompt, prefill, layer);
            let expected = golden.floats(&format!("delta.layer{layer}.recurrent_state"));
            assert_all_close(&label, &recurrent, &expected, model.tolerance());
            // transformers keeps the last four inputs of each channel, of which the next token needs three
            let (taps, channels) = (delta.conv_kernel_dim, delta.channels());
            let kept = golden.floats(&format!("delta.layer{layer}.conv_state"));
            let expected: Vec<f64> = (1..taps)
                .flat_map(|tap| (0..channels).map(move |c| (c, tap)))
                .map(|(c, tap)| kept[c * taps + tap])
                .collect();
            assert_all_close(&label, &convolution, &expected, model.tolerance());
            cases += 1;
        }
    }
    found(cases, "states after prompts");
}

#[test]
fn states_after_a_long_row_are_those_of_transformers_in_chunks_and_token_by_token() {
    let mut cases = 0;
    for (model, golden, _, layers) in linear() {
        let row = long_row(&golden);
        for (prefill, layer) in PREFILLS
            .into_iter()
            .flat_map(|p| layers.iter().map(move |&l| (p, l)))
        {
            let label = format!("{}: layer {layer}, {prefill} tokens at a time", model.name);
            let [recurrent, _] = states(&model, &row.tokens, prefill, layer);
            let expected = golden.floats(&format!("long.layer{layer}.recurrent_state"));
            assert_all_close(&label, &recurrent, &expected, model.tolerance());
            cases += 1;
        }
    }
    found(cases, "states after long rows");
}
