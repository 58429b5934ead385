//! f32 matrices of a checkpoint's trainer folder: in one safetensors file, or in a file a rank with an index.

use super::sharded::{EARLIER, ShardedTensors, values};
use crate::{Error, Result};
use firebrick_backends::host::MappedFile;
use firebrick_models::decoder::Block;
use firebrick_models::unit::ParamSpec;
use safetensors::{Dtype, SafeTensors};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Matrices, opened.
pub(super) enum SavedTensors {
    /// In one file.
    Whole {
        /// The file.
        path: PathBuf,
        /// Its bytes.
        file: MappedFile,
    },
    /// In a file a rank.
    Sharded(ShardedTensors),
}

/// The same, to be read one at a time.
pub(super) enum TensorReader<'a> {
    Whole { path: &'a Path, tensors: SafeTensors<'a> },
    Sharded(&'a ShardedTensors),
}

impl SavedTensors {
    /// Opens `STEM.safetensors`, or what `STEM.index.json` names; `None` where there is neither.
    pub fn find(dir: &Path, stem: &str) -> Result<Option<Self>> {
        if let Some(sharded) = ShardedTensors::open(dir, stem)? {
            return Ok(Some(Self::Sharded(sharded)));
        }
        let path = dir.join(format!("{stem}.safetensors"));
        if !path.is_file() {
            return Ok(None);
        }
        Ok(Some(Self::open(&path)?))
    }

    /// Opens one file.
    pub fn open(path: &Path) -> Result<Self> {
        let file = MappedFile::open(path).map_err(Error::io("read", path))?;
        Ok(Self::Whole { path: path.to_owned(), file })
    }

    /// Reads from them.
    pub fn with<T>(&self, work: impl FnOnce(&TensorReader<'_>) -> Result<T>) -> Result<T> {
        match self {
            Self::Sharded(sharded) => work(&TensorReader::Sharded(sharded)),
            Self::Whole { path, file } => {
                let tensors = SafeTensors::deserialize(file.bytes())
                    .map_err(|e| Error::Resume { path: path.clone(), detail: format!("{e}; {EARLIER}") })?;
                work(&TensorReader::Whole { path, tensors })
            }
        }
    }
}

impl TensorReader<'_> {
    /// An error that says what is wrong with the checkpoint.
    pub fn damaged(&self, what: &str) -> Error {
        match self {
            Self::Sharded(sharded) => sharded.damaged(what),
            Self::Whole { path, .. } => {
                Error::Resume { path: (*path).to_owned(), detail: format!("{what}; {EARLIER}") }
            }
        }
    }

    /// A tensor's values, `None` where there is no such tensor.
    ///
    /// # Errors
    /// `Error::Resume` for a tensor of another shape or type; `Error::Io` where a file of shards cannot be read.
    pub fn read(&self, name: &str, spec: &ParamSpec) -> Result<Option<Vec<f32>>> {
        self.read_range(name, spec, 0..spec.numel())
    }

    /// Some of a tensor's values, counted in row-major order.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_range(&self, name: &str, spec: &ParamSpec, range: Range<usize>) -> Result<Option<Vec<f32>>> {
        self.read_shape(name, spec.rows_cols(), range)
    }

    /// The same of what a rank has of a parameter: `block` says where that lies in the tensor, if it is not all.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_own(
        &self,
        name: &str,
        spec: &ParamSpec,
        block: Option<&Block>,
        range: Range<usize>,
    ) -> Result<Option<Vec<f32>>> {
        let Some(block) = block else {
            return self.read_range(name, spec, range);
        };
        let [rows, columns] = block.whole;
        let whole = self.read_shape(name, block.whole, 0..rows * columns)?;
        Ok(whole.map(|whole| {
            let mut own = block.of(&whole);
            own.resize(spec.numel(), 0.0);
            own[range].to_vec()
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
