//! PEFT adapter folders (`adapter_config.json` and `adapter_model.safetensors`): reading and writing.

use super::json::{read_object, write_json};
use super::stream::{LazyTensor, write_pt};
use super::weights::WeightFile;
use crate::adapter::LoraConfig;
use crate::unit::{ParamSpec, TargetModule, chain, unit_specs};
use crate::{Arch, Decoder, Error, Result};
use burn::tensor::Tensor;
use firebrick_backends::PrecisionExt;
use serde_json::{Map, Value, json};
use std::path::Path;

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// Options of `adapter_config.json` that are read.
const READ: [&str; 5] = [
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "target_modules",
];

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

/// Whether a folder holds an adapter rather than a model.
#[must_use]
pub fn is_adapter(dir: &Path) -> bool {
    dir.join(CONFIG).is_file()
}

/// `base` with the adapter of a PEFT folder, in the precision of `base`.
///
/// # Errors
/// As [`adapter_shape`]; `Error::MissingFile` without safetensors, and `Error::Config` for tensors that do not fit the base; those of
/// reading safetensors.
pub fn load_adapter(base: &Decoder, dir: &Path) -> Result<Decoder> {
    let config = adapter_config(dir)?;
    let lora = described(&config, &modules(base.specs()), dir)?;
    let path = dir.join(WEIGHTS);
    if !path.is_file() {
        return Err(Error::MissingFile {
            dir: dir.to_owned(),
            file: WEIGHTS.into(),
            hint: "only safetensors adapters are supported; convert other formats with PEFT's save_pretrained"
                .into(),
        });
    }
    let file = WeightFile::open(path)?;
    let adapted = base.with_adapters(lora, |_, spec| read(&file, spec, base, &config))?;
    let extra: Vec<String> = file.names().filter(|name| !has(&adapted, name)).collect();
    match extra.iter().min() {
        Some(first) => {
            let how = "not defined by its target_modules in this model";
            let how = format!("{} tensors are {how}; first: {first}", extra.len());
            Err(unfit(&file, &config, &how))
        }
        None => Ok(adapted),
    }
}

/// The settings of the adapter in a folder, for a base model of this architecture; its weights are not read.
///
/// # Errors
/// `Error::NoFolder`, `Error::MissingFile` without an `adapter_config.json`, `Error::Io`, and `Error::Config` for a setting that is not
/// supported.
pub fn adapter_shape(arch: &Arch, dir: &Path) -> Result<LoraConfig> {
    let specs: Vec<ParamSpec> = chain(arch)
        .into_iter()
        .flat_map(|unit| unit_specs(arch, unit))
        .collect();
    described(&adapter_config(dir)?, &modules(specs.iter()), dir)
}

fn described(
    config: &Map<String, Value>,
    modules: &[(String, TargetModule)],
    dir: &Path,
) -> Result<LoraConfig> {
    parse(config, modules).map_err(|detail| Error::Config {
        path: dir.join(CONFIG),
        detail,
    })
}

/// Names of the modules that can have an adapter.
fn modules<'a>(base: impl Iterator<Item = &'a ParamSpec>) -> Vec<(String, TargetModule)> {
    let module = |spec: &ParamSpec| {
        let target = TargetModule::of(spec.slot)?;
        Some((spec.name.strip_suffix(".weight")?.to_owned(), target))
    };
    base.filter_map(module).collect()
}

fn has(decoder: &Decoder, name: &str) -> bool {
    decoder
        .specs()
        .any(|spec| spec.slot.is_adapter() && spec.name == name)
}

fn read(
    file: &WeightFile,
    spec: &ParamSpec,
    base: &Decoder,
    config: &Map<String, Value>,
) -> Result<Tensor<2>> {
    let Some(info) = file.info(&spec.name) else {
        let how = format!("tensor {} is missing", spec.name);
        return Err(unfit(file, config, &how));
    };
    if info.shape != spec.shape {
        let ParamSpec { name, shape, .. } = spec;
        let how = format!(
            "tensor {name} has shape {:?}, expected {shape:?}",
            info.shape
        );
        return Err(unfit(file, config, &how));
    }
    let values = file.values(spec, info)?;
    let precision = base.arch().precision;
    Ok(precision.matrix(values, spec.rows_cols(), base.device()))
}

/// The error for an adapter that does not fit the base model.
fn unfit(file: &WeightFile, config: &Map<String, Value>, how: &str) -> Error {
    let base = config
        .get("base_model_name_or_path")
        .and_then(Value::as_str);
    Error::Config {
        path: file.path().to_owned(),
        detail: format!(
            "{how}; the adapter was made for the base model {:?}",
            base.unwrap_or("(not named)")
        ),
    }
}

