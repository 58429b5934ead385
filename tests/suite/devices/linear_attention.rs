//! A model with gated `DeltaNet` on GPUs: the parity tests of the CPU, adapters, and what is sampled in slots and
//! chunks. Log-probs, gradients and continuations of all families are in `parity` and `rollout`.

use super::quantized_base::adapted;
use super::rollout::{DRAWN, PROMPTS, assert_same, generate};
use super::{model, on_gpus};
use crate::parity::{linear_attention, long_rows, models};
use crate::support::golden::Golden;
use crate::support::model::{Model, nll_rows};
use crate::support::{assert_close, assert_gradient, checked, fixtures};
use burn::tensor::Device;
use firebrick_engine::objective::sft::Nll;
use firebrick_sampler::SchedulerConfig;

on_gpus! {
    rows_in_both_paddings_packed_and_through_the_cache_have_the_scores_of_transformers,
    a_long_row_has_the_scores_and_gradients_of_transformers,
    states_are_those_of_transformers_however_a_prompt_is_divided,
    gradients_of_adapters_are_those_of_the_cpu,
    slots_chunks_and_a_short_cache_change_no_token_of_linear_attention,
}

fn linear(device: &Device) -> (Model, Golden) {
    model(&fixtures().join("models/qwen3_5"), device)
}

fn rows_in_both_paddings_packed_and_through_the_cache_have_the_scores_of_transformers(device: &Device) {
    let (model, golden) = linear(device);
    let rows = models::hold_logits(&model, &golden)
        + models::hold_left_padded(&model, &golden)
        + models::hold_through_the_cache(&model, &golden);
    checked("rows of linear attention", rows);
}

fn a_long_row_has_the_scores_and_gradients_of_transformers(device: &Device) {
    let (model, _) = linear(device);
    let golden = model.golden(long_rows::EXTRA);
    let cases = long_rows::hold_scores(&model, &golden) + long_rows::hold_gradients(&model, &golden);
    checked("scores and gradients of a long row", cases);
}

fn states_are_those_of_transformers_however_a_prompt_is_divided(device: &Device) {
    let (model, _) = linear(device);
    let golden = model.golden(long_rows::EXTRA);
    // all at once, in pieces that cut chunks, and a token at a time
    let states = linear_attention::hold_prompt(&model, &golden, &[1000, 19, 1])
        + linear_attention::hold_long_row(&model, &golden, &[1000, 64]);
    checked("states of linear attention", states);
}

fn gradients_of_adapters_are_those_of_the_cpu(device: &Device) {
    let (mut here, golden) = linear(device);
    let mut on_cpu = Model::load(&here.dir);
    for model in [&mut here, &mut on_cpu] {
        model.decoder = adapted(&model.decoder, 3);
    }
    let rows = nll_rows(&golden);
    let whole = [rows.iter().collect::<Vec<_>>()];
    let (expected_sums, expected) = on_cpu.backward(&on_cpu.plain(1024), 1.0, &Nll, &whole);
    let (sums, found) = here.backward(&here.checkpointed(1024, 1), 1.0, &Nll, &whole);
    assert_close("loss", sums.loss, expected_sums.loss, here.tolerance());
    assert!(found.keys().eq(expected.keys()), "{:?}", found.keys());
    for (parameter, found) in &found {
        assert_gradient(parameter, found, &expected[parameter], here.tolerance());
    }
    checked("gradients of adapters", found.len());
}

fn slots_chunks_and_a_short_cache_change_no_token_of_linear_attention(device: &Device) {
    let (model, _) = linear(device);
    let sample =
        |model: &Model, limits: &SchedulerConfig| generate(model, &PROMPTS.map(<[u32]>::to_vec), DRAWN, limits);
    let expected = sample(&Model::load(&model.dir), &SchedulerConfig::new(64));
    let arch = model.decoder.arch();
    let least = SchedulerConfig::new(4).least_cache_bytes(arch, PROMPTS[1].len() + DRAWN.new);
    let chunked = SchedulerConfig { max_num_batched_tokens: 3, ..SchedulerConfig::new(3) };
    let short = SchedulerConfig { kv_cache_bytes: Some(2 * least), ..SchedulerConfig::new(4) };
    for limits in [SchedulerConfig::new(64), chunked, short] {
        assert_same(&sample(&model, &limits), &expected);
    }
}
