//! Settings that differ per layer: windows, mixers, and rotary embedding.

use super::fields::Fields;
use crate::arch::Mixer;
use crate::arch::family::{FamilySpec, Window, Windowed};
use firebrick_spec::Result;
use serde_json::Value;

/// A layer's attention, as transformers' `layer_types` tell it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LayerKind {
    /// True for the layers with a window (`sliding_attention`), in families that have both kinds.
    pub sliding: bool,
    /// The window, where it has one.
    pub window: Option<usize>,
    /// True if it rotates queries and keys.
    pub rotary: bool,
    /// Its token mixer.
    pub mixer: Mixer,
}

/// The kinds of all layers. `layer_types` wins where a config lists it (transformers 4.53 and later).
pub(super) fn layers(f: &Fields<'_>, spec: &FamilySpec, layers: usize) -> Result<Vec<LayerKind>> {
    let window = window(f, spec)?;
    let rotary = rotary(f, spec, layers)?;
    let sliding = sliding_layers(f, spec, layers, &rotary)?;
    let mixers = mixers(f, spec, layers)?;
    let kinds = sliding.into_iter().zip(rotary).zip(mixers);
    let kinds = kinds.map(|((sliding, rotary), mixer)| LayerKind {
        sliding,
        window: window.filter(|_| sliding),
        rotary,
        mixer,
    });
    Ok(kinds.collect())
}

/// Token mixer of each layer: in Qwen 3.5 every nth layer attends, unless `layer_types` lists them.
fn mixers(f: &Fields<'_>, spec: &FamilySpec, layers: usize) -> Result<Vec<Mixer>> {
    if !spec.delta_net {
        return Ok(vec![Mixer::Attention; layers]);
    }
    let known = [("full_attention", Mixer::Attention), ("linear_attention", Mixer::GatedDeltaNet)];
    if let Some(mixers) = layer_types(f, layers, known)? {
        return Ok(mixers);
    }
    let every = f.size("full_attention_interval")?.unwrap_or(4);
    let mixer = |i: usize| if (i + 1).is_multiple_of(every) { Mixer::Attention } else { Mixer::GatedDeltaNet };
    Ok((0..layers).map(mixer).collect())
}

/// The entries of `layer_types`, one for each layer and no more, by their known names.
fn layer_types<T: Copy>(f: &Fields<'_>, layers: usize, known: [(&str, T); 2]) -> Result<Option<Vec<T>>> {
    let Some(types) = f.by_layer("layer_types", layers)? else {
        return Ok(None);
    };
    if types.len() != layers {
        return Err(f.error(format!("`layer_types` has {} entries for {layers} layers", types.len())));
    }
    let kind = |t: &Value| {
        let kind = known.iter().find(|(name, _)| t.as_str() == Some(name));
        kind.map(|(_, kind)| *kind).ok_or_else(|| {
            f.error(format!("`layer_types` names {t}; known: {}", known.map(|(name, _)| name).join(", ")))
        })
    };
    types.iter().map(kind).collect::<Result<Vec<T>>>().map(Some)
}

/// The window of the layers that have one.
fn window(f: &Fields<'_>, spec: &FamilySpec) -> Result<Option<usize>> {
    let given = f.size("sliding_window")?;
    let is_absent = !f.map.contains_key("sliding_window");
    Ok(match spec.window {
        Window::Default(default) if is_absent => Some(default),
        Window::Unlisted(default) if is_absent && f.present("layer_types").is_none() => Some(default),
        Window::Switched if !f.flag("use_sliding_window", false)? => None,
        Window::None => None,
        _ => given,
    })
}

/// The layers that have the window.
fn sliding_layers(f: &Fields<'_>, spec: &FamilySpec, layers: usize, rotary: &[bool]) -> Result<Vec<bool>> {
    if spec.lists_windows
        && let Some(sliding) = layer_types(f, layers, [("full_attention", false), ("sliding_attention", true)])?
    {
        return Ok(sliding);
    }
    Ok(match spec.windowed {
        Windowed::None => vec![false; layers],
        Windowed::All => vec![true; layers],
        Windowed::Except(every, key) => {
            let every = key.map_or(Ok(None), |key| f.size(key))?.unwrap_or(every);
            (0..layers).map(|i| (i + 1) % every != 0).collect()
        }
        Windowed::Unrotated => rotary.iter().map(|rotary| !rotary).collect(),
        Windowed::FromLayer => {
            let on = f.flag("use_sliding_window", false)?;
            let from = f.typed("max_window_layers", "a whole number", Value::as_u64)?.unwrap_or(28) as usize;
            (0..layers).map(|i| on && i >= from).collect()
        }
    })
}

