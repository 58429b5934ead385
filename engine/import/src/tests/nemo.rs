//! `NeMo RL`'s configurations of several files.

use super::at;
use crate::{Imported, KeyOutcome, Options, SourceFile, import};
use serde_json::{Value, json};

fn layered(files: &[(&str, &str)]) -> Result<Imported, String> {
    let files: Vec<SourceFile> = files.iter().map(|(name, text)| SourceFile::new(*name, *text)).collect();
    import(&files, &Options::default(), &|_: &str| None).map_err(|error| error.to_string())
}

fn gaps(found: &Imported) -> Vec<&str> {
    found.gaps().map(|row| row.key.as_str()).collect()
}

#[test]
fn megatrons_optimizer_counts_where_megatron_trains() {
    let base = "policy:\n  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, weight_decay: 0.01}}\n";
    let run = "defaults: base.yaml\ngrpo: {max_num_steps: 100}\npolicy:\n  model_name: q/m\n  optimizer: null\n  max_grad_norm: 1.0\n  \
               megatron_cfg:\n    enabled: true\n    activation_checkpointing: true\n    tensor_model_parallel_size: 2\n    \
               optimizer: {optimizer: adam, lr: 3.0e-7, weight_decay: 0.1, adam_beta1: 0.9, adam_beta2: 0.98, adam_eps: 1.0e-8, \
               clip_grad: \"${policy.max_grad_norm}\", optimizer_cpu_offload: true, optimizer_offload_fraction: 0.5}\n    \
               scheduler: {lr_decay_style: constant, lr_warmup_iters: 13, lr_warmup_init: 3.0e-8, lr_decay_iters: 1000, \
               start_weight_decay: \"${policy.megatron_cfg.optimizer.weight_decay}\"}\n";
    let result = layered(&[("base.yaml", base), ("run.yaml", run)]).expect("two files");
    let optim = at(&result, "/optim");
    assert_eq!(optim["lr"], 3e-7);
    assert_eq!(optim["weight_decay"], 0.1);
    assert_eq!(optim["betas"], json!([0.9, 0.98]));
    assert_eq!(optim["clip_grad"], 1);
    // Megatron leaves norms and biases out of the decay
    assert_eq!(optim["decay_norms_and_biases"], Value::Null);
    let schedule = json!({"lr_scheduler_type": "warmup_stable_decay", "num_decay_steps": 0, "warmup_steps": 13});
    for (key, value) in schedule.as_object().expect("a mapping") {
        assert_eq!(optim["lr_scheduler"][key], *value, "{key}");
    }
    assert!((optim["lr_scheduler"]["min_lr_ratio"].as_f64().expect("a share") - 0.1).abs() < 1e-12);
    assert_eq!(at(&result, "/memory/optimizer_offload"), "cpu");
    assert_eq!(at(&result, "/memory/offload_fraction"), 0.5);
    assert_eq!(at(&result, "/memory/gradient_checkpointing"), true);
    assert_eq!(at(&result, "/memory/tensor_model_parallel_size"), 2);
    let taken = super::outcome(&result, "policy.optimizer.kwargs.lr");
    assert!(matches!(taken, KeyOutcome::NotNeeded { why } if why.contains("in place of the section")), "{taken:?}");
    assert_eq!(gaps(&result), [""; 0]);
}

#[test]
fn prompts_come_from_their_files() {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("a file");
        path.display().to_string()
    };
    let prompt = write("cot.txt", "Answer inside of \\boxed{{}}.\n{}\n");
    let system = write("system.txt", "You are careful.");
    let nemo = |text: &str| layered(&[("run.yaml", &format!("grpo: {{max_num_steps: 1}}\n{text}"))]).expect("a run");
    let result = nemo(&format!(
        "policy: {{model_name: q/m}}\ndata:\n  train: {{data_path: rows.jsonl, input_key: problem}}\n  \
         default: {{prompt_file: {prompt}, system_prompt_file: {system}}}\n"
    ));
    let messages = json!([{"role": "user", "content": "Answer inside of \\boxed{{}}.\n{problem}\n"}]);
    assert_eq!(at(&result, "/task/messages"), messages);
    assert_eq!(at(&result, "/task/system_prompt"), "You are careful.");
    assert_eq!(gaps(&result), [""; 0]);
    let absent = nemo("data: {default: {prompt_file: no/such.txt, system_prompt_file: null}}\n");
    assert_eq!(gaps(&absent), ["data.default.prompt_file"]);
}

#[test]
fn files_of_defaults_lie_under_the_file_that_names_them_from_its_folder() {
    let run = "defaults: [../a.yaml, ../b.yaml]\ngrpo: {num_prompts_per_step: 4}\npolicy: {model_name: q/m}\n";
    let a = "defaults: root.yaml\ngrpo: {num_prompts_per_step: 1, num_generations_per_prompt: 2, seed: 3}\n\
             env: {_override_: true, math: {num_workers: 1}}\n";
    let b = "grpo: {seed: 5}\n";
    let root = "grpo: {seed: 1, max_num_steps: 7, val_period: \"${grpo.num_prompts_per_step}\"}\nenv: {dapo: {x: 1}}\n";
    let holds = |found: &Imported| {
        let keys = ["train_batch_size", "seed", "steps", "test_freq"].map(|key| at(found, &format!("/trainer/{key}")));
        assert_eq!(keys, [4, 5, 7, 4].map(Value::from), "{}", found.config);
        assert_eq!(at(found, "/rollout/n"), 2);
        assert_eq!(at(found, "/task/rewards"), json!([{"kind": "math"}]), "env is laid over nothing");
        assert_eq!(gaps(found), [""; 0]);
    };
    let (run, a, b, root) = (("c/run.yaml", run), ("a.yaml", a), ("b.yaml", b), ("root.yaml", root));
    // in any order, and by their names where their folders are others
    holds(&layered(&[run, a, root, b]).expect("four files"));
    holds(&layered(&[b, root, a, run]).expect("four files"));
    holds(&layered(&[("x/b.yaml", b.1), ("y/root.yaml", root.1), ("z/a.yaml", a.1), run]).expect("four files"));
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("c")).expect("a folder");
    for (name, text) in [run, a, b, root] {
        std::fs::write(folder.path().join(name), text).expect("a file");
    }
    let path = folder.path().join("c/run.yaml").display().to_string();
    holds(&layered(&[(path.as_str(), run.1)]).expect("files beside it"));
    let absent = layered(&[run, a, b]).expect_err("root.yaml is nowhere");
    assert!(absent.contains("a.yaml:1") && absent.contains("root.yaml"), "{absent}");
    let circle = layered(&[run, a, b, ("root.yaml", "defaults: a.yaml\n")]).expect_err("a circle");
    assert!(circle.contains("leads back to itself"), "{circle}");
}
