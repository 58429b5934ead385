//! Public models by name, from their `config.json` (2024 to 2026); of those that see images, the language model.

use crate::{Error, Result};
use firebrick_arch::Arch;
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::LazyLock;

/// Their configurations.
static MODELS: LazyLock<Map<String, Value>> =
    LazyLock::new(|| serde_json::from_str(include_str!("public_models.json")).unwrap_or_default());

/// Names of the public models that are known here.
pub fn names() -> impl Iterator<Item = &'static str> {
    MODELS.keys().map(String::as_str)
}

/// The architecture of a public model by name.
///
/// # Errors
/// `Error::Config` for a name that is not in the table, with the known ones.
pub fn public(name: &str) -> Result<Arch> {
    match MODELS.get(name) {
        Some(Value::Object(config)) => Ok(Arch::from_config(config, Path::new(name))?),
        _ => {
            let known: Vec<&str> = names().collect();
            Err(Error::Config(format!("no public model {name:?}; known: {}", known.join(", "))))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::bytes::experts::ExpertWidths;
    use crate::estimate::bytes::sizes::Sizes;
    use firebrick_arch::parameters::{ParamSpec, UnitKind, unit_specs};

    #[test]
    fn public_models_have_the_sizes_that_they_are_known_by() {
        // in billions; of those that see images, of the language model
        for (name, billions) in [
            ("Qwen2.5-0.5B", 0.49),
            ("Qwen2.5-1.5B", 1.54),
            ("Qwen2.5-7B", 7.62),
            ("Qwen3-8B", 8.19),
            ("Qwen3-30B-A3B", 30.53),
            ("Llama-3.1-70B", 70.55),
            ("Qwen3.5-35B-A3B", 34.661),
            ("gpt-oss-20b", 20.915),
        ] {
            let billions_found = Sizes::new(&public(name).expect("known"), None).total() as f64 / 1e9;
            assert!((billions_found - billions).abs() < 0.006, "{name}: {billions_found}");
        }
    }

    #[test]
    fn files_in_mxfp4_are_a_third_of_what_the_model_takes_in_bf16() {
        let arch = public("gpt-oss-20b").expect("known");
        let specs = unit_specs(&arch, UnitKind::Mlp(0));
        let experts: usize = specs.iter().filter(|spec| spec.slot.is_expert()).map(ParamSpec::numel).sum();
        let (total, experts) = (Sizes::new(&arch, None).total(), (arch.num_layers * experts) as u64);
        // the file has 17 bytes for 32 numbers of experts
        let bytes = 2 * (total - experts) + experts * 17 / 32;
        let gigabytes = [bytes, 2 * total].map(|bytes| bytes as f64 / 1e9);
        assert!((gigabytes[0] - 13.76).abs() < 0.006 && (gigabytes[1] - 41.83).abs() < 0.006, "GB: {gigabytes:?}");
    }

    #[test]
    fn a_joined_product_of_gate_and_up_counts_beside_its_halves() {
        let running = |name| ExpertWidths::new(&public(name).expect("known"), true).running([2, 3]);
        // eight experts of 768 with matrices of their own, and of 512 with a joined one beside a shared expert of 512
        assert_eq!(running("Qwen3-30B-A3B"), [2, 3].map(|n| n * 8 * 768));
        assert_eq!(running("Qwen3.5-35B-A3B"), [4, 5].map(|n| n * 8 * 512));
    }

    #[test]
    fn a_token_goes_through_few_of_the_experts() {
        // in billions, embedding and head included, as the names say
        for (name, billions) in [
            ("Qwen3-30B-A3B", 3.35),
            ("Qwen3.5-35B-A3B", 3.455),
            // with the biases of all experts
            ("gpt-oss-20b", 4.193),
        ] {
            let sizes = Sizes::new(&public(name).expect("known"), None);
            let active = (sizes.active_body() + sizes.ends()) as f64 / 1e9;
            assert!((active - billions).abs() < 0.006, "{name}: {active}");
        }
    }
}