fn adapter_config(dir: &Path) -> Result<Map<String, Value>> {
    if !dir.is_dir() {
        return Err(Error::NoFolder {
            dir: dir.to_owned(),
        });
    }
    read_object(dir, CONFIG)?.ok_or_else(|| Error::MissingFile {
        dir: dir.to_owned(),
        file: CONFIG.into(),
        hint: "is it a PEFT adapter folder?".into(),
    })
}

/// Reads PEFT's config. Options that would compute something else are refused by name.
fn parse(
    config: &Map<String, Value>,
    modules: &[(String, TargetModule)],
) -> Result<LoraConfig, String> {
    let kind = config.get("peft_type").and_then(Value::as_str);
    if kind != Some("LORA") {
        return Err(format!(
            "`peft_type` must be \"LORA\", found {}",
            shown(config, "peft_type")
        ));
    }
    for (key, value) in config {
        let known = READ.contains(&key.as_str()) || IGNORED.contains(&key.as_str());
        if !known && !is_off(value) {
            return Err(format!(
                "`{key}` is {value}, which is not supported; only plain LoRA on the projections is"
            ));
        }
    }
    let start = config.get("init_lora_weights").unwrap_or(&Value::Null);
    if start
        .as_str()
        .is_some_and(|name| !PLAIN_STARTS.contains(&name))
    {
        return Err(format!(
            "`init_lora_weights` is {start}: such adapters require a modified base model; convert them with PEFT's \
             path_initial_model_for_weight_conversion"
        ));
    }
    let number = |key: &str, default: f64| match config.get(key) {
        None => Ok(default),
        Some(value) => value
            .as_f64()
            .ok_or_else(|| format!("`{key}` must be a number, found {value}")),
    };
    let rank = config.get("r").and_then(Value::as_u64);
    let lora = LoraConfig {
        rank: rank.ok_or_else(|| format!("`r` must be an integer, found {}", shown(config, "r")))?
            as usize,
        alpha: number("lora_alpha", 8.0)?,
        use_rslora: config
            .get("use_rslora")
            .and_then(Value::as_bool)
            .unwrap_or(false),
        dropout: number("lora_dropout", 0.0)?,
        target_modules: targets(config, modules)?,
    };
    lora.check().map(|()| lora)
}

fn targets(
    config: &Map<String, Value>,
    modules: &[(String, TargetModule)],
) -> Result<Vec<TargetModule>, String> {
    let wrong = || {
        format!(
            "`target_modules` must be a list of module names or \"all-linear\", found {}",
            shown(config, "target_modules")
        )
    };
    match config.get("target_modules") {
        Some(Value::String(all)) if all == "all-linear" => {
            let has = |target: &TargetModule| modules.iter().any(|(_, own)| own == target);
            Ok(TargetModule::all().into_iter().filter(has).collect())
        }
        Some(Value::Array(names)) => {
            let names: Option<Vec<&str>> = names.iter().map(Value::as_str).collect();
            covered(&names.ok_or_else(wrong)?, modules)
                .map_err(|e| format!("`target_modules`: {e}"))
        }
        _ => Err(wrong()),
    }
}

/// The target modules that a list of names covers. As in PEFT, a name stands for the modules with that name or with a name that ends
/// in a point and that name; PEFT saves `all-linear` as such a list.
fn covered(
    names: &[&str],
    modules: &[(String, TargetModule)],
) -> Result<Vec<TargetModule>, String> {
    let fits = |module: &str, name: &str| {
        let before = module.strip_suffix(name);
        before.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    };
    let any = |name: &str| modules.iter().any(|(module, _)| fits(module, name));
    let unknown: Vec<&str> = names.iter().copied().filter(|name| !any(name)).collect();
    TargetModule::parse(&unknown)?;
    let mut targets = Vec::new();
    for target in TargetModule::all() {
        let own = modules.iter().filter(|(_, t)| *t == target);
        let (with, without): (Vec<_>, Vec<_>) =
            own.partition(|(module, _)| names.iter().any(|name| fits(module, name)));
        match (with.len(), without.len()) {
            (0, _) => {}
            (_, 0) => targets.push(target),
            (some, others) => {
                return Err(format!(
                    "{} has an adapter in {some} of {} layers; adapters must be in all layers",
                    target.module(),
                    some + others
                ));
            }
        }
    }
    Ok(targets)
}

/// Whether an option is at a value that turns it off.
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
    config
        .get(key)
        .map_or_else(|| "nothing".into(), Value::to_string)
}

