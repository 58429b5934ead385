//! f32 matrices of a checkpoint's trainer folder: in one safetensors file, or in a file per rank with an index.

use super::sharded::{DAMAGED_ADVICE, ShardedTensors, values};
use crate::{Error, Result};
use firebrick_backends::host::MappedFile;
use firebrick_models::decoder::ShardSlice;
use firebrick_models::unit::ParamSpec;
use firebrick_spec::file::inside;
use safetensors::{Dtype, SafeTensors};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Open files of matrices.
pub(super) enum SavedTensors {
    /// One file.
    Whole { path: PathBuf, file: MappedFile },
    /// A file per rank.
    Sharded(ShardedTensors),
}

/// Parsed files of matrices.
pub(super) enum TensorReader<'a> {
    Whole { path: &'a Path, tensors: SafeTensors<'a> },
    Sharded(&'a ShardedTensors),
}

impl SavedTensors {
    /// Opens `STEM.safetensors`, or the files of `STEM.index.json`; `None` if neither exists.
    pub fn find(dir: &Path, stem: &str) -> Result<Option<Self>> {
        if let Some(sharded) = ShardedTensors::open(dir, stem)? {
            return Ok(Some(Self::Sharded(sharded)));
        }
        let name = format!("{stem}.safetensors");
        if dir.join(&name).is_file() { Self::open(dir, &name).map(Some) } else { Ok(None) }
    }

    /// Opens one file of a folder.
    pub fn open(dir: &Path, name: &str) -> Result<Self> {
        let path = dir.join(name);
        let file = inside(dir, name).and_then(|path| MappedFile::open(&path)).map_err(Error::io("read", &path))?;
        Ok(Self::Whole { path, file })
    }

    /// Runs `work` on the parsed files.
    pub fn with<T>(&self, work: impl FnOnce(&TensorReader<'_>) -> Result<T>) -> Result<T> {
        match self {
            Self::Sharded(sharded) => work(&TensorReader::Sharded(sharded)),
            Self::Whole { path, file } => {
                let tensors = SafeTensors::deserialize(file.bytes())
                    .map_err(|e| Error::Resume { path: path.clone(), detail: format!("{e}; {DAMAGED_ADVICE}") })?;
                work(&TensorReader::Whole { path, tensors })
            }
        }
    }
}

impl TensorReader<'_> {
    /// Error of a damaged checkpoint.
    pub fn damaged(&self, what: &str) -> Error {
        match self {
            Self::Sharded(sharded) => sharded.damaged(what),
            Self::Whole { path, .. } => {
                Error::Resume { path: (*path).to_owned(), detail: format!("{what}; {DAMAGED_ADVICE}") }
            }
        }
    }

    /// A range of a parameter's values in row-major order; `None` if there is no such tensor. `block` is the part of
    /// the tensor that is the parameter, if it is not all.
    ///
    /// # Errors
    /// `Error::Resume` for a tensor of another shape or type; `Error::Io` if a file of shards cannot be read.
    pub fn read(
        &self,
        name: &str,
        spec: &ParamSpec,
        block: Option<&ShardSlice>,
        range: Range<usize>,
    ) -> Result<Option<Vec<f32>>> {
        let Some(block) = block else {
            return self.read_shape(name, spec.rows_cols(), range);
        };
        let [rows, columns] = block.whole;
        let whole = self.read_shape(name, block.whole, 0..rows * columns)?;
        Ok(whole.map(|whole| {
            let mut values = block.slice_of(&whole);
            values.resize(spec.numel(), 0.0);
            values[range].to_vec()
        }))
    }

    fn read_shape(&self, name: &str, expected: [usize; 2], range: Range<usize>) -> Result<Option<Vec<f32>>> {
        let tensors = match self {
            Self::Sharded(sharded) => return sharded.read(name, expected, range),
            Self::Whole { tensors, .. } => tensors,
        };
        let Ok(view) = tensors.tensor(name) else {
            return Ok(None);
        };
        if view.shape() != expected || view.dtype() != Dtype::F32 {
            return Err(self.damaged(&format!(
                "tensor {name} is {:?} of shape {:?}, expected F32 of shape {expected:?}",
                view.dtype(),
                view.shape()
            )));
        }
        let bytes = &view.data()[4 * range.start..4 * range.end];
        Ok(Some(values(bytes).collect()))
    }
}
