//! Runs that train adapters: what they leave behind, that they continue, and what they refuse.

use super::runs::metrics;
use super::{Bench, firebrick, refused, succeeded};
use serde_json::{Value, json};

const LORA: [&str; 4] = ["model.arch=null", "model.lora.rank=2", "model.lora.dropout=0.1", "optim.lr=0.01"];

/// A trained base model for a run of adapters: the folder, and the override that names it.
pub fn base(bench: &Bench) -> (String, String) {
    base_of(bench, &[])
}

/// The same with other settings.
pub fn base_of(bench: &Bench, settings: &[&str]) -> (String, String) {
    let run = format!("output={}", bench.path("base").display());
    let own = ["warmup.sft={steps: 20, optim: {lr: 0.01}}", "trainer.steps=1", &run];
    succeeded(&bench.firebrick("train", &[&own[..], settings].concat()));
    let dir = bench.path("base/checkpoints/step-000001/model");
    let dir = dir.to_str().unwrap().to_owned();
    let path = format!("model.path={dir}");
    (dir, path)
}

pub fn bytes(bench: &Bench, file: &str) -> Vec<u8> {
    std::fs::read(bench.path(file)).unwrap_or_else(|e| panic!("{file}: {e}"))
}

fn eval(bench: &Bench, args: &[&str]) -> f64 {
    let out = succeeded(&bench.firebrick("eval", &[&["--json"], args].concat()));
    let result: Value = serde_json::from_str(&out).unwrap();
    result["reward"].as_f64().unwrap()
}

/// Log-probs of two rows under a model.
pub fn logprobs(bench: &Bench, args: &[&str]) -> Vec<f64> {
    let input = bench.write("in.jsonl", "{\"input_ids\": [3, 4, 5, 6]}\n{\"input_ids\": [7, 8, 9]}\n");
    let output = bench.path("out.jsonl");
    let files = ["logprobs", "--input", input.to_str().unwrap(), "--output", output.to_str().unwrap()];
    succeeded(&firebrick(&[&files[..], &["--device", "cpu"], args].concat()));
    let numbers = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        line["logprobs"].as_array().unwrap().clone()
    };
    let lines = bench.read("out.jsonl");
    let all = lines.lines().flat_map(numbers);
    all.map(|v| v.as_f64().unwrap()).collect()
}

#[test]
fn a_run_with_adapters_leaves_a_peft_folder_and_a_merged_model_that_agree() {
    let bench = Bench::new();
    let (dir, path) = base(&bench);
    let settings = [&path, "model.lora.merge=true", "objective.kl_loss_coef=0.05"];
    succeeded(&bench.firebrick("train", &[&LORA[..], &settings].concat()));
    let step = "run/checkpoints/step-000003";
    let config: Value = serde_json::from_str(&bench.read(&format!("{step}/model/adapter_config.json"))).unwrap();
    for (key, value) in [
        ("peft_type", json!("LORA")),
        ("base_model_name_or_path", json!(dir)),
        ("r", json!(2)),
        ("lora_alpha", json!(32)),
        ("lora_dropout", json!(0.1)),
        ("bias", json!("none")),
    ] {
        assert_eq!(config[key], value, "{key}");
    }
    let stored = bytes(&bench, &format!("{step}/model/adapter_model.safetensors"));
    let stored = safetensors::SafeTensors::deserialize(&stored).unwrap();
    // two matrices beside seven projections of two layers
    assert_eq!(stored.len(), 2 * 7 * 2);
    let name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight";
    assert_eq!(stored.tensor(name).unwrap().shape(), [2, 32]);
    let moments = bytes(&bench, &format!("{step}/trainer/optimizer.safetensors"));
    let moments = safetensors::SafeTensors::deserialize(&moments).unwrap();
    assert_eq!(moments.len(), 2 * stored.len(), "frozen weights have none");
    assert!(!bench.path("run/reference").exists(), "the reference is the base model");
    let resolved = bench.read("run/config.yaml");
    assert!(resolved.contains("all-linear"), "{resolved}");

    let adapter = bench.path(&format!("{step}/model"));
    let merged = bench.path(&format!("{step}/merged"));
    let (adapter, merged) = (adapter.to_str().unwrap(), merged.to_str().unwrap());
    let beside = logprobs(&bench, &["--model", &dir, "--adapter", adapter]);
    let folded = logprobs(&bench, &["--model", merged]);
    let plain = logprobs(&bench, &["--model", &dir]);
    crate::support::assert_all_close("log-probs", &beside, &folded, 1e-4);
    assert_ne!(beside, plain, "the adapter does something");
    let summary: Value = serde_json::from_str(&bench.read("run/summary.json")).unwrap();
    let last = summary["last"]["val-core/arithmetic/reward"].as_f64().unwrap();
    let given = ["--model", &dir, "--adapter", adapter];
    assert!((eval(&bench, &given) - last).abs() < 1e-9);
    let line = succeeded(&firebrick(&[
        "generate",
        "--model",
        &dir,
        "--adapter",
        adapter,
        "--prompt",
        "1+2=",
        "--device",
        "cpu",
        "--max-new-tokens",
        "3",
    ]));
    assert!(line.starts_with("1+2="), "{line}");
}

