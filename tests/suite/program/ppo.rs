//! Runs with a critic: what they leave behind, that they continue, that plans change nothing, and what they refuse.

use super::runs::metrics;
use super::{Bench, copy_model, refused, stderr, succeeded};
use crate::support::fixtures;
use serde_json::Value;

/// Every part of PPO at work: two epochs of two mini-batches, discount, KL in the reward with a coefficient that moves,
/// a critic that clips.
const PPO: [&str; 8] = [
    "objective={name: ppo, gamma: 0.99, lam: 0.9, use_kl_in_reward: true, \
     kl_ctrl: {type: adaptive, kl_coef: 0.05, target_kl: 0.01, horizon: 50}}",
    "critic={optim: {lr: 0.01}, cliprange_value: 0.1}",
    "rollout.n=1",
    "trainer.train_batch_size=8",
    "update.ppo_epochs=2",
    "update.ppo_mini_batch_size=4",
    "warmup.sft.steps=2",
    "optim.lr_scheduler={lr_scheduler_type: constant}",
];

fn ppo(bench: &Bench, more: &[&str]) -> std::process::Output {
    bench.firebrick("train", &[&PPO[..], more].concat())
}

fn output(bench: &Bench, name: &str) -> String {
    format!("output={}", bench.path(name).display())
}

