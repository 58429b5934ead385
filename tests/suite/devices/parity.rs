//! Models against transformers.

use super::{model, on_devices};
use crate::support::model::{nll_rows, scored_rows};
use crate::support::tolerance::F32_ELSEWHERE;
use crate::support::{assert_all_close, assert_close, assert_gradient, checked, folders};
use burn::tensor::Device;
use firebrick_engine::objective::sft::Nll;

on_devices! {
    log_probs_and_entropies_are_those_of_transformers,
    losses_and_gradients_are_those_of_transformers_with_and_without_recomputing,
}

fn log_probs_and_entropies_are_those_of_transformers(device: &Device) {
    let wide = |v: &[f32]| v.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
    let mut rows = 0;
    for dir in folders("models") {
        let (model, golden) = model(&dir, device);
        let name = model.name.as_str();
        let sequences = scored_rows(&golden);
        let scores = model.score(&model.plain(1024), 1.0, &sequences);
        let logp = golden.float_rows("logprobs_right");
        let entropy = golden.float_rows("entropy_right");
        for (i, sequence) in sequences.iter().enumerate() {
            let n = sequence.tokens.len();
            let found = wide(&scores.logp[i][..n - 1]);
            assert_all_close(name, &found, &logp[i][..n - 1], F32_ELSEWHERE);
            let found = wide(&scores.entropy[i]);
            assert_all_close(name, &found, &entropy[i][..n], F32_ELSEWHERE);
            rows += 1;
        }
    }
    checked("rows of log-probs and entropies", rows);
}

fn losses_and_gradients_are_those_of_transformers_with_and_without_recomputing(device: &Device) {
    let mut tensors = 0;
    for dir in folders("models") {
        let (model, golden) = model(&dir, device);
        let name = model.name.as_str();
        let rows = nll_rows(&golden);
        let Some(expected) = model.golden_gradients() else {
            continue;
        };
        for plan in [model.plain(1024), model.checkpointed(1024, 1)] {
            let whole = vec![rows.iter().collect()];
            let (sums, found) = model.backward(&plan, 1.0, &Nll, &whole);
            assert_close(name, sums.loss, model.manifest.loss.unwrap(), F32_ELSEWHERE);
            for (parameter, found) in &found {
                let label = format!("{name}: {parameter}");
                assert_gradient(&label, found, &expected.floats(parameter), F32_ELSEWHERE);
                tensors += 1;
            }
        }
    }
    checked("gradient tensors", tensors);
}
