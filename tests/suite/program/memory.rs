//! Runs under a budget and under a limit: what they say, and that they learn what a run with memory enough learns.

use super::{Bench, program, refused, stderr, succeeded};
use firebrick_backends::Precision;
use firebrick_engine::config::parse;
use serde_json::Value;
use std::process::Output;

/// A model whose update needs several times the memory of everything else.
const WIDE: &str = "
model:
  arch: {model_type: llama, hidden_size: 64, intermediate_size: 192, num_hidden_layers: 4, num_attention_heads: 4,
         max_position_embeddings: 64}
task: {kind: arithmetic, difficulty: 2, zero_pad: true, partial: true, validation_size: 4}
output: OUTPUT
device: cpu
objective: {kl_loss_coef: 0.01, entropy_coeff: 0.001}
rollout: {n: 8, prompt_length: 6, response_length: 8}
optim: {lr: 1.0e-3}
trainer: {steps: 3, train_batch_size: 24, seed: 5}
";

const MIB: u64 = 1 << 20;

pub(super) fn bench() -> Bench {
    let bench = Bench::new();
    let output = bench.path("run");
    bench.write("config.yaml", &WIDE.replace("OUTPUT", output.to_str().unwrap()));
    bench
}

/// A run in a folder of its own.
pub(super) fn train(bench: &Bench, name: &str, settings: &[&str]) -> Output {
    let output = format!("output={}", bench.path(name).display());
    bench.firebrick("train", &[&[output.as_str()], settings].concat())
}

fn summary(bench: &Bench, name: &str) -> Value {
    serde_json::from_str(&bench.read(&format!("{name}/summary.json"))).unwrap()
}

pub(super) fn peak(bench: &Bench, name: &str) -> u64 {
    summary(bench, name)["measured_peak_bytes"].as_u64().unwrap()
}

/// What a run learnt from, by step.
fn learnt(bench: &Bench, name: &str) -> Vec<Vec<f64>> {
    const KEYS: [&str; 5] =
        ["actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm", "critic/rewards/mean"];
    let text = bench.read(&format!("{name}/metrics.jsonl"));
    let lines = text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
    let steps = lines.filter(|l| l["training/global_step"] != 0);
    steps.map(|l| KEYS.map(|key| l[key].as_f64().unwrap()).to_vec()).collect()
}

/// Sums in another order, three updates long.
fn same(bench: &Bench, name: &str, other: &str) {
    let (a, b) = (learnt(bench, name), learnt(bench, other));
    assert_eq!((a.len(), b.len()), (3, 3));
    for (a, b) in a.iter().flatten().zip(b.iter().flatten()) {
        assert!((a - b).abs() <= 1e-4 * b.abs().max(1e-2), "{name}: {a} instead of {b}");
    }
}

#[test]
fn a_budget_below_the_plain_need_is_kept_and_changes_nothing_but_memory() {
    let bench = bench();
    succeeded(&train(&bench, "plain", &[]));
    let plain = peak(&bench, "plain");
    let budget = plain / 2;
    let settings = [format!("memory.budget={budget}"), format!("memory.limit={budget}")];
    let settings = settings.each_ref().map(String::as_str);
    let output = train(&bench, "tight", &settings);
    succeeded(&output);
    same(&bench, "tight", "plain");
    let found = summary(&bench, "tight");
    let measured = found["measured_peak_bytes"].as_u64().unwrap();
    let predicted = found["predicted_peak_bytes"].as_u64().unwrap();
    assert!(measured <= budget, "{measured} of {budget}");
    // how much products keep for packing depends on the machine's caches and cores
    let allowed = measured as f64 * 0.15 + 4.0 * MIB as f64;
    assert!((predicted as f64 - measured as f64).abs() <= allowed, "{measured} measured, {predicted} predicted");
    assert_eq!(found["replans"], 0);
    let said = stderr(&output);
    assert!(said.contains("predicted") && said.contains("measured"), "{said}");
}

#[test]
fn a_run_that_hits_its_limit_goes_on_under_a_cheaper_plan_and_learns_the_same() {
    let bench = bench();
    succeeded(&train(&bench, "plain", &[]));
    let limit = format!("memory.limit={}", peak(&bench, "plain") * 6 / 10);
    let output = train(&bench, "limited", &[&limit]);
    succeeded(&output);
    let said = stderr(&output);
    assert!(said.contains("out of memory in the update_actor phase of step 1"), "{said}");
    assert!(said.contains("continuing with memory."), "{said}");
    assert!(summary(&bench, "limited")["replans"].as_u64().unwrap() >= 1);
    same(&bench, "limited", "plain");
}

