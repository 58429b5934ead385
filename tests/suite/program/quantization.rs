//! Rollouts in 8-bit weights.

use super::runs::metrics;
use super::{Bench, refused, stderr, succeeded};
use serde_json::Value;

const INT8: &str = "rollout.quantization=int8";

fn mean(line: &Value, key: &str) -> f64 {
    line[key].as_f64().unwrap_or_else(|| panic!("{key}: {line}"))
}

#[test]
fn a_rollout_in_8_bits_differs_from_the_trainer_by_its_digits_and_the_run_says_so() {
    let differs = |settings: &[&str]| {
        let bench = Bench::new();
        succeeded(&bench.firebrick("train", &[&["trainer.steps=2"], settings].concat()));
        let lines = metrics(&bench, "run");
        mean(&lines[2], "training/rollout_probs_diff_mean")
    };
    assert!(differs(&[]) < 1e-6);
    for more in [
        &[][..],
        &["rollout.pack_weights=false"],
        // the first optimizer step's own forward is compared
        &["update.old_log_probs=sampler"],
    ] {
        let apart = differs(&[&[INT8], more].concat());
        assert!(apart > 1e-6 && apart < 0.01, "{more:?}: {apart}");
    }
}

#[test]
fn what_8_bits_change_is_corrected_by_importance_sampling() {
    let bench = Bench::new();
    succeeded(&bench.firebrick("train", &[INT8, "objective.rollout_is=token"]));
    for line in &metrics(&bench, "run")[1..] {
        let weight = mean(line, "rollout_corr/rollout_is_mean");
        assert!((weight - 1.0).abs() < 0.02, "{line}");
        assert!(mean(line, "rollout_corr/rollout_is_max") > 1.0, "{line}");
    }
}

#[test]
fn a_resumed_run_that_samples_in_8_bits_equals_one_that_was_never_stopped() {
    let bench = Bench::new();
    let settings = [INT8, "warmup.sft.steps=2"];
    let train = |more: &[&str]| bench.firebrick("train", &[&settings[..], more].concat());
    let whole = format!("output={}", bench.path("whole").display());
    succeeded(&train(&["trainer.steps=5", &whole]));
    succeeded(&train(&["trainer.steps=3"]));
    let other = ["trainer.steps=5", "rollout.quantization=null", "--resume"];
    refused(&train(&other), &["rollout", "another `output`"]);
    let output = train(&["trainer.steps=5", "--resume"]);
    succeeded(&output);
    assert!(stderr(&output).contains("resumed after step 3"));
    for name in ["model/model.safetensors", "trainer/optimizer.safetensors"] {
        let file = |run: &str| {
            let path = bench.path(&format!("{run}/checkpoints/step-000005/{name}"));
            std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
        };
        assert!(file("run") == file("whole"), "{name} differs");
    }
    let last = |run: &str| metrics(&bench, run).pop();
    assert_eq!(last("run"), last("whole"));
}

#[test]
fn rewards_rise_while_completions_are_sampled_in_8_bits() {
    let bench = Bench::new();
    succeeded(&bench.firebrick(
        "train",
        &[
            INT8,
            "warmup.sft={steps: 60, optim: {lr: 0.01}}",
            "trainer.steps=48",
            "trainer.seed=7",
            "trainer.train_batch_size=16",
            "rollout.n=8",
            "optim.lr=0.003",
        ],
    ));
    let lines = metrics(&bench, "run");
    let lines: Vec<&Value> = lines.iter().filter(|l| l.get("critic/score/mean").is_some()).collect();
    let reward = |lines: &[&Value]| {
        let all = lines.iter().map(|line| mean(line, "critic/score/mean"));
        all.sum::<f64>() / lines.len() as f64
    };
    let (first, last) = (reward(&lines[..8]), reward(&lines[lines.len() - 8..]));
    assert!(last > first + 0.1, "{first} and then {last}");
}

#[test]
fn where_8_bits_cannot_be_they_are_refused_with_what_can() {
    let bench = Bench::new();
    for (settings, parts) in [
        (&["precision=bf16"][..], ["computes in f32 on the CPU", "bf16"]),
        (&["rollout.precision=f16"], ["computes in f32 on the CPU", "f16"]),
    ] {
        let output = bench.firebrick("train", &[&[INT8], settings].concat());
        refused(&output, &parts);
        refused(&output, &["rollout.quantization", "remove one of the two settings"]);
    }
    let output = bench.firebrick("train", &["rollout.quantization=int4"]);
    refused(&output, &["rollout.quantization", "int8"]);
}

#[test]
fn a_plan_counts_the_copies() {
    let bench = Bench::new();
    let rollout = |settings: &[&str]| -> u64 {
        let fixed = ["--json", "rollout.pack_weights=false", "trainer.val_max_samples=1"];
        let output = bench.firebrick("plan", &[&fixed[..], settings].concat());
        let plan: Value = serde_json::from_str(&succeeded(&output)).unwrap();
        let phases = plan["phases"].as_array().unwrap();
        let own = phases.iter().find(|p| p["name"] == "rollout").unwrap();
        own["categories"]["parameters"].as_u64().unwrap()
    };
    // two layers of q, k, v, o of [16, 16], gate and up of [32, 16], down of [16, 32]: 32 outputs a panel
    let (square, wide, down) = (32 * (16 + 4), 32 * (16 + 4), 32 * (32 + 4));
    let copies = 2 * (4 * square + 2 * wide + down);
    for settings in
        [&[][..], &["device=cuda:0"], &["device=cuda:0", "precision=bf16"], &["device=wgpu", "rollout.precision=f16"]]
    {
        let int8 = rollout(&[settings, &[INT8]].concat());
        assert_eq!(int8 - rollout(settings), copies, "{settings:?}");
    }
}

/// The program's own way through a GPU: what it says of a run, and the run.
#[cfg(feature = "wgpu")]
mod wgpu {
    use super::*;

    #[test]
    fn a_gpu_samples_in_8_bits_and_says_above_how_many_sequences_that_does_not_pay() {
        let Some((_device, _alone)) = crate::devices::gpu("wgpu") else {
            return;
        };
        let run = |settings: &[&str]| {
            let bench = Bench::new();
            let fixed = ["device=wgpu", "trainer.steps=1"];
            let output = bench.firebrick("train", &[&fixed, settings].concat());
            succeeded(&output);
            let line = metrics(&bench, "run").pop().expect("a step");
            (mean(&line, "training/rollout_probs_diff_mean"), stderr(&output))
        };
        let (exact, _) = run(&[]);
        let (apart, said) = run(&[INT8]);
        assert!(apart > 10.0 * exact && apart < 0.01, "{apart}, and {exact} of exact weights");
        assert!(!said.contains("sequences at a time"), "{said}");
        let many = [INT8, "trainer.train_batch_size=18", "rollout.n=4"];
        let (_, said) = run(&many);
        assert!(said.contains("int8 with 72 sequences at a time"), "{said}");
        assert!(said.contains("rollout.max_num_seqs: 64"), "{said}");
    }
}