/// Writes the adapters of a decoder as PEFT's `save_pretrained` does, in f32, into `dir`, which must exist. `base_model` is the
/// config's `base_model_name_or_path`. Panics for a decoder without adapters.
///
/// # Errors
/// `Error::Io` where a file cannot be written, `Error::Device` and `Error::OutOfMemory` where the device fails to hand over matrices.
pub fn save_adapter(decoder: &Decoder, base_model: &str, dir: &Path) -> Result<()> {
    let Some(lora) = decoder.lora() else {
        unreachable!("a model without adapters is exported whole");
    };
    let specs = decoder.specs().enumerate();
    let tensors = specs.filter(|(_, spec)| spec.slot.is_adapter());
    let tensors = tensors.map(|(index, spec)| {
        let read = move || Ok(decoder.param(index).download()?.to_f32());
        (spec.name.clone(), LazyTensor::f32(&spec.shape, read))
    });
    write_pt(&dir.join(WEIGHTS), tensors.collect())?;
    let modules: Vec<&str> = lora.target_modules.iter().map(|t| t.module()).collect();
    // PEFT writes whole numbers without a point
    let alpha = if lora.alpha.fract() == 0.0 {
        json!(lora.alpha as i64)
    } else {
        json!(lora.alpha)
    };
    let config = json!({
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": alpha,
        "lora_dropout": lora.dropout,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": modules,
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": lora.use_rslora,
    });
    write_json(&dir.join(CONFIG), &config)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(changes: Value) -> Result<LoraConfig, String> {
        let mut config = json!({
            "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none",
            "use_dora": false, "rank_pattern": {}, "modules_to_save": null, "megatron_core": "megatron.core"
        });
        let config = config.as_object_mut().unwrap();
        if let Value::Object(changes) = changes {
            config.extend(changes);
        }
        let modules = (0..2).flat_map(|layer| {
            let named = |target: TargetModule, half: &str| {
                (
                    format!("model.layers.{layer}.{half}.{}", target.module()),
                    target,
                )
            };
            [
                named(TargetModule::Q, "self_attn"),
                named(TargetModule::Up, "mlp"),
            ]
        });
        parse(config, &modules.collect::<Vec<_>>())
    }

    #[test]
    fn names_stand_for_the_modules_that_end_in_them() {
        let targets =
            |names: Value| with(json!({ "target_modules": names })).map(|l| l.target_modules);
        let all = [
            "model.layers.0.mlp.up_proj",
            "layers.1.mlp.up_proj",
            "self_attn.q_proj",
        ];
        assert_eq!(
            targets(json!(all)),
            Ok(vec![TargetModule::Q, TargetModule::Up])
        );
        let message = targets(json!([all[0], "q_proj"])).unwrap_err();
        assert!(
            message.contains("up_proj has an adapter in 1 of 2 layers"),
            "{message}"
        );
        assert!(
            targets(json!(["proj"]))
                .unwrap_err()
                .contains("unknown module \"proj\"")
        );
    }

    #[test]
    fn a_plain_lora_config_is_read_under_pefts_names() {
        let lora = with(json!({"lora_dropout": 0.05, "use_rslora": true})).unwrap();
        let expected = LoraConfig {
            rank: 4,
            alpha: 8.0,
            use_rslora: true,
            dropout: 0.05,
            target_modules: vec![TargetModule::Q],
        };
        assert_eq!(lora, expected);
        let all = with(json!({"target_modules": "all-linear"})).unwrap();
        assert_eq!(all.target_modules, [TargetModule::Q, TargetModule::Up]);
        let none = with(json!({"target_modules": []})).unwrap_err();
        assert!(none.contains("is empty"), "{none}");
    }

    #[test]
    fn options_that_compute_something_else_are_refused_by_name() {
        for (changes, part) in [
            (json!({"use_dora": true}), "`use_dora` is true"),
            (
                json!({"modules_to_save": ["lm_head"]}),
                "`modules_to_save` is [\"lm_head\"]",
            ),
            (json!({"bias": "all"}), "`bias` is \"all\""),
            (json!({"rank_pattern": {"q_proj": 8}}), "`rank_pattern`"),
            (json!({"layers_to_transform": [0]}), "`layers_to_transform`"),
            (json!({"some_later_option": 3}), "`some_later_option` is 3"),
            (
                json!({"init_lora_weights": "pissa"}),
                "`init_lora_weights` is \"pissa\"",
            ),
            (json!({"peft_type": "IA3"}), "found \"IA3\""),
            (json!({"target_modules": ".*_proj"}), "list of module names"),
            (
                json!({"target_modules": ["embed_tokens"]}),
                "unknown module \"embed_tokens\"",
            ),
            (json!({"r": 0}), "rank must be at least 1"),
            (json!({"r": "x"}), "`r` must be an integer, found \"x\""),
            (json!({"lora_dropout": 1.0}), "dropout must be"),
        ] {
            let message = with(changes).unwrap_err();
            assert!(message.contains(part), "{part:?} is not in: {message}");
        }
    }
}
