//! Runs in half precision.

use super::{Bench, refused, stderr, succeeded};
use serde_json::Value;

/// Every tensor of a run's last checkpoint, with what its optimizer keeps.
fn checkpoint(bench: &Bench, run: &str, step: u64) -> Vec<Vec<u8>> {
    let dir = bench.path(run).join(format!("checkpoints/step-{step:06}"));
    ["model/model.safetensors", "trainer/optimizer.safetensors", "trainer/masters.safetensors"]
        .map(|file| std::fs::read(dir.join(file)).unwrap_or_else(|e| panic!("{file}: {e}")))
        .into()
}

#[test]
fn a_resumed_run_in_half_precision_equals_one_that_was_never_stopped() {
    for precision in ["bf16", "f16"] {
        let bench = Bench::new();
        let own = format!("precision={precision}");
        let settings = [own.as_str(), "warmup.sft.steps=2", "objective.kl_loss_coef=0.05"];
        let whole = format!("output={}", bench.path("whole").display());
        succeeded(&bench.firebrick("train", &[&settings[..], &["trainer.steps=5", &whole]].concat()));
        succeeded(&bench.firebrick("train", &[&settings[..], &["trainer.steps=3"]].concat()));
        let rest = ["trainer.steps=5", "--resume"];
        let output = bench.firebrick("train", &[&settings[..], &rest].concat());
        succeeded(&output);
        assert!(stderr(&output).contains("resumed after step 3"), "{}", stderr(&output));
        assert!(checkpoint(&bench, "run", 5) == checkpoint(&bench, "whole", 5), "{precision}: the checkpoints differ");
        let summary: Value = serde_json::from_str(&bench.read("run/summary.json")).unwrap();
        assert_eq!(summary["precision"], precision);
    }
}

#[test]
fn a_critic_in_half_precision_goes_on_as_it_was() {
    let bench = Bench::new();
    let settings = ["precision=bf16", "objective=ppo", "rollout.n=1", "critic={}"];
    let whole = format!("output={}", bench.path("whole").display());
    succeeded(&bench.firebrick("train", &[&settings[..], &["trainer.steps=4", &whole]].concat()));
    succeeded(&bench.firebrick("train", &[&settings[..], &["trainer.steps=2"]].concat()));
    succeeded(&bench.firebrick("train", &[&settings[..], &["trainer.steps=4", "--resume"]].concat()));
    assert!(checkpoint(&bench, "run", 4) == checkpoint(&bench, "whole", 4));
}

#[test]
fn another_precision_is_another_run() {
    let bench = Bench::new();
    succeeded(&bench.firebrick("train", &["trainer.steps=1"]));
    let output = bench.firebrick("train", &["trainer.steps=2", "precision=bf16", "--resume"]);
    refused(&output, &["precision", "another `output`"]);
}

#[test]
fn f16_cannot_be_updated_before_all_its_gradients_are_known_to_be_finite() {
    let bench = Bench::new();
    let early = ["memory.step_in_backward=true", "optim.clip_grad=null"];
    let output = bench.firebrick("train", &[&early[..], &["precision=f16"]].concat());
    refused(&output, &["step_in_backward", "loss scale", "bf16"]);
    let output = bench.firebrick("train", &[&early[..], &["optim.loss_scale=1024"]].concat());
    refused(&output, &["step_in_backward", "optim.loss_scale"]);
    succeeded(&bench.firebrick("train", &[&early[..], &["precision=bf16"]].concat()));
}

#[test]
fn a_loss_scale_is_a_number_above_zero_or_dynamic() {
    let bench = Bench::new();
    let output = bench.firebrick("train", &["optim.loss_scale=0"]);
    refused(&output, &["optim.loss_scale", "`dynamic`"]);
    let output = bench.firebrick("train", &["optim.loss_scale=often"]);
    refused(&output, &["loss_scale"]);
    succeeded(&bench.firebrick("train", &["optim.loss_scale=dynamic", "trainer.steps=1"]));
    let line = bench.read("run/metrics.jsonl");
    assert!(line.contains("\"actor/loss_scale\":65536.0"), "{line}");
}

#[test]
fn a_rollout_in_half_precision_differs_from_the_trainer_by_its_digits_and_the_run_says_so() {
    let differs = |precision: &[&str]| {
        let bench = Bench::new();
        succeeded(&bench.firebrick("train", &[&["trainer.steps=2"], precision].concat()));
        let line = bench.read("run/metrics.jsonl");
        let last: Value = serde_json::from_str(line.lines().last().unwrap()).unwrap();
        last["training/rollout_probs_diff_mean"].as_f64().unwrap()
    };
    let same = differs(&[]);
    let half = differs(&["rollout.precision=bf16"]);
    assert!(same < 1e-6 && half > 1e-5 && half < 0.02, "{same} and {half}");
    let output = Bench::new().firebrick("train", &["precision=bf16", "rollout.precision=f32"]);
    refused(&output, &["rollout.precision", "precision: f32"]);
}
