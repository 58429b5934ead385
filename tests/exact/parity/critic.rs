//! A critic: its gradients against one graph over the whole model, every plan and cut of it against the plain one, and
//! a step of policy, critic, reference and reward model together.

use std::path::Path;
use std::sync::Arc;

use firebrick_backends::Precision;
use firebrick_engine::batch::{Batch, MicroBatch};
use firebrick_engine::executor::{Executor, Residency, ResidentModel, Runtime};
use firebrick_engine::learner::{Learner, score_placed, train_cut};
use firebrick_engine::objective::value::ValueLoss;
use firebrick_engine::optim::OptimConfig;
use firebrick_engine::plan::{Layout, MemoryConfig, ModelPlan, Role};
use firebrick_engine::reward::{RewardModel, SharedResources};
use firebrick_engine::sequence::{Sequence, column};
use firebrick_engine::task::{RewardInput, RewardModelConfig};
use firebrick_engine::world::World;
use firebrick_models::arch::HeadKind;
use firebrick_models::checkpoint::{ExportOptions, export};
use firebrick_models::decoder::Param;
use firebrick_models::random::Stream;
use firebrick_models::weights::Weights;
use firebrick_models::{Checkpoint, Decoder, Tokenizer};
use tempfile::TempDir;

use super::plans::{Gradients, HEAD_ROWS, TEMPERATURE, TOLERANCE, assert_same, models, objective, plans};
use crate::support::model::{Model, by_tensor};
use crate::support::techniques::sample;
use crate::support::{assert_close, assert_gradient, checked, techniques, values};

/// Narrow enough that some values are clipped.
const LOSS: ValueLoss = ValueLoss { clip_range: 0.05 };

/// The models with a value head on their bodies, and rows with returns and with values from before an update.
pub(super) fn critics() -> Vec<(Model, Vec<Sequence>)> {
    let mut all = models();
    for (i, (model, rows)) in all.iter_mut().enumerate() {
        model.decoder = model.decoder.with_value_head(3 + i as u64);
        let mut random = Stream::new(17, i as u64);
        for row in rows {
            let (mut returns, mut value) = (Vec::new(), Vec::new());
            for _ in &row.positions {
                returns.push(f64::from(random.normal()));
                value.push(f64::from(0.1 * random.normal()));
            }
            row.columns.returns = Some(returns);
            row.columns.value = Some(value);
        }
    }
    all
}

fn whole(rows: &[Sequence]) -> Vec<Vec<&Sequence>> {
    vec![rows.iter().collect()]
}