/// Which layers rotate queries and keys: `no_rope_layers` has a 1 for those that do, and a 0 for those that do not.
fn rotary(f: &Fields<'_>, spec: &FamilySpec, layers: usize) -> Result<Vec<bool>> {
    if !spec.unrotated {
        return Ok(vec![true; layers]);
    }
    let Some(list) = f.by_layer("no_rope_layers", layers)? else {
        let every = f.size("no_rope_layer_interval")?.unwrap_or(4);
        return Ok((0..layers).map(|i| (i + 1) % every != 0).collect());
    };
    let rotates = list[..layers].iter().map(|entry| match entry.as_u64() {
        Some(0) => Ok(false),
        Some(1) => Ok(true),
        _ => Err(f.error(format!("`no_rope_layers` must be of 0 and 1, found {entry}"))),
    });
    rotates.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Arch;
    use crate::arch::{Rope, RopeScaling};
    use serde_json::json;
    use std::path::Path;

    /// Six layers, two heads of eight.
    fn parse(changes: Value) -> Result<Arch> {
        let Value::Object(mut config) = json!({
            "vocab_size": 8, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 6,
            "num_attention_heads": 2, "head_dim": 8, "max_position_embeddings": 64
        }) else {
            unreachable!("an object")
        };
        let Value::Object(changes) = changes else { panic!("an object") };
        config.extend(changes);
        Arch::from_config(&config, Path::new("config.json"))
    }

    fn plain(theta: f64) -> Rope {
        Rope { theta, scaling: RopeScaling::Default }
    }

    #[test]
    fn gemma_3_has_two_bases_and_scales_one_of_them_in_both_styles() {
        let linear = json!({"rope_type": "linear", "factor": 8.0});
        let older = json!({"model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 3,
            "rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": linear});
        let types = ["sliding_attention", "sliding_attention", "full_attention"].repeat(2);
        let newer = json!({"model_type": "gemma3_text", "sliding_window": 16, "layer_types": types,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        }});
        let (older, newer) = (parse(older).unwrap(), parse(newer).unwrap());
        assert_eq!(older, newer);
        assert_eq!(older.windows, [Some(16), Some(16), None].repeat(2));
        let global = Rope { theta: 5e5, scaling: RopeScaling::Linear { factor: 8.0 } };
        let of_three = [plain(2e4), plain(2e4), global].map(Some);
        assert_eq!(older.ropes[..3], of_three);
        assert_eq!(older.ropes[3..], of_three);
    }

    #[test]
    fn smollm_3_leaves_rotary_embedding_out_of_every_fourth_layer_unless_listed() {
        let rotary = |changes: Value| {
            parse(changes).unwrap().ropes.into_iter().map(|rope| rope.is_some()).collect::<Vec<bool>>()
        };
        let flags = |list: [u8; 6]| list.map(|x| x == 1).to_vec();
        assert_eq!(rotary(json!({"model_type": "smollm3"})), flags([1, 1, 1, 0, 1, 1]));
        let listed = json!({"model_type": "smollm3", "no_rope_layers": [0, 1, 0, 1, 1, 1]});
        assert_eq!(rotary(listed), flags([0, 1, 0, 1, 1, 1]));
        let wrong = json!({"model_type": "smollm3", "no_rope_layers": [2, 1, 0, 1, 1, 1]});
        let message = parse(wrong).unwrap_err().to_string();
        assert!(message.contains("no_rope_layers"), "{message}");
    }

    #[test]
    fn smollm_3_has_windows_only_where_they_are_turned_on() {
        let config = |on: bool| json!({"model_type": "smollm3", "sliding_window": 4, "use_sliding_window": on});
        assert_eq!(parse(config(false)).unwrap().windows, vec![None; 6]);
        let some = [None, None, None, Some(4), None, None];
        assert_eq!(parse(config(true)).unwrap().windows, some);
    }

    #[test]
    fn olmo_3_stretches_the_layers_without_a_window_alone() {
        let yarn = json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32});
        let arch = parse(json!({"model_type": "olmo3", "rope_scaling": yarn})).unwrap();
        let full = [false, false, false, true, false, false];
        for (layer, full) in full.into_iter().enumerate() {
            assert_eq!(arch.windows[layer].is_none(), full, "layer {layer}");
            let rope = arch.ropes[layer].as_ref().unwrap();
            assert_eq!(rope.theta.to_bits(), 5e5f64.to_bits());
            let stretched = matches!(rope.scaling, RopeScaling::Yarn(_));
            assert_eq!(stretched, full, "layer {layer}");
        }
        assert!(!arch.pre_norms && arch.post_norms);
    }

    #[test]
    fn yarn_is_read_for_every_family_and_lengthens_the_context() {
        let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
        for family in ["llama", "mistral", "qwen2", "qwen3", "gemma2", "smollm3", "ministral3"] {
            let arch = parse(json!({"model_type": family, "rope_scaling": yarn})).unwrap();
            let Some(RopeScaling::Yarn(yarn)) = arch.ropes[0].as_ref().map(|r| &r.scaling) else {
                panic!("{family}: {:?}", arch.ropes[0]);
            };
            assert!((yarn.attention_factor - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-15);
            assert_eq!(arch.max_positions, 256, "{family}");
        }
        let wrong = json!({"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.0, "beta_slow": 8.0});
        let message = parse(json!({"model_type": "llama", "rope_scaling": wrong})).unwrap_err();
        assert!(message.to_string().contains("beta_fast"), "{message}");
    }

    #[test]
    fn ministral_3_without_rotary_settings_has_those_of_its_release() {
        let arch = parse(json!({"model_type": "ministral3"})).unwrap();
        let scaling = arch.query_scaling.unwrap();
        assert_eq!((scaling.beta.to_bits(), scaling.original), (0.1f64.to_bits(), 16_384));
        assert_eq!(arch.max_positions, 262_144);
        assert_eq!(arch.windows, vec![None; 6]);
    }
}
