use super::{Start, Trainer};
use crate::config::{RunConfig, parse};
use crate::metrics::{Control, Event, Observer, Phase};
use crate::objective::{
    AdaptiveCoefficients, Loss, Objective, OptimizerStep, PolicyGradient, Scores, TokenInputs, TokenLoss,
};
use crate::rollout::Rollout;
use firebrick_backends::collective::{Settings, Threads};
use firebrick_backends::transfer::{Copier, HostTensor};
use firebrick_models::decoder::Param;
use firebrick_models::unit::ParamSpec;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

const TINY: &str = "
model:
  arch: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
         max_position_embeddings: 32}
task: {kind: arithmetic, difficulty: 1, partial: true, validation_size: 4}
output: run
device: cpu
rollout: {n: 2, prompt_length: 6, response_length: 3}
trainer: {steps: 3, train_batch_size: 2, seed: 5, test_freq: 0, save_freq: -1}
";

/// A folder of runs.
struct Runs(tempfile::TempDir);

impl Runs {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, run: &str) -> PathBuf {
        self.0.path().join(run)
    }

    fn config(&self, run: &str) -> RunConfig {
        self.config_with(run, &[])
    }

    fn config_with(&self, run: &str, overrides: &[&str]) -> RunConfig {
        let overrides: Vec<String> = overrides.iter().map(|o| (*o).to_owned()).collect();
        let mut config = parse(TINY, &overrides).unwrap();
        config.output = self.path(run);
        config
    }

    fn trainer(&self, run: &str) -> Trainer {
        Trainer::builder(self.config(run)).build().unwrap()
    }

    fn read(&self, run: &str, file: &str) -> String {
        std::fs::read_to_string(self.path(run).join(file)).unwrap()
    }

    /// Steps whose checkpoints there are.
    fn checkpoints(&self, run: &str) -> Vec<u64> {
        let entries = std::fs::read_dir(self.path(run).join("checkpoints")).unwrap();
        let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name();
        let mut steps: Vec<u64> =
            entries.map(|entry| name(entry).to_str().unwrap()["step-".len()..].parse().unwrap()).collect();
        steps.sort_unstable();
        steps
    }
}

/// Answers from a list, then [`Control::Continue`]; notes every step and every answer.
#[derive(Clone)]
struct Scripted {
    answers: Arc<Mutex<Vec<Control>>>,
    noted: Arc<Mutex<Vec<String>>>,
}

impl Scripted {
    fn new(answers: &[Control]) -> Self {
        let mut answers = answers.to_vec();
        answers.reverse();
        Self { answers: Arc::new(Mutex::new(answers)), noted: Arc::default() }
    }

    fn note(&self, what: String) {
        self.noted.lock().unwrap().push(what);
    }

    fn noted(&self) -> String {
        self.noted.lock().unwrap().join(" ")
    }
}

impl Observer for Scripted {
    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Step { step, report, .. } => {
                assert_eq!(report.step, step);
                self.note(step.to_string());
            }
            Event::Saved { .. } => self.note("saved".into()),
            Event::Finished(_) => self.note("finished".into()),
            _ => {}
        }
    }

    fn control(&mut self) -> Control {
        let answer = self.answers.lock().unwrap().pop().unwrap_or_default();
        self.note(format!("{answer:?}"));
        answer
    }
}

/// A run whose observer answers like this.
fn steered(runs: &Runs, run: &str, answers: &[Control]) -> String {
    let observer = Scripted::new(answers);
    let builder = Trainer::builder(runs.config(run)).observer(observer.clone());
    builder.build().unwrap().run().unwrap();
    observer.noted()
}

#[test]
fn an_observer_that_says_continue_changes_nothing() {
    let runs = Runs::new();
    let noted = steered(&runs, "run", &[]);
    assert_eq!(noted, "1 Continue 2 Continue 3 Continue finished");
}

#[test]
fn a_paused_run_waits_until_it_is_told_otherwise() {
    let runs = Runs::new();
    let noted = steered(&runs, "run", &[Control::Pause, Control::Pause]);
    let wanted = "1 Pause Pause Continue 2 Continue 3 Continue finished";
    assert_eq!(noted, wanted);
}

#[test]
fn save_writes_a_checkpoint_of_the_step_at_hand_and_the_run_goes_on() {
    let runs = Runs::new();
    let noted = steered(&runs, "run", &[Control::Continue, Control::Save]);
    assert_eq!(noted, "1 Continue 2 Save saved Continue 3 Continue finished");
    assert_eq!(runs.checkpoints("run"), [2]);
}