/// Loss and gradients by one graph over embedding, layers and head: nothing of the executor, and the head traced.
fn traced(model: &Model, rows: &[Sequence]) -> (f64, Gradients) {
    let decoder = &model.decoder;
    let (arch, device) = (decoder.arch(), decoder.device());
    let micro = MicroBatch::new(arch, &whole(rows)[0], Layout::Padded, 0, device);
    let leaves: Vec<_> =
        (0..decoder.units().len()).map(|unit| decoder.units()[unit].leaves(&decoder.weights(unit))).collect();
    let embedded = decoder.embed_with(&leaves[0], micro.ids.clone());
    let hidden = decoder.body().fold(embedded, |x, unit| decoder.run(unit, &leaves[unit], x, &micro.ctx));
    let head = decoder.head_with(&leaves[leaves.len() - 1]);
    let found = head.scalar(hidden.select(0, micro.rows.clone()));
    let loss = LOSS.loss(&found, &micro.inputs).total;
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
fn a_critics_gradients_are_those_of_one_graph_over_all_of_it() {
    let mut tensors = 0;
    for (model, rows) in critics() {
        let scalar = matches!(model.decoder.arch().head, HeadKind::Scalar { .. });
        assert!(scalar, "{}", model.name);
        let found = model.backward(&model.plain(HEAD_ROWS), TEMPERATURE, LOSS, &whole(&rows));
        let (loss, expected) = traced(&model, &rows);
        assert_close(&model.name, found.0.loss, loss, TOLERANCE);
        let clipped = found.0.values().find(|(name, _)| *name == "critic/vf_clipfrac");
        assert!(clipped.expect("a metric").1 > 0.0, "{}", model.name);
        assert!(expected.keys().eq(found.1.keys()), "{}", model.name);
        for (name, expected) in &expected {
            let label = format!("{}: {name}", model.name);
            assert_gradient(&label, &found.1[name], expected, TOLERANCE);
            tensors += 1;
        }
    }
    checked("gradients of critics", tensors);
}

#[test]
fn every_plan_gives_a_critic_the_loss_and_gradients_of_the_plain_one() {
    let (mut cases, mut turn) = (0, 0);
    for (model, rows) in critics() {
        let plain = model.plain(HEAD_ROWS);
        let expected = model.backward(&plain, TEMPERATURE, LOSS, &whole(&rows));
        // where a row's values depend on the rest of its batch, so does the loss
        let micros = if model.manifest.is_local() { rows.iter().map(|row| vec![row]).collect() } else { whole(&rows) };
        for (name, plan) in sample(&mut turn, plans(&model)) {
            let found = model.backward(&plan, TEMPERATURE, LOSS, &micros);
            let label = format!("{}, critic, {name}", model.name);
            assert_same(&label, &found, &expected);
            cases += 1;
        }
    }
    checked("plans of a critic against the plain one", cases);
}

#[test]
fn every_cut_of_a_batch_gives_a_critic_its_loss_gradients_and_values() {
    let mut cases = 0;
    for (model, rows) in critics() {
        if !model.manifest.is_local() {
            continue;
        }
        let plain = model.plain(HEAD_ROWS);
        let expected = model.backward(&plain, TEMPERATURE, LOSS, &whole(&rows));
        let runtime = Runtime::new(model.decoder.device());
        let executor = Executor::new(&plain, &runtime, 1.0).for_role(Role::Critic);
        let at_once = executor.values(&model.decoder, &whole(&rows));
        let at_once = at_once.expect("values").remove(0);
        for (layout, max_sequences) in
            [Layout::Packed, Layout::Padded].into_iter().flat_map(|layout| (1..=3).map(move |n| (layout, n)))
        {
            let plan = ModelPlan { layout, micro_batch_size: Some(max_sequences), ..plain.clone() };
            let cut = train_cut(&plan, &model.decoder);
            let batch = Batch::pack(&rows, cut).expect("every row fits");
            let micros = batch.micros();
            let label = format!("{}, critic, {layout:?}, {} micro-batches", model.name, micros.len());
            let found = model.backward(&plan, TEMPERATURE, LOSS, &micros);
            assert_same(&label, &found, &expected);
            let executor = Executor::new(&plan, &runtime, 1.0).for_role(Role::Critic);
            let cut = executor.values(&model.decoder, &micros).expect("values");
            for (own, cut) in batch.indices().iter().zip(cut) {
                for (&i, cut) in own.iter().zip(cut) {
                    for (a, b) in cut.iter().zip(&at_once[i]) {
                        // read off in f32
                        assert_close(&label, f64::from(*a), f64::from(*b), 1e-6);
                    }
                }
            }
            cases += 1;
        }
    }
    checked("cuts of a critic's batch", cases);
}

/// What a step leaves behind: what was scored, and the weights of both models that learn.
struct Step {
    scored: Vec<f64>,
    weights: Vec<(String, Vec<f64>)>,
}

/// A folder with the policy's body under a score head: a reward model that reads the policy's ids.
fn judge_of(model: &Model) -> TempDir {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let source = Checkpoint::open(&model.dir).expect("the policy's checkpoint");
    export(&model.decoder.with_value_head(9), &source.with_value_head(), None, dir.path(), ExportOptions::default())
        .expect("a reward model");
    dir
}

/// Scores of a reward model whose weights live where the policy's do.
fn rewards(model: &Model, judge: &Path, rows: &[Sequence], memory: &MemoryConfig, runtime: &Runtime) -> Vec<f64> {
    let config = RewardModelConfig {
        path: judge.to_owned(),
        device: None,
        input: RewardInput::Tokens,
        score_tokens: rows.iter().map(|row| row.tokens.len()).max(),
        param_offload: memory.param_offload,
    };
    let around = SharedResources {
        precision: Precision::F32,
        device: model.decoder.device(),
        memory,
        accounts: &runtime.accounts,
        log: None,
        tokenizer: &Arc::new(Tokenizer::from_dir(&model.dir).expect("the policy's tokenizer")),
        world: &World::default(),
    };
    let mut judge =
        RewardModel::open("judge", &config, around).unwrap_or_else(|error| panic!("{}: {error}", model.name));
    let rows = rows.iter().map(|row| row.tokens.clone()).collect();
    judge.score(rows).expect("scores")
}

/// Scores of a reward model, reference log-probs, values, and two updates of critic and policy by what the scores are
/// more than the values: all under one plan of all four models.
fn step(model: &Model, judge: &Path, rows: &[Sequence], memory: &MemoryConfig) -> Step {
    let policy = &model.decoder;
    let critic = policy.with_value_head(5);
    let memory = MemoryConfig {
        micro_batch_size: Some(1),
        reference: firebrick_engine::plan::RoleMemory {
            param_offload: memory.param_offload,
            ..memory.reference.clone()
        },
        ..memory.clone()
    };
    let plan = memory
        .plans(policy.arch(), true, Some(critic.arch()), 1)
        .unwrap_or_else(|error| panic!("{}: {error}", model.name));
    let runtime = Arc::new(Runtime::new(policy.device()).with_prefetch(memory.prefetch));
    let optim = OptimConfig { lr: 1e-2, clip_grad: None, ..OptimConfig::default() };
    let learner = |role, decoder: Decoder| {
        let own = plan.models[&role].clone();
        Learner::for_role(role, decoder, own, optim.clone(), Arc::clone(&runtime))
    };
    let mut policy = learner(Role::Policy, model.decoder.clone());
    let mut critic = learner(Role::Critic, critic);
    let accounts = &runtime.accounts;
    let frozen = plan.reference().expect("a reference").clone();
    let mut reference = ResidentModel::new(model.decoder.clone(), frozen, Role::Reference, accounts);

    let rewards = rewards(model, judge, rows, &memory, &runtime);
    let set_residency = |uses: [(&mut ResidentModel, Residency); 3]| {
        for (placed, now) in uses {
            placed.set_residency(now).expect("weights in their place");
        }
    };
    let (pass, idle) = (Residency::Pass, Residency::Idle);
    let mut rows = rows.to_vec();
    set_residency([(&mut policy.model, idle), (&mut reference, pass), (&mut critic.model, idle)]);
    let scores = score_placed(&reference, &runtime, &rows, TEMPERATURE).expect("log-probs");
    set_residency([(&mut policy.model, idle), (&mut reference, idle), (&mut critic.model, pass)]);
    let old = critic.values(&rows).expect("values");
    let scored = scores.logp.iter().chain(&old).flatten();
    let scored = scored.map(|&x| f64::from(x));
    let scored = scored.chain(rewards.iter().copied()).collect();
    for ((row, values), reward) in rows.iter_mut().zip(old).zip(rewards) {
        // the score stands on the last token, and nothing is discounted
        row.columns.returns = Some(vec![reward; values.len()]);
        let advantages = values.iter().map(|v| reward - f64::from(*v));
        row.columns.advantage = Some(advantages.collect());
        row.columns.value = Some(column(&values));
    }
    // so wide that a second update still has a gradient
    let wide = ValueLoss { clip_range: 1e3 };
    for _ in 0..2 {
        set_residency([(&mut policy.model, idle), (&mut reference, idle), (&mut critic.model, pass)]);
        let updated = critic.update(&rows, 1.0, wide, 1e-2).expect("an update");
        assert!(updated.outcome.applied && updated.outcome.grad_norm > 0.0);
        set_residency([(&mut policy.model, pass), (&mut reference, idle), (&mut critic.model, idle)]);
        let objective = objective();
        let updated = policy.update(&rows, TEMPERATURE, &objective, 1e-2);
        assert!(updated.expect("an update").outcome.applied);
    }
    let weights = [&policy, &critic].into_iter().flat_map(|learner| {
        let role = learner.model.role();
        learner.decoder().params().map(move |(spec, value)| {
            let value = value.download().expect("values").to_f64();
            (format!("{role:?} {}", spec.name), value)
        })
    });
    Step { scored, weights: weights.collect() }
}

#[test]
fn policy_critic_reference_and_reward_model_do_the_same_together_under_every_technique() {
    let (mut cases, mut turn) = (0, 0);
    for (model, rows) in models() {
        if !model.manifest.is_local() {
            continue;
        }
        let dir = judge_of(&model);
        let judge = dir.path();
        let expected = step(&model, judge, &rows, &MemoryConfig::default());
        let alone = [&techniques::KEEPS[1..], &techniques::ANYWHERE].concat();
        let alone = alone.iter().map(|t| techniques::settings(&[*t]));
        let table = techniques::optimizers().into_iter().chain(alone).collect();
        for (name, memory) in sample(&mut turn, table) {
            let found = step(&model, judge, &rows, &memory);
            for (a, b) in found.scored.iter().zip(&expected.scored) {
                assert_close(&format!("{}, {name}: scores", model.name), *a, *b, 1e-6);
            }
            for ((parameter, found), (_, expected)) in found.weights.iter().zip(&expected.weights) {
                let label = format!("{}, {name}: {parameter}", model.name);
                assert_gradient(&label, found, expected, TOLERANCE);
            }
            cases += 1;
        }
    }
    checked("techniques for four models at once", cases);
}

#[test]
fn a_value_head_leaves_the_body_as_it_is_and_its_own_numbers_follow_the_seed() {
    let mut cases = 0;
    for (model, _) in models() {
        let critic = model.decoder.with_value_head(1);
        let named = |decoder: &Decoder| -> Gradients {
            let read = |p: &Param| values(p.upload(decoder.device()));
            let params = decoder.params();
            params.map(|(s, p)| (s.name.clone(), read(&p))).collect()
        };
        let (body, own) = (named(&model.decoder), named(&critic));
        for (name, values) in &own {
            match body.get(name) {
                Some(same) => assert_eq!(values, same, "{}: {name}", model.name),
                None => assert_eq!(name, "score.weight", "{}", model.name),
            }
        }
        assert_eq!(own, named(&model.decoder.with_value_head(1)));
        assert_ne!(own, named(&model.decoder.with_value_head(2)));
        cases += 1;
    }
    checked("value heads", cases);
}
