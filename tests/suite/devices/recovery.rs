//! Memory that runs out in a chosen phase, on the stand-in for a CUDA card (`tests/cuda`): the run takes a cheaper
//! plan, does the work again, and ends with the metrics and the weights of the run that had enough.

use super::own_process::{again, is_inner};
use super::stand_in::{REFUSE_WHILE, is_stand_in};
use crate::support::{checked, fixtures, project, relative_l2};
use burn::tensor::{Device, Tensor};
use firebrick_backends::memory::read;
use firebrick_engine::config::{Mode, RunConfig, parse};
use firebrick_engine::metrics::{Event, Metrics, Observer, Phase};
use firebrick_engine::trainer::Trainer;
use std::collections::BTreeMap;
use std::fs::read_to_string;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;

const STEPS: u64 = 2;

/// Moments of a list that CI takes.
const FEW: usize = 1;

/// On few tokens: what fills memory is weights and their state, of which cheaper plans move some to the host.
const PPO: &str = "
model:
  arch: {model_type: llama, hidden_size: 128, intermediate_size: 512, num_hidden_layers: 3, num_attention_heads: 4,
         max_position_embeddings: 32}
task: {kind: arithmetic, difficulty: 1, partial: true, validation_size: 4}
output: run
device: cuda
objective: {name: ppo, kl_loss_coef: 0.01}
critic: {optim: {lr: 1e-3, eps: 1e-4}}
rollout: {n: 1, prompt_length: 6, response_length: 2}
optim: {lr: 1e-3, eps: 1e-4, lr_scheduler: {lr_scheduler_type: constant}}
trainer: {steps: 2, train_batch_size: 2, seed: 5, test_freq: 0, val_max_samples: 1, save_freq: 1}
";

mod cuda {
    use crate::devices::gpu;

    macro_rules! tests {
        ($($test:ident),* $(,)?) => {$(
            #[test]
            fn $test() {
                if let Some((device, _alone)) = gpu("cuda") {
                    super::in_own_process(stringify!($test), || super::$test(&device));
                }
            }
        )*};
    }

    tests!(
        every_phase_that_is_refused_memory_is_done_again_under_a_cheaper_plan,
        moves_between_phases_that_are_refused_memory_are_done_again,
        loading_that_is_refused_memory_is_done_again,
        warm_up_baselines_and_supervised_training_are_done_again,
        a_reward_model_that_is_refused_memory_judges_again,
    );
}

/// Runs a test's body in a process of its own, where the device refuses memory while a file is there.
fn in_own_process(test: &str, body: impl FnOnce()) {
    if !is_stand_in() {
        return;
    }
    if is_inner() {
        return body();
    }
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("refuse");
    let file = file.to_str().expect("a path in UTF-8");
    again(&format!("devices::recovery::cuda::{test}"), &[(REFUSE_WHILE, file)]);
}

/// The file of the inner process.
fn refusing() -> PathBuf {
    std::env::var_os(REFUSE_WHILE).expect("the outer test sets it").into()
}

/// Where memory starts to be refused.
#[derive(Clone, Copy, Debug, PartialEq)]
enum From {
    /// A phase of a step.
    Phase(Phase, u64),
    /// A step's end: what comes next is its checkpoint.
    Step(u64),
}

/// Refuses memory from a moment of the run on, until the run has taken another plan.
struct Refusing {
    from: Option<From>,
    device: Device,
    metrics: Vec<Metrics>,
    /// What the pools have left is in use meanwhile, so that the next tensor needs new memory.
    filling: Vec<Tensor<1>>,
    refused: usize,
    /// Told at the end.
    done: std::sync::mpsc::Sender<(Vec<Metrics>, usize)>,
}

impl Refusing {
    fn begin(&mut self) {
        self.from = None;
        self.filling = filled(&self.device);
        std::fs::write(refusing(), "").expect("a file that says so");
    }

    fn end(&mut self) {
        if let Ok(text) = read_to_string(refusing()) {
            std::fs::remove_file(refusing()).expect("its own file");
            self.refused += text.lines().count();
        }
        self.filling.clear();
    }
}

impl Observer for Refusing {
    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Phase { step, phase } => {
                self.end();
                if self.from == Some(From::Phase(phase, step)) {
                    self.begin();
                }
            }
            Event::Replanned { .. } | Event::Saved { .. } => self.end(),
            Event::Step { step, metrics, .. } => {
                self.end();
                self.metrics.push(metrics.clone());
                if self.from == Some(From::Step(step)) {
                    self.begin();
                }
            }
            Event::Sft { metrics, .. } | Event::Validated { metrics, .. } => {
                self.end();
                self.metrics.push(metrics.clone());
            }
            Event::Finished(_) => {
                let noted = std::mem::take(&mut self.metrics);
                self.done.send((noted, self.refused)).expect("the test");
            }
            Event::Ready { .. } => {}
        }
    }
}