#[test]
fn a_run_with_a_critic_keeps_its_budget_and_goes_on_after_its_limit() {
    let bench = bench();
    let ppo = [
        "objective={name: ppo, kl_loss_coef: 0.01, entropy_coeff: 0.001}",
        "critic.optim.lr=0.001",
        "rollout.n=1",
        "trainer.train_batch_size=192",
    ];
    let run = |name: &str, more: &[&str]| {
        let output = train(&bench, name, &[&ppo[..], more].concat());
        succeeded(&output);
        stderr(&output)
    };
    let values = |name: &str| -> Vec<f64> {
        let text = bench.read(&format!("{name}/metrics.jsonl"));
        let lines = text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
        lines.filter_map(|l| l["critic/vf_loss"].as_f64()).collect()
    };
    run("plain", &[]);
    let least = peak(&bench, "plain") * 6 / 10;
    run("tight", &[&format!("memory.budget={least}"), &format!("memory.limit={least}")]);
    assert_eq!(summary(&bench, "tight")["replans"], 0);
    assert!(peak(&bench, "tight") <= least);
    let said = run("limited", &[&format!("memory.limit={least}")]);
    // the critic is updated before the policy
    assert!(said.contains("out of memory in the update_critic phase of step 1"), "{said}");
    for name in ["tight", "limited"] {
        same(&bench, name, "plain");
        assert_eq!(values(name).len(), 3);
        for (a, b) in values(name).iter().zip(values("plain")) {
            assert!((a - b).abs() <= 1e-4 * b.abs().max(1e-2), "{name}: {a} instead of {b}");
        }
    }
}

