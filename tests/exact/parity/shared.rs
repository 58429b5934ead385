//! A critic that shares the policy's trunk: loss, gradients and values against one graph over the whole model with both
//! heads, every plan and cut against the plain one, and what the optimizer does with its group.

use std::collections::BTreeMap;

use burn::tensor::activation::log_softmax;
use firebrick_engine::batch::{Batch, MicroBatch};
use firebrick_engine::executor::{HeadLoss, Residency, Runtime};
use firebrick_engine::learner::{Learner, train_cut};
use firebrick_engine::objective::value::ValueLoss;
use firebrick_engine::objective::{Scores, TokenLoss};
use firebrick_engine::optim::OptimConfig;
use firebrick_engine::plan::{Layout, MemoryConfig, ModelPlan};
use firebrick_engine::sequence::Sequence;
use firebrick_models::adapter::LoraConfig;
use firebrick_models::decoder::{Param, RankShard};
use firebrick_models::random::Stream;
use firebrick_models::unit::{ParamSpec, Slot};
use firebrick_models::weights::Weights;

use super::plans::{
    Gradients, HEAD_ROWS, TEMPERATURE, TOLERANCE, WholeSequences, assert_same, models, objective, plans,
};
use crate::support::model::{Model, by_tensor};
use crate::support::techniques::sample;
use crate::support::{assert_close, assert_gradient, checked, techniques, values};

const HEAD: &str = "v_head.weight";

const VALUES: ValueLoss = ValueLoss { clip_range: 0.05 };
const COEFFICIENT: f64 = 0.3;

fn joint(tokens: &dyn TokenLoss) -> HeadLoss<'_> {
    HeadLoss::Joint { tokens, values: VALUES, coefficient: COEFFICIENT }
}

/// The models with a value head beside their projection, and rows with returns, values and weights of the value loss.
fn policies() -> Vec<(Model, Vec<Sequence>)> {
    let mut all = models();
    for (i, (model, rows)) in all.iter_mut().enumerate() {
        model.decoder = model.decoder.clone().with_joint_value_head(RankShard::default(), 3 + i as u64);
        let mut random = Stream::new(19, i as u64);
        for row in rows {
            let (mut returns, mut value, mut value_weight) = (Vec::new(), Vec::new(), Vec::new());
            for _ in &row.positions {
                returns.push(f64::from(random.normal()));
                value.push(f64::from(0.1 * random.normal()));
                value_weight.push(0.02 + f64::from(random.normal()).abs());
            }
            row.columns.returns = Some(returns);
            row.columns.value = Some(value);
            row.columns.value_weight = Some(value_weight);
        }
    }
    all
}

fn whole(rows: &[Sequence]) -> Vec<Vec<&Sequence>> {
    vec![rows.iter().collect()]
}

/// Loss and gradients by one graph over embedding, layers and both heads, in tensor operations: nothing of the
/// schedule.
fn traced(model: &Model, rows: &[Sequence], tokens: &dyn TokenLoss) -> (f64, Gradients) {
    let decoder = &model.decoder;
    let (arch, device) = (decoder.arch(), decoder.device());
    let micro = MicroBatch::new(arch, &whole(rows)[0], Layout::Padded, 0, device);
    let leaves: Vec<Weights> =
        (0..decoder.units().len()).map(|unit| decoder.units()[unit].leaves(&decoder.weights(unit))).collect();
    let embedded = decoder.embed_with(&leaves[0], micro.ids.clone());
    let hidden = decoder.body().fold(embedded, |x, unit| decoder.run(unit, &leaves[unit], x, &micro.ctx));
    let hidden = hidden.select(0, micro.rows.clone());
    let ends = &leaves[leaves.len() - 1];
    let need = |slot| ends.get(slot).or_else(|| leaves[0].get(Slot::Embedding)).expect("a leaf");
    let mean_square = (hidden.clone() * hidden.clone()).mean_dim(1);
    let normed = hidden / (mean_square + arch.norm_eps).sqrt() * (need(Slot::InputNorm) + arch.norm_offset);
    let logits = normed.clone().matmul(need(Slot::Projection).transpose());
    let logits = match arch.logit_softcap {
        Some(cap) => (logits * (1.0 / cap)).tanh() * cap,
        None => logits,
    };
    // autodiff takes the reciprocal of a divisor in f32: products keep f64
    let log_probs = log_softmax(logits * (1.0 / TEMPERATURE), 1);
    let scored = micro.scored();
    let targets = micro.targets.clone().reshape([scored, 1]);
    let scores = Scores {
        logp: log_probs.clone().gather(1, targets).reshape([scored]),
        entropy: (log_probs.clone().exp() * log_probs).sum_dim(1).neg().reshape([scored]),
    };
    let found = normed.matmul(need(Slot::Value).transpose());
    let found = found.reshape([scored]);
    let loss = tokens.loss(&scores, &micro.inputs).total + VALUES.loss(&found, &micro.inputs).total * COEFFICIENT;
    let mut tape = loss.backward();
    let leaves = leaves.iter().flat_map(Weights::tensors);
    let gradients = decoder.specs().zip(leaves).map(|(spec, leaf)| {
        let gradient = leaf.grad_remove(&mut tape);
        let gradient = gradient.unwrap_or_else(|| leaf.clone().inner().zeros_like());
        by_tensor(spec, &values(gradient))
    });
    let gradients = gradients.flatten().collect();
    (values(loss.inner())[0], gradients)
}