/// Tensors that take what the device's pools have reserved, but for what is left of pages too small for 64 KiB: a
/// driver that refuses all else leaves a program that much.
fn filled(device: &Device) -> Vec<Tensor<1>> {
    let device = &device.clone().inner();
    let mut all = Vec::new();
    for bytes in [1 << 20, 1 << 16] {
        let reserved = read(device).reserved_bytes;
        loop {
            let one = Tensor::<1>::empty([bytes / 4], device);
            if read(device).reserved_bytes > reserved {
                drop(one);
                device.memory_cleanup();
                break;
            }
            all.push(one);
        }
    }
    all
}

/// What a run came to.
struct Ran {
    metrics: Vec<Metrics>,
    weights: BTreeMap<String, Vec<f64>>,
    replans: u64,
    refused: usize,
}

/// Whether a metric is the same under every plan.
fn is_learnt(name: &str) -> bool {
    const BY_PLAN: [&str; 2] = ["actor/lr", "critic/lr"];
    let kinds = ["actor/", "critic/", "val-core/", "sft/", "train/", "val/"];
    kinds.iter().any(|kind| name.starts_with(kind)) && !BY_PLAN.contains(&name)
}

/// A run on a thread of its own, which has a stream and pools of its own. A run that ends in an error is the test's
/// failure.
fn run(config: RunConfig, mode: Mode, from: Option<From>, device: &Device) -> Ran {
    let (done, ended) = channel();
    let own = device.clone();
    let thread = std::thread::spawn(move || {
        let observer = Refusing { from, device: own, metrics: Vec::new(), filling: Vec::new(), refused: 0, done };
        let built = Trainer::builder(config).mode(mode).observer(observer).build();
        let mut trainer = built.unwrap_or_else(|error| panic!("{from:?}: {error}"));
        let summary = trainer.run().unwrap_or_else(|error| panic!("{from:?}: {error}"));
        let policy = trainer.whole_policy().expect("weights");
        let weights = policy.params().map(|(spec, value)| {
            let values = value.download().expect("values").to_f64();
            (spec.name.clone(), values)
        });
        (weights.collect(), summary.replans)
    });
    let (weights, replans) = thread.join().expect("a run that ends");
    let (metrics, refused) = ended.recv().expect("an end");
    device.memory_cleanup();
    Ran { metrics, weights, replans, refused }
}

/// A run learnt what the undisturbed one did.
fn assert_same(what: &str, found: &Ran, expected: &Ran) {
    assert_eq!(found.metrics.len(), expected.metrics.len(), "{what}");
    for (line, (found, expected)) in found.metrics.iter().zip(&expected.metrics).enumerate() {
        let learnt = expected.iter().filter(|(name, _)| is_learnt(name));
        for (name, expected) in learnt {
            let found = found.get(name).unwrap_or_else(|| panic!("{what}: no {name}"));
            let within = (found - expected).abs() <= 1e-4 * expected.abs().max(1e-2);
            assert!(
                within || found.is_nan() && expected.is_nan(),
                "{what}, line {line}: {name} is {found} instead of {expected}"
            );
        }
    }
    for (name, expected) in &expected.weights {
        let off = relative_l2(&found.weights[name], expected);
        assert!(off < 1e-5, "{what}: {name} is {off} off");
    }
}

/// The runs of a configuration, of which each is refused memory once; all learn what the undisturbed one does.
struct Cases {
    text: String,
    mode: Mode,
    folder: tempfile::TempDir,
    undisturbed: Ran,
}

impl Cases {
    fn new(text: &str, mode: Mode, overrides: &[String], device: &Device) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let config = config(text, &folder.path().join("undisturbed"), overrides);
        let undisturbed = run(config, mode, None, device);
        assert_eq!((undisturbed.replans, undisturbed.refused), (0, 0));
        assert!(!undisturbed.metrics.is_empty());
        Self { text: text.to_owned(), mode, folder, undisturbed }
    }

    fn refuse(&self, from: From, overrides: &[String], device: &Device) {
        let name = match from {
            From::Phase(phase, step) => format!("{}-{step}", phase.name()),
            From::Step(step) => format!("step-{step}"),
        };
        let config = config(&self.text, &self.folder.path().join(&name), overrides);
        let found = run(config, self.mode, Some(from), device);
        assert!(found.refused > 0, "{from:?}: nothing was refused");
        assert!(found.replans > 0, "{from:?}: no other plan was taken");
        assert_same(&name, &found, &self.undisturbed);
    }
}

fn config(text: &str, output: &Path, overrides: &[String]) -> RunConfig {
    let mut config = parse(text, overrides).expect("a configuration");
    output.clone_into(&mut config.output);
    config
}

fn owned(settings: &[&str]) -> Vec<String> {
    settings.iter().map(|one| (*one).to_owned()).collect()
}

