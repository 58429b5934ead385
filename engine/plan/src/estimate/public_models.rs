//! Public models by name.

use crate::{Error, Result};
use firebrick_arch::Arch;
use serde_json::{Value, json};
use std::path::Path;

/// Hidden size, MLP width, layers, heads, key/value heads, head width, vocabulary, tied, and the family.
type Public = (&'static str, &'static str, [usize; 7], bool);

/// Public models, from their `config.json` (2024 to 2026); of those that see images, the language model.
const MODELS: [Public; 38] = [
    ("Qwen2.5-0.5B", "qwen2", [896, 4864, 24, 14, 2, 64, 151_936], true),
    ("Qwen2.5-1.5B", "qwen2", [1536, 8960, 28, 12, 2, 128, 151_936], true),
    ("Qwen2.5-3B", "qwen2", [2048, 11_008, 36, 16, 2, 128, 151_936], true),
    ("Qwen2.5-7B", "qwen2", [3584, 18_944, 28, 28, 4, 128, 152_064], false),
    ("Qwen2.5-32B", "qwen2", [5120, 27_648, 64, 40, 8, 128, 152_064], false),
    ("Qwen3-0.6B", "qwen3", [1024, 3072, 28, 16, 8, 128, 151_936], true),
    ("Qwen3-4B", "qwen3", [2560, 9728, 36, 32, 8, 128, 151_936], true),
    ("Qwen3-8B", "qwen3", [4096, 12_288, 36, 32, 8, 128, 151_936], false),
    ("Qwen3-30B-A3B", "qwen3_moe", [2048, 6144, 48, 32, 4, 128, 151_936], false),
    ("Qwen3-Coder-30B-A3B", "qwen3_moe", [2048, 5472, 48, 32, 4, 128, 151_936], false),
    ("Qwen3-235B-A22B", "qwen3_moe", [4096, 12_288, 94, 64, 4, 128, 151_936], false),
    ("Qwen3-Coder-480B-A35B", "qwen3_moe", [6144, 8192, 62, 96, 8, 128, 151_936], false),
    ("Llama-3.2-1B", "llama", [2048, 8192, 16, 32, 8, 64, 128_256], true),
    ("Llama-3.2-3B", "llama", [3072, 8192, 28, 24, 8, 128, 128_256], true),
    ("Llama-3.1-8B", "llama", [4096, 14_336, 32, 32, 8, 128, 128_256], false),
    ("Llama-3.1-70B", "llama", [8192, 28_672, 80, 64, 8, 128, 128_256], false),
    ("Mistral-7B-v0.3", "mistral", [4096, 14_336, 32, 32, 8, 128, 32_768], false),
    ("Gemma-2-2B", "gemma2", [2304, 9216, 26, 8, 4, 256, 256_000], true),
    ("Gemma-3-1B", "gemma3_text", [1152, 6912, 26, 4, 1, 256, 262_144], true),
    ("Gemma-3-4B", "gemma3_text", [2560, 10_240, 34, 8, 4, 256, 262_208], true),
    ("Gemma-3-12B", "gemma3_text", [3840, 15_360, 48, 16, 8, 256, 262_208], true),
    ("Gemma-3-27B", "gemma3_text", [5376, 21_504, 62, 32, 16, 128, 262_208], true),
    ("SmolLM3-3B", "smollm3", [2048, 11_008, 36, 16, 4, 128, 128_256], true),
    ("Olmo-3-7B", "olmo3", [4096, 11_008, 32, 32, 32, 128, 100_278], false),
    ("Olmo-3-32B", "olmo3", [5120, 27_648, 64, 40, 8, 128, 100_278], false),
    ("Ministral-3-3B", "ministral3", [3072, 9216, 26, 32, 8, 128, 131_072], true),
    ("Ministral-3-8B", "ministral3", [4096, 14_336, 34, 32, 8, 128, 131_072], false),
    ("Ministral-3-14B", "ministral3", [5120, 16_384, 40, 32, 8, 128, 131_072], false),
    ("Qwen3.5-0.8B", "qwen3_5_text", [1024, 3584, 24, 8, 2, 256, 248_320], true),
    ("Qwen3.5-2B", "qwen3_5_text", [2048, 6144, 24, 8, 2, 256, 248_320], true),
    ("Qwen3.5-4B", "qwen3_5_text", [2560, 9216, 32, 16, 4, 256, 248_320], true),
    ("Qwen3.5-9B", "qwen3_5_text", [4096, 12_288, 32, 16, 4, 256, 248_320], false),
    ("Qwen3.5-27B", "qwen3_5_text", [5120, 17_408, 64, 24, 4, 256, 248_320], false),
    ("Qwen3.5-35B-A3B", "qwen3_5_moe_text", [2048, 512, 40, 16, 2, 256, 248_320], false),
    ("Qwen3.5-122B-A10B", "qwen3_5_moe_text", [3072, 1024, 48, 32, 2, 256, 248_320], false),
    ("Qwen3.5-397B-A17B", "qwen3_5_moe_text", [4096, 1024, 60, 32, 2, 256, 248_320], false),
    ("gpt-oss-20b", "gpt_oss", [2880, 2880, 24, 64, 8, 64, 201_088], false),
    ("gpt-oss-120b", "gpt_oss", [2880, 2880, 36, 64, 8, 64, 201_088], false),
];

