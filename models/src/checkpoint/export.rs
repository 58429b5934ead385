//! A decoder back into a Hugging Face checkpoint folder that transformers loads unchanged.

use super::{Checkpoint, StoredDtype};
use crate::unit::ParamSpec;
use crate::{Decoder, Error, Result, Tokenizer};
use burn::tensor::Tensor;
use half::{bf16, f16};
use safetensors::tensor::{Dtype, View};
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;

/// How a checkpoint is written.
#[derive(Clone, Copy, Debug)]
pub struct ExportOptions {
    /// Largest weight file, in bytes, where tensors allow it.
    pub max_shard_bytes: u64,
}

impl Default for ExportOptions {
    /// transformers' shard size: 5 GB.
    fn default() -> Self {
        Self {
            max_shard_bytes: 5_000_000_000,
        }
    }
}

/// One tensor in its stored element type.
struct Stored {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl View for Stored {
    fn dtype(&self) -> Dtype {
        self.dtype
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }
    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

fn store(spec: &ParamSpec, value: &Tensor<2>, dtype: StoredDtype) -> Result<Stored> {
    let values: Vec<f32> = value.try_to_vec_as().map_err(|e| Error::Device {
        doing: "reading weights for export",
        detail: e.to_string(),
    })?;
    let (dtype, bytes) = match dtype {
        StoredDtype::F32 => (
            Dtype::F32,
            values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        ),
        StoredDtype::BF16 => (
            Dtype::BF16,
            values
                .iter()
                .flat_map(|&v| bf16::from_f32(v).to_le_bytes())
                .collect(),
        ),
        StoredDtype::F16 => (
            Dtype::F16,
            values
                .iter()
                .flat_map(|&v| f16::from_f32(v).to_le_bytes())
                .collect(),
        ),
    };
    Ok(Stored {
        dtype,
        shape: spec.shape.clone(),
        bytes,
    })
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

/// Writes weights, configs and tokenizer into `dir`, which must exist: same names, config and element types as the source.
/// Every file is synced; making the folder appear whole is the caller's part (write aside, rename).
pub fn export(
    decoder: &Decoder,
    source: &Checkpoint,
    tokenizer: Option<&Tokenizer>,
    dir: &Path,
    options: ExportOptions,
) -> Result<()> {
    let params: Vec<(&ParamSpec, &Tensor<2>)> = decoder.params().collect();
    let width = |name: &str| match source.stored_dtype(name) {
        StoredDtype::F32 => 4,
        StoredDtype::BF16 | StoredDtype::F16 => 2,
    };
    let sizes: Vec<u64> = params
        .iter()
        .map(|(spec, _)| (spec.numel() * width(&spec.name)) as u64)
        .collect();
    let shards = shards(&sizes, options.max_shard_bytes);
    let mut weight_map = Map::new();
    for (i, shard) in shards.iter().enumerate() {
        let file = if shards.len() == 1 {
            "model.safetensors".to_owned()
        } else {
            format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len())
        };
        let tensors = params[shard.clone()]
            .iter()
            .map(|(spec, value)| {
                Ok((
                    spec.name.clone(),
                    store(spec, value, source.stored_dtype(&spec.name))?,
                ))
            })
            .collect::<Result<Vec<_>>>()?;
        weight_map.extend(tensors.iter().map(|(name, _)| (name.clone(), json!(file))));
        // transformers refuses a file whose metadata does not say which framework's layout it has
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let path = dir.join(&file);
        let bytes =
            safetensors::serialize(tensors, Some(metadata)).map_err(|e| Error::Safetensors {
                path: path.clone(),
                detail: e.to_string(),
            })?;
        write_synced(&path, &bytes)?;
    }
    if shards.len() > 1 {
        let total: u64 = sizes.iter().sum();
        let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        write_json(&dir.join("model.safetensors.index.json"), &index)?;
    }
    write_json(
        &dir.join("config.json"),
        &Value::Object(source.config.clone()),
    )?;
    if let Some(generation) = &source.generation {
        write_json(
            &dir.join("generation_config.json"),
            &Value::Object(generation.clone()),
        )?;
    }
    tokenizer.map_or(Ok(()), |t| t.save(dir))
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let mut text = format!("{value:#}");
    text.push('\n');
    write_synced(path, text.as_bytes())
}

fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(Error::io("write", path))
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