/// Refuses memory in the first of these, or in each where a campaign asks for it, and says how many there were.
fn refuse_each(text: &str, mode: Mode, settings: &[&str], moments: &[From], device: &Device) {
    let settings = owned(settings);
    let all = std::env::var("FIREBRICK_CAMPAIGN").is_ok_and(|name| name == "recovery");
    let moments = &moments[..if all { moments.len() } else { FEW.min(moments.len()) }];
    let cases = Cases::new(text, mode, &settings, device);
    for from in moments {
        cases.refuse(*from, &settings, device);
    }
    checked("phases that were refused memory", moments.len());
}

fn every_phase_that_is_refused_memory_is_done_again_under_a_cheaper_plan(device: &Device) {
    let phases = [
        // the first update of each adds its moments
        From::Phase(Phase::UpdateActor, 1),
        From::Phase(Phase::UpdateCritic, 1),
        From::Phase(Phase::Generate, 2),
        From::Phase(Phase::Validation, 0),
        From::Phase(Phase::Generate, 1),
        From::Phase(Phase::OldLogProbs, 2),
        From::Phase(Phase::ReferenceLogProbs, 2),
        From::Phase(Phase::Values, 2),
        From::Phase(Phase::UpdateCritic, 2),
        From::Phase(Phase::UpdateActor, 2),
        From::Phase(Phase::Validation, STEPS),
    ];
    refuse_each(PPO, Mode::Rl, &[], &phases, device);
    // moments in 8 bits are widened on the device when they are written
    let settings = ["memory.moments=block8", "memory.critic.moments=block8"];
    refuse_each(PPO, Mode::Rl, &settings, &[From::Step(1)], device);
}

/// With every model and its state on the host between phases, what a phase needs first is its weights.
fn moves_between_phases_that_are_refused_memory_are_done_again(device: &Device) {
    let settings = [
        "memory.param_offload=idle",
        "memory.optimizer_offload=idle",
        "memory.reference.param_offload=idle",
        "memory.critic.param_offload=idle",
        "memory.critic.optimizer_offload=idle",
    ];
    let phases =
        [From::Phase(Phase::UpdateActor, 2), From::Phase(Phase::Values, 2), From::Phase(Phase::ReferenceLogProbs, 2)];
    refuse_each(PPO, Mode::Rl, &settings, &phases, device);
}

/// Memory is refused from the start of loading on, until weights were refused too: `CubeCL` asks for each twice.
fn loading_that_is_refused_memory_is_done_again(device: &Device) {
    let cases = Cases::new(PPO, Mode::Rl, &[], device);
    std::fs::write(refusing(), "at most 50\n").expect("a file that says so");
    let config = config(PPO, &cases.folder.path().join("load"), &[]);
    let found = run(config, Mode::Rl, None, device);
    assert_eq!(found.refused, 0, "the run began before all was refused");
    assert!(found.replans > 0, "no other plan was taken");
    assert_same("load", &found, &cases.undisturbed);
    checked("loads that were refused memory", 1);
}

/// A file of examples for supervised steps.
fn rows(folder: &Path) -> String {
    let row = |i: usize| format!("{{\"prompt\": \"{i}+1=\", \"completion\": \"{}\"}}\n", i + 1);
    let file = folder.join("rows.jsonl");
    std::fs::write(&file, (0..8).map(row).collect::<String>()).expect("a file of rows");
    file.display().to_string()
}

fn warm_up_baselines_and_supervised_training_are_done_again(device: &Device) {
    let folder = tempfile::tempdir().expect("a folder");
    let rows = rows(folder.path());
    let warm_up = format!("warmup={{sft: {{train: {rows}, steps: 2, batch_size: 2}}}}");
    let settings = ["objective=remax", "critic=null", &warm_up];
    let phases = [From::Phase(Phase::GenerateBaseline, 2), From::Phase(Phase::WarmUp, 0)];
    refuse_each(PPO, Mode::Rl, &settings, &phases, device);
}

/// The example with a reward model, made smaller.
fn a_reward_model_that_is_refused_memory_judges_again(device: &Device) {
    let example = project().join("examples/reward_model.yaml");
    let text = read_to_string(example).expect("the example");
    let data = fixtures();
    let under = |path: &str| data.join(path).display().to_string();
    let text = text.replace("../tests/fixtures/", &under(""));
    let settings = [
        "device=cuda",
        "rollout.n=2",
        "trainer.train_batch_size=1",
        "trainer.save_freq=-1",
        "task.validation_size=4",
        "task.rewards.0.score_tokens=1024",
        "optim.eps=1e-4",
    ];
    let phases = [From::Phase(Phase::Reward, 2), From::Phase(Phase::ValidationReward, 0)];
    refuse_each(&text, Mode::Rl, &settings, &phases, device);
}
