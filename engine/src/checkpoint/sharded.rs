//! Sharded state in a checkpoint: a safetensors file per rank with its flat shards, and an index of the elements of all
//! tensors. Any number of ranks reads a checkpoint of any other number.
//!
//! `optimizer.index.json` for moments, `masters.index.json` for f32 masters:
//!
//! ```json
//! {"ranks": 2, "tensors": [{"name": "model.norm.weight.exp_avg", "shape": [1, 512], "range": [0, 256],
//!   "file": "optimizer-00001-of-00002.safetensors", "offset": 4096, "crc32c": 1234567890}, …]}
//! ```
//!
//! With tensor parallelism, a shard has elements of a block of its tensor: `"block": [[0, 256], [0, 512]]` are its rows
//! and columns in the tensor, and `range` counts elements of the block.

use super::read_if_there;
use crate::world::World;
use crate::{Error, Result};
use firebrick_backends::host::{MappedFile, write_synced};
use firebrick_models::checkpoint::stream::{LazyTensor, write_tensors};
use firebrick_models::decoder::ShardSlice;
use firebrick_models::unit::ParamSpec;
use firebrick_spec::file::inside;
use safetensors::SafeTensors;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Advice on a damaged checkpoint.
pub(super) const DAMAGED_ADVICE: &str = "delete its step folder and resume from the checkpoint before it";

/// Values of little-endian bytes.
pub(super) fn values(bytes: &[u8]) -> impl Iterator<Item = f32> {
    let (values, _) = bytes.as_chunks::<4>();
    values.iter().map(|&value| f32::from_le_bytes(value))
}

/// Index of the elements of all tensors.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Index {
    /// Ranks that wrote it, a file each.
    ranks: usize,
    tensors: Vec<Shard>,
}

/// Elements of a tensor in one of the files.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Shard {
    /// Name of the tensor.
    name: String,
    /// Rows and columns of the tensor.
    shape: [usize; 2],
    /// Rows and columns of the block that the range counts in, if it is not the whole tensor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    block: Option<[[usize; 2]; 2]>,
    /// Start and end of the elements, in row-major order.
    range: [usize; 2],
    /// File next to the index.
    file: String,
    /// Offset in the file in bytes; elements are f32 in little-endian order.
    offset: usize,
    /// CRC-32C of the bytes.
    crc32c: u32,
}

/// A shard of a tensor to write.
pub(super) struct PendingShard<'a> {
    pub name: String,
    shape: [usize; 2],
    block: Option<ShardSlice>,
    range: Range<usize>,
    read: Box<dyn Fn() -> firebrick_models::Result<Vec<f32>> + 'a>,
}

impl<'a> PendingShard<'a> {
    /// Elements `range` of a parameter, which may be a block of a tensor; `read` returns them. Padding rows after a
    /// block are omitted.
    pub fn new(
        name: String,
        spec: &ParamSpec,
        block: Option<ShardSlice>,
        range: Range<usize>,
        read: impl Fn() -> firebrick_models::Result<Vec<f32>> + 'a,
    ) -> Self {
        let real = block.as_ref().map_or(range.end, ShardSlice::numel);
        let range = range.start.min(real)..range.end.min(real);
        let len = range.len();
        Self {
            name,
            shape: block.as_ref().map_or(spec.rows_cols(), |block| block.whole),
            block,
            range,
            read: Box::new(move || {
                let mut values = read()?;
                values.truncate(len);
                Ok(values)
            }),
        }
    }

    /// The elements as a vector.
    fn flat(self) -> LazyTensor<'a> {
        LazyTensor::f32(&[self.range.len()], self.read)
    }

    /// Name and values of a tensor whose elements are complete.
    pub fn whole(self) -> (String, LazyTensor<'a>) {
        (self.name, LazyTensor::f32(&self.shape, self.read))
    }
}

fn index_path(dir: &Path, stem: &str) -> PathBuf {
    dir.join(format!("{stem}.index.json"))
}

