//! The language model inside a model that sees images: its config is nested in the other's.

use serde_json::{Map, Value, json};

/// Classes of models that see images, the `model_type` of their language models, and the class of these.
const NESTED: [(&str, &str, &str); 5] = [
    ("Gemma3ForConditionalGeneration", "gemma3_text", "Gemma3ForCausalLM"),
    ("Mistral3ForConditionalGeneration", "ministral3", "Ministral3ForCausalLM"),
    ("Mistral3ForConditionalGeneration", "mistral", "MistralForCausalLM"),
    ("Qwen3_5ForConditionalGeneration", "qwen3_5_text", "Qwen3_5ForCausalLM"),
    ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
];

/// True for the classes whose models are written again as they were read, around a language model that was trained.
pub(super) fn keeps_outer_model(config: &Map<String, Value>) -> bool {
    let class = config.get("architectures").and_then(|classes| classes.get(0)?.as_str());
    matches!(class, Some("Qwen3_5ForConditionalGeneration" | "Qwen3_5MoeForConditionalGeneration"))
}

/// Keys that stand beside `text_config` and hold for the language model where it has none of its own.
const SHARED: [&str; 5] = ["bos_token_id", "dtype", "eos_token_id", "pad_token_id", "torch_dtype"];

/// Key that ties the head to the embedding: transformers 5 reads that of the whole model and ignores `text_config`'s.
const TIED: &str = "tie_word_embeddings";

/// The config of the language model in `config`, as that of a model by itself; `None` where `config` is no such
/// model's.
pub(super) fn language_model(config: &Map<String, Value>) -> Option<Map<String, Value>> {
    let class = config.get("architectures")?.get(0)?.as_str()?;
    let text = config.get("text_config")?.as_object()?;
    let model_type = text.get("model_type")?.as_str()?;
    let known = NESTED.iter().find(|n| n.0 == class && n.1 == model_type)?;
    let mut model = text.clone();
    for key in SHARED {
        if let Some(value) = config.get(key) {
            model.entry(key).or_insert_with(|| value.clone());
        }
    }
    let tied = config.get(TIED).filter(|tied| !tied.is_null());
    model.insert(TIED.into(), tied.cloned().unwrap_or_else(|| json!(!class.starts_with("Qwen3_5"))));
    if model_type == "gemma3_text" {
        // published configs leave out what is transformers' default
        for (key, value) in [
            ("vocab_size", 262_208),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
            ("head_dim", 256),
            ("max_position_embeddings", 131_072),
        ] {
            model.entry(key).or_insert(json!(value));
        }
    }
    model.insert("architectures".into(), json!([known.2]));
    Some(model)
}

#[cfg(test)]
mod tests {
    use crate::Arch;
    use serde_json::{Value, json};
    use std::path::Path;

    fn flat(config: &Value) -> Option<Arch> {
        let text = Arch::language_model_config(config.as_object()?)?;
        Some(Arch::from_config(&text, Path::new("config.json")).expect("a valid config"))
    }

    #[test]
    fn gemma_3_with_a_vision_tower_is_read_as_its_language_model() {
        // as published for 4 billion parameters: what is left out is transformers' default
        let arch = flat(&json!({
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "vision_config": {},
            "eos_token_id": [1, 106], "torch_dtype": "bfloat16",
            "text_config": {
                "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34,
                "sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}
            }
        }));
        let arch = arch.expect("a language model");
        let heads = [arch.num_heads, arch.num_kv_heads, arch.head_dim];
        assert_eq!((heads, arch.vocab_size), ([8, 4, 256], 262_208));
        assert!(arch.tied && arch.windows[5].is_none() && arch.windows[4] == Some(1024));
    }

    #[test]
    fn ministral_3_takes_what_stands_beside_its_text_config() {
        let arch = flat(&json!({
            "architectures": ["Mistral3ForConditionalGeneration"], "tie_word_embeddings": true,
            "text_config": {
                "model_type": "ministral3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                "num_attention_heads": 4, "vocab_size": 100
            }
        }));
        let arch = arch.expect("a language model");
        assert!(arch.tied && arch.query_scaling.is_some());
    }

    /// As transformers 5.24 has `tie_word_embeddings` of the whole model.
    #[test]
    fn the_whole_models_tie_counts_and_not_that_of_its_text_config() {
        let tied = |class: &str, model_type: &str, outer: Option<bool>, inner: Option<bool>| {
            let mut config = json!({
                "architectures": [class],
                "text_config": {
                    "model_type": model_type, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
                    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
                }
            });
            for (section, value) in [("/text_config", inner), ("", outer)] {
                if let Some(value) = value {
                    config.pointer_mut(section).expect("a section")["tie_word_embeddings"] = value.into();
                }
            }
            flat(&config).expect("a language model").tied
        };
        for inner in [None, Some(true), Some(false)] {
            for (class, model_type, default) in [
                ("Gemma3ForConditionalGeneration", "gemma3_text", true),
                ("Mistral3ForConditionalGeneration", "ministral3", true),
                ("Qwen3_5ForConditionalGeneration", "qwen3_5_text", false),
            ] {
                assert_eq!(tied(class, model_type, None, inner), default, "{class} {inner:?}");
                for outer in [true, false] {
                    assert_eq!(tied(class, model_type, Some(outer), inner), outer, "{class} {outer} {inner:?}");
                }
            }
        }
    }

    #[test]
    fn other_configs_with_a_text_config_are_left_as_they_are() {
        let other = json!({
            "architectures": ["Qwen2VLForConditionalGeneration"], "text_config": {"model_type": "qwen2"}
        });
        assert!(flat(&other).is_none());
        assert!(flat(&json!({"architectures": ["LlamaForCausalLM"]})).is_none());
    }
}
