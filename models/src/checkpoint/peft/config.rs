//! PEFT's `adapter_config.json` as settings of adapters.

use crate::adapter::LoraConfig;
use crate::unit::{ParamSpec, TargetModule};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// PEFT's word for every projection.
const ALL_LINEAR: &str = "all-linear";

/// Options of `adapter_config.json` that are read.
const READ: [&str; 6] = ["r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "target_parameters"];

/// Options that do not change what is computed, or only together with one that is refused.
const IGNORED: [&str; 12] = [
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "inference_mode",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
    "init_lora_weights",
];

/// Values of `init_lora_weights` that do not change the base model.
const PLAIN_STARTS: [&str; 3] = ["gaussian", "eva", "orthogonal"];

/// Modules and parameters of a model that can have adapters, by the names of a checkpoint.
#[derive(Debug, Default)]
pub(super) struct AdapterTargets {
    modules: Vec<(String, TargetModule)>,
    /// Parameters of all experts of a layer.
    parameters: Vec<(String, TargetModule)>,
}

impl AdapterTargets {
    pub(super) fn from_specs<'a>(base: impl Iterator<Item = &'a ParamSpec>) -> Self {
        let mut known = Self::default();
        for spec in base {
            let Some(target) = TargetModule::from_slot(spec.slot) else {
                continue;
            };
            for part in spec.tensors() {
                match part.name.strip_suffix(".weight") {
                    Some(module) => known.modules.push((module.to_owned(), target)),
                    None => known.parameters.push((part.name, target)),
                }
            }
        }
        known
    }
}

/// Reads PEFT's config. Options that would compute something else are refused by name.
pub(super) fn parse(config: &Map<String, Value>, known: &AdapterTargets) -> Result<LoraConfig, String> {
    let kind = config.get("peft_type").and_then(Value::as_str);
    if kind != Some("LORA") {
        return Err(format!("`peft_type` must be \"LORA\", found {}", shown(config, "peft_type")));
    }
    for (key, value) in config {
        let known = READ.contains(&key.as_str()) || IGNORED.contains(&key.as_str());
        if !known && !is_off(value) {
            return Err(format!(
                "`{key}` is {value}, which is not supported; only plain LoRA on projections and experts is"
            ));
        }
    }
    let start = config.get("init_lora_weights").unwrap_or(&Value::Null);
    if start.as_str().is_some_and(|name| !PLAIN_STARTS.contains(&name)) {
        return Err(format!(
            "`init_lora_weights` is {start}: such adapters require a modified base model; convert them with PEFT's \
             path_initial_model_for_weight_conversion"
        ));
    }
    let number = |key: &str, default: f64| match config.get(key) {
        None => Ok(default),
        Some(value) => value.as_f64().ok_or_else(|| format!("`{key}` must be a number, found {value}")),
    };
    let rank = config.get("r").and_then(Value::as_u64);
    let lora = LoraConfig {
        rank: rank.ok_or_else(|| format!("`r` must be an integer, found {}", shown(config, "r")))? as usize,
        alpha: number("lora_alpha", 8.0)?,
        use_rslora: config.get("use_rslora").and_then(Value::as_bool).unwrap_or(false),
        dropout: number("lora_dropout", 0.0)?,
        target_modules: targets(config, known)?,
    };
    lora.check().map(|()| lora)
}

/// Targets of the config: modules, and parameters of experts.
fn targets(config: &Map<String, Value>, known: &AdapterTargets) -> Result<Vec<TargetModule>, String> {
    let parameters = match config.get("target_parameters") {
        None | Some(Value::Null) => Vec::new(),
        Some(_) => names(config, "target_parameters", "a list of parameter names")?,
    };
    if !parameters.is_empty() && known.parameters.is_empty() {
        return Err(format!(
            "`target_parameters` is {}, but this model has no experts in one parameter; experts that are separate \
             modules are in `target_modules`",
            shown(config, "target_parameters")
        ));
    }
    let mut targets = match config.get("target_modules") {
        Some(Value::String(word)) if word == ALL_LINEAR => known.modules.iter().map(|(_, target)| *target).collect(),
        None | Some(Value::Null) if !parameters.is_empty() => Vec::new(),
        _ => {
            let what = "a list of module names or \"all-linear\"";
            let names = names(config, "target_modules", what)?;
            covered(&names, &known.modules, |unknown| TargetModule::parse(unknown).map(|_| ()))
                .map_err(|e| format!("`target_modules`: {e}"))?
        }
    };
    let experts =
        covered(&parameters, &known.parameters, |unknown| TargetModule::parse_parameters(unknown).map(|_| ()));
    targets.extend(experts.map_err(|e| format!("`target_parameters`: {e}"))?);
    targets.sort_unstable();
    targets.dedup();
    Ok(targets)
}

