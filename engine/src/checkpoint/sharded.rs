//! State that ranks share out, in a checkpoint: a safetensors file a rank, which holds its shards flat, and an index
//! that says where which elements of which tensor are. A checkpoint of any number of ranks is read by any other number.
//!
//! `optimizer.index.json` for moments, `masters.index.json` for f32 masters:
//!
//! ```json
//! {"ranks": 2, "tensors": [{"name": "model.norm.weight.exp_avg", "shape": [1, 512], "range": [0, 256],
//!   "file": "optimizer-00001-of-00002.safetensors", "offset": 4096, "crc32c": 1234567890}, …]}
//! ```
//!
//! Where ranks share matrices, a shard has elements of a block of its tensor: `"block": [[0, 256], [0, 512]]` are its
//! rows and columns in the whole, and `range` counts elements of it.

use super::read_if_there;
use crate::world::World;
use crate::{Error, Result};
use firebrick_backends::host::{MappedFile, write_synced};
use firebrick_models::checkpoint::stream::{LazyTensor, write_tensors};
use firebrick_models::decoder::Block;
use firebrick_models::unit::ParamSpec;
use safetensors::SafeTensors;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// What to do about a checkpoint that is damaged.
pub(super) const EARLIER: &str = "delete its step folder and resume from the checkpoint before it";

/// The numbers of little-endian bytes.
pub(super) fn values(bytes: &[u8]) -> impl Iterator<Item = f32> {
    let (values, _) = bytes.as_chunks::<4>();
    values.iter().map(|&value| f32::from_le_bytes(value))
}

/// Where the elements of all tensors are.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Index {
    /// Ranks that wrote it, a file each.
    ranks: usize,
    tensors: Vec<Shard>,
}

/// Elements of a tensor in one of the files.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Shard {
    /// The tensor.
    name: String,
    /// The whole tensor's rows and columns.
    shape: [usize; 2],
    /// Rows and columns of the tensor that the range is one of, where it is not one of all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    block: Option<[[usize; 2]; 2]>,
    /// The elements that are here, in row-major order: from, and up to.
    range: [usize; 2],
    /// The file beside the index.
    file: String,
    /// Where they begin in it, in bytes; each is an f32 in little-endian order.
    offset: usize,
    /// CRC-32C of their bytes.
    crc32c: u32,
}

/// A tensor's shard that is to be written.
pub(super) struct Own<'a> {
    pub name: String,
    shape: [usize; 2],
    block: Option<Block>,
    range: Range<usize>,
    read: Box<dyn Fn() -> firebrick_models::Result<Vec<f32>> + 'a>,
}

impl<'a> Own<'a> {
    /// Elements `range` of a tensor that has the shape of a parameter, or of its block where the parameter is a part of
    /// one; `read` gives them. Rows of zeros behind a block are left out.
    pub fn new(
        name: String,
        spec: &ParamSpec,
        block: Option<Block>,
        range: Range<usize>,
        read: impl Fn() -> firebrick_models::Result<Vec<f32>> + 'a,
    ) -> Self {
        let real = block.as_ref().map_or(range.end, Block::numel);
        let range = range.start.min(real)..range.end.min(real);
        let len = range.len();
        Self {
            name,
            shape: block.as_ref().map_or(spec.rows_cols(), |own| own.whole),
            block,
            range,
            read: Box::new(move || {
                let mut values = read()?;
                values.truncate(len);
                Ok(values)
            }),
        }
    }

    /// The elements in a row.
    fn flat(self) -> LazyTensor<'a> {
        LazyTensor::f32(&[self.range.len()], self.read)
    }

    /// Name and values of a tensor of which all elements are there.
    pub fn whole(self) -> (String, LazyTensor<'a>) {
        (self.name, LazyTensor::f32(&self.shape, self.read))
    }
}

fn index_path(dir: &Path, stem: &str) -> PathBuf {
    dir.join(format!("{stem}.index.json"))
}

/// Name, shape, block and range of a shard.
type Place = (String, [usize; 2], Option<[[usize; 2]; 2]>, Range<usize>);