#[test]
fn a_paused_run_that_saves_stays_paused() {
    let runs = Runs::new();
    let (save, pause) = (Control::Save, Control::Pause);
    let noted = steered(&runs, "run", &[pause, save, pause, pause]);
    let wanted = "1 Pause Save saved Pause Pause Continue 2 Continue 3 Continue finished";
    assert_eq!(noted, wanted);
}

#[test]
fn an_observer_that_always_says_save_gets_a_checkpoint_after_every_step() {
    let runs = Runs::new();
    let noted = steered(&runs, "run", &[Control::Save; 6]);
    let wanted = "1 Save saved Save 2 Save saved Save 3 Save saved Save finished";
    assert_eq!(noted, wanted);
    assert_eq!(runs.checkpoints("run"), [1, 2, 3]);
}

#[test]
fn a_stopped_run_has_a_checkpoint_and_a_summary_and_can_be_resumed() {
    let runs = Runs::new();
    let noted = steered(&runs, "run", &[Control::Stop]);
    assert_eq!(noted, "1 Stop saved finished");
    assert_eq!(runs.checkpoints("run"), [1]);
    let summary: Value = serde_json::from_str(&runs.read("run", "summary.json")).unwrap();
    assert_eq!(summary["steps"], 1);
    let rest = Trainer::builder(runs.config("run")).start(Start::Resume);
    assert_eq!(rest.build().unwrap().run().unwrap().steps, 3);
    steered(&runs, "whole", &[]);
    let samples = |run| runs.read(run, "samples.jsonl");
    assert_eq!(samples("run"), samples("whole"));
}

#[test]
fn a_stop_of_any_ranks_observer_ends_all_ranks_after_the_same_step() {
    let runs = Runs::new();
    let steps = Threads::run(2, Settings::default(), |rank| {
        let answers: &[Control] = if rank.rank() == 1 { &[Control::Continue, Control::Stop] } else { &[] };
        let builder = Trainer::builder(runs.config("run")).observer(Scripted::new(answers)).world(rank);
        builder.build().unwrap().run().unwrap().steps
    });
    assert_eq!(steps.into_iter().map(Result::unwrap).collect::<Vec<_>>(), [2, 2]);
    assert_eq!(runs.checkpoints("run"), [2]);
}

#[test]
fn single_steps_leave_what_a_run_leaves() {
    let runs = Runs::new();
    let whole = runs.trainer("whole").run().unwrap();
    let mut trainer = runs.trainer("steps");
    while !trainer.is_over() {
        let report = trainer.step().unwrap();
        assert_eq!(report.step, trainer.finished_steps());
        let rollout = report.rollout.unwrap();
        assert_eq!((rollout.rollouts.len(), rollout.prompts.len()), (4, 2));
        assert!(report.actor.is_some() && report.critic.is_none());
    }
    let summary = trainer.finish().unwrap();
    assert_eq!((summary.steps, &summary.last), (whole.steps, &whole.last));
    assert_eq!(runs.read("steps", "samples.jsonl"), runs.read("whole", "samples.jsonl"));
    let losses = |run: &str| -> Vec<Value> {
        let text = runs.read(run, "metrics.jsonl");
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.map(|line| line["actor/pg_loss"].clone()).collect()
    };
    assert_eq!(losses("steps"), losses("whole"));
    assert_eq!(losses("steps").len(), 4);
}

#[test]
fn an_objective_that_needs_a_critic_is_refused_where_there_is_none() {
    let runs = Runs::new();
    let ppo = parse(TINY, &["objective=ppo".into()]).unwrap();
    let ppo = ppo.objective.build().unwrap();
    let refused = Trainer::builder(runs.config("run")).objective(ppo).build();
    let message = refused.err().expect("refused").to_string();
    assert!(message.contains("critic"), "{message}");
    assert!(!Path::new(&runs.path("run")).exists());
}

/// A custom objective is planned like a configured one.
#[test]
fn an_objective_that_is_passed_in_is_planned_like_a_configured_one() {
    let runs = Runs::new();
    let settings = [
        "objective=remax",
        "objective.kl_loss_coef=0.1",
        "objective.entropy_coeff=0.01",
        "objective.top_entropy_quantile=0.2",
    ];
    let named = parse(TINY, &settings.map(String::from)).unwrap();
    let objective = named.objective.build().unwrap();
    let needs = objective.needs();
    assert!(needs.greedy && needs.entropy && needs.scores && needs.reference);
    let workload = |config: RunConfig, objective: Option<PolicyGradient>, run: &str| {
        let mut config = config;
        config.output = runs.path(run);
        let builder = Trainer::builder(config);
        let builder = match objective {
            Some(objective) => builder.objective(objective),
            None => builder,
        };
        builder.build().unwrap().recovery.planned.request.workload
    };
    let passed_in = workload(runs.config("custom"), Some(objective), "custom");
    assert_eq!(passed_in, workload(named, None, "named"));
    assert_ne!(passed_in, workload(runs.config("grpo"), None, "grpo"));
}

