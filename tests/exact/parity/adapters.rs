//! Adapters under every plan and every cut, with dropout: loss and gradients equal those of the plain plan on the whole
//! batch.

use burn::tensor::{Tensor, TensorData};
use firebrick_engine::batch::{Batch, DropoutStep};
use firebrick_engine::learner::train_cut;
use firebrick_engine::objective::{LossSums, TokenLoss};
use firebrick_engine::plan::{Layout, ModelPlan};
use firebrick_engine::sequence::{SampleId, Sequence};
use firebrick_models::adapter::LoraConfig;
use firebrick_models::random::Stream;
use firebrick_models::unit::{ParamSpec, TargetModule};

use super::plans::{Gradients, HEAD_ROWS, TEMPERATURE, WholeSequences, assert_same, models, objective, plans};
use crate::support::checked;
use crate::support::model::Model;
use crate::support::techniques::sample;

/// The models with adapters whose B is not zero beside some of their projections, and rows that know which samples they
/// are.
fn adapted() -> Vec<(Model, Vec<Sequence>)> {
    let mut all = models();
    for (i, (model, rows)) in all.iter_mut().enumerate() {
        let lora = LoraConfig {
            rank: 3,
            alpha: 6.0,
            use_rslora: i % 2 == 1,
            dropout: 0.2,
            target_modules: if i % 2 == 0 || model.decoder.arch().expert_layers().count() > 0 {
                let experts = [TargetModule::ExpertGateUp, TargetModule::ExpertDown];
                TargetModule::all().into_iter().chain(experts).collect()
            } else {
                vec![TargetModule::V, TargetModule::Down]
            },
        };
        let mut random = Stream::new(13, i as u64);
        let adapted = model.decoder.with_adapters(lora, |_, spec| {
            let values: Vec<f32> = (0..spec.numel()).map(|_| 0.1 * random.normal()).collect();
            let data = TensorData::new(values, spec.rows_cols());
            Ok::<_, firebrick_models::Error>(Tensor::from_data(data, model.decoder.device()))
        });
        model.decoder = adapted.expect("adapters");
        for (sample, row) in rows.iter_mut().enumerate() {
            row.id = SampleId { prompt_index: 9, sample };
        }
        model.dropout = DropoutStep { seed: 5, step: 2 };
    }
    all
}

fn run(model: &Model, plan: &ModelPlan, loss: &dyn TokenLoss, micros: &[Vec<&Sequence>]) -> (LossSums, Gradients) {
    model.backward(plan, TEMPERATURE, loss, micros)
}

#[test]
fn every_plan_gives_the_loss_and_gradients_of_the_plain_one_beside_adapters() {
    let (mut cases, mut turn) = (0, 0);
    for (model, rows) in adapted() {
        let whole = vec![rows.iter().collect()];
        let alone: Vec<Vec<&Sequence>> = rows.iter().map(|row| vec![row]).collect();
        // where a row's scores depend on the rest of its batch, so does the loss
        let micros = if model.manifest.is_local() { &alone } else { &whole };
        let losses: [&dyn TokenLoss; 2] = [&objective(), &WholeSequences];
        for (loss, kind) in losses.into_iter().zip(["by token", "by sequence"]) {
            let expected = run(&model, &model.plain(HEAD_ROWS), loss, &whole);
            let adapters = model.decoder.specs().filter(|spec| spec.slot.is_adapter());
            let adapters = adapters.flat_map(ParamSpec::tensors);
            assert_eq!(expected.1.len(), adapters.count(), "{}", model.name);
            for (name, plan) in sample(&mut turn, plans(&model)) {
                let label = format!("{}, adapters, {name}, loss {kind}", model.name);
                assert_same(&label, &run(&model, &plan, loss, micros), &expected);
                cases += 1;
            }
        }
    }
    checked("plans against the plain one, beside adapters", cases);
}

#[test]
fn every_cut_of_a_batch_gives_its_loss_and_gradients_beside_adapters() {
    let mut cases = 0;
    for (model, rows) in adapted() {
        if !model.manifest.is_local() {
            continue;
        }
        let plain = model.plain(HEAD_ROWS);
        let loss = objective();
        let expected = run(&model, &plain, &loss, &[rows.iter().collect()]);
        for layout in [Layout::Packed, Layout::Padded] {
            for max_sequences in 1..=3 {
                let plan = ModelPlan { layout, micro_batch_size: Some(max_sequences), ..plain.clone() };
                let cut = train_cut(&plan, &model.decoder);
                let micros = Batch::pack(&rows, cut).expect("every row fits").micros();
                let label = format!("{}, adapters, {layout:?}, {} micro-batches", model.name, micros.len());
                assert_same(&label, &run(&model, &plan, &loss, &micros), &expected);
                cases += 1;
            }
        }
    }
    checked("cuts of a batch, beside adapters", cases);
}

#[test]
fn dropout_differs_by_step_and_scoring_knows_none() {
    let mut cases = 0;
    for (mut model, rows) in adapted() {
        let plain = model.plain(HEAD_ROWS);
        let loss = |model: &Model| {
            let whole = [rows.iter().collect()];
            run(model, &plain, &objective(), &whole).0.loss
        };
        let scores = |model: &Model| model.score(&plain, TEMPERATURE, &rows).logp;
        let (first, scored) = (loss(&model), scores(&model));
        model.dropout.step += 1;
        let next = loss(&model);
        model.decoder = model.decoder.with_adapter_dropout(0.0);
        let none = loss(&model);
        assert!((first - next).abs() > 1e-9 && (first - none).abs() > 1e-9, "{}: {first}, {next}, {none}", model.name);
        assert_eq!(scored, scores(&model), "{}", model.name);
        cases += 1;
    }
    checked("models with dropout", cases);
}