#[test]
fn a_resumed_run_with_adapters_equals_one_that_was_never_stopped() {
    let bench = Bench::new();
    let (_, path) = base(&bench);
    let settings = [
        &path,
        "objective.kl_loss_coef=0.05",
        "warmup.sft.steps=2",
        "update.ppo_epochs=2",
        "update.ppo_mini_batch_size=2",
    ];
    let args = [&LORA[..], &settings].concat();
    let whole = format!("output={}", bench.path("whole").display());
    let with = |more: &[&str]| succeeded(&bench.firebrick("train", &[&args[..], more].concat()));
    with(&["trainer.steps=4", &whole]);
    with(&["trainer.steps=2"]);
    with(&["trainer.steps=4", "--resume"]);
    let file = "checkpoints/step-000004/model/adapter_model.safetensors";
    assert!(bytes(&bench, &format!("run/{file}")) == bytes(&bench, &format!("whole/{file}")), "the adapters differ");
    let plain = |run| {
        let mut lines = metrics(&bench, run);
        for line in &mut lines {
            let line = line.as_object_mut().unwrap();
            line.retain(|name, _| !name.starts_with("val-"));
        }
        lines
    };
    assert_eq!(plain("run"), plain("whole"));
}

#[test]
fn the_reference_policy_is_the_model_without_its_adapters() {
    let bench = Bench::new();
    let (_, path) = base(&bench);
    // the KL of the first update, before it: of what a warm-up did to the adapters, and of fresh ones
    let first_kl = |run: &str, more: &[&str]| {
        let output = format!("output={}", bench.path(run).display());
        let kl = [&path, &output, "model.lora.dropout=0", "objective.kl_loss_coef=0.05"];
        succeeded(&bench.firebrick("train", &[&LORA[..], &kl, more].concat()));
        metrics(&bench, run)[1]["actor/kl_loss"].as_f64().unwrap()
    };
    let fresh = first_kl("fresh", &["trainer.steps=1"]);
    assert!(fresh.abs() < 1e-9, "{fresh}");
    let warm = ["trainer.steps=1", "warmup.sft={steps: 5, optim: {lr: 0.01}}"];
    let warmed = first_kl("warmed", &warm);
    assert!(warmed > 1e-5, "{warmed}");
}

#[test]
fn a_run_goes_on_from_an_adapter_and_takes_its_shape() {
    let bench = Bench::new();
    let (_, path) = base(&bench);
    let alpha = "model.lora.alpha=3.5";
    succeeded(&bench.firebrick("train", &[&LORA[..], &[&path, alpha]].concat()));
    let adapter = bench.path("run/checkpoints/step-000003/model");
    let from = format!("model.lora.path={}", adapter.display());
    let more = format!("output={}", bench.path("more").display());
    let args = ["model.arch=null", &path, &from, &more];
    refused(
        &bench.firebrick("train", &[&args[..], &["model.lora.rank=8"]].concat()),
        &["model.lora.rank is 8", "has 2", "remove the key"],
    );
    succeeded(&bench.firebrick("train", &[&args[..], &["trainer.steps=1"]].concat()));
    let saved = bench.read("more/checkpoints/step-000001/model/adapter_config.json");
    let saved: Value = serde_json::from_str(&saved).unwrap();
    assert_eq!((&saved["r"], &saved["lora_alpha"]), (&json!(2), &json!(3.5)));
    let rewards = |run: &str, i: usize| metrics(&bench, run)[i]["val-core/arithmetic/reward"].clone();
    assert_eq!(rewards("more", 0), rewards("run", 3));
}