#[test]
fn without_recovery_the_error_ranks_what_is_held_and_names_the_change_that_would_fit() {
    let bench = bench();
    succeeded(&train(&bench, "plain", &[]));
    let limit = format!("memory.limit={}", peak(&bench, "plain") * 6 / 10);
    let output = train(&bench, "off", &[&limit, "memory.recover=false"]);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for part in [
        "out of memory: the update_actor phase of step 1 needed",
        "memory.limit is",
        "reference",
        "memory.recover is off; the smallest change that should fit: memory.",
    ] {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
    let settings = said.rsplit("should fit: ").next().unwrap().trim();
    let settings: Vec<&str> = settings.split_whitespace().chain([limit.as_str()]).collect();
    succeeded(&train(&bench, "mended", &settings));
    same(&bench, "mended", "plain");
}

#[test]
fn a_budget_that_nothing_fits_is_refused_with_what_is_missing_and_what_would_do() {
    let bench = bench();
    let output = train(&bench, "tiny", &["memory.budget=3MiB"]);
    refused(&output, &["no plan fits 3.00 MiB", "too much", "One of these changes is enough", "budget of"]);
    assert!(!bench.path("tiny").exists(), "nothing was begun");
}

#[test]
fn a_saved_plan_is_the_plan_that_runs() {
    let bench = bench();
    let file = bench.path("saved.json");
    let budget = format!("{}", 30 * MIB);
    let planned = bench.firebrick("plan", &["--budget", &budget, "--json", "--output", file.to_str().unwrap()]);
    let printed: Value = serde_json::from_str(&succeeded(&planned)).unwrap();
    assert!(printed["peak_bytes"].as_u64().unwrap() <= 30 * MIB);
    let phases = printed["phases"].as_array().unwrap();
    for phase in phases {
        let categories = phase["categories"].as_object().unwrap();
        let sum: u64 = categories.values().map(|v| v.as_u64().unwrap()).sum();
        assert_eq!(phase["total_bytes"].as_u64().unwrap(), sum, "{}", phase["name"]);
    }
    succeeded(&train(&bench, "run", &["--plan", file.to_str().unwrap()]));
    let ran: Value = serde_json::from_str(&bench.read("run/plan.json")).unwrap();
    assert_eq!(ran["plan"], printed["plan"]);

    bench.write("broken.json", &bench.read("saved.json").replace("\"head_rows\": ", "\"head_rows\": -"));
    let broken = bench.path("broken.json");
    let output = train(&bench, "other", &["--plan", broken.to_str().unwrap()]);
    refused(&output, &["broken.json", "head_rows", "firebrick plan"]);
}

#[test]
fn every_preset_learns_the_same() {
    let bench = bench();
    succeeded(&train(&bench, "fast", &["memory.preset=fast", "optim.clip_grad=null"]));
    for (preset, exact) in [
        ("balanced", &[][..]),
        // 8-bit moments are meant to differ
        ("constrained", &["memory.moments=f32"]),
        ("huge", &[]),
    ] {
        let preset_setting = format!("memory.preset={preset}");
        let settings = [&[preset_setting.as_str(), "optim.clip_grad=null"], exact].concat();
        succeeded(&train(&bench, preset, &settings));
        same(&bench, preset, "fast");
    }
}

#[test]
fn a_preset_s_values_that_the_cpu_cannot_have_are_left_out_of_the_run() {
    let bench = bench();
    let settings = ["memory.preset=constrained", "trainer.steps=1"];
    let output = train(&bench, "run", &settings);
    succeeded(&output);
    let said = stderr(&output);
    for part in ["constrained is applied without precision=bf16: the CPU", "without rollout.gpu_memory_utilization=0.5"]
    {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
    let resolved = parse(&bench.read("run/config.yaml"), &[]).unwrap();
    assert_eq!(resolved.precision, Precision::F32);
    assert_eq!(resolved.rollout.gpu_memory_utilization, None);
    assert_eq!(resolved.rollout.max_num_seqs, 64);
    // the run continues from the same file
    let more = ["memory.preset=constrained", "trainer.steps=2", "--resume"];
    succeeded(&train(&bench, "run", &more));
    // what is written is not the preset's to leave out
    let written = [&settings[..], &["precision=bf16"]].concat();
    succeeded(&train(&bench, "half", &written));
    assert_eq!(summary(&bench, "half")["precision"], "bf16");
}

#[test]
fn several_updates_and_a_killed_run_go_on_under_every_offload() {
    let bench = bench();
    let settings = [
        "memory.preset=huge",
        "update.ppo_mini_batch_size=12",
        "update.ppo_epochs=2",
        "trainer.save_freq=1",
        "memory.moments=block8",
    ];
    succeeded(&train(&bench, "whole", &settings));
    // the same run, ended after its second step
    let first = [&settings[..], &["trainer.steps=2", "optim.lr_scheduler={lr_scheduler_type: constant}"]].concat();
    let all = [&settings[..], &["optim.lr_scheduler={lr_scheduler_type: constant}"]].concat();
    succeeded(&train(&bench, "constant", &all));
    succeeded(&train(&bench, "cut", &first));
    let resumed = [&all[..], &["--resume"]].concat();
    succeeded(&train(&bench, "cut", &resumed));
    assert_eq!(learnt(&bench, "cut"), learnt(&bench, "constant"));
}

/// A limit that the system itself enforces. The process ends; the run does not.
#[test]
#[cfg(target_os = "linux")]
fn a_process_that_the_system_refuses_memory_leaves_a_plan_to_go_on_with() {
    let bench = bench();
    let config = bench.path("config.yaml");
    let settings = ["trainer.train_batch_size=160", "trainer.save_freq=1"];
    let binary = program(&[]).get_program().to_owned();
    let limited = |kib: u64, more: &[&str]| {
        let mut command = std::process::Command::new("sh");
        command
            .args(["-c", &format!("ulimit -d {kib} && exec \"$0\" \"$@\"")])
            .arg(&binary)
            .args(["train", config.to_str().unwrap()])
            .args(settings)
            .args(more)
            .env("RAYON_NUM_THREADS", "2");
        command.output().unwrap()
    };
    let kib = 250 * 1024;
    let output = limited(kib, &[]);
    let said = stderr(&output);
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("out of host memory") && said.contains("next_plan.json"), "{said}");
    // every plan names the next cheaper one, so restarts arrive at one that fits
    let next = bench.path("run/next_plan.json");
    let arrived = (0..12).any(|_| {
        let output = limited(kib, &["--resume", "--plan", next.to_str().unwrap()]);
        output.status.success() || !next.is_file()
    });
    assert!(arrived && bench.path("run/summary.json").is_file());
}