/// An objective that finds no memory for one of its losses.
struct Refused {
    objective: PolicyGradient,
    losses: AtomicUsize,
    at: usize,
}

impl TokenLoss for Refused {
    fn loss(&self, scores: &Scores, inputs: &TokenInputs) -> Loss {
        let loss = self.losses.fetch_add(1, Ordering::SeqCst);
        assert!(loss != self.at, "CUDA_ERROR_OUT_OF_MEMORY");
        self.objective.loss(scores, inputs)
    }

    fn separates(&self) -> bool {
        self.objective.separates()
    }
}

impl Objective for Refused {
    fn compute_advantages(
        &self,
        rollouts: &mut [Rollout],
        coefficients: &mut AdaptiveCoefficients,
    ) -> Vec<(String, f64)> {
        self.objective.compute_advantages(rollouts, coefficients)
    }

    fn prepare(&self, step: &mut OptimizerStep<'_>, coefficients: &mut AdaptiveCoefficients) {
        self.objective.prepare(step, coefficients);
    }
}

/// Resumes a run that ended, from its only checkpoint, and compares it with one that never ended.
fn resumes(runs: &Runs, overrides: &[&str]) {
    assert_eq!(runs.checkpoints("run"), [1], "the last checkpoint is whole");
    let rest = Trainer::builder(runs.config_with("run", overrides)).start(Start::Resume);
    assert_eq!(rest.build().unwrap().run().unwrap().steps, 3);
    let whole = Trainer::builder(runs.config_with("whole", overrides));
    whole.build().unwrap().run().unwrap();
    let samples = |run| runs.read(run, "samples.jsonl");
    assert_eq!(samples("run"), samples("whole"));
}

#[test]
fn memory_that_runs_out_while_weights_change_ends_the_run_which_resumes_from_its_checkpoint() {
    let runs = Runs::new();
    let settings = ["trainer.save_freq=1"];
    let built = Trainer::builder(runs.config_with("run", &settings)).build();
    let mut trainer = built.unwrap();
    trainer.step().unwrap();
    trainer.recovery.step = 2;
    let refused: crate::Result<()> = trainer
        .recovery
        .run_irreversible(Phase::UpdateActor, |_| panic!("CUDA_ERROR_OUT_OF_MEMORY, in the second half"));
    let message = refused.unwrap_err().to_string();
    for part in [
        "out of memory: the update_actor phase of step 2",
        "memory ran out while weights were updated, so the step cannot be replayed; resume from the last checkpoint",
    ] {
        assert!(message.contains(part), "{message}");
    }
    drop(trainer);
    resumes(&runs, &settings);
}

#[test]
fn a_step_that_updates_segments_on_the_way_is_not_replayed_and_the_run_resumes_from_its_checkpoint() {
    let runs = Runs::new();
    let settings = [
        "trainer.save_freq=1",
        "memory.step_in_backward=true",
        "memory.gradient_checkpointing=true",
        "optim.clip_grad=null",
        // a loss a step
        "trainer.train_batch_size=1",
    ];
    let config = runs.config_with("run", &settings);
    let objective = Refused { objective: config.objective.build().unwrap(), losses: AtomicUsize::new(0), at: 1 };
    let built = Trainer::builder(config).objective(objective).build();
    let message = built.unwrap().run().unwrap_err().to_string();
    for part in [
        "out of memory: the update_actor phase of step 2",
        "memory.step_in_backward updates segments on the way, so the step cannot be replayed; resume from the last checkpoint",
    ] {
        assert!(message.contains(part), "{message}");
    }
    resumes(&runs, &settings);
}