#[test]
fn adapters_that_cannot_be_are_refused() {
    let bench = Bench::new();
    let model = crate::support::fixtures().join("models/llama-gqa");
    let path = format!("model.path={}", model.display());
    refused(&bench.firebrick("train", &["model.lora.rank=2"]), &["model.lora requires model.path"]);
    for (setting, parts) in [
        ("model.lora.target_modules=[q_proj, lm_head]", &["model.lora.target_modules", "\"lm_head\"", "gate_proj"][..]),
        ("model.lora.target_parameters=[mlp.experts.down_proj]", &["model.lora.target_parameters", "has no experts"]),
        (
            "model.lora.target_parameters=[mlp.gate.weight]",
            &["model.lora.target_parameters", "\"mlp.gate.weight\"", "mlp.experts.gate_up_proj"],
        ),
        ("model.lora.target_modules=[]", &["model.lora: target_modules is empty"]),
        ("model.lora.rank=0", &["model.lora.rank must be at least 1"]),
        ("model.lora.dropout=1.5", &["model.lora.dropout must be below 1"]),
        ("model.lora.ranks=4", &["unknown key `ranks`", "`rank`"]),
        ("model.lora.path=no/such/adapter", &["no/such/adapter", "not a folder"]),
    ] {
        refused(&bench.firebrick("train", &["model.arch=null", &path, setting]), parts);
    }
}

#[test]
fn adapter_folders_that_do_not_fit_are_refused() {
    let bench = Bench::new();
    let models = crate::support::fixtures().join("models");
    let fixture = crate::support::fixtures().join("train/lora");
    let adapter = bench.path("adapter");
    std::fs::create_dir(&adapter).unwrap();
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::copy(fixture.join(file), adapter.join(file)).unwrap();
    }
    let adapter = adapter.to_str().unwrap();
    let generate = |model: &str, args: &[&str]| {
        let model = models.join(model);
        let fixed = ["generate", "--prompt", "x", "--device", "cpu", "--model", model.to_str().unwrap()];
        firebrick(&[&fixed[..], args].concat())
    };
    refused(
        &generate("qwen3-sharded", &["--adapter", adapter]),
        &["adapter_model.safetensors", "expected", "base model \"qwen2-tied\""],
    );
    refused(
        &firebrick(&["generate", "--prompt", "x", "--model", adapter]),
        &["no config.json", "it is a PEFT adapter"],
    );
    let text = bench.read("adapter/adapter_config.json");
    for (from, to, parts) in [
        ("\"use_dora\": false", "\"use_dora\": true", &["adapter_config.json", "`use_dora` is true"][..]),
        ("\"bias\": \"none\"", "\"bias\": \"all\"", &["`bias` is \"all\""]),
        ("\"modules_to_save\": null", "\"modules_to_save\": [\"lm_head\"]", &["`modules_to_save` is [\"lm_head\"]"]),
        ("\"q_proj\",\n", "", &["tensors are not defined by its target_modules", "q_proj"]),
        ("\"q_proj\",", "\"q_proj\", \"k_proj\",", &["k_proj.lora_A.weight is missing"]),
        ("\"r\": 4", "\"r\": 8", &["has shape [4, ", "expected [8, "]),
    ] {
        assert!(text.contains(from), "{from}");
        bench.write("adapter/adapter_config.json", &text.replace(from, to));
        refused(&generate("qwen2-tied", &["--adapter", adapter]), parts);
    }
    bench.write("adapter/adapter_config.json", &text);
    std::fs::remove_file(bench.path("adapter/adapter_model.safetensors")).unwrap();
    refused(&generate("qwen2-tied", &["--adapter", adapter]), &["no adapter_model.safetensors", "save_pretrained"]);
}