/// A list of names under a key.
fn names<'a>(config: &'a Map<String, Value>, key: &str, what: &str) -> Result<Vec<&'a str>, String> {
    let list = config.get(key).and_then(Value::as_array);
    let names = list.and_then(|list| list.iter().map(Value::as_str).collect());
    names.ok_or_else(|| format!("`{key}` must be {what}, found {}", shown(config, key)))
}

/// The targets among `modules` that a list of names covers. As in PEFT, a name stands for the modules with that name or
/// with a name that ends in a point and that name; PEFT saves `all-linear` as such a list. `check` refuses names of
/// nothing.
fn covered(
    names: &[&str],
    modules: &[(String, TargetModule)],
    check: impl Fn(&[&str]) -> Result<(), String>,
) -> Result<Vec<TargetModule>, String> {
    let any = |name: &str| modules.iter().any(|(module, _)| TargetModule::ends_with(module, name));
    let unknown: Vec<&str> = names.iter().copied().filter(|name| !any(name)).collect();
    check(&unknown)?;
    // of each target, how many have an adapter and how many there are
    let mut counts: BTreeMap<TargetModule, [usize; 2]> = BTreeMap::new();
    for (module, target) in modules {
        let [with, of] = counts.entry(*target).or_default();
        *with += usize::from(names.iter().any(|name| TargetModule::ends_with(module, name)));
        *of += 1;
    }
    let mut targets = Vec::new();
    for (target, [with, of]) in counts {
        if with == of {
            targets.push(target);
        } else if with > 0 {
            let (what, whose) = if target.is_expert() {
                ("experts' matrices", "all experts of all layers")
            } else {
                ("layers", "all layers")
            };
            return Err(format!(
                "{} has an adapter in {with} of {of} {what}; adapters must be in {whose}",
                target.module(),
            ));
        }
    }
    Ok(targets)
}

/// True if an option is at a value that turns it off.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty() || text == "none",
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Bool(true) | Value::Number(_) => false,
    }
}

