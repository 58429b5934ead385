//! Runs that train adapters of experts: of modules, and beside parameters of all experts.

use super::adapters::{base_of, bytes, logprobs};
use super::runs::metrics;
use super::{Bench, succeeded};
use crate::support::assert_all_close;
use serde_json::{Value, json};

/// Two layers of four experts, of which two run.
pub const QWEN3: &str = "model.arch={model_type: qwen3_moe, hidden_size: 16, intermediate_size: 32, moe_intermediate_size: 8, \
                     num_experts: 4, num_experts_per_tok: 2, num_hidden_layers: 2, num_attention_heads: 2, \
                     num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 32}";

const GPT_OSS: &str = "model.arch={model_type: gpt_oss, hidden_size: 16, intermediate_size: 8, num_local_experts: 4, \
                       num_experts_per_tok: 2, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, \
                       head_dim: 8, sliding_window: 16, max_position_embeddings: 32}";

const LORA: [&str; 4] = ["model.arch=null", "model.lora.rank=2", "model.lora.dropout=0.1", "optim.lr=0.01"];

struct Case {
    arch: &'static str,
    settings: &'static [&'static str],
    targets: [Value; 2],
    /// Tensors of an adapter: two beside each matrix.
    tensors: usize,
    tensor: (&'static str, [usize; 2]),
}

fn cases() -> [Case; 2] {
    [
        Case {
            arch: QWEN3,
            settings: &[],
            targets: [
                json!(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
                Value::Null,
            ],
            tensors: 2 * 2 * (4 + 3 * 4),
            tensor: ("layers.1.mlp.experts.3.down_proj.lora_A.weight", [2, 8]),
        },
        Case {
            arch: GPT_OSS,
            settings: &["model.lora.target_modules=[q_proj]", "model.lora.target_parameters=[gate_up_proj, down_proj]"],
            targets: [json!(["q_proj"]), json!(["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])],
            tensors: 2 * 2 * (1 + 2),
            tensor: ("layers.1.mlp.experts.base_layer.lora_B.weight", [16, 2 * 4]),
        },
    ]
}

fn stored(bench: &Bench, run: &str, step: usize) -> Vec<u8> {
    let folder = format!("{run}/checkpoints/step-{step:06}/model");
    bytes(bench, &format!("{folder}/adapter_model.safetensors"))
}

#[test]
fn a_run_leaves_adapters_of_experts_and_a_merged_model_that_agree_and_continues_as_if_never_stopped() {
    for case in cases() {
        let bench = Bench::new();
        let (dir, path) = base_of(&bench, &[case.arch]);
        let settings = [&LORA[..], case.settings, &[path.as_str(), "model.lora.merge=true"]].concat();
        let train = |more: &[&str]| {
            succeeded(&bench.firebrick("train", &[&settings[..], more].concat()));
        };
        let whole = format!("output={}", bench.path("whole").display());
        train(&["trainer.steps=4", &whole]);
        train(&["trainer.steps=2"]);
        train(&["trainer.steps=4", "--resume"]);
        let adapter = stored(&bench, "run", 4);
        assert!(adapter == stored(&bench, "whole", 4), "the adapters differ");

        let file = safetensors::SafeTensors::deserialize(&adapter).unwrap();
        assert_eq!(file.len(), case.tensors);
        let name = format!("base_model.model.model.{}", case.tensor.0);
        assert_eq!(file.tensor(&name).unwrap().shape(), case.tensor.1);
        let step = "run/checkpoints/step-000004";
        let config = bench.read(&format!("{step}/model/adapter_config.json"));
        let config: Value = serde_json::from_str(&config).unwrap();
        let [modules, parameters] = case.targets;
        assert_eq!(config["target_modules"], modules);
        assert_eq!(config["target_parameters"], parameters);
        assert_eq!(config["lora_dropout"], json!(0.0), "PEFT refuses another");

        let [adapter, merged] = ["model", "merged"].map(|own| {
            let folder = bench.path(&format!("{step}/{own}"));
            folder.to_str().unwrap().to_owned()
        });
        let beside = logprobs(&bench, &["--model", &dir, "--adapter", &adapter]);
        let folded = logprobs(&bench, &["--model", &merged]);
        assert_all_close("log-probs", &beside, &folded, 1e-4);
        assert_ne!(beside, logprobs(&bench, &["--model", &dir]));
    }
}

#[test]
fn adapters_of_experts_train_beside_a_base_in_few_bits() {
    for case in cases() {
        let bench = Bench::new();
        let (dir, path) = base_of(&bench, &[case.arch]);
        let few = [path.as_str(), "model.lora.base=nf4", "model.lora.dropout=0"];
        let settings = [&LORA[..], case.settings, &few].concat();
        succeeded(&bench.firebrick("train", &settings));
        let adapter = bench.path("run/checkpoints/step-000003/model");
        let beside = ["--model", &dir, "--base", "nf4", "--adapter"];
        let beside = logprobs(&bench, &[&beside[..], &[adapter.to_str().unwrap()]].concat());
        assert_ne!(beside, logprobs(&bench, &["--model", &dir, "--base", "nf4"]));
        let lines = metrics(&bench, "run");
        let last = lines.last().unwrap();
        let apart = last["training/rollout_probs_diff_max"].as_f64().unwrap();
        assert!(apart <= 1e-4, "{apart}");
    }
}
