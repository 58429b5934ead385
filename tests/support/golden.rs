//! Tensors of a golden safetensors file.

use std::path::Path;

use safetensors::{Dtype, SafeTensors};

/// What the names of a language model's parameters begin with where it is a part of another model, and where it is one
/// by itself: tests know the second.
const NESTED: [&str; 2] = ["model.language_model.", "model."];

/// A golden file in memory.
pub struct Golden {
    label: String,
    bytes: Vec<u8>,
}

impl Golden {
    /// Reads a file.
    pub fn open(path: &Path) -> Self {
        let label = path.display().to_string();
        let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{label}: {error}"));
        Self { label, bytes }
    }

    fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).unwrap_or_else(|e| panic!("{}: {e}", self.label))
    }

    /// Names of its tensors, sorted.
    pub fn names(&self) -> Vec<String> {
        let tensors = self.tensors();
        let names = tensors.names().into_iter();
        let mut names: Vec<String> = names.map(|n| n.replacen(NESTED[0], NESTED[1], 1)).collect();
        names.sort();
        names
    }

    fn bytes_of(&self, name: &str, dtype: Dtype) -> (Vec<usize>, Vec<u8>) {
        let tensors = self.tensors();
        let nested = name.replacen(NESTED[1], NESTED[0], 1);
        let view = tensors
            .tensor(name)
            .or_else(|_| tensors.tensor(&nested))
            .unwrap_or_else(|error| panic!("{}: {name}: {error}", self.label));
        assert_eq!(view.dtype(), dtype, "{}: {name}", self.label);
        (view.shape().to_vec(), view.data().to_vec())
    }

    /// An F32 tensor's shape and elements.
    pub fn shaped(&self, name: &str) -> (Vec<usize>, Vec<f64>) {
        let (shape, bytes) = self.bytes_of(name, Dtype::F32);
        let number = |b: &[u8]| f64::from(f32::from_le_bytes(b.try_into().expect("four bytes")));
        (shape, bytes.chunks_exact(4).map(number).collect())
    }

    /// An F32 tensor's elements.
    pub fn floats(&self, name: &str) -> Vec<f64> {
        self.shaped(name).1
    }

    fn shaped_ints(&self, name: &str) -> (Vec<usize>, Vec<i64>) {
        let (shape, bytes) = self.bytes_of(name, Dtype::I64);
        let number = |b: &[u8]| i64::from_le_bytes(b.try_into().expect("eight bytes"));
        (shape, bytes.chunks_exact(8).map(number).collect())
    }

    /// An I64 tensor's elements.
    pub fn ints(&self, name: &str) -> Vec<i64> {
        self.shaped_ints(name).1
    }

    /// The rows of an I64 matrix.
    pub fn int_rows(&self, name: &str) -> Vec<Vec<i64>> {
        let (shape, all) = self.shaped_ints(name);
        all.chunks(shape[1]).map(<[i64]>::to_vec).collect()
    }

    /// The rows of an F32 matrix.
    pub fn float_rows(&self, name: &str) -> Vec<Vec<f64>> {
        let (shape, all) = self.shaped(name);
        all.chunks(shape[1]).map(<[f64]>::to_vec).collect()
    }
}
