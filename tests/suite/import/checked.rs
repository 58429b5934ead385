//! What is imported is accepted by `firebrick config check`: with a small model, rows and reward programs of this
//! machine in the place of those that a run names.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use firebrick_engine::config::{RunConfig, parse};
use firebrick_engine::task::RewardKind;

use super::{cases, folder, read};
use crate::program::{firebrick, stderr};
use crate::support::{checked, fixtures};

/// A model that holds the lengths of all runs and divides over their ranks.
const CONFIG: &str = r#"{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 32, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": true, "eos_token_id": 511, "torch_dtype": "float32"}"#;

/// Adapters of such a model: their settings, which are all that a check reads.
const ADAPTER: &str = r#"{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "lora_dropout": 0.0,
    "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "model"}"#;

/// A row with a prompt and an answer under all names that the runs have for them.
const ROW: &str = r#"{"prompt": [{"role": "user", "content": "1+1="}], "question": "1+1=", "problem": "1+1=", "answer": "2", "solution": "2",
    "ground_truth": "2", "reward_model": {"style": "rule", "ground_truth": "2"}, "data_source": "sums", "extra_info": {"index": 0}}"#;

/// What stands in for what runs name.
struct StandIns {
    dir: tempfile::TempDir,
}

impl StandIns {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let this = Self { dir };
        let chat = fixtures().join("reward_models/qwen2-chat");
        for (name, config) in [("model", CONFIG), ("adapter", ADAPTER)] {
            std::fs::create_dir(this.path(name)).expect("a folder");
            let file = if name == "adapter" { "adapter_config.json" } else { "config.json" };
            this.write(&format!("{name}/{file}"), config);
        }
        // a tokenizer with a chat template; weights are not read
        for file in ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"] {
            std::fs::copy(chat.join(file), this.path("model").join(file)).expect("a copy");
        }
        let weights = fixtures().join("models/qwen2-tied/model.safetensors");
        std::fs::copy(weights, this.path("model/model.safetensors")).expect("a copy");
        this.write("rows.jsonl", &(ROW.replace('\n', " ") + "\n").repeat(4));
        this.write("rewards.py", "def reward(**_):\n    return 0.0\n");
        this
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).expect("a file");
    }

    /// The settings that put them in the place of what a configuration names.
    fn overrides(&self, config: &RunConfig) -> Vec<String> {
        let at = |key: &str, path: &Path| format!("{key}={}", path.display());
        // runs of GPUs, wherever this is checked
        let mut all = vec![at("model.path", &self.path("model")), "device=cuda".to_owned()];
        if config.critic.as_ref().is_some_and(|own| own.model.path.is_some()) {
            all.push(at("critic.model.path", &self.path("model")));
        }
        let lora = config.model.lora.as_ref();
        if lora.is_some_and(|own| own.path.is_some()) {
            all.push(at("model.lora.path", &self.path("adapter")));
        }
        if let Some(rows) = config.task.as_ref().and_then(|task| task.rows()) {
            all.push(at("task.train", &self.path("rows.jsonl")));
            if rows.validation.is_some() {
                all.push(at("task.validation", &self.path("rows.jsonl")));
            }
            for (nr, reward) in rows.rewards.iter().enumerate() {
                all.extend(match &reward.kind {
                    RewardKind::Model(_) => {
                        let model = fixtures().join("reward_models/qwen2-chat");
                        Some(at(&format!("task.rewards.{nr}.path"), &model))
                    }
                    RewardKind::Python(_) => {
                        let file = self.path("rewards.py");
                        Some(at(&format!("task.rewards.{nr}.file"), &file))
                    }
                    _ => None,
                });
            }
        }
        all
    }
}

#[test]
fn every_import_is_accepted_by_config_check_and_planned_by_the_program() {
    let stand_ins = StandIns::new();
    let mut runs: Vec<Vec<String>> =
        cases::all().iter().map(|case| case.files.iter().map(|file| (*file).to_owned()).collect()).collect();
    let guides = std::fs::read_dir(folder().join("guides")).expect("guides");
    runs.extend(guides.map(|entry| {
        let name = entry.expect("an entry").file_name();
        vec![format!("guides/{}", name.to_string_lossy())]
    }));
    let mut wrong = String::new();
    for files in &runs {
        let names: Vec<&str> = files.iter().map(String::as_str).collect();
        let (_, imported) = read(&names);
        stand_ins.write("run.yaml", &imported.config);
        let config = parse(&imported.config, &[]).expect("a configuration");
        let overrides = stand_ins.overrides(&config);
        let file = stand_ins.path("run.yaml");
        let file = file.to_str().expect("a path");
        let args = overrides.iter().map(String::as_str);
        let args: Vec<&str> = ["config", "check", file].into_iter().chain(args).collect();
        let output = firebrick(&args);
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            let _ = writeln!(wrong, "{names:?}: {said}{}", stderr(&output));
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    checked("imports that config check accepts", runs.len());
}
