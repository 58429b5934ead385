//! Runs of adapters beside a frozen base in few bits.

use super::adapters::{base, logprobs};
use super::runs::metrics;
use super::{Bench, firebrick, refused, succeeded};
use crate::support::assert_all_close;
use firebrick_models::checkpoint::{ExportOptions, export};
use firebrick_models::{BaseFormat, Checkpoint, Tokenizer};
use serde_json::Value;
use std::path::Path;

const LORA: [&str; 4] = ["model.arch=null", "model.lora.rank=2", "model.lora.dropout=0.1", "optim.lr=0.01"];

/// Writes the model of a folder with what a base in few bits is widened to.
fn widened(dir: &str, format: BaseFormat, to: &Path) {
    let device = crate::support::device();
    let checkpoint = Checkpoint::open(Path::new(dir)).unwrap().with_base(Some(format));
    let wide = checkpoint.load(&device).unwrap().with_widened_base();
    let tokenizer = Tokenizer::from_dir(Path::new(dir)).unwrap();
    std::fs::create_dir_all(to).unwrap();
    export(&wide, &checkpoint, Some(&tokenizer), to, ExportOptions::default()).unwrap();
}

/// What each step of a run says under some names.
fn told(bench: &Bench, run: &str, keys: &[&str]) -> Vec<f64> {
    let lines = metrics(bench, run);
    let steps = lines.iter().filter(|l| l.get("critic/score/mean").is_some());
    let of = |line: &Value| -> Vec<f64> {
        let number = |key: &&str| line[*key].as_f64().unwrap_or_else(|| panic!("{key}: {line}"));
        keys.iter().map(number).collect()
    };
    steps.flat_map(of).collect()
}