/// Names of the public models that are known here.
pub fn names() -> impl Iterator<Item = &'static str> {
    MODELS.iter().map(|m| m.0)
}

/// The architecture of a public model by name.
///
/// # Errors
/// `Error::Config` for a name that is not in the table, with the known ones.
pub fn public(name: &str) -> Result<Arch> {
    let Some((_, family, [d, f, layers, heads, kv, dim, vocab], tied)) =
        MODELS.iter().find(|m| m.0.eq_ignore_ascii_case(name))
    else {
        let known: Vec<&str> = names().collect();
        return Err(Error::Config(format!("no public model {name:?}; known: {}", known.join(", "))));
    };
    let mut config = json!({
        "model_type": family, "hidden_size": d, "intermediate_size": f, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": dim, "vocab_size": vocab,
        "tie_word_embeddings": tied, "max_position_embeddings": 32_768,
    });
    match *family {
        "gemma2" => {
            config["attn_logit_softcapping"] = json!(50.0);
            config["final_logit_softcapping"] = json!(30.0);
        }
        // value heads of 128 beside 16 key heads
        "qwen3_5_text" => {
            config["linear_num_value_heads"] = json!(match *d {
                1024 | 2048 => 16,
                5120 => 48,
                _ => 32,
            });
        }
        // experts and the one of all tokens are equally wide; 512 experts of which 10 run in the largest
        "qwen3_5_moe_text" => {
            let largest = *layers == 60;
            config["linear_num_value_heads"] = json!(if *d == 2048 { 32 } else { 64 });
            config["num_experts"] = json!(if largest { 512 } else { 256 });
            config["num_experts_per_tok"] = json!(if largest { 10 } else { 8 });
            for key in ["moe_intermediate_size", "shared_expert_intermediate_size"] {
                config[key] = json!(f);
            }
        }
        // four experts of 32 or 128 run
        "gpt_oss" => config["num_local_experts"] = json!(if *layers == 24 { 32 } else { 128 }),
        // the 1B has shorter windows than the others
        "gemma3_text" => config["sliding_window"] = json!(if *d == 1152 { 512 } else { 1024 }),
        // 128 experts of which 8 run, but 160 in the largest
        "qwen3_moe" => {
            config["norm_topk_prob"] = json!(true);
            config["num_experts"] = json!(if *layers == 62 { 160 } else { 128 });
            config["moe_intermediate_size"] = json!(match *layers {
                48 => 768,
                94 => 1536,
                _ => 2560,
            });
        }
        _ => {}
    }
    let Value::Object(config) = config else {
        return Err(Error::Config("a model's config should be an object".into()));
    };
    Ok(Arch::from_config(&config, Path::new(name))?)
}

#[cfg(test)]
mod tests {
    use super::super::experts::ExpertWidths;
    use super::super::sizes::Sizes;
    use super::*;

