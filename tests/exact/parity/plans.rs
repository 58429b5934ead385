//! The test that holds the engine together: for every plan and every cut, loss and each gradient equal those of the
//! plain whole-graph plan on the whole batch.

use std::collections::BTreeMap;

use burn::tensor::Tensor;
use firebrick_backends::accounts::Home;
use firebrick_engine::batch::Batch;
use firebrick_engine::executor::{Residency, Runtime};
use firebrick_engine::learner::{Learner, train_cut};
use firebrick_engine::objective::kl::KlType;
use firebrick_engine::objective::policy::{Clip, PolicyLoss};
use firebrick_engine::objective::{Loss, LossSums, ObjectiveConfig, PolicyGradient, Scores, TokenInputs, TokenLoss};
use firebrick_engine::optim::OptimConfig;
use firebrick_engine::plan::{ActivationPolicy, Layout, MemoryConfig, ModelPlan, Segment};
use firebrick_engine::sequence::Sequence;
use firebrick_models::random::Stream;

use crate::support::model::{Model, scored_rows};
use crate::support::techniques::sample;
use crate::support::{assert_close, assert_gradient, checked, folders, techniques};

/// Losses and metrics, absolute up to one; gradient tensors, relative L2.
pub(super) const TOLERANCE: f64 = 1e-10;
pub(super) const TEMPERATURE: f64 = 0.7;
pub(super) const HEAD_ROWS: usize = 1024;

/// The models with gradients, and a batch for each.
pub(super) fn models() -> Vec<(Model, Vec<Sequence>)> {
    let with_gradients = |dir: &std::path::PathBuf| dir.join("golden/grads.safetensors").is_file();
    let dirs = folders("models").into_iter().filter(with_gradients);
    dirs.map(|dir| {
        let model = Model::load(&dir);
        let rows = batch(&model);
        (model, rows)
    })
    .collect()
}

/// Weight of the entropy bonus.
const ENTROPY: f64 = 0.02;

/// Every term of the loss at work: clipping on both sides, dual clip, KL, entropy bonus.
pub(super) fn objective() -> PolicyGradient {
    ObjectiveConfig {
        policy_loss: PolicyLoss::Clip(Clip { clip_ratio_c: Some(1.5), ..Clip::default() }),
        kl_loss_coef: 0.05,
        kl_loss_type: KlType::K3,
        entropy_coeff: ENTROPY,
        ..ObjectiveConfig::default()
    }
    .build()
    .expect("an objective")
}

/// Tokens that the first three rows of a batch begin with.
const PROMPT: usize = 6;

/// The golden rows; the first tokens of each are a prompt and not scored, the same one for the first three. Weights and
/// advantages differ by token, and the old policy is close enough to the current one that some ratios are clipped and
/// some are not.
fn batch(model: &Model) -> Vec<Sequence> {
    let mut rows = scored_rows(&model.golden("forward.safetensors"));
    let prompt = rows[0].tokens[..PROMPT].to_vec();
    for row in rows.iter_mut().take(3) {
        let shared = PROMPT.min(row.tokens.len().saturating_sub(2));
        row.tokens[..shared].copy_from_slice(&prompt[..shared]);
        row.positions.drain(..shared.saturating_sub(2));
    }
    let mut random = Stream::new(7, 0);
    for (i, row) in rows.iter_mut().enumerate() {
        row.positions.pop();
        row.positions.drain(..2 + i);
        let mut drawn = |of: fn(f64) -> f64| -> Vec<f64> {
            let numbers = row.positions.iter().map(|_| of(f64::from(random.normal())));
            numbers.collect()
        };
        let weight = drawn(|x| 0.01 + x.abs());
        let advantage = drawn(|x| x);
        row.columns.bonus = Some(weight.iter().map(|w| w * ENTROPY).collect());
        row.columns.weight = Some(weight);
        row.columns.advantage = Some(advantage);
    }
    let scores = model.score(&model.plain(HEAD_ROWS), TEMPERATURE, &rows);
    for (row, logp) in rows.iter_mut().zip(scores.logp) {
        let mut near = || {
            let all = logp.iter().map(|l| f64::from(l + 0.3 * random.normal()));
            Some(all.collect::<Vec<f64>>())
        };
        row.columns.old_logp = near();
        row.columns.ref_logp = near();
    }
    rows
}

pub(super) type Gradients = BTreeMap<String, Vec<f64>>;

fn whole(rows: &[Sequence]) -> Vec<Vec<&Sequence>> {
    vec![rows.iter().collect()]
}

