//! A configuration put together in code is the one that a file says.

use super::*;
use crate::config::parse;
use crate::objective::Algorithm;
use crate::task::{ArithmeticConfig, JsonlConfig, RewardKind};
use firebrick_plan::Preset;

fn arithmetic() -> RunConfigBuilder {
    let task = TaskConfig::Arithmetic(ArithmeticConfig::default());
    let builder = RunConfig::builder().model_path("m").output("runs/x");
    builder.task(task)
}

const ARITHMETIC: &str = "model: {path: m}\ntask: {kind: arithmetic}\noutput: runs/x\n";

/// Equal as values and as files.
fn assert_same(built: RunConfigBuilder, yaml: &str) {
    let (built, parsed) = (built.build().unwrap(), parse(yaml, &[]).unwrap());
    assert_eq!(built, parsed);
    assert_eq!(built.to_yaml().unwrap(), parsed.to_yaml().unwrap());
}

#[test]
fn a_model_an_output_and_a_task_are_a_configuration() {
    assert_same(arithmetic(), ARITHMETIC);
}

#[test]
fn a_built_configuration_is_written_as_a_parsed_one() {
    let rewards = vec![RewardKind::Length { target: None, max: Some(3), buffer: None, limit: None }.into()];
    let built = RunConfig::builder()
        .model_arch([("model_type", "llama".into()), ("hidden_size", 64.into())])
        .tokenizer("tok")
        .task(TaskConfig::Jsonl(Box::new(JsonlConfig::new("t.jsonl", rewards))))
        .output("runs/y")
        .objective(Algorithm::Dapo)
        .rollout(RolloutConfig { n: 4, ..RolloutConfig::default() })
        .update(UpdateConfig { ppo_epochs: 2, ..UpdateConfig::default() })
        .optim(OptimConfig { lr: 1e-3, ..OptimConfig::default() })
        .trainer(TrainerConfig { steps: 3, ..TrainerConfig::default() })
        .warmup(SftConfig::default())
        .sft(SftConfig::default())
        .memory(Preset::Balanced)
        .device(DeviceSpec::CPU)
        .precision(Precision::Bf16);
    let yaml = "
model: {arch: {model_type: llama, hidden_size: 64}, tokenizer: tok}
task: {kind: jsonl, train: t.jsonl, rewards: [{kind: length, max: 3}]}
output: runs/y
objective: dapo
rollout: {n: 4}
update: {ppo_epochs: 2}
optim: {lr: 0.001}
trainer: {steps: 3}
warmup: {sft: {}}
sft: {}
memory: {preset: balanced}
device: cpu
precision: bf16
";
    assert_same(built, yaml);
}

#[test]
fn every_algorithm_and_preset_sets_what_its_name_does_in_a_file() {
    for algorithm in Algorithm::ALL {
        let name = serde_json::to_value(algorithm).unwrap();
        assert_same(arithmetic().objective(algorithm), &format!("{ARITHMETIC}objective: {}\n", name.as_str().unwrap()));
    }
    for preset in [Preset::Constrained, Preset::Balanced, Preset::Fast, Preset::Huge] {
        let name = serde_json::to_value(preset).unwrap();
        assert_same(
            arithmetic().memory(preset),
            &format!("{ARITHMETIC}memory: {{preset: {}}}\n", name.as_str().unwrap()),
        );
    }
}

#[test]
fn what_is_set_in_code_wins_over_a_preset_as_what_is_written_does() {
    let rollout = RolloutConfig { max_num_seqs: 9, ..RolloutConfig::default() };
    let built = arithmetic().precision(Precision::F32).memory(Preset::Constrained).rollout(rollout);
    let yaml = "precision: f32\nmemory: {preset: constrained}\nrollout: {max_num_seqs: 9}\n";
    assert_same(built, &format!("{ARITHMETIC}{yaml}"));
    let plain = arithmetic().memory(Preset::Constrained).build().unwrap();
    assert_eq!(plain.precision, Precision::Bf16);
    assert_eq!(plain.rollout.max_num_seqs, 64);
}

#[test]
fn adapters_get_their_defaults_and_ppo_a_critic() {
    let lora = LoraSettings { rank: Some(4), ..LoraSettings::default() };
    let yaml = ARITHMETIC.replace("{path: m}", "{path: m, lora: {rank: 4}}");
    assert_same(arithmetic().lora(lora), &yaml);
    let ppo = arithmetic().objective(Algorithm::Ppo).build().unwrap();
    assert_eq!(ppo.critic, Some(CriticConfig::default()));
}

#[test]
fn what_a_file_may_not_say_cannot_be_built() {
    let error = |builder: RunConfigBuilder| builder.build().unwrap_err().to_string();
    assert!(error(RunConfig::builder().output("o")).contains("model: set `path`"));
    assert!(error(RunConfig::builder().model_path("m")).contains("output"));
    let rollout = RolloutConfig { n: 0, ..RolloutConfig::default() };
    assert!(error(arithmetic().rollout(rollout)).contains("rollout.n"));
    let critic = arithmetic().critic(CriticConfig::default());
    assert!(error(critic).contains("critic requires objective: ppo"));
}

#[test]
fn resolving_twice_changes_nothing() {
    let once = arithmetic().objective(Algorithm::Ppo).build().unwrap();
    assert_eq!(once.clone().resolve().unwrap(), once);
}