#[test]
fn a_panic_of_one_ranks_copier_thread_ends_the_run_of_all_and_names_the_rank() {
    let runs = Runs::new();
    let ended = Threads::run(2, Settings::default(), |rank| {
        let index = rank.rank();
        let config = runs.config_with("run", &["memory.optimizer_offload=cpu"]);
        let mut trainer = Trainer::builder(config).world(rank).build().unwrap();
        trainer.step().unwrap();
        let copier = Copier::asynchronous(&trainer.session.device);
        let failed = trainer.recovery.phase(Phase::UpdateActor, |run| {
            run.recovering(Phase::UpdateActor, |_| {
                if index == 1 {
                    copier.run(|| -> firebrick_backends::Result<()> { panic!("a copy tore") }).wait()?;
                }
                Ok(())
            })
        });
        trainer.broadcast_failure(failed).expect_err("an end").to_string()
    });
    for (rank, message) in ended.into_iter().enumerate() {
        let message = message.unwrap();
        assert!(message.contains("a copy tore"), "{rank}: {message}");
        assert!(rank == 1 || message.contains("rank 1"), "{rank}: {message}");
    }
}

#[test]
fn minutes_save_and_end_a_session_whose_steps_go_on_in_the_next_one() {
    let runs = Runs::new();
    let run = |name: &str, start, overrides: &[&str]| {
        let trainer = Trainer::builder(runs.config_with(name, overrides)).start(start);
        trainer.build().unwrap().run().unwrap().steps
    };
    assert_eq!(run("saved", Start::Fresh, &["trainer.save_minutes=1e-9"]), 3);
    assert_eq!(runs.checkpoints("saved"), [1, 2]);
    assert_eq!(run("slow", Start::Fresh, &["trainer.save_minutes=1000", "trainer.max_minutes=1000"]), 3);
    assert!(runs.checkpoints("slow").is_empty());
    // every session makes progress, and saves
    for steps in 1..=3 {
        let start = if steps == 1 { Start::Fresh } else { Start::Resume };
        assert_eq!(run("short", start, &["trainer.max_minutes=1e-9"]), steps);
    }
    assert_eq!(runs.checkpoints("short"), [1, 2]);
    let mut single = Trainer::builder(runs.config_with("single", &["trainer.max_minutes=1e-9"])).build().unwrap();
    single.step().unwrap();
    assert!(single.is_over() && runs.checkpoints("single") == [1]);
    // a paused one ends too
    let paused = Trainer::builder(runs.config_with("paused", &["trainer.max_minutes=0.05"]));
    let mut paused = paused.observer(Scripted::new(&[Control::Pause; 1000])).build().unwrap();
    assert_eq!((paused.run().unwrap().steps, runs.checkpoints("paused")), (1, vec![1]));
    assert_eq!(runs.read("short", "samples.jsonl"), runs.read("slow", "samples.jsonl"));
}

