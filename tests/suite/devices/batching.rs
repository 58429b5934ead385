//! Loss and gradients of a step do not depend on how it is cut, nor on how sequences lie in rows.

use super::{model, on_devices};
use crate::support::golden::Golden;
use crate::support::model::nll_rows;
use crate::support::tolerance::F32;
use crate::support::{assert_close, assert_gradient, checked, fixtures};
use burn::tensor::Device;
use firebrick_engine::batch::{Batch, grouping};
use firebrick_engine::learner::train_cut;
use firebrick_engine::objective::sft::Nll;
use firebrick_engine::plan::{Layout, ModelPlan};
use firebrick_engine::sequence::Sequence;

/// Tokens of a prompt.
const PROMPT: usize = 6;

on_devices! {
    any_cut_in_any_layout_gives_one_loss_and_gradients,
    a_shared_prompt_changes_no_loss_or_gradient_of_any_attention,
}

/// Rows of a model's golden numbers, the first three of one prompt.
fn rows_of_one_prompt(golden: &Golden) -> Vec<Sequence> {
    let mut rows = nll_rows(golden);
    let prompt = rows[0].tokens[..PROMPT].to_vec();
    for row in rows.iter_mut().take(3) {
        row.tokens[..PROMPT].copy_from_slice(&prompt);
        row.positions.drain(..PROMPT - 1);
        row.columns.weight.as_mut().expect("weights").drain(..PROMPT - 1);
    }
    rows
}

fn any_cut_in_any_layout_gives_one_loss_and_gradients(device: &Device) {
    let (model, golden) = model(&fixtures().join("models/qwen2-tied"), device);
    let rows = rows_of_one_prompt(&golden);
    let longest = rows.iter().map(|r| r.tokens.len()).max().unwrap_or(1);
    let whole: Vec<Vec<&Sequence>> = vec![rows.iter().collect()];
    let expected = model.backward(&model.plain(1024), 1.0, &Nll, &whole);
    let mut cuts = 0;
    for layout in [Layout::Packed, Layout::Padded, Layout::SharedPrefix] {
        for budget in [longest, 2 * longest, 1024] {
            let plan = ModelPlan { layout, train_tokens: budget, ..model.plain(1024) };
            let batch = Batch::pack(&rows, train_cut(&plan, &model.decoder)).expect("a cut");
            let stats = batch.stats(grouping(0, device));
            assert_eq!(stats.unique_tokens < stats.tokens, layout == Layout::SharedPrefix && budget > longest);
            let (sums, found) = model.backward(&plan, 1.0, &Nll, &batch.micros());
            let label = format!("{layout:?}, {budget} tokens");
            assert_close(&label, sums.loss, expected.0.loss, F32);
            for (parameter, found) in &found {
                let label = format!("{label}: {parameter}");
                assert_gradient(&label, found, &expected.1[parameter], F32);
            }
            cuts += 1;
        }
    }
    checked("cuts of a batch", cuts);
}

/// Windows, soft caps, sinks, experts and gated `DeltaNet`.
fn a_shared_prompt_changes_no_loss_or_gradient_of_any_attention(device: &Device) {
    let mut cases = 0;
    for name in ["gemma2", "mistral-window", "gpt-oss", "qwen3-moe", "qwen3_5"] {
        let (model, golden) = model(&fixtures().join("models").join(name), device);
        let rows = rows_of_one_prompt(&golden);
        let plan = |layout| ModelPlan { layout, ..model.checkpointed(1024, 1) };
        let run = |layout| {
            let plan = plan(layout);
            let batch = Batch::pack(&rows, train_cut(&plan, &model.decoder)).expect("a cut");
            let stats = batch.stats(grouping(0, device));
            assert_eq!(stats.unique_tokens < stats.tokens, layout == Layout::SharedPrefix, "{name}");
            model.backward(&plan, 1.0, &Nll, &batch.micros())
        };
        let (shared, repeated) = (run(Layout::SharedPrefix), run(Layout::Packed));
        assert_close(name, shared.0.loss, repeated.0.loss, F32);
        for (parameter, gradient) in &shared.1 {
            assert_gradient(&format!("{name}: {parameter}"), gradient, &repeated.1[parameter], F32);
        }
        cases += 1;
    }
    checked("models with a shared prompt", cases);
}
