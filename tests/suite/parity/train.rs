//! Loss curves, gradient norms, rates and final parameters of short training runs against transformers and TRL.

use std::collections::BTreeMap;

use firebrick_engine::executor::{Executor, Gradients, Runtime};
use firebrick_engine::lr_scheduler::{LrSchedulerConfig, SchedulerType};
use firebrick_engine::objective::aggregate::{Denominators, LossAggMode, token_weights};
use firebrick_engine::objective::kl::KlType;
use firebrick_engine::objective::policy::{Clip, ClipRange, ImportanceSamplingLevel, PolicyLoss};
use firebrick_engine::objective::sft::Nll;
use firebrick_engine::objective::{LossSums, ObjectiveConfig, PolicyGradient, TokenLoss};
use firebrick_engine::optim::{AdamW, OptimConfig};
use firebrick_engine::sequence::{Sequence, TokenColumns, column};
use serde::Deserialize;
use serde_json::Value;

use crate::support::model::{Model, nll_rows};
use crate::support::{assert_all_close, assert_close, checked, fixtures, json_files, parse, read};

/// Losses and log-probs, absolute.
const LOSS: f64 = 1e-4;
/// Gradient norms, relative.
const NORM: f64 = 1e-3;
/// Metrics, absolute.
const METRIC: f64 = 1e-4;

#[derive(Deserialize)]
struct File {
    format: String,
    kind: Option<String>,
}

#[test]
fn loss_curves_of_every_training_run() {
    let mut steps = 0;
    for path in json_files("train") {
        let golden: Value = read(&path);
        let label = path.display().to_string();
        let File { format, kind } = parse(&label, &golden);
        steps += match (format.as_str(), kind.as_deref()) {
            ("train-golden/1", Some("sft")) => sft(&parse(&label, &golden)),
            ("train-golden/1", Some("grpo")) => grpo(&parse(&label, &golden)),
            // no run: what adapters compute, compared beside this file
            ("lora-golden/1", None) => 0,
            other => panic!("{label}: unknown format and kind {other:?}"),
        };
    }
    checked("optimizer steps of training runs", steps);
}

/// What is stored of a parameter.
#[derive(Deserialize)]
struct Summary {
    norm: f64,
    sum: f64,
    head: Vec<f64>,
}

#[derive(Deserialize)]
struct Step {
    loss: f64,
    grad_norm: f64,
    lr: Option<f64>,
    #[serde(default)]
    metrics: BTreeMap<String, f64>,
}

#[derive(Deserialize)]
struct Sft {
    model: String,
    hyper: SftHyper,
    steps: Vec<Step>,
    final_params: BTreeMap<String, Summary>,
    tolerances: SftTolerances,
}

