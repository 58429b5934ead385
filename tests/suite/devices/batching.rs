//! Loss and gradients of a step do not depend on how it is cut, nor on how sequences lie in rows.

use super::{model, on_devices};
use crate::support::model::nll_rows;
use crate::support::tolerance::F32;
use crate::support::{assert_close, assert_gradient, checked, fixtures};
use burn::tensor::Device;
use firebrick_engine::batch::Batch;
use firebrick_engine::learner::train_cut;
use firebrick_engine::objective::sft::Nll;
use firebrick_engine::plan::{Layout, ModelPlan};
use firebrick_engine::sequence::Sequence;

on_devices! {
    any_cut_in_either_layout_gives_one_loss_and_gradients,
}

fn any_cut_in_either_layout_gives_one_loss_and_gradients(device: &Device) {
    let (model, golden) = model(&fixtures().join("models/qwen2-tied"), device);
    let rows = nll_rows(&golden);
    let longest = rows.iter().map(|r| r.tokens.len()).max().unwrap_or(1);
    let whole: Vec<Vec<&Sequence>> = vec![rows.iter().collect()];
    let expected = model.backward(&model.plain(1024), 1.0, &Nll, &whole);
    let mut cuts = 0;
    for layout in [Layout::Packed, Layout::Padded] {
        for budget in [longest, 2 * longest, 1024] {
            let plan = ModelPlan { layout, train_tokens: budget, ..model.plain(1024) };
            let batch = Batch::pack(&rows, train_cut(&plan, &model.decoder)).expect("a cut");
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