/// Name, shape, block and range of a shard.
type Place = (String, [usize; 2], Option<[[usize; 2]; 2]>, Range<usize>);

/// Writes one rank's shards into an existing folder, and returns their index entries.
pub(super) fn write(
    dir: &Path,
    stem: &str,
    (rank, ranks): (usize, usize),
    shards: Vec<PendingShard<'_>>,
) -> Result<Vec<Shard>> {
    let file = format!("{stem}-{:05}-of-{ranks:05}.safetensors", rank + 1);
    let path = dir.join(&file);
    let (mut places, mut tensors) = (Vec::new(), Vec::new());
    for shard in shards {
        let name = shard.name.clone();
        let block = shard.block.as_ref().map(|block| block.part.each_ref().map(|range| [range.start, range.end]));
        places.push((name.clone(), shard.shape, block, shard.range.clone()));
        tensors.push((name, shard.flat()));
    }
    write_tensors(&path, tensors, &[])?;
    let written = MappedFile::open(&path).map_err(Error::io("read", &path))?;
    let bytes = written.bytes();
    let damaged = |detail: String| Error::Resume { path: path.clone(), detail: format!("just written, and {detail}") };
    let read = SafeTensors::deserialize(bytes).map_err(|e| damaged(e.to_string()))?;
    let entry = |(name, shape, block, range): Place| {
        let view = read.tensor(&name).map_err(|e| damaged(e.to_string()))?;
        let data = view.data();
        Ok(Shard {
            offset: data.as_ptr().addr() - bytes.as_ptr().addr(),
            crc32c: crc32c::crc32c(data),
            name,
            shape,
            block,
            range: [range.start, range.end],
            file: file.clone(),
        })
    };
    places.into_iter().map(entry).collect()
}

/// Collects the index entries of all ranks, and writes the index on the rank that writes the run's files.
pub(super) fn write_index(dir: &Path, stem: &str, shards: &[Shard], world: &World) -> Result<()> {
    let path = index_path(dir, stem);
    let bad = |e: serde_json::Error| Error::io("write", &path)(e.into());
    let ranks = world.exchange(serde_json::to_vec(shards).map_err(bad)?)?;
    if !world.writes() {
        return Ok(());
    }
    let mut tensors: Vec<Shard> = Vec::new();
    for rank in ranks {
        tensors.extend(serde_json::from_slice::<Vec<Shard>>(&rank).map_err(bad)?);
    }
    tensors.sort_by(|a, b| (&a.name, a.block, a.range).cmp(&(&b.name, b.block, b.range)));
    let index = Index { ranks: world.size(), tensors };
    let text = serde_json::to_string_pretty(&index).map_err(bad)?;
    write_synced(&path, text.as_bytes()).map_err(Error::io("write", &path))
}

/// Open shards of a checkpoint.
pub(super) struct ShardedTensors {
    path: PathBuf,
    by_name: BTreeMap<String, Vec<Shard>>,
    files: BTreeMap<String, MappedFile>,
}

impl ShardedTensors {
    /// Opens the files of an index; `None` if there is no index.
    pub fn open(dir: &Path, stem: &str) -> Result<Option<Self>> {
        let path = index_path(dir, stem);
        let Some(text) = read_if_there(dir, &format!("{stem}.index.json"))? else { return Ok(None) };
        let index: Index = serde_json::from_slice(&text)
            .map_err(|e| Error::Resume { path: path.clone(), detail: format!("{e}; {DAMAGED_ADVICE}") })?;
        let mut this = Self { path, by_name: BTreeMap::new(), files: BTreeMap::new() };
        for shard in index.tensors {
            if !this.files.contains_key(&shard.file) {
                let path = dir.join(&shard.file);
                let file = inside(dir, &shard.file)
                    .and_then(|path| MappedFile::open(&path))
                    .map_err(Error::io("read", &path))?;
                this.files.insert(shard.file.clone(), file);
            }
            this.by_name.entry(shard.name.clone()).or_default().push(shard);
        }
        Ok(Some(this))
    }