#[test]
fn grpo_beside_a_base_in_few_bits_is_grpo_beside_the_numbers_that_it_is_widened_to() {
    let bench = Bench::new();
    let (dir, path) = base(&bench);
    for format in BaseFormat::ALL {
        let to = bench.path(&format!("widened-{format}"));
        widened(&dir, format, &to);
        let train = |name: &str, more: &[&str]| {
            let run = format!("output={}", bench.path(name).display());
            let settings = ["objective.kl_loss_coef=0.05", "trainer.save_freq=-1", &run];
            succeeded(&bench.firebrick("train", &[&LORA[..], &settings, more].concat()));
        };
        let (few, wide) = (format!("few-{format}"), format!("wide-{format}"));
        train(&few, &[&path, &format!("model.lora.base={format}")]);
        train(&wide, &[&format!("model.path={}", to.display())]);
        let keys = ["critic/score/mean", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm"];
        let [found, expected] = [&few, &wide].map(|run| told(&bench, run, &keys));
        assert!(!found.is_empty());
        assert_all_close(&few, &found, &expected, 1e-4);
        let apart = told(&bench, &few, &["training/rollout_probs_diff_max"]);
        assert!(apart.iter().all(|&apart| apart <= 1e-4), "{apart:?}");
    }
}

#[test]
fn a_resumed_run_beside_a_base_in_few_bits_equals_one_that_was_never_stopped() {
    let bench = Bench::new();
    let (_, path) = base(&bench);
    for precision in ["f32", "bf16"] {
        let (run, whole) = (format!("run-{precision}"), format!("whole-{precision}"));
        let train = |name: &str, more: &[&str]| {
            let run = format!("output={}", bench.path(name).display());
            let precision = format!("precision={precision}");
            let settings = [&path, "model.lora.base=nf4", "model.lora.merge=true", &precision, &run];
            succeeded(&bench.firebrick("train", &[&LORA[..], &settings, more].concat()));
        };
        train(&whole, &["trainer.steps=3"]);
        train(&run, &["trainer.steps=2"]);
        train(&run, &["trainer.steps=3", "--resume"]);
        for name in ["model/adapter_model.safetensors", "merged/model.safetensors", "trainer/optimizer.safetensors"] {
            let file = |run: &str| {
                let path = bench.path(&format!("{run}/checkpoints/step-000003/{name}"));
                std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
            };
            assert!(file(&run) == file(&whole), "{precision}: {name} differs");
        }
        let last = |run: &str| metrics(&bench, run).pop();
        assert_eq!(last(&run), last(&whole));
        // masters are those of what is trained
        let masters = bench.path(&format!("{run}/checkpoints/step-000003/trainer/masters.safetensors"));
        assert_eq!(masters.is_file(), precision == "bf16");
        if masters.is_file() {
            let bytes = std::fs::read(&masters).unwrap();
            let masters = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            assert!(masters.names().iter().all(|name| name.contains("lora_")));
        }
    }
}

#[test]
fn what_a_base_in_few_bits_does_not_go_with_is_refused_with_what_to_do() {
    let bench = Bench::new();
    let (_, path) = base(&bench);
    let train = |more: &[&str]| bench.firebrick("train", &[&LORA[..], &[&path], more].concat());
    refused(
        &train(&["model.lora.base=nf4", "rollout.quantization=int8"]),
        &["rollout.quantization has no effect with model.lora.base", "nf4 weights; remove it"],
    );
    refused(
        &train(&["model.lora.base=nf4", "memory.zero_stage=3", "memory.gradient_checkpointing=true"]),
        &["model.lora.base: nf4", "memory.zero_stage: 2"],
    );
    refused(&train(&["model.lora.base=fp4"]), &["model.lora.base", "nf4"]);
}

#[test]
fn commands_without_a_configuration_take_a_base_in_few_bits() {
    let bench = Bench::new();
    let (dir, _) = base(&bench);
    let plain = logprobs(&bench, &["--model", &dir]);
    let generate = |model: &str, more: &[&str]| {
        let fixed = ["generate", "--prompt", "1+2=", "--device", "cpu"];
        let greedy = ["--temperature", "0", "--max-new-tokens", "3"];
        firebrick(&[&fixed[..], &greedy, &["--model", model], more].concat())
    };
    for format in BaseFormat::ALL {
        let to = bench.path(&format!("widened-{format}"));
        widened(&dir, format, &to);
        let (name, wide) = (format.name(), to.to_str().unwrap());
        let few = logprobs(&bench, &["--model", &dir, "--base", name]);
        assert_all_close(name, &few, &logprobs(&bench, &["--model", wide]), 1e-5);
        assert_ne!(few, plain, "{name}");
        let few = succeeded(&generate(&dir, &["--base", name]));
        assert_eq!(few, succeeded(&generate(wide, &[])), "{name}");
    }
    refused(&generate(&dir, &["--base", "fp4"]), &["--base", "int8", "nf4"]);
    let moe = crate::support::fixtures().join("models/qwen3-moe");
    let line = succeeded(&generate(moe.to_str().unwrap(), &["--base", "nf4"]));
    assert!(line.starts_with("1+2="), "{line}");
}

#[test]
fn a_plan_counts_codes_and_scales() {
    let bench = Bench::new();
    let parameters = |settings: &[&str]| -> u64 {
        let output = bench.firebrick("plan", &[&["--json"], settings].concat());
        let plan: Value = serde_json::from_str(&succeeded(&output)).unwrap();
        let phases = plan["phases"].as_array().unwrap();
        let own = phases.iter().find(|p| p["name"] == "backward").unwrap();
        own["categories"]["parameters"].as_u64().unwrap()
    };
    let (_, path) = base(&bench);
    let with = |format: &str| {
        let base = format!("model.lora.base={format}");
        parameters(&[&LORA[..], &[&path, &base]].concat())
    };
    let dense = parameters(&[&LORA[..], &[&path]].concat());
    // two layers of q, k, v, o of [16, 16], gate and up of [32, 16], down of [16, 32]
    let numbers = 2 * (4 * 256 + 3 * 512);
    let int8 = numbers + 2 * 4 * (4 * 16 + 2 * 32 + 16);
    assert_eq!(dense - with("int8"), 4 * numbers - int8);
    // blocks of 64, a group a matrix, an offset, two maps
    let nf4 = |n: u64| n / 2 + n / 64 + 4 + 4 + 4 * (256 + 16);
    let nf4 = 2 * (4 * nf4(256) + 3 * nf4(512));
    assert_eq!(dense + nf4 - with("nf4"), 4 * numbers);
}
