//! Safetensors files written tensor by tensor: at most one is in memory beside the model.

use crate::{Error, Result};
use firebrick_backends::heartbeat::beat;
use safetensors::tensor::{Dtype, View};
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::rc::Rc;

/// A tensor that is read when it is written.
pub struct LazyTensor<'a> {
    dtype: Dtype,
    shape: Vec<usize>,
    read: Box<dyn Fn() -> Result<Vec<u8>> + 'a>,
    failure: Rc<RefCell<Option<Error>>>,
}

impl std::fmt::Debug for LazyTensor<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LazyTensor({:?}, {:?})", self.dtype, self.shape)
    }
}

impl<'a> LazyTensor<'a> {
    /// A tensor of this shape; `read` gives its little-endian bytes.
    pub fn new(dtype: Dtype, shape: &[usize], read: impl Fn() -> Result<Vec<u8>> + 'a) -> Self {
        Self { dtype, shape: shape.to_vec(), read: Box::new(read), failure: Rc::default() }
    }

    /// An f32 tensor of this shape; `read` gives its values.
    pub fn f32(shape: &[usize], read: impl Fn() -> Result<Vec<f32>> + 'a) -> Self {
        Self::new(Dtype::F32, shape, move || Ok(read()?.iter().flat_map(|v| v.to_le_bytes()).collect()))
    }
}

impl View for LazyTensor<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        beat();
        // the trait cannot say that a read failed: zeros keep the file's layout until the error is reported
        let bytes = (self.read)().unwrap_or_else(|e| {
            self.failure.borrow_mut().get_or_insert(e);
            vec![0; self.data_len()]
        });
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

/// Writes a safetensors file with `metadata` in its header, and waits until the disk has it.
///
/// # Errors
/// `Error::Io` where the file cannot be written, `Error::Safetensors` for names or metadata that the format refuses,
/// and the error of a tensor that could not be read.
pub fn write_tensors(path: &Path, mut tensors: Vec<(String, LazyTensor<'_>)>, metadata: &[(&str, &str)]) -> Result<()> {
    let failure = Rc::default();
    for (_, tensor) in &mut tensors {
        tensor.failure = Rc::clone(&failure);
    }
    let metadata: HashMap<String, String> =
        metadata.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
    let metadata = (!metadata.is_empty()).then_some(metadata);
    safetensors::serialize_to_file(tensors, metadata, path).map_err(|e| match e {
        safetensors::SafeTensorError::IoError(e) => Error::io("write", path)(e),
        e => Error::Safetensors { path: path.to_owned(), detail: e.to_string() },
    })?;
    if let Some(e) = failure.borrow_mut().take() {
        return Err(e);
    }
    File::open(path).and_then(|file| file.sync_all()).map_err(Error::io("write", path))
}

/// Writes a safetensors file as transformers and PEFT read it.
pub(super) fn write_pt(path: &Path, tensors: Vec<(String, LazyTensor<'_>)>) -> Result<()> {
    // transformers refuses a file whose metadata does not name a framework
    write_tensors(path, tensors, &[("format", "pt")])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_that_cannot_be_read_fails_the_file_with_its_own_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights.safetensors");
        let good = LazyTensor::f32(&[2], || Ok(vec![1.0, 2.0]));
        let bad = LazyTensor::f32(&[2], || Err(Error::Device { doing: "moving weights", detail: "gone".into() }));
        let tensors = vec![("a".to_owned(), good), ("b".to_owned(), bad)];
        let message = write_tensors(&path, tensors, &[]).unwrap_err().to_string();
        assert!(message.contains("gone"), "{message}");
    }
}