    pub fn damaged(&self, what: &str) -> Error {
        Error::Resume { path: self.path.clone(), detail: format!("{what}; {DAMAGED_ADVICE}") }
    }

    /// A range of a tensor's elements, from any number of shards; `None` if there is no such tensor.
    pub fn read(&self, name: &str, shape: [usize; 2], range: Range<usize>) -> Result<Option<Vec<f32>>> {
        let Some(shards) = self.by_name.get(name) else {
            return Ok(None);
        };
        if shards.iter().any(|shard| shard.block.is_some()) {
            let whole = self.join_blocks(name, shape, shards)?;
            return Ok(Some(whole[range].to_vec()));
        }
        let mut elements = Vec::with_capacity(range.len());
        for shard in shards {
            if shard.shape != shape {
                return Err(self.damaged(&format!("tensor {name} has the shape {:?}, expected {shape:?}", shard.shape)));
            }
            let [start, end] = shard.range;
            let next = range.start + elements.len();
            // shards are in the order of their elements
            if start <= next && next < end.min(range.end) {
                let bytes = self.bytes(shard)?;
                elements.extend(values(&bytes[4 * (next - start)..4 * (end.min(range.end) - start)]));
            }
        }
        if elements.len() < range.len() {
            let next = range.start + elements.len();
            return Err(self.damaged(&format!("tensor {name} lacks the elements from {next} on")));
        }
        Ok(Some(elements))
    }

    /// A tensor joined from blocks.
    fn join_blocks(&self, name: &str, shape: [usize; 2], shards: &[Shard]) -> Result<Vec<f32>> {
        let mut whole = vec![None; shape[0] * shape[1]];
        for shard in shards {
            if shard.shape != shape {
                return Err(self.damaged(&format!("tensor {name} has the shape {:?}, expected {shape:?}", shard.shape)));
            }
            let [rows, columns] = shard.block.unwrap_or([[0, shape[0]], [0, shape[1]]]);
            let width = columns[1].saturating_sub(columns[0]);
            let numel = rows[1].saturating_sub(rows[0]).saturating_mul(width);
            let [start, end] = shard.range;
            if rows[1] > shape[0] || columns[1] > shape[1] || start > end || end > numel {
                return Err(self.damaged(&format!("a block of tensor {name} is outside its shape")));
            }
            for (element, value) in (start..end).zip(values(self.bytes(shard)?)) {
                let (row, column) = (rows[0] + element / width, columns[0] + element % width);
                let element = &mut whole[row * shape[1] + column];
                if element.replace(value).is_some() {
                    return Err(self.damaged(&format!("blocks of tensor {name} overlap")));
                }
            }
        }
        let count = whole.iter().flatten().count();
        if count != whole.len() {
            return Err(self.damaged(&format!("tensor {name} has {} elements, and its blocks {count}", whole.len())));
        }
        Ok(whole.into_iter().flatten().collect())
    }

    /// The bytes of a shard, checked against its CRC.
    fn bytes(&self, shard: &Shard) -> Result<&[u8]> {
        let [start, end] = shard.range;
        let len = end.saturating_sub(start).saturating_mul(4);
        let file = self.files.get(&shard.file);
        let bytes = file.and_then(|file| file.bytes().get(shard.offset..)?.get(..len));
        match bytes {
            Some(bytes) if crc32c::crc32c(bytes) == shard.crc32c => Ok(bytes),
            Some(_) => Err(self.damaged(&format!(
                "the elements {start} to {end} of {} in {} differ from the elements that were written",
                shard.name, shard.file
            ))),
            None => {
                Err(self
                    .damaged(&format!("{} ends before the elements {start} to {end} of {}", shard.file, shard.name)))
            }
        }
    }
}