/// Writes one rank's shards into a folder that exists, and gives their entries of the index.
pub(super) fn write(dir: &Path, stem: &str, (rank, ranks): (usize, usize), own: Vec<Own<'_>>) -> Result<Vec<Shard>> {
    let file = format!("{stem}-{:05}-of-{ranks:05}.safetensors", rank + 1);
    let path = dir.join(&file);
    let (mut places, mut tensors) = (Vec::new(), Vec::new());
    for shard in own {
        let name = shard.name.clone();
        let block = shard.block.as_ref().map(|own| {
            let ends = |of: &Range<usize>| [of.start, of.end];
            own.part.each_ref().map(ends)
        });
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

/// Puts the entries of all ranks together, and writes the index where this rank writes the run's files.
pub(super) fn write_index(dir: &Path, stem: &str, own: &[Shard], world: &World) -> Result<()> {
    let path = index_path(dir, stem);
    let bad = |e: serde_json::Error| Error::io("write", &path)(e.into());
    let all = world.exchange(serde_json::to_vec(own).map_err(bad)?)?;
    if !world.writes() {
        return Ok(());
    }
    let mut tensors: Vec<Shard> = Vec::new();
    for rank in all {
        tensors.extend(serde_json::from_slice::<Vec<Shard>>(&rank).map_err(bad)?);
    }
    tensors.sort_by(|a, b| (&a.name, a.block, a.range).cmp(&(&b.name, b.block, b.range)));
    let index = Index { ranks: world.size(), tensors };
    let text = serde_json::to_string_pretty(&index).map_err(bad)?;
    write_synced(&path, text.as_bytes()).map_err(Error::io("write", &path))
}

/// The shards of a checkpoint, opened.
pub(super) struct ShardedTensors {
    path: PathBuf,
    by_name: BTreeMap<String, Vec<Shard>>,
    files: BTreeMap<String, MappedFile>,
}

impl ShardedTensors {
    /// Opens what an index names; `None` where there is no index.
    pub fn open(dir: &Path, stem: &str) -> Result<Option<Self>> {
        let path = index_path(dir, stem);
        let Some(text) = read_if_there(&path)? else { return Ok(None) };
        let index: Index = serde_json::from_slice(&text)
            .map_err(|e| Error::Resume { path: path.clone(), detail: format!("{e}; {EARLIER}") })?;
        let mut this = Self { path, by_name: BTreeMap::new(), files: BTreeMap::new() };
        for shard in index.tensors {
            // a name with a folder in it would lead out of the checkpoint
            if shard.file.contains(['/', '\\']) {
                return Err(this.damaged(&format!("{} is not one of its files", shard.file)));
            }
            if !this.files.contains_key(&shard.file) {
                let path = dir.join(&shard.file);
                let file = MappedFile::open(&path).map_err(Error::io("read", &path))?;
                this.files.insert(shard.file.clone(), file);
            }
            let own = this.by_name.entry(shard.name.clone()).or_default();
            own.push(shard);
        }
        Ok(Some(this))
    }

    pub fn damaged(&self, what: &str) -> Error {
        Error::Resume { path: self.path.clone(), detail: format!("{what}; {EARLIER}") }
    }

    /// Some elements of a tensor, from however many shards they lie in; `None` where there is no such tensor.
    pub fn read(&self, name: &str, shape: [usize; 2], range: Range<usize>) -> Result<Option<Vec<f32>>> {
        let Some(shards) = self.by_name.get(name) else {
            return Ok(None);
        };
        if shards.iter().any(|shard| shard.block.is_some()) {
            let whole = self.of_blocks(name, shape, shards)?;
            return Ok(Some(whole[range].to_vec()));
        }
        let mut found = Vec::with_capacity(range.len());
        for shard in shards {
            if shard.shape != shape {
                return Err(self.damaged(&format!("tensor {name} has the shape {:?}, expected {shape:?}", shard.shape)));
            }
            let [start, end] = shard.range;
            let next = range.start + found.len();
            // in the order of their elements
            if start <= next && next < end.min(range.end) {
                let all = self.bytes(shard)?;
                let own = next - start..end.min(range.end) - start;
                found.extend(values(&all[4 * own.start..4 * own.end]));
            }
        }
        if found.len() < range.len() {
            return Err(
                self.damaged(&format!("tensor {name} lacks the elements from {} on", range.start + found.len()))
            );
        }
        Ok(Some(found))
    }

    /// A tensor that blocks make up.
    fn of_blocks(&self, name: &str, shape: [usize; 2], shards: &[Shard]) -> Result<Vec<f32>> {
        let mut whole = vec![None; shape[0] * shape[1]];
        for shard in shards {
            if shard.shape != shape {
                return Err(self.damaged(&format!("tensor {name} has the shape {:?}, expected {shape:?}", shard.shape)));
            }
            let [rows, columns] = shard.block.unwrap_or([[0, shape[0]], [0, shape[1]]]);
            let width = columns[1].saturating_sub(columns[0]);
            let numel = rows[1].saturating_sub(rows[0]) * width;
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
        let found = whole.iter().flatten().count();
        if found != whole.len() {
            return Err(self.damaged(&format!("tensor {name} has {} elements, and its blocks {found}", whole.len())));
        }
        Ok(whole.into_iter().flatten().collect())
    }

    /// The bytes of a shard, which have to be those that were written.
    fn bytes(&self, shard: &Shard) -> Result<&[u8]> {
        let [start, end] = shard.range;
        let len = 4 * end.saturating_sub(start);
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