fn shown(config: &Map<String, Value>, key: &str) -> String {
    config.get(key).map_or_else(|| "nothing".into(), Value::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn with(changes: Value) -> Result<LoraConfig, String> {
        let mut config = json!({
            "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none",
            "use_dora": false, "rank_pattern": {}, "modules_to_save": null, "megatron_core": "megatron.core"
        });
        let config = config.as_object_mut().unwrap();
        if let Value::Object(changes) = changes {
            config.extend(changes);
        }
        parse(config, &dense())
    }

    /// Two layers, each with a projection of attention and one of a dense MLP.
    fn dense() -> AdapterTargets {
        let modules = (0..2).flat_map(|layer| {
            let named =
                |target: TargetModule, half: &str| (format!("model.layers.{layer}.{half}.{}", target.module()), target);
            [named(TargetModule::Q, "self_attn"), named(TargetModule::Up, "mlp")]
        });
        AdapterTargets { modules: modules.collect(), parameters: Vec::new() }
    }

    #[test]
    fn names_stand_for_the_modules_that_end_in_them() {
        let targets = |names: Value| with(json!({ "target_modules": names })).map(|l| l.target_modules);
        let names = ["model.layers.0.mlp.up_proj", "layers.1.mlp.up_proj", "self_attn.q_proj"];
        assert_eq!(targets(json!(names)), Ok(vec![TargetModule::Q, TargetModule::Up]));
        let message = targets(json!([names[0], "q_proj"])).unwrap_err();
        assert!(message.contains("up_proj has an adapter in 1 of 2 layers"), "{message}");
        assert!(targets(json!(["proj"])).unwrap_err().contains("unknown module \"proj\""));
    }

    #[test]
    fn a_plain_lora_config_is_read_under_pefts_names() {
        let lora = with(json!({"lora_dropout": 0.05, "use_rslora": true})).unwrap();
        let expected =
            LoraConfig { rank: 4, alpha: 8.0, use_rslora: true, dropout: 0.05, target_modules: vec![TargetModule::Q] };
        assert_eq!(lora, expected);
        let lora = with(json!({"target_modules": "all-linear"})).unwrap();
        assert_eq!(lora.target_modules, [TargetModule::Q, TargetModule::Up]);
        let none = with(json!({"target_modules": []})).unwrap_err();
        assert!(none.contains("is empty"), "{none}");
    }

    #[test]
    fn options_that_compute_something_else_are_refused_by_name() {
        for (changes, part) in [
            (json!({"use_dora": true}), "`use_dora` is true"),
            (json!({"modules_to_save": ["lm_head"]}), "`modules_to_save` is [\"lm_head\"]"),
            (json!({"bias": "all"}), "`bias` is \"all\""),
            (json!({"rank_pattern": {"q_proj": 8}}), "`rank_pattern`"),
            (json!({"layers_to_transform": [0]}), "`layers_to_transform`"),
            (json!({"some_later_option": 3}), "`some_later_option` is 3"),
            (json!({"init_lora_weights": "pissa"}), "`init_lora_weights` is \"pissa\""),
            (json!({"peft_type": "IA3"}), "found \"IA3\""),
            (json!({"target_modules": ".*_proj"}), "list of module names"),
            (json!({"target_modules": ["embed_tokens"]}), "unknown module \"embed_tokens\""),
            (json!({"target_parameters": ["mlp.experts.down_proj"]}), "this model has no experts in one parameter"),
            (json!({"r": 0}), "rank must be at least 1"),
            (json!({"r": "x"}), "`r` must be an integer, found \"x\""),
            (json!({"lora_dropout": 1.0}), "dropout must be"),
        ] {
            let message = with(changes).unwrap_err();
            assert!(message.contains(part), "{part:?} is not in: {message}");
        }
    }

    fn of_experts(known: &AdapterTargets, changes: &Value) -> Result<Vec<TargetModule>, String> {
        let mut config = json!({"peft_type": "LORA", "r": 2});
        let (config, changes) = (config.as_object_mut().unwrap(), changes.as_object().unwrap());
        config.extend(changes.clone());
        parse(config, known).map(|lora| lora.target_modules)
    }

    #[test]
    fn experts_that_are_modules_are_targets_by_their_names_and_all_of_them() {
        let mut known = dense();
        let names = (0..4).map(|expert| format!("model.layers.1.mlp.experts.{expert}.up_proj"));
        let experts = names.map(|name| (name, TargetModule::ExpertUp));
        known.modules.extend(experts);
        let [q, up, experts] = [TargetModule::Q, TargetModule::Up, TargetModule::ExpertUp];
        let of = |names: Value| of_experts(&known, &json!({ "target_modules": names }));
        assert_eq!(of(json!(["up_proj"])), Ok(vec![up, experts]));
        assert_eq!(of(json!("all-linear")), Ok(vec![q, up, experts]));
        let message = of(json!(["experts.0.up_proj", "experts.2.up_proj"])).unwrap_err();
        assert!(message.contains("up_proj has an adapter in 2 of 4 experts' matrices"));
    }

    #[test]
    fn parameters_of_experts_are_targets_of_their_own() {
        let mut known = dense();
        let [gate_up, down] = [TargetModule::ExpertGateUp, TargetModule::ExpertDown];
        for (layer, target) in [(0, gate_up), (0, down), (1, gate_up), (1, down)] {
            let parameter = target.parameter().unwrap();
            known.parameters.push((format!("model.layers.{layer}.{parameter}"), target));
        }
        let of = |changes: Value| of_experts(&known, &changes);
        let parameters = json!({"target_parameters": ["mlp.experts.down_proj", "gate_up_proj"]});
        assert_eq!(of(parameters), Ok(vec![gate_up, down]));
        let beside = json!({"target_modules": ["up_proj"], "target_parameters": ["down_proj"]});
        assert_eq!(of(beside), Ok(vec![TargetModule::Up, down]));
        let modules = json!({"target_modules": "all-linear", "target_parameters": null});
        assert_eq!(of(modules), Ok(vec![TargetModule::Q, TargetModule::Up]));
        let first = json!({"target_parameters": ["layers.0.mlp.experts.gate_up_proj"]});
        let message = of(first).unwrap_err();
        assert!(message.contains("gate_up_proj has an adapter in 1 of 2"), "{message}");
        let unknown = json!({"target_parameters": ["gate.weight"]});
        let message = of(unknown).unwrap_err();
        assert!(message.contains("unknown parameter \"gate.weight\""), "{message}");
    }
}