pub(super) fn assert_same(label: &str, found: &(LossSums, Gradients), expected: &(LossSums, Gradients)) {
    assert_close(&format!("{label}: loss"), found.0.loss, expected.0.loss, TOLERANCE);
    assert_eq!(found.0.tokens, expected.0.tokens, "{label}");
    for ((name, found), (_, expected)) in found.0.values().zip(expected.0.values()) {
        assert_close(&format!("{label}: {name}"), found, expected, TOLERANCE);
    }
    assert!(found.1.keys().eq(expected.1.keys()), "{label}: other parameters");
    for (name, found) in &found.1 {
        assert_gradient(&format!("{label}: {name}"), found, &expected.1[name], TOLERANCE);
    }
}

/// Segments of `size` units that keep one thing and another by turns: plans that no setting spells out.
fn mixed(model: &Model) -> Vec<(String, ModelPlan)> {
    const HERE: ActivationPolicy = ActivationPolicy::Input(Home::Device);
    const AWAY: ActivationPolicy = ActivationPolicy::Input(Home::Host);
    let body = model.decoder.body();
    [
        ("halves with their graphs", 1, [ActivationPolicy::Graph; 2]),
        ("halves, mixed", 1, [ActivationPolicy::Graph, HERE]),
        ("halves, inputs here and there", 1, [HERE, AWAY]),
        ("three halves a segment, mixed", 3, [AWAY, ActivationPolicy::Graph]),
    ]
    .into_iter()
    .map(|(name, size, keeps)| {
        let starts = body.clone().step_by(size).enumerate();
        let segments = starts.map(|(i, start)| Segment {
            units: start..(start + size).min(body.end),
            keep: keeps[i % 2],
            weights: Home::Device,
        });
        let plan = ModelPlan { segments: segments.collect(), ..model.plain(HEAD_ROWS) };
        (name.to_owned(), plan)
    })
    .collect()
}

/// Every plan that is compared with the plain one.
pub(super) fn plans(model: &Model) -> Vec<(String, ModelPlan)> {
    let arch = model.decoder.arch();
    let spelled = techniques::passes().into_iter().map(|(name, memory)| {
        let plan = memory.plan(arch);
        let plan = plan.unwrap_or_else(|error| panic!("{name}: {error}"));
        (name, plan)
    });
    spelled.chain(mixed(model)).collect()
}

/// Every case of a table with kernels, a sample in tensor operations.
fn compared<T>(turn: &mut usize, table: Vec<T>) -> Vec<T> {
    if crate::KERNELS { table } else { sample(turn, table) }
}

/// A loss that looks at whole sequences: their mean log-ratio weights their tokens (GSPO's ratio, arXiv:2507.18071),
/// and the entropy of a sequence enters by its square.
pub(super) struct WholeSequences;

impl TokenLoss for WholeSequences {
    fn loss(&self, scores: &Scores, inputs: &TokenInputs) -> Loss {
        assert_eq!(inputs.lengths.iter().sum::<usize>(), scores.logp.dims()[0]);
        let old = inputs.columns.old_logp.clone().expect("an old policy");
        let mut start = 0;
        let mut total: Option<Tensor<1>> = None;
        for &n in &inputs.lengths {
            let own = |t: &Tensor<1>| t.clone().narrow(0, start, n);
            let ratio = (own(&scores.logp) - own(&old)).mean().exp();
            let entropy = own(&scores.entropy).mean();
            let weight = (own(&inputs.weight()) * own(&inputs.advantage())).sum();
            let term = ratio * weight + entropy.clone() * entropy * 0.1;
            total = Some(match total {
                Some(total) => total + term,
                None => term,
            });
            start += n;
        }
        Loss { total: total.expect("a sequence"), metrics: Vec::new() }
    }

    fn separates(&self) -> bool {
        false
    }
}

#[test]
fn every_plan_gives_the_loss_and_gradients_of_the_plain_one() {
    let (mut cases, mut turn) = (0, 0);
    for (model, rows) in models() {
        let objective = objective();
        let losses: [(&str, &dyn TokenLoss); 2] = [("by token", &objective), ("by sequence", &WholeSequences)];
        for (kind, loss) in losses {
            let expected = model.backward(&model.plain(HEAD_ROWS), TEMPERATURE, loss, &whole(&rows));
            let tensors = model.decoder.specs().map(|spec| spec.tensors().len());
            assert_eq!(expected.1.len(), tensors.sum::<usize>(), "{}", model.name);
            // where a row's scores depend on the rest of its batch, so does the loss
            let micros =
                if model.manifest.is_local() { rows.iter().map(|row| vec![row]).collect() } else { whole(&rows) };
            for (name, plan) in compared(&mut turn, plans(&model)) {
                let found = model.backward(&plan, TEMPERATURE, loss, &micros);
                let label = format!("{}, {name}, loss {kind}", model.name);
                assert_same(&label, &found, &expected);
                cases += 1;
            }
        }
    }
    checked("plans against the plain one", cases);
}

