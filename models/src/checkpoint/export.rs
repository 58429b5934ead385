//! A decoder back into a Hugging Face checkpoint folder that transformers loads unchanged.

use super::Checkpoint;
use super::json::write_json;
use super::stream::{LazyTensor, write_pt};
use super::tensor_names::nested_name;
use super::weights::{StoredDtype, outer_tensor_bytes, outer_tensors};
use super::whole_model::WholeModel;
use crate::unit::{ParamSpec, Slot};
use crate::{Decoder, Result, Tokenizer};
use half::{bf16, f16};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Settings of an export.
#[derive(Clone, Copy, Debug)]
pub struct ExportOptions {
    /// Largest weight file, in bytes, where tensors allow it.
    pub max_shard_bytes: u64,
}

impl Default for ExportOptions {
    /// transformers' shard size: 5 GB.
    fn default() -> Self {
        Self { max_shard_bytes: 5_000_000_000 }
    }
}

/// A tensor of a checkpoint: some rows of a parameter.
struct Part {
    /// Flat index of the parameter.
    index: usize,
    /// The row that it begins at.
    row: usize,
    spec: ParamSpec,
}

/// The tensors of a decoder's checkpoint, in order. A value head next to the projection is no part of the language
/// model.
fn parts(decoder: &Decoder) -> Vec<Part> {
    let specs =
        decoder.whole_model_specs().enumerate().filter(|(_, spec)| !spec.slot.is_adapter() && spec.slot != Slot::Value);
    let split = |(index, spec): (usize, &ParamSpec)| {
        let mut row = 0;
        let tensors = spec.tensors().into_iter();
        let part = tensors.map(|spec| {
            let first = row;
            row += spec.rows_cols()[0];
            Part { index, row: first, spec }
        });
        part.collect::<Vec<_>>()
    };
    specs.flat_map(split).collect()
}

/// A tensor in its stored element type, read when it is written.
fn stored(model: &dyn WholeModel, Part { index, row, spec }: Part, dtype: StoredDtype) -> LazyTensor<'_> {
    let shape = spec.shape.clone();
    LazyTensor::new(dtype.on_disk(), &shape, move || {
        let rows = row..row + spec.rows_cols()[0];
        let read = |index, rows| model.rows(index, rows);
        let mut values = model.decoder().merged_rows(index, rows, read)?;
        spec.into_checkpoint(&mut values);
        Ok(match dtype {
            StoredDtype::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            StoredDtype::BF16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
            StoredDtype::F16 => values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
        })
    })
}

/// A tensor of an export.
struct Entry<'a> {
    name: String,
    bytes: u64,
    tensor: LazyTensor<'a>,
}

/// The tensors of an export: parameters by the names of their folder, then the tensors around the language model, as
/// they were read.
fn entries<'a>(model: &'a dyn WholeModel, source: &'a Checkpoint) -> Result<Vec<Entry<'a>>> {
    let parameters = parts(model.decoder()).into_iter().map(|part| {
        let spec = &part.spec;
        let dtype = source.stored_dtype(&spec.name);
        let width = dtype.on_disk().bitsize() / 8;
        Entry {
            name: match &source.outer_config {
                Some(_) => nested_name(&spec.name),
                None => spec.name.clone(),
            },
            bytes: (spec.numel() * width) as u64,
            tensor: stored(model, part, dtype),
        }
    });
    let mut entries: Vec<Entry<'_>> = parameters.collect();
    if source.outer_config.is_some() {
        entries.extend(outer_tensors(&source.dir)?.into_iter().map(|tensor| {
            let name = tensor.name.clone();
            let read = move || outer_tensor_bytes(&source.dir, &name);
            Entry { name: tensor.name, bytes: tensor.bytes, tensor: LazyTensor::new(tensor.dtype, &tensor.shape, read) }
        }));
    }
    Ok(entries)
}

/// Groups parameters, in order, into files of at most `limit` bytes; a larger tensor gets a file of its own.
fn shards(sizes: &[u64], limit: u64) -> Vec<std::ops::Range<usize>> {
    let mut shards = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (i, size) in sizes.iter().enumerate() {
        if i > start && bytes + size > limit {
            shards.push(start..i);
            (start, bytes) = (i, 0);
        }
        bytes += size;
    }
    shards.push(start..sizes.len());
    shards
}

/// Writes weights, configs and tokenizer into `dir`, which must exist: same names, config and element types as the
/// source. Adapters are merged into their matrices. Every file is synced; making the folder appear whole is the
/// caller's part (write aside, rename).
///
/// # Errors
/// `Error::Io` where a file cannot be written, those of [`WholeModel::rows`]; of a
/// model whose other parts are written again, those of reading its folder.
pub fn export(
    model: &dyn WholeModel,
    source: &Checkpoint,
    tokenizer: Option<&Tokenizer>,
    dir: &Path,
    options: ExportOptions,
) -> Result<()> {
    let entries = entries(model, source)?;
    let sizes: Vec<u64> = entries.iter().map(|entry| entry.bytes).collect();
    let shards = shards(&sizes, options.max_shard_bytes);
    let mut weight_map = Map::new();
    let mut entries = entries.into_iter();
    for (i, shard) in shards.iter().enumerate() {
        let file = if shards.len() == 1 {
            "model.safetensors".to_owned()
        } else {
            format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len())
        };
        let shard = entries.by_ref().take(shard.len());
        let tensors: Vec<(String, LazyTensor<'_>)> = shard.map(|entry| (entry.name, entry.tensor)).collect();
        weight_map.extend(tensors.iter().map(|(name, _)| (name.clone(), json!(file))));
        write_pt(&dir.join(&file), tensors)?;
    }
    if shards.len() > 1 {
        let total: u64 = sizes.iter().sum();
        let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        write_json(&dir.join("model.safetensors.index.json"), &index)?;
    }
    let config = source.outer_config.as_ref().unwrap_or(&source.config);
    write_json(&dir.join("config.json"), &Value::Object(config.clone()))?;
    if let Some(generation) = &source.generation {
        write_json(&dir.join("generation_config.json"), &Value::Object(generation.clone()))?;
    }
    tokenizer.map_or(Ok(()), |t| t.save(dir))
}

#[cfg(test)]
mod tests {
    use super::shards;

    #[test]
    fn shards_keep_the_order_and_stay_under_the_limit_where_tensors_allow_it() {
        assert_eq!(shards(&[4, 4, 4], 8), vec![0..2, 2..3]);
        assert_eq!(shards(&[20, 1, 1], 8), vec![0..1, 1..3]);
        assert_eq!(shards(&[1, 20], 8), vec![0..1, 1..2]);
        assert_eq!(shards(&[1, 2, 3], 100), vec![0..3]);
    }
}
