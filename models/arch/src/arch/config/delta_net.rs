//! The shape of gated `DeltaNet` layers.

use super::fields::Fields;
use crate::arch::{GatedDeltaNet, Mixer};
use firebrick_spec::Result;

/// Most layers of an architecture with several mixers: estimates keep a bit for each.
const MAX_LAYERS: usize = 256;

/// Reads the shape of these layers, if there are any. Absent keys have transformers' defaults.
pub(super) fn read(f: &Fields<'_>, mixers: &[Mixer]) -> Result<Option<GatedDeltaNet>> {
    if !mixers.contains(&Mixer::GatedDeltaNet) {
        return Ok(None);
    }
    if !mixers.contains(&Mixer::Attention) {
        return Err(
            f.error("`layer_types` has no full_attention: models with only linear attention are not supported".into())
        );
    }
    if mixers.len() > MAX_LAYERS {
        return Err(f.error(format!(
            "`num_hidden_layers` is {}; models with linear attention may have {MAX_LAYERS} layers",
            mixers.len()
        )));
    }
    let size = |key: &str, default: usize| Ok(f.size(key)?.unwrap_or(default));
    let shape = GatedDeltaNet {
        num_key_heads: size("linear_num_key_heads", 16)?,
        num_value_heads: size("linear_num_value_heads", 32)?,
        key_head_dim: size("linear_key_head_dim", 128)?,
        value_head_dim: size("linear_value_head_dim", 128)?,
        conv_kernel_dim: size("linear_conv_kernel_dim", 4)?,
    };
    let (keys, values) = (shape.num_key_heads, shape.num_value_heads);
    if values % keys != 0 {
        return Err(f.error(format!(
            "`linear_num_value_heads` ({values}) must be a multiple of `linear_num_key_heads` ({keys})"
        )));
    }
    if shape.conv_kernel_dim < 2 {
        return Err(f.error(format!("`linear_conv_kernel_dim` must be at least 2, found {}", shape.conv_kernel_dim)));
    }
    Ok(Some(shape))
}

#[cfg(test)]
mod tests {
    use crate::Arch;
    use crate::arch::Mixer;
    use crate::lora::LoraConfig;
    use crate::parameters::TargetModule;
    use serde_json::{Value, json};
    use std::path::Path;

    /// A config of eight layers, with other keys over it.
    fn parse(changes: Value) -> Result<Arch, String> {
        let mut config = json!({
            "model_type": "qwen3_5_text", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 8,
            "num_attention_heads": 2, "num_key_value_heads": 1
        });
        let (Value::Object(config), Value::Object(changes)) = (&mut config, changes) else { panic!("objects") };
        config.extend(changes);
        Arch::from_config(config, Path::new("config.json")).map_err(|e| e.to_string())
    }

    #[test]
    fn every_fourth_layer_attends_and_absent_keys_have_the_defaults_of_transformers() {
        let arch = parse(json!({})).expect("a valid config");
        let attends = |layer: usize| arch.mixers[layer] == Mixer::Attention;
        assert!((0..8).all(|layer| attends(layer) == (layer % 4 == 3)));
        let delta = arch.delta_net.expect("linear attention");
        assert_eq!((delta.channels(), delta.value_dim()), (8192, 4096));
        assert_eq!((arch.head_dim, arch.rotary_dim), (256, 64));
        assert!(arch.attention_gate && arch.norm_offset > 0.0);
    }

    #[test]
    fn what_cannot_be_linear_attention_is_refused_by_its_key() {
        let linear = vec!["linear_attention"; 8];
        for (changes, named) in [
            (json!({ "layer_types": linear }), "no full_attention"),
            (json!({"layer_types": ["full_attention"]}), "8 layers"),
            (json!({"layer_types": vec!["sliding_attention"; 8]}), "known: full_attention, linear_attention"),
            (json!({"linear_num_value_heads": 7}), "linear_num_value_heads"),
            (json!({"linear_conv_kernel_dim": 1}), "linear_conv_kernel_dim"),
            (json!({"partial_rotary_factor": 0.001}), "partial_rotary_factor"),
        ] {
            let message = parse(changes).expect_err(named);
            assert!(message.contains(named), "{named}: {message}");
        }
    }

    #[test]
    fn all_linear_takes_the_modules_that_layers_have_and_a_name_of_none_is_refused() {
        let arch = parse(json!({})).expect("a valid config");
        let lora = LoraConfig::default().in_arch(&arch);
        assert_eq!(lora.target_modules, TargetModule::all());
        let llama = Arch { mixers: vec![Mixer::Attention; 8], delta_net: None, ..arch };
        let modules = LoraConfig::default().in_arch(&llama).target_modules;
        assert!(!modules.contains(&TargetModule::DeltaQkv) && modules.contains(&TargetModule::Down));
        let message = LoraConfig::check_names(&[TargetModule::DeltaOut], &llama).unwrap_err();
        assert!(message.contains("out_proj") && message.contains("q_proj"), "{message}");
    }
}