    #[test]
    fn public_models_have_the_sizes_that_they_are_known_by() {
        // in billions; of those that see images, of the language model
        for (name, billions) in [
            ("Qwen2.5-0.5B", 0.49),
            ("Qwen3-8B", 8.19),
            ("Qwen3-30B-A3B", 30.53),
            ("Qwen3-235B-A22B", 235.09),
            ("Qwen3-Coder-480B-A35B", 480.15),
            ("Llama-3.1-70B", 70.55),
            ("Gemma-2-2B", 2.61),
            ("Gemma-3-1B", 1.00),
            ("Gemma-3-4B", 3.88),
            ("Gemma-3-12B", 11.77),
            ("Gemma-3-27B", 27.01),
            ("SmolLM3-3B", 3.08),
            ("Olmo-3-7B", 7.30),
            ("Olmo-3-32B", 32.23),
            ("Ministral-3-3B", 3.43),
            ("Ministral-3-8B", 8.49),
            ("Ministral-3-14B", 13.51),
            ("Qwen3.5-0.8B", 0.752),
            ("Qwen3.5-2B", 1.882),
            ("Qwen3.5-4B", 4.206),
            ("Qwen3.5-9B", 8.954),
            ("Qwen3.5-27B", 26.896),
            ("Qwen3.5-35B-A3B", 34.661),
            ("Qwen3.5-122B-A10B", 122.11),
            ("Qwen3.5-397B-A17B", 396.35),
            ("gpt-oss-20b", 20.915),
            ("gpt-oss-120b", 116.83),
        ] {
            let found = Sizes::of(&public(name).expect("known"), None).total() as f64 / 1e9;
            assert!((found - billions).abs() < 0.006, "{name}: {found}");
        }
    }

    #[test]
    fn files_in_mxfp4_are_a_third_of_what_the_model_takes_in_bf16() {
        // in GB: the file with 17 bytes for 32 numbers of experts, and the model
        for (name, file, model) in [("gpt-oss-20b", 13.76, 41.83), ("gpt-oss-120b", 65.25, 233.66)] {
            let sizes = Sizes::of(&public(name).expect("known"), None);
            let (total, experts) = (sizes.total(), sizes.expert_matrices());
            let bytes = 2 * (total - experts) + experts * 17 / 32;
            let found = [bytes as f64 / 1e9, 2.0 * total as f64 / 1e9];
            let near = (found[0] - file).abs() < 0.006 && (found[1] - model).abs() < 0.006;
            assert!(near, "{name}: {found:?}");
        }
    }

    #[test]
    fn a_joined_product_of_gate_and_up_counts_beside_its_halves() {
        let running = |name| ExpertWidths::of(&public(name).expect("known"), true).running([2, 3]);
        // eight experts of 768 with matrices of their own, and of 512 with a joined one beside a shared expert of 512
        assert_eq!(running("Qwen3-30B-A3B"), [2, 3].map(|n| n * 8 * 768));
        assert_eq!(running("Qwen3.5-35B-A3B"), [4, 5].map(|n| n * 8 * 512));
    }

    #[test]
    fn a_token_goes_through_few_of_the_experts() {
        // in billions, embedding and head included, as the names say
        for (name, billions) in [
            ("Qwen3-30B-A3B", 3.35),
            ("Qwen3-235B-A22B", 22.19),
            ("Qwen3-Coder-480B-A35B", 35.47),
            ("Qwen3.5-35B-A3B", 3.455),
            ("Qwen3.5-122B-A10B", 9.7712),
            ("Qwen3.5-397B-A17B", 17.349),
            // with the biases of all experts
            ("gpt-oss-20b", 4.193),
            ("gpt-oss-120b", 5.7506),
        ] {
            let sizes = Sizes::of(&public(name).expect("known"), None);
            let found = sizes.used(1) as f64 / 1e9;
            assert!((found - billions).abs() < 0.006, "{name}: {found}");
            assert_eq!(sizes.used(1), sizes.active_body() + sizes.ends());
        }
    }
}