/// The weights after two optimizer steps.
pub(super) fn trained(model: &Model, rows: &[Sequence], memory: &MemoryConfig) -> Gradients {
    let plan = memory.plan(model.decoder.arch()).expect("a plan");
    let runtime = Runtime::new(model.decoder.device()).with_prefetch(plan.prefetch);
    let optim = OptimConfig { lr: 1e-2, clip_grad: None, ..OptimConfig::default() };
    let mut learner = Learner::new(model.decoder.clone(), plan, optim, runtime);
    learner.model.set_residency(Residency::Pass).expect("weights in their place");
    for _ in 0..2 {
        let updated = learner.update(rows, TEMPERATURE, &objective(), 1e-2);
        let updated = updated.unwrap_or_else(|error| panic!("{}: {error}", model.name));
        assert!(updated.outcome.applied && updated.outcome.grad_norm > 0.0);
    }
    let params = learner.decoder().params();
    params.map(|(spec, value)| (spec.name.clone(), value.download().expect("values").to_f64())).collect()
}

#[test]
fn every_place_of_the_optimizer_gives_the_weights_of_the_plain_one() {
    let (mut cases, mut turn) = (0, 0);
    for (model, rows) in models() {
        if !model.manifest.is_local() {
            continue;
        }
        let cut = |memory| MemoryConfig { micro_batch_size: Some(1), ..memory };
        let expected = trained(&model, &rows, &cut(MemoryConfig::default()));
        for (name, memory) in compared(&mut turn, techniques::optimizers()) {
            let found = trained(&model, &rows, &cut(memory));
            for (parameter, found) in &found {
                let label = format!("{}, {name}: {parameter}", model.name);
                assert_gradient(&label, found, &expected[parameter], TOLERANCE);
            }
            cases += 1;
        }
    }
    checked("places of the optimizer", cases);
}

#[test]
fn combinations_drawn_at_random_give_the_gradients_of_the_plain_plan_or_are_refused() {
    let (mut cases, mut refused) = (0, 0);
    let mut random = Stream::new(11, 0);
    for (model, rows) in models() {
        if !model.manifest.is_local() {
            continue;
        }
        let micros: Vec<Vec<&Sequence>> = rows.iter().map(|row| vec![row]).collect();
        let objective = objective();
        let plain = model.plain(HEAD_ROWS);
        let expected = model.backward(&plain, TEMPERATURE, &objective, &micros);
        for _ in 0..if crate::KERNELS { 60 } else { 15 } {
            let (name, memory) = techniques::drawn(&mut random);
            match memory.plan(model.decoder.arch()) {
                Ok(plan) => {
                    let found = model.backward(&plan, TEMPERATURE, &objective, &micros);
                    assert_same(&format!("{}, {name}", model.name), &found, &expected);
                    cases += 1;
                }
                Err(error) => {
                    let message = error.to_string();
                    assert!(message.contains("memory.") || message.contains("plan:"), "{message}");
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > 0, "some combinations make no sense");
    checked("combinations drawn at random", cases);
}

#[test]
fn every_cut_of_a_batch_gives_its_loss_and_gradients() {
    let (mut cases, mut turn) = (0, 0);
    for (model, rows) in models() {
        // where a row's scores depend on the rest of its batch, so does the loss
        if !model.manifest.is_local() {
            continue;
        }
        let run = |plan: &ModelPlan, micros: &[Vec<&Sequence>]| model.backward(plan, TEMPERATURE, &objective(), micros);
        let expected = run(&model.plain(HEAD_ROWS), &whole(&rows));
        let longest = rows.iter().map(|row| row.tokens.len()).max().expect("rows");
        for (max_tokens, max_sequences) in
            [(longest, None), (2 * longest, None), (3 * longest - 1, None), (usize::MAX, Some(1)), (usize::MAX, None)]
        {
            for plan in compared(&mut turn, layouts(&model)) {
                let plan = ModelPlan { train_tokens: max_tokens, micro_batch_size: max_sequences, ..plan };
                let cut = train_cut(&plan, &model.decoder);
                let micros = Batch::pack(&rows, cut).expect("every row fits").micros();
                let label = format!("{}, {:?}, {} micro-batches", model.name, plan.layout, micros.len());
                assert_same(&label, &run(&plan, &micros), &expected);
                cases += 1;
            }
        }
    }
    checked("cuts of a batch", cases);
}

/// All layouts, with graphs and inputs kept, attention whole and in chunks.
fn layouts(model: &Model) -> Vec<ModelPlan> {
    let mut all = Vec::new();
    for layout in [Layout::Packed, Layout::Padded, Layout::SharedPrefix] {
        for attention_rows in [0, 3] {
            for plan in [model.plain(3), model.checkpointed(HEAD_ROWS, 1)] {
                all.push(ModelPlan { layout, attention_rows, ..plan });
            }
        }
    }
    all
}