#[derive(Deserialize)]
struct SftTolerances {
    param_max_abs_fp32_vs_fp64: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SftHyper {
    lr: f64,
    betas: [f64; 2],
    eps: f64,
    weight_decay: f64,
    max_grad_norm: f64,
    schedule: SchedulerType,
    warmup_steps: u64,
    total_steps: u64,
    steps: usize,
}

fn sft(golden: &Sft) -> usize {
    let hyper = &golden.hyper;
    let mut run = Run::new(
        &golden.model,
        OptimConfig {
            loss_scale: None,
            lr: hyper.lr,
            betas: hyper.betas,
            eps: hyper.eps,
            weight_decay: hyper.weight_decay,
            decay_norms_and_biases: true,
            clip_grad: Some(hyper.max_grad_norm),
            lr_scheduler: LrSchedulerConfig {
                lr_scheduler_type: hyper.schedule,
                warmup_steps: hyper.warmup_steps,
                ..LrSchedulerConfig::default()
            },
        },
        hyper.total_steps,
        1.0,
    );
    let rows = nll_rows(&run.model.golden("forward.safetensors"));
    assert_eq!(golden.steps.len(), hyper.steps);
    for expected in &golden.steps {
        run.step(&Nll, &rows, expected);
    }
    run.check_params(&golden.final_params, 10.0 * golden.tolerances.param_max_abs_fp32_vs_fp64);
    golden.steps.len()
}

#[derive(Deserialize)]
struct Grpo {
    model: String,
    inputs: GrpoInputs,
    runs: Vec<GrpoRun>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GrpoInputs {
    prompt_ids: Vec<Vec<u32>>,
    prompt_mask: Vec<Vec<u8>>,
    completion_ids: Vec<Vec<u32>>,
    completion_mask: Vec<Vec<u8>>,
    advantages: Vec<f64>,
}

#[derive(Deserialize)]
struct GrpoRun {
    config: Value,
    steps: Vec<Step>,
    old_logprobs: Vec<Vec<f32>>,
    ref_logprobs: Vec<Vec<f32>>,
    final_logprobs: Vec<Vec<f64>>,
    final_params: BTreeMap<String, Summary>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GrpoHyper {
    loss_type: String,
    level: ImportanceSamplingLevel,
    beta: f64,
    epsilon: f64,
    epsilon_high: f64,
    lr: f64,
    steps: usize,
    max_grad_norm: f64,
    betas: [f64; 2],
    eps: f64,
    weight_decay: f64,
    temperature: f64,
    max_completion_length: usize,
}

/// How far a parameter may end from TRL's: a tenth of a step, since `AdamW` turns a gradient's sign into a whole one.
const PARAM_STEPS: f64 = 0.1;

fn grpo(golden: &Grpo) -> usize {
    let mut steps = 0;
    for run in &golden.runs {
        steps += grpo_run(golden, run);
    }
    steps
}

fn grpo_run(golden: &Grpo, run: &GrpoRun) -> usize {
    let hyper: GrpoHyper = parse("train/grpo", &run.config);
    let (objective, rows) = grpo_step(golden, run, &hyper);
    let optim = OptimConfig {
        loss_scale: None,
        lr: hyper.lr,
        betas: hyper.betas,
        eps: hyper.eps,
        weight_decay: hyper.weight_decay,
        decay_norms_and_biases: true,
        clip_grad: Some(hyper.max_grad_norm),
        lr_scheduler: LrSchedulerConfig::default(),
    };
    let total = run.steps.len() as u64;
    let mut training = Run::new(&golden.model, optim, total, hyper.temperature);
    assert_eq!(run.steps.len(), hyper.steps);
    for expected in &run.steps {
        let found: BTreeMap<_, _> = training.step(&objective, &rows, expected).values().collect();
        for (name, expected) in &expected.metrics {
            let found = match name.as_str() {
                "entropy" => found["actor/entropy"],
                "clip_ratio/region_mean" if hyper.level == ImportanceSamplingLevel::Token => found["actor/pg_clipfrac"],
                // without a counterpart: a mean over tokens where our weighted sum is none, one over sequences, and
                // parts of it
                "kl"
                | "clip_ratio/region_mean"
                | "clip_ratio/low_mean"
                | "clip_ratio/high_mean"
                | "clip_ratio/low_min"
                | "clip_ratio/high_max" => continue,
                other => panic!("unknown metric {other}"),
            };
            assert_close(&format!("{}: {name}", hyper.loss_type), found, *expected, METRIC);
        }
    }
    for (found, expected) in training.log_probs(&rows).iter().zip(&run.final_logprobs) {
        assert_all_close("final log-probs", found, &expected[..found.len()], LOSS);
    }
    training.check_params(&run.final_params, PARAM_STEPS * hyper.lr);
    run.steps.len()
}

/// The objective and the batch of a run.
fn grpo_step(golden: &Grpo, run: &GrpoRun, hyper: &GrpoHyper) -> (PolicyGradient, Vec<Sequence>) {
    let inputs = &golden.inputs;
    let mode = match hyper.loss_type.as_str() {
        "grpo" => LossAggMode::SeqMeanTokenMean,
        "dapo" => LossAggMode::TokenMean,
        "dr_grpo" => LossAggMode::SeqMeanTokenSumNorm,
        other => panic!("unknown loss_type {other}"),
    };
    let objective = ObjectiveConfig {
        policy_loss: PolicyLoss::Clip(Clip {
            importance_sampling_level: hyper.level,
            range: ClipRange { clip_ratio_low: hyper.epsilon, clip_ratio_high: hyper.epsilon_high },
            clip_ratio_c: None,
        }),
        loss_agg_mode: mode,
        kl_loss_coef: hyper.beta,
        kl_loss_type: KlType::K3,
        ..ObjectiveConfig::default()
    }
    .build()
    .expect("an objective");
    let real = |ids: &[u32], mask: &[u8]| -> Vec<u32> {
        let pairs = ids.iter().zip(mask).filter(|(_, m)| **m == 1);
        pairs.map(|(&id, _)| id).collect()
    };
    let mut rows: Vec<Sequence> = (0..inputs.prompt_ids.len())
        .map(|i| {
            let prompt = real(&inputs.prompt_ids[i], &inputs.prompt_mask[i]);
            let completion = real(&inputs.completion_ids[i], &inputs.completion_mask[i]);
            let n = completion.len();
            Sequence {
                columns: TokenColumns {
                    advantage: Some(vec![inputs.advantages[i]; n]),
                    old_logp: Some(column(&run.old_logprobs[i][..n])),
                    ref_logp: Some(column(&run.ref_logprobs[i][..n])),
                    ..TokenColumns::default()
                },
                ..Sequence::completion(&prompt, &completion)
            }
        })
        .collect();
    let lengths: Vec<usize> = rows.iter().map(|row| row.positions.len()).collect();
    let by = Denominators::trl(&lengths, hyper.max_completion_length);
    for (row, weights) in rows.iter_mut().zip(token_weights(mode, &lengths, by)) {
        row.columns.weight = Some(weights);
    }
    (objective, rows)
}

/// A model in training.
struct Run {
    model: Model,
    optimizer: AdamW,
    rate: firebrick_engine::lr_scheduler::LrSchedule,
    temperature: f64,
    done: u64,
}

impl Run {
    fn new(model: &str, optim: OptimConfig, total_steps: u64, temperature: f64) -> Self {
        let model = Model::load(&fixtures().join("models").join(model));
        let rate = optim.lr_scheduler.build(optim.lr, total_steps);
        Self {
            rate: rate.unwrap_or_else(|error| panic!("{error}")),
            optimizer: AdamW::new(optim, &model.decoder),
            model,
            temperature,
            done: 0,
        }
    }