#[test]
fn policy_and_value_loss_in_one_backward_have_the_gradients_of_one_graph() {
    let mut tensors = 0;
    for (model, rows) in policies() {
        let objective = objective();
        let losses: [&dyn TokenLoss; 2] = [&objective, &WholeSequences];
        for loss in losses {
            let plain = model.plain(HEAD_ROWS);
            let found = model.backward(&plain, TEMPERATURE, joint(loss), &whole(&rows));
            let (total, expected) = traced(&model, &rows, loss);
            assert_close(&model.name, found.0.loss, total, TOLERANCE);
            assert!(expected.keys().eq(found.1.keys()), "{}", model.name);
            for (name, expected) in &expected {
                let label = format!("{}: {name}", model.name);
                assert_gradient(&label, &found.1[name], expected, TOLERANCE);
                tensors += 1;
            }
        }
        let alone = model.backward(&model.plain(HEAD_ROWS), TEMPERATURE, &objective, &whole(&rows));
        assert!(!alone.1.contains_key(HEAD), "no value loss, no gradient");
    }
    checked("gradients of a shared trunk", tensors);
}

#[test]
fn every_plan_gives_a_shared_trunk_the_loss_and_gradients_of_the_plain_one() {
    let (mut cases, mut turn) = (0, 0);
    for (model, rows) in policies() {
        let objective = objective();
        let losses: [(&str, &dyn TokenLoss); 2] = [("by token", &objective), ("by sequence", &WholeSequences)];
        for (kind, loss) in losses {
            let plain = model.plain(HEAD_ROWS);
            let expected = model.backward(&plain, TEMPERATURE, joint(loss), &whole(&rows));
            // where a row's scores depend on the rest of its batch, so does the loss
            let micros =
                if model.manifest.is_local() { rows.iter().map(|row| vec![row]).collect() } else { whole(&rows) };
            for (name, plan) in sample(&mut turn, plans(&model)) {
                let found = model.backward(&plan, TEMPERATURE, joint(loss), &micros);
                let label = format!("{}, shared trunk, {name}, loss {kind}", model.name);
                assert_same(&label, &found, &expected);
                cases += 1;
            }
        }
    }
    checked("plans of a shared trunk against the plain one", cases);
}

#[test]
fn every_cut_of_a_batch_gives_a_shared_trunk_its_loss_gradients_and_values() {
    let mut cases = 0;
    for (model, rows) in policies() {
        if !model.manifest.is_local() {
            continue;
        }
        let objective = objective();
        let plain = model.plain(HEAD_ROWS);
        let expected = model.backward(&plain, TEMPERATURE, joint(&objective), &whole(&rows));
        let at_once = model.score(&plain, TEMPERATURE, &rows).values;
        for max_sequences in 1..=3 {
            let plan = ModelPlan { head_rows: 3, micro_batch_size: Some(max_sequences), ..plain.clone() };
            let cut = train_cut(&plan, &model.decoder);
            let micros = Batch::pack(&rows, cut).expect("every row fits").micros();
            let label = format!("{}, shared trunk, {max_sequences} at a time", model.name);
            let found = model.backward(&plan, TEMPERATURE, joint(&objective), &micros);
            assert_same(&label, &found, &expected);
            let cut = model.score(&plan, TEMPERATURE, &rows).values;
            assert_eq!(cut.len(), rows.len());
            for (a, b) in cut.iter().flatten().zip(at_once.iter().flatten()) {
                // read off in f32
                assert_close(&label, f64::from(*a), f64::from(*b), 1e-6);
            }
            cases += 1;
        }
    }
    checked("cuts of a shared trunk's batch", cases);
}