#[test]
fn the_checkpoint_with_the_best_validation_stays_and_is_named() {
    let runs = Runs::new();
    let metric = "val-core/arithmetic/reward";
    let keep = format!("trainer.keep_best={metric}");
    let settings = [&keep, "trainer.test_freq=1", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=1", "optim.lr=0.02"];
    let with = |steps: &str, start| {
        let steps = format!("trainer.steps={steps}");
        let config = runs.config_with("run", &[&settings[..], &[&steps]].concat());
        Trainer::builder(config).start(start).build().unwrap().run().unwrap();
        let lines = runs.read("run", "metrics.jsonl");
        let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let values: Vec<f64> = lines.map(|line| line[metric].as_f64().unwrap()).collect();
        let best = (1..values.len()).fold(1, |best, step| if values[step] > values[best] { step } else { best });
        let named: Value = serde_json::from_str(&runs.read("run", "best.json")).unwrap();
        assert_eq!((named["step"].as_u64(), named["value"].as_f64()), (Some(best as u64), Some(values[best])));
        assert_eq!(named["checkpoint"], format!("checkpoints/step-{best:06}"));
        let checkpoints = runs.checkpoints("run");
        assert!(checkpoints.contains(&(best as u64)) && checkpoints.len() <= 3, "{checkpoints:?}, best {best}");
    };
    with("6", Start::Fresh);
    with("9", Start::Resume);
    let other = runs.config_with("other", &["trainer.keep_best=val/rewards"]);
    let message = Trainer::builder(other).build().unwrap().run().unwrap_err().to_string();
    assert!(message.contains("val/rewards is not a metric") && message.contains(metric), "{message}");
    // where the first validation comes late, the steps before it are kept
    let settings = ["trainer.keep_best=val/rewards", "trainer.val_before_train=false", "trainer.test_freq=2"];
    let late = runs.config_with("late", &[&settings[..], &["trainer.steps=3", "trainer.save_freq=-1"]].concat());
    Trainer::builder(late).build().unwrap().run().unwrap_err();
    assert_eq!(runs.checkpoints("late"), [2]);
}

/// A run in which a value of a parameter is NaN after its first step; gives the error that ends it.
fn ruined(runs: &Runs, overrides: &[&str], parameter: &str) -> crate::Error {
    let settings = [&["trainer.max_consecutive_skips=2", "trainer.steps=9"], overrides].concat();
    let mut trainer = Trainer::builder(runs.config_with("run", &settings)).build().unwrap();
    trainer.step().unwrap();
    let decoder = &mut trainer.recovery.models.policy.model.decoder;
    let mut found = false;
    let ruin = |_: usize, spec: &ParamSpec, value: Param| {
        if spec.name != parameter {
            return Ok::<_, crate::Error>(value);
        }
        found = true;
        let mut values = value.download()?.to_f32();
        values[3] = f32::NAN;
        let tensor = HostTensor::from_values(values, spec.rows_cols());
        Ok(Param::Device(tensor.into_device(&trainer.session.device)))
    };
    decoder.update(ruin).unwrap();
    assert!(found, "{parameter} is no parameter");
    trainer.run().expect_err("an end")
}

#[test]
fn a_weight_that_is_nan_ends_the_run_with_its_name_after_the_skips_in_a_row() {
    let runs = Runs::new();
    let error = ruined(&runs, &["trainer.save_freq=1"], "model.layers.0.mlp.up_proj.weight");
    let message = error.to_string();
    assert!(error.is_non_finite(), "{message}");
    for part in [
        "not finite for 2 optimizer steps of update_actor in a row, last at step 3",
        "first: weight model.layers.0.mlp.up_proj.weight: 1 of 512 values are NaN or infinite",
        "start again if --resume fails too: the only checkpoint",
    ] {
        assert!(message.contains(part), "{part:?} is not in {message}");
    }
    assert_eq!(runs.checkpoints("run"), [1], "none of the ruined weights");
    let lines = runs.read("run", "metrics.jsonl");
    let skipped = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let skipped: Vec<Option<f64>> = skipped.map(|line| line["actor/skipped_non_finite"].as_f64()).collect();
    assert_eq!(skipped, [None, Some(0.0), Some(1.0)]);
}

#[test]
fn an_adapter_that_is_nan_is_named() {
    let adapter = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight";
    let base = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/models/llama-gqa");
    let model = format!("model={{path: {base}, lora: {{rank: 2, target_modules: [q_proj]}}}}");
    let message = ruined(&Runs::new(), &[&model, "rollout.prompt_length=24"], adapter).to_string();
    assert!(message.contains(&format!("first: weight {adapter}: 1 of 128 values")), "{message}");
}

/// An objective whose loss is infinite, or its gradient only.
struct NotANumber {
    objective: PolicyGradient,
    gradient_only: bool,
}

impl TokenLoss for NotANumber {
    fn loss(&self, scores: &Scores, inputs: &TokenInputs) -> Loss {
        let mut loss = self.objective.loss(scores, inputs);
        let zero = scores.logp.clone().mul_scalar(0.0).sum();
        // the gradient of a root at 0 is infinite
        let bad = if self.gradient_only { zero.sqrt() } else { zero.add_scalar(f32::INFINITY) };
        loss.total = loss.total + bad;
        loss
    }
}

impl Objective for NotANumber {
    fn compute_advantages(
        &self,
        rollouts: &mut [Rollout],
        coefficients: &mut AdaptiveCoefficients,
    ) -> Vec<(String, f64)> {
        self.objective.compute_advantages(rollouts, coefficients)
    }

    fn prepare(&self, step: &mut OptimizerStep<'_>, coefficients: &mut AdaptiveCoefficients) {
        self.objective.prepare(step, coefficients);
    }
}

#[test]
fn a_loss_or_a_gradient_that_is_not_finite_is_named_with_its_sample() {
    for (gradient_only, named) in
        [(false, "first: the loss is inf in draw "), (true, "first: gradient of the head's input: ")]
    {
        let runs = Runs::new();
        let config = runs.config_with("run", &["trainer.max_consecutive_skips=1"]);
        let objective = NotANumber { objective: config.objective.build().unwrap(), gradient_only };
        let error = Trainer::builder(config).objective(objective).build().unwrap().run().expect_err("an end");
        let message = error.to_string();
        assert!(error.is_non_finite() && message.contains(named), "{message}");
        assert!(message.contains(", sample 0"), "{message}");
    }
}