fn file(bench: &Bench, name: &str) -> Vec<u8> {
    std::fs::read(bench.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Metrics by step, without what a run's length decides.
fn learnt(bench: &Bench, run: &str) -> Vec<Value> {
    let mut lines = metrics(bench, run);
    for line in &mut lines {
        let line = line.as_object_mut().unwrap();
        line.retain(|name, _| !name.starts_with("val-"));
    }
    lines
}

#[test]
fn a_run_with_a_critic_reports_it_and_keeps_it() {
    let bench = Bench::new();
    succeeded(&ppo(&bench, &["critic.warmup=1"]));
    let lines = metrics(&bench, "run");
    for key in [
        "critic/vf_loss",
        "critic/vf_clipfrac",
        "critic/vf_explained_var",
        "critic/vpred_mean",
        "critic/grad_norm",
        "critic/lr",
        "critic/values/mean",
        "critic/returns/max",
        "critic/advantages/min",
        "critic/rewards/mean",
        "critic/score/mean",
        "actor/reward_kl_penalty",
        "actor/reward_kl_penalty_coeff",
    ] {
        assert!(lines[1][key].is_number(), "{key}: {}", lines[1]);
    }
    assert_eq!(lines[1]["critic/lr"], 0.01);
    // the critic alone at first, then both
    assert!(lines[1]["actor/pg_loss"].is_null() && lines[1]["actor/lr"].is_null());
    assert!(lines[2]["actor/pg_loss"].is_number() && lines[2]["actor/grad_norm"].is_number());
    let coefficient = |step: usize| lines[step]["actor/reward_kl_penalty_coeff"].as_f64().unwrap();
    assert!((coefficient(1) - 0.05).abs() < 1e-12);
    assert!(coefficient(2) < coefficient(1), "the policy is still its reference");
    for phase in ["values", "adv", "update_critic", "update_actor"] {
        let all = bench.read("run/metrics.jsonl");
        assert!(all.contains(&format!("timing_s/{phase}")), "{phase}");
    }

    let step = "run/checkpoints/step-000003";
    let config: Value = serde_json::from_str(&bench.read(&format!("{step}/trainer/critic/model/config.json"))).unwrap();
    assert_eq!(config["architectures"][0], "LlamaForSequenceClassification");
    assert!(bench.path(&format!("{step}/trainer/critic/optimizer.safetensors")).is_file());
    let policy: Value = serde_json::from_str(&bench.read(&format!("{step}/model/config.json"))).unwrap();
    assert_eq!(policy["architectures"][0], "LlamaForCausalLM");

    let plan: Value = serde_json::from_str(&bench.read("run/plan.json")).unwrap();
    assert!(plan["plan"]["models"]["critic"].is_object());
    let phases = plan["phases"].as_array().unwrap();
    for phase in ["values", "critic_backward", "critic_optimizer"] {
        assert!(phases.iter().any(|p| p["name"] == phase), "{phase}");
    }
    let summary: Value = serde_json::from_str(&bench.read("run/summary.json")).unwrap();
    let measured = summary["memory"].as_array().unwrap();
    assert!(measured.iter().any(|m| m["phase"] == "update_critic"));
}

#[test]
fn a_resumed_run_with_a_critic_equals_one_that_was_never_stopped() {
    let bench = Bench::new();
    succeeded(&ppo(&bench, &["trainer.steps=5", &output(&bench, "whole")]));
    succeeded(&ppo(&bench, &["trainer.steps=3"]));
    let resumed = ppo(&bench, &["trainer.steps=5", "--resume"]);
    succeeded(&resumed);
    assert!(stderr(&resumed).contains("resumed after step 3"));
    assert_eq!(learnt(&bench, "run"), learnt(&bench, "whole"));
    for name in [
        "model/model.safetensors",
        "trainer/critic/model/model.safetensors",
        "trainer/critic/optimizer.safetensors",
        "trainer/optimizer.safetensors",
    ] {
        let of = |run: &str| file(&bench, &format!("{run}/checkpoints/step-000005/{name}"));
        assert!(of("run") == of("whole"), "{name} differs");
    }
}

#[test]
fn the_critic_learns_what_completions_are_worth() {
    let bench = Bench::new();
    succeeded(&ppo(
        &bench,
        &[
            "critic.warmup=39",
            "trainer.steps=40",
            "trainer.train_batch_size=32",
            "update.ppo_mini_batch_size=32",
            "task.partial=true",
            "objective={name: ppo, lam: 1}",
            "critic={optim: {lr: 0.01}, warmup: 39}",
        ],
    ));
    let lines = metrics(&bench, "run");
    let loss = |step: usize| lines[step]["critic/vf_loss"].as_f64().unwrap();
    let mean = |from: usize| (from..from + 10).map(loss).sum::<f64>() / 10.0;
    assert!(mean(30) < 0.7 * mean(1), "{} after {}", mean(30), mean(1));
}

#[test]
fn a_critic_comes_from_any_checkpoint_that_reads_the_policys_tokens() {
    let bench = Bench::new();
    let policy = bench.path("policy");
    copy_model("llama-gqa", &policy);
    let policy = format!("model={{path: {}}}", policy.display());
    let models = fixtures();
    for (name, from) in [
        ("own", None),
        ("language", Some(models.join("models/qwen2-tied"))),
        ("sequence", Some(models.join("heads/llama-score"))),
        ("token", Some(models.join("heads/llama-value"))),
    ] {
        let from = from.map(|path| format!("critic.model.path={}", path.display()));
        let mut args = vec![policy.as_str(), "rollout.prompt_length=16", "warmup=null"];
        args.extend(from.as_deref());
        let run = output(&bench, name);
        args.push(&run);
        succeeded(&ppo(&bench, &args));
        let lines = metrics(&bench, name);
        assert!(lines[3]["critic/vf_loss"].as_f64().unwrap().is_finite(), "{name}");
    }
    // a head that a checkpoint brings is written back as what it was
    let kept = bench.read("token/checkpoints/step-000003/trainer/critic/model/config.json");
    assert!(kept.contains("LlamaForTokenClassification"), "{kept}");
    let made = bench.read("language/checkpoints/step-000003/trainer/critic/model/config.json");
    assert!(made.contains("Qwen2ForSequenceClassification"), "{made}");
}

#[test]
fn a_critic_beside_adapters_is_a_whole_model() {
    let bench = Bench::new();
    let policy = bench.path("policy");
    copy_model("qwen2-tied", &policy);
    let policy = format!("model={{path: {}, lora: {{rank: 2}}}}", policy.display());
    let args = [policy.as_str(), "rollout.prompt_length=16", "warmup=null"];
    succeeded(&ppo(&bench, &args));
    let lines = metrics(&bench, "run");
    assert!(lines[3]["critic/grad_norm"].as_f64().unwrap() > 0.0);
    assert!(lines[3]["actor/grad_norm"].as_f64().unwrap() > 0.0);
    let step = "run/checkpoints/step-000003";
    assert!(bench.path(&format!("{step}/model/adapter_config.json")).is_file());
    let critic = bench.path(&format!("{step}/trainer/critic/model/model.safetensors"));
    let whole = std::fs::metadata(bench.path("policy/model.safetensors")).unwrap().len();
    let own = std::fs::metadata(critic).unwrap().len();
    assert!(own >= whole, "{own} bytes of {whole}");
}

#[test]
fn a_critic_of_another_vocabulary_is_refused() {
    let bench = Bench::new();
    succeeded(&ppo(&bench, &["trainer.steps=1"]));
    let critic = bench.path("run/checkpoints/step-000001/trainer/critic/model");
    let critic = format!("critic.model.path={}", critic.display());
    let policy = bench.path("policy");
    copy_model("llama-gqa", &policy);
    let policy = format!("model={{path: {}}}", policy.display());
    let args = [policy.as_str(), "rollout.prompt_length=16", "warmup=null", &critic];
    refused(
        &ppo(&bench, &[&args[..], &[&output(&bench, "other")]].concat()),
        &["critic.model.path", "must use the same tokenizer"],
    );
}

#[test]
fn a_critic_that_cannot_serve_the_run_is_refused_with_the_reason() {
    let bench = Bench::new();
    for (args, parts) in [
        (&["objective.gamma=1.5"][..], &["objective.gamma must be at most 1, found 1.5"][..]),
        (&["objective.lam=-0.1"], &["objective.lam must be at least 0, found -0.1"]),
        (&["critic.warmup=3"], &["critic.warmup is 3", "never be updated"]),
        (&["critic.cliprange_value=0"], &["critic.cliprange_value", "above 0"]),
        (&["critic.optim.lr=-1"], &["critic.optim.lr"]),
        (&["critic.optim.lr=0"], &["critic.optim.lr must be above 0"]),
        (&["critic.shared_trunks=true"], &["unknown key `shared_trunks`", "did you mean"]),
        (&["objective={name: grpo}"], &["critic requires objective: ppo"]),
        (
            &["objective={name: grpo}", "critic=null", "memory.critic.head_rows=3"],
            &["memory.critic requires objective: ppo"],
        ),
        (&["objective={name: grpo, lam: 0.5}", "critic=null"], &["objective.lam requires", "gae"]),
        (&["memory.critic.trian_tokens=3"], &["did you mean `train_tokens`?"]),
        (&["memory.critic.budget=1GiB"], &["memory.critic.budget", "set it only in `memory`"]),
        (&["memory.critic.train_tokens=4"], &["memory.critic.train_tokens is 4"]),
        (&["memory.critic.activation_offload=true"], &["memory.critic", "gradient_checkpointing"]),
        (&["memory.critic.step_in_backward=true"], &["critic.optim.clip_grad: null"]),
        (&["critic.model.path=no/such/model"], &["no/such/model"]),
    ] {
        refused(&ppo(&bench, args), parts);
        assert!(!bench.path("run").exists(), "{args:?}: nothing was begun");
    }
}

#[test]
fn every_preset_teaches_policy_and_critic_the_same() {
    let bench = Bench::new();
    let exact = [
        "optim.clip_grad=null",
        "warmup.sft.optim.clip_grad=null",
        "critic.optim.clip_grad=null",
        "memory.moments=f32",
    ];
    let train = |name: &str, settings: &[&str]| {
        let run = output(&bench, name);
        succeeded(&ppo(&bench, &[&exact[..], settings, &[&run]].concat()));
        learnt(&bench, name)
    };
    let fast = train("fast", &["memory.preset=fast"]);
    for (name, settings) in [
        ("balanced", &["memory.preset=balanced"][..]),
        ("constrained", &["memory.preset=constrained"]),
        ("huge", &["memory.preset=huge"]),
        ("backward", &["memory.preset=huge", "memory.step_in_backward=true"]),
        ("streamed", &["memory.preset=balanced", "memory.critic.param_offload=streamed"]),
        ("apart", &["memory.preset=fast", "memory.critic={gradient_checkpointing: true, param_offload: streamed}"]),
    ] {
        for (found, expected) in train(name, settings).iter().zip(&fast).skip(1) {
            for key in [
                "critic/vf_loss",
                "critic/grad_norm",
                "critic/values/mean",
                "actor/pg_loss",
                "actor/grad_norm",
                "critic/rewards/mean",
            ] {
                let (a, b) = (found[key].as_f64().unwrap(), expected[key].as_f64().unwrap());
                assert!((a - b).abs() <= 1e-4 * b.abs().max(1e-2), "{name}, {key}: {a} instead of {b}");
            }
        }
    }
}