fn optim() -> OptimConfig {
    OptimConfig { lr: 1e-2, clip_grad: None, ..OptimConfig::default() }
}

/// The weights after two optimizer steps, the value head at `rate` times the rate of the rest.
fn trained(model: &Model, rows: &[Sequence], memory: &MemoryConfig, rate: f64) -> Gradients {
    let memory = MemoryConfig { micro_batch_size: Some(1), ..memory.clone() };
    let plan = memory.plan(model.decoder.arch()).expect("a plan");
    let runtime = Runtime::new(model.decoder.device()).with_prefetch(plan.prefetch);
    let learner = Learner::new(model.decoder.clone(), plan, optim(), runtime);
    let mut learner = learner.with_value_rate(rate);
    let settled = learner.model.set_residency(Residency::Pass);
    settled.expect("weights in their place");
    let objective = objective();
    for _ in 0..2 {
        let updated = learner.update(rows, TEMPERATURE, joint(&objective), 1e-2);
        let updated = updated.unwrap_or_else(|error| panic!("{}: {error}", model.name));
        assert!(updated.outcome.applied && updated.outcome.grad_norm > 0.0);
    }
    let params = learner.decoder().params();
    let value = |(spec, value): (&ParamSpec, Param)| {
        let own = value.download().expect("values").to_f64();
        (spec.name.clone(), own)
    };
    params.map(value).collect::<BTreeMap<_, _>>()
}

#[test]
fn every_place_of_the_optimizer_updates_a_shared_trunk_alike_and_its_head_at_its_own_rate() {
    let (mut cases, mut turn) = (0, 0);
    for (model, rows) in policies() {
        if !model.manifest.is_local() {
            continue;
        }
        let plain = MemoryConfig::default();
        let expected = trained(&model, &rows, &plain, 3.0);
        let same_rate = trained(&model, &rows, &plain, 1.0);
        assert_ne!(expected[HEAD], same_rate[HEAD], "{}", model.name);
        for (name, memory) in sample(&mut turn, techniques::optimizers()) {
            let found = trained(&model, &rows, &memory, 3.0);
            for (parameter, found) in &found {
                let label = format!("{}, shared trunk, {name}: {parameter}", model.name);
                assert_gradient(&label, found, &expected[parameter], TOLERANCE);
            }
            cases += 1;
        }
    }
    checked("places of a shared trunk's optimizer", cases);
}

#[test]
fn beside_adapters_the_value_head_trains_and_nothing_else_does() {
    let mut cases = 0;
    for (mut model, rows) in models() {
        let lora = LoraConfig { rank: 2, ..LoraConfig::default() };
        let adapted = model.decoder.with_fresh_adapters(lora, 1).expect("adapters");
        model.decoder = adapted.with_joint_value_head(RankShard::default(), 2);
        let mut rows = rows;
        for row in &mut rows {
            row.columns.returns = Some(vec![1.0; row.positions.len()]);
            row.columns.value = Some(vec![0.0; row.positions.len()]);
        }
        let objective = objective();
        let plain = model.plain(HEAD_ROWS);
        let expected = model.backward(&plain, TEMPERATURE, joint(&objective), &whole(&rows));
        let own = |name: &String| name.contains("lora_") || name == HEAD;
        assert!(expected.1.keys().all(own), "{:?}", expected.1.keys());
        assert!(expected.1[HEAD].iter().any(|g| g.abs() > 0.0));
        for (name, plan) in plans(&model).into_iter().step_by(7) {
            let found = model.backward(&plan, TEMPERATURE, joint(&objective), &whole(&rows));
            let label = format!("{}, adapters and a value head, {name}", model.name);
            assert_same(&label, &found, &expected);
            cases += 1;
        }
    }
    checked("plans of adapters beside a value head", cases);
}
