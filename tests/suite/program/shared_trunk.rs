//! Runs whose critic is a value head on the policy: one pass, one optimizer, a plain language model for a checkpoint.

use super::runs::metrics;
use super::{Bench, copy_model, refused, stderr, succeeded};
use serde_json::Value;

const SHARED: [&str; 7] = [
    "objective={name: ppo, gamma: 0.99, lam: 0.9}",
    "critic={shared_trunk: true, vf_coef: 0.2, head_lr: 0.01, cliprange_value: 0.1}",
    "rollout.n=1",
    "trainer.train_batch_size=8",
    "update.ppo_epochs=2",
    "update.ppo_mini_batch_size=4",
    "update.old_log_probs=sampler",
];

fn shared(bench: &Bench, more: &[&str]) -> std::process::Output {
    bench.firebrick("train", &[&SHARED[..], more].concat())
}

fn tensors(bench: &Bench, name: &str) -> Vec<String> {
    let bytes = std::fs::read(bench.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    file.names().iter().map(ToString::to_string).collect()
}

#[test]
fn a_shared_trunk_is_one_model_with_one_update_and_a_plain_checkpoint() {
    let bench = Bench::new();
    succeeded(&shared(&bench, &[]));
    let lines = metrics(&bench, "run");
    for key in [
        "critic/vf_loss",
        "critic/vf_explained_var",
        "critic/values/mean",
        "critic/returns/max",
        "critic/lr",
        "actor/pg_loss",
        "actor/grad_norm",
    ] {
        assert!(lines[1][key].is_number(), "{key}: {}", lines[1]);
    }
    // no model, no phase and no gradient of its own
    assert!(lines[1]["critic/grad_norm"].is_null());
    let all = bench.read("run/metrics.jsonl");
    assert!(all.contains("timing_s/old_log_prob"));
    for phase in ["timing_s/values", "timing_s/update_critic"] {
        assert!(!all.contains(phase), "{phase}");
    }
    assert!((lines[1]["critic/lr"].as_f64().unwrap() - 0.01).abs() < 1e-15);
    let plan: Value = serde_json::from_str(&bench.read("run/plan.json")).unwrap();
    assert!(plan["plan"]["models"]["critic"].is_null());

    let step = "run/checkpoints/step-000003";
    let config = bench.read(&format!("{step}/model/config.json"));
    assert!(config.contains("LlamaForCausalLM"), "{config}");
    let exported = tensors(&bench, &format!("{step}/model/model.safetensors"));
    assert!(!exported.iter().any(|name| name.contains("v_head")), "{exported:?}");
    let head = tensors(&bench, &format!("{step}/trainer/value_head.safetensors"));
    assert_eq!(head, ["v_head.weight"]);
    let moments = tensors(&bench, &format!("{step}/trainer/optimizer.safetensors"));
    assert!(moments.contains(&"v_head.weight.exp_avg".to_owned()), "{moments:?}");

    let exported = bench.path(&format!("{step}/model"));
    let model = format!("model={{path: {}}}", exported.display());
    succeeded(&bench.firebrick("eval", &[&model, "warmup=null"]));
}

#[test]
fn a_resumed_run_with_a_shared_trunk_equals_one_that_was_never_stopped() {
    let bench = Bench::new();
    let whole = format!("output={}", bench.path("whole").display());
    succeeded(&shared(&bench, &["trainer.steps=5", &whole]));
    succeeded(&shared(&bench, &["trainer.steps=3"]));
    let resumed = shared(&bench, &["trainer.steps=5", "--resume"]);
    succeeded(&resumed);
    assert!(stderr(&resumed).contains("resumed after step 3"));
    assert_eq!(metrics(&bench, "run")[5]["critic/vf_loss"], metrics(&bench, "whole")[5]["critic/vf_loss"]);
    for name in ["model/model.safetensors", "trainer/value_head.safetensors", "trainer/optimizer.safetensors"] {
        let of = |run: &str| {
            let path = bench.path(&format!("{run}/checkpoints/step-000005/{name}"));
            std::fs::read(path).unwrap_or_else(|e| panic!("{name}: {e}"))
        };
        assert!(of("run") == of("whole"), "{name} differs");
    }
}

#[test]
fn values_learn_on_the_policys_trunk() {
    let bench = Bench::new();
    succeeded(&shared(
        &bench,
        &[
            "warmup={sft: {steps: 200, optim: {lr: 0.01}}}",
            "trainer.steps=40",
            "trainer.train_batch_size=32",
            "update.ppo_mini_batch_size=32",
            "task.partial=true",
            "objective={name: ppo, lam: 1}",
            "critic={shared_trunk: true, vf_coef: 0.5, head_lr: 0.01}",
            "optim.lr=1.0e-4",
        ],
    ));
    let lines = metrics(&bench, "run");
    let number = |step: usize, key: &str| lines[step][key].as_f64().unwrap();
    let apart = |step| number(step, "critic/returns/mean") - number(step, "critic/values/mean");
    assert!(apart(1) > 0.5, "the warm-up taught most sums, and the value head nothing");
    let last = (36..=40).map(apart).map(f64::abs).sum::<f64>() / 5.0;
    assert!(last < 0.5 * apart(1), "{last} after {}", apart(1));
}

#[test]
fn every_preset_teaches_a_shared_trunk_the_same() {
    let bench = Bench::new();
    let mut expected: Option<f64> = None;
    for preset in ["fast", "balanced", "huge"] {
        let run = format!("output={}", bench.path(preset).display());
        let mut args = vec![run.clone(), format!("memory.preset={preset}")];
        if preset == "huge" {
            args.push("memory.moments=f32".into());
        }
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        succeeded(&shared(&bench, &args));
        let found = metrics(&bench, preset)[3]["critic/vf_loss"].as_f64().unwrap();
        let expected = *expected.get_or_insert(found);
        assert!((found - expected).abs() < 1e-4 * expected.abs().max(1.0), "{preset}: {found} {expected}");
    }
}

#[test]
fn adapters_train_with_a_value_head_beside_them() {
    let bench = Bench::new();
    let policy = bench.path("policy");
    copy_model("qwen2-tied", &policy);
    let policy = format!("model={{path: {}, lora: {{rank: 2}}}}", policy.display());
    let args = [policy.as_str(), "rollout.prompt_length=16", "warmup=null"];
    succeeded(&shared(&bench, &args));
    let step = "run/checkpoints/step-000003";
    assert!(bench.path(&format!("{step}/model/adapter_config.json")).is_file());
    let head = tensors(&bench, &format!("{step}/trainer/value_head.safetensors"));
    assert_eq!(head, ["v_head.weight"]);
    let moments = tensors(&bench, &format!("{step}/trainer/optimizer.safetensors"));
    let own = |name: &String| name.contains("lora_") || name.starts_with("v_head");
    assert!(moments.iter().all(own), "{moments:?}");
}

#[test]
fn what_would_be_a_critics_own_is_refused_with_the_reason() {
    let bench = Bench::new();
    let elsewhere = format!("critic.model.path={}", bench.path("policy").display());
    for (setting, parts) in [
        ("memory.critic={train_tokens: 512}", ["memory.critic", "part of the policy"]),
        ("critic.optim={lr: 0.1}", ["critic.optim", "critic.head_lr"]),
        ("critic.warmup=1", ["critic.warmup", "one model"]),
        (&elsewhere, ["critic.model.path", "a separate model"]),
        ("critic.vf_coef=0", ["critic.vf_coef", "above 0"]),
        ("critic.shared_trunk=false", ["critic.vf_coef", "shared_trunk: true"]),
    ] {
        refused(&shared(&bench, &[setting]), &parts);
    }
}