    /// One step on the whole batch, compared with the stored one.
    fn step(&mut self, loss: &dyn TokenLoss, rows: &[Sequence], expected: &Step) -> LossSums {
        let label = format!("{}, step {}", self.model.name, self.done);
        let lr = self.rate.lr(self.done);
        if let Some(expected) = expected.lr {
            assert_close(&format!("{label}: rate"), lr, expected, 1e-12);
        }
        let plan = self.model.plain(1024);
        let decoder = &mut self.model.decoder;
        let runtime = Runtime::new(decoder.device());
        let mut gradients = Gradients::new(decoder.specs().count());
        let whole = vec![rows.iter().collect()];
        let sums = Executor::new(&plan, &runtime, self.temperature)
            .backward(decoder, &whole, loss, &mut gradients, None)
            .expect("a backward pass");
        let outcome = self.optimizer.step(decoder, gradients, lr, &runtime).expect("an update");
        assert!(outcome.applied);
        assert_close(&format!("{label}: loss"), sums.loss, expected.loss, LOSS);
        let norm = outcome.grad_norm / expected.grad_norm;
        assert_close(&format!("{label}: gradient norm, relatively"), norm, 1.0, NORM);
        self.done += 1;
        sums
    }

    fn log_probs(&self, rows: &[Sequence]) -> Vec<Vec<f64>> {
        let plan = self.model.plain(1024);
        let scores = self.model.score(&plan, self.temperature, rows);
        let wide = |row: &Vec<f32>| row.iter().map(|&v| f64::from(v)).collect();
        scores.logp.iter().map(wide).collect()
    }

    /// Compares every parameter's first elements within `tolerance`; its norm and sum as sums of such errors, at
    /// random.
    fn check_params(&self, expected: &BTreeMap<String, Summary>, tolerance: f64) {
        assert_eq!(self.model.decoder.params().count(), expected.len());
        for (spec, value) in self.model.decoder.params() {
            let expected = &expected[&spec.name];
            let found = value.download().expect("values").to_f64();
            let label = format!("{}: final {}", self.model.name, spec.name);
            let head = &found[..expected.head.len()];
            assert_all_close(&label, head, &expected.head, tolerance);
            let spread = tolerance * (found.len() as f64).sqrt();
            let norm = found.iter().map(|v| v * v).sum::<f64>().sqrt();
            assert_close(&format!("{label}, norm"), norm, expected.norm, spread);
            assert_close(&format!("{label}, sum"), found.iter().sum(), expected.sum, spread);
        }
    }
}
