//! What `golden/extra.safetensors` holds of gated `DeltaNet`: the states after a prompt and after a long row, against
//! transformers.

use burn::tensor::Tensor;
use firebrick_models::arch::Mixer;

use super::long_rows::{long_row, models, run_through_the_cache};
use crate::support::golden::Golden;
use crate::support::model::Model;
use crate::support::{assert_all_close, checked, is_foreign, report, values};

/// Chunk lengths of a prompt: all at once, in pieces that cut chunks of 64, and a token at a time.
const PREFILLS: [usize; 4] = [1000, 64, 19, 1];

/// The models with such layers, and their golden files.
fn linear() -> impl Iterator<Item = (Model, Golden)> {
    models().filter(|(model, _)| model.decoder.arch().delta_net.is_some())
}

fn found(cases: usize, what: &str) {
    if cases > 0 || !is_foreign() {
        checked(what, cases);
    } else {
        report(&format!("no {what}"));
    }
}

/// By layer with such states, those after some tokens: of the delta rule, and of the convolution, `[taps − 1,
/// channels]`.
fn states(model: &Model, tokens: &[u32], prefill: usize) -> Vec<(usize, [Vec<f64>; 2])> {
    let arch = model.decoder.arch();
    let (_, cache, table) = run_through_the_cache(model, tokens, prefill);
    let layers = (0..arch.num_layers).filter(|&i| arch.mixers[i] == Mixer::GatedDeltaNet);
    let of_layer = |layer| {
        let own = cache.states_of(&table, layer).expect("linear attention");
        (layer, own.map(|state: Tensor<1>| values(state)))
    };
    layers.map(of_layer).collect()
}

#[test]
fn states_after_a_prompt_are_those_of_transformers_however_it_is_divided() {
    let cases = linear().map(|(model, golden)| hold_prompt(&model, &golden, &PREFILLS));
    found(cases.sum(), "states after prompts");
}

/// Compares the states after a prompt that is divided in these ways, and says how many.
pub(crate) fn hold_prompt(model: &Model, golden: &Golden, prefills: &[usize]) -> usize {
    let delta = model.decoder.arch().delta_net.expect("linear attention");
    let greedy = model.manifest.greedy.as_ref().expect("continuations");
    let prompt = &greedy.samples[0].prompt_ids;
    // transformers keeps the last four inputs of each channel, of which the next token needs three
    let (taps, channels) = (delta.conv_kernel_dim, delta.channels());
    let mut cases = 0;
    for &prefill in prefills {
        for (layer, [recurrent, convolution]) in states(model, prompt, prefill) {
            let label = format!("{}: layer {layer}, {prefill} tokens at a time", model.name);
            let expected = golden.floats(&format!("delta.layer{layer}.recurrent_state"));
            assert_all_close(&label, &recurrent, &expected, model.tolerance());
            let kept = golden.floats(&format!("delta.layer{layer}.conv_state"));
            let expected: Vec<f64> = (1..taps)
                .flat_map(|tap| (0..channels).map(move |c| (c, tap)))
                .map(|(c, tap)| kept[c * taps + tap])
                .collect();
            assert_all_close(&label, &convolution, &expected, model.tolerance());
            cases += 1;
        }
    }
    cases
}

#[test]
fn states_after_a_long_row_are_those_of_transformers_in_chunks_and_token_by_token() {
    let cases = linear().map(|(model, golden)| hold_long_row(&model, &golden, &PREFILLS));
    found(cases.sum(), "states after long rows");
}

/// Compares the states after the long row, divided in these ways, and says how many.
pub(crate) fn hold_long_row(model: &Model, golden: &Golden, prefills: &[usize]) -> usize {
    let row = long_row(golden);
    let mut cases = 0;
    for &prefill in prefills {
        for (layer, [recurrent, _]) in states(model, &row.tokens, prefill) {
            let label = format!("{}: layer {layer}, {prefill} tokens at a time", model.name);
            let expected = golden.floats(&format!("long.layer{layer}.recurrent_state"));
            assert_all_close(&label, &recurrent, &expected, model.tolerance());
            cases += 1;
        }
    }
    cases
}
