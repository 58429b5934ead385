//! PEFT adapter folders (`adapter_config.json` and `adapter_model.safetensors`): reading and writing.

mod config;

use super::json::{read_object, write_json};
use super::stream::{LazyTensor, write_pt};
use super::weights::WeightFile;
use super::whole_model::WholeModel;
use crate::adapter::LoraConfig;
use crate::unit::{ParamSpec, chain, unit_specs};
use crate::{Arch, Decoder, Error, Result};
use burn::tensor::Tensor;
use config::AdapterTargets;
use firebrick_backends::PrecisionExt;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::path::Path;

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// True if a folder holds an adapter rather than a model.
pub fn is_adapter(dir: &Path) -> bool {
    dir.join(CONFIG).is_file()
}

/// `base` with the adapter of a PEFT folder, in the precision of `base`.
///
/// # Errors
/// As [`adapter_shape`]; `Error::MissingFile` without safetensors, and `Error::Config` for tensors that do not fit the
/// base; those of reading safetensors.
pub fn load_adapter(base: &Decoder, dir: &Path) -> Result<Decoder> {
    let config = adapter_config(dir)?;
    let lora = described(&config, &AdapterTargets::from_specs(base.whole_model_specs()), dir)?;
    if !dir.join(WEIGHTS).is_file() {
        return Err(Error::MissingFile {
            dir: dir.to_owned(),
            file: WEIGHTS.into(),
            hint: "only safetensors adapters are supported; convert other formats with PEFT's save_pretrained".into(),
        });
    }
    let file = WeightFile::open(dir, WEIGHTS)?;
    let adapted = base.with_adapters(lora, |_, spec| read(&file, spec, base, &config))?;
    let adapters = adapted.whole_model_specs().filter(|spec| spec.slot.is_adapter());
    let wanted: BTreeSet<String> = adapters.flat_map(ParamSpec::tensors).map(|part| part.name).collect();
    let extra: Vec<String> = file.names().filter(|name| !wanted.contains(name)).collect();
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
/// `Error::NoFolder`, `Error::MissingFile` without an `adapter_config.json`, `Error::Io`, and `Error::Config` for a
/// setting that is not supported.
pub fn adapter_shape(arch: &Arch, dir: &Path) -> Result<LoraConfig> {
    let specs: Vec<ParamSpec> = chain(arch).into_iter().flat_map(|unit| unit_specs(arch, unit)).collect();
    described(&adapter_config(dir)?, &AdapterTargets::from_specs(specs.iter()), dir)
}

fn described(config: &Map<String, Value>, known: &AdapterTargets, dir: &Path) -> Result<LoraConfig> {
    config::parse(config, known).map_err(|detail| Error::Config { path: dir.join(CONFIG), detail })
}

fn read(file: &WeightFile, spec: &ParamSpec, base: &Decoder, config: &Map<String, Value>) -> Result<Tensor<2>> {
    let mut values = Vec::new();
    for part in spec.tensors() {
        let Some(info) = file.info(&part.name) else {
            let how = format!("tensor {} is missing", part.name);
            return Err(unfit(file, config, &how));
        };
        if info.shape != part.shape {
            let ParamSpec { name, shape, .. } = part;
            let how = format!("tensor {name} has shape {:?}, expected {shape:?}", info.shape);
            return Err(unfit(file, config, &how));
        }
        values.extend(file.values(&part, info)?);
    }
    spec.into_memory(&mut values);
    Ok(base.arch().precision.matrix(values, spec.rows_cols(), base.device()))
}

/// The error for an adapter that does not fit the base model.
fn unfit(file: &WeightFile, config: &Map<String, Value>, how: &str) -> Error {
    let base = config.get("base_model_name_or_path").and_then(Value::as_str);
    Error::Config {
        path: file.path.clone(),
        detail: format!("{how}; the adapter was made for the base model {:?}", base.unwrap_or("(not named)")),
    }
}

fn adapter_config(dir: &Path) -> Result<Map<String, Value>> {
    if !dir.is_dir() {
        return Err(Error::NoFolder { dir: dir.to_owned() });
    }
    read_object(dir, CONFIG)?.ok_or_else(|| Error::MissingFile {
        dir: dir.to_owned(),
        file: CONFIG.into(),
        hint: "is it a PEFT adapter folder?".into(),
    })
}

/// Writes the adapters of a decoder as PEFT's `save_pretrained` does, in f32, into `dir`, which must exist. Those of
/// experts that are modules are written as PEFT has them with transformers 4, which it reads with transformers 5 too.
/// `base_model` is the config's `base_model_name_or_path`. Panics for a decoder without adapters.
///
/// # Errors
/// `Error::Io` where a file cannot be written; those of [`WholeModel::rows`].
pub fn save_adapter(model: &dyn WholeModel, base_model: &str, dir: &Path) -> Result<()> {
    let decoder = model.decoder();
    let Some(lora) = decoder.lora() else {
        unreachable!("a model without adapters is exported whole");
    };
    let adapters = decoder.whole_model_specs().enumerate().filter(|(_, spec)| spec.slot.is_adapter());
    let tensors = adapters.flat_map(|(index, spec)| parts(model, index, spec));
    write_pt(&dir.join(WEIGHTS), tensors.collect())?;
    let (modules, parameters) = (lora.modules(decoder.whole_arch()), lora.parameters(decoder.whole_arch()));
    // PEFT refuses dropout beside parameters, and turns experts' modules into them; it is no part of what an adapter
    // computes
    let dropout = if lora.has_experts() { 0.0 } else { lora.dropout };
    // PEFT writes whole numbers without a point
    let alpha = if lora.alpha.fract() == 0.0 { json!(lora.alpha as i64) } else { json!(lora.alpha) };
    let config = json!({
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": modules,
        "target_parameters": (!parameters.is_empty()).then_some(parameters),
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": lora.use_rslora,
    });
    write_json(&dir.join(CONFIG), &config)
}

/// The tensors of an adapter's matrix in a folder, each read when it is written.
fn parts<'a>(model: &'a dyn WholeModel, index: usize, spec: &ParamSpec) -> Vec<(String, LazyTensor<'a>)> {
    let mut row = 0;
    let part = |part: ParamSpec| {
        let rows = row..row + part.rows_cols()[0];
        row = rows.end;
        let (name, shape) = (part.name.clone(), part.shape.clone());
        let read = move || {
            let param = model.rows(index, rows.clone())?;
            let mut values = param.rows(0..rows.len())?;
            part.into_checkpoint(&mut values);
            Ok(values)
        };
        (name, LazyTensor::f32(&shape, read))
    };
    spec.tensors().into_iter().map(part).collect()
}
